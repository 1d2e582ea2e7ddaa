"""Proof: the candidate's weights are quantized as planned, by an inventory of the file they were read from."""

from __future__ import annotations

import math
from pathlib import Path

from evals.block import QUANTIZATION, Block, FactRow, fact_metrics
from evals.check import Check, Findings, JudgedVerdict, Outcome
from evals.kind import Bounds, Evidence, EvidenceKind, Report
from evals.rules import short
from tapeout.artifact import Frozen, load, load_record
from tapeout.recipe import BaseRecipe


class ProofSummary(Frozen):
    """``reasons`` say why the proof is not ok."""

    ok: bool
    reasons: tuple[str, ...]
    bits_per_weight: float


class ProofKind(EvidenceKind[ProofSummary, Frozen, Bounds]):
    order, name, folder, needed = 20, "proof", "quantized", "always"
    artifact_types = ("QuantizedModel", "LoweredGraph")
    report, item, bounds = ProofSummary, Frozen, Bounds

    def load(self, folder: Path, recipe: BaseRecipe) -> Report[ProofSummary, Frozen]:
        """The record says it all, so a registry can judge again without the weights."""
        from quantization.checkpoint import QuantizedModel

        model = load_record(folder, QuantizedModel)
        proof = model.record.proof
        summary = ProofSummary(ok=proof.passed, reasons=proof.reasons, bits_per_weight=proof.bits_per_weight)
        return Report(model.ref, summary)

    def problems(self, report: Report[ProofSummary, Frozen], evidence: Evidence) -> list[str]:
        proof, built_from = report.record, evidence.built_from
        problems: list[str] = []
        if report.ref != built_from:
            found, judged = (f"{ref.artifact_type} {short(ref.digest)}" for ref in (report.ref, built_from))
            problems.append(f"the proof of quantization is of {found}, not of {judged} which is being judged")
        if not (math.isfinite(proof.bits_per_weight) and proof.bits_per_weight > 0):
            problems.append(f"the proof of quantization claims {proof.bits_per_weight} bits per weight")
        if proof.ok == bool(proof.reasons):
            problems.append(f"the proof of quantization is ok={proof.ok} with {len(proof.reasons)} reasons against it")
        return problems

    def judge(self, report: Report[ProofSummary, Frozen], evidence: Evidence, bounds: Bounds) -> Findings:
        proof = report.record
        check = Check(
            name="quantized",
            title="proof of quantization (bits per weight)",
            outcome=Outcome.PASS if proof.ok else Outcome.FAIL,
            reason="every proof holds" if proof.ok else "; ".join(proof.reasons),
            value=proof.bits_per_weight,
        )
        return Findings((check,))

    def block(self, folder: Path, verdict: JudgedVerdict) -> Block:
        from quantization.checkpoint import QuantizedModel

        model = load(folder, QuantizedModel).record
        proof, cache = model.proof, model.kv_cache
        facts = (
            FactRow(
                "bits_per_weight", "Bits per weight", proof.bits_per_weight, note="every byte of the planned tensors"
            ),
            FactRow("size_mb", "Checkpoint, MB", proof.size_bytes / 1e6),
            FactRow("size_ratio", "Size against bfloat16", proof.size_ratio, "ratio"),
            FactRow(
                "quantized_tensors",
                "Quantized tensors",
                proof.quantized_tensors,
                note=f"{proof.planned_tensors} planned, {proof.exact_tensors} hold the source's weights exactly",
            ),
            FactRow("kv_cache", "KV cache", f"{cache.dtype}, {cache.granularity.replace('_', ' ')}"),
        )
        return Block(QUANTIZATION, facts=facts, metrics=fact_metrics("weights", facts))


KIND = ProofKind()
