"""A checkpoint whose experts are in MXFP4, as gpt-oss is published, from its files to an engine: no weight changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from evals.items import read_items
from evals.kinds.parity import KIND, ParityItem
from pipeline.stages import wiring
from quantization.checkpoint import QuantizedModel
from quantization.compressed_tensors import open_checkpoint
from tapeout import artifact
from tapeout.portable_graph import PortableGraph
from tapeout.schemes import Scheme
from tests.native import own_cache
from tests.quantized import float_checkpoint
from tests.stored_formats import EXAMPLES
from tests.tiny import tiny_texts
from tests.tiny_project import params, write_data

STAGES = ("environment", "fetch", "export", "calibrate", "sensitivity", "plan", "quantize", "build-candidate", "parity")
EXPERTS, LAYERS = 8, 2
MXFP4 = Scheme(bits=4, format="mxfp4")


@dataclass(frozen=True)
class Project:
    weights: Mapping[str, torch.Tensor]  # of experts, by name: what the stored codes stand for
    artifacts: Path


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    folder = tmp_path_factory.mktemp("mxfp4")
    settings = {"num_local_experts": EXPERTS, "num_experts_per_tok": 2, "intermediate_size": 64, "sliding_window": 32}
    checkpoint = float_checkpoint(folder / "model", "gpt_oss", **settings)
    stored, weights = EXAMPLES["mxfp4 of gpt-oss"].store_in(checkpoint)
    write_data(folder / "data", tiny_texts(64, 3))
    recipe = params(checkpoint, folder / "data")
    recipe |= {
        "export": {"max_positions": 256},
        "calibrate": {"samples": 16, "tokens": 96},
        "evaluate": {"tasks": ["piqa"], "items": 40, "documents": 8, "document_tokens": 64, "parity_documents": 4},
    }
    recipe["plan"] = {
        "schemes": [
            {"match": "layers.*.experts_*", "format": "mxfp4"},
            {"match": "*", "bits": 8, "group_size": 32, "symmetric": True},
        ]
    }
    (folder / "params.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        own_cache(patch, folder / "cache")
        for name in STAGES:
            wiring.run(name, Path("params.yaml"))
    return Project({name: weights[name] for name in weights.keys() - stored.keys()}, folder / "artifacts")


def test_every_expert_keeps_the_values_of_the_checkpoint(project: Project) -> None:
    assert len(project.weights) == 2 * LAYERS
    graph = artifact.load(project.artifacts / "graph", PortableGraph)
    assert graph.record.dequantized == "mxfp4"
    weights = graph.folder / "model.safetensors"
    assert weights.samefile(next((project.artifacts / "source").rglob(weights.name)))  # codes, and no copy of them
    model = artifact.load(project.artifacts / "quantized", QuantizedModel)
    exported, quantized = open_checkpoint(graph.folder), open_checkpoint(model.folder)
    for name, weight in project.weights.items():
        np.testing.assert_array_equal(exported.tensor(name), weight.numpy())
        np.testing.assert_array_equal(quantized.weight(name), weight.numpy().transpose(0, 2, 1))
    reports = [report for report in model.record.linears if report.experts]
    assert len(reports) == 2 * LAYERS and {report.scheme for report in reports} == {MXFP4}
    assert {(report.method, report.error) for report in reports} == {("rtn", 0.0)}
    assert model.record.proof.passed and model.record.proof.exact_tensors == 2 * LAYERS


def test_the_engine_computes_them(project: Project) -> None:
    items = read_items(project.artifacts / "parity" / KIND.items_file, ParityItem)
    down = {f"model.layers.{layer}.mlp.experts.down_proj" for layer in range(LAYERS)}
    assert len(items) == 5 and all(down <= item.errors.keys() for item in items)
    assert max(error for item in items for error in item.errors.values()) < 0.01
    assert sum(item.kl_sum for item in items) / sum(item.tokens for item in items) < 1e-5
