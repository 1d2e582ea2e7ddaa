"""All requests of an engine, and their ways: they wait, run, wait again where memory runs out, and end.

It knows who waits, who runs and who holds state; not who should.
"""

from __future__ import annotations

from runtime.engine.cache.sequences import SequenceCache
from runtime.engine.scheduling.order import ServiceOrder
from runtime.engine.scheduling.sequence import ScheduledSequence
from runtime.engine.scheduling.waiting import WaitingQueue
from runtime.engine.scheduling.work import Finished
from runtime.wire.messages import FinishReason


class Requests:
    def __init__(self, cache: SequenceCache, order: ServiceOrder) -> None:
        self._cache, self._order = cache, order
        self.queue = WaitingQueue(order.rank)
        self.waiting = self.queue.sequences
        self.running: dict[str, ScheduledSequence] = {}
        self.preemptions = 0
        self.answer_tokens: float | None = None  # of a request, smoothed

    def find(self, id: str) -> ScheduledSequence | None:
        return self.running.get(id) or self.waiting.get(id)

    def add(self, sequence: ScheduledSequence) -> None:
        self._order.arrived(sequence.tenant)
        self.queue.add(sequence)

    def run(self, sequence: ScheduledSequence) -> None:
        self.queue.remove(sequence)
        self.running[sequence.id] = sequence

    def preempt(self, sequence: ScheduledSequence) -> None:
        self.release(sequence)
        self.queue.add(self.running.pop(sequence.id))
        self.preemptions += 1

    def finish(self, id: str, reason: FinishReason) -> Finished:
        if sequence := self.waiting.get(id):
            self.queue.remove(sequence)
        else:
            sequence = self.running.pop(id)
            if not sequence.planned:  # else once those steps have ended
                self.release(sequence)
        sequence.ended = True
        if reason in ("stop", "length"):
            mean = self.answer_tokens
            self.answer_tokens = sequence.answered if mean is None else mean + 0.1 * (sequence.answered - mean)
        self._order.left(sequence.tenant)
        return Finished(id, reason)

    def release(self, sequence: ScheduledSequence) -> None:
        self._cache.close(sequence.lease)
        sequence.computed, sequence.fed, sequence.missing = 0, 0, None

    def check(self) -> None:
        """The bookkeeping adds up; for tests."""
        assert not self.waiting.keys() & self.running.keys()
        for sequence in (*self.waiting.values(), *self.running.values()):
            assert sequence.computed < len(sequence.tokens) and not sequence.ended
            assert sequence.lease.room >= sequence.computed
        for sequence in self.waiting.values():
            assert not sequence.lease.room and not sequence.computed, "a waiting request has state"
        self.queue.check()
        self._order.check(len(self.waiting) + len(self.running))
