"""Steps in flight: planned, and not committed yet. More than one where the next is planned before the last has ended.

It knows what each step feeds, and counts it in the sequences; not why, nor what comes of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from runtime.engine.scheduling.sequence import ScheduledSequence
from runtime.engine.scheduling.work import Work


@dataclass
class PlannedStep:
    """``began``: when the engine began it, as far as is known."""

    works: dict[ScheduledSequence, Work]
    began: float


class PlannedSteps:
    """``steps``: in order, for reading."""

    def __init__(self) -> None:
        self.steps: list[PlannedStep] = []

    def begin(self, works: dict[ScheduledSequence, Work], now: float) -> None:
        for sequence, work in works.items():
            sequence.planned += 1
            sequence.fed = work.start + len(work.tokens)
            sequence.undecided += work.samples
        self.steps.append(PlannedStep(works, now))

    def end(self, now: float) -> PlannedStep:
        """The first one has ended, and the next one began with that."""
        step = self.steps.pop(0)
        for sequence, work in step.works.items():
            sequence.planned -= 1
            sequence.undecided -= work.samples
        for later in self.steps:
            later.began = now
        return step

    @property
    def sequences(self) -> set[ScheduledSequence]:
        """Whose state they write, also of requests that have ended."""
        return {sequence for step in self.steps for sequence in step.works}

    def check(self, sequence: ScheduledSequence) -> None:
        """The bookkeeping adds up; for tests."""
        assert sequence.planned == sum(sequence in step.works for step in self.steps)
        assert sequence.fed >= sequence.computed and (sequence.planned or sequence.fed == sequence.computed)
