"""Bundles of ``ort-cuda`` for tests: a family in float, or with quantized weights and keys and values."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engines.bundle import EngineBundle
from engines.compile import build
from engines.load import find_target
from engines.passes.base import Weights
from quantization.compressed_tensors import open_checkpoint
from tapeout.artifact import Artifact
from tapeout.portable_graph import PortableGraph
from tapeout.quantized import QuantizedWeight, round_to_nearest
from tapeout.schemes import Scheme
from tests.exported import family_graph
from tests.lowering import FixedWeights

KV_SCALE = 0.03  # of every channel: keys and values of these models lie within 127 times that


def cuda_bundle(
    family: str, folder: Path, weights: Weights | None = None, *, int8_cache: bool = False, target: str = "ort-cuda"
) -> Artifact[EngineBundle]:
    """``weights``: the family's own floats unless given. ``target``: another one, to compare with."""
    graph = family_graph(family)
    return build(
        graph,
        weights or open_checkpoint(graph.folder),
        folder,
        target=find_target(target),
        precision="test",
        slots=8,
        kv_scales=kv_scales(graph) if int8_cache else {},
        parents={"graph": graph},
    )


def kv_scales(graph: Artifact[PortableGraph]) -> dict[str, NDArray[np.float32]]:
    shape = (graph.record.kv_heads, graph.record.head_size)
    return {
        f"layers.{layer}.{part}_scale": np.full(shape, KV_SCALE, np.float32)
        for layer in range(graph.record.layers)
        for part in "kv"
    }


def rounded(family: str, **of_layers: Scheme) -> tuple[FixedWeights, FixedWeights]:
    """The family's weights with the linears of groups in schemes, by the end of the groups' names; and decoded."""
    graph = family_graph(family)
    checkpoint = open_checkpoint(graph.folder)
    tensors = {name: checkpoint.linear(name) for name in checkpoint.names()}
    for group in graph.record.groups:
        scheme = of_layers.get(group.name.rpartition(".")[2])
        if scheme is not None:
            fitted = scheme.fitted(group.in_features)
            tensors |= {name: round_to_nearest(checkpoint.weight(name), fitted) for name in group.members}
    decoded = {n: t.dequantize() if isinstance(t, QuantizedWeight) else t for n, t in tensors.items()}
    return FixedWeights(tensors), FixedWeights(decoded)
