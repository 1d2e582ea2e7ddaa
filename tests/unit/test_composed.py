"""Experts that are stored one by one are stacked in files, as transformers stacks them in memory."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.export.checkpoint import load_checkpoint
from pipeline.export.composed import composed, is_composed
from tapeout.errors import ExportError
from tapeout.tensor_files import stored_tensors
from tests.checkpoints import change_weights
from tests.families import random_model, save_checkpoint

FAMILIES = ("mixtral", "olmoe", "deepseek_v3", "ernie4_5_moe", "lfm2_moe", "minimax", "phimoe")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_model_has_the_weights_that_transformers_gives_it(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    saved = random_model(family).to(dtype)
    folder = save_checkpoint(saved, tmp_path / "checkpoint")
    assert any(".experts.0." in name for name in stored_tensors(folder))
    loaded = load_checkpoint(folder, scratch=tmp_path / "scratch")
    assert loaded.weights == tmp_path / "scratch" and loaded.dequantized is None
    kept = dict(loaded.model.named_parameters())
    experts = [name for name in kept if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]
    assert experts and all(kept[name].dtype == dtype for name in experts)
    for name, parameter in saved.named_parameters():
        torch.testing.assert_close(kept[name].float(), parameter.float(), rtol=0, atol=0)
    again = {name: tensor.read for name, tensor in stored_tensors(loaded.weights).items()}
    assert not is_composed(saved, again)  # a graph's weights are read as they are


def test_one_parameter_at_a_time_is_in_memory(tmp_path: Path) -> None:
    model = random_model("olmoe", num_hidden_layers=3)
    stored = stored_tensors(save_checkpoint(model, tmp_path))
    read: list[weakref.ref[Any]] = []

    def reader(name: str) -> Any:
        def tensor() -> torch.Tensor:
            value = stored[name].read().clone()
            read.append(weakref.ref(value))
            return value

        return tensor

    made = composed(model, {name: reader(name) for name in stored})
    assert made.keys() == {name for name, _ in model.named_parameters()} and not read
    most = 0
    for make in made.values():
        make()
        most = max(most, sum(each() is not None for each in read))
    assert len(read) == len(stored) and most <= 2 * model.config.num_experts


def test_experts_that_do_not_fit_together_are_refused_by_name(tmp_path: Path) -> None:
    folder = save_checkpoint(random_model("olmoe"), tmp_path / "checkpoint")
    change_weights(folder, lambda tensors: tensors.pop("model.layers.1.mlp.experts.2.up_proj.weight"))
    with pytest.raises(
        ExportError, match=r"cannot put model\.layers\.1\.mlp\.experts\.gate_up_proj together from 7 tensors"
    ):
        load_checkpoint(folder)


def test_a_missing_or_an_unknown_expert_is_refused(tmp_path: Path) -> None:
    folder = save_checkpoint(random_model("olmoe"), tmp_path / "checkpoint")
    change_weights(folder, lambda tensors: tensors.pop("model.layers.1.mlp.experts.3.down_proj.weight"))
    with pytest.raises(ExportError, match=r"experts\.down_proj \[3, .* where the model has \[4, "):
        load_checkpoint(folder)
    folder = save_checkpoint(random_model("olmoe"), tmp_path / "other")
    change_weights(folder, lambda tensors: tensors.update({"model.layers.1.mlp.experts.3.extra": torch.zeros(2)}))
    with pytest.raises(ExportError, match=r"holds 1 tensor .*experts\.3\.extra"):
        load_checkpoint(folder)
