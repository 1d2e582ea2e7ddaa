"""Sums of what engines report, which never go back when one of them is lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from runtime.wire.messages import EngineStats

STATES = (
    *("running", "waiting", "waiting_tokens", "blocks", "blocks_held", "blocks_cached"),
    *("slots", "slots_held", "slots_cached"),
    *("mapped_bytes", "resident_bytes"),
)
OF_A_STEP = ("step_seconds", "step_tokens", "step_requests", "step_reads")
FINISHED = "finished"  # counters by reason
COUNTERS = tuple(name for name in EngineStats._fields if name not in (*STATES, *OF_A_STEP, FINISHED))


class Totals:
    """Of connections, each with the counters that the engine had when it began."""

    def __init__(self) -> None:
        self._before: Counter[str] = Counter()  # of connections that have ended
        # Of those that have not, by the identity of their first stats, which are kept so that it stays theirs.
        self._latest: dict[int, tuple[EngineStats, Counter[str]]] = {}

    def of(self, connections: Sequence[tuple[EngineStats, EngineStats]]) -> EngineStats:
        """``connections``: the first stats of each, which is always the same object, and its last.

        Of the last step: that of the engine with most requests in it.
        """
        found = {id(first): (first, _counted(last) - _counted(first)) for first, last in connections}
        for ended in self._latest.keys() - found.keys():
            self._before += self._latest[ended][1]
        self._latest = found
        counted = sum((counts for _, counts in found.values()), self._before)
        states = {name: sum(getattr(last, name) for _, last in connections) for name in STATES}
        busiest = max((last for _, last in connections), key=lambda last: last.step_requests, default=EngineStats())
        step = {name: getattr(busiest, name) for name in OF_A_STEP}
        finished = {name.partition(" ")[2]: count for name, count in counted.items() if name.startswith(f"{FINISHED} ")}
        return EngineStats(**{name: counted[name] for name in COUNTERS}, **states, **step, finished=finished)


def _counted(stats: EngineStats) -> Counter[str]:
    counts = Counter({name: getattr(stats, name) for name in COUNTERS})
    counts.update({f"{FINISHED} {reason}": count for reason, count in stats.finished.items()})
    return counts
