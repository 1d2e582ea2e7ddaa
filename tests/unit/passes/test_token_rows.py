from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from engines.kernels.operators import DOMAIN
from engines.passes.base import PassResult
from engines.passes.onnxruntime import token_rows
from tests.lowering import apply, lowering, model_of, named, op, operators, parameter, run, value

pytestmark = pytest.mark.usefixtures("native_operators")

RNG = np.random.default_rng(0)
H, INNER, E, CHOSEN = 32, 16, 5, 2
SHAPE: list[int | str] = ["batch", "tokens", H]
X = RNG.standard_normal((2, 3, H)).astype(np.float32)


def random(*shape: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return RNG.standard_normal(shape).astype(np.float32)


def routed(x: ir.Value, restored: list[int | str], shape: list[int]) -> tuple[ir.Value, ir.Value]:
    """Experts of the tokens of ``x`` as transformers writes them, reshaped to ``restored``; and the logits."""
    flat = op("Reshape", [x, parameter("flat", np.array([-1, H]))], ["rows", H])
    logits = op("FloatLinear", [flat, parameter("router.tiles", random(1, H, 16))], ["rows", E], domain=DOMAIN, N=E)
    index = op(
        *("ChooseExperts", [logits], ["rows", CHOSEN]), domain=DOMAIN, outputs=2, chosen=CHOSEN, scores=0, normalized=1
    )
    node = index.producer()
    assert node is not None
    index.type = ir.TensorType(ir.DataType.INT64)
    weights = [parameter("up.tiles", random(E, 2, H, 16)), parameter("down.tiles", random(E, 2, INNER, 16))]
    gate = {"activation": 0, "alpha": 1.0, "limit": 0.0, "offset": 0.0}
    y = op("Experts", [flat, index, node.outputs[1], *weights], ["rows", H], domain=DOMAIN, **gate)
    return op("Reshape", [y, parameter("restored", np.array(shape))], restored), logits


def lowered(model: ir.Model) -> PassResult:
    before = run(model, {"x": X})
    outcome = apply(lowering(model), token_rows)
    after = run(model, {"x": X})
    for name, expected in before.items():
        np.testing.assert_array_equal(after[name], expected)
    return outcome


def test_experts_and_their_router_read_tokens_as_they_lie() -> None:
    x = value("x", SHAPE)
    model = model_of([x], [named("y", op("Neg", [routed(x, SHAPE, [2, 3, H])[0]], SHAPE))])
    assert lowered(model) == PassResult(2)
    assert operators(model) == ["FloatLinear", "ChooseExperts", "Experts", "Neg"]


def test_what_is_reshaped_to_something_else_stays() -> None:
    x = value("x", SHAPE)
    wide: list[int | str] = ["tokens of both", 2 * H]
    model = model_of([x], [named("y", op("Neg", [routed(x, wide, [-1, 2 * H])[0]], wide))])
    assert lowered(model) == PassResult(1)  # the router
    assert operators(model).count("Reshape") == 2


def test_a_router_that_others_read_stays() -> None:
    x = value("x", SHAPE)
    y, logits = routed(x, SHAPE, [2, 3, H])
    model = model_of([x], [named("y", op("Neg", [y], SHAPE)), named("z", op("Neg", [logits], ["rows", E]))])
    assert lowered(model) == PassResult(1)  # the experts
    assert operators(model).count("Reshape") == 1


def test_without_experts_that_is_said() -> None:
    x = value("x", SHAPE)
    model = model_of([x], [named("y", op("Neg", [x], SHAPE))])
    assert lowered(model) == PassResult(0, ("no tokens are reshaped before experts or a router",))
