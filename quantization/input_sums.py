"""What calibration keeps of the inputs of linears and experts: sums that grow sample by sample (calibration.py).

S  tokens of a sample      K  input channels of a group
E  experts of a layer      n  tokens of a sample that chose one of them
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quantization.calibration import EXPERT_BLOCK_CHANNELS, gram_blocks
from quantization.statistics import Array, pack_gram

GRAM_BLOCK = 256  # a Gram matrix is summed in row blocks from the diagonal on: 5/8 of the work at 1,024 channels
_TINY = 1e-30  # below any sum of squared routing weights


class GroupSums:
    """Running sums over the inputs ``[S, K]`` of one linear group; those of held-out samples follow all others."""

    def __init__(self, channels: int) -> None:
        blocks = gram_blocks(channels)
        self.gram = torch.zeros(blocks, channels // blocks, channels // blocks)
        self.abs_sum = torch.zeros(channels, dtype=torch.float64)
        self.abs_max = torch.zeros(channels)
        self.tokens = 0
        self.fit: dict[str, Array] = {}  # complete once a held-out sample comes

    def add(self, inputs: Tensor, *, holdout: bool) -> None:
        if holdout and not self.fit:
            self.fit = {
                **self._packed("gram"),
                "mean_abs": (self.abs_sum / self.tokens).float().numpy(),
                "max_abs": self.abs_max.numpy(),
            }
            self.gram.zero_()
            self.tokens = 0
        self.tokens += len(inputs)
        _add_in_blocks(self.gram, inputs)
        if not holdout:
            magnitude = inputs.abs()
            self.abs_sum += magnitude.sum(0, dtype=torch.float64)
            torch.maximum(self.abs_max, magnitude.amax(0), out=self.abs_max)

    def results(self) -> dict[str, Array]:
        """By name in the statistics file; the sums are used up."""
        return self.fit | self._packed("gram_holdout")

    def _packed(self, name: str) -> dict[str, Array]:
        correlation, power = pack_gram(self.gram.div_(self.tokens).numpy())
        return {name: correlation, f"{name}_power": power}


class ExpertSums:
    """Running sums over the inputs ``[n, K]`` of the experts of one group.

    Tokens count by the square of their routing weight. ``least``: visits in the fit samples, and in the held-out ones,
    from which on an expert needs no stand-ins: tokens that did not choose it. Where each expert reads inputs of its
    own, :meth:`add_stand_ins` gets what it would have read of some of them. Without, all experts read the same, and
    those of all others together stand in.
    """

    def __init__(self, experts: int, channels: int, least: tuple[int, int]) -> None:
        blocks = gram_blocks(channels, EXPERT_BLOCK_CHANNELS)
        self.gram = torch.zeros(experts, blocks, channels // blocks, channels // blocks)
        self.mass = torch.zeros(experts, dtype=torch.float64)  # of the tokens in the Gram matrix
        self.visits = torch.zeros(2, experts, dtype=torch.int64)
        self.abs_sum = torch.zeros(experts, channels, dtype=torch.float64)
        self.abs_max = torch.zeros(experts, channels)
        self.least = least
        self.stand_ins: dict[int, _StandIns] = {}
        self.fit: dict[str, Array] = {}  # complete once a held-out sample comes

    def begin(self, *, holdout: bool) -> None:
        """The next sample."""
        if holdout and not self.fit:
            self.fit = self._packed("gram", 0)
            self.fit |= self._magnitudes()
            self.gram.zero_()
            self.mass.zero_()
            self.stand_ins.clear()

    def add(self, expert: int, inputs: Tensor, weight: Tensor, *, holdout: bool) -> None:
        self.visits[int(holdout), expert] += len(inputs)
        self.mass[expert] += weight.square().sum(dtype=torch.float64)
        _add_in_blocks(self.gram[expert], inputs * weight[:, None])
        if not holdout:
            magnitude = inputs.abs()
            self.abs_sum[expert] += magnitude.sum(0, dtype=torch.float64)
            torch.maximum(self.abs_max[expert], magnitude.amax(0), out=self.abs_max[expert])

    def starved(self, *, holdout: bool) -> list[int]:
        """Experts with too few visits so far."""
        return torch.where(self.visits[int(holdout)] < self.least[int(holdout)])[0].tolist()

    def add_stand_ins(self, expert: int, inputs: Tensor) -> None:
        """``inputs [n, K]`` that tokens which did not choose the expert would have given it."""
        found = self.stand_ins.get(expert)
        if found is None:
            gram, abs_sum, abs_max = (
                torch.zeros_like(sums[expert]) for sums in (self.gram, self.abs_sum, self.abs_max)
            )
            found = self.stand_ins[expert] = _StandIns(gram, abs_sum, abs_max)
        _add_in_blocks(found.gram, inputs)
        magnitude = inputs.abs()
        found.abs_sum += magnitude.sum(0, dtype=torch.float64)
        torch.maximum(found.abs_max, magnitude.amax(0), out=found.abs_max)
        found.tokens += len(inputs)

    def results(self) -> dict[str, Array]:
        """By name in the statistics file; the sums are used up."""
        return self.fit | self._packed("gram_holdout", 1) | {"visits": self.visits.numpy()}

    def _share(self, part: int) -> Tensor:
        """Of each expert's own inputs in what is kept of it; the rest is that of stand-ins ``[E]``."""
        share = (self.visits[part] / self.least[part]).clamp_max(1.0).double()
        return torch.where(self.mass > 0, share, 0.0)

    def _magnitudes(self) -> dict[str, Array]:
        share = self._share(0)[:, None]
        others_mean = (self.abs_sum.sum(0) / self.visits[0].sum()).expand_as(self.abs_sum).clone()
        others_max = self.abs_max.amax(0).expand_as(self.abs_max).clone()
        for expert, found in self.stand_ins.items():
            others_mean[expert] = found.abs_sum / found.tokens
            others_max[expert] = torch.maximum(found.abs_max, self.abs_max[expert])
        mean = share * self.abs_sum / self.visits[0].clamp_min(1)[:, None] + (1 - share) * others_mean
        largest = torch.where(share < 1, others_max, self.abs_max)
        return {"mean_abs": mean.float().numpy(), "max_abs": largest.numpy()}

    def _packed(self, name: str, part: int) -> dict[str, Array]:
        everyone = (self.gram.sum(0) / max(float(self.mass.sum()), _TINY)).float()
        packed: list[tuple[Array, Array]] = []
        sums = zip(self.gram, self.mass.tolist(), self._share(part).tolist(), strict=True)
        for expert, (gram, mass, share) in enumerate(sums):
            mean = gram * (share / max(mass, _TINY))
            if share < 1:
                found = self.stand_ins.get(expert)
                mean += (1 - share) * (everyone if found is None else found.gram / found.tokens)
            packed.append(pack_gram(mean.numpy()))
        return {
            name: np.stack([correlation for correlation, _ in packed]),
            f"{name}_power": np.stack([power for _, power in packed]),
        }


@dataclass
class _StandIns:
    """Sums over the inputs of tokens that did not choose an expert."""

    gram: Tensor
    abs_sum: Tensor
    abs_max: Tensor
    tokens: int = 0


def _add_in_blocks(blocks: Tensor, inputs: Tensor) -> None:
    """To the Gram matrix ``[B, k, k]`` of inputs ``[n, B k]``."""
    for block, part in zip(blocks, inputs.chunk(len(blocks), 1), strict=True):
        _add_upper(block, part)


def _add_upper(gram: Tensor, inputs: Tensor) -> None:
    """Add ``inputsᵀ inputs`` to the upper triangle of ``gram [k, k]``, in whole blocks; below it is left undefined."""
    for start in range(0, len(gram), GRAM_BLOCK):
        gram[start : start + GRAM_BLOCK, start:].addmm_(inputs[:, start : start + GRAM_BLOCK].T, inputs[:, start:])
