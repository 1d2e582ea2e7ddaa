from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from engines.kernels.cpu.kernel_set import CpuKernels
from engines.passes.graph import linears, merge_linears
from engines.passes.onnxruntime import linear_kernels, static_int8_linears
from tapeout.errors import BuildError
from tapeout.quantized import QuantizedWeight, round_to_nearest
from tapeout.schemes import STATIC_INT8, Scheme
from tests.lowering import apply, group, linear_model, lowering, operators, run
from tests.native import STOCK

RNG = np.random.default_rng(0)
STEP = 0.04


def static(rows: int, columns: int, step: float = STEP) -> QuantizedWeight:
    """Scales of either sign, as rounding makes them; the largest codes, which saturate where kernels do."""
    weight = RNG.choice([-1, 1, 0.3], (rows, columns)).astype(np.float32)
    fmt = STATIC_INT8
    return replace(round_to_nearest(weight, fmt), input_scale=step)


def rounded(x: np.ndarray, step: float = STEP) -> np.ndarray:
    return np.clip(np.rint(x / np.float32(step)), -128, 127) * step


@pytest.mark.parametrize("signed", [True, False], ids=["int8 weights", "uint8 weights"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("columns", [64, 72, 31])
def test_a_product_computes_what_its_codes_say(
    columns: int, biased: bool, signed: bool, operators_of: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if signed and not CpuKernels().exact_signed_products:
        pytest.skip("this processor's kernels saturate, and the pass avoids them")
    monkeypatch.setattr(CpuKernels, "exact_signed_products", signed)
    model = linear_model({"block.fc": 37}, columns, biased=biased, rng=RNG)
    weight = static(37, columns)
    lowered = lowering(model, {"block.fc.weight": weight})
    bias = lowered.weights.tensor("block.fc.bias") if biased else 0.0
    outcome = apply(lowered, linears, static_int8_linears)
    unseen = f"every linear: {STOCK}; what static grids clip is not counted"
    quantize, declined = {"native": ("QuantizeActivations", ()), "stock": ("QuantizeLinear", (unseen,))}[operators_of]
    assert (outcome.matched, outcome.declined) == (1, declined)
    assert operators(model) == [quantize, "MatMulIntegerToFloat", "Neg"]
    for tokens in (1, 5):
        x = (3 * RNG.standard_normal((2, tokens, columns))).astype(np.float32)  # some beyond the grid
        expected = rounded(x) @ weight.dequantize().T.astype(np.float64) + bias
        np.testing.assert_allclose(-run(model, {"x": x})["block.fc"], expected, atol=1e-5 * np.abs(expected).max())


def test_tokens_of_a_batch_do_not_influence_each_other() -> None:
    model = linear_model({"block.fc": 37}, rng=RNG)
    apply(lowering(model, {"block.fc.weight": static(37, 64)}), linears, static_int8_linears)
    x = RNG.standard_normal((4, 1, 64)).astype(np.float32)
    x[2] *= 1000
    together = run(model, {"x": x})["block.fc"]
    for row in range(4):
        np.testing.assert_array_equal(together[row], run(model, {"x": x[row : row + 1]})["block.fc"][0])


@pytest.mark.usefixtures("native_operators")
def test_a_merged_product_reads_one_rounded_input_and_others_keep_their_kernels() -> None:
    members = {"block.q": 32, "block.k": 16, "block.v": 16}
    model = linear_model({**members, "block.o": 24}, biased=True, rng=RNG)
    weights: dict[str, QuantizedWeight] = {f"{name}.weight": static(rows, 64) for name, rows in members.items()}
    other = round_to_nearest(
        RNG.standard_normal((24, 64)).astype(np.float32), Scheme(bits=8, group_size=32, symmetric=True)
    )
    lowered = lowering(
        model, {**weights, "block.o.weight": other}, groups=[group("layers.0.qkv", *members, biased=True)]
    )
    biases = {name: lowered.weights.tensor(f"{name}.bias") for name in members}
    outcome = apply(lowered, linears, merge_linears, static_int8_linears)
    assert outcome.matched == 1
    assert outcome.declined == ("block.o.weight: its inputs have no static scale; left to the next kernel pass",)
    assert apply(lowered, linear_kernels).matched == 1
    assert apply(lowered, linear_kernels).declined == ("no linear was left to it",)
    assert sorted(o for o in operators(model) if o != "Neg") == [
        *("MatMulIntegerToFloat", "MatMulNBits", "QuantizeActivations", "Split"),
    ]
    assert lowered.plan["layers.0.qkv"].startswith("MatMulIntegerToFloat")
    x = RNG.standard_normal((2, 3, 64)).astype(np.float32)
    results = run(model, {"x": x})
    for name in members:
        expected = rounded(x) @ weights[f"{name}.weight"].dequantize().T + biases[name]
        np.testing.assert_allclose(-results[name], expected, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("step", [0.05, None])
def test_members_of_one_product_with_different_input_scales_are_refused(step: float | None) -> None:
    members = {"block.gate": 32, "block.up": 32}
    model = linear_model(members, rng=RNG)
    tensors = {"block.gate.weight": static(32, 64), "block.up.weight": replace(static(32, 64), input_scale=step)}
    lowered = lowering(model, tensors, groups=[group("layers.0.gate_up", *members)])
    with pytest.raises(BuildError, match=r"layers\.0\.gate_up reads one input with scales"):
        apply(lowered, linears, merge_linears, static_int8_linears)
