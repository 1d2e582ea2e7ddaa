from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from engines.passes.graph import linears, merge_linears
from engines.passes.onnxruntime import linear_kernels
from engines.passes.onnxruntime.block_linears import widened
from tapeout.errors import BuildError
from tapeout.quantized import QuantizedWeight, round_to_nearest
from tapeout.schemes import Scheme
from tests.lowering import apply, group, linear_model, lowering, operators, run

RNG = np.random.default_rng(0)


def rounded_activations(x: NDArray[np.float32], block: int) -> NDArray[np.float32]:
    """What accuracy level 4 makes of the input: int8 per row and block, the last block shorter."""
    out = np.empty_like(x)
    for start in range(0, x.shape[-1], block):
        part = x[..., start : start + block]
        step = np.abs(part).max(axis=-1, keepdims=True) / 127
        out[..., start : start + block] = np.rint(part / step) * step
    return out


def random_linear(rows: int, columns: int, fmt: Scheme) -> QuantizedWeight:
    """Codes, scales (of either sign) and zero points at random; the last group may be short."""
    groups = -(-columns // fmt.group_size)
    scales = RNG.uniform(0.01, 0.03, (rows, groups)) * RNG.choice([-1, 1], (rows, groups))
    zero_points = None if fmt.symmetric else RNG.integers(0, 1 << fmt.bits, (rows, groups)).astype(np.uint8)
    codes = RNG.integers(0, 1 << fmt.bits, (rows, columns)).astype(np.uint8)
    return QuantizedWeight(codes, scales.astype(np.float32), zero_points, fmt)


def dequantized(weight: QuantizedWeight) -> NDArray[np.float64]:
    columns = weight.codes.shape[1]
    zero_points = (
        np.full(weight.scales.shape, 1 << (weight.scheme.bits - 1))
        if weight.zero_points is None
        else weight.zero_points
    )
    spread = [
        np.repeat(a.astype(np.float64), weight.group_size, axis=1)[:, :columns] for a in (zero_points, weight.scales)
    ]
    return (weight.codes - spread[0]) * spread[1]


@pytest.mark.parametrize("bits", (4, 5, 6, 8))
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("columns", [64, 96, 72], ids=["two groups", "odd groups", "short last group"])
@pytest.mark.parametrize("biased", [False, True])
def test_a_quantized_product_computes_what_its_codes_say(
    bits: int, symmetric: bool, columns: int, biased: bool
) -> None:
    rng = np.random.default_rng(1)  # of its own: where an activation lies between two codes, either is right
    fmt = Scheme(bits=bits, group_size=32, symmetric=symmetric)
    model = linear_model({"block.fc": 37}, columns, biased=biased, rng=rng)
    weight = random_linear(37, columns, fmt)
    lowered = lowering(model, {"block.fc.weight": weight})
    bias = lowered.weights.tensor("block.fc.bias") if biased else 0.0
    outcome = apply(lowered, linears, linear_kernels)
    assert outcome.matched == 1
    assert operators(model) == ["MatMulNBits", "Neg"]
    stored = ", stored in 8 bits" if bits in (5, 6) else ""
    assert lowered.plan == {"block.fc.weight": f"MatMulNBits {bits}-bit g32 {'sym' if symmetric else 'asym'}{stored}"}
    for tokens in (1, 5):  # one row has kernels of its own
        x = rng.standard_normal((2, tokens, columns)).astype(np.float32)
        actual = -run(model, {"x": x})["block.fc"]
        expected = rounded_activations(x, 32) @ dequantized(weight).T + bias
        np.testing.assert_allclose(actual, expected, atol=1e-3 * np.abs(expected).max())


def test_tokens_of_a_batch_do_not_share_an_activation_scale() -> None:
    model = linear_model({"block.fc": 37}, rng=RNG)
    lowered = lowering(model, {"block.fc.weight": random_linear(37, 64, Scheme(bits=4, group_size=32, symmetric=True))})
    apply(lowered, linears, linear_kernels)
    x = RNG.standard_normal((4, 1, 64)).astype(np.float32)
    x[2] *= 1000
    together = run(model, {"x": x})["block.fc"]
    for row in range(4):
        alone = run(model, {"x": x[row : row + 1]})["block.fc"][0]
        np.testing.assert_allclose(together[row], alone, rtol=1e-5, atol=1e-6 * np.abs(alone).max())


@pytest.mark.parametrize(
    "fmt", [Scheme(bits=4, group_size=32, symmetric=False), Scheme(bits=8, group_size=32, symmetric=True)], ids=str
)
def test_a_merged_product_stacks_codes_scales_and_zero_points(fmt: Scheme) -> None:
    members = {"block.q": 32, "block.k": 16, "block.v": 16}
    model = linear_model(members, biased=True, rng=RNG)
    weights = {f"{name}.weight": random_linear(rows, 64, fmt) for name, rows in members.items()}
    lowered = lowering(model, weights, groups=[group("layers.0.qkv", *members, biased=True)])
    biases = {name: lowered.weights.tensor(f"{name}.bias") for name in members}
    apply(lowered, linears, merge_linears, linear_kernels)
    assert operators(model)[:2] == ["MatMulNBits", "Split"]
    x = RNG.standard_normal((2, 3, 64)).astype(np.float32)
    results = run(model, {"x": x})
    for name in members:
        expected = rounded_activations(x, 32) @ dequantized(weights[f"{name}.weight"]).T + biases[name]
        np.testing.assert_allclose(-results[name], expected, atol=1e-3 * np.abs(expected).max())


@pytest.mark.parametrize(
    "other",
    [Scheme(bits=4, group_size=32, symmetric=True), Scheme(bits=8, group_size=64, symmetric=True), None],
    ids=str,
)
def test_formats_that_differ_within_a_merged_product_are_refused(other: Scheme | None) -> None:
    members = {"block.gate": 32, "block.up": 32}
    model = linear_model(members, rng=RNG)
    first = random_linear(32, 64, Scheme(bits=8, group_size=32, symmetric=True))
    tensors = {"block.gate.weight": first} | ({"block.up.weight": random_linear(32, 64, other)} if other else {})
    lowered = lowering(model, tensors, groups=[group("layers.0.gate_up", *members)])
    with pytest.raises(BuildError, match=r"layers\.0\.gate_up mixes"):
        apply(lowered, linears, merge_linears, linear_kernels)


def test_an_untied_head_in_float_keeps_its_place_among_the_initializers() -> None:
    """Its group is called ``lm_head``, and so is its parameter, which the graph still holds."""
    model = linear_model({"lm_head": 53}, 32, biased=True, rng=RNG)
    x = RNG.standard_normal((1, 2, 32)).astype(np.float32)
    before = run(model, {"x": x})["lm_head"]
    lowered = lowering(model, groups=[group("lm_head", "lm_head", out_features=53, biased=True)])
    apply(lowered, linears, linear_kernels)
    assert lowered.plan == {"lm_head": "MatMul fp32"}
    np.testing.assert_allclose(run(model, {"x": x})["lm_head"], before, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("symmetric", [True, False])
def test_what_is_stored_in_more_bits_is_the_same_weight_to_the_bit(symmetric: bool) -> None:
    linear_ = random_linear(64, 64, Scheme(bits=6, group_size=32, symmetric=symmetric))
    wide = widened(linear_, 8)
    assert wide.scheme.bits == 8
    np.testing.assert_array_equal(wide.dequantize(), linear_.dequantize())


@settings(max_examples=50, deadline=None)
@given(rows=st.integers(1, 5), columns=st.integers(1, 9), seed=st.integers(0, 99))
def test_packing_keeps_every_code_low_bits_first(rows: int, columns: int, seed: int) -> None:
    codes = np.random.default_rng(seed).integers(0, 16, (rows, columns)).astype(np.uint8)
    packed = linear_kernels.pack(codes, 4)
    assert packed.shape == (rows, -(-columns // 2))
    unpacked = np.stack([packed & 15, packed >> 4], axis=2).reshape(rows, -1)
    np.testing.assert_array_equal(unpacked[:, :columns], codes)
    assert not unpacked[:, columns:].any()
    np.testing.assert_array_equal(linear_kernels.pack(codes, 8), codes)


def test_rounding_and_kernel_agree_on_what_a_code_means() -> None:
    """The codes :mod:`tapeout.quantized` writes decode to the same weights here and there."""
    weight = RNG.standard_normal((8, 64)).astype(np.float32)
    for fmt in (Scheme(bits=4, group_size=32, symmetric=False), Scheme(bits=8, group_size=64, symmetric=True)):
        stored = round_to_nearest(weight, fmt)
        np.testing.assert_allclose(dequantized(stored), stored.dequantize(), rtol=1e-6, atol=1e-7)
