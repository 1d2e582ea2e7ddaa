"""The page of the simulation."""

from __future__ import annotations

from benchmarks.gate.evidence import standard_error
from benchmarks.gate.rows import BAD, BOUND, EQUAL, GOOD, NONE, RARE, Result

PROMISES = {
    BOUND: (
        "The truth lies on the bound",
        "The value that the check bounds lies exactly on its bound: a pass is wrong, and so is a fail. Each may happen "
        "in 5 % of runs; the rest is INCONCLUSIVE.",
    ),
    BAD: ("Worse than a bound", "A pass is wrong."),
    EQUAL: (
        "Equal engines",
        "Candidate and baseline have the same law: a fail is wrong. Their speed ratio, of median 1, lies on the "
        "default bound, so such an engine does not pass either: it is not shown to be as fast.",
    ),
    GOOD: ("A good engine", "It passes in at least 95 % of runs."),
    RARE: (
        "Rare bad documents, without a limit for a document",
        "The mean lies on the bound when a document counts for whatever it has. A pass is wrong.",
    ),
    NONE: (
        "What is not promised",
        "The same with the few documents of parity. Of 32 documents, none is among the worst 1 % in 72 % of runs.",
    ),
}


def page(results: list[Result], runs: int, confidence: float) -> str:
    lines = [
        "# How often the gate is wrong",
        "",
        "Written by `make simulate-gate`, which judges made-up evidence with the code that judges real evidence, under",
        f"the bounds of `params.yaml`: {runs:,} runs a row. [statistics.md](../statistics.md) says what is promised.",
        "± is one standard error of the simulation.",
    ]
    for promise, (title, explanation) in PROMISES.items():
        found = [result for result in results if result.promise == promise]
        if not found:
            continue
        lines += ["", f"## {title}", "", explanation, "", "| check | distribution | evidence | PASS | FAIL |"]
        lines.append("|---|---|---|--:|--:|")
        for result in found:
            cells = (share_of_runs(count, result.runs) for count in (result.passed, result.failed))
            lines.append(f"| {result.check} | {result.distribution} | {result.units} | {' | '.join(cells)} |")
    broken = [result for result in results if not result.holds(confidence)]
    lines += ["", f"{len(results) - len(broken)} of {len(results)} rows keep their promise."]
    return "\n".join(lines) + "\n"


def share_of_runs(count: int, runs: int) -> str:
    return f"{100 * count / runs:.1f} ± {100 * standard_error(count, runs):.2f} %"
