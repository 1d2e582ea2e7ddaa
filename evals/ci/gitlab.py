"""GitLab: metrics reports (OpenMetrics) and code quality reports.

https://docs.gitlab.com/ci/testing/metrics_reports and https://docs.gitlab.com/ci/testing/code_quality
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from typing import Any

from evals.check import Check, Outcome
from evals.ci.result import GateResult
from evals.verdict import EXIT_CODES

QUALITY_SEVERITY = {Outcome.FAIL: "blocker", Outcome.INCONCLUSIVE: "major"}
_LABEL = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


def metrics(result: GateResult) -> str:
    """OpenMetrics: the numbers of every check and fact; GitLab compares them with those of the target branch."""
    verdict = result.verdict
    checks, facts = verdict.checks, verdict.facts
    families = {
        "tapeout_gate_exit_code": f"tapeout_gate_exit_code {int(verdict.exit_code)}\n",
        "tapeout_check_exit_code": _samples(
            "tapeout_check_exit_code", checks, lambda check: int(EXIT_CODES[check.outcome])
        ),
        "tapeout_check": _samples("tapeout_check", checks, lambda check: check.value),
        "tapeout_check_lower": _samples("tapeout_check_lower", checks, lambda check: check.lower),
        "tapeout_check_upper": _samples("tapeout_check_upper", checks, lambda check: check.upper),
        "tapeout_check_bound": _samples("tapeout_check_bound", checks, lambda check: check.bound),
        "tapeout_fact": _samples("tapeout_fact", facts, lambda fact: fact.value),
    }
    return "".join(f"# TYPE {name} gauge\n{samples}" for name, samples in families.items()) + "# EOF\n"


def _samples(family: str, entries: Iterable[Any], number: Callable[[Any], float | None]) -> str:
    numbers = ((entry.name, number(entry)) for entry in entries)
    return "".join(
        f'{family}{{name="{name.translate(_LABEL)}"}} {value!r}\n' for name, value in numbers if value is not None
    )


def code_quality(result: GateResult) -> str:
    """One issue for each check that did not pass. Fingerprints depend on names alone, so GitLab sees what is new."""
    issues = [
        {
            "description": f"{check.outcome.value} {check.title}: {check.reason}",
            "check_name": check.name,
            "fingerprint": fingerprint(check),
            "severity": QUALITY_SEVERITY[check.outcome],
            "location": {"path": result.params, "lines": {"begin": result.line}},
        }
        for check in result.not_passed
    ]
    return json.dumps(issues, indent=1) + "\n"


def fingerprint(check: Check) -> str:
    return hashlib.sha256(f"tapeout gate {check.name}".encode()).hexdigest()
