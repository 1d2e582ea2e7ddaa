"""Native operators in sessions of one node: random linears, and their reference in numpy.

The reference is that of quantization/reference.py, ``round_activations``: activations are quantized to int8 for each
token and block, ties to even; products of codes are summed exactly within a block and in float across blocks.

M  tokens     N  output channels     K  input channels     B  blocks of K
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from engines.bundle import WEIGHTS_FILE
from engines.compile import MODEL_FILE, write_weights
from engines.kernels.cpu import LEVELS, Level, compiler
from engines.kernels.cpu.kernel_set import CpuKernels
from engines.kernels.operators import DOMAIN
from engines.passes.onnxruntime import block_linears
from engines.sessions import cpu_options, map_experts, open_session
from engines.targets.ort_cpu import library
from tapeout.quantized import QuantizedWeight
from tests.lowering import model_of, named, parameter, value
from tests.random_linears import MXFP4, ROUNDING

Array = NDArray[Any]
Matrix = NDArray[np.float32]
Run = Callable[..., list[Array]]
STOCK = "native kernels are left out of this test"
makes_pages_ready = pytest.mark.skipif(
    platform.system() != "Linux" or tuple(map(int, platform.release().split(".")[:2])) < (5, 14),
    reason="only Linux from 5.14 on makes pages ready",
)


def own_cache(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """``$TAPEOUT_CACHE`` is ``folder``. It shares the compiled kernels of every test, which saves some seconds."""
    kept = compiler.cache()
    kept.mkdir(parents=True, exist_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "kernels").exists():
        (folder / "kernels").symlink_to(kept)
    patch.setenv("TAPEOUT_CACHE", str(folder))


def least_level() -> Level:
    """The last level for this machine, which every processor that runs native kernels has."""
    return [level for level in LEVELS if level.machine == platform.machine()][-1]


def without_native_operators(patch: pytest.MonkeyPatch) -> str:
    """Linears and embeddings are lowered to ONNX Runtime's own operators. Why is what reports say then."""
    known = CpuKernels.unsupported

    def unsupported(self: CpuKernels, operator: str) -> str:
        return known(self, operator) if operator == "CachedAttention" else STOCK

    patch.setattr(CpuKernels, "unsupported", unsupported)
    return STOCK


def linear_session(
    kind: str,
    linear: QuantizedWeight,
    *,
    bias: Matrix | None = None,
    weight: Matrix | None = None,
    threads: int = 1,
    rank: int = 2,
    own_threads: bool = True,
    **attributes: Any,
) -> Run:
    """A session of one linear: takes its inputs in order, returns its outputs. ``weight``: of the norm before it.

    ``own_threads``: of the native operators; else those of ONNX Runtime.
    """
    free = [f"d{axis}" for axis in range(rank - 1)]
    inputs = [value(name, [*free, f"{name}_columns"]) for name in ("a", "b")[: 1 + (kind == "ResidualNormLinear")]]
    if kind == "HeadLinear":
        inputs.append(value("greedy", [], ir.DataType.BOOL))
    holder = model_of([], [])
    codes, scales, zero_points = block_linears.stacked(holder, CpuKernels(), "linear", lambda: [linear])
    rest: list[ir.Value | None] = [] if weight is None else [parameter("norm.weight", weight)]
    rest += [codes, scales, zero_points, None if bias is None else parameter("linear.bias", bias)]
    while rest[-1] is None:
        rest.pop()
    known = {"N": len(linear.codes)} | block_linears.attributes(linear, scales)
    return _session(kind, inputs, rest, known | attributes, threads, [kind] if own_threads else [])


def gather_session(table: QuantizedWeight) -> Run:
    """A session of one BlockGather: takes ids, returns embeddings."""
    codes, scales, zero_points = block_linears.stacked(model_of([], []), CpuKernels(), "table", lambda: [table])
    rest = [codes, scales] if zero_points is None else [codes, scales, zero_points]
    known = {"N": len(table.codes)} | block_linears.attributes(table, scales)
    return _session(
        "BlockGather", [value("ids", ["batch", "tokens"], ir.DataType.INT64)], rest, known, 1, ["BlockGather"]
    )


def _session(
    kind: str,
    inputs: list[ir.Value],
    rest: list[ir.Value | None],
    attributes: dict[str, Any],
    threads: int,
    operators: list[str],
) -> Run:
    count = 2 if kind in ("ResidualNormLinear", "HeadLinear") else 1
    node = ir.node(kind, [*inputs, *rest], attributes=attributes, domain=DOMAIN, num_outputs=count)
    for output in node.outputs:
        output.type = ir.TensorType(ir.DataType.FLOAT)
    if kind == "HeadLinear":
        node.outputs[1].type = ir.TensorType(ir.DataType.INT64)
    initializers = {v.name: v for v in rest if v is not None}
    for v in initializers.values():
        if v.graph is not None:
            v.graph.initializers.pop(v.name or "")
    model = model_of(inputs, [named(f"y{at}", output) for at, output in enumerate(node.outputs)])
    model.opset_imports[DOMAIN] = 1
    options = cpu_options(threads, library(), operators, chooses=True)
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    session = open_session(ir.to_proto(model).SerializeToString(), options)
    (assigned,) = session.get_provider_graph_assignment_info()
    assert assigned.ep_name.startswith("tapeout") == (kind != "BlockGather")

    def run(*arrays: Array) -> list[Array]:
        return [np.asarray(y) for y in session.run(None, dict(zip((i.name for i in inputs), arrays, strict=True)))]

    return run


def mapped_experts(model: ir.Model, folder: Path) -> ort.InferenceSession:
    """With weights in a file of the folder; those of experts stay there, as far as they are a page or more."""
    write_weights(model, folder / WEIGHTS_FILE)
    ir.save(model, folder / MODEL_FILE)
    options = cpu_options(1, library(), ["Experts"])
    map_experts(options, folder / WEIGHTS_FILE)
    return open_session(str(folder / MODEL_FILE), options)


def expected(
    x: Array, linear: QuantizedWeight, bias: Matrix | None = None, *, slack: float = 0.0
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The linear's outputs ``[M, N]`` in float64, and by how much an operator in float32 may miss them.

    ``slack``: the relative error of ``x``, where the operator makes it itself. An input within it of the middle between
    two codes may fall on either.
    """
    linear = linear.widened(5) or linear if linear.scheme == MXFP4 else linear
    zero_points = 1 << (linear.scheme.bits - 1) if linear.zero_points is None else linear.zero_points[:, :, None]
    weights = linear.codes.reshape(*linear.scales.shape, -1).astype(np.float64) - zero_points  # [N, B, block]
    blocks = x.reshape(len(x), -1, linear.group_size)
    largest = np.abs(blocks).max(axis=2, keepdims=True)
    limit = x.dtype.type(127)
    exact = blocks * np.divide(limit, largest, out=np.zeros_like(largest), where=largest > 0)
    codes = np.rint(exact)
    close = np.abs(exact - np.floor(exact) - 0.5) < 2 * 127 * slack
    steps = (largest / limit)[:, :, 0].astype(np.float64)  # [M, B]
    terms = np.einsum("mbk,nbk->mbn", codes, weights, optimize=True) * linear.scales.T * steps[:, :, None]
    flips = (
        np.einsum("mbk,nbk->mbn", close, np.abs(weights), optimize=True) * np.abs(linear.scales.T) * steps[:, :, None]
    )
    offset = np.zeros(len(weights)) if bias is None else bias.astype(np.float64)
    sizes = np.abs(terms).sum(axis=1) + np.abs(offset)
    unit = (terms.shape[1] + 4) * ROUNDING + 2 * slack
    return terms.sum(axis=1) + offset, sizes * unit + flips.sum(axis=1)


def check(actual: Array, wanted: tuple[NDArray[np.float64], NDArray[np.float64]]) -> None:
    y, bound = wanted
    assert actual.dtype == np.float32 and actual.shape == y.shape
    over = np.abs(actual - y) - bound
    assert (over <= 0).all(), f"{over.max():.1e} beyond what rounding explains"
