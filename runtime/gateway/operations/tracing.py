"""OpenTelemetry spans of calls, by the GenAI semantic conventions. Needs the extra ``otel``.

A call is one span ``chat MODEL`` or ``text_completion MODEL``, a child of the client's span if the request has a W3C
``traceparent``. Spans hold counts and times, no text. The exporter is configured as OpenTelemetry says, above all by
``OTEL_EXPORTER_OTLP_ENDPOINT``.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Receive, Scope, Send

from runtime.gateway.protocol.calls import Call, Hook
from tapeout.errors import TapeoutError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion"}


def otlp_provider() -> TracerProvider:
    """Sends spans by OTLP over HTTP, in batches, from a thread of its own."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise TapeoutError(
            f"OpenTelemetry is not installed: {error}", expected="the extra otel", remedy="pip install 'tapeout[otel]'"
        ) from error
    provider = TracerProvider(resource=Resource.create({"service.name": "tapeout"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


class Tracing(Hook):
    """A hook of all calls."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("tapeout.server")
        self._spans: dict[str, Span] = {}

    def admit(self, call: Call) -> None:
        from opentelemetry.trace import SpanKind

        operation = OPERATIONS.get(call.endpoint, "chat")
        self._spans[call.id] = self._tracer.start_span(
            f"{operation} {call.model}",
            kind=SpanKind.SERVER,
            start_time=_nanoseconds(call.arrival),
            attributes={
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "tapeout",
                "gen_ai.request.model": call.model,
                "gen_ai.request.max_tokens": call.max_new_tokens,
                "gen_ai.request.choice.count": call.n,
                "gen_ai.request.stream": call.stream,
                "gen_ai.response.id": call.id,
                "gen_ai.response.model": call.model,
                "tapeout.bundle": call.digest,
            },
        )

    def ended(self, call: Call) -> None:
        from opentelemetry.trace import StatusCode

        span = self._spans.pop(call.id)
        span.set_attribute("gen_ai.usage.input_tokens", call.prompt_tokens)
        span.set_attribute("gen_ai.usage.output_tokens", call.completion_tokens)
        span.set_attribute("gen_ai.usage.cache_read.input_tokens", call.cached_tokens)
        if call.finish_reasons:
            reasons = [reason for _, reason in sorted(call.finish_reasons.items())]
            span.set_attribute("gen_ai.response.finish_reasons", reasons)
        if call.queue_seconds is not None:
            span.set_attribute("tapeout.queue_seconds", call.queue_seconds)
        if call.first_token is not None:
            span.set_attribute("gen_ai.response.time_to_first_chunk", call.first_token - call.arrival)
            span.add_event("first token", timestamp=_nanoseconds(call.first_token))
        if call.error is not None:
            span.set_attribute("error.type", call.error.code or str(call.error.status))
            span.set_status(StatusCode.ERROR, call.error.message)
        elif call.cancelled:
            span.set_attribute("error.type", "cancelled")
        assert call.end is not None
        span.end(_nanoseconds(call.end))

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()


class TraceContext:
    """ASGI middleware: spans of this request are children of the client's span (W3C ``traceparent``)."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        from opentelemetry import context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        token = context.attach(TraceContextTextMapPropagator().extract(headers))
        try:
            await self._app(scope, receive, send)
        finally:
            context.detach(token)


def _nanoseconds(monotonic: float) -> int:
    """Since 1970."""
    return time.time_ns() - int((time.monotonic() - monotonic) * 1e9)
