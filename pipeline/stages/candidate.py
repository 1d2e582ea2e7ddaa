"""The candidate: the quantized model, built for a target whose lowered graph is what runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from engines.bundle import EngineBundle
from engines.compile import build
from engines.target import GraphTarget, Target
from pipeline.stages.target_candidates import FLOAT_CACHE
from quantization.checkpoint import KVScales, QuantizedModel
from quantization.compressed_tensors import open_checkpoint
from tapeout.artifact import Artifact
from tapeout.errors import BuildError
from tapeout.portable_graph import PortableGraph
from tapeout.schemes import Scheme


def require_computed(target: Target[Any], schemes: Iterable[Scheme]) -> None:
    """:class:`BuildError` for linears whose inputs are rounded as the target does not."""
    computed = target.capabilities.activations
    refused = sorted({scheme.name for scheme in schemes if scheme.activations not in computed})
    if refused:
        raise BuildError(
            f"linears in {', '.join(refused)}, which {target.name} does not compute",
            expected=f"activations in {' or '.join(computed)}",
            remedy="choose other schemes in plan.schemes, or build for a target that has them (docs/targets.md)",
        )


def require_cache(target: Target[Any], dtype: str) -> None:
    """:class:`BuildError` for a quantized KV cache of a type that the target does not have."""
    kept = (FLOAT_CACHE, *(one for one in target.capabilities.kv_dtypes if "float" not in one))
    if dtype not in kept:
        raise BuildError(
            f"a KV cache in {dtype}, which {target.name} does not have",
            expected=f"one of {', '.join(kept)}",
            remedy="choose another plan.kv_cache.dtype, or build for a target that has it (docs/targets.md)",
        )


def build_candidate(
    graph: Artifact[PortableGraph],
    quantized: Artifact[QuantizedModel],
    folder: Path,
    *,
    target: GraphTarget,
    slots: int,
    progress: Callable[[str], None],
) -> Artifact[EngineBundle]:
    require_computed(target, [linear.scheme for linear in quantized.record.linears])
    require_cache(target, quantized.record.kv_cache.dtype)
    kv = KVScales.read(quantized.folder)
    return build(
        graph,
        open_checkpoint(quantized.folder),
        folder,
        target=target,
        precision=quantized.record.summary,
        slots=slots,
        kv_scales=kv.scales,
        kv_dtype=kv.dtype,
        recurrent_dtype=quantized.record.recurrent_state,
        parents={"graph": graph, "quantized": quantized},
        progress=progress,
    )
