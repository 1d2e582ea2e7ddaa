"""The tokens of one step, checked once for every engine: an invalid call is refused before a buffer is written.

B  batch entries      S  tokens of each      R  tokens whose logits are wanted
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engines.protocol import Engine
from tapeout.errors import RequestError

Int64Array = NDArray[np.int64]


@dataclass(frozen=True)
class StepInputs:
    """All arrays are C-contiguous: engines bind them by address."""

    ids: Int64Array  # [B, S]
    starts: Int64Array  # [B]: positions that each slot holds, so where its first token is written
    logit_positions: Int64Array  # [R]: indices into the B·S tokens

    @property
    def position_ids(self) -> Int64Array:
        """``[B, S]``."""
        return self.starts[:, None] + np.arange(self.ids.shape[1], dtype=np.int64)

    def pieces(self, most: int) -> Iterator[tuple[StepInputs, Int64Array]]:
        """One entry's tokens in pieces of at most ``most``, each with the places of its logits among those wanted."""
        for first in range(0, self.ids.shape[1], most):
            places = np.flatnonzero((first <= self.logit_positions) & (self.logit_positions < first + most))
            ids = np.ascontiguousarray(self.ids[:, first : first + most])
            yield StepInputs(ids, self.starts + first, self.logit_positions[places] - first), places


def prefill_inputs(
    engine: Engine, slot: int, tokens: Sequence[int], start: int, positions: Sequence[int] | None
) -> StepInputs:
    """Of :meth:`engines.protocol.Engine.prefill`. :class:`RequestError` for what the engine has no room for."""
    count = len(tokens)
    if not count or start < 0 or start + count > engine.max_tokens or not 0 <= slot < engine.slots:
        raise RequestError(
            f"prefill of {count} tokens at {start} in slot {slot}",
            expected=f"at least one token, within {engine.max_tokens} positions and {engine.slots} slots",
        )
    wanted = np.ascontiguousarray([count - 1] if positions is None else positions, np.int64)
    if wanted.size and not 0 <= wanted.min() <= wanted.max() < count:
        raise RequestError(
            f"logits wanted at positions {wanted.min()} to {wanted.max()}",
            expected=f"positions 0 to {count - 1} of the tokens fed",
        )
    _check_ids(engine, tokens)
    return StepInputs(np.ascontiguousarray(tokens, np.int64)[None], np.array([start], np.int64), wanted)


def check_decode(engine: Engine, tokens: Sequence[int], lengths: Sequence[int], first_slot: int) -> None:
    """Of :meth:`engines.protocol.Engine.decode`. :class:`RequestError` for what the engine has no room for."""
    batch = len(tokens)
    if len(lengths) != batch or not batch or not 0 <= first_slot <= engine.slots - batch:
        raise RequestError(
            f"decode of {batch} tokens with {len(lengths)} lengths from slot {first_slot}",
            expected=f"one length per token, within {engine.slots} slots",
        )
    if min(lengths) < 1 or max(lengths) >= engine.max_tokens:
        raise RequestError(
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
    """Of :meth:`engines.protocol.Engine.copy_slot`. :class:`RequestError` for slots or positions that are not there."""
    if not (0 <= source < engine.slots and 0 <= target < engine.slots and 0 <= length <= engine.max_tokens):
        raise RequestError(
            f"copy of {length} positions from slot {source} to {target}",
            expected=f"at most {engine.max_tokens} positions, within {engine.slots} slots",
        )


def _check_ids(engine: Engine, tokens: Sequence[int]) -> None:
    if min(tokens) < 0 or max(tokens) >= engine.vocab_size:  # the embedding would be read past its end
        raise RequestError(
            f"token ids {min(tokens)} to {max(tokens)}",
            expected=f"ids of this model's vocabulary, 0 to {engine.vocab_size - 1}",
        )
