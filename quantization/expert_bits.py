"""Experts of a layer in bits of their own: what each costs in quality, and which of them are worth more bits.

A layer's experts are one unit of a plan, whose KL under a scheme is measured as a whole. How much of it each expert
makes is told by what its rounding changes of the layer's output: the relative output error of its projection, times the
energy of what it adds to the residual stream, times how many tokens chose it. An expert that is chosen often is worth
more bits for that. It also is read in more steps, so what its bits cost in time is counted by the same visits
(``cost_table.py``): at one stream both cancel out, at many, and in bytes, rare experts get fewer bits.

E  experts      S  schemes
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from quantization.calibration import Calibration
from quantization.compressed_tensors import Checkpoint
from quantization.cost_table import visits_of
from quantization.output_error import output_error
from quantization.statistics import read_statistics
from quantization.units import kind_of, out_by_in
from tapeout.artifact import Artifact
from tapeout.operators.experts import DOWN_INPUT, UNITS
from tapeout.portable_graph import LinearGroup, PortableGraph
from tapeout.quantized import QuantizedWeight
from tapeout.schemes import Scheme

MIXTURES = 8  # of the schemes of one group size: points between all experts in the fewest bits and all in the most
_TINY = 1e-30  # added to an energy, which may be zero
Shares = NDArray[np.float64]  # [E]


class ExpertErrors:
    """What rounded experts of one group change, each by itself. Experts are read one by one."""

    def __init__(
        self, group: LinearGroup, graph: PortableGraph, calibration: Artifact[Calibration], source: Checkpoint
    ) -> None:
        self._group, self._calibration, self._source = group, calibration, source
        layer = next(layer for layer in calibration.record.visits if group.name in layer.groups)
        down = next(
            other for other in graph.groups if other.name in layer.groups and kind_of(other) == UNITS[DOWN_INPUT]
        )
        visits = np.maximum(visits_of(calibration.record)[group.name], 1)
        added = [self._energy(down, expert) for expert in range(group.experts)]
        self._importance = visits * added / np.array([self._energy(group, e) + _TINY for e in range(group.experts)])

    def shares(self, rounded: QuantizedWeight) -> Shares:
        """Of what rounding to one scheme changes in the output of the layer, by expert; together 1.

        Where nothing changes, all have the same.
        """
        errors = np.array([self._error(rounded, expert) for expert in range(self._group.experts)]) * self._importance
        return errors / errors.sum() if errors.sum() > 0 else np.full(self._group.experts, 1 / self._group.experts)

    def _error(self, rounded: QuantizedWeight, expert: int) -> float:
        gram = read_statistics(self._calibration, self._group, expert).holdout
        return output_error(rounded.part(expert).dequantize() - self._weight(self._group, expert), gram)

    def _energy(self, group: LinearGroup, expert: int) -> float:
        return output_error(self._weight(group, expert), read_statistics(self._calibration, group, expert).holdout)

    def _weight(self, group: LinearGroup, expert: int) -> NDArray[np.float32]:
        return out_by_in(self._source.part(group.members[0], expert), group)


def mixtures(
    schemes: Sequence[Scheme], kl: Mapping[str, Sequence[float]], prices: Sequence[Mapping[str, Sequence[float]]]
) -> dict[Scheme, float]:
    """Schemes of experts that differ in bits, and their KL: for one price or another, no other assignment of as little
    KL is cheaper.

    ``schemes``: that all experts may have, fitted. ``kl`` and each of ``prices``, by the name of a scheme: of each
    expert.
    """
    found: dict[str, tuple[Scheme, float]] = {}
    families: dict[tuple[int | None, bool, bool], list[Scheme]] = {}
    for scheme in schemes:
        if scheme.format == f"int{scheme.bits}":
            families.setdefault((scheme.group_size, scheme.symmetric, scheme.positive_scales), []).append(scheme)
    for family in (sorted(family, key=lambda scheme: scheme.bits) for family in families.values()):
        losses = np.array([kl[scheme.name] for scheme in family])
        for price in prices:
            for chosen in _assignments(losses, np.array([price[scheme.name] for scheme in family])):
                mixed = Scheme.of_experts([family[index] for index in chosen])
                assert mixed is not None, "a family differs in bits alone"
                if mixed.expert_bits:
                    loss = float(losses[chosen, np.arange(len(chosen))].sum())
                    found.setdefault(mixed.name, (mixed, loss))
    return dict(found.values())


def _assignments(losses: NDArray[np.float64], prices: NDArray[np.float64]) -> list[NDArray[np.int64]]:
    """For some exchange rates of loss for price, the row of each expert, of the least loss plus rate times price.

    ``losses`` and ``prices`` are ``[S, E]``. Of two rows that are as good, the first.
    """
    rates = [
        (losses[low] - losses[high]) / (prices[high] - prices[low])
        for low in range(len(losses))
        for high in range(low + 1, len(losses))
        if (prices[high] > prices[low]).all()
    ]
    turns = np.unique(np.concatenate([rate[rate > 0] for rate in rates])) if rates else np.empty(0)
    between = np.sqrt(turns[1:] * turns[:-1])
    picked = between[np.unique(np.linspace(0, len(between) - 1, MIXTURES).round().astype(int))] if len(between) else []
    return [(losses + rate * prices).argmin(axis=0) for rate in picked]
