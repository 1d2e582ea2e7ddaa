from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from engines.kernels.cpu import packing
from engines.kernels.cpu.packing import STEP, TILE, tiles_of
from engines.kernels.operators import DOMAIN
from engines.passes.base import attribute
from engines.passes.graph import linears, merge_linears
from engines.passes.onnxruntime import block_linears, linear_kernels, static_int8_linears
from tapeout.errors import BuildError
from tapeout.quantized import QuantizedWeight
from tapeout.schemes import STATIC_INT8, Scheme
from tests.lowering import apply, group, linear_model, lowering, model_of, named, op, operators, run, value
from tests.native import check, expected
from tests.random_linears import random_linear

RNG = np.random.default_rng(0)
BITS: tuple[int, ...] = (4, 5, 6, 8)
SYMMETRIC = Scheme(bits=4, group_size=32, symmetric=True)


def inputs(tokens: int, columns: int = 64) -> NDArray[np.float32]:
    return RNG.standard_normal((2, tokens, columns)).astype(np.float32)


@pytest.mark.usefixtures("native_operators")
@pytest.mark.parametrize("half", [True, False], ids=["float16 scales", "float32 scales"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", BITS)
def test_a_quantized_product_is_one_native_node(bits: int, symmetric: bool, biased: bool, half: bool) -> None:
    model = linear_model({"block.fc": 37}, biased=biased, rng=RNG)
    weight = random_linear(37, 64, Scheme(bits=bits, group_size=32, symmetric=symmetric), half=half)
    lowered = lowering(model, {"block.fc.weight": weight})
    bias = lowered.weights.tensor("block.fc.bias") if biased else None
    outcome = apply(lowered, linears, block_linears)
    assert (outcome.matched, outcome.declined) == (1, ())
    assert operators(model) == ["BlockLinear", "Neg"] and model.opset_imports[DOMAIN] == 1
    assert lowered.plan == {"block.fc.weight": f"BlockLinear {bits}-bit g32 {'sym' if symmetric else 'asym'}"}
    (made,) = lowered.linear_outputs
    node = next(iter(model.graph))
    assert (made.value, made.weights, made.rows) == (node.outputs[0].name, ("block.fc.weight",), (37,))
    assert attribute(node, "half_scales", -1) == half
    for tokens in (1, 5):
        x = inputs(tokens)
        check(-run(model, {"x": x})["block.fc"].reshape(-1, 37), expected(x.reshape(-1, 64), weight, bias))


@pytest.mark.usefixtures("native_operators")
@pytest.mark.parametrize("symmetric", [True, False])
def test_5_bit_codes_in_groups_of_16_are_stored_in_6_bits(symmetric: bool) -> None:
    """Eight steps of 4 input channels lie together, and a block has whole ones."""
    model = linear_model({"block.fc": 37}, rng=RNG)
    weight = random_linear(37, 64, Scheme(bits=5, group_size=16, symmetric=symmetric))
    lowered = lowering(model, {"block.fc.weight": weight})
    apply(lowered, linears, block_linears)
    said = f"BlockLinear 5-bit g16 {'sym' if symmetric else 'asym'}, stored in 6 bits"
    assert lowered.plan == {"block.fc.weight": said}
    x = inputs(3)
    check(-run(model, {"x": x})["block.fc"].reshape(-1, 37), expected(x.reshape(-1, 64), weight, None))


@pytest.mark.usefixtures("native_operators")
def test_it_computes_what_the_stock_product_computes(request: pytest.FixtureRequest) -> None:
    x = inputs(5)
    weight = random_linear(37, 64, Scheme(bits=4, group_size=32, symmetric=False))
    results: list[NDArray[Any]] = []
    for kernel in ("BlockLinear", "MatMulNBits"):
        model = linear_model({"block.fc": 37}, rng=RNG)
        apply(lowering(model, {"block.fc.weight": weight}), linears, block_linears, linear_kernels)
        assert operators(model) == [kernel, "Neg"]
        results.append(run(model, {"x": x})["block.fc"])
        request.getfixturevalue("stock_operators")
    np.testing.assert_allclose(*results, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("native_operators")
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    "fmt", [Scheme(bits=4, group_size=32, symmetric=False), Scheme(bits=6, group_size=64, symmetric=True)], ids=str
)
def test_a_merged_product_stacks_its_members(fmt: Scheme, biased: bool) -> None:
    members = {"block.q": 32, "block.k": 10, "block.v": 17}  # bounds of members within a tile
    model = linear_model(members, biased=biased, rng=RNG)
    weights = {
        f"{name}.weight": random_linear(rows, 64, fmt, seed=rows, half=name != "block.k")
        for name, rows in members.items()
    }
    lowered = lowering(model, weights, groups=[group("layers.0.qkv", *members, biased=biased)])
    biases = {name: lowered.weights.tensor(f"{name}.bias") if biased else None for name in members}
    outcome = apply(lowered, linears, merge_linears, block_linears)
    assert (outcome.matched, outcome.declined) == (1, ())
    assert operators(model)[:2] == ["BlockLinear", "Split"] and list(lowered.plan) == ["layers.0.qkv"]
    assert (lowered.linear_outputs[0].weights, lowered.linear_outputs[0].rows) == (
        tuple(weights),
        tuple(members.values()),
    )
    x = inputs(3)
    results = run(model, {"x": x})
    for name, rows in members.items():
        wanted = expected(x.reshape(-1, 64), weights[f"{name}.weight"], biases[name])
        check(-results[name].reshape(-1, rows), wanted)


@pytest.mark.usefixtures("native_operators")
@pytest.mark.parametrize(
    "other",
    [
        Scheme(bits=4, group_size=32, symmetric=False),
        Scheme(bits=4, group_size=64, symmetric=True),
        Scheme(bits=6, group_size=32, symmetric=True),
    ],
    ids=str,
)
def test_formats_that_differ_within_a_merged_product_are_refused(other: Scheme) -> None:
    members = {"block.gate": 32, "block.up": 32}
    model = linear_model(members, rng=RNG)
    tensors = {"block.gate.weight": random_linear(32, 64, SYMMETRIC), "block.up.weight": random_linear(32, 64, other)}
    lowered = lowering(model, tensors, groups=[group("layers.0.gate_up", *members)])
    with pytest.raises(BuildError, match=r"layers\.0\.gate_up mixes .* in one merged linear") as caught:
        apply(lowered, linears, merge_linears, block_linears)
    assert caught.value.expected == "one scheme for linears that read the same input"
    assert caught.value.remedy == "let one rule of plan.schemes match the whole group"


@pytest.mark.usefixtures("native_operators")
def test_what_is_in_float_is_left_to_the_next_pass_and_that_is_said() -> None:
    members = {"block.gate": 32, "block.up": 32, "block.down": 16}
    model = linear_model(members, rng=RNG)
    stored = {f"block.{name}.weight": random_linear(members[f"block.{name}"], 64, SYMMETRIC) for name in ("up", "down")}
    lowered = lowering(model, stored, groups=[group("layers.0.gate", "block.gate")])
    outcome = apply(lowered, linears, block_linears)
    assert outcome.matched == 2
    assert outcome.declined == ("layers.0.gate: it is not quantized; left to the next kernel pass",)
    assert apply(lowered, linear_kernels).matched == 1
    assert sorted(operators(model)) == ["BlockLinear"] * 2 + ["MatMul"] + ["Neg"] * 3


@pytest.mark.usefixtures("native_operators")
def test_a_merged_product_of_codes_and_floats_is_left_and_then_refused() -> None:
    members = {"block.gate": 32, "block.up": 32}
    model = linear_model(members, rng=RNG)
    lowered = lowering(
        model, {"block.up.weight": random_linear(32, 64, SYMMETRIC)}, groups=[group("layers.0.gate_up", *members)]
    )
    outcome = apply(lowered, linears, merge_linears, block_linears)
    assert outcome.declined == ("layers.0.gate_up: it is not quantized; left to the next kernel pass",)
    with pytest.raises(BuildError, match=r"layers\.0\.gate_up mixes 4-bit g32 and float"):
        apply(lowered, linear_kernels)


@pytest.mark.usefixtures("native_operators")
def test_a_graph_without_linears_is_said_and_imports_nothing() -> None:
    x = value("x", ["rows", 64])
    model = model_of([x], [named("y", op("Neg", [x], ["rows", 64]))])
    outcome = apply(lowering(model), block_linears)
    assert (outcome.matched, outcome.declined) == (0, ("no linear in the graph",))
    assert DOMAIN not in model.opset_imports


def test_where_they_do_not_run_every_linear_is_left_and_that_is_said(stock_operators: str) -> None:
    model = linear_model({"block.fc": 37}, rng=RNG)
    lowered = lowering(model, {"block.fc.weight": random_linear(37, 64, SYMMETRIC)})
    outcome = apply(lowered, linears, block_linears)
    said = f"every linear: {stock_operators}; left to the next kernel pass"
    assert (outcome.matched, outcome.declined) == (0, (said,))
    assert lowered.plan == {} and lowered.linear_outputs == [] and DOMAIN not in model.opset_imports
    apply(lowered, linear_kernels)
    assert operators(model) == ["MatMulNBits", "Neg"]


@pytest.mark.usefixtures("native_operators")
def test_a_static_scale_for_the_inputs_is_taken_before() -> None:
    model = linear_model({"block.fc": 37}, rng=RNG)
    codes = random_linear(37, 64, Scheme(bits=8, group_size=64, symmetric=True))
    static = QuantizedWeight(codes.codes, codes.scales[:, :1], None, STATIC_INT8, input_scale=0.03)
    lowered = lowering(model, {"block.fc.weight": static})
    assert apply(lowered, linears, static_int8_linears, block_linears).declined == ("no linear in the graph",)
    assert "MatMulIntegerToFloat" in operators(model)


def code_at(tile: NDArray[np.uint8], lane: int, column: int, bits: int) -> int:
    """By the layout in the module's words."""
    step, byte = column // STEP, lane * STEP + column % STEP
    if bits == 8:
        return int(tile[64 * step + byte])
    if bits == 4:
        return int(tile[64 * (step // 2) + byte]) >> 4 * (step % 2) & 15
    if bits == 5:
        eight = tile[320 * (step // 8) :]
        low = int(eight[64 * (step % 8 // 2) + byte]) >> 4 * (step % 2) & 15
        return low | (int(eight[256 + byte]) >> step % 8 & 1) << 4
    four = tile[192 * (step // 4) :]
    low = int(four[64 * (step % 4 // 2) + byte]) >> 4 * (step % 2) & 15
    return low | (int(four[128 + byte]) >> 2 * (step % 4) & 3) << 4


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 35), groups=st.integers(1, 5), bits=st.sampled_from(BITS), seed=st.integers(0, 99))
def test_packing_keeps_every_code_where_the_kernel_reads_it(rows: int, groups: int, bits: int, seed: int) -> None:
    columns = groups * (32 if bits == 5 else 16)
    codes = np.random.default_rng(seed).integers(0, 1 << bits, (rows, columns)).astype(np.uint8)
    packed = packing.packed(codes, bits)
    tiles = tiles_of(rows)
    assert packed.shape == (tiles, columns * TILE * bits // 8) and packed.dtype == np.uint8
    for row in range(tiles * TILE):
        for column in range(0, columns, 3):
            wanted = codes[row, column] if row < rows else 1 << (bits - 1)  # lanes beyond N are zeros
            assert code_at(packed[row // TILE], row % TILE, column, bits) == wanted


@pytest.mark.parametrize("rows", [1, 16, 37])
def test_scales_lie_tile_by_tile(rows: int) -> None:
    scales = RNG.standard_normal((rows, 3)).astype(np.float32)
    laid = packing.by_tile(scales)
    assert laid.shape == (tiles_of(rows), 3, TILE)
    flat = laid.transpose(0, 2, 1).reshape(-1, 3)
    np.testing.assert_array_equal(flat[:rows], scales)
    assert (flat[rows:] == 1).all()
