"""A comment on a pull or merge request: what became better or worse against the champion, with the report's plots.

Numbers of both verdicts come with confidence bounds. A check became better or worse only where its bounds do not
overlap with those of the champion; other changes are within the uncertainty and are not listed.
"""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import quote

from evals.check import Check
from evals.ci.markdown import checks_table, escape, heading, table
from evals.ci.result import GateResult
from evals.verdict import number

COMMENT_BYTES = 60_000  # GitHub takes 65,536 characters
MARKER = "<!-- tapeout gate -->"  # a later run finds its comment by this line, and edits it
PLOTS = ("accuracy", "kl", "throughput", "latency")  # of the report, where it has them


def comment(result: GateResult) -> str:
    body = f"{MARKER}\n{heading(result)}"
    if result.not_passed:
        body += checks_table(result.not_passed, COMMENT_BYTES // 3)
    body += compared(result)
    if result.plots:
        images = " ".join(f"![plot]({quote(url, safe=':/')})" for url in result.plots)
        body += f"<details><summary>Plots</summary>\n\n{images}\n\n</details>\n"
    return body


def compared(result: GateResult) -> str:
    champion = result.champion
    if champion is None:
        return f"No champion of {escape(result.model)} is registered, so there is nothing to compare with.\n\n"
    name = escape(champion.name)
    if champion.verdict.candidate == result.verdict.candidate:
        return f"This engine is {name}: there is nothing to compare.\n\n"
    text, seen = f"### Against {name}\n\n", {check.name: check for check in champion.verdict.checks}
    if differences := champion.verdict.policy.differences(result.verdict.policy):
        text += f"The two were judged by other policies: {escape('; '.join(differences))}.\n\n"
    pairs = [(check, seen[check.name]) for check in result.verdict.checks if check.name in seen]
    changes = {sign: [pair for pair in pairs if changed(*pair) == sign] for sign in (-1, 1)}
    for sign, title in ((-1, "Worse"), (1, "Better")):
        if changes[sign]:
            text += f"**{title}**\n\n" + _changes(changes[sign])
    if not any(changes.values()):
        text += f"No difference in {len(pairs)} checks is larger than its uncertainty.\n\n"
    return text


def changed(check: Check, before: Check) -> int:
    """1: better than ``before``, -1: worse, 0: the bounds overlap, or there are none.

    >>> from evals.check import Outcome
    >>> kl = Check(name="kl", title="KL", outcome=Outcome.PASS, reason="", direction="at_most", lower=0.01, upper=0.02)
    >>> changed(kl, kl.model_copy(update={"lower": 0.03, "upper": 0.04}))
    1
    """
    if None in (check.direction, check.lower, check.upper, before.lower, before.upper):
        return 0
    assert check.lower is not None and check.upper is not None
    assert before.lower is not None and before.upper is not None
    rose, fell = check.lower > before.upper, check.upper < before.lower
    sign = 1 if check.direction == "at_least" else -1
    return sign * (rose - fell)


def _changes(pairs: Iterable[tuple[Check, Check]]) -> str:
    columns = ("check", "champion", "candidate", "bound")
    rows = (
        [escape(check.title), _interval(before), _interval(check), escape(number(check.bound))]
        for check, before in pairs
    )
    return table(columns, rows, COMMENT_BYTES // 4, "checks: see `verdict.json`")


def _interval(check: Check) -> str:
    return escape(f"{number(check.value)} ({number(check.lower)} … {number(check.upper)})")
