"""Lowered graphs of small models, as targets that compile for named hardware get them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
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
from tapeout.schemes import FLOAT, FP8, Scheme
from tests.lowering import FixedWeights

SLOTS = 4
LARGEST_INPUT = 8.0  # of every linear group, where activations are quantized
INT4 = Scheme(bits=4, group_size=32, symmetric=True)
SCHEMES = {"int4": {"*": INT4}, "fp8": {"*": FP8}, "auto": {"o": FLOAT, "down": FP8, "*": INT4}}


def lowered(graph: Artifact[PortableGraph], folder: Path, precision: str, **changes: Any) -> Artifact[LoweredGraph]:
    """By TensorRT's passes, with the layers' linears rounded to nearest as ``SCHEMES`` says."""
    arguments: dict[str, Any] = {
        "target": hardware_target("tensorrt"),
        "precision": precision,
        "slots": SLOTS,
        "kv_scales": {},
        "qdq": qdq,
        "parents": {"graph": graph},
    }
    weights = changes.pop("weights", None) or FixedWeights(rounded(graph, SCHEMES.get(precision, {})))
    return build(graph, weights, folder, **(arguments | changes))


def rounded(graph: Artifact[PortableGraph], schemes: Mapping[str, Scheme]) -> dict[str, Any]:
    """Tensors by name, linears of the layers rounded to nearest. ``schemes``: by what each is for, or under ``*``."""
    checkpoint = open_checkpoint(graph.folder)
    tensors: dict[str, Any] = {name: checkpoint.linear(name) for name in checkpoint.names()}
    for group in graph.record.groups:
        scheme = schemes.get(group.name.rpartition(".")[2], schemes.get("*", FLOAT)).fitted(group.in_features)
        if group.name != "lm_head" and scheme != FLOAT:
            found = {name: round_to_nearest(checkpoint.weight(name), scheme) for name in group.members}
            if scheme == FP8:
                found = {name: replace(linear, input_scale=LARGEST_INPUT / 448) for name, linear in found.items()}
            tensors |= found
    return tensors
