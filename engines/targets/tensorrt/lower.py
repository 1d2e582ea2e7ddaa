"""From a portable graph and a checkpoint to a LoweredGraph: strongly typed, fixed KV buffers, Q/DQ where asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import onnx_ir as ir

from engines.bundle import IOContract
from engines.compile import (
    MODEL_FILE,
    TEXT_FILES,
    WEIGHTS_FILE,
    bind_parameters,
    kv_layers,
    lower,
    step_bytes,
    write_weights,
)
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
    model_name: str,
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
    model = ir.load(graph.folder / MODEL_FILE)
    float_type = "bf16" if precision == "bf16" else "fp16"
    lowering = Lowering(
        model,
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
            f"no linear of {model_name} could be lowered to {precision}: {own.declined[0]}",
            expected="at least one",
            remedy="choose --precision fp16, or a checkpoint whose linears fit (docs/targets.md)",
        )
    bind_parameters(lowering)
    with artifact.create(folder, LoweredGraph) as draft:
        progress("writing the weights")
        weight_bytes = write_weights(model, draft.folder / WEIGHTS_FILE)
        ir.save(model, draft.folder / MODEL_FILE)
        for name in TEXT_FILES:
            if (graph.folder / name).is_file():
                (draft.folder / name).write_bytes((graph.folder / name).read_bytes())
        draft.finish(
            LoweredGraph(
                precision=precision,
                model_name=model_name,
                io=IOContract(
                    inputs=tuple(i.name or "" for i in model.graph.inputs if not (i.name or "").startswith("past_")),
                    kv_dtype=KV_DTYPES[float_type],
                    kv_layers=kv_layers(model),
                    max_tokens=graph.record.max_positions,
                    slots=slots,
                    vocab_size=graph.record.vocab_size,
                ),
                census=dict(sorted(Counter(n.op_type for n in model.graph).items())),
                passes=reports,
                weight_bytes=weight_bytes,
                bits_per_weight=round(bits_per_weight(model), 4),
                step_bytes=step_bytes(model),
                plan=dict(sorted(lowering.plan.items())),
                products=tuple(lowering.products),
                stop_tokens=graph.record.stop_tokens,
            ),
            parents=parents,
        )
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
