"""MXFP4 against a slow reference that reads the fields of each code as the specification writes them."""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantization.compressed_tensors import open_checkpoint
from quantization.methods.scale_fit import fit_scales
from quantization.output_error import output_error
from quantization.reference import QuantizedReference
from tapeout.errors import QuantizationError
from tapeout.formats.mxfp4 import decode_scales, encode_scales
from tapeout.number_format import Coded
from tapeout.quantized import QuantizedWeight, fit_range, format_of, round_to, round_to_nearest
from tapeout.recipe import KVCache, Rule
from tapeout.schemes import Scheme
from tests.unit.test_quantize import (
    decoded,
    divergence,
    float_model,
    logits,
    make_inputs,
    quantized,
    recipe,
    tokens,
)

MXFP4 = Scheme.model_validate({"format": "mxfp4"})
FORMAT = format_of(MXFP4)
CODES = range(16)
# Weights of a block: of any magnitude that has a scale, with zeros, ties and the bounds of binades among them.
WEIGHTS = st.lists(
    st.one_of(
        st.floats(-(2.0**100), 2.0**100, width=32),
        st.floats(-8, 8, width=32),
        st.sampled_from([0.0, -0.0, 0.25, -0.75, 1.25, 1.75, -2.5, 3.5, 5.0, 6.0, -6.0, 7.0, 8.0]),
    ),
    min_size=32,
    max_size=32,
)


def element(code: int) -> Fraction:
    """E2M1 (5.3.3): a sign, two bits of exponent with bias 1, one of mantissa; exponent 0 is subnormal."""
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    value = Fraction(mantissa, 2) if exponent == 0 else (1 + Fraction(mantissa, 2)) * 2 ** (exponent - 1)
    return -value if sign else value


def nearest(value: Fraction) -> Fraction:
    """The element that is nearest; of two, the one whose mantissa is even. Beyond the largest: the largest."""
    candidates = [code for code in CODES if code != 8]
    return element(min(candidates, key=lambda code: (abs(element(code) - value), code & 1)))


def scale_of(largest: Fraction) -> Fraction:
    """The smallest power of two under which no weight is clipped."""
    exponent = 130
    while largest <= 6 * Fraction(2) ** (exponent - 1):
        exponent -= 1
    return Fraction(2) ** exponent


def fractions(values: np.ndarray) -> list[Fraction]:
    return [Fraction(float(value)) for value in values.reshape(-1)]


def test_every_code_is_read_exactly() -> None:
    codes = np.array(CODES, np.uint8)
    values = FORMAT.values(codes, 0)
    assert fractions(values) == [element(code) for code in CODES] and np.signbit(values[8])
    packed = np.arange(256, dtype=np.uint8)[:, None]
    read = FORMAT.decode({"weight_packed": packed, "weight_scale": np.full((256, 1), 127, np.uint8)})
    assert read.codes.tolist() == [[octet & 15, octet >> 4] for octet in range(256)]


def test_every_scale_is_read_exactly() -> None:
    """E8M0 (5.4.1): 2^(code - 127), and 255 is NaN."""
    scales = decode_scales(np.arange(256, dtype=np.uint8))
    assert fractions(scales[:255]) == [Fraction(2) ** (code - 127) for code in range(255)] and np.isnan(scales[255])
    np.testing.assert_array_equal(encode_scales(scales[:255]), np.arange(255))
    for wrong in (3.0, -1.0, 0.0, math.inf, math.nan, 2.0**-128):
        with pytest.raises(QuantizationError, match="no powers of two"):
            encode_scales(np.array([wrong], np.float32))


@given(weights=WEIGHTS)
@settings(max_examples=300, deadline=None)
def test_rounding_is_that_of_the_reference(weights: list[float]) -> None:
    weight = np.array([weights], np.float32)
    largest = max(map(abs, fractions(weight)))
    rounded = round_to_nearest(weight, MXFP4)
    (scale,) = fractions(rounded.scales)
    if largest <= Fraction(2) ** -107:  # too small for a scale
        assert scale == 1 or scale == scale_of(largest)
    else:
        assert scale == scale_of(largest)
        assert fractions(rounded.dequantize()) == [nearest(value / scale) * scale for value in fractions(weight)]
    assert not (rounded.codes == 8).any()  # a zero has no sign


@given(scaled=st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=20))
@settings(max_examples=200, deadline=None)
def test_values_beyond_the_largest_are_clipped(scaled: list[float]) -> None:
    """As methods ask for that shrink the range."""
    codes = FORMAT.rounded(np.array(scaled, np.float32), np.zeros(1, np.float32))
    assert fractions(FORMAT.values(codes, 0)) == [nearest(Fraction(value)) for value in scaled]


@given(data=st.data(), rows=st.integers(1, 5), blocks=st.integers(1, 3))
@settings(max_examples=100, deadline=None)
def test_what_is_stored_is_read(data: Any, rows: int, blocks: int) -> None:
    generator = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    coded = Coded(
        generator.integers(0, 16, (rows, 32 * blocks), np.uint8),
        decode_scales(generator.integers(0, 255, (rows, blocks), np.uint8)),
        None,
    )
    for encode, decode in ((FORMAT.encode, FORMAT.decode), (FORMAT.encode_bytes, FORMAT.decode_bytes)):
        read = decode(encode(coded))
        np.testing.assert_array_equal(read.codes, coded.codes)
        np.testing.assert_array_equal(read.scales, coded.scales)
    stored = FORMAT.encode(coded)
    assert sum(part.nbytes for part in stored.values()) * 8 == MXFP4.bits_per_weight(32 * blocks) * coded.codes.size


@pytest.mark.parametrize("bits", [5, 6, 8])
def test_integers_hold_the_same_weights_to_the_bit(bits: int) -> None:
    """Every code under every scale that is written; both zeros are the integer 0."""
    codes = np.tile(np.array(CODES, np.uint8), (235, 2))
    scales = np.ldexp(np.float32(1), np.arange(-109, 126))[:, None]
    weight = QuantizedWeight(codes, scales, None, MXFP4)
    widened = weight.widened(bits)
    assert widened is not None and widened.scheme == Scheme(bits=bits, group_size=32, symmetric=True)
    expected = weight.dequantize()
    assert np.isfinite(expected).all() and (expected[:, 1:8] != 0).all()
    np.testing.assert_array_equal(widened.dequantize().view(np.uint32), (expected + 0.0).view(np.uint32))
    assert widened.codes.max() < 1 << bits
    assert weight.widened(4) is None


def test_scales_that_methods_fit_are_powers_of_two() -> None:
    generator = np.random.default_rng(0)
    weight = generator.standard_t(4, (64, 128)).astype(np.float32)
    importance = generator.uniform(0.1, 4, 128).astype(np.float32)
    grid = fit_scales(weight, importance, MXFP4)
    np.testing.assert_array_equal(decode_scales(encode_scales(grid.scales)), grid.scales)
    metric = np.diag(importance)[None]
    fitted, plain = round_to(weight, grid, MXFP4), round_to_nearest(weight, MXFP4)
    errors = [output_error(found.dequantize() - weight, metric) for found in (fitted, plain)]
    assert errors[0] < 0.95 * errors[1]
    assert (grid.scales < plain.scales).any(), "a block whose largest weights are better clipped"


def test_blocks_too_small_for_a_scale_are_zero_and_the_largest_weights_stay_finite() -> None:
    weight = np.zeros((3, 32), np.float32)
    weight[1], weight[2, 0] = 1e-38, np.finfo(np.float32).max
    grid = fit_range(weight, MXFP4)
    assert grid.scales.ravel().tolist() == [1, 1, 2.0**125]
    found = round_to_nearest(weight, MXFP4).dequantize()
    assert not found[:2].any() and found[2, 0] == 6 * 2.0**125
    with pytest.raises(QuantizationError, match="NaN or infinite"):
        fit_range(np.full((1, 32), np.nan, np.float32), MXFP4)


def test_blocks_have_32_channels() -> None:
    assert MXFP4.group_size == 32 and MXFP4.symmetric and MXFP4.name == "mxfp4 g32"
    assert MXFP4.bits_per_weight(64) == 4.25 and MXFP4.fitted(96) == MXFP4
    with pytest.raises(ValueError, match="group_size: mxfp4 has groups of 32, found 64"):
        Scheme.model_validate({"format": "mxfp4", "group_size": 64})
    with pytest.raises(QuantizationError, match="48 input channels") as refused:
        MXFP4.fitted(48)
    assert refused.value.expected == "a multiple of 32, the smallest group in mxfp4"


def test_the_official_decompressor_decodes_the_same_weight() -> None:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    weight = np.random.default_rng(1).standard_normal((16, 96)).astype(np.float32)
    linear = round_to_nearest(weight, MXFP4)
    parts = {name: torch.from_numpy(part) for name, part in FORMAT.encode(linear.coded).items()}
    said = FORMAT.arguments(MXFP4)["weights"]
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs.model_validate(said))
    compressor: Any = BaseCompressor.get_value_from_registry(FORMAT.layout)
    assert compressor.can_compress(torch.nn.Linear, scheme)
    theirs = compressor.decompress(parts, scheme)["weight"].float().numpy()
    np.testing.assert_array_equal(theirs, linear.dequantize())  # bfloat16 holds an element times a power of two


def test_a_model_is_quantized_read_and_loaded_by_transformers(tmp_path: Path) -> None:
    """No input scale goes into a linear of such scales: they could not take it."""
    from transformers import AutoModelForCausalLM

    graph, calibration = make_inputs(tmp_path, tied=True)
    rules = (Rule.model_validate({"match": "*", "format": "mxfp4"}),)
    model = quantized(recipe(rules, kv_cache=KVCache(dtype="float32")), graph, calibration, tmp_path / "q")
    record = model.record
    assert record.proof.passed and all(report.error <= report.error_rtn for report in record.linears)
    linears = [report for report in record.linears if report.group.startswith("layers.")]
    assert {report.scheme for report in linears} == {MXFP4}
    fold_targets = {group.name: group.fold_target for group in graph.record.groups}
    for report in linears:
        target = fold_targets[report.group]
        if target is None or target.kind == "linear":
            assert report.input_scale == "identity"
    assert any(report.input_scale != "identity" for report in linears), "into norms they go"
    checkpoint = open_checkpoint(model.folder)
    read = checkpoint.linear(linears[0].name)
    assert isinstance(read, QuantizedWeight) and read.scheme == MXFP4
    ours = logits(decoded(graph, model))
    reference = QuantizedReference(model.folder)
    again = torch.stack([torch.from_numpy(reference(row.tolist())) for row in tokens(4, seed=9)]).log_softmax(-1)
    torch.testing.assert_close(again, ours, rtol=0, atol=1e-4)
    loaded: Any = AutoModelForCausalLM.from_pretrained(model.folder, dtype=torch.bfloat16).eval()
    assert divergence(ours, logits(loaded).float()) < 0.01
    for report in linears:  # decompressed by that call, to bfloat16, which holds them
        theirs = loaded.get_parameter(report.name).float().numpy()
        np.testing.assert_array_equal(theirs, checkpoint.weight(report.name))
    assert divergence(logits(float_model(graph)), ours) < 0.3
