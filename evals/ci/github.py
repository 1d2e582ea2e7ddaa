"""GitHub Actions: annotations as workflow commands, the job summary, and outputs of the step.

https://docs.github.com/actions/reference/workflows-and-actions/workflow-commands
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import TextIO

from evals.check import Outcome
from evals.ci.result import GateResult
from tapeout.errors import TapeoutError

ANNOTATIONS = 10  # of each kind, in one step; GitHub does not show more
KINDS = {Outcome.FAIL: "error", Outcome.INCONCLUSIVE: "warning"}
_ESCAPES = {"%": "%25", "\r": "%0D", "\n": "%0A"}
_PROPERTY_ESCAPES = {**_ESCAPES, ":": "%3A", ",": "%2C"}


def annotation_lines(result: GateResult) -> Iterator[str]:
    """Workflow commands, one per line: checks that failed as errors, undecided ones as warnings, the worst first."""
    for outcome, kind in KINDS.items():
        checks = [check for check in result.not_passed if check.outcome is outcome]
        for check in checks[:ANNOTATIONS]:
            yield command(kind, check.reason, file=result.params, line=str(result.line), title=f"gate: {check.title}")
    if not result.not_passed:
        yield command("notice", result.verdict.headline, title=f"gate: {result.verdict.outcome.value}")


def broken(error: TapeoutError) -> str:
    return command("error", str(error), title="gate: no valid verdict")


def command(kind: str, message: str, **properties: str) -> str:
    """
    >>> command("error", "50 %\\nlost", title="a: b")
    '::error title=a%3A b::50 %25%0Alost'
    """
    named = ",".join(f"{name}={_escaped(value, _PROPERTY_ESCAPES)}" for name, value in properties.items())
    return f"::{kind}{' ' if named else ''}{named}::{_escaped(message, _ESCAPES)}"


def _escaped(text: str, escapes: dict[str, str]) -> str:
    # The runner splits its input at every kind of line break, so those that have no escape become spaces.
    escaped = "".join(escapes.get(character, character) for character in text)
    return re.sub(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]", " ", escaped)


def outputs(result: GateResult) -> str:
    """Lines for the file of ``$GITHUB_OUTPUT``."""
    verdict = result.verdict
    named = {"outcome": verdict.outcome.value, "exit-code": int(verdict.exit_code), "digest": verdict.candidate}
    return "".join(f"{name}={value}\n" for name, value in named.items())


@contextmanager
def no_commands(stream: TextIO) -> Generator[None]:
    """What is printed meanwhile holds no workflow command, whatever it says."""
    token = secrets.token_hex(16)
    print(f"::stop-commands::{token}", file=stream, flush=True)
    try:
        yield
    finally:
        print(f"\n::{token}::", file=stream, flush=True)
