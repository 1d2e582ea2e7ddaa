"""Spans of calls: names, attributes, parents and times, as an OpenTelemetry backend gets them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import openai
import pytest
from starlette.middleware import Middleware

from runtime.gateway.http.app import create_app
from runtime.gateway.http.service import Service
from runtime.gateway.operations.tracing import TraceContext, Tracing, otlp_provider
from runtime.gateway.protocol.calls import Call, Hook
from runtime.gateway.protocol.errors import ApiError
from runtime.gateway.text.chat_template import ChatTemplate
from runtime.gateway.text.model import TextModel
from tests import web
from tests.http_server import END, END_TOKEN, MODEL, TEMPLATE, VOCAB, byte_tokenizer, ids, listening
from tests.serving_client import LocalClient, ScriptEngine, run_call

sdk = pytest.importorskip("opentelemetry.sdk.trace")
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Recorded:
    def __init__(self) -> None:
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        self.exporter = InMemorySpanExporter()
        provider = sdk.TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracing = Tracing(provider)

    def span(self) -> Any:
        (span,) = self.exporter.get_finished_spans()
        self.exporter.clear()
        return span


@pytest.fixture
def recorded() -> Recorded:
    return Recorded()


def test_a_call_is_one_span_with_its_counts_and_times(recorded: Recorded) -> None:
    client = LocalClient()
    call = asyncio.run(run_call(client, [recorded.tracing], prompt=4, new=5))
    span = recorded.span()
    assert (span.name, span.kind.name, span.parent) == ("text_completion m", "SERVER", None)
    times = {"gen_ai.response.time_to_first_chunk": 0, "tapeout.queue_seconds": 0}
    assert dict(span.attributes) | times == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "tapeout",
        "gen_ai.request.model": "m",
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.choice.count": 1,
        "gen_ai.request.stream": True,
        "gen_ai.response.id": call.id,
        "gen_ai.response.model": "m",
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.input_tokens": 4,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 0,
        **times,
        "tapeout.bundle": client.info.digest,
    }
    (event,) = span.events
    assert span.start_time <= event.timestamp < span.end_time
    assert call.end is not None
    assert (span.end_time - span.start_time) / 1e9 == pytest.approx(call.end - call.arrival, abs=5e-3)


class Fail(Hook):
    def admit(self, call: Call) -> None:
        raise ApiError(429, "the queue is full", code="queue_full")


def test_spans_say_how_a_call_failed_or_was_left(recorded: Recorded) -> None:
    asyncio.run(run_call(LocalClient(), [recorded.tracing, Fail()]))
    span = recorded.span()
    assert (span.status.status_code.name, span.attributes["error.type"]) == ("ERROR", "queue_full")
    asyncio.run(run_call(LocalClient(), [recorded.tracing], leave=2))
    span = recorded.span()
    assert (span.status.status_code.name, span.attributes["error.type"]) == ("UNSET", "cancelled")


@pytest.fixture
def api(recorded: Recorded) -> Iterator[openai.OpenAI]:
    engine = ScriptEngine(ids("<|start|>assistant\n"), END_TOKEN, VOCAB, slots=8, max_tokens=512)
    engine.script = ids("Hello.")
    client = LocalClient(engine, stop_tokens=frozenset({END_TOKEN}))
    digest = client.info.digest
    text = TextModel(digest, byte_tokenizer(), ChatTemplate(TEMPLATE, {}), special_texts={"eos_token": END})
    service = Service(client, {digest: text}, (MODEL,), hooks=[recorded.tracing])
    with listening(create_app(service, middleware=[Middleware(TraceContext)])) as url:
        yield web.openai_client(url)


@pytest.mark.parametrize("stream", [False, True])
def test_the_span_of_the_client_is_the_parent(recorded: Recorded, api: openai.OpenAI, stream: bool) -> None:
    talk: Any = [{"role": "user", "content": "a secret"}]
    answer: Any = api.chat.completions.create(
        model=MODEL, messages=talk, stream=stream, extra_headers={"traceparent": PARENT}
    )
    if stream:
        list(answer)
    span = recorded.span()
    assert span.name == f"chat {MODEL}"
    assert f"{span.context.trace_id:032x}-{span.parent.span_id:016x}" == PARENT[3:-3]
    assert "a secret" not in span.to_json() and "Hello" not in span.to_json()
    api.chat.completions.create(model=MODEL, messages=talk, extra_headers={"traceparent": "nonsense"})
    assert recorded.span().parent is None


def test_spans_reach_a_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    bodies: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    tracing = Tracing(otlp_provider())
    asyncio.run(run_call(LocalClient(), [tracing]))
    tracing.close()
    server.shutdown()
    assert b"text_completion m" in b"".join(bodies)
