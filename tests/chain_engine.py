"""An engine with any kinds of state, all of them chains over every token before: wrong state gives wrong tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engines.protocol import EngineCapabilities, Entry, FloatArray, Result, WholeSteps
from engines.state_slots import UNKNOWN, StateSlots
from engines.step_inputs import StepPiece, check, result_of, runs

MODULUS = 2**31 - 1
BEGIN = 1


def chain(state: int, token: int) -> int:
    return (state * 31 + token + 1) % MODULUS


class ChainEngine(WholeSteps):
    """``blocks``, ``slots``: 0 for an engine without that kind of state. Runs are of few tokens, so entries are cut."""

    def __init__(
        self,
        *,
        blocks: int = 0,
        slots: int = 0,
        block_tokens: int = 4,
        max_tokens: int = 64,
        snapshot_tokens: int = 0,
        vocab_size: int = 211,
    ) -> None:
        self.digest = "chain"
        self.capabilities = EngineCapabilities(
            block_tokens=block_tokens,
            blocks=blocks,
            block_bytes=block_tokens,
            max_batch=8,
            max_tokens=max_tokens,
            vocab_size=vocab_size,
            shares_blocks=True,
            chooses_tokens=False,
            slots=slots,
            slot_bytes=8,
            snapshot_tokens=snapshot_tokens,
        )
        self.table = np.random.default_rng(0).normal(size=(997, vocab_size)).astype(np.float32)
        self.paged = np.zeros((blocks, block_tokens), np.int64)
        self.recurrent = np.zeros(slots, np.int64)
        self.slots = StateSlots(slots)

    def alone(self, prompt: Sequence[int], count: int) -> list[int]:
        """The greedy response."""
        tokens, state = list[int](), BEGIN
        for token in prompt:
            state = chain(state, token)
        while len(tokens) < count:
            tokens.append(int(self.table[state % len(self.table)].argmax()))
            state = chain(state, tokens[-1])
        return tokens

    def step(self, batch: Sequence[Entry]) -> list[Result]:
        errors = check(batch, self.capabilities, self.slots)
        rows: list[list[FloatArray]] = [[] for _ in batch]
        for run in runs(batch, errors, 7):
            for piece in run:
                rows[piece.entry] += self._feed(piece)
        return [
            Result(error=error) if error else result_of(entry, np.stack(found)) if found else Result()
            for entry, error, found in zip(batch, errors, rows, strict=True)
        ]

    def _feed(self, piece: StepPiece) -> list[FloatArray]:
        """Logits of the positions that are wanted, by the mean of all kinds of state."""
        size, rows = self.capabilities.block_tokens, list[FloatArray]()
        if self.capabilities.slots:
            self.slots.hold(piece.slot, UNKNOWN)
        for number, token in enumerate(piece.tokens):
            position, states = piece.start + number, list[int]()
            if self.capabilities.blocks:
                before = self.paged[piece.blocks[(position - 1) // size], (position - 1) % size] if position else BEGIN
                states.append(chain(int(before), token))
                self.paged[piece.blocks[position // size], position % size] = states[-1]
            if self.capabilities.slots:
                before = self.recurrent[piece.slot] if position else self.first_state(piece.slot)
                states.append(chain(int(before), token))
                self.recurrent[piece.slot] = states[-1]
            if number in piece.positions:
                rows.append(self.table[sum(states) // len(states) % len(self.table)])
        if self.capabilities.slots:
            self.slots.hold(piece.slot, piece.start + len(piece.tokens))
            if piece.snapshot >= 0:
                self.copy_state(piece.slot, piece.snapshot)
        return rows

    def first_state(self, slot: int) -> int:
        """Of a sequence that begins, whatever its slot held."""
        return BEGIN

    def prepare(self, ahead: int) -> bool:
        return False

    def copy_block(self, source: int, target: int, tokens: int) -> None:
        self.paged[target, :tokens] = self.paged[source, :tokens]

    def copy_state(self, source: int, target: int) -> None:
        self.slots.copy(source, target)
        self.recurrent[target] = self.recurrent[source]

    def close(self) -> None: ...
