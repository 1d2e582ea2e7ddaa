from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
import pytest

from engines.passes.onnxruntime import gated_norms, norms, silu
from tests.lowering import apply, lowering, model_of, named, op, operators, parameter, run, value
from tests.native import Matrix

pytestmark = pytest.mark.usefixtures("level")

RNG = np.random.default_rng(0)
C, GROUPS = 24, 3
SHAPE: Sequence[int | str] = ["batch", "tokens", C]
GIVEN = {name: RNG.standard_normal((1, 5, C)).astype(np.float32) * 2 for name in ("x", "gate")}
WEIGHT = RNG.standard_normal(C).astype(np.float32)


def lowered(model: ir.Model, given: dict[str, Matrix] = GIVEN) -> tuple[tuple[str, ...], list[str]]:
    """What the pass declines, and the operators; the outputs are compared with those before."""
    before = run(model, given)["y"]
    apply(lowering(model), silu)
    apply(lowering(model), norms)
    declined = apply(lowering(model), gated_norms).declined
    np.testing.assert_allclose(run(model, given)["y"], before, rtol=2e-5, atol=1e-6)
    return declined, operators(model)


def activated(gate: ir.Value, sigmoid: bool = False, shape: Sequence[int | str] = SHAPE) -> ir.Value:
    factor = op("Sigmoid", [gate], shape)
    return factor if sigmoid else op("Mul", [gate, factor], shape)


@pytest.mark.parametrize("sigmoid", [False, True])
@pytest.mark.parametrize("gate_first", [False, True])
def test_a_product_with_a_gate_is_one_operator(sigmoid: bool, gate_first: bool) -> None:
    x, gate = value("x", SHAPE), value("gate", SHAPE)
    factors = [x, activated(gate, sigmoid)]
    y = named("y", op("Mul", factors[::-1] if gate_first else factors, SHAPE))
    assert lowered(model_of([x, gate], [y])) == ((), ["GatedNorm"])


@pytest.mark.parametrize("groups", [1, GROUPS])
def test_the_norm_of_groups_after_a_gate_is_computed_with_it(groups: int) -> None:
    """As transformers writes that of Mamba2."""
    x, gate, weight = value("x", SHAPE), value("gate", SHAPE), parameter("layer.norm.weight", WEIGHT)
    apart = ["batch", "tokens", groups, C // groups]
    product = op("Mul", [x, activated(gate)], SHAPE)
    grouped = op("Reshape", [product, parameter("apart", np.array([0, 0, groups, C // groups]))], apart)
    squares = op("Pow", [grouped, parameter("two", np.array(2, np.float32))], apart)
    mean = op("ReduceMean", [squares, parameter("last", np.array([-1]))], [*apart[:3], 1], keepdims=1)
    total = op("Add", [mean, parameter("epsilon", np.array(1e-3, np.float32))], [*apart[:3], 1])
    inverse = op("Reciprocal", [op("Sqrt", [total], [*apart[:3], 1])], [*apart[:3], 1])
    normed = op("Mul", [grouped, inverse], apart)
    joined = op("Reshape", [normed, parameter("joined", np.array([0, 0, C]))], SHAPE)
    y = named("y", op("Mul", [weight, joined], SHAPE))
    assert lowered(model_of([x, gate], [y])) == ((), ["GatedNorm"])


def test_the_norm_of_heads_before_a_gate_is_computed_with_it() -> None:
    """As transformers writes that of the gated delta rule."""
    x, gate, weight = value("x", SHAPE), value("gate", SHAPE), parameter("layer.norm.weight", WEIGHT[:8])
    rows, shape = ["heads of all tokens", 8], parameter("rows", np.array([-1, 8]))
    normed = op("RMSNormalization", [op("Reshape", [x, shape], rows), weight], rows, axis=-1, epsilon=1e-3)
    product = op("Mul", [normed, activated(op("Reshape", [gate, shape], rows), shape=rows)], rows)
    y = named("y", op("Reshape", [product, parameter("joined", np.array([1, -1, C]))], SHAPE))
    assert lowered(model_of([x, gate], [y])) == ((), ["GatedNorm"])


@pytest.mark.parametrize("elements", [1, C])
def test_products_with_constants_are_one_operator(elements: int) -> None:
    """Before an operator of ours or a norm; ONNX Runtime may know others as parts of its own."""
    x = value("x", SHAPE)
    scaled = op("Mul", [parameter("factors", WEIGHT[:elements]), x], SHAPE)
    normed = op("RMSNormalization", [scaled, parameter("layer.norm.weight", WEIGHT)], SHAPE, axis=-1, epsilon=1e-3)
    assert lowered(model_of([x], [named("y", normed)]), {"x": GIVEN["x"]})[1] == [
        "Scale",
        "SimplifiedLayerNormalization",
    ]
    x = value("x", SHAPE)
    other = op("Tanh", [op("Mul", [parameter("factors", WEIGHT[:elements]), x], SHAPE)], SHAPE)
    assert lowered(model_of([x], [named("y", other)]), {"x": GIVEN["x"]})[1] == ["Mul", "Tanh"]


@pytest.mark.parametrize("elements", [0, 1, C])
@pytest.mark.parametrize("scaled_first", [False, True])
def test_sums_are_one_operator_with_the_factors_of_one_side(elements: int, scaled_first: bool) -> None:
    """Before an operator of ours or a norm, and also where other shapes of them are read."""
    x, gate = value("x", SHAPE), value("gate", SHAPE)
    scaled = op("Mul", [parameter("factors", WEIGHT[:elements]), x], SHAPE) if elements else x
    total = op("Add", [scaled, gate] if scaled_first else [gate, scaled], SHAPE)
    rows = op("Reshape", [total, parameter("rows", np.array([-1, C]))], ["rows", C])
    normed = op("RMSNormalization", [rows, parameter("layer.norm.weight", WEIGHT)], ["rows", C], axis=-1, epsilon=1e-3)
    assert lowered(model_of([x, gate], [named("y", normed)])) == (
        (),
        ["Scale", "Reshape", "SimplifiedLayerNormalization"],
    )


def test_a_sum_that_the_runtime_reads_is_left() -> None:
    x, gate = value("x", SHAPE), value("gate", SHAPE)
    y = named("y", op("Tanh", [op("Add", [x, gate], SHAPE)], SHAPE))
    assert lowered(model_of([x, gate], [y]))[1] == ["Add", "Tanh"]


def test_sums_of_other_shapes_stay() -> None:
    x, gate = value("x", SHAPE), value("gate", ["batch", 1, C])
    total = op("Add", [x, gate], SHAPE)
    normed = op("RMSNormalization", [total, parameter("layer.norm.weight", WEIGHT)], SHAPE, axis=-1, epsilon=1e-3)
    declined, found = lowered(model_of([x, gate], [named("y", normed)]), {**GIVEN, "gate": GIVEN["gate"][:, :1]})
    assert len(declined) == 1 and declined[0].endswith(": it adds no floats of one shape") and "Add" in found


def test_a_gate_of_heads_is_that_of_all_channels_of_each() -> None:
    """As that of the attention of Ling."""
    shape: Sequence[int | str] = ["batch", "tokens", GROUPS, C // GROUPS]
    x, gate = value("x", shape), value("gate", shape[:3])
    apart = op("Unsqueeze", [op("Sigmoid", [gate], shape[:3]), parameter("axis", np.array([-1]))], [*shape[:3], 1])
    y = named("y", op("Mul", [x, apart], shape))
    given = {"x": GIVEN["x"].reshape(1, 5, GROUPS, -1), "gate": GIVEN["gate"][..., :GROUPS]}
    assert lowered(model_of([x, gate], [y]), given) == ((), ["Reshape", "GatedNorm"])


def test_a_sum_that_another_sum_reads_is_one_operator() -> None:
    """As residual streams of models with norms after the blocks."""
    x, gate = value("x", SHAPE), value("gate", SHAPE)
    total = op("Add", [x, gate], SHAPE)
    y = named("y", op("Mul", [total, activated(gate)], SHAPE))
    z = named("z", op("Mul", [op("Add", [total, x], SHAPE), activated(gate)], SHAPE))
    assert sorted(lowered(model_of([x, gate], [y, z]))[1]) == ["GatedNorm", "GatedNorm", "Scale", "Scale"]


def test_a_gate_of_one_column_is_that_of_all_channels() -> None:
    """As that of the shared expert of a mixture."""
    x, gate = value("x", SHAPE), value("gate", ["batch", "tokens", 1])
    y = named("y", op("Mul", [x, activated(gate, True, ["batch", "tokens", 1])], SHAPE))
    assert lowered(model_of([x, gate], [y]), {**GIVEN, "gate": GIVEN["gate"][:, :, :1]}) == ((), ["GatedNorm"])


def test_a_gate_of_another_shape_stays() -> None:
    x, gate = value("x", SHAPE), value("gate", ["batch", 1, C])
    y = named("y", op("Mul", [x, activated(gate, True, ["batch", 1, C])], SHAPE))
    given = {**GIVEN, "gate": GIVEN["gate"][:, :1]}
    declined, found = lowered(model_of([x, gate], [y]), given)
    assert declined == ("Mul y: its gate has another shape than what it multiplies",)
    assert found == ["Sigmoid", "Mul"]


def test_a_sum_that_is_scaled_before_a_norm_is_two_operators() -> None:
    """As granite adds a shared expert to the others."""
    x, gate = value("x", SHAPE), value("gate", SHAPE)
    scaled = op("Mul", [op("Add", [x, gate], SHAPE), parameter("factor", WEIGHT[:1])], SHAPE)
    normed = op("RMSNormalization", [scaled, parameter("layer.norm.weight", WEIGHT)], SHAPE, axis=-1, epsilon=1e-3)
    found = lowered(model_of([x, gate], [named("y", normed)]))
    assert found == ((), ["Scale", "Scale", "SimplifiedLayerNormalization"])
