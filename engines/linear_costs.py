"""What a product costs on this machine: measured seconds by kernel, shape and row count (engines/timing.py).

A planner compares kernels by these. What is timed is what the target's own passes make of a linear alone, without the
norm or gate that a native kernel takes in, over copies with weights of their own.

M  rows      K  input channels      N  output channels
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from engines import timing
from engines.compile import step_bytes
from engines.passes.base import INTERNAL, Lowering
from engines.passes.linears import OP
from engines.targets import ort_cpu
from engines.timing import Seconds
from tapeout.errors import BuildError
from tapeout.portable_graph import LinearGroup, PortableGraph
from tapeout.schemes import Scheme

FEW_OUTPUTS = 32  # no fewer are packed together

FloatArray = NDArray[np.float32]
Store = Callable[[Scheme, FloatArray], Any]  # a weight [N, K] as a checkpoint holds it for a kernel


@dataclass(frozen=True)
class Shape:
    columns: int  # K
    outputs: int  # N


def costs(
    shape: Shape,
    kernels: Sequence[Scheme],
    rows: Sequence[int],
    store: Store,
    *,
    streamed: int,
    threads: int = 0,
    only_kept: bool = False,
) -> Seconds:
    """Seconds of one product ``[M, K] x [K, N]``, from the cache where this machine has them.

    ``streamed``: bytes of weights that a sample reads. ``only_kept``: what is not there is left out, not measured.
    """

    def described(count: int) -> dict[str, Any]:
        return {
            "streamed": streamed,
            "shape": [shape.columns, shape.outputs],
            "rows": count,
            # Figures compare within one measurement, so its kernels are part of what names it.
            "kernels": [kernel.model_dump(mode="json") for kernel in kernels],
        }

    def measured(counts: Collection[int]) -> Seconds:
        return measure(shape, kernels, counts, store, threads=threads, streamed=streamed)

    names = [kernel.name for kernel in kernels]
    return timing.kept(names, rows, described, measured, threads=threads, only_kept=only_kept)


def measure(
    shape: Shape, kernels: Sequence[Scheme], rows: Collection[int], store: Store, *, threads: int, streamed: int
) -> Seconds:
    """Time every kernel at every row count. ``streamed``: bytes of weights that a sample reads."""
    weight = np.random.default_rng(0).standard_normal((shape.outputs, shape.columns)).astype(np.float32)
    runs = {kernel.name: _Products(store(kernel, weight), shape, streamed, threads) for kernel in kernels}
    seconds: Seconds = {name: {} for name in runs}
    for count in rows:
        for name, least in timing.fastest({name: partial(run.sample, count) for name, run in runs.items()}).items():
            seconds[name][count] = least
    return seconds


class _Products:
    """A session over copies of one product, which share their input and their output but no weights."""

    def __init__(self, stored: Any, shape: Shape, streamed: int, threads: int) -> None:
        self.shape = shape
        self.copies = -(-streamed // _model_bytes(stored, shape))
        self.session = timing.session_of(product_model(stored, shape, self.copies), threads)

    def sample(self, rows: int) -> float:
        """Seconds of one product, over one run of all copies."""
        x = np.random.default_rng(0).standard_normal((rows, self.shape.columns)).astype(np.float32)
        y = np.empty((rows, self.shape.outputs), np.float32)
        binding = self.session.io_binding()
        binding.bind_input("x", "cpu", 0, np.float32, x.shape, x.ctypes.data)
        for copy in range(self.copies):
            binding.bind_output(f"y{copy}", "cpu", 0, np.float32, y.shape, y.ctypes.data)
        start = time.perf_counter()
        self.session.run_with_iobinding(binding)
        return (time.perf_counter() - start) / self.copies


def product_bytes(shape: Shape, kernel: Scheme, store: Store) -> int:
    """What one product reads of weights: codes, scales and zero points, as the engine holds them."""
    few = Shape(shape.columns, min(shape.outputs, FEW_OUTPUTS))  # outputs are alike
    return (
        _model_bytes(store(kernel, np.zeros((few.outputs, few.columns), np.float32)), few)
        * shape.outputs
        // few.outputs
    )


def _model_bytes(stored: Any, shape: Shape) -> int:
    return step_bytes(product_model(stored, shape, 1))


def product_model(stored: Any, shape: Shape, copies: int) -> ir.Model:
    """``copies`` products of one input ``x [M, K]`` to ``y0 [M, N]`` and on, lowered by the target's own passes."""

    def value(name: str, width: int) -> ir.Value:
        return ir.Value(name=name, shape=ir.Shape(["rows", width]), type=ir.TensorType(ir.DataType.FLOAT))

    x, names = value("x", shape.columns), [f"w{copy}" for copy in range(copies)]
    nodes = [
        ir.Node(
            INTERNAL,
            OP,
            [x],
            attributes=[
                ir.AttrStrings("weights", [name]),
                ir.AttrStrings("biases", [""]),
                ir.AttrInt64s("out_features", [shape.outputs]),
            ],
            outputs=[value(f"y{copy}", shape.outputs)],
        )
        for copy, name in enumerate(names)
    ]
    graph = ir.Graph([x], [node.outputs[0] for node in nodes], nodes=nodes, opset_imports={"": 21}, name="products")
    model = ir.Model(graph, ir_version=10)
    lowering = Lowering(model, _record(shape, names), _RolledWeights(stored, names), max_tokens=1)
    for step in ort_cpu.KERNEL_PASSES:
        step.run(lowering)
    if any(node.domain == INTERNAL for node in model.graph):
        raise BuildError("no pass of ort-cpu takes this weight", expected="a kernel that the target has")
    return model


class _RolledWeights:
    """One stored weight with its output channels in another order by every name: ONNX Runtime keeps equal ones once."""

    def __init__(self, stored: Any, names: Sequence[str]) -> None:
        self._stored = stored
        self._shifts = {name: shift for shift, name in enumerate(names)}

    def linear(self, name: str) -> Any:
        shift = self._shifts[name]
        if isinstance(self._stored, np.ndarray):
            return np.roll(self._stored, shift, axis=0)
        return replace(self._stored, codes=np.roll(self._stored.codes, shift, axis=0))

    weight = tensor = linear


def _record(shape: Shape, names: Sequence[str]) -> PortableGraph:
    groups = [
        LinearGroup(
            name=name, members=(name,), biases=(None,), in_features=shape.columns, out_features=(shape.outputs,)
        )
        for name in names
    ]
    return PortableGraph(
        architecture="products",
        layers=0,
        hidden_size=shape.columns,
        heads=0,
        kv_heads=0,
        head_size=0,
        vocab_size=0,
        tied_embeddings=False,
        embedding="",
        rotary="none",
        max_positions=1,
        groups=tuple(groups),
        stop_tokens=(),
        max_relative_error=0.0,
        versions={},
    )
