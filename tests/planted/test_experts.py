"""Experts of a mixture that are stored wrong: the proof of a quantized model judges each expert by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from engines.kernels import cpu as native
from engines.load import open_probe
from evals.kinds.parity import ParityBounds
from evals.kinds.parity.measure import compare
from quantization.compressed_tensors import CheckpointWriter, open_checkpoint
from quantization.proof import count_tensors, prove
from quantization.reference import QuantizedReference
from tapeout.number_format import FloatArray
from tapeout.quantized import QuantizedWeight, fit_range, round_to, round_to_nearest, stacked
from tapeout.recipe import Rule
from tapeout.schemes import Scheme
from tests.checkpoints import say_schemes
from tests.experts import quantized, recipe
from tests.family_engines import words

MXFP4 = Scheme(bits=4, format="mxfp4")
SCHEMES = [
    *(Scheme(bits=bits, group_size=g, symmetric=s) for bits in (4, 5, 6, 8) for g in (16, 32) for s in (True, False)),
    MXFP4,
]
MIXED = (4, 8, 5, 4, 6, 5)
NAME = "model.layers.0.mlp.experts.gate_up_proj"


@pytest.fixture(params=SCHEMES, ids=lambda scheme: scheme.name)
def scheme(request: pytest.FixtureRequest) -> Scheme:
    return request.param


@pytest.fixture
def source() -> FloatArray:
    return np.random.default_rng(0).standard_normal((6, 48, 128)).astype(np.float32)


def of_bits(bits: Sequence[int], symmetric: bool = True) -> Scheme:
    found = Scheme.of_experts([Scheme(bits=one, symmetric=symmetric) for one in bits])
    assert found is not None
    return found


def write(folder: Path, stored: QuantizedWeight) -> None:
    writer = CheckpointWriter(folder)
    writer.add_linear(NAME, stored)
    writer.finish()
    say_schemes(folder, {NAME: stored.scheme})


def accused(folder: Path, stored: QuantizedWeight, source: FloatArray) -> dict[int, str]:
    """What the proof says against each expert."""
    write(folder, stored)
    return accused_in(folder, stored.scheme, source)


def accused_in(folder: Path, planned: Scheme, source: FloatArray) -> dict[int, str]:
    proof = prove(count_tensors(open_checkpoint(folder), NAME, lambda expert: source[expert]), {NAME: planned})
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


def test_two_experts_have_exchanged_their_bits(source: FloatArray, tmp_path: Path) -> None:
    """In the weights: expert 1 has 5 bits and expert 2 has 8. The file is sound, and as large as the planned one."""
    write(tmp_path, round_to_nearest(source, of_bits((4, 5, 8, 4, 6, 5))))
    assert accused_in(tmp_path, of_bits(MIXED), source) == {
        1: "was planned as 8-bit g32 but is stored in 5 bits",
        2: "was planned as 5-bit g32 but is stored in 8 bits",
    }


@pytest.mark.parametrize("symmetric", [True, False])
def test_bits_of_two_experts_are_exchanged_in_the_file(symmetric: bool, source: FloatArray, tmp_path: Path) -> None:
    """Their codes are not: each is read from the bytes of both, as many as before."""
    write(tmp_path, round_to_nearest(source, of_bits(MIXED, symmetric)))
    tensors = load_file(tmp_path / "model.safetensors")
    bits = tensors[f"{NAME}.weight_bits"]
    bits[[1, 2]] = bits[[2, 1]]
    save_file(tensors, tmp_path / "model.safetensors")
    wrong = accused_in(tmp_path, of_bits((4, 5, 8, 4, 6, 5), symmetric), source)
    assert wrong.keys() == {1, 2} and all("off its source" in reason for reason in wrong.values())


def test_codes_of_an_expert_are_those_of_its_neighbour(source: FloatArray, tmp_path: Path) -> None:
    """Expert 3 has the codes of expert 0, which has as many bits."""
    write(tmp_path, round_to_nearest(source, of_bits(MIXED)))
    tensors = load_file(tmp_path / "model.safetensors")
    words, ends = tensors[f"{NAME}.weight_packed"], np.cumsum([0, *(48 * 128 * bits // 32 for bits in MIXED)])
    words[ends[3] : ends[4]] = words[ends[0] : ends[1]]
    save_file(tensors, tmp_path / "model.safetensors")
    assert accused_in(tmp_path, of_bits(MIXED), source).keys() == {3}


@pytest.mark.skipif(native.level() is None, reason=native.unsupported())
@pytest.mark.parametrize("planted", [False, True], ids=["sound", "defect"])
def test_an_engine_has_the_codes_of_a_neighbouring_expert(
    planted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts 0 and 2, which have as many bits, so that all shapes fit. Parity finds it in the layer's output."""
    rules = (
        Rule(match="layers.*.experts_*", experts=(1,), scheme=Scheme(bits=8, symmetric=True)),
        Rule(match="layers.*.experts_*", experts=(0, 2), scheme=Scheme(bits=5, symmetric=True)),
        Rule(match="*", scheme=Scheme(bits=4, symmetric=True)),
    )
    mixture = quantized("qwen3_moe", tmp_path, recipe(rules))
    part = QuantizedWeight.part

    def neighbour(weight: QuantizedWeight, index: int) -> QuantizedWeight:
        return part(weight, 2 - index if index in (0, 2) else index)

    with monkeypatch.context() as patch:
        patch.setattr(QuantizedWeight, "part", neighbour if planted else part)
        bundle = mixture.build(tmp_path / "bundle")
    head = next(group.members[0] for group in mixture.graph.record.groups if group.name == "lm_head")
    reference = QuantizedReference(mixture.quantized.folder, int8_activations=True)
    items = compare(open_probe(bundle, tmp_path, threads=1), reference, words("qwen3_moe", 2, 40, 2), head=head)
    worst = max(item.errors["model.layers.0.mlp.experts.down_proj"] for item in items)
    assert (worst > ParityBounds().max_parity_error) is planted


@pytest.mark.parametrize("symmetric", [True, False])
def test_sound_experts_of_their_own_bits(symmetric: bool, source: FloatArray, tmp_path: Path) -> None:
    assert accused(tmp_path, round_to_nearest(source, of_bits(MIXED, symmetric)), source) == {}


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
