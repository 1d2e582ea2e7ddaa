"""Execution: every report was taken on the hardware that the candidate was built for.

The evidence is in the other reports: each records the fingerprint of the machine on which the candidate ran.
"""

from __future__ import annotations

from evals.check import Check, Findings, Outcome
from evals.kind import Bounds, Evidence, EvidenceKind, Executed
from tapeout.artifact import Frozen
from tapeout.errors import FingerprintError
from tapeout.fingerprint import Fingerprint, require_match


class ExecutionKind(EvidenceKind[Frozen, Frozen, Bounds]):
    order, name, needed = 10, "execution", "never"
    bounds = Bounds

    def findings(self, evidence: Evidence, bounds: Bounds) -> Findings:
        target = evidence.target
        runs = {
            r.ref.artifact_type: r.record.executed_on
            for r in evidence.reports.values()
            if isinstance(r.record, Executed)
        }
        foreign = [
            reason for artifact_type, ran in runs.items() for reason in _differences(evidence, artifact_type, ran)
        ]
        levels = sorted({ran.level for ran in runs.values()})
        if len(levels) > 1:
            foreign.append(f"reports were taken at the levels {', '.join(level or 'none' for level in levels)}")
        if any(ran.emulated for ran in runs.values()) and not all(one.emulated for one in evidence.hardware):
            foreign.append(f"kernels were emulated at the level {levels[0]}, which shows nothing of the hardware")
        place = f"{target}:{levels[0]}" if len(levels) == 1 and levels[0] else target
        absent = evidence.absent
        ran_there = bool(runs) and not foreign and not absent
        reasons = [*foreign, *([f"missing: {', '.join(absent)}"] if absent else [])]
        if evidence.not_executed and not runs:
            reasons = [f"{evidence.not_executed}; run `dvc repro` with these artifacts on a machine that has it"]
        check = Check(
            name="executed",
            title=f"executed on {target}",
            outcome=Outcome.PASS if ran_there else Outcome.INCONCLUSIVE,
            reason=f"ran on {place}" if ran_there else "; ".join([f"not executed on {target}", *reasons]),
        )
        elsewhere = ", ".join(dict.fromkeys(f"{ran.machine} ({' '.join(ran.features)})" for ran in runs.values()))
        return Findings((check,), executed_on=place if ran_there else elsewhere or None)


def _differences(evidence: Evidence, artifact_type: str, ran: Fingerprint) -> list[str]:
    try:
        require_match(evidence.hardware, ran, f"{artifact_type}: the candidate")
    except FingerprintError as error:
        return [error.found]
    return []


KIND = ExecutionKind()
