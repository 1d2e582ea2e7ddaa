"""The state that an exported graph keeps, as a check fills it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from tapeout.operators import PAST, OperatorNode
from tapeout.state import Paged, StateTensor

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class KeptTensor:
    """A tensor of a graph's state, and the node that keeps it. ``grows``: it has a value for each token."""

    node: OperatorNode
    tensor: StateTensor
    grows: bool

    @property
    def name(self) -> str:
        return f"{PAST}.{self.node.layer}.{self.tensor.name}"

    def shape(self, tokens: int) -> tuple[int, ...]:
        """As the graph has it, without the batch: positions come before the last dimension."""
        *outer, last = self.tensor.shape
        return (*outer, tokens, last) if self.grows else (*outer, last)


def kept_tensors(nodes: Sequence[OperatorNode]) -> dict[str, KeptTensor]:
    """By the graph's name."""
    found = [
        KeptTensor(node, tensor, isinstance(state, Paged))
        for node in nodes
        if (state := node.state("float32"))
        for tensor in state.tensors
    ]
    return {each.name: each for each in found}


class RandomState:
    """What tokens before may have left: random values, as large as their operators say.

    ``seen``: the model's own, by the graph's name, from when the first of them is read.
    """

    def __init__(self, kept: Mapping[str, KeptTensor], longest: int, seed: int, seen: Mapping[str, Floats]) -> None:
        self.kept, self.longest, self.seed, self._seen = kept, longest, seed, seen
        self._noise = lru_cache(2)(self._draw)  # keys and values of one layer

    def one(self, name: str, length: int) -> Floats:
        """Of one sequence, by the graph's name, after ``length`` tokens: as the graph has it, with a batch of 1."""
        each, noise = self.kept[name], self._noise(name)
        if each.grows:
            noise = noise[..., :length, :]
        scale = each.node.operator.scale(each.node.node, each.tensor.name, self._seen[name], length)
        return noise * np.float32(scale)

    def padded(self, name: str, lengths: Sequence[int]) -> Floats:
        """Of a batch, with padding on the left."""
        entries = [self.one(name, length) for length in lengths]
        if self.kept[name].grows:
            sides = [(0, 0)] * (entries[0].ndim - 2)
            entries = [np.pad(entry, [*sides, (max(lengths) - entry.shape[-2], 0), (0, 0)]) for entry in entries]
        return np.concatenate(entries)

    def _draw(self, name: str) -> Floats:
        each, number = self.kept[name], list(self.kept).index(name)
        generator = np.random.default_rng((self.seed, number))
        return generator.standard_normal((1, *each.shape(self.longest)), np.float32)
