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
from quantization.units import fitted, stored_plainly
from tapeout.artifact import Artifact
from tapeout.portable_graph import PortableGraph
from tapeout.recipe import KVCache, Plan, Recipe, Rule
from tapeout.schemes import Scheme


def quantize_uniformly(
    recipe: Recipe,
    graph: Artifact[PortableGraph],
    calibration: Artifact[Calibration],
    scheme: Scheme,
    folder: Path,
) -> Artifact[QuantizedModel]:
    """Every linear of the layers in ``scheme`` by AWQ; embeddings and KV cache in float. Writes two folders."""
    plan = Plan(
        kernels=(Rule(match="*", **scheme.model_dump()),),
        embeddings=Scheme(bits=32),
        kv_cache=KVCache(dtype="float32"),
    )
    settings = recipe.quantize.model_copy(update={"method": "awq"})
    return quantize(
        recipe.model_copy(update={"quantize": settings, "plan": plan}),
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
        return stored_plainly(fitted(self._scheme, weight.shape[1]), weight)


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
