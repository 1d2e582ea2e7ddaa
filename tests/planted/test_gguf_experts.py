"""Experts of a GGUF file that are put together wrong: compared with the checkpoint that the file was made from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pipeline.export import gguf_experts
from pipeline.export.checkpoint import load_checkpoint
from tests.gguf_mixtures import checkpoint, differing, write_mixture

PARTS, BLOCKS = gguf_experts.parts_of, gguf_experts.mxfp4_blocks
Parts = list[gguf_experts.Part]


def gates_for_ups(tensors: Sequence[Any], shape: str, interleaved: bool) -> Parts:
    return PARTS(tensors[::-1], shape, interleaved)


def one_behind_the_other_for_between(tensors: Sequence[Any], shape: str, interleaved: bool) -> Parts:
    return PARTS(tensors, shape, not interleaved)


def another_expert(tensors: Sequence[Any], shape: str, interleaved: bool) -> Parts:
    def swapped(tensor: Any) -> Any:
        data = np.array(tensor.data)
        data[[1, 4]] = data[[4, 1]]
        return SimpleNamespace(name=tensor.name, shape=tensor.shape, tensor_type=tensor.tensor_type, data=data)

    return PARTS([swapped(t) if shape == "EIH" else t for t in tensors], shape, interleaved)


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss", "gpt_oss in MXFP4"])
@pytest.mark.parametrize("defect", [gates_for_ups, one_behind_the_other_for_between, another_expert])
def test_a_reader_takes_another_part(
    defect: Callable[..., Parts], kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = checkpoint(tmp_path / "source", kind.partition(" ")[0], coded="MXFP4" in kind)
    write_mixture(tmp_path / "m.gguf", source)
    model = load_checkpoint(source).model
    assert not differing(model, load_checkpoint(tmp_path, "m.gguf").model)
    monkeypatch.setattr(gguf_experts, "parts_of", defect)
    found = differing(model, load_checkpoint(tmp_path, "m.gguf").model)
    weights = [f"model.layers.{layer}.mlp.experts.gate_up_proj" for layer in range(2)]
    biases = [f"{name}_bias" for name in weights if kind != "qwen3_moe" and defect is not another_expert]
    assert sorted(found) == sorted(weights + biases)


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss in MXFP4"])
def test_a_reader_takes_high_bits_for_low_ones(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of codes that stay, and of those that are dequantized."""
    source = checkpoint(tmp_path / "source", kind.partition(" ")[0], coded="MXFP4" in kind)
    types = {"_exps.weight": "MXFP4"} if kind == "qwen3_moe" else {}
    write_mixture(tmp_path / "m.gguf", source, types=types)
    model = load_checkpoint(tmp_path, "m.gguf").model
    if kind != "qwen3_moe":
        assert not differing(load_checkpoint(source).model, model)

    def exchanged(data: Any) -> Any:
        octets = np.asarray(data).reshape(*data.shape[:-1], -1, 17).copy()
        octets[..., 1:] = octets[..., 1:] >> 4 | octets[..., 1:] << 4
        return BLOCKS(octets.reshape(data.shape))

    monkeypatch.setattr(gguf_experts, "mxfp4_blocks", exchanged)
    found = differing(model, load_checkpoint(tmp_path, "m.gguf").model)
    assert sorted(found) == sorted(
        f"model.layers.{layer}.mlp.experts.{part}_proj" for layer in range(2) for part in ("gate_up", "down")
    )
