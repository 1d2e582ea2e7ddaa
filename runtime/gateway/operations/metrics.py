"""Prometheus metrics under vLLM's names, so that its dashboards, autoscalers and load generators read them.

Three sources. As a hook of all calls, :class:`Metrics` sees the tokens of each. The engine's counters are read from its
last report when Prometheus asks. Steps are observed whenever tokens show that the engine has made one.

All of it runs in the thread of the event loop.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from runtime.gateway.engines.client import EngineClient
from runtime.gateway.operations.engine_metrics import ENGINE_COUNTERS, EngineCollector, EngineSeries
from runtime.gateway.operations.window import Window
from runtime.gateway.protocol.calls import Call, Hook
from runtime.gateway.protocol.errors import SLOW_READER
from runtime.wire.messages import EngineStats

# vLLM's buckets, and smaller ones for small models.
TTFT_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
INTER_TOKEN_BUCKETS = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0,
    7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
LATENCY_BUCKETS = (
    0.01, 0.025, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0,
    240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
TOKEN_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
BATCH_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)

WINDOW_SECONDS = 300.0
RECENT_CALLS = 50


class RecentCall(NamedTuple):
    """One row of the live page: no text. Times are seconds; ``ended_at`` of ``time.time()``."""

    id: str
    endpoint: str
    ended_at: float
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    outcome: str
    ttft: float | None
    seconds: float


class Metrics(Hook):
    """``read_bandwidth``: bytes per second that this machine reads from memory at best, if it was measured.

    ``engine_series``: where the client has several engines, what is told of each.
    """

    def __init__(
        self,
        client: EngineClient,
        model: str,
        *,
        read_bandwidth: float | None = None,
        engine_series: Callable[[], Sequence[EngineSeries]] | None = None,
    ) -> None:
        self.client, self.model, self.read_bandwidth = client, model, read_bandwidth
        self.registry = CollectorRegistry()
        self.ttft_window, self.inter_token_window = Window(WINDOW_SECONDS), Window(WINDOW_SECONDS)
        self.recent: deque[RecentCall] = deque(maxlen=RECENT_CALLS)
        self.generated_tokens = 0
        self._last: dict[str, list[float]] = {}  # by call: when the last tokens of each choice came
        self._seen = EngineStats()
        self._before = dict.fromkeys((attribute for *_, attribute in ENGINE_COUNTERS), 0)

        def histogram(name: str, text: str, buckets: Iterable[float]) -> Histogram:
            labels = ["model_name", "engine"]
            return Histogram(name, text, labels, buckets=tuple(buckets), registry=self.registry).labels(model, "0")

        def plain_histogram(name: str, text: str, buckets: Sequence[float]) -> _PlainHistogram:
            made = _PlainHistogram(name, text, buckets, model)
            self.registry.register(made)
            return made

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, ["model_name", "engine"], registry=self.registry).labels(model, "0")

        self.ttft = histogram("vllm:time_to_first_token_seconds", "Arrival to first token.", TTFT_BUCKETS)
        self.inter_token = plain_histogram(
            "vllm:inter_token_latency_seconds", "Between two deltas of a request.", INTER_TOKEN_BUCKETS
        )
        self.per_token = histogram(
            "vllm:request_time_per_output_token_seconds",
            "First to last token of a request, per token after the first.",
            INTER_TOKEN_BUCKETS,
        )
        self.latency = histogram("vllm:e2e_request_latency_seconds", "Arrival to end.", LATENCY_BUCKETS)
        self.queue = histogram("vllm:request_queue_time_seconds", "Arrival to first step.", LATENCY_BUCKETS)
        self.inference = histogram("vllm:request_inference_time_seconds", "First step to end.", LATENCY_BUCKETS)
        self.prefill = histogram("vllm:request_prefill_time_seconds", "First step to first token.", LATENCY_BUCKETS)
        self.decode = histogram("vllm:request_decode_time_seconds", "First to last token.", LATENCY_BUCKETS)
        self.request_prompt = histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", TOKEN_BUCKETS)
        self.request_generated = histogram(
            "vllm:request_generation_tokens", "Generated tokens of a request.", TOKEN_BUCKETS
        )
        self.request_max_tokens = histogram(
            "vllm:request_params_max_tokens", "Most new tokens that a request asks for.", TOKEN_BUCKETS
        )
        self.request_n = histogram("vllm:request_params_n", "Responses to each prompt.", BATCH_BUCKETS)
        self.request_computed = histogram(
            "vllm:request_prefill_kv_computed_tokens", "Prompt tokens that were not found in KV blocks.", TOKEN_BUCKETS
        )
        self.step_tokens = plain_histogram("vllm:iteration_tokens_total", "Tokens fed in a step.", TOKEN_BUCKETS)
        self.step_requests = plain_histogram(
            "tapeout:step_requests", "Requests in a step: the batch size.", BATCH_BUCKETS
        )
        self.step_seconds = plain_histogram("tapeout:step_seconds", "Duration of a step.", INTER_TOKEN_BUCKETS)
        self.prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens of answered requests.")
        self.cached_tokens = counter("vllm:prompt_tokens_cached", "Of those, tokens found in KV blocks.")
        self.success = Counter(
            "vllm:request_success",
            "Requests that ended.",
            ["model_name", "engine", "finished_reason"],
            registry=self.registry,
        )
        self.refused = Counter("tapeout:requests_refused", "Requests not admitted.", ["reason"], registry=self.registry)
        self.http_requests = Counter(
            "http_requests", "HTTP requests.", ["handler", "method", "status"], registry=self.registry
        )
        self.http_seconds = Histogram(
            "http_request_duration_seconds",
            "Duration of HTTP requests, streams included.",
            ["handler", "method"],
            buckets=LATENCY_BUCKETS,
            registry=self.registry,
        )
        for reason in ("stop", "length", "abort", "timeout", "error"):
            self.success.labels(model, "0", reason)  # a rate over a series that is not there is no number
        self.registry.register(_UnreadCollector(client))
        self.registry.register(EngineCollector(model, read_bandwidth, engine_series or self._one_engine))

    def admit(self, call: Call) -> None:
        self._last[call.id] = [0.0] * call.choices

    def tokens(self, call: Call, choice: int, count: int, now: float) -> None:
        """A server calls it a thousand times a second."""
        last = self._last[call.id]
        before, last[choice] = last[choice], now
        if before:
            self.inter_token.observe(now - before)
            self.inter_token_window.add(now - before, now)
        else:
            self.ttft.observe(now - call.arrival)
            self.ttft_window.add(now - call.arrival, now)
        self.generated_tokens += count
        self.observe_step()

    def ended(self, call: Call) -> None:
        last = max(self._last.pop(call.id))
        assert call.end is not None
        if call.refused:
            assert call.error is not None
            self.refused.labels(call.error.code or str(call.error.status)).inc()
            return
        seconds, generated = call.end - call.arrival, call.completion_tokens
        for choice in range(call.choices):
            self.success.labels(self.model, "0", call.finish_reasons.get(choice) or unfinished(call)).inc()
        self.latency.observe(seconds)
        self.request_generated.observe(generated)
        self.request_max_tokens.observe(call.max_new_tokens)
        self.request_n.observe(call.n)
        self.request_prompt.observe(call.prompt_tokens)
        ttft = None
        if call.first_token is not None:
            ttft, decode = call.first_token - call.arrival, last - call.first_token
            self.prompt_tokens.inc(call.prompt_tokens)
            self.cached_tokens.inc(call.cached_tokens)
            self.request_computed.observe(call.prompt_tokens - call.cached_tokens)
            self.decode.observe(decode)
            if generated > call.choices:
                self.per_token.observe(decode * call.choices / (generated - call.choices))
            if call.queue_seconds is not None:
                self.queue.observe(call.queue_seconds)
                self.inference.observe(seconds - call.queue_seconds)
                self.prefill.observe(ttft - call.queue_seconds)
        outcome = ", ".join(dict.fromkeys(call.finish_reasons.values())) or unfinished(call)
        counts = call.prompt_tokens, call.cached_tokens, generated
        self.recent.append(RecentCall(call.id, call.endpoint, time.time(), *counts, outcome, ttft, seconds))

    def observe_step(self) -> None:
        """Look at the engine's last report. Steps between two looks count as equal to the last of them."""
        stats, seen = self.client.stats, self._seen
        if stats is seen:
            return
        self._seen = stats
        if stats.steps < seen.steps:  # the engine was opened again
            self._before = {name: before + getattr(seen, name) for name, before in self._before.items()}
        for _ in range(min(stats.steps - seen.steps, 16)):
            self.step_tokens.observe(stats.step_tokens)
            self.step_requests.observe(stats.step_requests)
            self.step_seconds.observe(stats.step_seconds)

    def engine_counters(self) -> dict[str, int]:
        """Of all engines that this server has opened, one after the other."""
        self.observe_step()
        return {name: before + getattr(self._seen, name) for name, before in self._before.items()}

    def _one_engine(self) -> Sequence[EngineSeries]:
        client = self.client
        counted = client.info, client.stats, client.healthy, client.ready, self.generated_tokens, self.engine_counters()
        return [EngineSeries("0", *counted)]

    def malformed(self) -> None:
        """A client sent what is no HTTP request, or not all of its headers."""
        self.http_requests.labels("none", "other", "4xx").inc()

    def text(self) -> bytes:
        """Everything in the Prometheus text format."""
        return generate_latest(self.registry)

    def route(self) -> Route:
        """``GET /metrics``."""

        async def metrics(_: Request) -> Response:
            return Response(self.text(), media_type=CONTENT_TYPE_LATEST)

        return Route("/metrics", metrics)


def unfinished(call: Call) -> str:
    """Why a choice has no finish reason, as vLLM names it."""
    if call.error is None or call.error.code == SLOW_READER:
        return "abort"
    return "timeout" if call.error.status == 408 else "error"


class _UnreadCollector(Collector):
    def __init__(self, client: EngineClient) -> None:
        self._client = client

    def collect(self) -> Iterator[Metric]:
        unread = self._client.unread
        yield GaugeMetricFamily(
            "tapeout:unread_bytes", "Of tokens that slow clients have not read yet.", value=unread.bytes
        )
        yield CounterMetricFamily(
            "tapeout:slow_readers", "Requests that were ended for the client read too slowly.", value=unread.ended
        )


class _PlainHistogram(Collector):
    """For what each token or step brings: prometheus_client's takes locks and compares with one bound at a time."""

    def __init__(self, name: str, text: str, bounds: Sequence[float], model: str) -> None:
        self._name, self._text, self._bounds, self._model = name, text, bounds, model
        self._counts, self._sum = [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=["model_name", "engine"])
        bounds = map(floatToGoString, (*self._bounds, math.inf))
        family.add_metric([self._model, "0"], [*zip(bounds, accumulate(self._counts), strict=True)], self._sum)
        yield family
