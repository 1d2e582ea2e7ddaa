"""A build holds one weight at a time, however many there are."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import torch

from quantization.compressed_tensors import open_checkpoint
from tests.families import export_model, random_model
from tests.family_engines import build_float

LAYERS, HIDDEN, INTERMEDIATE = 8, 512, 1536
SIZES = {"hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "num_hidden_layers": LAYERS}


def test_a_float_build_takes_a_few_times_its_largest_weight(tmp_path: Path) -> None:
    graph = export_model(random_model("llama", **SIZES).to(torch.bfloat16), tmp_path)
    weights = open_checkpoint(graph.folder)
    total = 4 * sum(weights.tensor(name).size for name in weights.names())
    largest = 4 * 2 * HIDDEN * INTERMEDIATE  # gate and up, merged
    assert total > 12 * largest
    tracemalloc.start()  # counts numpy's arrays
    try:
        bundle = build_float(graph, tmp_path / "bundle", slots=1)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert bundle.record.weight_bytes > 12 * largest
    assert peak < 5 * largest
