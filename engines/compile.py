"""Compile: a portable graph and a checkpoint's tensors to an engine bundle, by the target's list of named passes."""

from __future__ import annotations

import hashlib
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from engines.bundle import EngineBundle, IOContract, KVLayer, LoweredRecord, PassReport
from engines.load import fingerprint_here, target_module
from engines.lowered import LoweredGraph
from engines.passes.base import QDQ, Lowering, PassResult, Weights
from tapeout import artifact
from tapeout.artifact import Artifact, Parents
from tapeout.errors import BuildError
from tapeout.portable_graph import PortableGraph

MODEL_FILE = "model.onnx"
WEIGHTS_FILE = "weights.bin"
PRECISIONS = ("fp16", "bf16", "int4", "fp8")
KV_DTYPES = {"fp16": "float16", "bf16": "bfloat16"}
CACHE_TYPES = {"float32": ir.DataType.FLOAT, "int8": ir.DataType.INT8, "int4": ir.DataType.UINT8}  # by kv_dtype
ALIGNMENT_BYTES = 4096  # so that the runtime can map each tensor where it lies
INLINE_BYTES = 1024
TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json", "config.json")


def lower(lowering: Lowering, passes: Sequence[Any], progress: Callable[[str], None]) -> tuple[PassReport, ...]:
    """Run the passes in order; the graph is sorted and checked after each, so that a fault names its pass."""
    reports: list[PassReport] = []
    for step in passes:
        name = step.__name__.rpartition(".")[2]
        progress(name)
        before = sum(1 for _ in lowering.model.graph.all_nodes())
        outcome: PassResult = step.run(lowering)
        lowering.model.graph.sort()
        reports.append(
            PassReport(
                name=name,
                matched=outcome.matched,
                declined=outcome.declined,
                nodes_before=before,
                nodes_after=sum(1 for _ in lowering.model.graph.all_nodes()),
            )
        )
    return tuple(reports)


def build(
    graph: Artifact[PortableGraph],
    weights: Weights,
    folder: Path,
    *,
    target: str,
    precision: str,
    slots: int,
    kv_scales: Mapping[str, NDArray[np.float32]],
    kv_bits: int = 8,
    parents: Parents,
    progress: Callable[[str], None] = lambda _: None,
) -> Artifact[EngineBundle]:
    """Write the bundle. ``kv_scales``: ``layers.N.k_scale|v_scale`` ``[kv_heads, head_size]``; empty: float cache.

    ``kv_bits``: of the codes that the scales are for, 8 or 4. :class:`BuildError` if the target cannot hold them.
    """
    module = target_module(target)
    if hasattr(module, "compile_for"):
        raise BuildError(
            f"{target} compiles for named hardware, which a recipe does not name",
            expected="a target whose lowered graph is what runs, such as ort-cpu",
            remedy=f"`tapeout build --target {target}:…` compiles for it (docs/targets.md)",
        )
    lowering = Lowering(
        ir.load(graph.folder / MODEL_FILE), graph.record, weights, graph.record.max_positions, dict(kv_scales), kv_bits
    )
    reports = lower(lowering, module.PASSES, progress)
    kv_dtype = f"int{kv_bits}" if kv_scales else "float32"
    _require_cache(lowering.model, kv_dtype, target)
    with artifact.create(folder, EngineBundle) as draft:
        lowered = write_lowered(
            lowering,
            reports,
            graph,
            draft.folder,
            precision=precision,
            slots=slots,
            kv_dtype=kv_dtype,
            progress=progress,
        )
        complete: Callable[[ir.Model, Path], None] | None = getattr(module, "complete", None)
        if complete is not None:
            complete(lowering.model, draft.folder)
        draft.finish(
            EngineBundle(**lowered.said(), target=target, fingerprint=fingerprint_here(module)), parents=parents
        )
    return artifact.load(folder, EngineBundle)


def lower_graph(
    graph: Artifact[PortableGraph],
    weights: Weights,
    folder: Path,
    *,
    passes: Sequence[Any],
    precision: str,
    slots: int,
    activation_max: Mapping[str, float],
    qdq: QDQ,
    parents: Parents,
    progress: Callable[[str], None] = lambda _: None,
) -> Artifact[LoweredGraph]:
    """Write what a target compiles for named hardware, lowered by its ``passes``.

    ``activation_max``: largest calibrated ``|x|`` per linear group; needed for ``fp8``. :class:`BuildError` if the
    precision is unknown or no linear of the model can take it.
    """
    if precision not in PRECISIONS:
        raise BuildError(f"precision {precision!r}", expected=f"one of {', '.join(PRECISIONS)}")
    float_type = "bf16" if precision == "bf16" else "fp16"
    lowering = Lowering(
        ir.load(graph.folder / MODEL_FILE),
        graph.record,
        weights,
        graph.record.max_positions,
        float_type=float_type,
        precision=precision,
        activation_max=dict(activation_max),
        qdq=qdq,
    )
    reports = lower(lowering, passes, progress)
    own = next((r for r in reports if r.name == f"{precision}_linears"), None)
    if own is not None and not own.matched:
        raise BuildError(
            f"no linear could be lowered to {precision}: {own.declined[0]}",
            expected="at least one",
            remedy="choose --precision fp16, or a checkpoint whose linears fit (docs/targets.md)",
        )
    with artifact.create(folder, LoweredGraph) as draft:
        lowered = write_lowered(
            lowering,
            reports,
            graph,
            draft.folder,
            precision=precision,
            slots=slots,
            kv_dtype=KV_DTYPES[float_type],
            progress=progress,
        )
        bits = round(bits_per_weight(lowering.model), 4)
        draft.finish(LoweredGraph(**lowered.said(), bits_per_weight=bits), parents=parents)
    return artifact.load(folder, LoweredGraph)


def write_lowered(
    lowering: Lowering,
    reports: tuple[PassReport, ...],
    graph: Artifact[PortableGraph],
    folder: Path,
    *,
    precision: str,
    slots: int,
    kv_dtype: str,
    progress: Callable[[str], None],
) -> LoweredRecord:
    """Write a graph that the passes are done with, its weights and the text files; returns what records say of it."""
    progress("writing the weights")
    model = lowering.model
    bind_parameters(lowering)
    weight_bytes = write_weights(model, folder / WEIGHTS_FILE)
    ir.save(model, folder / MODEL_FILE)
    copy_text_files(graph.folder, folder)
    return LoweredRecord(
        precision=precision,
        io=IOContract(
            inputs=tuple(i.name or "" for i in model.graph.inputs if not (i.name or "").startswith("past_")),
            kv_dtype=kv_dtype,
            kv_layers=kv_layers(model, kv_dtype),
            max_tokens=graph.record.max_positions,
            slots=slots,
            vocab_size=graph.record.vocab_size,
        ),
        census=dict(sorted(Counter(n.op_type for n in model.graph.all_nodes()).items())),
        passes=reports,
        weight_bytes=weight_bytes,
        step_bytes=step_bytes(model),
        plan=dict(sorted(lowering.plan.items())),
        linear_outputs=tuple(lowering.linear_outputs),
        stop_tokens=graph.record.stop_tokens,
    )


def copy_text_files(source: Path, folder: Path) -> None:
    """What text in and text out needs beside the engine, as far as the model has it."""
    for name in TEXT_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def bind_parameters(lowering: Lowering) -> None:
    """Give every parameter the graph still names its value from the checkpoint: norms, biases, position tables.

    What no node reads any more is dropped, inputs too: positions, say, once rotary embedding is inside attention.
    """
    graph = lowering.model.graph
    for value in list(graph.inputs):
        if not value.uses():
            graph.inputs.remove(value)
    for name, value in list(graph.initializers.items()):
        if not value.uses():
            del graph.initializers[name]
        elif isinstance(value.const_value, ir.ExternalTensor):
            value.const_value = ir.tensor(lowering.weights.weight(name), name=name)


def write_weights(model: ir.Model, path: Path) -> int:
    """Move every large initializer to one file, equal bytes once; returns the file's size in bytes."""
    placed: dict[str, int] = {}
    with path.open("wb") as stream:
        for name, value in model.graph.initializers.items():
            tensor = value.const_value
            assert tensor is not None and value.shape is not None
            if tensor.nbytes < INLINE_BYTES:
                continue
            data = tensor.tobytes()
            key = hashlib.sha256(data).hexdigest()
            if key not in placed:
                stream.write(b"\0" * (-stream.tell() % ALIGNMENT_BYTES))
                placed[key] = stream.tell()
                stream.write(data)
            value.const_value = ir.ExternalTensor(
                path.name,
                placed[key],
                len(data),
                tensor.dtype,
                shape=value.shape,
                name=name,
                base_dir=path.parent,
            )
        return stream.tell()


def step_bytes(model: ir.Model) -> int:
    """Bytes of every initializer that a step reads whole; a gathered table gives one row, which is not counted."""
    return sum(
        value.const_value.nbytes
        for value in model.graph.initializers.values()
        if value.const_value is not None and not all("Gather" in use.node.op_type for use in value.uses())
    )


def bits_per_weight(model: ir.Model) -> float:
    """Mean bits of a weight of the products, their scales included, as the graph stores them."""
    size_bytes = values = 0
    for node in model.graph:
        if node.op_type != "MatMul":
            continue
        parts = [node.inputs[1]]
        while (producer := parts[0].producer() if parts[0] is not None else None) is not None:
            parts = list(producer.inputs)  # through a Transpose and a DequantizeLinear
        tensors = [v.const_value for v in parts if v is not None and v.const_value is not None]
        if tensors:
            size_bytes += sum(tensor.nbytes for tensor in tensors)
            values += tensors[0].size
    return 8 * size_bytes / max(values, 1)


def _require_cache(model: ir.Model, kv_dtype: str, target: str) -> None:
    """:class:`BuildError` where the target's passes made no such cache of any layer."""
    for value in model.graph.inputs:
        if (value.name or "").startswith("past_") and value.dtype != CACHE_TYPES[kv_dtype]:
            raise BuildError(
                f"{value.name} is {value.dtype} after the passes of {target}",
                expected=f"{CACHE_TYPES[kv_dtype]}, for a KV cache in {kv_dtype}",
                remedy="set plan.kv_cache.dtype to float32, or build for ort-cpu",
            )


def kv_layers(model: ir.Model, kv_dtype: str) -> tuple[KVLayer, ...]:
    keys = [i for i in model.graph.inputs if (i.name or "").endswith(".key")]
    packed = 2 if kv_dtype == "int4" else 1
    return tuple(
        KVLayer(heads=int(k.shape[1]), head_size=packed * int(k.shape[3]))  # type: ignore[arg-type]
        for k in keys
        if k.shape is not None
    )
