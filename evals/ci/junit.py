"""JUnit: one test case per check, as GitLab, Jenkins and Buildkite read it."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from evals.check import Outcome
from evals.ci.result import GateResult
from evals.verdict import COLUMNS, row

_NOT_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit(result: GateResult) -> str:
    """INCONCLUSIVE is an error, not a skip: CI shows skipped tests as green."""
    verdict = result.verdict
    counts = {outcome: sum(check.outcome is outcome for check in verdict.checks) for outcome in Outcome}
    totals = {
        "name": "tapeout gate",
        "tests": str(len(verdict.checks)),
        "failures": str(counts[Outcome.FAIL]),
        "errors": str(counts[Outcome.INCONCLUSIVE]),
        "time": "0",
    }
    root = ElementTree.Element("testsuites", totals)
    suite = ElementTree.SubElement(root, "testsuite", {**totals, "file": xml_text(result.params)})
    properties = ElementTree.SubElement(suite, "properties")
    for name, value in {
        "model": result.model,
        "outcome": verdict.outcome.value,
        "verdict": result.digest,
        "candidate": verdict.candidate,
        "baseline": verdict.baseline,
        "champion": "none" if verdict.champion_is_baseline else verdict.champion or "none",
        "policy": verdict.policy.digest,
    }.items():
        ElementTree.SubElement(properties, "property", name=name, value=xml_text(value))
    for check in verdict.checks:
        names = {"classname": "gate", "name": check.name, "file": result.params, "time": "0"}
        case = ElementTree.SubElement(suite, "testcase", {key: xml_text(value) for key, value in names.items()})
        reason = xml_text(check.reason)
        if check.outcome is Outcome.FAIL:
            ElementTree.SubElement(case, "failure", message=reason, type="FAIL").text = reason
        elif check.outcome is Outcome.INCONCLUSIVE:
            ElementTree.SubElement(case, "error", message=reason, type="INCONCLUSIVE").text = reason
        shown = "\n".join(f"{column}: {cell}" for column, cell in zip(COLUMNS, row(check), strict=True) if cell)
        ElementTree.SubElement(case, "system-out").text = xml_text(shown)
    ElementTree.indent(root, " ")
    return ElementTree.tostring(root, "unicode", xml_declaration=True) + "\n"


def xml_text(text: str) -> str:
    """Characters that XML 1.0 cannot hold become U+FFFD."""
    return _NOT_XML.sub("\N{REPLACEMENT CHARACTER}", text)
