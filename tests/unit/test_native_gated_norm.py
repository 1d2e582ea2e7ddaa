"""GatedNorm and Scale, the operators: their definitions, and the same bits alone and in a batch."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.kernels.operators import DOMAIN
from engines.sessions import cpu_options, open_session
from engines.targets.ort_cpu import library
from tests.lowering import model_of, named, parameter, value
from tests.native import Array, Matrix

pytestmark = pytest.mark.usefixtures("level")


def random(*shape: int, seed: int = 0) -> Matrix:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32) * 2


def computed(
    operator: str,
    given: dict[str, Matrix],
    constant: Matrix | None,
    attributes: Mapping[str, float] = {},
    threads: int = 1,
) -> Matrix:
    inputs = {name: value(name, ["batch", "tokens", array.shape[1]]) for name, array in given.items()}
    inputs |= {} if constant is None else {"constant": parameter("a.weight", constant)}
    ordered = [inputs[name] for name in ("x", "gate", "constant", "added") if name in inputs]
    node = ir.node(operator, ordered, attributes=dict(attributes), domain=DOMAIN)
    node.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    model = model_of([inputs[name] for name in given], [named("y", node.outputs[0])])
    model.opset_imports[DOMAIN] = 1
    opened = open_session(ir.to_proto(model).SerializeToString(), cpu_options(threads, library(), [operator]))
    (y,) = opened.run(["y"], {name: array[None] for name, array in given.items()})
    return np.asarray(y)[0]


def normalized(x: Array, group: int, weight: Array | None, epsilon: float) -> Array:
    apart = x.reshape(len(x), -1, group)
    apart = apart / np.sqrt((apart**2).mean(-1, keepdims=True) + epsilon)
    weight = np.ones(group) if weight is None else weight
    return (apart * weight.reshape(-1, group)).reshape(x.shape)


def activated(gate: Array, sigmoid: bool) -> Array:
    gate = gate.astype(np.float64)
    return (1 if sigmoid else gate) / (1 + np.exp(-gate))


@pytest.mark.parametrize("shared", [False, True], ids=["weight of every channel", "weight of a group"])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize(("channels", "group"), [(96, 24), (128, 128), (35, 7), (64, 16), (1, 1)])
def test_groups_are_normalized_before_or_after_the_gate(
    channels: int, group: int, norm_first: bool, shared: bool
) -> None:
    x, gate, weight = random(5, channels, seed=1), random(5, channels, seed=2), random(group if shared else channels)
    attributes: dict[str, float] = {"norm_first": int(norm_first), "group": group, "epsilon": 1e-3}
    y = computed("GatedNorm", {"x": x, "gate": gate}, weight, attributes)
    factor, double = activated(gate, False), x.astype(np.float64)
    expected = (
        normalized(double, group, weight, 1e-3) * factor
        if norm_first
        else normalized(double * factor, group, weight, 1e-3)
    )
    np.testing.assert_allclose(y, expected, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("sigmoid", [False, True])
def test_a_gate_lies_in_runs_among_other_columns(sigmoid: bool) -> None:
    """Of each head a query and a gate, say, and what is gated is a part of a tensor, too."""
    x, packed = random(4, 60, seed=1), np.full((4, 3 + 2 * 20 + 10), np.nan, np.float32)
    runs = random(4, 30, seed=2)
    for run in range(3):
        packed[:, 3 + 20 * run : 13 + 20 * run] = runs[:, 10 * run : 10 * run + 10]
    attributes: dict[str, float] = {
        "channels": 30,
        "x_first": 7,
        "first": 3,
        "run": 10,
        "period": 20,
        "sigmoid": int(sigmoid),
    }
    y = computed("GatedNorm", {"x": x, "gate": packed}, None, attributes)
    np.testing.assert_allclose(y, x[:, 7:37] * activated(runs, sigmoid), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("channels", [1, 16, 37])
@pytest.mark.parametrize("each", [False, True])
def test_products_with_constants_are_exact(channels: int, each: bool) -> None:
    x, factors = random(3, channels, seed=1), random(channels if each else 1, seed=2)
    assert (computed("Scale", {"x": x}, factors) == x * factors).all()


@pytest.mark.parametrize("channels", [1, 16, 37])
@pytest.mark.parametrize("each", [False, True])
def test_a_sum_is_rounded_after_the_product(channels: int, each: bool) -> None:
    x, added, factors = random(3, channels, seed=1), random(3, channels, seed=3), random(channels if each else 1)
    y = computed("Scale", {"x": x, "added": added}, factors)
    assert (y == x * factors + added).all()


def test_one_gate_of_all_channels() -> None:
    x, gate = random(4, 37, seed=1), random(4, 5, seed=2)
    y = computed("GatedNorm", {"x": x, "gate": gate}, None, {"sigmoid": 1, "one": 1, "first": 2})
    np.testing.assert_allclose(y, x * activated(gate[:, 2:3], True), rtol=1e-5, atol=1e-6)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 9), st.integers(1, 70), st.sampled_from((1, 2)))
def test_a_token_is_the_same_to_the_bit_alone_and_among_others(tokens: int, channels: int, threads: int) -> None:
    x, gate, weight = random(tokens, channels, seed=1), random(tokens, channels, seed=2), random(channels)
    attributes: dict[str, float] = {"group": channels, "epsilon": 1e-5}
    together = computed("GatedNorm", {"x": x, "gate": gate}, weight, attributes, threads)
    for row in range(tokens):
        alone = computed("GatedNorm", {"x": x[row : row + 1], "gate": gate[row : row + 1]}, weight, attributes)
        assert (alone[0] == together[row]).all()


@pytest.mark.parametrize(
    ("attributes", "reason"),
    [
        ({"group": 7}, "do not divide C"),
        ({"run": 7}, "do not divide C"),
        ({"first": 1}, "where W has all its columns"),
        ({"run": 8, "period": 9}, "where W has all its columns"),
        ({"channels": 17}, "where X has all its columns"),
        ({"x_first": 1}, "where X has all its columns"),
        ({"epsilon": -1.0}, "unsupported columns, groups or epsilon"),
    ],
)
def test_columns_and_groups_that_are_not_there_are_refused(attributes: dict[str, float], reason: str) -> None:
    with pytest.raises(Exception, match=reason):
        computed("GatedNorm", {"x": random(2, 16), "gate": random(2, 16)}, None, attributes)
