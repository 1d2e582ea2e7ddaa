"""Metrics and health: what Prometheus, load balancers and load generators read of a server."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from fastapi import APIRouter, FastAPI, Request, Response
from prometheus_client.parser import text_string_to_metric_families
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient

from runtime.gateway.operations.health import Health
from runtime.gateway.operations.http_metrics import HttpMetrics
from runtime.gateway.operations.metrics import Metrics
from runtime.gateway.operations.window import Window
from runtime.gateway.protocol.calls import Call, Hook
from runtime.gateway.protocol.errors import ApiError
from runtime.wire.messages import EngineStats
from tests.serving_client import LocalClient, run_call


def values(metrics: Metrics) -> dict[str, float]:
    """Sample name, with the labels that vary, to value."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(metrics.text().decode()):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
            found[sample.name + ("" if not labels else str(sorted(labels.items())))] = sample.value
    return found


def test_requests_and_steps_are_counted_under_the_names_of_vllm() -> None:
    client = LocalClient()
    metrics = Metrics(client, "m", read_bandwidth=1e6)

    async def requests() -> None:
        await asyncio.gather(*(run_call(client, [metrics], prompt=3 + i) for i in range(3)))
        await run_call(client, [metrics], prompt=6, n=2)
        await run_call(client, [metrics], prompt=2, new=9, leave=2)
        await client.drain(10)

    asyncio.run(requests())
    found = values(metrics)
    assert found["vllm:generation_tokens_total"] == 5 * 5 + 2
    assert found["vllm:prompt_tokens_total"] == 3 + 4 + 5 + 6 + 2
    assert found["vllm:request_success_total[('finished_reason', 'length')]"] == 5
    assert found["vllm:request_success_total[('finished_reason', 'abort')]"] == 1
    assert found["vllm:time_to_first_token_seconds_count"] == 6
    assert found["vllm:inter_token_latency_seconds_count"] == 5 * 4 + 1
    assert found["vllm:e2e_request_latency_seconds_count"] == found["vllm:request_queue_time_seconds_count"] == 5
    assert found["vllm:iteration_tokens_total_count"] >= 3 * 5 + 2
    # One step may have run after its client left, which nobody counts.
    assert client.stats.steps - found["vllm:iteration_tokens_total_count"] in (0, 1)
    assert found["vllm:num_requests_running"] == found["vllm:num_requests_waiting"] == 0
    assert found["vllm:engine_healthy"] == 1
    assert [row.outcome for row in metrics.recent] == ["length"] * 4 + ["abort"]


class Refuse(Hook):
    def __init__(self, status: int) -> None:
        self.error = ApiError(status, "planted", code="planted")

    def admit(self, call: Call) -> None:
        raise self.error


class Fail(Refuse):
    """Once it has a token."""

    def admit(self, call: Call) -> None: ...

    def tokens(self, call: Call, choice: int, count: int, now: float) -> None:
        raise self.error


def test_refused_requests_are_not_among_those_that_ended() -> None:
    client = LocalClient()
    metrics = Metrics(client, "m")
    for hook in (Refuse(400), Refuse(429), Refuse(503), Fail(503), Fail(408)):
        asyncio.run(run_call(client, [metrics, hook]))
    found = values(metrics)
    assert found["tapeout:requests_refused_total[('reason', 'planted')]"] == 3
    assert found["vllm:request_success_total[('finished_reason', 'error')]"] == 1
    assert found["vllm:request_success_total[('finished_reason', 'timeout')]"] == 1


def test_counters_do_not_fall_when_the_engine_is_opened_again() -> None:
    client = LocalClient()
    metrics = Metrics(client, "m")
    client.stats = EngineStats(
        steps=90, prefix_queries=50, preemptions=3, kv_values=4000, kv_values_clipped=1, activation_values_clipped=2
    )
    assert values(metrics)["vllm:prefix_cache_queries_total"] == 50
    client.stats = EngineStats(steps=2, prefix_queries=7, kv_values=1000, activation_values=30)
    found = values(metrics)
    assert found["vllm:prefix_cache_queries_total"] == 57
    assert found["vllm:num_preemptions_total"] == 3
    assert found["tapeout:steps_total"] == 92
    assert (found["tapeout:kv_values_total"], found["tapeout:kv_values_clipped_total"]) == (5000, 1)
    assert found["tapeout:activation_values_total"] == 30
    assert found["tapeout:activation_values_clipped_total"] == 2
    client.stats = client.stats._replace(steps=3, prefix_queries=9)
    assert values(metrics)["vllm:prefix_cache_queries_total"] == 59


def test_gauges_are_those_of_the_last_report() -> None:
    client = LocalClient()
    metrics = Metrics(client, "m", read_bandwidth=1e6)
    client.stats = EngineStats(running=3, waiting=2, blocks=40, blocks_held=10, steps=1, step_seconds=0.002)
    found = values(metrics)
    assert (found["vllm:num_requests_running"], found["vllm:num_requests_waiting"]) == (3, 2)
    assert found["vllm:kv_cache_usage_perc"] == 0.25
    assert found["tapeout:bandwidth_share"] == pytest.approx(0.5)  # 1000 bytes in 2 ms of 1 MB/s
    wider = client.stats._replace(step_reads=1.5)  # of a mixture, whose requests chose different experts
    client.stats, of_one = wider, client.stats
    assert values(metrics)["tapeout:bandwidth_share"] == pytest.approx(0.75)
    client.stats = of_one
    assert not [name for name in found if "slots" in name], "a model without recurrent state"
    client.stats = client.stats._replace(slots=8, slots_held=3, slots_cached=2)
    found = values(metrics)
    slots = [found[f"tapeout:state_slots{part}"] for part in ("", "_held", "_cached")]
    assert slots == [8, 3, 2] and found["vllm:kv_cache_usage_perc"] == 0.25
    client.info = replace(client.info, slot_bytes=4096)
    client.stats = client.stats._replace(blocks=0, blocks_held=0)  # of a model without attention
    found = values(metrics)
    assert found["vllm:kv_cache_usage_perc"] == 0.375 and found["tapeout:state_slot_bytes"] == 4096
    client.stats = client.stats._replace(step_requests=2)  # each reads its state and writes it
    assert values(metrics)["tapeout:bandwidth_share"] == pytest.approx((1000 + 2 * 2 * 4096) / 2000)


def test_the_share_of_experts_in_memory_is_told_where_it_is_known() -> None:
    client = LocalClient()
    metrics = Metrics(client, "m")
    names = ("tapeout:mapped_bytes", "tapeout:resident_share")
    assert not any(name in values(metrics) for name in names)
    client.info = replace(client.info, mapped_bytes=4000)
    assert [values(metrics).get(name) for name in names] == [4000, None]
    client.stats = client.stats._replace(mapped_bytes=4000, resident_bytes=1000, page_faults=7)
    found = values(metrics)
    assert [found[name] for name in names] == [4000, 0.25]
    assert found["tapeout:page_faults_total"] == 7


def http_app(metrics: Metrics) -> FastAPI:
    app = FastAPI()
    app.include_router(APIRouter(routes=[metrics.route()]))

    async def model(request: Request) -> Response:
        return PlainTextResponse(request.path_params["name"])

    async def broken(request: Request) -> Response:
        raise RuntimeError("planted")

    app.add_route("/v1/models/{name:path}", model)
    app.add_route("/broken", broken)

    app.add_middleware(HttpMetrics, metrics=metrics)
    return app


def test_http_requests_are_counted_by_route_not_by_path() -> None:
    metrics = Metrics(LocalClient(), "m")
    with TestClient(http_app(metrics), raise_server_exceptions=False) as http:
        for path in ("/v1/models/a", "/v1/models/b/c", "/nowhere/1", "/nowhere/2", "/broken"):
            http.get(path)
        http.request("ODD", "/v1/models/a")
        answer = http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    found = {name: value for name, value in values(metrics).items() if name.startswith("http_requests_total")}
    key = "http_requests_total[('handler', '{}'), ('method', '{}'), ('status', '{}')]"
    assert found[key.format("/v1/models/{name}", "GET", "2xx")] == 2
    assert found[key.format("none", "GET", "4xx")] == 2
    assert found[key.format("/broken", "GET", "5xx")] == 1
    assert len(found) == 5  # with the odd method, and /metrics itself


@pytest.mark.parametrize("seed", range(3))
def test_percentiles_are_at_most_five_percent_off_and_old_values_leave(seed: int) -> None:
    draw = random.Random(seed)
    window, kept = Window(60), []
    for _ in range(4000):
        now, value = draw.uniform(0, 200), math.exp(draw.gauss(-4, 1.5))
        kept.append((now, value))
    for now, value in sorted(kept):
        window.add(value, now)
    recent = sorted(value for now, value in kept if now > 140)
    for percent, found in zip((50, 90, 99), window.percentiles((50, 90, 99), now=199.9), strict=True):
        exact = recent[math.ceil(len(recent) * percent / 100) - 1]
        assert found == pytest.approx(exact, rel=0.05)
    assert window.percentiles((50,), now=270.0) == [None]


@pytest.fixture
def health() -> Iterator[tuple[LocalClient, list[bool], TestClient]]:
    client, draining = LocalClient(), [False]
    health = Health(client, lambda: draining[0])
    app = FastAPI()
    app.router.routes.extend(health.routes())
    with TestClient(app) as http:
        yield client, draining, http


def test_health_and_readiness_give_their_reasons(health: tuple[LocalClient, list[bool], TestClient]) -> None:
    client, draining, http = health

    def now() -> tuple[int, int, str]:
        ready = http.get("/ready")
        return http.get("/health").status_code, ready.status_code, ready.json().get("reason", "")

    assert now() == (200, 200, "")
    client.down = True
    assert now() == (200, 503, "the engine is being started again")
    client.down, client.healthy = False, False
    client.stats = EngineStats(running=2, waiting=5)
    assert now() == (503, 503, "the engine has not reported yet; 2 requests run, 5 wait")
    client.silent_seconds = 6.7
    assert now() == (503, 503, "the engine has not reported for 7 seconds; 2 requests run, 5 wait")
    client.healthy, draining[0] = True, True
    assert now() == (200, 503, "the server is draining")
