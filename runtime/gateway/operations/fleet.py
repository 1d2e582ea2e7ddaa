"""What operators see of each engine of a fleet: metrics with its address as a label, and ``GET /fleet``."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from runtime.gateway.fleet.release import ReleasePlan
from runtime.gateway.fleet.replica import ReplicaState, ReplicaStatus
from runtime.gateway.http.sse import JsonResponse
from runtime.gateway.operations.engine_metrics import ENGINE_COUNTERS, EngineSeries, kv_usage
from runtime.gateway.operations.metrics import TTFT_BUCKETS
from runtime.gateway.protocol.calls import Call, Hook
from runtime.wire.messages import Pool

SERVER_FAULT = 500  # of the HTTP statuses, the least
FLEET_COUNTERS = {
    "retries": "Requests without a token that were sent to another engine.",
    "resumptions": "Requests with tokens that went on on another engine.",
    "moves": "Requests that left an engine that drains or is for prompts, and went on elsewhere with their blocks.",
    "lost": "Requests with an error because no engine went on with them.",
}


class Fleet(Protocol):
    """``counts``: by name of :data:`FLEET_COUNTERS`. ``replicas_wanted``: by pool, if it was said by what."""

    @property
    def counts(self) -> Mapping[str, int]: ...

    @property
    def replicas_wanted(self) -> Mapping[Pool, int]: ...

    @property
    def plan(self) -> ReleasePlan | None: ...

    def statuses(self) -> Sequence[ReplicaStatus]: ...

    def away(self) -> str:
        """How the engines are, while none is ready."""
        ...


@dataclass
class BundleFigures:
    """Of the calls that a bundle has answered. ``failed``: by a fault of the service. ``first_tokens``: calls by the
    bucket of :data:`TTFT_BUCKETS` that their time to the first token falls into; the last one is beyond all.
    """

    calls: int = 0
    failed: int = 0
    first_tokens: list[int] = field(default_factory=lambda: [0] * (len(TTFT_BUCKETS) + 1))


class FleetView(Collector, Hook):
    """Also a hook of all calls: counts them by bundle."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._figures: dict[str, BundleFigures] = {}  # by digest
        self._in_release: dict[str, BundleFigures] = {}  # of those, since the last release began
        self._candidate = ""  # of that

    def ended(self, call: Call) -> None:
        if call.cancelled or (call.error is not None and call.error.status < SERVER_FAULT):
            return
        for figures in (self._figures, self._of_release()):
            found = figures.setdefault(call.digest, BundleFigures())
            found.calls += 1
            found.failed += call.error is not None
            if call.first_token is not None:
                found.first_tokens[bisect_left(TTFT_BUCKETS, call.first_token - call.arrival)] += 1

    def _of_release(self) -> dict[str, BundleFigures]:
        """What the verdict is reached on: a bundle that failed once is judged anew when it is tried again."""
        candidate = "" if self._fleet.plan is None else self._fleet.plan.candidate
        if candidate != self._candidate:
            self._candidate = candidate
            if candidate:
                self._in_release = {}
        return self._in_release

    def collect(self) -> Iterator[Metric]:
        states = GaugeMetricFamily(
            "tapeout:replica_state", "1 for the state that it is in.", labels=["engine", "state"]
        )
        for status in self._fleet.statuses():
            for state in ReplicaState:
                states.add_metric([status.address, state.value], float(status.state is state))
        yield states
        wanted = GaugeMetricFamily("tapeout:replicas_wanted", "Engines that there should be.", labels=["pool"])
        for pool, engines in self._fleet.replicas_wanted.items():
            wanted.add_metric([pool], engines)
        yield wanted
        calls = CounterMetricFamily("tapeout:bundle_calls", "Calls that a bundle has answered.", labels=["bundle"])
        failed = CounterMetricFamily("tapeout:bundle_failed_calls", "Of those, with a fault.", labels=["bundle"])
        for digest, figures in self._figures.items():
            calls.add_metric([digest], figures.calls)
            failed.add_metric([digest], figures.failed)
        yield from (calls, failed)
        if (plan := self._fleet.plan) is not None:
            yield GaugeMetricFamily(
                "tapeout:release_share", "Share of the conversations that go to the candidate.", value=plan.share
            )
        for name, text in FLEET_COUNTERS.items():
            family = CounterMetricFamily(f"tapeout:fleet_{name}", text)
            family.add_metric([], self._fleet.counts[name])
            yield family

    def series(self) -> list[EngineSeries]:
        """Of each engine that is connected; counters since it was opened."""
        found: list[EngineSeries] = []
        for status in self._fleet.statuses():
            if status.info is None:
                continue
            stats, state = status.stats, status.state
            counted = {attribute: getattr(stats, attribute) for *_, attribute in ENGINE_COUNTERS}
            healthy, ready = state in (ReplicaState.READY, ReplicaState.DRAINING), state is ReplicaState.READY
            found.append(
                EngineSeries(status.address, status.info, stats, healthy, ready, stats.generated_tokens, counted)
            )
        return found

    def replicas(self) -> list[dict[str, Any]]:
        """Of each listed engine, whether it is connected or not."""
        return [
            {
                "address": status.address,
                "state": status.state.value,
                "reason": status.why or None,
                "level": status.info.level if status.info else None,
                "pool": status.info.pool if status.info else None,
                "digest": status.info.digest if status.info else None,
                "source": (status.info.source or None) if status.info else None,
                "cold_seconds": (status.info.cold_seconds or None) if status.info else None,
                "requests": status.own,
                "running": status.stats.running,
                "waiting": status.stats.waiting,
                "waiting_tokens": status.stats.waiting_tokens,
                "kv_usage": kv_usage(status.stats),
                "prefix_queries": status.stats.prefix_queries,
                "prefix_hits": status.stats.prefix_hits,
            }
            for status in self._fleet.statuses()
        ]

    def release(self) -> str:
        """The change of bundles that is under way, in words; empty where there is none."""
        plan = self._fleet.plan
        if plan is None or not plan.candidate:
            return ""
        digests = [status.info.digest for status in self._fleet.statuses() if status.info is not None]
        text = (
            f"{plan.phase}: {plan.candidate[:12]} is on {digests.count(plan.candidate)} engines and gets "
            f"{100 * plan.share:g} % of the conversations, {plan.stable[:12]} is on {digests.count(plan.stable)}"
        )
        return f"{text}; {plan.moving} opens the other one" if plan.moving else text

    def routes(self) -> list[Route]:
        async def fleet(_: Request) -> Response:
            plan = self._fleet.plan
            body = {
                "replicas": self.replicas(),
                "release": None if plan is None else plan.model_dump(),
                "bundles": {digest: asdict(figures) for digest, figures in self._of_release().items()},
                **{name: self._fleet.counts[name] for name in FLEET_COUNTERS},
            }
            return JsonResponse(body, headers={"Cache-Control": "no-store"})

        return [Route("/fleet", fleet)]
