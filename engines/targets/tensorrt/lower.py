"""From a portable graph and a checkpoint to a LoweredGraph: strongly typed, fixed KV buffers, Q/DQ where asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import onnx_ir as ir

from engines.compile import MODEL_FILE, lower, write_lowered
from engines.lowered import LoweredGraph
from engines.passes.base import Lowering, Weights
from engines.targets.tensorrt import PASSES
from pipeline import artifact
from pipeline.artifact import Artifact
from pipeline.errors import BuildError
from pipeline.graph import PortableGraph

PRECISIONS = ("fp16", "bf16", "int4", "fp8")
KV_DTYPES = {"fp16": "float16", "bf16": "bfloat16"}


def lower_graph(
    graph: Artifact[PortableGraph],
    weights: Weights,
    folder: Path,
    *,
    precision: str,
    slots: int,
    activation_max: Mapping[str, float],
    parents: dict[str, str],
    progress: Callable[[str], None] = lambda _: None,
) -> Artifact[LoweredGraph]:
    """Write the LoweredGraph. ``activation_max``: largest calibrated ``|x|`` per linear group; needed for ``fp8``.

    :class:`BuildError` if the precision is unknown or no linear of the model can take it.
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
    )
    reports = lower(lowering, PASSES, progress)
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
