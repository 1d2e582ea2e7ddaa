"""What holds a whole model in float32 says so before it reads a weight, where memory does not suffice."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pipeline.export.checkpoint import load_checkpoint
from pipeline.export.needs import needs
from pipeline.export.source_model import CheckpointModel
from quantization.needs import TORCH_BYTES, simulation_needs
from quantization.reference import QuantizedReference
from quantization.simulate import Simulation
from tapeout.errors import ResourceError
from tapeout.schemes import Scheme
from tests.checkpoints import adapter, change_weights, checkpoint
from tests.graphs import llama_graph
from tests.quantized import quantized_model


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tapeout.resources.available_memory", lambda: 100 << 20)


def test_a_simulation_counts_the_model_its_distributions_and_a_plan(tiny_checkpoint: Path, tmp_path: Path) -> None:
    graph = llama_graph(tiny_checkpoint, tmp_path / "graph")
    held = 4 * sum(p.numel() for p in load_checkpoint(tiny_checkpoint).model.parameters() if p.dim() > 1)
    found = [simulation_needs(graph.record, 100, plans=plans).memory_bytes - TORCH_BYTES for plans in (False, True)]
    assert found == [held + 400 * graph.record.vocab_size, 2 * held + 400 * graph.record.vocab_size]


def test_a_simulation_is_refused(tiny_checkpoint: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    graph = llama_graph(tiny_checkpoint, tmp_path / "graph")
    request.getfixturevalue("little_memory")
    with pytest.raises(ResourceError, match=r"0\.1 GB of memory available") as caught:
        Simulation(graph, [[1, 2, 3]], ())
    assert "for a simulation of the model" in caught.value.expected


@pytest.mark.usefixtures("little_memory")
def test_the_reference_of_a_quantized_model_is_refused(tmp_path: Path) -> None:
    model = quantized_model(tmp_path / "q", lambda _: Scheme(bits=8, group_size=32, symmetric=True))
    with pytest.raises(ResourceError, match=r"0\.1 GB of memory available") as caught:
        QuantizedReference(model.folder)
    assert "for the quantized model in float32" in caught.value.expected


@pytest.mark.usefixtures("little_memory")
def test_the_model_of_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match=r"0\.1 GB of memory available") as caught:
        CheckpointModel(checkpoint(tmp_path), "", adapter=None, positions=64)
    assert "for the checkpoint's model" in caught.value.expected


def test_merged_weights_count_in_float32(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "checkpoint")
    change_weights(folder, lambda t: t.update({n: v.bfloat16() for n, v in t.items()}))
    model = load_checkpoint(folder).model
    adapter(tmp_path / "adapter", model)
    merged = sum(p.numel() for n, p in model.named_parameters() if n.endswith(("q_proj.weight", "down_proj.weight")))
    without, with_it = needs(folder, ""), needs(folder, "", tmp_path / "adapter")
    assert with_it.memory_bytes - without.memory_bytes == 4 * merged
    assert model.lm_head.weight.dtype == torch.bfloat16  # stays in its file
