"""Tool calls: the formats of models, however their text is cut, and what clients get of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import ValidationError, validate

from runtime.server.errors import ApiError
from runtime.server.protocol import NamedFunction, NamedTool, Tool
from runtime.server.tools import (
    Format,
    HermesReader,
    Llama3Reader,
    MistralReader,
    NamedReader,
    RequiredReader,
    ToolReader,
    format_of,
    required_call,
)
from tests.http_server import END_TOKEN, MODEL, VOCAB, Served, ids, serving
from tests.serving_client import ScriptEngine

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


def fed(reader: ToolReader, text: str, cuts: list[int]) -> tuple[str, list[tuple[str, Any]]]:
    """Content, and (name, arguments) of the calls, when the text comes in pieces that end at ``cuts``."""
    ends = sorted({cut % (len(text) + 1) for cut in cuts})
    content, calls = "", dict[int, list[Any]]()
    pieces = [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]
    for read in [*map(reader.push, pieces), reader.finish()]:
        content += read.content
        for delta in read.calls:
            if delta.name is not None:
                assert delta.place not in calls and delta.id is not None and delta.id.startswith("call_")
                calls[delta.place] = [delta.name, ""]
            calls[delta.place][1] += delta.arguments
    assert list(calls) == list(range(len(calls)))
    return content, [(name, json.loads(arguments)) for name, arguments in calls.values()]


CUTS = st.lists(st.integers(0, 400), max_size=12)
ONE, TWO = [("weather", ARGUMENTS)], [("weather", ARGUMENTS), ("add", {})]
CASES: list[tuple[Any, str, str, list[Any]]] = [
    (HermesReader, f"<tool_call>\n{CALL}\n</tool_call>", "", ONE),
    (HermesReader, f"Let me see. <tool_call>{CALL}</tool_call>\n<tool_call>\n{OTHER}</tool_call>", "Let me see. ", TWO),
    (HermesReader, f"<tool_call>{CALL}", "", ONE),  # the end was left out
    (HermesReader, "plain <tool text", "plain <tool text", []),
    (HermesReader, "<tool_call>not json</tool_call> x", "<tool_call>not json</tool_call> x", []),
    (HermesReader, '<tool_call>{"name": 3}</tool_call>', '<tool_call>{"name": 3}</tool_call>', []),
    (HermesReader, "<tool_call>cut o", "<tool_call>cut o", []),
    (Llama3Reader, CALL, "", ONE),
    (Llama3Reader, f"<|python_tag|>{CALL}; {OTHER}", "", TWO),
    (Llama3Reader, "{not json", "{not json", []),
    (Llama3Reader, "Hello {", "Hello {", []),
    (Llama3Reader, '{"some": "json"}', '{"some": "json"}', []),
    (MistralReader, f"[TOOL_CALLS][{CALL}, {OTHER}]", "", TWO),
    (MistralReader, f"Sure. [TOOL_CALLS]weather[ARGS]{json.dumps(ARGUMENTS)}[TOOL_CALLS]add{{}}", "Sure. ", TWO),
    (MistralReader, "[TOOL_CALLS] oops", "[TOOL_CALLS] oops", []),
    (MistralReader, "a [TOOL", "a [TOOL", []),
    (RequiredReader, f"[{CALL}, {OTHER}]", "", TWO),
    (RequiredReader, f" [ {CALL} ", "", ONE),
    (lambda: NamedReader("weather"), json.dumps(ARGUMENTS), "", ONE),
]


@pytest.mark.parametrize(("make", "text", "content", "calls"), CASES)
@given(cuts=CUTS)
def test_calls_are_found_however_the_text_is_cut(
    make: Any, text: str, content: str, calls: Any, cuts: list[int]
) -> None:
    assert fed(make(), text, cuts) == (content, calls)


@pytest.mark.parametrize("make", [HermesReader, Llama3Reader, MistralReader])
@given(st.lists(st.sampled_from([*'<{[]}>/"\\;, ', "tool_call", "[TOOL_CALLS]", "<tool_call>", '"name"']), max_size=20))
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
def test_formats_are_known_by_the_template(template: str, expected: Format | None) -> None:
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


def test_definitions_of_tools_move_to_the_root() -> None:
    def tool(name: str, kind: str) -> Tool:
        parameters = {"$defs": {"x": {"type": kind}}, "type": "object", "properties": {"x": {"$ref": "#/$defs/x"}}}
        return Tool.model_validate({"type": "function", "function": {"name": name, "parameters": parameters}})

    schema = json.loads(required_call([tool("a", "string"), tool("b", "string")], None, True).text)
    validate([{"name": "a", "parameters": {"x": "y"}}], schema)
    with pytest.raises(ValidationError):
        validate([{"name": "a", "parameters": {"x": 1}}], schema)
    with pytest.raises(ApiError, match="differently"):
        required_call([tool("a", "string"), tool("b", "integer")], None, True)


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
    content, calls, reasons = "", dict[int, list[str]](), list[str]()
    for chunk in server.openai.chat.completions.create(**ASK, tools=[WEATHER, ADD], stream=True):
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        reasons += [choice.finish_reason] if choice.finish_reason else []
        for call in choice.delta.tool_calls or []:
            assert call.function is not None
            if call.function.name:
                assert call.id and call.type == "function"
                calls[call.index] = [call.function.name, ""]
            calls[call.index][1] += call.function.arguments or ""
    assert content == "Looking." and reasons == ["tool_calls"]
    assert [(name, json.loads(text)) for name, text in calls.values()] == TWO


def test_the_openai_client_accumulates_a_streamed_call(server: Served) -> None:
    say(server, f"<tool_call>{CALL}</tool_call>")
    with server.openai.chat.completions.stream(**ASK, tools=[WEATHER]) as stream:
        final = stream.get_final_completion()
    (call,) = final.choices[0].message.tool_calls or []
    assert json.loads(call.function.arguments) == ARGUMENTS


def test_without_tools_or_with_none_the_text_is_content(server: Served) -> None:
    text = f"<tool_call>{CALL}</tool_call>"
    say(server, text)
    for extra in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
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
    messages[1]["tool_calls"][0]["function"]["arguments"] = "not json"
    assert server.post("/tokenize", {"messages": messages}).status_code == 400


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
