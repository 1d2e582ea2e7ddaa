"""What takes much memory says so before it reads a weight, where memory does not suffice."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pipeline.export.checkpoint import load_checkpoint
from pipeline.export.export import export
from pipeline.export.gguf import read_header
from pipeline.export.needs import BASE_BYTES, model_needs, needs
from pipeline.export.source_model import CheckpointModel
from quantization.needs import TORCH_BYTES, decoded_bytes, reference_needs, simulation_needs
from quantization.reference import QuantizedReference
from quantization.units import HEAD, units_of
from tapeout.errors import ResourceError
from tapeout.resources import Needs
from tapeout.schemes import Scheme
from tests.checkpoints import adapter, change_json, change_weights, checkpoint, gguf_file
from tests.families import random_model, save_checkpoint
from tests.graphs import llama_graph
from tests.quantized import quantized_model


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tapeout.resources.available_memory", lambda: 100 << 20)


def test_more_layers_need_no_more_memory_to_look_for_a_plan(tiny_checkpoint: Path, tmp_path: Path) -> None:
    graph = llama_graph(tiny_checkpoint, tmp_path / "graph").record
    units = units_of(graph, 2)
    assert len(units) == 8
    few, all_of_them = (simulation_needs(graph, some, 50, 100, plans=False) for some in (units[:4], units))
    hidden_states = 4 * 50 * graph.hidden_size * 4  # before each of the four other units
    assert all_of_them.memory_bytes == few.memory_bytes + hidden_states
    assert few.disk_bytes == 0 and few.memory_bytes > TORCH_BYTES
    linears = sum(group.in_features * sum(group.out_features) for group in graph.groups if group.name != HEAD)
    plans = simulation_needs(graph, units, 50, 100, plans=True)
    assert plans == Needs(linears, all_of_them.memory_bytes + linears // 8)  # codes on the disk, and their scales
    longer = simulation_needs(graph, units, 500, 100, plans=False)
    assert longer.memory_bytes > all_of_them.memory_bytes + 4 * 450 * graph.hidden_size * 8


def test_a_reference_holds_no_more_than_its_bound_and_the_embeddings(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_checkpoint(tiny_checkpoint).model
    embedding = model.get_input_embeddings().weight.numel()
    sizes = [parameter.numel() for parameter in model.parameters()]
    fixed = TORCH_BYTES + 5 * max(sizes)
    assert reference_needs(model).memory_bytes == fixed + 4 * sum(sizes)
    monkeypatch.setattr("quantization.needs.decoded_bytes", lambda: 1000)
    assert reference_needs(model).memory_bytes == fixed + 4 * embedding + 1000


@pytest.mark.parametrize(("available", "held"), [(4, 0.5), (1, 0.5), (8, 1), (64, 2)])
def test_a_reference_holds_more_where_there_is_more_memory(
    available: int, held: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In GiB."""
    monkeypatch.setattr("tapeout.resources.available_memory", lambda: available << 30)
    assert decoded_bytes() == held * (1 << 30)


@pytest.mark.usefixtures("little_memory")
def test_the_reference_of_a_quantized_model_is_refused(tmp_path: Path) -> None:
    model = quantized_model(tmp_path / "q", lambda _: Scheme(bits=8, group_size=32, symmetric=True))
    with pytest.raises(ResourceError, match=r"0\.1 GB of memory available") as caught:
        QuantizedReference(model.folder)
    assert "for the quantized model in torch" in caught.value.expected


@pytest.mark.usefixtures("little_memory")
def test_the_model_of_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match=r"0\.1 GB of memory available") as caught:
        CheckpointModel(checkpoint(tmp_path / "checkpoint"), "", tmp_path, adapter=None, positions=64)
    assert "for the checkpoint's model" in caught.value.expected


def test_quantized_and_merged_weights_count_as_files(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "checkpoint")
    change_weights(folder, lambda t: t.update({n: v.bfloat16() for n, v in t.items()}))
    model = load_checkpoint(folder).model
    adapter(tmp_path / "adapter", model)
    weights = sum(parameter.numel() for parameter in model.parameters())
    merged = sum(p.numel() for n, p in model.named_parameters() if n.endswith(("q_proj.weight", "down_proj.weight")))
    assert needs(folder, "").disk_bytes == 0
    assert model_needs(folder, "", tmp_path / "adapter").disk_bytes == 4 * merged
    assert needs(folder, "", tmp_path / "adapter").disk_bytes == 4 * merged + 2 * (weights - merged) + 4 * merged
    gguf_file(tmp_path / "m.gguf")
    assert needs(tmp_path, "m.gguf").disk_bytes == 4 * sum(read_header(tmp_path / "m.gguf").elements)


def test_memory_follows_from_the_largest_tensor(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.export.needs.SEGMENT_BYTES", 0)
    gguf_file(tmp_path / "m.gguf")
    largest = 4 * max(read_header(tmp_path / "m.gguf").elements)
    assert needs(tmp_path, "m.gguf").memory_bytes == BASE_BYTES + 4 * largest
    assert needs(tiny_checkpoint, "").memory_bytes == BASE_BYTES + 2 * largest
    adapter(tmp_path / "adapter", load_checkpoint(tiny_checkpoint).model)  # of matrices that are smaller than the head
    merged = needs(tiny_checkpoint, "", tmp_path / "adapter").memory_bytes
    assert BASE_BYTES + 2 * largest <= merged < BASE_BYTES + 4 * largest


@pytest.mark.parametrize("layers", [2, 3])
def test_a_model_whose_experts_are_stacked_is_written_and_not_held(
    layers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.export.needs.SEGMENT_BYTES", 0)
    model = random_model("olmoe", num_hidden_layers=layers)
    folder = save_checkpoint(model, tmp_path / "checkpoint")
    found = needs(folder, "")
    assert found.disk_bytes == sum(parameter.nbytes for parameter in model.parameters())
    experts = sum(parameter.nbytes for parameter in model.model.layers[0].mlp.experts.parameters())
    assert found == model_needs(folder, "") and found.memory_bytes == BASE_BYTES + 2 * experts


@pytest.mark.parametrize(("bits", "words"), [(4, 8), (8, 4), (6, 6)])
def test_weights_in_words_are_counted_by_their_bits(bits: int, words: int, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "checkpoint")
    name = "model.layers.0.mlp.up_proj.weight"
    before = sum(parameter.numel() for parameter in load_checkpoint(folder).model.parameters())
    size: list[int] = []

    def pack(tensors: dict[str, torch.Tensor]) -> None:
        size.append(tensors.pop(name).numel())
        tensors[f"{name}_packed"] = torch.zeros(10, 3, dtype=torch.int32)

    change_weights(folder, pack)
    groups = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": bits}}}
    change_json(folder / "config.json", quantization_config={"config_groups": groups})
    assert needs(folder, "").disk_bytes == 4 * (before - size[0] + 30 * words)


def test_what_a_killed_export_left_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkpoint(tmp_path / "checkpoint")
    left = tmp_path / ".graph.scratch" / "model" / "shard-0.safetensors"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"weights")
    found: list[bool] = []
    monkeypatch.setattr("pipeline.export.export.require", lambda *_: found.append(left.exists()) or refuse())

    def refuse() -> None:
        raise ResourceError("too little")

    with pytest.raises(ResourceError, match="too little"):
        export(folder, "", tmp_path / "graph", max_positions=64, tolerance=1e-4, seed=0, parents={})
    assert found == [False] and not list(tmp_path.glob(".graph*"))
