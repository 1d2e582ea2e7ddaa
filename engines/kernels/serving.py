"""What a server takes from a target beside the engine: a kernel that chooses tokens, and counts of clipped values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

from engines.bundle import EngineBundle
from engines.kernels.sampling import Sampler
from tapeout.artifact import Artifact


class ValueCounts(NamedTuple):
    """``clipped`` of the ``stored`` values lay beyond what their scale reaches."""

    stored: int = 0
    clipped: int = 0

    def since(self, before: ValueCounts) -> ValueCounts:
        return ValueCounts(self.stored - before.stored, self.clipped - before.clipped)


class Clipping(NamedTuple):
    """Values that an engine stored on static grids, and how many of them the grids clipped.

    The scales are those of calibration. Other text may have larger keys, values and activations, which are then stored
    as the largest code that there is.

    ``kv``: of a KV cache in int8 or int4. ``activations``: of linears with static int8 inputs.
    """

    kv: ValueCounts = ValueCounts()
    activations: ValueCounts = ValueCounts()

    def since(self, before: Clipping) -> Clipping:
        return Clipping(self.kv.since(before.kv), self.activations.since(before.activations))


Clippings = Callable[[], Clipping]


class ServingKernels(Protocol):
    """``library``: of a bundle, whose kernels run here; None where it carries none."""

    def library(self, bundle: Artifact[EngineBundle]) -> Path | None:
        """The verified library of a bundle, as :func:`engines.load.at_level` gives it.

        :class:`BuildError` where this machine cannot run it.
        """
        ...

    def sampler(self, library: Path | None, vocab_size: int, threads: int) -> Sampler | None:
        """What chooses tokens from logits. None: there is no kernel for it, and numpy chooses."""
        ...

    def clippings(self, library: Path | None) -> Clippings:
        """Reads what the engines of this process that use ``library`` count from now on; 0 for what is not counted."""
        ...
