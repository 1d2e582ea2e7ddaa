"""Counts good and bad events of service level objectives, for Prometheus's burn-rate alerts and for the live page.

An availability event is a request that was answered, or failed by a fault of the service: a status of 500 or more, a
timeout, or a full queue. What the client did wrong, limits of its key, and requests that it cancelled are none. A TTFT
event is a request that got its first token, or was cancelled when that was late already. An ITL event is the gap
between two deltas of a response. ``deploy/slo.yaml`` has the rules that read these counters.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from runtime.gateway.protocol.calls import Call, Hook
from tapeout.slo import WINDOW_DAYS, ServiceLevelObjectives

SLICE_SECONDS = 3600.0  # after the window, events leave the budget by the hour
FAULTS = (408, "queue_full")  # statuses below 500, and codes, that are a fault of the service


class _Events:
    """Of one objective. ``good`` and ``total``: since the start. The budget counts those of the window."""

    def __init__(self, share: float, slices: int) -> None:
        self.share, self.good, self.total = share, 0, 0
        self._slices: deque[list[int]] = deque(maxlen=slices)  # number of the slice, bad and all events in it

    def add(self, good: bool, now: float) -> None:
        self.total += 1
        self.good += good
        number = int(now / SLICE_SECONDS)
        if not self._slices or self._slices[-1][0] != number:
            self._slices.append([number, 0, 0])
        current = self._slices[-1]
        current[1] += not good
        current[2] += 1

    def window(self, now: float) -> tuple[int, int]:
        """Bad and all events."""
        oldest = int(now / SLICE_SECONDS) - (self._slices.maxlen or 0)
        kept = [(bad, total) for number, bad, total in self._slices if number > oldest]
        return sum(bad for bad, _ in kept), sum(total for _, total in kept)


class ObjectiveEvents(Hook, Collector):
    """A hook of all calls. ``clock``: seconds that never go back."""

    def __init__(self, slo: ServiceLevelObjectives, clock: Callable[[], float] = time.monotonic) -> None:
        self._slo, self._clock = slo, clock
        slices = round(WINDOW_DAYS * 86400 / SLICE_SECONDS)
        self._events = {name: _Events(share, slices) for name, share in slo.shares.items()}
        self._gaps = self._events.get("itl")
        self._last: dict[str, list[float]] = {}  # by call: when the last tokens of each choice came

    def admit(self, call: Call) -> None:
        if self._gaps is not None:
            self._last[call.id] = [0.0] * call.choices

    def tokens(self, call: Call, choice: int, count: int, now: float) -> None:
        """A server calls it a thousand times a second."""
        if self._gaps is None or self._slo.itl is None:
            return
        last = self._last[call.id]
        before, last[choice] = last[choice], now
        if before:
            self._gaps.add(now - before <= self._slo.itl.seconds, now)

    def ended(self, call: Call) -> None:
        self._last.pop(call.id, None)
        now = self._clock()
        if (events := self._events.get("availability")) and (good := _answered(call)) is not None:
            events.add(good, now)
        if (events := self._events.get("ttft")) and self._slo.ttft is not None:
            most = self._slo.ttft.seconds
            if call.first_token is not None:
                events.add(call.first_token - call.arrival <= most, now)
            elif call.cancelled and call.end is not None and call.end - call.arrival > most:
                events.add(False, now)

    def budgets(self) -> list[dict[str, Any]]:
        """Of each objective, over the window as far as this process has run: for the live page.

        ``left``: share of the error budget, negative where more was spent; 1 without events.
        """
        now, found = self._clock(), list[dict[str, Any]]()
        latencies = {"ttft": self._slo.ttft, "itl": self._slo.itl}
        for name, events in self._events.items():
            bad, total = events.window(now)
            latency = latencies.get(name)
            found.append(
                {
                    "objective": name,
                    "seconds": None if latency is None else latency.seconds,
                    "share": events.share,
                    "bad": bad,
                    "total": total,
                    "left": 1 - bad / total / (1 - events.share) if total else 1.0,
                }
            )
        return found

    def collect(self) -> Iterator[Metric]:
        good = CounterMetricFamily("tapeout:slo_good_events", "Events as the objective wants them.", labels=["slo"])
        total = CounterMetricFamily("tapeout:slo_events", "Events that the objective counts.", labels=["slo"])
        goal = GaugeMetricFamily("tapeout:slo_objective", "Share of good events that is wanted.", labels=["slo"])
        left = GaugeMetricFamily(
            "tapeout:slo_budget_left", "Share of the error budget, of the window since the start.", labels=["slo"]
        )
        for name, events in self._events.items():
            good.add_metric([name], events.good)
            total.add_metric([name], events.total)
            goal.add_metric([name], events.share)
        for budget in self.budgets():
            left.add_metric([budget["objective"]], budget["left"])
        yield from (good, total, goal, left)


def _answered(call: Call) -> bool | None:
    """None for what says nothing of the service."""
    error = call.error
    if error is None:
        return None if call.cancelled else True
    return False if error.status >= 500 or error.status in FAULTS or error.code in FAULTS else None
