"""What evaluation, shadow replay and serving ask of a loaded engine: token ids in, logits out.

B  batch entries      S  tokens fed in one call      V  vocabulary size
A slot is one sequence's place in the KV buffers; slots are numbered from 0. A call with slots, positions or tokens that
the engine does not have is refused with :class:`tapeout.errors.RequestError`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float32]
TokenArray = NDArray[np.int64]


class Engine(Protocol):
    @property
    def digest(self) -> str:
        """Content digest of the bundle this engine was opened from."""
        ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def slots(self) -> int:
        """How many sequences the KV buffers hold."""
        ...

    @property
    def max_tokens(self) -> int:
        """KV positions per slot."""
        ...

    def prefill(
        self, slot: int, tokens: Sequence[int], *, start: int = 0, positions: Sequence[int] | None = None
    ) -> FloatArray:
        """Feed S tokens at positions ``start .. start+S-1`` of one slot; float32 logits ``[len(positions), V]``.

        ``positions`` are indices into ``tokens`` whose logits are wanted (default: only the last, ``[S-1]``).
        ``start > 0`` continues a slot whose first ``start`` positions are valid; what was at or after
        ``start`` is overwritten, so many continuations can follow one shared context in turn.
        """
        ...

    def decode(self, tokens: Sequence[int], lengths: Sequence[int], *, first_slot: int = 0) -> FloatArray:
        """One token for each of B neighbouring slots; float32 logits ``[B, V]``.

        Entry i is slot ``first_slot + i``, which already holds ``lengths[i]`` positions; its token is written at
        position ``lengths[i]``.
        """
        ...

    def decode_greedy(self, tokens: Sequence[int], lengths: Sequence[int], *, first_slot: int = 0) -> TokenArray:
        """As :meth:`decode`, but only the likeliest token of each entry, the first of equals; int64 ``[B]``."""
        ...

    def copy_slot(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` KV positions of one slot to another."""
        ...

    def close(self) -> None: ...
