"""What a linear costs on this machine: measured seconds by scheme, shape and tokens of a step (timing.py).

The plan solver compares schemes by these. What is timed is what the target's own passes make of a linear alone, without
the norm or gate that a native kernel may fuse, over copies with weights of their own.

M  tokens of a step      K  input channels      N  output channels
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from engines.compile import step_bytes
from engines.costs.timing import CasesByTokens, TimedCase
from engines.passes.base import INTERNAL, Lowering
from engines.passes.graph.linears import OP
from engines.target import Target
from tapeout.errors import BuildError
from tapeout.portable_graph import LinearGroup, PortableGraph
from tapeout.schemes import Scheme

FEW_OUTPUTS = 32  # native kernels pack this many output channels together

FloatArray = NDArray[np.float32]
Store = Callable[[Scheme, FloatArray], Any]  # a weight [N, K] as a checkpoint stores it in a scheme


@dataclass(frozen=True)
class LinearShape:
    columns: int  # K
    outputs: int  # N


@dataclass(frozen=True)
class TimedLinear:
    """One linear ``[M, K] x [K, N]``, whose alternatives are schemes."""

    shape: LinearShape
    schemes: Sequence[Scheme]
    store: Store

    @property
    def names(self) -> Sequence[str]:
        return [scheme.name for scheme in self.schemes]

    def described(self, tokens: int) -> Mapping[str, Any]:
        return {
            "shape": [self.shape.columns, self.shape.outputs],
            "tokens": tokens,
            # Times compare within one measurement, so all its schemes are part of the key.
            "schemes": [scheme.model_dump(mode="json") for scheme in self.schemes],
        }

    def cases(self, target: Target[Any], tokens: Collection[int]) -> CasesByTokens:
        """The same at every number of tokens."""
        shape, cases = self.shape, dict[str, TimedCase]()
        weight = np.random.default_rng(0).standard_normal((shape.outputs, shape.columns)).astype(np.float32)
        for scheme in self.schemes:
            stored = self.store(scheme, weight)
            model = partial(linear_model, target, stored, shape)
            cases[scheme.name] = TimedCase(_model_bytes(target, stored, shape), model, self._arrays)
        yield tokens, cases

    def _arrays(self, copies: int, tokens: int) -> dict[str, FloatArray]:
        x = np.random.default_rng(0).standard_normal((tokens, self.shape.columns)).astype(np.float32)
        y = np.empty((tokens, self.shape.outputs), np.float32)
        return {"x": x} | {f"y{copy}": y for copy in range(copies)}


def linear_bytes(target: Target[Any], shape: LinearShape, scheme: Scheme, store: Store) -> int:
    """Bytes of one linear's weight as the engine stores it: codes, scales and zero points."""
    few = LinearShape(shape.columns, min(shape.outputs, FEW_OUTPUTS))  # all outputs take the same
    stored = store(scheme, np.zeros((few.outputs, few.columns), np.float32))
    return _model_bytes(target, stored, few) * shape.outputs // few.outputs


def _model_bytes(target: Target[Any], stored: Any, shape: LinearShape) -> int:
    return step_bytes(linear_model(target, stored, shape, 1))


def linear_model(target: Target[Any], stored: Any, shape: LinearShape, copies: int) -> ir.Model:
    """``copies`` linears of one input ``x [M, K]`` to ``y0 [M, N]`` and on, lowered by the target's own passes."""

    def value(name: str, width: int) -> ir.Value:
        return ir.Value(name=name, shape=ir.Shape(["tokens", width]), type=ir.TensorType(ir.DataType.FLOAT))

    x, names = value("x", shape.columns), [f"w{copy}" for copy in range(copies)]
    nodes = [
        ir.node(
            OP,
            [x],
            attributes={"weights": [name], "biases": [""], "out_features": [shape.outputs]},
            domain=INTERNAL,
            outputs=[value(f"y{copy}", shape.outputs)],
        )
        for copy, name in enumerate(names)
    ]
    graph = ir.Graph([x], [node.outputs[0] for node in nodes], nodes=nodes, opset_imports={"": 21}, name="linears")
    model = ir.Model(graph, ir_version=10)
    lowering = Lowering(model, _record(shape, names), _RolledWeights(stored, names), 1, target.kernels)
    for step in target.passes().linears:
        step.run(lowering)
    if any(node.domain == INTERNAL for node in model.graph):
        raise BuildError(f"no pass of {target.name} takes this weight", expected="a scheme that the target supports")
    return model


class _RolledWeights:
    """One stored weight, its output channels in another order under each name: ONNX Runtime keeps equal ones once."""

    def __init__(self, stored: Any, names: Sequence[str]) -> None:
        self._stored = stored
        self._shifts = {name: shift for shift, name in enumerate(names)}

    def linear(self, name: str) -> Any:
        shift = self._shifts[name]
        if isinstance(self._stored, np.ndarray):
            return np.roll(self._stored, shift, axis=0)
        return replace(self._stored, codes=np.roll(self._stored.codes, shift, axis=0))

    weight = tensor = linear


def _record(shape: LinearShape, names: Sequence[str]) -> PortableGraph:
    groups = [
        LinearGroup(
            name=name, members=(name,), biases=(None,), in_features=shape.columns, out_features=(shape.outputs,)
        )
        for name in names
    ]
    return PortableGraph.model_construct(groups=tuple(groups), max_positions=1)  # kernel passes read no more of it
