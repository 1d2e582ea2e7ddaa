"""The candidate: the quantized model, built for a target whose lowered graph is what runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from engines.bundle import EngineBundle
from engines.compile import build
from engines.target import GraphTarget, Target
from quantization.checkpoint import KVScales, QuantizedModel
from quantization.compressed_tensors import open_checkpoint
from quantization.kv_cache import BITS
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


def require_kept(target: Target[Any], dtype: str) -> None:
    """:class:`BuildError` for keys and values in codes that the target does not read."""
    known = [known for known in target.capabilities.kv_dtypes if known in BITS]
    if dtype in BITS and dtype not in known:
        raise BuildError(
            f"plan.kv_cache.dtype: {dtype}, which {target.name} does not keep",
            expected=" or ".join(("float32", *known)),
            remedy="choose another plan.kv_cache.dtype, or build for a target that has it (docs/targets.md)",
        )


def require_recurrent(target: Target[Any], dtype: str) -> None:
    """:class:`BuildError` for a type of recurrent state that the target does not have; ``auto`` takes what it has."""
    known = target.capabilities.recurrent_dtypes
    if dtype not in ("auto", *known):
        raise BuildError(
            f"plan.recurrent_state: {dtype}, which {target.name} does not keep",
            expected=" or ".join((*known, "auto")),
            remedy="leave plan.recurrent_state out, or build for a target that has it (docs/targets.md)",
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
    require_kept(target, quantized.record.kv_cache.dtype)
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
