"""Tool calls: the formats of models, however their text is cut, and what clients get of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator, ValidationError, validate

from runtime.gateway.http import chat
from runtime.gateway.protocol.bodies import CalledTool, FunctionCall, Message, NamedFunction, NamedTool, Tool
from runtime.gateway.protocol.errors import ApiError
from runtime.gateway.text.calls import Read, ToolReader
from runtime.gateway.text.conversations import plain
from runtime.gateway.text.model import ResponseText, TextModel
from runtime.gateway.text.tools import (
    HermesReader,
    Llama3Reader,
    MistralReader,
    NamedReader,
    RequiredReader,
    ToolFormat,
    format_of,
    required_call,
)
from tests.http_server import END_TOKEN, MODEL, VOCAB, Served, byte_tokenizer, ids, serving
from tests.serving_client import ScriptEngine, SlowEngine
from tests.unit.test_schema_rewrite import accepts

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
ADD: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
ARGUMENTS = {"city": 'São "Paulo" } ]', "deep": {"list": [1, {"x": None}]}}
CALL = json.dumps({"name": "weather", "arguments": ARGUMENTS}, ensure_ascii=False)
OTHER = json.dumps({"name": "add", "parameters": {}})


def raw(reads: Iterable[Read]) -> tuple[str, list[tuple[str, str]]]:
    """Content, and (name, text of the arguments) of the calls."""
    content, calls = "", dict[int, list[str]]()
    for read in reads:
        content += read.content
        for delta in read.calls:
            if delta.name is not None:
                assert delta.place not in calls and delta.id is not None and delta.id.startswith("call_")
                calls[delta.place] = [delta.name, ""]
            calls[delta.place][1] += delta.arguments
    assert list(calls) == list(range(len(calls)))
    return content, [(name, arguments) for name, arguments in calls.values()]


def pieces(text: Sequence[Any], cuts: list[int]) -> list[Any]:
    ends = sorted({cut % (len(text) + 1) for cut in cuts})
    return [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]


def fed(reader: ToolReader, text: str, cuts: list[int]) -> tuple[str, list[tuple[str, Any]]]:
    """Content, and (name, arguments) of the calls, when the text comes in pieces that end at ``cuts``."""
    content, calls = raw([*map(reader.push, pieces(text, cuts)), reader.finish()])
    return content, [(name, json.loads(arguments)) for name, arguments in calls]


# Marks of every format inside a string are text.
MARKS: list[tuple[str, Any]] = [("f", {"x": '</tool_call> <tool_call>{[TOOL_CALLS][ARGS]; <|python_tag|> \\" }]'})]
MARKED = json.dumps({"name": "f", "arguments": MARKS[0][1]})
CUTS = st.lists(st.integers(0, 400), max_size=12)
ONE, TWO = [("weather", ARGUMENTS)], [("weather", ARGUMENTS), ("add", {})]
CASES: list[tuple[Any, str, str, list[Any]]] = [
    (HermesReader, f"<tool_call>\n{CALL}\n</tool_call>", "", ONE),
    (HermesReader, f"Let me see. <tool_call>{CALL}</tool_call>\n<tool_call>\n{OTHER}</tool_call>", "Let me see. ", TWO),
    (HermesReader, f"<tool_call>{CALL}", "", ONE),  # the end was left out
    (HermesReader, f"<tool_call>{MARKED}</tool_call> after", "after", MARKS),
    (HermesReader, f"<tool_call>{MARKED}<tool_call>{OTHER}", "", [*MARKS, ("add", {})]),  # both ends were left out
    (HermesReader, f"<tool_call>{OTHER}}}</tool_call> b </tool_call>", "}b </tool_call>", [("add", {})]),
    (
        HermesReader,
        f'<tool_call>{{"a": 1</tool_call><tool_call>{OTHER}',
        '<tool_call>{"a": 1</tool_call>',
        [("add", {})],
    ),
    (HermesReader, '<tool_call>{"name": "add", "arguments": "{\\"x\\": 1}"}', "", [("add", {"x": 1})]),
    (HermesReader, '<tool_call>{"name": "add", "arguments": null}', "", [("add", {})]),
    (HermesReader, "plain <tool text", "plain <tool text", []),
    (HermesReader, "<tool_call>not json</tool_call> x", "<tool_call>not json</tool_call> x", []),
    (HermesReader, '<tool_call>{"name": 3}</tool_call>', '<tool_call>{"name": 3}</tool_call>', []),
    (HermesReader, "<tool_call>cut o", "<tool_call>cut o", []),
    (Llama3Reader, CALL, "", ONE),
    (Llama3Reader, f"<|python_tag|>{CALL}; {OTHER}", "", TWO),
    (Llama3Reader, MARKED, "", MARKS),
    (Llama3Reader, '{"name": "Ann", "age": 3}', '{"name": "Ann", "age": 3}', []),
    (Llama3Reader, "{not json", "{not json", []),
    (Llama3Reader, "Hello {", "Hello {", []),
    (Llama3Reader, '{"some": "json"}', '{"some": "json"}', []),
    (MistralReader, f"[TOOL_CALLS][{CALL}, {OTHER}]", "", TWO),
    (MistralReader, f"Sure. [TOOL_CALLS]weather[ARGS]{json.dumps(ARGUMENTS)}[TOOL_CALLS]add{{}}", "Sure. ", TWO),
    (MistralReader, f"[TOOL_CALLS][{MARKED}]", "", MARKS),
    (MistralReader, f"[TOOL_CALLS]add{{}}[TOOL_CALLS]f{json.dumps(MARKS[0][1])}", "", [("add", {}), *MARKS]),
    (MistralReader, "[TOOL_CALLS] oops", "[TOOL_CALLS] oops", []),
    (MistralReader, "a [TOOL", "a [TOOL", []),
    (RequiredReader, f"[{CALL}, {OTHER}]", "", TWO),
    (RequiredReader, f"[{MARKED}]", "", MARKS),
    (RequiredReader, f" [ {CALL} ", "", ONE),
    (RequiredReader, f'[{CALL}, {{"name": "ad', "", ONE),  # our own form is never content
    (lambda: NamedReader("weather"), json.dumps(ARGUMENTS), "", ONE),
]


@pytest.mark.parametrize(("make", "text", "content", "calls"), CASES)
@given(cuts=CUTS)
def test_calls_are_found_however_the_text_is_cut(
    make: Any, text: str, content: str, calls: Any, cuts: list[int]
) -> None:
    assert fed(make(), text, cuts) == (content, calls)


# Forms of a call, made of its JSON text or of its arguments, and what no content may show of one that was cut off.
FORMS: list[tuple[Any, Callable[[str, str], str], str]] = [
    (HermesReader, lambda call, _: f"<tool_call>\n{call}", "<tool_call>"),
    (Llama3Reader, lambda call, _: call, '"name"'),
    (MistralReader, lambda call, _: f"[TOOL_CALLS][{call}", "[TOOL_CALLS]"),
    (MistralReader, lambda _, arguments: f"[TOOL_CALLS]weather{arguments}", "[TOOL_CALLS]"),
    (RequiredReader, lambda call, _: f"[{call}", "name"),
]


@pytest.mark.parametrize(("make", "form", "inner"), FORMS)
def test_a_call_that_was_cut_off_is_given_as_far_as_it_came(make: Any, form: Any, inner: str) -> None:
    """At every place: what a client gets of the arguments is the beginning of what the model wrote."""
    arguments = json.dumps(ARGUMENTS, ensure_ascii=False)
    text = form(f'{{"name": "weather", "arguments": {arguments}', arguments)
    known = text.index('"weather"') + len('"weather"') if '"weather"' in text else text.index("{") + 1
    for end in range(len(text) + 1):
        content, calls = raw(_all(make(), [text[:end]]))
        if end < known:
            assert calls == [] and content == ("" if make is RequiredReader else text[:end])
            continue
        assert content == "" and inner not in content
        ((name, given_arguments),) = calls
        assert name == "weather" and arguments.startswith(given_arguments)
        assert given_arguments == text[text.index(arguments) : end] or end < text.index(arguments)


def _all(reader: ToolReader, parts: Iterable[str]) -> Iterator[Read]:
    yield from map(reader.push, parts)
    yield reader.finish()


WORDS = [
    *('<tool_call>', '</tool_call>', '[TOOL_CALLS]', '[ARGS]', '<|python_tag|>', '{"name": "f"', ', "arguments": '),
    *('{"x": "', '{"x": 1}', '"', '\\', '\\"', '\\u00e9', '{', '}', '[', ']', ',', ';', ' ', '\n', '\u2028', 'f'),
    *('é', '€', '😀', 'null', '"parameters": ', '<', '>', '1', CALL, OTHER, MARKED, f'<tool_call>{CALL}</tool_call>'),
]  # fmt: skip
EVERY_READER = [HermesReader, Llama3Reader, MistralReader, RequiredReader, lambda: NamedReader("f")]


@pytest.mark.parametrize("make", EVERY_READER)
@settings(max_examples=300)
@given(words=st.lists(st.one_of(st.sampled_from(WORDS), st.text(max_size=3)), max_size=14), data=st.data())
def test_the_same_text_gives_the_same_calls_however_it_is_split(
    make: Any, words: list[str], data: st.DataObject
) -> None:
    """Any text, split at any places."""
    text = "".join(words)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=20))
    whole = raw(_all(make(), [text]))
    assert raw(_all(make(), pieces(text, cuts))) == whole
    assert raw(_all(make(), text)) == whole  # one character at a time


@pytest.mark.parametrize("make", EVERY_READER)
@given(words=st.lists(st.sampled_from(WORDS), max_size=14), cuts=CUTS)
def test_the_same_tokens_give_the_same_calls_however_they_come(make: Any, words: list[str], cuts: list[int]) -> None:
    """Tokens are bytes here: a step can end in the middle of a character and of a mark."""
    text = "".join(words)
    model = TextModel("digest", byte_tokenizer())

    def read(steps: list[list[int]]) -> Iterator[Read]:
        reader, response = make(), ResponseText(model, skip_special=False)
        for step in steps:
            yield reader.push(response.push(step, None).text)
        yield reader.push(response.push([], "length").text)
        yield reader.finish()

    tokens = [byte for letter in text for byte in ids(letter)]  # so that no mark is a token of its own
    assert raw(read(pieces(tokens, cuts))) == raw(_all(make(), [text]))


@pytest.mark.parametrize("make", [HermesReader, Llama3Reader, MistralReader])
@given(
    st.lists(st.sampled_from([*'<{[]}>/"\\;, ', "tool_call>", "[TOOL_CALLS]", "<tool_call>", '"name"']), max_size=20)
)
def test_text_without_calls_loses_nothing(make: Any, words: list[str]) -> None:
    text = "".join(words)
    content, calls = fed(make(), text, [3, 7])
    assert calls == [] and content == text


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ tools }} <tool_call>", "hermes"),
        ('{{ tools }} Respond {"name": f, "parameters": d} ', "llama3"),
        ("{{ tools }}[AVAILABLE_TOOLS] [TOOL_CALLS]", "mistral"),
        ("{{ messages }} <tool_call>", None),
        ("{{ tools }}", None),
    ],
)
def test_formats_are_known_by_the_template(template: str, expected: ToolFormat | None) -> None:
    assert format_of(template) == expected


def test_required_calls_as_a_schema() -> None:
    tools = [Tool.model_validate(tool) for tool in (WEATHER, ADD)]
    schema = json.loads(required_call(tools, None, True).text)
    good: list[Any] = [{"name": "weather", "parameters": {"city": "x"}}, {"name": "add", "parameters": {}}]
    validate(good, schema)
    for bad in ([], [{"name": "sub", "parameters": {}}], [{"name": "weather", "parameters": {}}], good[0]):
        with pytest.raises(ValidationError):
            validate(bad, schema)
    with pytest.raises(ValidationError):
        validate(good, json.loads(required_call(tools, None, False).text))
    named = NamedTool(type="function", function=NamedFunction(name="weather"))
    validate({"city": "x"}, json.loads(required_call(tools, named, True).text))
    with pytest.raises(ApiError, match="not in tools"):
        required_call(tools, NamedTool(type="function", function=NamedFunction(name="sub")), True)


def test_references_of_a_tool_mean_its_own_schema() -> None:
    """In every form, though another tool defines the same names otherwise."""

    def tool(name: str, kind: str) -> Tool:
        parameters = {
            "$id": "https://example.com/parameters",
            "$defs": {"x": {"$anchor": "x", "type": kind}},
            "type": "object",
            "properties": {
                "pointer": {"$ref": "#/$defs/x"},
                "anchor": {"$ref": "#x"},
                "whole": {"$ref": "#"},
                "sibling": {"$ref": "#/properties/pointer"},
                "uri": {"$ref": "parameters#/$defs/x"},
            },
            "additionalProperties": False,
        }
        return Tool.model_validate({"type": "function", "function": {"name": name, "parameters": parameters}})

    schema = json.loads(required_call([tool("a", "string"), tool("b", "integer")], None, True).text)
    for name, good, bad in (("a", "y", 1), ("b", 1, "y")):
        for key in ("pointer", "anchor", "sibling", "uri"):
            validate([{"name": name, "parameters": {key: good, "whole": {key: good}}}], schema)
            for wrong in ({key: bad}, {"whole": {key: bad}}, {"whole": [{"name": name, "parameters": {}}]}):
                with pytest.raises(ValidationError):
                    validate([{"name": name, "parameters": wrong}], schema)


NAMED = NamedTool(type="function", function=NamedFunction(name="a"))


@pytest.mark.parametrize("choice", [None, NAMED])
def test_a_tool_that_refers_to_nothing_is_named(choice: NamedTool | None) -> None:
    function = {"name": "a", "parameters": {"properties": {"x": {"$ref": "#/$defs/x"}}, "$defs": 5}}
    with pytest.raises(ApiError, match="the tool 'a': a reference to '#/\\$defs/x'"):
        required_call([Tool.model_validate({"type": "function", "function": function})], choice, True)


@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": {"x": {"type": "integer"}}},  # without a type, which is often left out
        {"properties": {"x": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"type": "integer"}}},
        {"type": ["object", "null"], "properties": {"x": {"type": "integer"}}},
        {"anyOf": [{"properties": {"x": {"type": "integer"}}, "type": "object"}, {"type": "string"}]},
    ],
)
def test_arguments_are_an_object_whatever_the_schema_allows_besides(parameters: Any) -> None:
    """Anything else is no call that a client could read, so it would be lost."""
    tool = Tool.model_validate({"type": "function", "function": {"name": "a", "parameters": parameters}})
    for value, valid in (({"x": 1}, True), ({"x": "1"}, False), (3, False), ("x", False), (None, False), ([], False)):
        whole = json.loads(required_call([tool], None, True).text)
        assert Draft202012Validator(whole).is_valid([{"name": "a", "parameters": value}]) == valid
        assert accepts(json.loads(required_call([tool], NAMED, True).text), value) == valid


# Over HTTP: the engine says what the script holds.


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    engine = ScriptEngine(ids("<|start|>assistant\n"), END_TOKEN, VOCAB, slots=4, max_tokens=2048)
    with serving(engine) as served:
        yield served


ASK: Any = {"model": MODEL, "messages": [{"role": "user", "content": "Weather?"}], "temperature": 0}


def say(server: Served, text: str) -> None:
    assert isinstance(server.engine, ScriptEngine)
    server.engine.script = ids(text)


def streamed(server: Served, body: Any) -> tuple[str, list[tuple[str, str]], str]:
    """Content, calls and the finish reason of a streamed answer."""
    content, calls, reasons = "", dict[int, list[str]](), list[str]()
    for chunk in server.openai.chat.completions.create(**body, stream=True):
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        reasons += [choice.finish_reason] if choice.finish_reason else []
        for call in choice.delta.tool_calls or []:
            assert call.function is not None
            if call.function.name:
                assert call.id and call.type == "function"
                calls[call.index] = [call.function.name, ""]
            calls[call.index][1] += call.function.arguments or ""
    (reason,) = reasons
    return content, [(name, arguments) for name, arguments in calls.values()], reason


def test_a_call_over_http(server: Served) -> None:
    say(server, f"Looking.<tool_call>{CALL}</tool_call>")
    answer = server.openai.chat.completions.create(**ASK, tools=[WEATHER, ADD])
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Looking."
    (call,) = choice.message.tool_calls or []
    assert call.type == "function" and call.function.name == "weather"
    assert json.loads(call.function.arguments) == ARGUMENTS


def test_a_streamed_call(server: Served) -> None:
    say(server, f"Looking.<tool_call>{CALL}</tool_call><tool_call>{OTHER}</tool_call>")
    content, calls, reason = streamed(server, ASK | {"tools": [WEATHER, ADD]})
    assert content == "Looking." and reason == "tool_calls"
    assert [(name, json.loads(text)) for name, text in calls] == TWO


def test_the_openai_client_accumulates_a_streamed_call(server: Served) -> None:
    say(server, f"<tool_call>{CALL}</tool_call>")
    with server.openai.chat.completions.stream(**ASK, tools=[WEATHER]) as stream:
        final = stream.get_final_completion()
    (call,) = final.choices[0].message.tool_calls or []
    assert json.loads(call.function.arguments) == ARGUMENTS


def test_without_tools_or_with_none_the_text_is_content(server: Served) -> None:
    text = f"<tool_call>{CALL}</tool_call>"
    say(server, text)
    cases: Any = ({}, {"tools": [WEATHER], "tool_choice": "none"})
    for extra in cases:
        answer = server.openai.chat.completions.create(**ASK, **extra)
        assert answer.choices[0].message.content == text and answer.choices[0].message.tool_calls is None
        assert answer.choices[0].finish_reason == "stop"


def test_a_plain_answer_with_tools(server: Served) -> None:
    say(server, "No call < needed.")
    answer = server.openai.chat.completions.create(**ASK, tools=[WEATHER])
    assert answer.choices[0].message.content == "No call < needed." and answer.choices[0].finish_reason == "stop"


def test_a_conversation_with_calls_and_results(server: Served) -> None:
    """Arguments reach the template as an object, as transformers' templates expect."""
    messages: Any = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "9"},
    ]
    tokens = server.post("/tokenize", {"messages": messages}).json()["tokens"]
    assert server.service.text.decode(tokens) == (
        "<|start|>user\na\nb<|end|><|start|>assistant\n"
        '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call><|end|><|start|>tool\n9<|end|><|start|>assistant\n'
    )


@pytest.mark.parametrize(
    ("arguments", "rendered"),
    [
        ('{"city": "Par', '{"city": "Par"}'),
        ('{"a": {"b": [1, {"c": "x\\', '{"a": {"b": [1, {"c": "x"}]}}'),
        *(("", "{}"), ("  ", "{}"), ("null", "{}"), (None, "{}"), ("{", "{}")),
        *(("[1, 2]", '{"arguments": [1, 2]}'), ([1], '{"arguments": [1]}'), ({"x": 1}, '{"x": 1}')),
        *(("not json", '{"arguments": "not json"}'), ("3", '{"arguments": 3}'), (False, '{"arguments": false}')),
        *(('{"x": oops', '{"arguments": "{\\"x\\": oops"}'), ('{"x": 1}}', '{"x": 1}')),
    ],
)
def test_a_conversation_goes_on_whatever_an_earlier_call_holds(server: Served, arguments: Any, rendered: str) -> None:
    """Templates go through the arguments as an object, so they get one."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}]
    answer = server.post("/tokenize", {"messages": messages})
    assert answer.status_code == 200, answer.text
    said = server.service.text.decode(answer.json()["tokens"])
    assert f'<tool_call>{{"name": "f", "arguments": {rendered}}}</tool_call>' in said


ONE_CALL = """{% for message in messages %}{% if message.tool_calls %}{% if message.tool_calls | length != 1 %}
{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}
<{{ message.content }}{{ message.tool_calls[0].function | tojson }}>{% else %}<{{ message.content }}>{% endif %}
{% endfor %}{% if tools %}"parameters"{% endif %}"""


@pytest.mark.parametrize(
    "ids_of_results", ["ab", "ba", "a", "", "abb", "bax", [None, None], ["a", None], [None, None, None]]
)
def test_several_calls_go_to_a_template_that_renders_one(ids_of_results: Sequence[str | None]) -> None:
    """As Llama 3's does, which refuses the conversation else: with all later turns."""
    calls = [{"id": name, "type": "function", "function": {"name": name, "arguments": "{}"}} for name in "ab"]
    results = [{"role": "tool", "tool_call_id": name, "content": f"of {name}"} for name in ids_of_results]
    said = {"role": "assistant", "content": "Both.", "tool_calls": calls}
    messages = [{"role": "user", "content": "u"}, said, *results, {"role": "user", "content": "v"}]
    with serving(SlowEngine(VOCAB, slots=2, max_tokens=64), template=ONE_CALL) as served:
        answer = served.post("/tokenize", {"messages": messages})
        assert answer.status_code == 200, answer.text
        text = served.service.text.decode(answer.json()["tokens"])
    first, second = text.index('<Both.{"name": "a"'), text.index('<{"name": "b"')
    assert text.startswith("<u>") and first < second and text.rstrip().endswith("<v>")
    for result in results:
        assert text.count(result["content"]) == ids_of_results.count(result["tool_call_id"])
    if set(ids_of_results) >= {"a", "b"}:
        assert first < text.index("<of a>") < second < text.index("<of b>")


def test_ids_of_calls_are_as_mistral_templates_want_them() -> None:
    """Nine letters and digits, and those of a result are those of its call."""
    call = CalledTool(id="call_0123456789abcdef01234567", function=FunctionCall(name="f", arguments="{}"))
    asked = plain(Message(role="assistant", tool_calls=[call]), "mistral")["tool_calls"][0]["id"]
    result = plain(Message(role="tool", tool_call_id=call.id, content="9"), "mistral")["tool_call_id"]
    assert asked == result and len(asked) == 9 and asked.isalnum()
    assert plain(Message(role="tool", tool_call_id=call.id, content="9"))["tool_call_id"] == call.id


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "weather"}}])
@pytest.mark.parametrize("most", [1, 12, 35, 48, 60])
def test_an_answer_that_was_cut_off_can_be_sent_back(
    server: Served, choice: Any, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stream and without: the same calls, none of our own form, and the next turn is answered."""
    monkeypatch.setattr(chat, "_constraint", lambda *_: None)  # the script keeps to it; this engine has no constraints
    arguments = '{"city": "São \\"Paulo\\" and much more of it, as long as a call may be at most"}'
    texts = {"auto": f'<tool_call>{{"name": "weather", "arguments": {arguments}}}</tool_call>'}
    texts["required"] = f'[{{"name":"weather","parameters":{arguments}}}]'
    say(server, texts.get(str(choice), arguments))
    body: Any = ASK | {"tools": [WEATHER], "tool_choice": choice, "max_tokens": most}
    answer = server.openai.chat.completions.create(**body)
    (said,) = answer.choices
    content, calls, reason = streamed(server, body)
    assert calls == [(call.function.name, call.function.arguments) for call in said.message.tool_calls or []]
    assert (content, reason) == (said.message.content or "", said.finish_reason) and reason == "length"
    assert choice == "auto" or not said.message.content
    history = [*ASK["messages"], said.message.model_dump(), {"role": "user", "content": "Go on."}]
    assert server.post("/v1/chat/completions", body | {"messages": history}).status_code == 200


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "sub"}}}, "tool_choice"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [WEATHER], "tool_choice": "sometimes"}, "tool_choice"),
        (
            {"tools": [WEATHER], "tool_choice": "required", "response_format": {"type": "json_object"}},
            "tool_choice",
        ),
    ],
)
def test_bad_tools_are_refused(server: Served, extra: Any, param: str) -> None:
    answer = server.post("/v1/chat/completions", ASK | extra)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param
