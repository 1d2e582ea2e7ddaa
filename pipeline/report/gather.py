"""Gathers what the report shows from the artifacts of one run: plain rows out of typed records."""

from __future__ import annotations

import re
from pathlib import Path

from engines.bundle import EngineBundle, IOContract
from evals.reports import Benchmark, ShadowReport, TextItem, read_items
from evals.verdict import Verdict
from pipeline.report.data import (
    BatchRow,
    Divergence,
    FactRow,
    LayerRow,
    LineageRow,
    Planned,
    ReportData,
    Roofline,
    SpeedRow,
)
from quantization.checkpoint import LinearReport, QuantizedModel
from quantization.frontier import Frontier, read
from quantization.plan import COLUMNS, FRONTIER_FILE, PrecisionPlan, summary, table
from tapeout import artifact
from tapeout.artifact import RECORD, Artifact, read_payload
from tapeout.recipe import Recipe
from tapeout.schemes import FLOAT

LINEAGE = (
    *("source", "graph", "calibration", "sensitivity", "plan", "quantized", "baseline", "candidate"),
    *("parity", "benchmark", "evaluation", "shadow", "verdict"),
)


def gather(recipe: Recipe, artifacts: Path) -> ReportData:
    """Everything :mod:`pipeline.report.write` draws, from finished artifacts under ``artifacts``."""
    verdict = artifact.load(artifacts / "verdict", Verdict)
    quantized = artifact.load(artifacts / "quantized", QuantizedModel)
    timed = artifact.load(artifacts / "benchmark", Benchmark)
    baseline, candidate = (artifact.load(artifacts / name, EngineBundle) for name in ("baseline", "candidate"))
    shadow = artifact.load(artifacts / "shadow", ShadowReport)
    return ReportData(
        model_name=recipe.register_.model_name,
        verdict=verdict.record,
        divergence=_divergence(artifacts, verdict.record),
        plan=_plan(artifact.load(artifacts / "plan", PrecisionPlan)),
        layers=tuple(_layer(linear) for linear in quantized.record.linears),
        weights=_weights(quantized.record),
        batches=_batches(timed.record),
        speed=_speed(timed.record, baseline.record.io, candidate.record.io),
        roofline=_roofline(timed.record, baseline, candidate),
        shadow=_shadow(shadow.record),
        kernels=candidate.record.census,
        lineage=tuple(_lineage(artifacts / name) for name in LINEAGE if (artifacts / name / RECORD).is_file()),
        recipe=recipe.model_dump(mode="json", by_alias=True),
        machine={
            "Architecture": candidate.record.fingerprint.machine,
            "Instruction sets": ", ".join(candidate.record.fingerprint.features),
            "Threads": str(timed.record.threads),
            **candidate.record.fingerprint.libraries,
        },
    )


def _divergence(artifacts: Path, verdict: Verdict) -> Divergence | None:
    check = next((c for c in verdict.checks if c.name == "kl"), None)
    if check is None or check.value is None or check.upper is None or check.bound is None:
        return None
    items = read_items(artifacts / "evaluation" / "text_items.jsonl", TextItem)
    return Divergence(tuple(i.kl_sum / i.tokens for i in items), check.value, check.upper, check.bound)


def _plan(plan: Artifact[PrecisionPlan]) -> Planned:
    search, frontier = plan.record.search, None
    if search is not None:
        points = read((plan.folder / FRONTIER_FILE).read_text())
        frontier = Frontier(points, search.max_kl, by_bytes=search.goal == "memory")
    return Planned(summary(plan.record), COLUMNS, tuple(table(plan.record)), frontier)


def _layer(linear: LinearReport) -> LayerRow:
    found = re.fullmatch(r"layers\.(\d+)\.(.+)", linear.group)
    scheme = linear.scheme
    scale = 32.0 + (0 if scheme.symmetric else scheme.bits)  # float32, and a zero point, as the engine holds them
    return LayerRow(
        group=linear.name,
        layer=int(found.group(1)) if found else None,
        unit=found.group(2) if found else linear.group,
        format=scheme.name if scheme == FLOAT else f"{scheme.name}, {linear.method}",
        bits=scheme.bits,
        bits_per_weight=32.0 if scheme == FLOAT else scheme.bits + scale / (scheme.group_size or linear.in_features),
        error_before=linear.error_rtn,
        error_after=linear.error,
    )


def _weights(model: QuantizedModel) -> tuple[FactRow, ...]:
    proof = model.proof
    return (
        FactRow("bits_per_weight", "Bits per weight", proof.bits_per_weight, note="every byte of the planned tensors"),
        FactRow("size_mb", "Checkpoint, MB", proof.size_bytes / 1e6),
        FactRow("size_ratio", "Size against bfloat16", proof.size_ratio, "ratio"),
        FactRow(
            "quantized_tensors", "Quantized tensors", proof.quantized_tensors, note=f"{proof.planned_tensors} planned"
        ),
        FactRow("kv_cache", "KV cache", f"{model.kv_cache.dtype}, {model.kv_cache.granularity.replace('_', ' ')}"),
    )


def _batches(timed: Benchmark) -> tuple[BatchRow, ...]:
    old, new = timed.baseline, timed.candidate
    return tuple(
        BatchRow(b, old.decode_tokens_per_s[b], new.decode_tokens_per_s[b], old.itl_ms[b], new.itl_ms[b])
        for b in sorted(new.itl_ms)
    )


def _speed(timed: Benchmark, old_io: IOContract, new_io: IOContract) -> tuple[SpeedRow, ...]:
    old, new = timed.baseline, timed.candidate
    price = f"US$ at {timed.price_per_hour:.2f} an hour"
    return (
        SpeedRow(
            "ttft_ms", f"Time to first token, {timed.prompt_tokens} tokens", "ms", old.ttft_ms, new.ttft_ms, "lower"
        ),
        SpeedRow("prefill", "Prefill", "tokens/s", old.prefill_tokens_per_s, new.prefill_tokens_per_s, "higher"),
        SpeedRow("peak_memory_mb", "Peak memory", "MB", old.peak_memory_mb, new.peak_memory_mb, "lower"),
        SpeedRow("kv_token_bytes", "KV cache a token", "bytes", old_io.kv_token_bytes, new_io.kv_token_bytes, "lower"),
        SpeedRow("bundle_mb", "Bundle on disk", "MB", old.bundle_mb, new.bundle_mb, "lower"),
        SpeedRow(
            "cost_per_million_tokens",
            "Cost of a million tokens",
            price,
            old.cost_per_million_tokens,
            new.cost_per_million_tokens,
            "lower",
        ),
    )


def _roofline(timed: Benchmark, baseline: Artifact[EngineBundle], candidate: Artifact[EngineBundle]) -> Roofline:
    batch = min(timed.candidate.itl_ms)
    achieved = [
        bundle.record.step_bytes / (numbers.itl_ms[batch] / 1e3) / 1e9
        for bundle, numbers in ((baseline, timed.baseline), (candidate, timed.candidate))
    ]
    return Roofline(timed.read_bandwidth_gb_s, *achieved)


def _shadow(report: ShadowReport) -> tuple[FactRow, ...]:
    stand_in = (
        "the float engine: no champion is registered" if report.champion_is_baseline else "the registered champion"
    )
    return (
        FactRow("prompts", "Prompts replayed", report.prompts, note=f"against {stand_in}"),
        FactRow("max_new_tokens", "Longest answer, tokens", report.max_new_tokens),
    )


def _lineage(folder: Path) -> LineageRow:
    body = read_payload(folder)
    record = body["record"]
    versions = record.get("versions") or record.get("fingerprint", {}).get("libraries") or {}
    return LineageRow(body["noun"], folder.name, body["digest"], body["parents"], versions)
