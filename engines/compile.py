"""Build: a portable graph and a checkpoint's tensors, lowered by the target's passes and written as its artifact."""

from __future__ import annotations

import hashlib
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from engines.bundle import TEXT_FILES, WEIGHTS_FILE, ExpertWeights, IOContract, LoweredRecord, PassReport
from engines.graph_check import check
from engines.kernels.operators import DOMAIN as KERNELS
from engines.kernels.operators import EXPERTS
from engines.passes.base import INLINE_BYTES, QDQ, Lowering, Pass, Weights, defer, dimension
from engines.target import RecordT, Target
from tapeout import artifact
from tapeout.artifact import Artifact, Parents
from tapeout.errors import BuildError
from tapeout.operators import DOMAIN, PAST, graph_state
from tapeout.operators.attention import AttentionNode
from tapeout.operators.experts import CHOICE_INPUT, DOWN_INPUT, share_read
from tapeout.portable_graph import PortableGraph
from tapeout.portable_model import load_graph
from tapeout.progress import ProgressBar
from tapeout.resources import Needs, require
from tapeout.state import LayerState

MODEL_FILE = "model.onnx"
FLOAT_KV_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}  # by float type
CACHE_TYPES = {  # by the dtype of a state's tensor
    "float32": ir.DataType.FLOAT,
    "float16": ir.DataType.FLOAT16,
    "bfloat16": ir.DataType.BFLOAT16,
    "int8": ir.DataType.INT8,
    "int4": ir.DataType.UINT8,
    "fp8": ir.DataType.FLOAT8E4M3FN,
}
BASE_BYTES = 300 << 20  # of memory while weights are written: libraries
# Memory for the largest tensor, in multiples of its stored size:
FLOAT_COPIES = 2  # of a float tensor: its parts, and what they are merged to
CODE_COPIES = 10  # of codes: unpacked, and packed for the kernels; 4.2 GB were measured for an embedding of 0.39 GB
ALIGNMENT_BYTES = 4096  # so that the runtime can map each tensor where it lies


def build(
    graph: Artifact[PortableGraph],
    weights: Weights,
    folder: Path,
    *,
    target: Target[RecordT],
    precision: str,
    slots: int,
    kv_scales: Mapping[str, NDArray[np.float32]],
    kv_dtype: str = "int8",
    recurrent_dtype: str = "float32",
    qdq: QDQ | None = None,
    parents: Parents,
    progress: Callable[[str], None] = lambda _: None,
) -> Artifact[RecordT]:
    """Lower the graph and write it as the target's artifact: a bundle that runs, or what its compiler is given.

    ``kv_scales``: ``layers.N.k_scale|v_scale`` ``[kv_heads, channels]``; empty: float cache. ``kv_dtype``: of the
    codes that the scales are for. ``recurrent_dtype``: of the state of recurrences. ``qdq``: for precisions that need
    it. :class:`BuildError` if the target cannot hold such a cache, or no linear can take the precision.
    """
    lowering = lowering_for(
        target,
        graph,
        weights,
        precision,
        kv_scales=kv_scales,
        kv_dtype=kv_dtype,
        recurrent_dtype=recurrent_dtype,
        qdq=qdq,
    )
    cached = kv_dtype if kv_scales else FLOAT_KV_DTYPES[lowering.float_type]
    state = graph_state(lowering.model.graph, cached, recurrent_dtype)
    reports = lower(lowering, target.passes().every, progress)
    _require_state(lowering.model, state, target.name)
    _require_precision(reports, precision)
    bind_parameters(lowering)
    require("the build", needs(lowering.model), folder.parent, progress)
    with artifact.create(folder, target.artifact_type) as draft:
        progress("writing the weights")
        lowered = _write(lowering, reports, graph, draft.folder, precision=precision, slots=slots, state=state)
        draft.finish(target.complete(lowered, lowering.model, draft.folder), parents=parents)
    return artifact.load(folder, target.artifact_type)


def lowering_for(
    target: Target[RecordT],
    graph: Artifact[PortableGraph],
    weights: Weights,
    precision: str,
    *,
    kv_scales: Mapping[str, NDArray[np.float32]],
    kv_dtype: str = "int8",
    recurrent_dtype: str = "float32",
    qdq: QDQ | None = None,
) -> Lowering:
    """What the target's passes start from.

    :class:`FingerprintError` on a machine that it cannot build on, :class:`BuildError` for a model that it cannot take.
    """
    target.require_machine()
    asked = target.capabilities.precision(precision)
    model = load_graph(graph.folder / MODEL_FILE)
    _require_operators(model, target)
    return Lowering(
        model,
        graph.record,
        weights,
        graph.record.max_positions,
        target.kernels,
        dict(kv_scales),
        kv_dtype,
        recurrent_dtype,
        float_type=asked.float_type,
        precision=precision,
        formats=frozenset(scheme.format for scheme in asked.schemes),
        qdq=qdq,
    )


def lower(lowering: Lowering, passes: Sequence[Pass], progress: Callable[[str], None]) -> tuple[PassReport, ...]:
    """Run the passes in order. The graph is sorted and checked after each; an error names the pass."""
    reports: list[PassReport] = []
    for step in passes:
        name = step.__name__.rpartition(".")[2]
        progress(name)
        before = _count(lowering.model)
        result = step.run(lowering)
        lowering.model.graph.sort()
        check(lowering.model, name)
        reports.append(
            PassReport(
                name=name,
                matched=result.matched,
                declined=result.declined,
                nodes_before=before,
                nodes_after=_count(lowering.model),
            )
        )
    return tuple(reports)


def _count(model: ir.Model) -> int:
    """Nodes, those of branches included."""
    return sum(1 for _ in model.graph.all_nodes())


def _write(
    lowering: Lowering,
    reports: tuple[PassReport, ...],
    graph: Artifact[PortableGraph],
    folder: Path,
    *,
    precision: str,
    slots: int,
    state: tuple[LayerState, ...],
) -> LoweredRecord:
    """Write the lowered graph, its weights and the text files."""
    model = lowering.model
    weight_bytes = write_weights(model, folder / WEIGHTS_FILE)
    ir.save(model, folder / MODEL_FILE)
    copy_text_files(graph.folder, folder)
    return LoweredRecord(
        precision=precision,
        io=IOContract(
            inputs=tuple(i.name or "" for i in model.graph.inputs if not (i.name or "").startswith("past_")),
            state=state,
            max_tokens=graph.record.max_positions,
            slots=slots,
            vocab_size=graph.record.vocab_size,
        ),
        operator_counts=dict(sorted(Counter(n.op_type for n in model.graph.all_nodes()).items())),
        passes=reports,
        weight_bytes=weight_bytes,
        step_bytes=step_bytes(model),
        experts=expert_weights(model),
        plan=dict(sorted(lowering.plan.items())),
        linear_outputs=tuple(lowering.linear_outputs),
        stop_tokens=graph.record.stop_tokens,
    )


def copy_text_files(source: Path, folder: Path) -> None:
    """Copy what tokenizing and chat need beside the engine, as far as the model has it."""
    for name in TEXT_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def bind_parameters(lowering: Lowering) -> None:
    """Give every parameter that is left in the graph its value from the checkpoint: norms, biases, position embeddings.

    Inputs and initializers without a consumer are dropped: position ids, say, once attention applies the rotary
    embedding.
    """
    graph = lowering.model.graph
    for value in list(graph.inputs):
        if not value.uses():
            graph.inputs.remove(value)
    for name, value in list(graph.initializers.items()):
        if not value.uses():
            del graph.initializers[name]
        elif isinstance(value.const_value, ir.ExternalTensor):
            defer(value, partial(lowering.weights.weight, name))


def needs(model: ir.Model) -> Needs:
    """What writing the bundle takes: weights are made one at a time, from codes or floats of a few times their size."""
    tensors = [value.const_value for value in model.graph.initializers.values() if value.const_value is not None]
    working = [t.nbytes * (FLOAT_COPIES if t.dtype == ir.DataType.FLOAT else CODE_COPIES) for t in tensors]
    disk = sum(tensor.nbytes for tensor in tensors)
    return Needs(disk_bytes=disk, memory_bytes=BASE_BYTES + max(working, default=0))


def write_weights(model: ir.Model, path: Path) -> int:
    """Move every large initializer to one file, equal bytes once; returns the file's size."""
    placed: dict[str, int] = {}
    bar = ProgressBar(title="weights", unit="B", total=needs(model).disk_bytes)
    with path.open("wb") as stream, bar:
        for name, value in model.graph.initializers.items():
            tensor = value.const_value
            assert tensor is not None and value.shape is not None
            if tensor.nbytes < INLINE_BYTES:
                continue
            data = _bytes_of(tensor)
            key = hashlib.sha256(data).hexdigest()
            if key not in placed:
                stream.write(b"\0" * (-stream.tell() % ALIGNMENT_BYTES))
                placed[key] = stream.tell()
                stream.write(data)
            bar.update(data.nbytes)
            value.const_value = ir.ExternalTensor(
                path.name,
                placed[key],
                data.nbytes,
                tensor.dtype,
                shape=value.shape,
                name=name,
                base_dir=path.parent,
            )
        return stream.tell()


def _bytes_of(tensor: ir.TensorProtocol) -> memoryview:
    """Without a copy, where elements have whole bytes."""
    if tensor.dtype.bitwidth < 8:
        return memoryview(tensor.tobytes())
    return np.ascontiguousarray(tensor.numpy()).reshape(-1).view(np.uint8).data


def step_bytes(model: ir.Model, tokens: int = 1) -> int:
    """Bytes that a step of so many tokens reads of initializers.

    Gathering from an embedding reads few rows: not counted. Of experts those that a step is expected to choose.
    """
    return round(
        sum(
            value.const_value.nbytes * _share_read(value, tokens)
            for value in model.graph.initializers.values()
            if value.const_value is not None and not all("Gather" in use.node.op_type for use in value.uses())
        )
    )


def _share_read(weight: ir.Value, tokens: int) -> float:
    found = _choice(weight)
    return 1.0 if found is None else share_read(tokens, *found)


def _choice(weight: ir.Value) -> tuple[int, int] | None:
    """Of how many experts a token chooses how many: (chosen, experts). None for what is no weight of theirs."""
    readers = [use.node for use in weight.uses()]
    if not readers or any(node.domain != KERNELS or node.op_type not in EXPERTS for node in readers):
        return None
    index, weights = readers[0].inputs[CHOICE_INPUT], readers[0].inputs[DOWN_INPUT]  # of both operators it is [E, ..]
    assert weights is not None
    experts = dimension(weights, 0)
    chosen = index.shape[1] if index is not None and index.shape is not None else None
    return (chosen, experts) if isinstance(chosen, int) else None


def expert_weights(model: ir.Model) -> tuple[ExpertWeights, ...]:
    found: Counter[tuple[int, int]] = Counter()
    for value in model.graph.initializers.values():
        if value.const_value is not None and (choice := _choice(value)):
            found[choice] += value.const_value.nbytes
    return tuple(
        ExpertWeights(experts=experts, chosen=chosen, weight_bytes=size)
        for (chosen, experts), size in sorted(found.items())
    )


def _require_precision(reports: Sequence[PassReport], precision: str) -> None:
    """:class:`BuildError` where the pass of a precision found no linear for it."""
    own = next((report for report in reports if report.name == f"{precision}_linears"), None)
    if own is not None and not own.matched:
        raise BuildError(
            f"no linear could be lowered to {precision}: {own.declined[0]}",
            expected="at least one",
            remedy="choose --precision fp16, or a checkpoint whose linears fit (docs/targets.md)",
        )


def _require_operators(model: ir.Model, target: Target[RecordT]) -> None:
    """:class:`BuildError` for an operator, or heads of two sizes, that the target does not compute."""
    known = target.capabilities.operators
    used = {node.op_type for node in model.graph.all_nodes() if node.domain == DOMAIN}
    if known is not None and (unknown := sorted(used.difference(known))):
        raise BuildError(
            f"the model has {', '.join(unknown)}, which {target.name} does not compute",
            expected=f"a model whose layers are made of linears, norms and {', '.join(known)}",
            remedy="build for a target that computes them, such as ort-cpu",
        )
    for attention in AttentionNode.all(model.graph):
        if attention.head_size != attention.value_size and not target.capabilities.uneven_heads:
            raise BuildError(
                f"the model has keys of {attention.head_size} channels and values of {attention.value_size}, which "
                f"{target.name} does not compute",
                expected="keys and values of one size",
                remedy="build for a target that computes them, such as ort-cpu",
            )


def _require_state(model: ir.Model, state: Sequence[LayerState], target: str) -> None:
    """:class:`BuildError` where the target's passes made state of another type, or a KV cache of another."""
    wanted = {f"{PAST}.{one.layer}.{tensor.name}": tensor.dtype for one in state for tensor in one.tensors}
    for value in model.graph.inputs:
        dtype = wanted.get(value.name or "", "")
        if dtype and value.dtype != CACHE_TYPES[dtype]:
            raise BuildError(
                f"{value.name} is {value.dtype} after the passes of {target}",
                expected=f"{CACHE_TYPES[dtype]}, for state in {dtype}",
                remedy="set plan.kv_cache.dtype and plan.recurrent_state to float32, or build for a target that has it",
            )
