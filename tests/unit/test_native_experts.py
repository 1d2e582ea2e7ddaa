"""Experts, the operator: the experts of each token, the same bits whoever else is in a step."""

from __future__ import annotations

from functools import cache

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.kernels import cpu as native
from engines.kernels.operators import DOMAIN
from engines.passes.onnxruntime.native_experts import ACTIVATIONS, tiles_of
from engines.sessions import cpu_options, open_session
from engines.targets.ort_cpu import library
from tapeout.operators.experts import ExpertGate
from tests.lowering import model_of, named, parameter, value
from tests.native import Array, Matrix

pytestmark = pytest.mark.skipif(native.level() is None, reason=native.unsupported())
HIDDEN, INNER, EXPERTS = 40, 24, 6
GATES = (
    ExpertGate("silu"),
    ExpertGate("silu", alpha=1.702, limit=1.5, offset=1.0),
    ExpertGate("gelu_tanh"),
    ExpertGate("relu2"),
)


def random(*shape: int, seed: int = 0) -> Matrix:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def tiled(parts: list[Matrix]) -> Matrix:
    return np.ascontiguousarray(np.concatenate([tiles_of(part) for part in parts], axis=1).transpose(0, 1, 3, 2))


def experts_model(
    gate: ExpertGate, gates: Matrix | None, ups: Matrix, down: Matrix, biases: list[Matrix] | None = None
) -> ir.Model:
    """``gates`` and ``ups`` ``[E, I, H]``, ``down`` ``[E, H, I]``; ``biases`` of each in order, ``[E, I or H]``."""
    x = value("x", ["batch", "tokens", ups.shape[2]])
    index = value("index", ["tokens", "chosen"], ir.DataType.INT64)
    weight = value("weight", ["tokens", "chosen"])
    parts = [ups] if gates is None else [gates, ups]
    weights = [parameter("experts.up", tiled(parts)), parameter("experts.down", tiled([down]))]
    if biases:
        *of_up, of_down = [tiles_of(bias[..., None])[..., 0] for bias in biases]
        weights += [parameter("experts.up_bias", np.concatenate(of_up, 1)), parameter("experts.down_bias", of_down)]
    attributes = {"activation": ACTIVATIONS[gate.activation], "alpha": gate.alpha, "limit": gate.limit}
    node = ir.node(
        "Experts", [x, index, weight, *weights], attributes=attributes | {"offset": gate.offset}, domain=DOMAIN
    )
    node.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    model = model_of([x, index, weight], [named("y", node.outputs[0])])
    model.opset_imports[DOMAIN] = 1
    return model


def session(
    gate: ExpertGate,
    gates: Matrix | None,
    ups: Matrix,
    down: Matrix,
    biases: list[Matrix] | None = None,
    threads: int = 1,
) -> ort.InferenceSession:
    """See :func:`experts_model`."""
    model = experts_model(gate, gates, ups, down, biases)
    return open_session(ir.to_proto(model).SerializeToString(), cpu_options(threads, library(), ["Experts"]))


def run(opened: ort.InferenceSession, x: Matrix, index: Array, weight: Matrix) -> Matrix:
    return np.asarray(opened.run(None, {"x": x[None], "index": index, "weight": weight})[0])[0]


def activated(gate: ExpertGate, gates: Array, ups: Array | None) -> Array:
    bound = gate.limit or np.inf
    x = np.minimum(gates, bound)
    with np.errstate(over="ignore"):
        found = {
            "silu": x / (1 + np.exp(-gate.alpha * x)),
            "gelu_tanh": 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
            "relu2": np.maximum(x, 0) ** 2,
        }[gate.activation]
    return found if ups is None else found * (np.clip(ups, -bound, bound) + gate.offset)


def mixed(
    gate: ExpertGate,
    gates: Matrix | None,
    ups: Matrix,
    down: Matrix,
    biases: list[Matrix] | None,
    x: Matrix,
    index: Array,
    weight: Matrix,
) -> Array:
    """In float64, token by token."""
    sizes = [*([] if gates is None else [gates]), ups, down]
    added = biases or [np.zeros((len(part), part.shape[1]), np.float32) for part in sizes]
    y = np.zeros(x.shape)
    for token in range(len(x)):
        for expert, share in zip(index[token], weight[token], strict=True):
            projected = [
                part[expert].astype(np.float64) @ x[token] + bias[expert]
                for part, bias in zip(sizes[:-1], added[:-1], strict=True)
            ]
            inner = activated(gate, projected[0], projected[1] if len(projected) > 1 else None)
            y[token] += share * (down[expert].astype(np.float64) @ inner + added[-1][expert])
    return y


def choices(tokens: int, chosen: int, experts: int, seed: int) -> tuple[Array, Matrix]:
    draw = np.random.default_rng(seed)
    order = draw.permuted(np.tile(np.arange(experts), (tokens, 1)), axis=1)
    return np.ascontiguousarray(order[:, :chosen]), draw.random((tokens, chosen)).astype(np.float32)


@pytest.mark.parametrize("gate", GATES, ids=str)
@pytest.mark.parametrize("has_gate", [True, False])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(("hidden", "inner"), [(16, 16), (40, 24), (7, 70), (130, 3)])
def test_a_step_is_what_float64_says(gate: ExpertGate, has_gate: bool, biased: bool, hidden: int, inner: int) -> None:
    gates = random(EXPERTS, inner, hidden, seed=1) if has_gate else None
    ups, down = random(EXPERTS, inner, hidden, seed=2), random(EXPERTS, hidden, inner, seed=3)
    widths = [inner] * (1 + has_gate) + [hidden]
    biases = [random(EXPERTS, width, seed=4 + n) for n, width in enumerate(widths)] if biased else None
    x, (index, weight) = random(11, hidden, seed=9), choices(11, 3, EXPERTS, 5)
    y = run(session(gate, gates, ups, down, biases), x, index, weight)
    expected = mixed(gate, gates, ups, down, biases, x, index, weight)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


@cache
def opened(threads: int) -> ort.InferenceSession:
    weights = random(EXPERTS, INNER, HIDDEN, seed=1), random(EXPERTS, INNER, HIDDEN, seed=2)
    biases = [random(EXPERTS, width, seed=4 + n) for n, width in enumerate((INNER, INNER, HIDDEN))]
    return session(ExpertGate("silu"), *weights, random(EXPERTS, HIDDEN, INNER, seed=3), biases, threads)


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    tokens=st.integers(1, 40),
    chosen=st.integers(1, EXPERTS),
    threads=st.sampled_from((1, 2, 3)),
    popular=st.booleans(),
)
def test_a_token_is_the_same_to_the_bit_alone_in_any_batch_and_on_any_threads(
    seed: int, tokens: int, chosen: int, threads: int, popular: bool
) -> None:
    """``popular``: all tokens share their experts, so that the kernel takes them together."""
    x, (index, weight) = random(tokens, HIDDEN, seed=seed), choices(tokens, chosen, EXPERTS, seed)
    if popular:
        index = np.tile(index[:1], (tokens, 1))
    alone = np.concatenate([run(opened(1), x[t : t + 1], index[t : t + 1], weight[t : t + 1]) for t in range(tokens)])
    assert (run(opened(threads), x, index, weight) == alone).all()
    draw = np.random.default_rng(seed)
    order = draw.permutation(tokens)
    for part in np.array_split(order, draw.integers(1, 5)):
        if len(part):
            assert (run(opened(threads), x[part], index[part], weight[part]) == alone[part]).all()


def test_an_expert_that_nobody_chose_is_not_read() -> None:
    """Its weights are no numbers, and no output shows it."""
    gates, ups = random(EXPERTS, INNER, HIDDEN, seed=1), random(EXPERTS, INNER, HIDDEN, seed=2)
    down = random(EXPERTS, HIDDEN, INNER, seed=3)
    gates[2] = ups[2] = np.nan
    x, (_, weight) = random(5, HIDDEN), choices(5, 2, EXPERTS, 1)
    y = run(
        session(ExpertGate("silu"), gates, ups, down), x, np.array([[0, 1], [3, 4], [5, 0], [1, 3], [4, 5]]), weight
    )
    assert np.isfinite(y).all()


def test_a_nan_of_a_token_stays_its_own() -> None:
    gates, ups = random(EXPERTS, INNER, HIDDEN, seed=1), random(EXPERTS, INNER, HIDDEN, seed=2)
    x, (index, weight) = random(5, HIDDEN), choices(5, 2, EXPERTS, 1)
    x[3, 7] = np.nan
    for gate in GATES:
        y = run(session(gate, gates, ups, random(EXPERTS, HIDDEN, INNER, seed=3)), x, index, weight)
        assert np.isnan(y[3]).all() and np.isfinite(np.delete(y, 3, 0)).all()


@pytest.mark.parametrize("expert", [-1, EXPERTS, 2**40])
def test_an_index_of_no_expert_is_refused(expert: int) -> None:
    x, (index, weight) = random(3, HIDDEN), choices(3, 2, EXPERTS, 1)
    index[1, 1] = expert
    with pytest.raises(Exception, match="Experts: an index is of no expert"):
        run(opened(1), x, index, weight)


@pytest.mark.parametrize(("rows", "columns"), [(2, 2), (3, 0)])
def test_choices_that_do_not_fit_the_tokens_are_refused(rows: int, columns: int) -> None:
    with pytest.raises(Exception, match=r"Experts: (index is not|no expert of a token)"):
        run(opened(1), random(3, HIDDEN), np.zeros((rows, columns), np.int64), np.zeros((rows, columns), np.float32))
