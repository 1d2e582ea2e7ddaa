"""A verdict as an in-toto statement: https://in-toto.io/attestation/test-result/v0.1 about the bundle's record.

tapeout/signing.py has the fields and signs them. INCONCLUSIVE counts as FAILED: only a PASS may be relied on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engines.bundle import EngineBundle
from evals.check import Outcome
from evals.level import LevelVerdict
from evals.verdict import Verdict
from tapeout.artifact import Artifact
from tapeout.signing import Resource, Statement, SubjectDigest, TestResult, record_resource


def statement(model: str, verdict: Artifact[Verdict], bundle: Artifact[Any]) -> Statement:
    """The outcome of every check, about the record of ``bundle``. ``model``: the registered name it was judged for."""
    record = verdict.record
    return _statement(
        record,
        bundle.folder,
        configuration=(Resource(name="policy", digest=SubjectDigest(sha256=record.policy.digest)),),
        executed_on=record.executed_on,
        model=model,
        bundle=bundle.digest,
        verdict=verdict.digest,
        evidence=record.evidence,
        facts=record.numbers,
    )


def level_statement(found: Artifact[LevelVerdict], bundle: Artifact[EngineBundle]) -> Statement:
    """The outcome of every check of one level, about the record of this evidence."""
    return _statement(
        found.record,
        found.folder,
        configuration=(),
        executed_on=f"{bundle.record.target}:{found.record.executed_on.level}",
        model="",
        bundle=bundle.digest,
        verdict=found.parents["verdict"].digest,
        evidence={parent.artifact_type: parent.digest for parent in found.parents.values()},
    )


def _statement(record: Verdict | LevelVerdict, subject: Path, **fields: Any) -> Statement:
    """``fields``: of the result, beside the outcomes of the record's checks."""
    outcomes = {check.name: check.outcome is Outcome.PASS for check in record.checks}
    return Statement(
        subject=(record_resource(subject),),
        predicate=TestResult(
            result="PASSED" if record.outcome is Outcome.PASS else "FAILED",
            passedTests=tuple(name for name, passed in outcomes.items() if passed),
            failedTests=tuple(name for name, passed in outcomes.items() if not passed),
            outcome=record.outcome.value,
            **fields,
        ),
    )
