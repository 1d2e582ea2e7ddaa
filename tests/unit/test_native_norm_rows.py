"""NormRows, Norm and ResidualNorm, the operators: the RMSNorm of tokens, each the same to the bit whatever else is
computed.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from engines.kernels import cpu as native
from engines.kernels.operators import DOMAIN
from engines.sessions import cpu_options, open_session
from engines.targets.ort_cpu import library
from tests.lowering import model_of, named, parameter, value
from tests.native import Array, Matrix

pytestmark = pytest.mark.skipif(native.level() is None, reason=native.unsupported())
EPSILON = 0.03  # large enough to be seen in the result


def session(
    weight: Matrix, *, residual: bool = False, threads: int = 1, epsilon: float = EPSILON
) -> ort.InferenceSession:
    x, other = (value(name, ["batch", "tokens", "channels"]) for name in "ab")
    rows = value("rows", ["rows"], ir.DataType.INT64)
    node = ir.node(
        "NormRows",
        [x, other if residual else None, parameter("norm.weight", weight), rows],
        attributes={"epsilon": epsilon},
        domain=DOMAIN,
    )
    node.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    model = model_of([x, *([other] if residual else []), rows], [named("y", node.outputs[0])])
    model.opset_imports[DOMAIN] = 1
    return open_session(ir.to_proto(model).SerializeToString(), cpu_options(threads, library(), ["NormRows"]))


def random(*shape: int, seed: int = 0) -> Matrix:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def normed(x: Array, weight: Array) -> Array:
    exact = x.astype(np.float64)
    return exact / np.sqrt((exact**2).mean(axis=-1, keepdims=True) + EPSILON) * weight


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("channels", [16, 576, 2048])
def test_rows_are_normalized_where_they_are_wanted(channels: int, residual: bool) -> None:
    weight, a, b = random(channels, seed=1), random(2, 9, channels, seed=2), random(2, 9, channels, seed=3)
    a[0, 3] = b[0, 3] = 0  # what is left is the epsilon
    feeds = {"a": a} | ({"b": b} if residual else {})
    flat = (a + b if residual else a).reshape(18, channels)
    for rows in ([17], [3, 0, 0, 12], [*range(18)], []):
        (y,) = session(weight, residual=residual).run(None, {**feeds, "rows": np.array(rows, np.int64)})
        assert y.shape == (len(rows), channels)
        np.testing.assert_allclose(y, normed(flat[rows], weight), rtol=2e-6)


def test_a_row_is_the_same_alone_and_with_any_number_of_threads() -> None:
    weight, a = random(640, seed=1), random(1, 300, 640, seed=2)
    (together,) = session(weight, threads=3).run(None, {"a": a, "rows": np.arange(300)})
    alone = session(weight)
    for row in (0, 7, 299):
        (y,) = alone.run(None, {"a": a[:, : row + 1], "rows": np.array([row])})
        np.testing.assert_array_equal(y[0], together[row])


def test_nan_and_infinity_spoil_their_row_alone() -> None:
    a = random(1, 3, 64)
    a[0, 0, 5], a[0, 2, 7] = np.nan, np.inf
    (y,) = session(random(64, seed=1)).run(None, {"a": a, "rows": np.arange(3)})
    assert np.isnan(y[0]).all() and np.isfinite(y[1]).all() and np.isnan(y[2, 7])


@pytest.mark.parametrize("bad", [6, -1, 2**40, -(2**63)])
def test_a_row_outside_the_input_is_an_error(bad: int) -> None:
    with pytest.raises(Exception, match="NormRows: a row is outside the input"):
        session(random(32)).run(None, {"a": random(2, 3, 32), "rows": np.array([0, bad])})


@pytest.mark.parametrize(
    ("width", "rest", "said"),
    [(40, 40, "no multiple of 16"), (48, 32, "a residual or weight of another shape")],
)
def test_inputs_of_another_width_are_an_error(width: int, rest: int, said: str) -> None:
    with pytest.raises(Exception, match=said):
        session(random(rest)).run(None, {"a": random(1, 2, width), "rows": np.array([0])})


def test_a_negative_epsilon_is_an_error_when_the_session_starts() -> None:
    with pytest.raises(Exception, match="a negative epsilon"):
        session(random(32), epsilon=-1.0)


def all_rows(feeds: dict[str, Matrix], *weights: Matrix, threads: int = 1) -> list[Array]:
    """Norm of one value, ResidualNorm of two."""
    given = [value(name, ["batch", "tokens", "channels"]) for name in feeds]
    node = ir.node(
        "ResidualNorm" if len(feeds) > 1 else "Norm",
        [*given, *(parameter(f"norm{number}.weight", weight) for number, weight in enumerate(weights))],
        attributes={"epsilon": EPSILON},
        domain=DOMAIN,
        num_outputs=len(feeds),
    )
    for output in node.outputs:
        output.type = ir.TensorType(ir.DataType.FLOAT)
    model = model_of(given, [named(name, output) for name, output in zip(("y", "sum"), node.outputs, strict=False)])
    model.opset_imports[DOMAIN] = 1
    options = cpu_options(threads, library(), ["Norm", "ResidualNorm"])
    return [np.asarray(y) for y in open_session(ir.to_proto(model).SerializeToString(), options).run(None, feeds)]


@pytest.mark.parametrize("channels", [16, 576, 2048])
def test_all_tokens_are_normalized_and_their_sum_is_given(channels: int) -> None:
    weight, a, b = random(channels, seed=1), random(2, 9, channels, seed=2), random(2, 9, channels, seed=3)
    (y,) = all_rows({"a": a}, weight)
    np.testing.assert_allclose(y, normed(a, weight), rtol=2e-6)
    y, total = all_rows({"a": a, "b": b}, weight, threads=3)
    np.testing.assert_array_equal(total, a + b)
    np.testing.assert_allclose(y, normed(total, weight), rtol=2e-6)
    for token in (0, 8):
        alone = all_rows({"a": a[1:, token:][:, :1], "b": b[1:, token:][:, :1]}, weight)
        np.testing.assert_array_equal(alone, [y[1:, token:][:, :1], total[1:, token:][:, :1]])


def test_a_residual_of_another_shape_is_an_error() -> None:
    with pytest.raises(Exception, match="a residual or weight of another shape"):
        all_rows({"a": random(1, 3, 32), "b": random(1, 2, 32)}, random(32))


@pytest.mark.parametrize("left", [0, 32])
def test_the_next_channels_are_normalized_by_themselves_and_the_rest_is_copied(left: int) -> None:
    first, second, a = random(64, seed=1), random(48, seed=2), random(2, 9, 112 + left, seed=3)
    (y,) = all_rows({"a": a}, first, second, threads=3)
    np.testing.assert_array_equal(y[..., 112:], a[..., 112:])
    for weight, channels in ((first, slice(0, 64)), (second, slice(64, 112))):
        (alone,) = all_rows({"a": np.ascontiguousarray(a[..., channels])}, weight)
        np.testing.assert_array_equal(y[..., channels], alone)


@pytest.mark.parametrize("widths", [(48,), (32, 16), (24,), (32, 8)])
def test_weights_of_other_channels_than_the_input_has_are_an_error(widths: tuple[int, ...]) -> None:
    with pytest.raises(Exception, match="not of the input's first channels, in multiples of 16"):
        all_rows({"a": random(1, 3, 32)}, *(random(width) for width in widths))
