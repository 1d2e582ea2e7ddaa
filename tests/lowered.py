"""Lowered graphs of small models, as targets that compile for named hardware get them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engines.bundle import LoweredGraph
from engines.compile import build
from engines.load import hardware_target
from quantization import qdq
from quantization.compressed_tensors import open_checkpoint
from tapeout.artifact import Artifact
from tapeout.portable_graph import PortableGraph
from tapeout.quantized import round_to_nearest
from tapeout.schemes import Scheme
from tests.lowering import FixedWeights

SLOTS = 4
LARGEST_INPUT = 8.0  # of every linear group, where activations are quantized


def lowered(graph: Artifact[PortableGraph], folder: Path, precision: str, **changes: Any) -> Artifact[LoweredGraph]:
    """By TensorRT's passes; for ``int4`` with the layers' linears rounded to nearest in symmetric groups."""
    arguments: dict[str, Any] = {
        "target": hardware_target("tensorrt"),
        "precision": precision,
        "slots": SLOTS,
        "kv_scales": {},
        "activation_max": {group.name: LARGEST_INPUT for group in graph.record.groups},
        "qdq": qdq,
        "parents": {"graph": graph},
    }
    weights = four_bits(graph) if precision == "int4" else open_checkpoint(graph.folder)
    return build(graph, weights, folder, **(arguments | changes))


def four_bits(graph: Artifact[PortableGraph]) -> FixedWeights:
    checkpoint = open_checkpoint(graph.folder)
    tensors = {name: checkpoint.linear(name) for name in checkpoint.names()}
    for group in graph.record.groups:
        scheme = Scheme(bits=4, group_size=32, symmetric=True).fitted(group.in_features)
        if group.name != "lm_head":
            tensors |= {name: round_to_nearest(checkpoint.weight(name), scheme) for name in group.members}
    return FixedWeights(tensors)
