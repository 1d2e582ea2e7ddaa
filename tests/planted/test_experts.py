"""Experts of a mixture that are stored wrong: the proof of a quantized model judges each expert by itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from quantization.compressed_tensors import CheckpointWriter, open_checkpoint
from quantization.proof import count_tensors, prove
from tapeout.number_format import FloatArray
from tapeout.quantized import QuantizedWeight, fit_range, round_to, round_to_nearest, stacked
from tapeout.schemes import Scheme
from tests.checkpoints import say_schemes

MXFP4 = Scheme(bits=4, format="mxfp4")
SCHEMES = [
    *(Scheme(bits=bits, group_size=g, symmetric=s) for bits in (4, 5, 6, 8) for g in (16, 32) for s in (True, False)),
    MXFP4,
]
NAME = "model.layers.0.mlp.experts.gate_up_proj"


@pytest.fixture(params=SCHEMES, ids=lambda scheme: scheme.name)
def scheme(request: pytest.FixtureRequest) -> Scheme:
    return request.param


@pytest.fixture
def source() -> FloatArray:
    return np.random.default_rng(0).standard_normal((6, 48, 128)).astype(np.float32)


def accused(folder: Path, stored: QuantizedWeight, source: FloatArray) -> dict[int, str]:
    """What the proof says against each expert."""
    writer = CheckpointWriter(folder)
    writer.add_linear(NAME, stored)
    writer.finish()
    say_schemes(folder, {NAME: stored.scheme})
    proof = prove(count_tensors(open_checkpoint(folder), NAME, lambda expert: source[expert]), {NAME: stored.scheme})
    named = {expert: f"{NAME}, expert {expert}, " for expert in range(len(source))}
    return {
        expert: reason.removeprefix(label)
        for reason in proof.reasons
        for expert, label in named.items()
        if reason.startswith(label)
    }


def test_two_experts_are_swapped(scheme: Scheme, source: FloatArray, tmp_path: Path) -> None:
    stored = round_to_nearest(source, scheme)
    swapped = stacked([stored.part(expert) for expert in (0, 4, 2, 3, 1, 5)])
    assert accused(tmp_path, swapped, source).keys() == {1, 4}


def test_an_expert_is_empty(scheme: Scheme, source: FloatArray, tmp_path: Path) -> None:
    empty = source.copy()
    empty[3] = 0
    assert accused(tmp_path, round_to_nearest(empty, scheme), source).keys() == {3}


def test_an_expert_has_the_scales_of_its_neighbour(scheme: Scheme, source: FloatArray, tmp_path: Path) -> None:
    stored = round_to_nearest(source, scheme)
    wrong = accused(tmp_path, replace(stored, scales=stored.scales[[0, 1, 3, 3, 4, 5]]), source)
    assert wrong.keys() == {2} and "scales that fit the weights of expert 3" in wrong[2]


@pytest.mark.parametrize("change", ["a code", "a scale", "the method"])
def test_an_expert_of_mxfp4_is_rounded_again(change: str, source: FloatArray, tmp_path: Path) -> None:
    """Its source was in MXFP4: one weight of 36,864 differs, one block is twice as large, or a method changed some."""
    kept = round_to_nearest(source, MXFP4)
    source = kept.dequantize()
    codes, scales = kept.codes.copy(), kept.scales.copy()
    if change == "a code":
        codes[4, 7, 9] ^= 1
    elif change == "a scale":
        scales[4, 7, 1] *= 2
    else:
        shrunk = fit_range(source, MXFP4, shrink=0.5)
        codes[4], scales[4] = round_to(source, shrunk, MXFP4).codes[4], shrunk.scales[4]
    wrong = accused(tmp_path, replace(kept, codes=codes, scales=scales), source)
    assert wrong == {4: "holds other weights than its source, whose weights mxfp4 holds exactly"}


def test_sound_experts(scheme: Scheme, source: FloatArray, tmp_path: Path) -> None:
    assert accused(tmp_path, round_to_nearest(source, scheme), source) == {}


def test_sound_experts_of_one_scale(source: FloatArray, tmp_path: Path) -> None:
    """Codes that were drawn: one scale for all says of no weights whose it is, though only those of expert 3 ask for it
    in every group.
    """
    codes = np.random.default_rng(1).integers(0, 16, source.shape, np.uint8)
    codes[[0, 1, 2, 4, 5], 0, : MXFP4.group_size] = 1  # the smallest
    scales = np.full_like(round_to_nearest(source, MXFP4).scales, 0.125)
    drawn = QuantizedWeight(codes, scales, None, MXFP4)
    assert accused(tmp_path, drawn, drawn.dequantize()) == {}
