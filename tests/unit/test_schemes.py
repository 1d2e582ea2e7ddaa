"""Every number format is stored and read again, and computed by each target, under one scheme for all packages."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
import pytest

from engines.load import find_target, known_targets
from engines.lowerings import lowering_of
from engines.passes.graph import linears
from tapeout.errors import QuantizationError
from tapeout.formats import formats
from tapeout.number_format import Uncoded
from tapeout.quantized import QuantizedWeight, format_of, round_to_nearest, stored_by_rtn
from tapeout.schemes import FLOAT, STATIC_INT8, Scheme
from tests.lowering import apply, linear, lowering, model_of, named, run, value

BACKENDS = ("cuda", "onnxruntime", "onnxruntime-cuda", "tensorrt")
CODED = [name for name, found in formats().items() if not isinstance(found, Uncoded)]
RNG = np.random.default_rng(0)


def scheme(name: str, **fields: Any) -> Scheme:
    return Scheme.model_validate({"format": name} | fields)


@pytest.mark.parametrize("name", CODED)
def test_a_checkpoint_holds_it(name: str) -> None:
    weight = RNG.standard_normal((8, 64)).astype(np.float32)
    stored = stored_by_rtn(scheme(name), weight)
    assert isinstance(stored, QuantizedWeight) and stored.scheme == scheme(name)
    found = format_of(stored.scheme)
    read = QuantizedWeight.of(found.decode(found.encode(stored.coded)), stored.scheme)
    np.testing.assert_array_equal(read.dequantize(), stored.dequantize())
    assert np.abs(read.dequantize() - weight).max() < 0.5 and read.input_scale == stored.input_scale
    if stored.zero_points is None:
        bytes_each = found.decode_bytes(found.encode_bytes(stored.coded))
        np.testing.assert_array_equal(bytes_each.codes, stored.codes)


def test_floats_have_no_codes() -> None:
    with pytest.raises(QuantizationError, match="a quantized weight in fp32"):
        format_of(FLOAT)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("name", CODED)
def test_weights_of_experts_are_those_of_each_expert(name: str, symmetric: bool) -> None:
    """``[E, N, K]``: rounded, decoded, stored and read as E weights ``[N, K]``."""
    weights = RNG.standard_normal((3, 8, 64)).astype(np.float32)
    wanted = scheme(name, symmetric=symmetric)
    together = round_to_nearest(weights, wanted)
    assert together.codes.shape == weights.shape and together.scales.shape[:2] == (3, 8)
    for one, weight in zip(together.dequantize(), weights, strict=True):
        np.testing.assert_array_equal(one, round_to_nearest(weight, wanted).dequantize())
    if wanted.activations == "float":
        found = format_of(wanted)
        read = QuantizedWeight.of(found.decode(found.encode(together.coded)), wanted)
        np.testing.assert_array_equal(read.codes, together.codes)
        np.testing.assert_array_equal(read.dequantize(), together.dequantize())


@pytest.mark.parametrize("bits", [4, 5, 6, 8])
@pytest.mark.parametrize("name", CODED)
def test_widened_codes_are_the_same_weight(name: str, bits: int) -> None:
    weight = round_to_nearest(RNG.standard_normal((8, 64)).astype(np.float32), scheme(name, symmetric=True))
    widened, least = weight.widened(bits), format_of(weight.scheme).integer_bits
    assert (widened is not None) == (0 < least <= bits)
    if widened is not None:
        assert widened.scheme.format == f"int{bits}"
        np.testing.assert_array_equal(widened.dequantize(), weight.dequantize())


@pytest.mark.parametrize("name", CODED)
def test_codes_of_values_on_the_grid_are_exact(name: str) -> None:
    found, codes = format_of(scheme(name)), np.arange(1 << formats()[name].bits, dtype=np.float32)
    middle = np.full_like(codes, found.midpoint)
    np.testing.assert_array_equal(
        found.values(found.rounded(found.values(codes, middle), middle), middle), found.values(codes, middle)
    )


@pytest.mark.parametrize("target", known_targets())
@pytest.mark.parametrize("name", formats())
def test_a_target_has_passes(name: str, target: str) -> None:
    passes = [step.__name__.rpartition(".")[2] for step in find_target(target).passes().every]
    entries = [lowering_of(scheme(name), backend).passes for backend in BACKENDS]
    own = [names for names in entries if set(names) <= set(passes)]
    assert own, f"{target} runs the passes of no backend"
    for names in own:
        assert sorted(names, key=passes.index) == list(names)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("name", formats())
def test_the_passes_of_ort_cpu_compute_what_the_codes_say(name: str, symmetric: bool) -> None:
    entry = lowering_of(scheme(name), "onnxruntime")
    weight = RNG.standard_normal((32, 64)).astype(np.float32)
    stored = stored_by_rtn(scheme(name, symmetric=symmetric), weight)
    x = value("x", ["tokens", 64])
    model = model_of([x], [named("y", linear(x, "block.fc", weight))])
    lowered = lowering(model, {"block.fc.weight": stored})
    steps = [import_module(f"engines.passes.onnxruntime.{step}") for step in entry.passes]
    matched = [apply(lowered, step).matched for step in (linears, *steps)]
    assert sum(matched[1:]) == 1
    inputs = RNG.uniform(-3, 3, (5, 64)).astype(np.float32)
    decoded = stored.dequantize() if isinstance(stored, QuantizedWeight) else stored
    expected = inputs @ decoded.T
    # Inputs are rounded to int8 with codes; a wrong decoding would be off by far more.
    np.testing.assert_allclose(run(model, {"x": inputs})["y"], expected, atol=0.02 * np.abs(expected).max())


def test_a_scheme_is_known_by_its_bits_or_by_its_format() -> None:
    assert Scheme(bits=4) == Scheme.model_validate({"format": "int4"}) and Scheme(bits=4).format == "int4"
    assert Scheme.model_validate({"format": "int8-static"}) == STATIC_INT8
    for given, message in (
        ({"format": "int3"}, "format: expected one of .*float, .*found int3"),
        ({"format": "int4", "bits": 5}, "format: int4 has 4 bits and activations float, found 5 and float"),
        ({"bits": 4, "activations": "int8"}, "activations: int8 needs bits: 8, found 4"),
        ({"bits": 8, "activations": "fp8"}, "activations: fp8 needs format: fp8, found none"),
    ):
        with pytest.raises(ValueError, match=message):
            Scheme.model_validate(given)


def test_a_kind_without_groups_has_one_form() -> None:
    assert Scheme(bits=32, group_size=64, symmetric=False) == FLOAT
    assert Scheme(bits=8, activations="int8", group_size=128, positive_scales=True, symmetric=True) == STATIC_INT8
    assert STATIC_INT8.fitted(576) == STATIC_INT8 and STATIC_INT8.bits_per_weight(64) == 8.25
    with pytest.raises(ValueError, match="8 bits need one"):
        Scheme(bits=8, group_size=None)
