"""Export, calibrate, quantize, build: the engine must compute what the quantized checkpoint says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from engines.compile import build
from engines.probe import Probe
from evals.parity import compare
from pipeline.export import export
from pipeline.recipe import Calibrate, DataSource, KVCache, ModelSource, Plan, Recipe, Rule
from quantization.calibrate import calibrate
from quantization.checkpoint import KV_SCALES
from quantization.compressed_tensors import open_checkpoint
from quantization.quantize import quantize
from quantization.reference import QuantizedReference
from tests.plans import written_plan

MIXED = (
    Rule(match="layers.*.qkv", bits=8, group_size=64, symmetric=True),
    Rule(match="layers.[01].gate_up", bits=8, activations="int8"),
    Rule(match="layers.*.down", bits=8, group_size=128, symmetric=True),
    Rule(match="*", bits=4, group_size=32, symmetric=False),
)


@pytest.fixture(scope="module")
def documents(tiny_checkpoint: Path, tiny_texts: Callable[[int, int], list[str]]) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(tiny_checkpoint)
    return [tokenizer(text).input_ids for text in tiny_texts(44, 9)[32:]]


def test_the_engine_computes_what_the_quantized_checkpoint_says(
    tiny_checkpoint: Path,
    tiny_texts: Callable[[int, int], list[str]],
    documents: list[list[int]],
    tmp_path: Path,
) -> None:
    recipe = Recipe(
        model=ModelSource(source="file:model"),
        data=DataSource(source="file:data"),
        calibrate=Calibrate(rows=32, tokens=128),
        plan=Plan(kernels=MIXED, kv_cache=KVCache(dtype="int8")),
    )
    graph = export(tiny_checkpoint, "", tmp_path / "graph", max_positions=512, tolerance=1e-3, seed=0, parents={})
    calibration = calibrate(recipe, graph, tiny_texts(44, 9)[:32], tmp_path / "calibration")
    plan = written_plan(recipe, graph, tmp_path / "plan")
    quantized = quantize(recipe, graph, calibration, plan, tmp_path / "quantized")
    bundle = build(
        graph,
        open_checkpoint(quantized.folder),
        tmp_path / "bundle",
        target="ort-cpu",
        precision="mixed",
        slots=1,
        kv_scales=load_file(quantized.folder / KV_SCALES),
        parents={},
    )
    probe, head = Probe(bundle), "model.embed_tokens.weight"
    exact = compare(probe, QuantizedReference(quantized.folder, int8_activations=True), documents, head=head)
    loose = compare(probe, QuantizedReference(quantized.folder), documents, head=head)

    def mean_kl(items: list[Any]) -> float:
        return sum(item.kl_sum for item in items) / sum(item.tokens for item in items)

    assert mean_kl(exact) < 1e-5  # 5e-7 when this was written; the gate's bound is 1e-3
    assert sum(i.agree for i in exact) > 0.995 * sum(i.tokens for i in exact)
    assert max(i.worst_error for i in exact) < 1e-3
    assert sum(i.free_kl_sum for i in exact) < 1e-5 * sum(i.tokens for i in exact)  # four layers stay together
    # Rounding the activations is part of what the engine computes, and a reference without it is told apart.
    assert mean_kl(loose) > 5 * mean_kl(exact)
    assert min(i.worst_error for i in loose) > 5 * max(i.worst_error for i in exact)
