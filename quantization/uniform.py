"""What a compiler for named hardware asks for: every linear in one scheme."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quantization.calibration import Calibration
from quantization.checkpoint import QuantizedModel
from quantization.compressed_tensors import Checkpoint
from quantization.plan_search import write_plan
from quantization.quantize import quantize
from tapeout.artifact import Artifact
from tapeout.portable_graph import PortableGraph
from tapeout.quantized import stored_by_rtn
from tapeout.recipe import KVCache, Plan, Quantize, Rule
from tapeout.schemes import FLOAT, Scheme


def quantize_uniformly(
    settings: Quantize,
    graph: Artifact[PortableGraph],
    calibration: Artifact[Calibration],
    scheme: Scheme,
    folder: Path,
) -> Artifact[QuantizedModel]:
    """Every linear of the layers in ``scheme``, all else in float. Writes two folders."""
    plan = Plan(
        schemes=(Rule(match="*", scheme=scheme),),
        embeddings=FLOAT,
        kv_cache=KVCache(dtype="float32"),
    )
    return quantize(settings, graph, calibration, write_plan(plan, graph, folder / "plan"), folder / "quantized")


class RoundedWeights:
    """A checkpoint whose linears are rounded to nearest as they are read: the graph of a quantized one, in a second."""

    def __init__(self, checkpoint: Checkpoint, scheme: Scheme) -> None:
        self._checkpoint, self._scheme = checkpoint, scheme
        self.weight, self.tensor = checkpoint.weight, checkpoint.tensor

    def linear(self, name: str) -> Any:
        weight = self._checkpoint.weight(name)
        return stored_by_rtn(self._scheme.fitted(weight.shape[1]), weight)
