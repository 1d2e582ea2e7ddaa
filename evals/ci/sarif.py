"""SARIF 2.1.0, which code scanning reads: https://docs.oasis-open.org/sarif/sarif/v2.1.0/sarif-v2.1.0.html"""

from __future__ import annotations

import json
from urllib.parse import quote

import tapeout
from evals.check import Outcome
from evals.ci.gitlab import fingerprint
from evals.ci.result import GateResult

LEVELS = {Outcome.FAIL: "error", Outcome.INCONCLUSIVE: "warning"}


def sarif(result: GateResult) -> str:
    """One rule per check, and one result for each that did not pass."""
    rules = [{"id": check.name, "shortDescription": {"text": check.title}} for check in result.verdict.checks]
    place = {"artifactLocation": {"uri": quote(result.params)}, "region": {"startLine": result.line}}
    found = [
        {
            "ruleId": check.name,
            "level": LEVELS[check.outcome],
            "message": {"text": f"{check.outcome.value} {check.title}: {check.reason}"},
            "locations": [{"physicalLocation": place}],
            "partialFingerprints": {"check/v1": fingerprint(check)},
        }
        for check in result.not_passed
    ]
    driver = {"name": "tapeout gate", "version": tapeout.__version__, "rules": rules}
    log = {
        "$schema": "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json",
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "results": found}],
    }
    return json.dumps(log, indent=1) + "\n"
