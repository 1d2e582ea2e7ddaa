"""What all choices of a plan cost together: quantized at once and measured, as a sum of sensitivities may be wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from tempfile import TemporaryFile
from typing import TYPE_CHECKING

import numpy as np

from quantization.calibration import Calibration
from quantization.needs import simulation_needs
from quantization.plan import EMBEDDINGS, KV_CACHE
from quantization.units import UnitCandidates
from tapeout.artifact import Artifact
from tapeout.portable_graph import PortableGraph
from tapeout.progress import ProgressBar
from tapeout.quantized import QuantizedWeight
from tapeout.recipe import Quantize
from tapeout.resources import require
from tapeout.schemes import FLOAT, Scheme

if TYPE_CHECKING:
    from quantization.simulate import Simulated


class WholePlan:
    """What all choices of a plan cost together."""

    def __init__(
        self,
        settings: Quantize,
        graph: Artifact[PortableGraph],
        calibration: Artifact[Calibration],
        offered: UnitCandidates,
        samples: Sequence[Sequence[int]],
    ) -> None:
        from quantization.quick_rounding import QuickRounding
        from quantization.simulate import POSITIONS, Simulation

        self._candidates = offered
        self._rounding = QuickRounding(graph, calibration, settings)
        tokens, positions = len(samples) * max(map(len, samples)), POSITIONS * len(samples)
        needs = simulation_needs(graph.record, [*offered.units.values()], tokens, positions, plans=True)
        require("measuring plans as a whole", needs, graph.folder)
        self._simulation = Simulation(graph, samples, (), int8_inputs=offered.int8_inputs)
        self._disk = graph.folder.parent
        self._rounded: dict[str, tuple[str, dict[str, Simulated]]] = {}  # by unit: a scheme, and groups under it

    def kl(self, chosen: Mapping[str, str]) -> float:
        """Of the name of what each unit gets; what was rounded last is kept for a plan that differs in some units."""
        for name in ProgressBar(self._candidates.schemes, title="rounding the whole plan", unit="unit"):
            if self._rounded.get(name, ("",))[0] != chosen[name]:
                self._rounded[name] = (chosen[name], self._groups(name, self._candidates.scheme(name, chosen[name])))
        changed = {name: group for _, groups in self._rounded.values() for name, group in groups.items()}
        return self._simulation.kl(changed, kv=self._rounding.kv_cache(self._candidates.cache(chosen[KV_CACHE])))

    def _groups(self, unit: str, scheme: Scheme) -> dict[str, Simulated]:
        if unit == EMBEDDINGS:
            return self._rounding.embeddings(scheme)
        if scheme == FLOAT:
            return {}
        found = self._rounding.rounded(self._rounding.prepare(self._candidates.units[unit].groups), scheme)
        return self._on_disk(found)

    def _on_disk(self, groups: Mapping[str, Simulated]) -> dict[str, Simulated]:
        """The same, all codes in one mapped file without a name: those of a whole plan may not fit the memory."""
        with TemporaryFile(dir=self._disk) as file:
            for group in groups.values():
                for linear in group.linears:
                    linear.codes.tofile(file)
            held = np.memmap(file, np.uint8, "r")
        at = 0
        mapped: dict[str, Simulated] = {}
        for name, group in groups.items():
            linears: list[QuantizedWeight] = []
            for linear in group.linears:
                codes = held[at : at + linear.codes.nbytes].view(linear.codes.dtype).reshape(linear.codes.shape)
                linears.append(replace(linear, codes=codes))
                at += codes.nbytes
            mapped[name] = replace(group, linears=tuple(linears))
        return mapped
