"""Bodies of any shape: each is answered or refused as the client's mistake, and the server is whole afterwards."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime.gateway.http.requests import ServerLimits
from runtime.gateway.protocol.bodies import WITHOUT_EFFECT, ChatBody, CompletionBody
from tests.http_server import MODEL, VOCAB, Served, serving
from tests.serving_client import SlowEngine

NUMBERS = st.one_of(st.integers(-2, 6), st.sampled_from([VOCAB, 2**31, 2**63, 2**64, -(2**63), 10**400]), st.floats())
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=6)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    max_leaves=6,
)
PLAUSIBLE: dict[str, Any] = {
    "model": st.sampled_from([MODEL, "other"]),
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries({"include_usage": st.booleans()}),
    "n": st.integers(1, 3),
    "max_tokens": st.integers(0, 9),
    "max_completion_tokens": st.integers(1, 9),
    "temperature": st.floats(0, 3),
    "top_p": st.floats(0.01, 1),
    "top_k": st.integers(-1, 300),
    "min_p": st.floats(0, 1),
    "seed": st.integers(-5, 2**63),
    "repetition_penalty": st.one_of(st.floats(0.1, 3), st.sampled_from([1e-300, 1e-9, 1e9, 1e300])),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "logit_bias": st.dictionaries(st.integers(-1, VOCAB).map(str), st.floats(-100, 100), max_size=3),
    "stop": st.one_of(st.text(max_size=2), st.lists(st.text(max_size=2), max_size=3)),
    "stop_token_ids": st.lists(st.integers(0, VOCAB), max_size=3),
    "min_tokens": st.integers(0, 5),
    "logprobs": st.one_of(st.integers(0, 21), st.booleans()),
    "top_logprobs": st.integers(0, 21),
    "prompt_logprobs": st.integers(0, 3),
    "truncate_prompt_tokens": st.integers(-1, 9),
    "echo": st.booleans(),
    "ignore_eos": st.booleans(),
    "tools": st.sampled_from([[], [{"type": "function", "function": {"name": "f"}}], [{"type": "other"}]]),
    "tool_choice": st.sampled_from(["none", "auto", "required", {"type": "function", "function": {"name": "f"}}]),
    "response_format": st.sampled_from([{"type": "text"}, {"type": "json_object"}, {"type": "json_schema"}]),
    "chat_template_kwargs": st.dictionaries(st.sampled_from(["self", "messages", "bos_token", "a", ""]), JSON),
}  # fmt: skip
PROMPTS = st.one_of(
    st.text(max_size=20),
    st.lists(st.text(max_size=5), max_size=3),
    st.lists(st.integers(-1, VOCAB) | NUMBERS, max_size=9),
    st.lists(st.lists(st.integers(0, VOCAB - 1), max_size=5), max_size=3),
    JSON,
)
MESSAGES = st.one_of(
    st.lists(
        st.fixed_dictionaries(
            {"role": st.sampled_from(["user", "assistant", "system", "tool", "x"])},
            optional={"content": st.one_of(st.text(max_size=9), JSON), "tool_calls": JSON, "name": JSON, "other": JSON},
        ),
        max_size=3,
    ),
    JSON,
)


@st.composite
def bodies(draw: st.DrawFn, first: str, values: st.SearchStrategy[Any]) -> dict[str, Any]:
    body: dict[str, Any] = {first: draw(values)}
    for name in draw(st.lists(st.sampled_from(sorted(PLAUSIBLE)), max_size=6, unique=True)):
        body[name] = draw(st.one_of(PLAUSIBLE[name], PLAUSIBLE[name], JSON))
    return body


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    engine = SlowEngine(VOCAB, slots=8, max_tokens=64, block_tokens=8)
    with serving(engine, limits=ServerLimits(choices=12)) as served:
        yield served


def check(server: Served, path: str, body: Any) -> None:
    answer = server.http.post(path, content=json.dumps(body).encode())  # with NaN and Infinity
    if answer.status_code == 200:
        errors = [line for line in answer.text.splitlines() if line.startswith('data: {"error"')]
        assert not errors, errors
    else:
        assert answer.status_code in (400, 404), (answer.status_code, answer.text)
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert server.settled()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [10**30]}),
        ("/v1/completions", {"prompt": [[1], [-(10**30)]]}),
        ("/v1/completions", {"prompt": "a", "max_tokens": 2, "repetition_penalty": 1e-300}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a", "other": 10**30}], "max_tokens": 1}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "b": 2**64}]}], "max_tokens": 1},
        ),
        ("/tokenize", {"messages": [{"role": "assistant", "content": "a", "other": [-(10**30)]}]}),
        (
            "/v1/chat/completions",
            {
                "messages": [{"role": "user", "content": "a"}],
                "max_tokens": 1,
                "chat_template_kwargs": {"self": 1, "variables": 2, "tools_": 3},
            },
        ),
    ],
)
def test_values_that_no_type_of_a_library_holds(server: Served, path: str, body: Any) -> None:
    check(server, path, body)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=bodies("prompt", PROMPTS))
def test_any_completion_body(server: Served, body: Any) -> None:
    check(server, "/v1/completions", body)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=bodies("messages", MESSAGES))
def test_any_chat_body(server: Served, body: Any) -> None:
    check(server, "/v1/chat/completions", body)


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=JSON, path=st.sampled_from(["/v1/responses", "/tokenize", "/detokenize", "/v1/completions"]))
def test_any_json(server: Served, body: Any, path: str) -> None:
    check(server, path, body)


def test_the_page_names_every_field() -> None:
    page = (Path(__file__).parents[2] / "docs/serving.md").read_text()
    fields = {*CompletionBody.model_fields, *ChatBody.model_fields, *WITHOUT_EFFECT} - {"prompt", "messages"}
    assert not [name for name in sorted(fields) if f"`{name}`" not in page]
