"""What a compiler for named hardware asks for: every linear in one scheme, or the calibrated range of its input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from quantization.calibration import Calibration, statistics_file
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
    """Every linear of the layers in ``scheme`` by the default search, all else in float. Writes two folders."""
    plan = Plan(
        schemes=(Rule(match="*", scheme=scheme),),
        embeddings=FLOAT,
        kv_cache=KVCache(dtype="float32"),
    )
    return quantize(
        Quantize(scale_grid=settings.scale_grid),
        graph,
        calibration,
        write_plan(plan, graph, folder / "plan"),
        folder / "quantized",
    )


class RoundedWeights:
    """A checkpoint whose linears are rounded to nearest as they are read: the graph of a quantized one, in a second."""

    def __init__(self, checkpoint: Checkpoint, scheme: Scheme) -> None:
        self._checkpoint, self._scheme = checkpoint, scheme
        self.weight, self.tensor = checkpoint.weight, checkpoint.tensor

    def linear(self, name: str) -> Any:
        weight = self._checkpoint.weight(name)
        return stored_by_rtn(self._scheme.fitted(weight.shape[1]), weight)


def largest_inputs(calibration: Artifact[Calibration], graph: PortableGraph) -> dict[str, float]:
    """Largest calibrated ``|x|`` of the input of each linear group that was calibrated."""
    largest: dict[str, float] = {}
    for group in graph.groups:
        name = f"{group.name}.max_abs"
        with safe_open(calibration.folder / statistics_file(group.name), framework="numpy") as statistics:
            if name in statistics.keys():  # noqa: SIM118
                values: NDArray[np.float32] = statistics.get_tensor(name)
                largest[group.name] = float(values.max())
    return largest
