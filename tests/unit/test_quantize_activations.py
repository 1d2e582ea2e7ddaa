"""QuantizeActivations, the operator: codes as ONNX Runtime gives them, and every clipped activation is counted."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from engines.kernels.cpu.clipping import clippings
from engines.kernels.operators import DOMAIN
from engines.kernels.serving import Clipping, ValueCounts
from engines.sessions import cpu_options, open_session
from engines.targets.ort_cpu import library
from tests.lowering import model_of, named, parameter, value

pytestmark = pytest.mark.usefixtures("level")

SCALE = np.float32(0.03)
LAST = np.float32(127) * SCALE  # the largest activation that the grid reaches


def session(scale: Any = SCALE, *, stock: bool = False, threads: int = 2, own_threads: bool = True) -> Any:
    """A session of one operator, ours or ``stock``: ONNX Runtime's."""
    x, grid = value("x", ["tokens", "columns"]), [parameter("linear.scale", np.asarray(scale, np.float32))]
    if stock:
        grid.append(parameter("linear.zero", np.array(128, np.uint8)))
    operator, domain = ("QuantizeLinear", "") if stock else ("QuantizeActivations", DOMAIN)
    node = ir.node(operator, [x, *grid], domain=domain)
    node.outputs[0].type = ir.TensorType(ir.DataType.UINT8)
    model = model_of([x], [named("y", node.outputs[0])])
    model.opset_imports[DOMAIN] = 1
    options = cpu_options(threads, library(), [operator] if own_threads else ())
    return open_session(ir.to_proto(model).SerializeToString(), options)


def run(opened: Any, x: NDArray[np.float32]) -> NDArray[np.uint8]:
    return np.asarray(opened.run(["y"], {"x": x})[0])


def activations(tokens: int, columns: int) -> NDArray[np.float32]:
    """Most within the grid, some beyond either end, some in the middle between two codes."""
    rng = np.random.default_rng(0)
    x = (3 * rng.standard_normal((tokens, columns))).astype(np.float32)
    return np.where(rng.random(x.shape) < 0.1, (rng.integers(-130, 130, x.shape) + 0.5).astype(np.float32) * SCALE, x)


@pytest.mark.parametrize("own_threads", [True, False], ids=["own threads", "threads of ONNX Runtime"])
@pytest.mark.parametrize(("tokens", "columns"), [(1, 64), (3, 31), (40, 576), (0, 64)])
def test_codes_and_counts_are_those_of_numpy(tokens: int, columns: int, own_threads: bool) -> None:
    """One part and several, whole vectors and what is left of one."""
    x, counted = activations(tokens, columns), clippings(library())
    codes = np.rint(x / SCALE)
    np.testing.assert_array_equal(run(session(own_threads=own_threads), x), np.clip(codes, -128, 127) + 128)
    clipped = int(((codes < -128) | (codes > 127)).sum())
    assert counted() == Clipping(activations=ValueCounts(x.size, clipped))
    assert clipped > 0 or not x.size


def test_bits_are_those_of_onnx_runtime() -> None:
    """The ends of the grid, too, and what is no number."""
    odd = np.array([np.nan, np.inf, -np.inf, 3e38, -3e38, 1e-45, -0.0, 127.5 * SCALE, -128.5 * SCALE, LAST], np.float32)
    x = np.concatenate([activations(7, 1000), np.resize(odd, (7, 1000))])
    np.testing.assert_array_equal(run(session(), x), run(session(stock=True), x))


@pytest.mark.parametrize(
    ("multiple", "clipped"),
    [(127, 0), (127.49, 0), (127.51, 1), (-128, 0), (-128.49, 0), (-128.51, 1), (1e30, 1), (-np.inf, 1), (np.nan, 1)],
)
def test_clipped_is_what_the_grid_does_not_reach(multiple: float, clipped: int) -> None:
    """A NaN has no code, so it counts."""
    x, counted = np.full((1, 1), multiple * SCALE, np.float32), clippings(library())
    run(session(), x)
    assert counted().activations == ValueCounts(1, clipped)


@pytest.mark.parametrize(
    ("scale", "found"),
    [
        (0, "not a positive number"),
        (-0.1, "not a positive number"),
        (np.nan, "not a positive number"),
        (np.inf, "not a positive number"),
        ([0.1, 0.1], "not one float"),
    ],
)
def test_another_scale_is_an_error(scale: Any, found: str) -> None:
    with pytest.raises(Exception, match=f"QuantizeActivations: the scale is {found}"):
        run(session(scale), activations(1, 4))
