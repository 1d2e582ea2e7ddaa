"""The harmony format of gpt-oss: reasoning, calls and the answer apart, however the text is cut, and over HTTP."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.gateway.http import chat
from runtime.gateway.text.calls import Read
from runtime.gateway.text.harmony import ENDS, FINAL, HarmonyReader
from runtime.gateway.text.model import ResponseText, TextModel
from runtime.gateway.text.tools import format_of
from runtime.wire.messages import Constraint
from tests.http_server import END_TOKEN, MODEL, VOCAB, Served, byte_tokenizer, ids, serving
from tests.serving_client import ScriptEngine
from tests.unit.test_server_tools import WEATHER, pieces, raw, say

TOLD = tuple[str, str, list[tuple[str, str]]]  # reasoning, content, calls
ANALYSIS = "<|channel|>analysis<|message|>"
NEXT = "<|end|><|start|>assistant"
ARGUMENTS = '{"city": "S\\u00e3o <|x|> {"}'
CALL = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
CASES: dict[str, tuple[str, TOLD]] = {
    "an answer": (f"{FINAL}Hello.<|return|>", ("", "Hello.", [])),
    "reasoning and an answer": (f"{ANALYSIS}Hm. 2 < 3{NEXT}{FINAL}Two.", ("Hm. 2 < 3", "Two.", [])),
    "a call": (f"{ANALYSIS}Ask.{NEXT}{CALL}{ARGUMENTS}<|call|>", ("Ask.", "", [("weather", ARGUMENTS)])),
    "the recipient before the channel": (
        f"{ANALYSIS}A{NEXT} to=functions.weather<|channel|>commentary json<|message|>{ARGUMENTS}<|call|>",
        ("A", "", [("weather", ARGUMENTS)]),
    ),
    "the recipient first of all": (
        f" to=functions.weather<|channel|>commentary json<|message|>{ARGUMENTS}<|call|>",
        ("", "", [("weather", ARGUMENTS)]),
    ),
    "a preamble and two calls": (
        f"<|channel|>commentary<|message|>I look.{NEXT}{CALL}{{}}<|call|><|start|>assistant{CALL}{ARGUMENTS}",
        ("", "I look.", [("weather", "{}"), ("weather", ARGUMENTS)]),
    ),
    "a tool of the model's own": (
        f"<|channel|>analysis to=browser.search code<|message|>{{}}<|call|><|start|>assistant{FINAL}x",
        ("{}", "x", []),
    ),
    "no end between messages": (f"{ANALYSIS}a<|start|>assistant{FINAL}b", ("a", "b", [])),
    "no channel": ("Plain < text", ("", "Plain < text", [])),
    "no channel, though it looks like one": ("to be, or not: to=5", ("", "to be, or not: to=5", [])),
    "text after an end": (f"{FINAL}a<|end|>b", ("", "ab", [])),
    "an unknown channel": ("<|channel|>musing<|message|>m", ("", "m", [])),
    "no channel in a header": ("<|message|>m", ("", "m", [])),
    "a header without a message": (f"{ANALYSIS}a{NEXT}<|channel|>fin", ("a", "", [])),
    "a header that ends": (f"<|channel|>analysis<|end|>b{NEXT}{FINAL}c", ("", "bc", [])),
    "nothing": ("", ("", "", [])),
}


def told(reads: Iterable[Read]) -> TOLD:
    found = list(reads)
    content, calls = raw(found)
    return "".join(read.reasoning for read in found), content, calls


def read(parts: Iterable[str], *, calls: bool = True) -> Iterator[Read]:
    reader = HarmonyReader(calls=calls)
    yield from map(reader.push, parts)
    yield reader.finish()


@pytest.mark.parametrize(("text", "expected"), CASES.values(), ids=CASES)
@given(cuts=st.lists(st.integers(0, 400), max_size=12))
def test_messages_are_told_apart_however_the_text_is_cut(text: str, expected: TOLD, cuts: list[int]) -> None:
    assert told(read(pieces(text, cuts))) == expected
    assert told(read(text)) == expected  # a character at a time


@pytest.mark.parametrize(("text", "expected"), CASES.values(), ids=CASES)
def test_what_was_cut_off_is_the_beginning_of_what_there_is(text: str, expected: TOLD) -> None:
    """At every place outside a mark, which is one token."""
    inside = {place for mark in re.finditer(r"<\|\w+\|>", text) for place in range(mark.start() + 1, mark.end())}
    for end in sorted({*range(len(text))} - inside):
        reasoning, content, calls = told(read([text[:end]]))
        assert expected[0].startswith(reasoning) and len(calls) <= len(expected[2])
        # A recipient without a mark before it may be text.
        assert expected[1].startswith(content) or content == text[:end]
        for (name, arguments), (whole_name, whole) in zip(calls, expected[2], strict=False):
            assert name == whole_name and whole.startswith(arguments)


WORDS = [
    *("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>", "assistant"),
    *(
        "analysis",
        "commentary",
        "final",
        " to=functions.f",
        "to=",
        "functions.g",
        " ",
        "<",
        "<|",
        "|>",
        "{",
        '"',
        "json",
    ),
    *("é", "😀", "\n", FINAL, ANALYSIS, NEXT, CALL, ARGUMENTS),
]
ANY = st.lists(st.one_of(st.sampled_from(WORDS), st.text(max_size=3)), max_size=14)


@settings(max_examples=500)
@given(words=ANY, calls=st.booleans(), data=st.data())
def test_the_same_text_gives_the_same_messages_however_it_is_split(
    words: list[str], calls: bool, data: st.DataObject
) -> None:
    text = "".join(words)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=20))
    whole = told(read([text], calls=calls))
    assert told(read(pieces(text, cuts), calls=calls)) == whole
    assert told(read(text, calls=calls)) == whole
    assert calls or not whole[2]
    said = "".join([whole[0], whole[1], *(arguments for _, arguments in whole[2])])
    assert not any(mark in said for mark in ENDS)


@given(words=ANY, cuts=st.lists(st.integers(0, 400), max_size=12))
def test_the_same_tokens_give_the_same_messages_however_they_come(words: list[str], cuts: list[int]) -> None:
    """A step can end in the middle of a character and of a mark."""
    text, model = "".join(words), TextModel("digest", byte_tokenizer())
    response, tokens = ResponseText(model, skip_special=False), [byte for letter in text for byte in ids(letter)]
    texts = [response.push(step, None).text for step in pieces(tokens, cuts)]
    assert told(read([*texts, response.push([], "length").text])) == told(read([text]))


@given(st.lists(st.sampled_from([*"<|>channelto= mes{", "end", "<|chan", "to "]), max_size=20))
def test_text_without_marks_loses_nothing(words: list[str]) -> None:
    text = "".join(words)
    assert told(read(pieces(text, [3, 7]))) == ("", text, [])


def test_the_format_is_known_by_the_template() -> None:
    assert format_of("{% if tools %}{% endif %}<|start|>assistant<|channel|>final<|message|>") == "harmony"


# Over HTTP: the engine says what the script holds. Its end of a response is <|end|>, so messages end by <|start|> here.

TEMPLATE = (
    "{% if tools %}{{ tools[0].function.name }}{% endif %}[{{ reasoning_effort or 'medium' }}]"
    "{% for message in messages %}<|start|>{{ message.role }}<|message|>{{ message.content or message.thinking }}"
    "{% for call in message.tool_calls or [] %}<|channel|>commentary to=functions.{{ call.function.name }}<|message|>"
    "{{ call.function.arguments | tojson }}{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
ASK: Any = {"model": MODEL, "messages": [{"role": "user", "content": "Weather?"}], "temperature": 0}
SAID = f"{ANALYSIS}Think.<|start|>assistant{CALL}{ARGUMENTS}<|start|>assistant{FINAL}Done."


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    engine = ScriptEngine(ids("<|end|><|start|>assistant"), END_TOKEN, VOCAB, slots=4, max_tokens=2048)
    with serving(engine, template=TEMPLATE) as served:
        yield served


def test_an_answer_has_reasoning_a_call_and_content_apart_streamed_or_not(server: Served) -> None:
    say(server, SAID)
    body: Any = ASK | {"tools": [WEATHER]}
    whole = server.post("/v1/chat/completions", body).json()["choices"][0]
    said = whole["message"]
    assert (said["reasoning_content"], said["content"]) == ("Think.", "Done.")
    assert [call["function"] for call in said["tool_calls"]] == [{"name": "weather", "arguments": ARGUMENTS}]
    assert whole["finish_reason"] == "tool_calls"
    reasoning, content, arguments = "", "", ""
    for chunk in server.openai.chat.completions.create(**body, stream=True):
        delta: Any = chunk.choices[0].delta
        reasoning += getattr(delta, "reasoning_content", None) or ""
        content += delta.content or ""
        arguments += "".join(call.function.arguments for call in delta.tool_calls or [])
    assert (reasoning, content, arguments) == ("Think.", "Done.", ARGUMENTS)
    history = [*ASK["messages"], said, {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "9"}]
    assert server.post("/v1/chat/completions", body | {"messages": history}).status_code == 200


def test_without_tools_a_call_is_content(server: Served) -> None:
    say(server, SAID)
    said = server.post("/v1/chat/completions", ASK).json()["choices"][0]["message"]
    assert (said["reasoning_content"], said["content"]) == ("Think.", f"{ARGUMENTS}Done.")
    assert "tool_calls" not in said


def test_reasoning_before_a_call_is_sent_back_as_the_template_takes_it(server: Served) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [{"role": "assistant", "reasoning_content": "Think.", "tool_calls": [call]}]
    tokens = server.post("/tokenize", {"messages": messages}).json()["tokens"]
    assert "<|start|>assistant<|message|>Think.<|channel|>commentary to=functions.f" in server.service.text.decode(
        tokens
    )


def prompt_of(server: Served, **more: Any) -> str:
    answer = server.post("/v1/chat/completions", ASK | {"return_token_ids": True, "max_tokens": 1} | more)
    assert answer.status_code == 200, answer.text
    return server.service.text.decode(answer.json()["prompt_token_ids"])


def test_the_effort_reaches_the_template(server: Served) -> None:
    assert prompt_of(server).startswith("[medium]")
    assert prompt_of(server, reasoning_effort="high").startswith("[high]")
    assert prompt_of(server, reasoning_effort="low", chat_template_kwargs={"reasoning_effort": "high"})[:6] == "[high]"
    answer = server.post("/v1/chat/completions", ASK | {"reasoning_effort": "minimal"})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "reasoning_effort"
    assert "low, medium, high" in answer.json()["error"]["message"]


def test_an_answer_of_a_given_form_has_no_channels(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The header of the answer ends the prompt, so that a constraint decides every token."""
    monkeypatch.setattr(chat, "_constraint", lambda *_: Constraint("regex", "x"))

    async def accepted(*_: Any) -> None: ...

    monkeypatch.setattr(TextModel, "require_constraint", accepted)
    engine = server.engine
    assert isinstance(engine, ScriptEngine)
    monkeypatch.setattr(engine, "mark", ids(f"<|start|>assistant{FINAL}"))
    monkeypatch.setattr(chat, "choices_of", without_constraint)
    say(server, '{"a": 1}')
    answer = server.post("/v1/chat/completions", ASK | {"return_token_ids": True}).json()
    assert server.service.text.decode(answer["prompt_token_ids"]).endswith(f"<|start|>assistant{FINAL}")
    assert answer["choices"][0]["message"]["content"] == '{"a": 1}'
    spelled = f'{{"a": "<|call|>{ANALYSIS}b"}}'  # by other tokens: a constraint allows no special ones
    say(server, spelled)
    assert server.post("/v1/chat/completions", ASK).json()["choices"][0]["message"]["content"] == spelled
    say(server, '{"a": 1}')
    named = {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "weather"}}}
    said = server.post("/v1/chat/completions", ASK | named | {"include_stop_str_in_output": True}).json()
    (call,) = said["choices"][0]["message"]["tool_calls"]
    assert call["function"]["arguments"] == '{"a": 1}'  # without the mark that ended it


def without_constraint(*given: Any, **named: Any) -> Any:
    from runtime.gateway.http.requests import choices_of

    return choices_of(*given, **(named | {"constraint": None}))  # this engine has none; the script keeps to it


def test_responses_have_reasoning_as_an_item_of_its_own(server: Served) -> None:
    say(server, f"{ANALYSIS}Think.<|start|>assistant{FINAL}Done.")
    body = {"model": MODEL, "input": "Hi", "temperature": 0, "reasoning": {"effort": "high"}}
    whole = server.post("/v1/responses", body).json()
    assert [item["type"] for item in whole["output"]] == ["reasoning", "message"]
    assert [item["content"][0]["text"] for item in whole["output"]] == ["Think.", "Done."]
    assert 0 < whole["usage"]["output_tokens_details"]["reasoning_tokens"] < whole["usage"]["output_tokens"]
    with server.openai.responses.stream(model=MODEL, input="Hi", temperature=0) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert final.output_text == "Done." and [item.type for item in final.output] == ["reasoning", "message"]
    deltas = [json.loads(event.model_dump_json()) for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(delta["delta"] for delta in deltas) == "Think."


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_whose_format_is_text_is_told_apart_like_any_other(server: Served, stream: bool) -> None:
    """``text`` is no constraint, so the prompt does not end with the header of the answer."""
    say(server, f"{ANALYSIS}Think.<|start|>assistant{FINAL}Done.")
    body: Any = {"model": MODEL, "input": "Hi", "temperature": 0, "text": {"format": {"type": "text"}}}
    if stream:
        with server.openai.responses.stream(**body) as events:
            list(events)
            output = [item.model_dump() for item in events.get_final_response().output]
    else:
        output = server.post("/v1/responses", body).json()["output"]
    assert [(item["type"], item["content"][0]["text"]) for item in output] == [
        ("reasoning", "Think."),
        ("message", "Done."),
    ]


def test_the_output_of_a_response_is_input_of_the_next(server: Served) -> None:
    """As clients go on with a conversation that no server keeps. Reasoning is left out, as the model was trained."""
    say(server, f"{ANALYSIS}Think.<|start|>assistant{FINAL}Done.")
    ask: Any = {"role": "user", "content": "Hi"}
    body = {"model": MODEL, "temperature": 0}
    first = server.post("/v1/responses", body | {"input": [ask]}).json()
    assert [item["type"] for item in first["output"]] == ["reasoning", "message"]
    turns = [ask, *first["output"], {"role": "user", "content": "And now?"}]
    second = server.post("/v1/responses", body | {"input": turns})
    assert second.status_code == 200, second.text
    without = [turn for turn in turns if turn.get("type") != "reasoning"]
    alone = server.post("/v1/responses", body | {"input": without}).json()
    assert second.json()["usage"]["input_tokens"] == alone["usage"]["input_tokens"]
