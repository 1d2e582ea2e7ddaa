"""Run a portable graph on ONNX Runtime in segments, each with its own weights: memory holds one segment's, not all.

The nodes are cut in topological order, so that the weights of a segment take at most so many bytes (or are one tensor,
or one expert's). A layer's experts are cut into several nodes (expert_parts.py).
Weights are inputs of a segment's session and are read from the mapped file when its turn comes. All calls go through a
segment before the next one, so weights are read once. Values that later segments read are kept until the last of them.
Nothing is known of layers or their names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import onnx
import onnx_ir as ir
import onnxruntime as ort
from numpy.typing import NDArray

from tapeout.expert_parts import StoredRows, cut_experts
from tapeout.portable_model import load_graph
from tapeout.progress import ProgressBar

SEGMENT_BYTES = 1 << 30  # of weights in float32

Arrays = dict[str, NDArray[Any]]


class SegmentCall(Protocol):
    """One call of a graph. Inputs are asked for when a segment reads them, outputs are given as soon as they are there.

    So an input may be made from outputs of calls before it, of the same segment or an earlier one.
    """

    def feed(self, name: str) -> NDArray[Any]: ...

    def take(self, name: str, array: NDArray[Any]) -> None: ...


@dataclass
class _Segment:
    nodes: list[onnx.NodeProto] = field(default_factory=list[onnx.NodeProto])
    weights: dict[str, None] = field(default_factory=dict[str, None])  # a set in order
    inputs: list[str] = field(default_factory=list[str])
    outputs: list[str] = field(default_factory=list[str])
    session: Any = None


class SegmentedGraph:
    """The graph at ``path``."""

    def __init__(self, path: Path, *, segment_bytes: int = SEGMENT_BYTES) -> None:
        model = load_graph(path)
        graph = model.graph
        parts = cut_experts(model, segment_bytes)
        stored = {
            name: StoredRows(value.const_value)
            for name, value in graph.initializers.items()
            if isinstance(value.const_value, ir.ExternalTensor)
        }
        values = [graph.initializers.pop(name) for name in stored]
        graph.inputs.extend([*(value for value in values if value.uses()), *parts])
        self._weights = stored | {value.name or "": part for value, part in parts.items()}
        graph.sort()
        proto = ir.to_proto(model)
        self.outputs = frozenset(value.name for value in proto.graph.output)
        self._segments = _cut(proto, {name: 4 * part.size for name, part in self._weights.items()}, segment_bytes)
        for segment in self._segments:
            segment.session = _session(proto, segment)

    @property
    def segments(self) -> list[tuple[str, ...]]:
        """Names of the weights of each."""
        return [tuple(segment.weights) for segment in self._segments]

    def run(
        self,
        calls: Sequence[SegmentCall],
        *,
        done: int = 0,
        kept: list[Arrays] | None = None,
        finished: Callable[[int, list[Arrays]], None] = lambda _, __: None,
    ) -> None:
        """All calls, in order within each segment.

        ``finished`` gets the number of segments that are done, and what later ones read of each call. A run that was
        interrupted goes on where these were its last: with the same two as ``done`` and ``kept``.
        """
        kept = kept or [{} for _ in calls]
        total = len(calls) * len(self._segments)
        with ProgressBar(title="graph", unit="call", total=total, done=done * len(calls)) as bar:
            for number, segment in list(enumerate(self._segments))[done:]:
                weights = self._read(segment.weights)
                later = {name for after in self._segments[number + 1 :] for name in after.inputs}
                for call, values in zip(calls, kept, strict=True):
                    self._run(segment, weights, call, values)
                    for name in values.keys() - later:
                        del values[name]
                    bar.update()
                del weights  # before the next segment's are read
                finished(number + 1, kept)

    def _run(self, segment: _Segment, weights: Arrays, call: SegmentCall, values: Arrays) -> None:
        """``values``: what segments so far computed in this call; outputs of this one are added."""
        given = {name: values[name] if name in values else call.feed(name) for name in segment.inputs}
        results = segment.session.run(segment.outputs, given | weights)
        for name, array in zip(segment.outputs, results, strict=True):
            values[name] = array
            if name in self.outputs:
                call.take(name, array)

    def _read(self, names: Iterable[str]) -> Arrays:
        return {name: self._weights[name].read() for name in names}


def _cut(proto: onnx.ModelProto, weights: Mapping[str, int], limit: int) -> list[_Segment]:
    """``weights``: bytes by name. Nodes over weights alone, such as transposes, go where their result is read."""
    derived: dict[str, onnx.NodeProto] = {}
    constants = {tensor.name for tensor in proto.graph.initializer}
    segments = [_Segment()]
    for node in proto.graph.node:
        read = _reads(node)
        if read and all(name in weights or name in derived or name in constants for name in read):
            derived.update(dict.fromkeys(node.output, node))
            continue
        behind = _behind(node, derived)
        found = {name for each in [*behind, node] for name in _reads(each) if name in weights}
        if segments[-1].nodes and sum(weights[name] for name in {*segments[-1].weights, *found}) > limit:
            segments.append(_Segment())
        known = {id(each) for each in segments[-1].nodes}
        segments[-1].nodes += [*(each for each in behind if id(each) not in known), node]
        segments[-1].weights |= dict.fromkeys(sorted(found))
    produced = [{name for node in segment.nodes for name in node.output if name} for segment in segments]
    reads = [{name for node in segment.nodes for name in _reads(node)} for segment in segments]
    results = {value.name for value in proto.graph.output}
    for number, segment in enumerate(segments):
        segment.inputs = sorted(reads[number] - produced[number] - constants - set(weights))
        later = results.union(*(reads[after] - produced[after] for after in range(number + 1, len(segments))))
        segment.outputs = sorted(produced[number] & later)
    return segments


def _reads(node: onnx.NodeProto) -> list[str]:
    """Names that a node reads, those of its branches included."""
    inner = [sub for attribute in node.attribute for sub in [*attribute.graphs, attribute.g] if sub.node]
    return [name for name in node.input if name] + [n for graph in inner for each in graph.node for n in _reads(each)]


def _behind(node: onnx.NodeProto, derived: Mapping[str, onnx.NodeProto]) -> list[onnx.NodeProto]:
    """The nodes over weights alone that a node needs, in order."""
    found: list[onnx.NodeProto] = []
    for name in _reads(node):
        if name in derived:
            found += [*_behind(derived[name], derived), derived[name]]
    return list({id(each): each for each in found}.values())


def _session(proto: onnx.ModelProto, segment: _Segment) -> Any:
    known = {v.name: v for v in [*proto.graph.value_info, *proto.graph.input, *proto.graph.output]}
    names = {name for node in segment.nodes for name in _reads(node)}
    graph = onnx.helper.make_graph(
        segment.nodes,
        "segment",
        [known[name] for name in [*segment.inputs, *segment.weights]],
        [known[name] for name in segment.outputs],
        initializer=[tensor for tensor in proto.graph.initializer if tensor.name in names],
    )
    model = onnx.helper.make_model(graph, opset_imports=proto.opset_import, functions=proto.functions)
    model.ir_version = proto.ir_version
    options = ort.SessionOptions()
    options.enable_cpu_mem_arena = False  # what a segment took is given back
    # Threads sleep while they wait: to run a tiny model twice, a segment for each weight, takes 1.7 s where they spin.
    # Here it takes 0.07 s.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
