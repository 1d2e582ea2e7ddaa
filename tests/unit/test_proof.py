from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from quantization.compressed_tensors import CheckpointWriter, open_checkpoint
from quantization.proof import TensorInventory, count_tensors, prove
from tapeout.quantized import round_to_nearest
from tapeout.schemes import STATIC_INT8, Scheme
from tests.checkpoints import say_schemes

INT4 = Scheme(bits=4, group_size=32, symmetric=True)
PLANNED = {"w": INT4}
GOOD = TensorInventory(
    name="w", weights=6400, columns=64, stored_bytes=3600, bits=4, format="int4", scales=200, held=200
)


def test_a_quantized_checkpoint_passes_and_says_how_small_it_is() -> None:
    norm = TensorInventory(name="norm", weights=64, columns=64, stored_bytes=256, bits=32, format="float")
    proof = prove([GOOD, norm], PLANNED)
    assert proof.passed and proof.reasons == ()
    assert proof.bits_per_weight == pytest.approx(4.5) == proof.planned_bits_per_weight
    assert proof.size_bytes == 3856 and proof.size_ratio == pytest.approx(3856 / 2 / 6464)
    assert (proof.quantized_tensors, proof.planned_tensors) == (1, 1)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"scales_not_finite": 3}, "3 of 200 scales that are NaN"),
        ({"codes_nan": 2}, "2 of 6400 codes that are NaN"),
        ({"scales_zero": 1}, "1 of 200 scales that are zero"),
        ({"scales_one": 200}, "only scales of one"),
        ({"lost": 200}, "one code, or zeros, in 200 of 200 groups"),
        ({"held": 20, "scales_one": 20}, "only scales of one"),
        ({"held": 20, "lost": 1}, "one code, or zeros, in 1 of 20 groups"),
        ({"bits": 32, "stored_bytes": 25600}, "stored in float"),
        ({"bits": 8, "stored_bytes": 6800}, "stored in 8 bits"),
        ({"stored_bytes": 6400}, "8.00 bits per weight are stored, 4.50 were planned"),
        ({"stored_bytes": 4000, "wide_scales": False}, "5.00 bits per weight are stored, 4.50 were planned"),
        ({"stored_bytes": 12800}, "quantized tensors are 1.00 times the size"),
        ({"name": "other"}, "w was planned as 4-bit g32 but is not stored"),
        ({"name": "other"}, "other is stored in 4 bits but was not planned"),
    ],
)
def test_every_way_of_not_being_quantized_is_a_reason(change: dict[str, object], reason: str) -> None:
    proof = prove([GOOD.model_copy(update=change)], PLANNED)
    assert not proof.passed
    assert any(reason in found for found in proof.reasons), proof.reasons


def test_a_plan_may_leave_most_of_a_model_in_float() -> None:
    """As plans for GPUs do: such floats have 16 bits in the engine, whatever the checkpoint holds them in."""
    rest = TensorInventory(name="rest", weights=64000, columns=64, stored_bytes=256000, bits=32, format="float")
    proof = prove([GOOD, rest], PLANNED)
    assert proof.passed and proof.size_ratio > 1


def test_codes_that_take_a_byte_are_expected_to() -> None:
    table = GOOD.model_copy(update={"stored_bytes": 6400 + 400})
    assert prove([table], PLANNED, in_bytes={"w"}).planned_bits_per_weight == pytest.approx(8.5)
    assert prove([table], PLANNED, in_bytes={"w"}).passed and not prove([table], PLANNED).passed


def test_nothing_planned_is_not_a_quantized_model() -> None:
    proof = prove([TensorInventory(name="w", weights=10, columns=10, stored_bytes=40, bits=32, format="float")], {})
    assert "no tensor was planned to be quantized" in proof.reasons


@pytest.mark.parametrize(
    "change",
    [
        {"scales_one": 199},  # of weights that happen to ask for it
        {"held": 0},  # a weight of zeros
        {"stored_bytes": 4000, "wide_scales": True},  # that float16 would lose
        {"lost": 2},
    ],
)
def test_what_sound_models_hold_is_fine(change: dict[str, object]) -> None:
    assert prove([GOOD.model_copy(update=change)], PLANNED).passed


def test_the_inventory_counts_what_lies_in_the_file(tmp_path: Path) -> None:
    weight = np.random.default_rng(0).standard_normal((8, 64)).astype(np.float32)
    weight[0] = 0
    writer = CheckpointWriter(tmp_path)
    writer.add_linear("w.weight", round_to_nearest(weight, INT4))
    writer.add("f", np.ones((3, 5), np.float32))
    writer.finish()
    say_schemes(tmp_path, {"w.weight": INT4})
    checkpoint = open_checkpoint(tmp_path)
    (inventory,) = count_tensors(checkpoint, "w.weight", lambda _: weight)
    assert inventory == TensorInventory(
        name="w.weight",
        weights=512,
        columns=64,
        stored_bytes=256 + 32 + 16,
        bits=4,
        format="int4",
        scales=16,
        held=14,
    )
    (same,) = count_tensors(checkpoint, "w.weight", lambda _: checkpoint.weight("w.weight"))
    assert same.exact and prove([same], {"w.weight": INT4}).exact_tensors == 1
    (in_float,) = count_tensors(checkpoint, "f", lambda _: weight)
    assert in_float == TensorInventory(name="f", weights=15, columns=5, stored_bytes=60, bits=32, format="float")


@pytest.mark.parametrize(
    ("input_scale", "reason"),
    [(None, "stored without an input scale"), (0.0, "has an input scale of 0"), (float("inf"), "input scale of inf")],
)
def test_static_inputs_need_a_scale(input_scale: float | None, reason: str) -> None:
    planned = {"w": STATIC_INT8}
    good = TensorInventory(
        name="w",
        weights=6400,
        columns=64,
        stored_bytes=6600,
        bits=8,
        format="int8-static",
        scales=100,
        held=100,
        input_scale=0.1,
    )
    assert prove([good], planned).passed
    proof = prove([good.model_copy(update={"input_scale": input_scale})], planned)
    assert any(reason in found for found in proof.reasons)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_a_planted_nan_among_codes_of_floats_is_found(code: int, tmp_path: Path) -> None:
    weight, scheme = np.random.default_rng(0).normal(size=(8, 64)), Scheme.model_validate({"format": "fp8-dynamic"})
    weight = weight.astype(np.float32)
    stored = round_to_nearest(weight, scheme)
    for name in ("sound", "planted"):
        folder = tmp_path / name
        folder.mkdir()
        writer = CheckpointWriter(folder)
        writer.add_linear("w.weight", stored)
        writer.finish()
        say_schemes(folder, {"w.weight": scheme})
        (inventory,) = count_tensors(open_checkpoint(folder), "w.weight", lambda _: weight)
        reasons = prove([inventory], {"w.weight": scheme}).reasons
        assert any("1 of 512 codes that are NaN" in reason for reason in reasons) == (name == "planted")
        stored.codes[3, 5] = code


def test_static_inputs_that_nobody_planned_are_told() -> None:
    entry = GOOD.model_copy(update={"input_scale": 0.1})
    assert any("with an input scale" in found for found in prove([entry], PLANNED).reasons)
