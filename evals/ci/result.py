"""What every format is written from: the verdict, the engine that it is about, and the recipe that it was judged by."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

from evals.check import Check, Outcome
from evals.verdict import Verdict
from tapeout.artifact import Artifact
from tapeout.errors import TapeoutError
from tapeout.signing import Statement

SEVERITY = (Outcome.FAIL, Outcome.INCONCLUSIVE, Outcome.PASS)  # the worst first


class CiError(TapeoutError):
    """A format is unknown, or its file cannot be written."""


@dataclass(frozen=True)
class ChampionReference:
    """The registered champion, to compare with. ``name``: what readers call it."""

    name: str
    verdict: Verdict


@dataclass(frozen=True)
class GateResult:
    """``model``: the registered name. ``params``: the recipe's file, and ``line`` its section ``gate``.

    ``champion`` is None where none is registered, or no format asked for it. ``plots``: addresses of images.
    """

    model: str
    verdict: Verdict
    digest: str  # of the verdict
    statement: Statement
    params: str
    line: int
    champion: ChampionReference | None = None
    plots: tuple[str, ...] = ()

    @property
    def worst_first(self) -> list[Check]:
        return sorted(self.verdict.checks, key=lambda check: (SEVERITY.index(check.outcome), -excess(check)))

    @property
    def not_passed(self) -> list[Check]:
        return [check for check in self.worst_first if check.outcome is not Outcome.PASS]


def gate_result(
    model: str,
    found: Artifact[Verdict],
    statement: Statement,
    params: Path,
    *,
    champion: ChampionReference | None = None,
    plots: tuple[str, ...] = (),
) -> GateResult:
    here = Path.cwd()
    shown = params.resolve().relative_to(here) if params.resolve().is_relative_to(here) else params
    lines = params.read_text().splitlines()
    line = next((n for n, text in enumerate(lines, start=1) if re.match(r"gate\s*:", text)), 1)
    return GateResult(model, found.record, found.digest, statement, shown.as_posix(), line, champion, plots)


def excess(check: Check) -> float:
    """How far a value lies beyond its bound, as a share of the bound; infinite where a check has no numbers."""
    if check.value is None or check.bound is None:
        return math.inf
    beyond = check.value - check.bound if check.direction == "at_most" else check.bound - check.value
    return beyond / (abs(check.bound) or 1.0)
