"""A verdict as an in-toto statement: https://in-toto.io/attestation/test-result/v0.1 about the bundle's record.

tapeout/signing.py has the fields and signs them. INCONCLUSIVE counts as FAILED: only a PASS may be relied on.
"""

from __future__ import annotations

from typing import Any

from evals.check import Outcome
from evals.verdict import Verdict
from tapeout.artifact import Artifact
from tapeout.signing import Digest, Resource, Statement, TestResult, record_resource


def statement(model: str, verdict: Artifact[Verdict], bundle: Artifact[Any]) -> Statement:
    """The outcome of every check, about the record of ``bundle``. ``model``: the registered name it was judged for."""
    record = verdict.record
    outcomes = {check.name: check.outcome is Outcome.PASS for check in record.checks}
    return Statement(
        subject=(record_resource(bundle.folder),),
        predicate=TestResult(
            result="PASSED" if record.outcome is Outcome.PASS else "FAILED",
            configuration=(Resource(name="policy", digest=Digest(sha256=record.policy.digest)),),
            passedTests=tuple(name for name, passed in outcomes.items() if passed),
            failedTests=tuple(name for name, passed in outcomes.items() if not passed),
            outcome=record.outcome.value,
            model=model,
            bundle=bundle.digest,
            verdict=verdict.digest,
            evidence=record.evidence,
        ),
    )
