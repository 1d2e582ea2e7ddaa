"""Steps in flight at the engine: begun, and not ended. More than one where the engine takes several at once.

It knows the engine and what it was fed; not who planned that, nor what becomes of the results.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from engines.protocol import Engine, Entry, Finish, Result
from runtime.engine.active import ActiveRequest
from runtime.engine.scheduling.work import Work
from tapeout.errors import RequestError, one_line

BROKEN_STEPS = 3  # so many steps in turn in which every entry failed: the engine is broken, not the requests


class EngineBrokenError(Exception):
    """The engine fails whatever it is fed."""


@dataclass
class RunningStep:
    """A step that was begun. ``now``: when it was planned; ``started``: the same by the core's own clock.

    ``ahead``: so many steps in turn, this one the last, were begun before the tokens of the one before were known.
    ``failed``: it is known to have; ``finish`` says why.
    """

    works: Sequence[Work]
    requests: Sequence[ActiveRequest]
    entries: Sequence[Entry]
    now: float
    started: float
    ahead: int
    finish: Finish
    failed: bool = False


class RunningSteps:
    """``steps``: in order, for reading."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._broken = engine, 0
        self.steps: list[RunningStep] = []

    def begin(
        self,
        works: Sequence[Work],
        requests: Sequence[ActiveRequest],
        entries: Sequence[Entry],
        now: float,
        started: float,
    ) -> None:
        """Feed a step. Where that fails, its end says so."""
        ahead = self.steps[-1].ahead + 1 if self.steps else 0
        try:
            step = RunningStep(works, requests, entries, now, started, ahead, self._engine.begin(entries))
        except Exception as failure:
            step = RunningStep(works, requests, entries, now, started, ahead, _raising(failure), failed=True)
        self.steps.append(step)

    def end(self) -> tuple[RunningStep, list[Result]]:
        """Wait for the step that was begun first. If it fails as a whole, each entry is fed alone, and those that fail
        alone end.

        The steps behind it were fed what it has not computed: each of them fails, too.
        """
        step = self.steps.pop(0)
        try:
            results = step.finish()
        except Exception as failure:
            self.wait()
            for later in self.steps:
                later.finish, later.failed = _raising(failure), True
            results, fed = list[Result](), list[Result]()
            for request, entry in zip(step.requests, step.entries, strict=True):
                result = Result()
                if not request.ended:
                    result = self._feed_alone(entry, request)
                    fed.append(result)
                results.append(result)
            if fed:  # else all requests have ended, and nothing is known of the engine
                self._broken = self._broken + 1 if all(result.error for result in fed) else 0
            if self._broken == BROKEN_STEPS:
                raise EngineBrokenError(f"{BROKEN_STEPS} steps in turn failed: {one_line(failure)}") from failure
        else:
            self._broken = 0
        return step, results

    def wait(self) -> None:
        """For the ends of all steps, whatever comes of them."""
        for step in self.steps:
            with suppress(Exception):
                step.finish()

    def _feed_alone(self, entry: Entry, request: ActiveRequest) -> Result:
        if entry.follows is not None:
            entry = entry._replace(tokens=(request.last,), follows=None)
        try:
            return self._engine.begin([entry])()[0]
        except Exception as failure:
            return Result(error=RequestError(f"the engine failed: {one_line(failure)}"))


def _raising(failure: Exception) -> Finish:
    """The second half of a step that has failed."""

    def finish() -> list[Result]:
        raise failure

    return finish
