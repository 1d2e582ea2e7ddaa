"""When requests end that have not come far enough: one heap of points in time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from heapq import heapify, heappop, heappush
from itertools import count

from runtime.engine.scheduling.sequence import ScheduledSequence
from runtime.wire.messages import GenerateRequest
from tapeout.errors import RequestError


def timeouts_of(request: GenerateRequest) -> dict[str, float]:
    """Seconds by what must have happened until then. :class:`RequestError` for one that is no duration."""
    timeouts = {
        "queue": request.queue_timeout,
        "first token": request.first_token_timeout,
        "last token": request.timeout,
    }
    found = {until: seconds for until, seconds in timeouts.items() if seconds is not None}
    for seconds in found.values():
        if not seconds >= 0:  # NaN has no place among deadlines
            raise RequestError(f"a timeout of {seconds} seconds", expected="at least 0")
    return found


class Deadlines:
    def __init__(self) -> None:
        self._numbers = count()  # of equal points in time the first comes first
        self._heap: list[tuple[float, int, str, ScheduledSequence]] = []  # when, a number, until what, of whom

    def add(self, sequence: ScheduledSequence, timeouts: Mapping[str, float]) -> None:
        for until, seconds in timeouts.items():
            heappush(self._heap, (sequence.arrival + seconds, next(self._numbers), until, sequence))

    def passed(self, now: float) -> Iterator[ScheduledSequence]:
        """Requests that must end. The caller ends each before it asks for the next."""
        while self._heap and self._heap[0][0] <= now:
            _, _, until, sequence = heappop(self._heap)
            kept = (until == "queue" and sequence.started) or (until == "first token" and sequence.answered)
            if not kept and not sequence.ended:
                yield sequence

    def tidy(self, requests: int) -> None:
        """Forget those of requests that have ended, where they are most of all. ``requests``: that there are."""
        if len(self._heap) > 256 + 6 * requests:
            self._heap = [entry for entry in self._heap if not entry[3].ended]
            heapify(self._heap)
