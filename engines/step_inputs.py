"""The tokens of one step, checked once for every engine: what cannot be meant is refused before a buffer is written.

B  rows of the step      S  tokens a row      R  tokens whose logits are wanted
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engines.protocol import Engine
from tapeout.errors import BuildError

Int64Array = NDArray[np.int64]


@dataclass(frozen=True)
class StepInputs:
    """All C-contiguous, since engines bind them by address."""

    ids: Int64Array  # [B, S]
    starts: Int64Array  # [B]: how many positions each row's slot holds, which is where its first token is written
    rows: Int64Array  # [R]: indices into the B·S tokens

    @property
    def positions(self) -> Int64Array:
        """``[B, S]``."""
        return self.starts[:, None] + np.arange(self.ids.shape[1], dtype=np.int64)

    def pieces(self, most: int) -> Iterator[tuple[StepInputs, Int64Array]]:
        """One row's tokens in pieces of at most ``most``, each with the places of its rows among ``rows``."""
        for first in range(0, self.ids.shape[1], most):
            places = np.flatnonzero((first <= self.rows) & (self.rows < first + most))
            ids = np.ascontiguousarray(self.ids[:, first : first + most])
            yield StepInputs(ids, self.starts + first, self.rows[places] - first), places


def prefill_inputs(
    engine: Engine, slot: int, tokens: Sequence[int], start: int, rows: Sequence[int] | None
) -> StepInputs:
    """Of :meth:`engines.protocol.Engine.prefill`. :class:`BuildError` for what the engine has no room for."""
    count = len(tokens)
    if not count or start < 0 or start + count > engine.max_tokens or not 0 <= slot < engine.slots:
        raise BuildError(
            f"prefill of {count} tokens at {start} in slot {slot}",
            expected=f"at least one token, within {engine.max_tokens} positions and {engine.slots} slots",
        )
    wanted = np.ascontiguousarray([count - 1] if rows is None else rows, np.int64)
    if wanted.size and not 0 <= wanted.min() <= wanted.max() < count:
        raise BuildError(
            f"logits asked of rows {wanted.min()} to {wanted.max()}",
            expected=f"rows 0 to {count - 1} of the tokens fed",
        )
    _check_ids(engine, tokens)
    return StepInputs(np.ascontiguousarray(tokens, np.int64)[None], np.array([start], np.int64), wanted)


def check_decode(engine: Engine, tokens: Sequence[int], lengths: Sequence[int], first_slot: int) -> None:
    """Of :meth:`engines.protocol.Engine.decode`. :class:`BuildError` for what the engine has no room for."""
    batch = len(tokens)
    if len(lengths) != batch or not batch or not 0 <= first_slot <= engine.slots - batch:
        raise BuildError(
            f"decode of {batch} tokens with {len(lengths)} lengths from slot {first_slot}",
            expected=f"one length a token, within {engine.slots} slots",
        )
    if min(lengths) < 1 or max(lengths) >= engine.max_tokens:
        raise BuildError(
            f"decode at lengths {min(lengths)} to {max(lengths)}",
            expected=f"prefilled slots with room: 1 to {engine.max_tokens - 1} positions",
        )
    _check_ids(engine, tokens)


def decode_inputs(engine: Engine, tokens: Sequence[int], lengths: Sequence[int], first_slot: int) -> StepInputs:
    """Of a decode step, checked."""
    check_decode(engine, tokens, lengths, first_slot)
    ids = np.ascontiguousarray(tokens, np.int64)[:, None]
    return StepInputs(ids, np.ascontiguousarray(lengths, np.int64), np.arange(len(tokens), dtype=np.int64))


def check_copy(engine: Engine, source: int, target: int, length: int) -> None:
    """Of :meth:`engines.protocol.Engine.copy_slot`. :class:`BuildError` for slots or positions that are not there."""
    if not (0 <= source < engine.slots and 0 <= target < engine.slots and 0 <= length <= engine.max_tokens):
        raise BuildError(
            f"copy of {length} positions from slot {source} to {target}",
            expected=f"at most {engine.max_tokens} positions, within {engine.slots} slots",
        )


def _check_ids(engine: Engine, tokens: Sequence[int]) -> None:
    if min(tokens) < 0 or max(tokens) >= engine.vocab_size:  # an embedding table would be read past its end
        raise BuildError(
            f"token ids {min(tokens)} to {max(tokens)}",
            expected=f"ids of this model's vocabulary, 0 to {engine.vocab_size - 1}",
        )
