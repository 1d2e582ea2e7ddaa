"""FloatLinear, the operator of routers: what float64 says, and the same bits alone and in any batch."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.kernels import cpu as native
from engines.passes.onnxruntime import routers
from engines.sessions import cpu_options, open_session
from engines.targets.ort_cpu import library
from tests.lowering import apply, linear, lowering, model_of, named, op, parameter, run, value
from tests.native import Matrix
from tests.random_linears import ROUNDING

pytestmark = pytest.mark.skipif(native.level() is None, reason=native.unsupported())


def random(*shape: int, seed: int = 0) -> Matrix:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def router(outputs: int, columns: int, bias: Matrix | None = None, *, transposed: bool = False) -> ir.Model:
    x, weight = value("x", ["tokens", columns]), random(outputs, columns, seed=1)
    if not transposed:
        return model_of([x], [named("y", linear(x, "router", weight, bias))])
    held = parameter("router.weight", np.ascontiguousarray(weight.T))
    return model_of([x], [named("y", op("MatMul", [x, held], ["tokens", outputs]))])


def lowered(model: ir.Model) -> ir.Model:
    outcome = apply(lowering(model), routers)
    assert (outcome.matched, outcome.declined) == (1, ())
    assert [node.op_type for node in model.graph] == ["FloatLinear"]
    return model


def opened(model: ir.Model, threads: int) -> ort.InferenceSession:
    return open_session(ir.to_proto(model).SerializeToString(), cpu_options(threads, library(), ["FloatLinear"]))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("outputs", "columns"), [(1, 1), (4, 64), (16, 7), (60, 130)])
def test_a_router_is_what_float64_says(outputs: int, columns: int, transposed: bool) -> None:
    bias = None if transposed else random(outputs, seed=2)
    x, weight = random(9, columns, seed=3), random(outputs, columns, seed=1).astype(np.float64)
    y = run(lowered(router(outputs, columns, bias, transposed=transposed)), {"x": x})["y"]
    added = 0 if bias is None else bias
    bound = (np.abs(x) @ np.abs(weight.T) + np.abs(added)) * (columns + 2) * ROUNDING
    assert (np.abs(y - (x @ weight.T + added)) <= bound).all()


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), tokens=st.integers(1, 40), threads=st.sampled_from((1, 2, 3)))
def test_a_row_is_the_same_to_the_bit_alone_in_any_batch_and_on_any_threads(
    seed: int, tokens: int, threads: int
) -> None:
    model, x = lowered(router(60, 96)), random(tokens, 96, seed=seed)
    one, many = opened(model, 1), opened(model, threads)
    alone = np.concatenate([np.asarray(one.run(None, {"x": x[t : t + 1]})[0]) for t in range(tokens)])
    assert (np.asarray(many.run(None, {"x": x})[0]) == alone).all()


def test_a_graph_without_such_a_product_is_left_alone() -> None:
    x = value("x", ["tokens", 4])
    outcome = apply(lowering(model_of([x], [named("y", op("Neg", [x], ["tokens", 4]))])), routers)
    assert (outcome.matched, outcome.declined) == (0, ("no linear stays in float",))
