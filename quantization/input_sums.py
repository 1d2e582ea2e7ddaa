"""What calibration keeps of the inputs of linears and experts: sums that grow sample by sample (calibration.py).

S  tokens of a sample      K  input channels of a group
E  experts of a layer      n  tokens of a sample that chose one of them
"""

from __future__ import annotations

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
        for block, part in zip(self.gram, inputs.chunk(len(self.gram), 1), strict=True):
            _add_upper(block, part)
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
    from which on an expert needs no inputs of others.
    """

    def __init__(self, experts: int, channels: int, least: tuple[int, int]) -> None:
        blocks = gram_blocks(channels, EXPERT_BLOCK_CHANNELS)
        self.gram = torch.zeros(experts, blocks, channels // blocks, channels // blocks)
        self.mass = torch.zeros(experts, dtype=torch.float64)  # of the tokens in the Gram matrix
        self.visits = torch.zeros(2, experts, dtype=torch.int64)
        self.abs_sum = torch.zeros(experts, channels, dtype=torch.float64)
        self.abs_max = torch.zeros(experts, channels)
        self.least = least
        self.fit: dict[str, Array] = {}  # complete once a held-out sample comes

    def begin(self, *, holdout: bool) -> None:
        """The next sample."""
        if holdout and not self.fit:
            self.fit = self._packed("gram", 0)
            share = self._share(0)[:, None]
            mean_abs = share * self.abs_sum / self.visits[0].clamp_min(1)[:, None]
            mean_abs += (1 - share) * self.abs_sum.sum(0) / self.visits[0].sum()
            max_abs = torch.where(share < 1, self.abs_max.amax(0), self.abs_max)
            self.fit |= {"mean_abs": mean_abs.float().numpy(), "max_abs": max_abs.numpy()}
            self.gram.zero_()
            self.mass.zero_()

    def add(self, expert: int, inputs: Tensor, weight: Tensor, *, holdout: bool) -> None:
        self.visits[int(holdout), expert] += len(inputs)
        self.mass[expert] += weight.square().sum(dtype=torch.float64)
        weighted = inputs * weight[:, None]
        for block, part in zip(self.gram[expert], weighted.chunk(self.gram.shape[1], 1), strict=True):
            _add_upper(block, part)
        if not holdout:
            magnitude = inputs.abs()
            self.abs_sum[expert] += magnitude.sum(0, dtype=torch.float64)
            torch.maximum(self.abs_max[expert], magnitude.amax(0), out=self.abs_max[expert])

    def results(self) -> dict[str, Array]:
        """By name in the statistics file; the sums are used up."""
        return self.fit | self._packed("gram_holdout", 1) | {"visits": self.visits.numpy()}

    def _share(self, part: int) -> Tensor:
        """Of each expert's own inputs in what is kept of it; the rest is the mean over all experts ``[E]``."""
        share = (self.visits[part] / self.least[part]).clamp_max(1.0).double()
        return torch.where(self.mass > 0, share, 0.0)

    def _packed(self, name: str, part: int) -> dict[str, Array]:
        everyone = (self.gram.sum(0) / max(float(self.mass.sum()), _TINY)).float()
        packed: list[tuple[Array, Array]] = []
        for gram, mass, share in zip(self.gram, self.mass.tolist(), self._share(part).tolist(), strict=True):
            mean = gram * (share / max(mass, _TINY))
            if share < 1:
                mean += everyone * (1 - share)
            packed.append(pack_gram(mean.numpy()))
        return {
            name: np.stack([correlation for correlation, _ in packed]),
            f"{name}_power": np.stack([power for _, power in packed]),
        }


def _add_upper(gram: Tensor, inputs: Tensor) -> None:
    """Add ``inputsᵀ inputs`` to the upper triangle of ``gram [k, k]``, in whole blocks; below it is left undefined."""
    for start in range(0, len(gram), GRAM_BLOCK):
        gram[start : start + GRAM_BLOCK, start:].addmm_(inputs[:, start : start + GRAM_BLOCK].T, inputs[:, start:])
