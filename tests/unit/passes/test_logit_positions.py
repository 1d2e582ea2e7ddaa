from __future__ import annotations

import numpy as np
import onnx_ir as ir

from engines.passes.graph import linears, logit_positions
from engines.passes.onnxruntime import linear_kernels
from tests.lowering import apply, group, linear, lowering, model_of, named, op, parameter, run, value

RNG = np.random.default_rng(0)
HEAD = RNG.standard_normal((53, 32)).astype(np.float32)
X = RNG.standard_normal((2, 3, 32)).astype(np.float32)
ROWS = np.array([4, 0, 0], np.int64)


def graph(*, capped: bool) -> ir.Model:
    x = value("x", ["batch", "tokens", 32])
    logits = linear(op("Neg", [x], ["batch", "tokens", 32]), "lm_head", HEAD)
    if capped:  # as gemma2 does
        cap = parameter("cap", np.array(30, np.float32))
        shape = ["batch", "tokens", 53]
        logits = op("Mul", [op("Tanh", [op("Div", [logits, cap], shape)], shape), cap], shape)
    return model_of([x], [named("logits", logits)])


def test_the_head_reads_only_the_positions_asked_for() -> None:
    for capped in (False, True):
        model = graph(capped=capped)
        before = run(model, {"x": X})["logits"].reshape(6, 53)
        lowered = lowering(model, groups=[group("lm_head", "lm_head", out_features=53)])
        outcome = apply(lowered, linears, logit_positions)
        assert (outcome.matched, outcome.declined) == (1, ())
        assert [i.name for i in model.graph.inputs] == ["x", "logit_positions"]
        assert model.graph.outputs[0].shape == ir.Shape(["rows", 53])
        apply(lowered, linear_kernels)
        after = run(model, {"x": X, "logit_positions": ROWS})["logits"]
        np.testing.assert_allclose(after, before[ROWS], rtol=1e-5, atol=1e-5)


def test_without_a_head_every_position_is_computed_and_that_is_said() -> None:
    model = graph(capped=False)
    lowered = lowering(model, groups=[group("layers.0.o", "lm_head", out_features=53)])
    outcome = apply(lowered, linears, logit_positions)
    assert outcome.matched == 0 and "not lm_head" in outcome.declined[0]
    assert [i.name for i in model.graph.inputs] == ["x"]
