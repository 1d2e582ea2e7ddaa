"""The job summary in GitHub-flavored Markdown, which Buildkite shows as an annotation."""

from __future__ import annotations

import re
from collections.abc import Iterable

from evals.check import Check, Outcome
from evals.ci.result import GateResult
from evals.verdict import COLUMNS, row

SUMMARY_BYTES = 1024 * 1024  # GitHub refuses a job summary that is larger, as Buildkite does an annotation
CELL_CHARACTERS = 500
SYMBOLS = {Outcome.PASS: "✅", Outcome.INCONCLUSIVE: "⚠️", Outcome.FAIL: "❌"}
_SPECIAL = re.compile(r"[!\"#$&'*:<>@\[\\\]^_`{|}~]|(?<=[wW]{3})\.")


def summary(result: GateResult, limit: int = SUMMARY_BYTES) -> str:
    """Outcome, reason, a row per check with the worst first, and what was judged; in at most ``limit`` bytes of UTF-8.

    Rows that do not fit are left out and counted.
    """
    verdict = result.verdict
    candidate, baseline = verdict.candidate[:12], verdict.baseline[:12]
    about = (
        f"Candidate `{candidate}` of {escape(result.model)} against the float engine `{baseline}`, "
        f"for {escape(verdict.target)}. Verdict `{result.digest[:12]}`, policy `{verdict.policy.digest[:12]}`.\n"
    )
    head = heading(result)
    return f"{head}{checks_table(result.worst_first, limit - len(f'{head}{about}'.encode()))}{about}"


def heading(result: GateResult) -> str:
    verdict = result.verdict
    return f"## {SYMBOLS[verdict.outcome]} Tapeout gate: {verdict.outcome.value}\n\n{escape(verdict.headline)}\n\n"


def checks_table(checks: Iterable[Check], limit: int) -> str:
    return table(COLUMNS, (cells(check) for check in checks), limit, "checks: see `verdict.json`")


def cells(check: Check) -> list[str]:
    outcome, *others = row(check)
    return [f"{SYMBOLS[check.outcome]} {outcome}", *map(escape, others)]


def table(columns: Iterable[str], rows: Iterable[Iterable[str]], limit: int, rest: str) -> str:
    """A table and an empty line, in at most ``limit`` bytes. ``rows``: escaped cells. ``rest``: what is left out."""
    names = list(columns)
    text = f"{line(names)}{line(['---'] * len(names))}"
    left_out, left = 0, limit - len(text.encode()) - len(f"\n… and 999999 more {rest}\n\n".encode())
    for content in rows:
        left -= len(shown := line(content).encode())
        if left_out or left < 0:
            left_out += 1
        else:
            text += shown.decode()
    return text + (f"\n… and {left_out} more {rest}\n\n" if left_out else "\n")


def line(content: Iterable[str]) -> str:
    return f"| {' | '.join(content)} |\n"


def escape(text: str, limit: int = CELL_CHARACTERS) -> str:
    """Text that shows as itself: no markup, table cell, link, mention or issue reference comes of it.

    >>> escape("a|b <i> @team #1")
    'a&#124;b &#60;i&#62; &#64;<!-- -->team &#35;<!-- -->1'
    """
    plain = " ".join(printable(text).split())
    plain = plain if len(plain) <= limit else f"{plain[: limit - 1]}…"
    return _SPECIAL.sub(_entity, plain)


def _entity(found: re.Match[str]) -> str:
    # A comment after the character stops mentions and references, which GitHub looks for after entities are decoded.
    return f"&#{ord(found[0])};{'<!-- -->' if found[0] in '@#!' else ''}"


def printable(text: str) -> str:
    """Without control, format and surrogate characters; those become U+FFFD.

    >>> printable("a\\x1b[1mb")
    'a�[1mb'
    """
    return "".join(c if c.isprintable() or c.isspace() else "\N{REPLACEMENT CHARACTER}" for c in text)
