"""Transposes between linears move over elementwise operators and meet; the graph computes the same."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from engines.passes.base import PassResult
from engines.passes.graph import transposes
from tests.lowering import apply, lowering, model_of, named, op, operators, run, value

X = np.random.default_rng(0).standard_normal((2, 5, 12)).astype(np.float32)


def exchanged(x: ir.Value, shape: list[str | int]) -> ir.Value:
    return op("Transpose", [x], shape, perm=[0, 2, 1])


def gated(axis: int) -> tuple[ir.Value, ir.Value]:
    """A product of parts of a Split, as LFM2 writes it: channels first, and back."""
    x = value("x", ["batch", "tokens", 12])
    by_channel = exchanged(x, ["batch", 12, "tokens"])
    split = ir.node("Split", [by_channel], attributes={"axis": axis, "num_outputs": 3}, num_outputs=3)
    for part in split.outputs:
        part.shape, part.type = ir.Shape(["batch", 4, "tokens"]), ir.TensorType(ir.DataType.FLOAT)
    first, second, third = split.outputs
    product = op("Mul", [op("Mul", [first, third], ["batch", 4, "tokens"]), second], ["batch", 4, "tokens"])
    return x, product


@pytest.mark.parametrize("axis", [1, -2])
def test_transposes_that_meet_are_gone(axis: int) -> None:
    x, product = gated(axis)
    model = model_of([x], [named("y", exchanged(product, ["batch", "tokens", 4]))])
    expected = run(model, {"x": X})["y"]
    assert apply(lowering(model), transposes) == PassResult(1)
    assert sorted(operators(model)) == ["Mul", "Mul", "Split"]
    assert (run(model, {"x": X})["y"] == expected).all()


def test_what_does_not_meet_stays() -> None:
    """A value that was never transposed would need one more."""
    x, product = gated(1)
    other = value("z", ["batch", 4, "tokens"])
    total = op("Add", [product, other], ["batch", 4, "tokens"])
    model = model_of([x, other], [named("y", exchanged(total, ["batch", "tokens", 4]))])
    before = operators(model)
    assert apply(lowering(model), transposes) == PassResult(0, ("no axes are exchanged between linears",))
    assert operators(model) == before
