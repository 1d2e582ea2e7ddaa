"""The output of every linear of a bundle, and its embedding, for comparing an engine with a reference part by part."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile

import numpy as np
import onnx
import onnxruntime as ort

from engines.bundle import BLOCK_TABLE, GREEDY, OFFSETS, SLOTS, STARTS, EngineBundle
from engines.kernels.cpu.serving import library_of
from engines.kernels.operators import EXPERTS
from engines.protocol import FloatArray, IntArray
from engines.sessions import cpu_options, open_session
from engines.state_buffers import as_floats, bind_state, numpy_element
from tapeout.artifact import Artifact
from tapeout.errors import BuildError
from tapeout.operators import PAST
from tapeout.operators.experts import CHOICE_INPUT
from tapeout.resources import Needs, require
from tapeout.state import paged_buffers, recurrent_buffers

IDS_AT_ONCE = 4096
ALIGNED = 1024  # numbers; where an output may begin
FEW = 3  # tokens of a run that tells the shapes of outputs


class OrtProbe:
    """See :data:`engines.target.Probe`. The bundle's own graph, with the outputs of its linears as extra outputs.

    They lie in a mapped file in ``scratch``: of 2,048 tokens, linears of a model of 8 billion parameters return 11 GB.
    """

    def __init__(self, bundle: Artifact[EngineBundle], scratch: Path, *, threads: int = 0) -> None:
        self._record, self._folder, self._scratch = bundle.record, bundle.folder, scratch
        model = onnx.load(str(bundle.folder / "model.onnx"), load_external_data=False)
        self._choices_by = choice_values(model.graph, self._record)
        present = {output.name for output in model.graph.output}
        for value in dict.fromkeys([*(o.value for o in self._record.linear_outputs), *self._choices_by.values()]):
            if value not in present:
                model.graph.output.append(onnx.helper.make_empty_tensor_value_info(value))
        # Without threads of their own, native operators read weights from the mapped file, and hold no copy of them.
        self._options = cpu_options(threads, library_of(bundle))
        # A model given as bytes finds its weights beside this path.
        self._options.add_session_config_entry(
            "session.model_external_initializers_file_folder_path", str(bundle.folder)
        )
        self._session = open_session(model.SerializeToString(), self._options)
        self._names = list(dict.fromkeys(["logits", *(linear.value for linear in self._record.linear_outputs)]))
        self._states: dict[str, FloatArray] = {}
        self._choices: dict[str, IntArray] = {}
        binding = self._session.io_binding()
        feeds = self._feeds([0] * FEW)
        _bind(binding, feeds)
        for name in self._names:
            binding.bind_output(name, "cpu")
        self._session.run_with_iobinding(binding)
        self._shapes = [value.shape for value in binding.copy_outputs_to_cpu()]

    def __call__(self, tokens: Sequence[int]) -> tuple[FloatArray, dict[str, FloatArray]]:
        count = len(tokens)
        values = self._run(tokens)
        outputs: dict[str, FloatArray] = {}
        for linear in self._record.linear_outputs:
            stacked = values[linear.value].reshape(count, -1)
            if linear.parts:
                stacked[:] = by_head(stacked, linear.parts)
            edges = np.cumsum((0, *linear.rows))
            for weight, begin, end in zip(linear.weights, edges, edges[1:], strict=False):
                outputs[weight] = stacked[:, begin:end]
        return values["logits"], outputs

    def _run(self, tokens: Sequence[int]) -> dict[str, FloatArray]:
        """Of all names, in a mapped file."""
        shapes = [
            tuple(len(tokens) if size == FEW else size for size in head[:-1]) + head[-1:] for head in self._shapes
        ]
        starts = [0, *np.cumsum([-(-math.prod(shape) // ALIGNED) * ALIGNED for shape in shapes]).tolist()]
        needs = Needs(disk_bytes=4 * starts[-1], memory_bytes=0)
        require("the outputs of all linears", needs, self._scratch)
        with TemporaryFile(dir=self._scratch) as file:
            os.posix_fallocate(file.fileno(), 0, needs.disk_bytes)  # a write to a mapped file may not fail
            held = np.memmap(file, np.float32, "r+", shape=(starts[-1],))
        binding, values = self._session.io_binding(), dict[str, FloatArray]()
        feeds = self._feeds(tokens)
        _bind(binding, feeds)
        for name, shape, start in zip(self._names, shapes, starts, strict=False):
            values[name] = held[start : start + math.prod(shape)].reshape(shape)
            binding.bind_output(name, "cpu", 0, np.float32, shape, values[name].ctypes.data)
        chosen = list(dict.fromkeys(self._choices_by.values()))
        for name in chosen:
            binding.bind_output(name, "cpu")
        self._session.run_with_iobinding(binding)
        found = dict(zip(chosen, binding.get_outputs()[len(self._names) :], strict=True))
        self._choices = {
            weight: found[value].numpy().reshape(len(tokens), -1) for weight, value in self._choices_by.items()
        }
        # Operators write the state of slot 0 in place.
        states = {name: feeds[f"{PAST}.{name}"][0] for name, _, _ in recurrent_buffers(self._record.io.state, 1)}
        self._states = {name: as_floats(state) for name, state in states.items()}
        return values

    def attention(self) -> Mapping[str, FloatArray]:
        return {}

    def states(self) -> Mapping[str, FloatArray]:
        return self._states

    def choices(self) -> Mapping[str, IntArray]:
        return self._choices

    def _feeds(self, tokens: Sequence[int]) -> dict[str, np.ndarray]:
        io, count = self._record.io, len(tokens)
        feeds: dict[str, np.ndarray] = {
            "input_ids": np.asarray(tokens, np.int64)[None],
            "position_ids": np.arange(count, dtype=np.int64)[None],
            OFFSETS: np.array([0, count], np.int32),
            STARTS: np.zeros(1, np.int32),
            BLOCK_TABLE: np.zeros((1, 1), np.int32),
            SLOTS: np.zeros(1, np.int32),
            "logit_positions": np.arange(count, dtype=np.int64),
            GREEDY: np.array(False),
        }
        feeds = {name: value for name, value in feeds.items() if name in io.inputs}
        buffers = [*paged_buffers(io.state, 1, count), *recurrent_buffers(io.state, 1)]
        return feeds | {f"{PAST}.{name}": np.zeros(shape, numpy_element(element)) for name, shape, element in buffers}

    def embedding(self) -> Iterator[FloatArray]:
        """See :meth:`engines.target.Probe.embedding`. Runs the bundle's own graph up to there."""
        model = _until_embedding(onnx.load(str(self._folder / "model.onnx"), load_external_data=False))
        session = open_session(model.SerializeToString(), self._options)
        vocabulary = self._record.io.vocab_size
        for first in range(0, vocabulary, IDS_AT_ONCE):
            ids = np.arange(first, min(first + IDS_AT_ONCE, vocabulary), dtype=np.int64)[None]
            (found,) = session.run(None, {"input_ids": ids})
            yield np.asarray(found, np.float32).reshape(ids.size, -1)


def choice_values(graph: onnx.GraphProto, record: EngineBundle) -> dict[str, str]:
    """The values that hold which experts each token chose, by the down projections of their layers."""
    names = {linear.value: linear.weights[0] for linear in record.linear_outputs}
    nodes = [node for node in graph.node if node.op_type in EXPERTS]
    return {names[node.output[0]]: node.input[CHOICE_INPUT] for node in nodes}


def _bind(binding: ort.IOBinding, feeds: Mapping[str, np.ndarray]) -> None:
    """All inputs of a run, which must outlive it."""
    state = {name.removeprefix(f"{PAST}."): feed for name, feed in feeds.items() if name.startswith(f"{PAST}.")}
    bind_state(binding, state)
    for name, feed in feeds.items():
        if name.removeprefix(f"{PAST}.") not in state:
            binding.bind_cpu_input(name, feed)


def by_head(values: FloatArray, parts: Sequence[int]) -> FloatArray:
    """Columns ``[T, G·W]`` of one part of all G heads after the other, as those of one head after the other.

    >>> by_head(np.array([[0, 3, 1, 2, 4, 5]], np.float32), (1, 2))
    array([[0., 1., 2., 3., 4., 5.]], dtype=float32)
    """
    heads = values.shape[1] // sum(parts)
    apart = np.split(values, np.cumsum(parts)[:-1] * heads, axis=1)
    return np.concatenate([part.reshape(len(values), heads, -1) for part in apart], axis=2).reshape(values.shape)


def _until_embedding(model: onnx.ModelProto) -> onnx.ModelProto:
    """The part of the graph that gathers embeddings by token ids."""
    producers = {name: node for node in model.graph.node for name in node.output}
    gather = next((n for n in model.graph.node if "Gather" in n.op_type and "input_ids" in n.input), None)
    if gather is None:
        raise BuildError(
            "no node of the graph gathers embeddings by input_ids",
            expected="an operator such as Gather or BlockGather",
            remedy="report the model: its embedding cannot be checked",
        )
    nodes, waiting = [gather], list(gather.input)
    while waiting:
        node = producers.get(waiting.pop())
        if node is not None and node not in nodes:
            nodes.insert(0, node)
            waiting += node.input
    needed = {name for node in nodes for name in node.input}
    graph = onnx.helper.make_graph(
        nodes,
        "embedding",
        [i for i in model.graph.input if i.name == "input_ids"],
        [onnx.helper.make_empty_tensor_value_info(gather.output[0])],
        [tensor for tensor in model.graph.initializer if tensor.name in needed],
    )
    return onnx.helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)
