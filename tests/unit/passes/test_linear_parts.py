"""Linears with parts for each head: the rows are exchanged, what is computed of them stays."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from engines.passes.graph import linears
from engines.passes.onnxruntime import block_linears, linear_kernels, linear_parts
from engines.passes.onnxruntime.columns import columns_of
from engines.probe import by_head
from tapeout.quantized import round_to_nearest
from tapeout.schemes import Scheme
from tests.lowering import apply, linear, lowering, model_of, named, op, operators, parameter, run, value

pytestmark = pytest.mark.usefixtures("level")

RNG = np.random.default_rng(0)
K, GROUPS, WIDTHS = 32, 3, (4, 2, 6)
ROWS = GROUPS * sum(WIDTHS)
WEIGHT, BIAS = (RNG.standard_normal(shape).astype(np.float32) for shape in ((ROWS, K), (ROWS,)))
X = RNG.standard_normal((1, 5, K)).astype(np.float32)


def made(*, all_read: bool = True) -> ir.Model:
    """The first two parts joined again, as a convolution reads them; and the third, by heads of half its channels."""
    x = value("x", ["batch", "tokens", K])
    whole = linear(x, "layer.qkvz", WEIGHT, BIAS)
    apart = op(
        "Reshape",
        [whole, parameter("heads", np.array([0, 0, GROUPS, sum(WIDTHS)]))],
        ["batch", "tokens", GROUPS, sum(WIDTHS)],
    )
    split = op("Split", [apart, parameter("widths", np.array(WIDTHS))], outputs=3, axis=-1).producer()
    assert split is not None
    for part, width in zip(split.outputs, WIDTHS, strict=True):
        part.shape = ir.Shape(["batch", "tokens", GROUPS, width])
    flat = [
        op("Reshape", [part, parameter(f"flat{i}", np.array([0, 0, -1]))], ["batch", "tokens", GROUPS * width])
        for i, (part, width) in enumerate(zip(split.outputs[:2], WIDTHS, strict=False))
    ]
    joined = named("joined", op("Concat", flat, ["batch", "tokens", GROUPS * sum(WIDTHS[:2])], axis=-1))
    y = named("y", op("Neg", [joined], joined.shape))
    if not all_read:
        return model_of([x], [y])
    halves = op("Reshape", [split.outputs[2], parameter("halves", np.array([0, 0, -1, 3]))], ["batch", "tokens", 6, 3])
    return model_of([x], [y, named("halved", op("Neg", [halves], halves.shape))])


@pytest.mark.parametrize("quantized", [False, True])
def test_parts_of_heads_become_parts_of_the_output(quantized: bool) -> None:
    scheme = Scheme(bits=8, group_size=32, symmetric=True)
    stored = round_to_nearest(WEIGHT, scheme) if quantized else WEIGHT
    model, tensors = made(), {"layer.qkvz.weight": stored, "layer.qkvz.bias": BIAS}
    plain = made()
    kernels = (block_linears, linear_kernels) if quantized else (linear_kernels,)
    for each, passes in ((plain, (linears,)), (model, (linears, linear_parts))):
        found = lowering(each, tensors)
        for step in (*passes, *kernels):
            apply(found, step)
    before, after = run(plain, {"x": X}), run(model, {"x": X})
    assert all((after[name] == before[name]).all() for name in before)
    (linear_output,) = found.linear_outputs
    assert (linear_output.parts, linear_output.rows) == (WIDTHS, (ROWS,))
    joined = next(node for node in model.graph if node.op_type == "Concat").outputs[0]
    assert columns_of(joined) == (next(v for n in model.graph for v in n.outputs if v.name == linear_output.value), 0)
    assert source_rows(model, linear_output.value) == pytest.approx(source_rows(plain, None), abs=0)


def source_rows(model: ir.Model, permuted: str | None) -> NDArray[np.float32]:
    """What the linear computes, in the order of the checkpoint."""
    whole = next(node for node in model.graph if node.op_type in ("Add", "BlockLinear")).outputs[0]
    whole.name = permuted or "whole"
    model.graph.outputs.append(whole)
    rows = run(model, {"x": X})[whole.name].reshape(-1, ROWS)
    return by_head(rows, WIDTHS) if permuted else rows


def test_a_linear_of_which_a_part_is_not_read_stays() -> None:
    """As that of attention's queries and gates, once attention reads the queries from between the gates."""
    model = made(all_read=False)
    found = lowering(model, {"layer.qkvz.weight": WEIGHT, "layer.qkvz.bias": BIAS})
    assert apply(found, linears, linear_parts).matched == 0
    assert operators(model).count("Split") == 1 and "Concat" in operators(model)
