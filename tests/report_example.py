"""A release like the default model's, with made-up but plausible numbers, for the report and registry tests."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from evals.block import (
    QUALITY,
    QUANTIZATION,
    SPEED,
    Bars,
    Block,
    Divergence,
    FactRow,
    Interval,
    Intervals,
    Roofline,
    Rows,
    fact_metrics,
)
from evals.check import Check, Fact, Outcome, Slice
from evals.kind import Bounds
from evals.kinds.speed import BATCH_AXIS, speed_table
from evals.kinds.tasks import slice_table
from evals.kinds.text import divergence_block
from evals.known import kinds
from evals.policy import settings_of
from evals.verdict import Verdict
from pipeline.recipe import Recipe
from pipeline.report.data import LayerRow, LineageRow, Planned, ReportData
from quantization.frontier import Frontier, FrontierPoint
from tapeout.artifact import ArtifactRef

BASELINE, CANDIDATE, QUANTIZED = "b" * 64, "c" * 64, "9" * 64
RECIPE = Recipe.model_validate({"model": {"source": "file:model"}, "data": {"source": "file:data"}})
BOUNDS = RECIPE.section(Bounds)


def example_verdict(outcome: Outcome = Outcome.PASS, **changes: Any) -> Verdict:
    kl = 0.0185 if outcome is Outcome.PASS else 0.345
    passed = Outcome.PASS
    checks = (
        Check(name="executed", title="Engine executed", outcome=passed, reason="ran on the machine it was built for"),
        Check(
            name="accuracy",
            title="Pooled accuracy",
            outcome=passed,
            reason="the lower bound -1.08 points is above the margin -2 points",
            direction="at_least",
            value=-0.0032,
            bound=-0.02,
            lower=-0.0108,
            upper=0.0043,
            unit="items",
            n=2500,
        ),
        Check(
            name="kl",
            title="Mean KL",
            outcome=outcome,
            reason=f"the upper bound {kl * 1.1:.4f} is {'below' if outcome is passed else 'not below'} 0.03",
            direction="at_most",
            value=kl,
            bound=0.03,
            lower=kl * 0.9,
            upper=kl * 1.1,
            unit="tokens",
            n=16384,
            clusters=64,
        ),
    )
    slices = tuple(
        Slice(
            task=task,
            items=items,
            baseline_accuracy=base,
            candidate_accuracy=base + diff,
            difference=diff,
            lower=diff - 1.6 / math.sqrt(items) * 0.35,
            upper=diff + 1.6 / math.sqrt(items) * 0.35,
            lost=21,
            gained=18,
        )
        for task, items, base, diff in (
            ("arc_easy", 900, 0.581, -0.004),
            ("piqa", 700, 0.672, -0.001),
            ("openbookqa", 250, 0.332, 0.008),
            ("winogrande", 350, 0.531, -0.011),
            ("sciq", 300, 0.842, -0.003),
        )
    )
    verdict = Verdict(
        outcome=outcome,
        checks=checks,
        slices=slices,
        facts=(Fact(name="ppl", title="Perplexity ratio", value=1.0123, lower=1.008, upper=1.0166),),
        bounds=BOUNDS.model_dump(mode="json"),
        settings=settings_of(RECIPE),
        baseline=BASELINE,
        candidate=CANDIDATE,
        built_from=ArtifactRef("QuantizedModel", QUANTIZED),
        champion=BASELINE,
        champion_is_baseline=True,
        target="ort-cpu",
        executed_on="AMD EPYC 9R45, 2 threads",
        evidence={"EvalReport": "1" * 64, "ShadowReport": "2" * 64, "Benchmark": "3" * 64, "ParityReport": "4" * 64},
    )
    return verdict.model_copy(update=changes)


def example_report(verdict: Verdict | None = None) -> ReportData:
    layers = [
        LayerRow(
            group=f"layers.{layer}.{unit}",
            layer=layer,
            unit=unit,
            format=f"int{bits} g{32 if bits == 4 else 64} {'asymmetric' if bits == 4 else 'symmetric'}",
            bits=bits,
            bits_per_weight=bits + (0.625 if bits == 4 else 0.25),
            error_before=before,
            error_after=before * (0.62 if bits == 4 else 0.97),
        )
        for layer in range(30)
        for unit, bits, before in (
            ("qkv", 8, 0.006 + 0.002 * math.sin(layer)),
            ("o", 4, 0.07 + 0.03 * math.cos(layer / 3)),
            ("gate_up", 4 if layer % 3 else 8, 0.06 + 0.001 * layer if layer % 3 else 0.005),
            ("down", 8, 0.008 + (0.03 if layer == 11 else 0)),
        )
    ]
    points = tuple(
        FrontierPoint(kl=0.004 + 0.001 * n, microseconds=900 / (1 + n / 12), megabytes=150 - 1.4 * n, chosen=n == 15)
        for n in range(36)
    )
    plan = Planned(
        summary="Chosen for the least time per token (25% at 1 rows, 75% at 128 rows) on ort-cpu with 2 threads.",
        columns=("unit", "kernel", "µs/token", "MB", "KL", "why"),
        rows=(
            ("layers.0-4.qkv", "static int8", "21.4", "2.78", "0.00042", "the fastest kernel"),
            (
                "layers.0-4.o",
                "4-bit g32",
                "9.8",
                "1.04",
                "0.00121",
                "4-bit g64 would save 0.4 µs and spend 0.0005 more KL",
            ),
            ("all", "", "431.2", "120.31", "0.01873", "0.01912 at once, of 0.02"),
        ),
        frontier=Frontier(points, limit=0.02, by_bytes=False),
    )
    layers.append(LayerRow("lm_head", None, "lm_head", "int8 g64 symmetric, tied", 8, 8.25, 0.004, 0.004))
    artifact_types = (
        "Source",
        "PortableGraph",
        "Calibration",
        "QuantizedModel",
        "EngineBundle",
        "EvalReport",
        "Verdict",
    )
    digests = [f"{i + 10:x}" * 64 for i in range(len(artifact_types))]
    return ReportData(
        model_name="tapeout-default",
        verdict=verdict or example_verdict(),
        blocks=example_blocks(verdict or example_verdict()),
        plan=plan,
        layers=tuple(layers),
        kernels={"MatMulNBits": 121, "CachedAttention": 30, "SkipSimplifiedLayerNormalization": 60},
        lineage=tuple(
            LineageRow(
                artifact_type,
                f"artifacts/{artifact_type.lower()}",
                digests[i],
                {artifact_types[i - 1]: digests[i - 1]} if i else {},
                {"onnxruntime": "1.31.1", "torch": "2.13.0"} if i in (1, 3) else {},
            )
            for i, artifact_type in enumerate(artifact_types)
        ),
        recipe=RECIPE.model_dump(mode="json", by_alias=True),
        machine={"Processor": "AMD EPYC 9R45 (AVX-512 VNNI)", "Memory": "24 GiB"},
    )


def example_blocks(verdict: Verdict) -> tuple[Block, ...]:
    pooled = next((check for check in verdict.checks if check.name == "accuracy"), None)
    weights = (
        FactRow("bits_per_weight", "Bits per weight", 6.21, note="embeddings included"),
        FactRow("size_mb", "Weights", "104 MB", note="538 MB in float"),
        FactRow("kv", "KV cache", "int8 per channel", note="11.5 KB per token"),
    )
    shadow = (
        FactRow("prompts", "Prompts replayed", 200),
        FactRow("agreement", "Same token, teacher-forced", 0.9471, "fraction"),
        FactRow("exact", "Identical responses", 0.415, "fraction"),
        FactRow("kl", "Mean KL", 0.0213, "nats"),
        FactRow("length", "Response length", 1.013, "ratio", "candidate over champion"),
    )
    intervals = [Interval(s.task, s.difference, s.lower, s.upper, s.items) for s in verdict.slices]
    if pooled:
        intervals.append(Interval("pooled", pooled.value, pooled.lower, pooled.upper, pooled.n, pooled=True))  # type: ignore[arg-type]
    divergence = Divergence(
        documents=tuple(0.0185 * math.exp(0.5 * math.sin(7.1 * i) + 0.2 * math.cos(3 * i)) for i in range(64)),
        mean=0.0185,
        upper=0.0204,
        bound=0.03,
    )
    roofline = Roofline(bandwidth_gb_s=38.7, baseline_gb_s=33.4, candidate_gb_s=17.9)
    tokens_s = (("1", 62.1, 171.4), ("4", 171.0, 402.3), ("16", 372.5, 731.9))
    itl_ms = (("1", 16.1, 5.83), ("4", 23.4, 9.94), ("16", 43.0, 21.9))
    numbers = [
        ("Time to first token, 128 tokens", "ms", False, 210.0, 96.4),
        ("Prefill", "tokens/s", True, 610.0, 1328.0),
        ("Peak memory", "MB", False, 1204.0, 402.0),
        ("Bundle", "MB", False, 541.0, 121.0),
        ("Cost per million tokens", "USD", False, 0.0746, 0.038),
    ]
    memory = tuple((title, base, cand) for title, unit, _, base, cand in numbers if unit == "MB")
    speed = Block(
        SPEED,
        charts={
            "throughput": Bars("Decode throughput by batch", "tokens/s", tokens_s, True, BATCH_AXIS),
            "latency": Bars("Inter-token latency by batch", "ms", itl_ms, False, BATCH_AXIS),
            "memory": Bars("Memory and size", "MB", memory, False),
            "roofline": roofline,
        },
        table=speed_table(numbers),
        metrics={f"decode.batch_{batch}.candidate_tokens_s": value for batch, _, value in tokens_s}
        | {"roofline.candidate_share": roofline.candidate_share},
        plots={
            "throughput.csv": Rows(
                ("batch", "engine", "tokens_s", "itl_ms"),
                tuple(
                    (batch, engine, tokens[at], itl[at])
                    for (batch, *tokens), (_, *itl) in zip(tokens_s, itl_ms, strict=True)
                    for at, engine in enumerate(("baseline", "candidate"))
                ),
            )
        },
    )
    accuracy = Intervals(
        "Accuracy: candidate minus baseline", tuple(intervals), verdict.bounds["accuracy_margin"], verdict.confidence
    )
    return (
        Block(QUANTIZATION, facts=weights, metrics=fact_metrics("weights", weights)),
        Block(QUALITY, charts={"accuracy": accuracy}, table=slice_table(verdict.slices)),
        divergence_block(divergence),
        Block(QUALITY, "Shadow traffic", facts=shadow, metrics=fact_metrics("shadow", shadow)),
        speed,
    )


def without_evidence() -> ReportData:
    """What a starved run leaves: a verdict and nothing to draw."""
    verdict = example_verdict(Outcome.INCONCLUSIVE, slices=(), facts=(), champion=None, executed_on=None)
    absent = tuple(kind.absent for kind in kinds() if kind.absent)
    return replace(ReportData("tapeout-default", verdict, absent), recipe={"seed": 0})
