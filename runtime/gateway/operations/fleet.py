"""What operators see of each engine of a fleet: metrics with its address as a label, and ``GET /fleet``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from runtime.gateway.fleet.client import ReplicaStatus
from runtime.gateway.fleet.replica import ReplicaState
from runtime.gateway.http.sse import JsonResponse
from runtime.gateway.operations.metrics import ENGINE_COUNTERS, EngineSeries, kv_usage

FLEET_COUNTERS = {
    "retries": "Requests without a token that were sent to another engine.",
    "resumptions": "Requests with tokens that went on on another engine.",
    "lost": "Requests with an error because no engine went on with them.",
}


class Fleet(Protocol):
    """``counts``: by name of :data:`FLEET_COUNTERS`. ``replicas_wanted``: None where nobody has said by what."""

    @property
    def counts(self) -> Mapping[str, int]: ...

    @property
    def replicas_wanted(self) -> int | None: ...

    def statuses(self) -> Sequence[ReplicaStatus]: ...


class FleetView(Collector):
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterator[Metric]:
        states = GaugeMetricFamily(
            "tapeout:replica_state", "1 for the state that it is in.", labels=["engine", "state"]
        )
        for status in self._fleet.statuses():
            for state in ReplicaState:
                states.add_metric([status.address, state.value], float(status.state is state))
        yield states
        if (wanted := self._fleet.replicas_wanted) is not None:
            yield GaugeMetricFamily("tapeout:replicas_wanted", "Engines that there should be.", value=wanted)
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

    def routes(self) -> list[Route]:
        async def fleet(_: Request) -> Response:
            body = {"replicas": self.replicas(), **{name: self._fleet.counts[name] for name in FLEET_COUNTERS}}
            return JsonResponse(body, headers={"Cache-Control": "no-store"})

        return [Route("/fleet", fleet)]
