"""A step over contiguous KV buffers, one for each sequence: a block of such an engine is a whole sequence.

There is no recurrent state: entries that name a slot are refused.
Single tokens of sequences in neighbouring buffers are decoded together; the tokens of a prompt are fed alone.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from itertools import groupby

import numpy as np

from engines.protocol import EngineCapabilities, Entry, FloatArray, Result, WholeSteps
from engines.step_inputs import NO_SLOTS, Int64Array, StepPiece, check, result_of, runs


class SlotEngine(WholeSteps):
    """See :class:`engines.protocol.Engine`. Subclasses run one prompt, or one decode step of neighbouring slots.

    ``prompt_tokens``: most tokens of a prompt that are fed at once.
    """

    digest: str
    capabilities: EngineCapabilities
    prompt_tokens: int

    @abstractmethod
    def prefill(self, slot: int, tokens: Sequence[int], start: int, positions: Sequence[int]) -> FloatArray:
        """Feed tokens at positions ``start ..`` of a slot; logits ``[P, V]`` of the tokens ``positions``."""

    @abstractmethod
    def decode(self, first_slot: int, tokens: Int64Array, starts: Int64Array) -> FloatArray:
        """Feed ``tokens [B]`` at positions ``starts [B]`` of neighbouring slots; logits ``[B, V]``."""

    def prepare(self, ahead: int) -> bool:
        return False

    @abstractmethod
    def copy_block(self, source: int, target: int, tokens: int) -> None: ...

    def copy_state(self, source: int, target: int) -> None:
        NO_SLOTS.copy(source, target)

    @abstractmethod
    def close(self) -> None: ...

    def step(self, batch: Sequence[Entry]) -> list[Result]:
        errors = check(batch, self.capabilities)
        results = [Result(error=error) for error in errors]
        single: list[int] = []
        for number, entry in enumerate(batch):
            if errors[number] is not None:
                continue
            if len(entry.tokens) == 1 and entry.start and (entry.positions is None or len(entry.positions) == 1):
                single.append(number)
            else:
                pieces = [run[0] for run in runs([entry], [None], self.prompt_tokens)]
                results[number] = self._prompt(entry, pieces)
        single.sort(key=lambda number: batch[number].blocks[0])
        # Neighbouring slots have one difference between slot and place in this order.
        for _, group in groupby(enumerate(single), key=lambda pair: batch[pair[1]].blocks[0] - pair[0]):
            numbers = [number for _, number in group]
            for number, result in zip(numbers, self._single([batch[n] for n in numbers]), strict=True):
                results[number] = result
        return results

    def _prompt(self, entry: Entry, pieces: Sequence[StepPiece]) -> Result:
        parts = [self.prefill(piece.blocks[0], piece.tokens, piece.start, piece.positions) for piece in pieces]
        wanted = [part for part in parts if len(part)]
        return result_of(entry, np.concatenate(wanted)) if wanted else Result()

    def _single(self, entries: Sequence[Entry]) -> list[Result]:
        """Of entries in neighbouring slots, in order."""
        first = entries[0].blocks[0]
        tokens = np.array([entry.tokens[0] for entry in entries], np.int64)
        starts = np.array([entry.start for entry in entries], np.int64)
        logits = self.decode(first, tokens, starts)
        return [result_of(entry, logits[i : i + 1]) for i, entry in enumerate(entries)]
