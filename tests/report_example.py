"""A release like the default model's, with made-up but plausible numbers, for the report and registry tests."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from evals.verdict import Check, Fact, Outcome, Slice, Verdict
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
from quantization.frontier import Frontier, FrontierPoint
from tapeout.recipe import Gate, Recipe

BASELINE, CANDIDATE, QUANTIZED = "b" * 64, "c" * 64, "9" * 64
RECIPE = Recipe.model_validate({"model": {"source": "file:model"}, "data": {"source": "file:data"}})


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
        bounds=Gate(),
        baseline=BASELINE,
        candidate=CANDIDATE,
        quantized=QUANTIZED,
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
    nouns = ("Source", "PortableGraph", "Calibration", "QuantizedModel", "EngineBundle", "EvalReport", "Verdict")
    digests = [f"{i + 10:x}" * 64 for i in range(len(nouns))]
    return ReportData(
        model_name="tapeout-default",
        verdict=verdict or example_verdict(),
        divergence=Divergence(
            documents=tuple(0.0185 * math.exp(0.5 * math.sin(7.1 * i) + 0.2 * math.cos(3 * i)) for i in range(64)),
            mean=0.0185,
            upper=0.0204,
            bound=0.03,
        ),
        plan=plan,
        layers=tuple(layers),
        weights=(
            FactRow("bits_per_weight", "Bits per weight", 6.21, note="embeddings included"),
            FactRow("size_mb", "Weights", "104 MB", note="538 MB in float"),
            FactRow("kv", "KV cache", "int8 per channel", note="11.5 KB per token"),
        ),
        batches=(
            BatchRow(1, 62.1, 171.4, 16.1, 5.83),
            BatchRow(4, 171.0, 402.3, 23.4, 9.94),
            BatchRow(16, 372.5, 731.9, 43.0, 21.9),
        ),
        speed=(
            SpeedRow("ttft", "Time to first token, 128 tokens", "ms", 210.0, 96.4, "lower"),
            SpeedRow("prefill", "Prefill", "tokens/s", 610.0, 1328.0, "higher"),
            SpeedRow("peak_memory", "Peak memory", "MB", 1204.0, 402.0, "lower"),
            SpeedRow("bundle", "Bundle", "MB", 541.0, 121.0, "lower"),
            SpeedRow("cost", "Cost per million tokens", "USD", 0.0746, 0.038, "lower"),
        ),
        roofline=Roofline(bandwidth_gb_s=38.7, baseline_gb_s=33.4, candidate_gb_s=17.9),
        shadow=(
            FactRow("prompts", "Prompts replayed", 200),
            FactRow("agreement", "Same token, teacher-forced", 0.9471, "fraction"),
            FactRow("exact", "Identical responses", 0.415, "fraction"),
            FactRow("kl", "Mean KL", 0.0213, "nats"),
            FactRow("length", "Response length", 1.013, "ratio", "candidate over champion"),
        ),
        kernels={"MatMulNBits": 121, "GroupQueryAttention": 30, "SkipSimplifiedLayerNormalization": 60},
        lineage=tuple(
            LineageRow(
                noun,
                f"artifacts/{noun.lower()}",
                digests[i],
                {nouns[i - 1]: digests[i - 1]} if i else {},
                {"onnxruntime": "1.31.1", "torch": "2.13.0"} if i in (1, 3) else {},
            )
            for i, noun in enumerate(nouns)
        ),
        recipe=RECIPE.model_dump(mode="json", by_alias=True),
        machine={"Processor": "AMD EPYC 9R45 (AVX-512 VNNI)", "Memory": "24 GiB"},
    )


def without_evidence() -> ReportData:
    """What a starved run leaves: a verdict and nothing to draw."""
    verdict = example_verdict(Outcome.INCONCLUSIVE, slices=(), facts=(), champion=None, executed_on=None)
    return replace(ReportData("tapeout-default", verdict), recipe={"seed": 0})
