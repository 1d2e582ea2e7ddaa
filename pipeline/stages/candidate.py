"""The candidate: the quantized model, built for a target whose lowered graph is what runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from engines.bundle import EngineBundle
from engines.compile import build
from engines.target import GraphTarget
from quantization.checkpoint import KVScales, QuantizedModel
from quantization.compressed_tensors import open_checkpoint
from tapeout.artifact import Artifact
from tapeout.portable_graph import PortableGraph


def build_candidate(
    graph: Artifact[PortableGraph],
    quantized: Artifact[QuantizedModel],
    folder: Path,
    *,
    target: GraphTarget,
    slots: int,
    progress: Callable[[str], None],
) -> Artifact[EngineBundle]:
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
