"""Sequences that each own their blocks: what evaluation, benchmarks and `tapeout generate` use of an engine.

A slot is the place of one sequence; slots are numbered from 0, and each has blocks for ``max_tokens`` positions. All
calls go through :meth:`engines.protocol.Engine.step`, the same call that a scheduler makes. Recurrent state is that of
one position: where a sequence goes on from another one, the tokens between that and the nearest position before it at
which a copy was kept are fed again, in the same step.

B  batch entries      S  tokens fed in one call      V  vocabulary size
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from engines.protocol import Engine, EngineCapabilities, Entry, FloatArray, MovesBlocks, Result, TokenArray, Wanted
from engines.sequence_state import SequenceState
from engines.state_slots import UNKNOWN
from tapeout.errors import RequestError
from tapeout.state import NO_SLOT, SEQUENCE_SLOTS


class SlotEntry(NamedTuple):
    """S tokens for positions ``start .. start+S-1`` of a slot, which holds those before.

    ``positions``: P indices into ``tokens`` whose logits are wanted, ascending (default: only the last). ``source``:
    another slot that holds the positions before ``start``. Its full blocks are shared in this step where the engine
    can, the rest is copied; what the slot itself held is lost, and after the step it holds nothing. ``resumed``: a
    position after ``start`` from which others will go on; recurrent state is copied there, and not where the tokens
    end.
    """

    slot: int
    tokens: Sequence[int]
    start: int
    positions: Sequence[int] | None = None
    source: int | None = None
    resumed: int | None = None


class Sequences:
    """``slots``: as many as the engine has room for. ``max_tokens``: of each; the engine's unless given.

    Unless more slots are asked for, each has a slot of recurrent state for a copy beside its own. Those that have none
    are fed again from their beginning where they go back.
    """

    def __init__(self, engine: Engine, slots: int | None = None, max_tokens: int | None = None) -> None:
        has = engine.capabilities
        self.max_tokens = has.max_tokens if max_tokens is None else max_tokens
        most, each = room_for(has, self.max_tokens, copies=False), -(-self.max_tokens // has.block_tokens)
        if slots is not None and not 1 <= slots <= most:
            raise RequestError(
                f"{slots} sequences of {self.max_tokens} positions",
                expected=f"1 to {most}, which the engine has room for",
                remedy="open the engine with more slots",
            )
        self.engine, self.slots = engine, room_for(has, self.max_tokens) if slots is None else slots
        self.digest, self.vocab_size = engine.digest, has.vocab_size
        movable = has.blocks and has.shares_blocks and not has.slots
        self._mover = engine if movable and isinstance(engine, MovesBlocks) else None
        self._tables = [range(slot * each, (slot + 1) * each) if has.blocks else () for slot in range(self.slots)]
        copies = range(self.slots, has.slots)
        self._states = [
            SequenceState(slot, copies[slot] if slot < len(copies) else NO_SLOT)
            for slot in range(self.slots if has.slots else 0)
        ]

    def prefill(
        self, slot: int, tokens: Sequence[int], *, start: int = 0, positions: Sequence[int] | None = None
    ) -> FloatArray:
        """Feed S tokens at positions ``start .. start+S-1`` of one slot; float32 logits ``[len(positions), V]``.

        ``positions`` are indices into ``tokens`` whose logits are wanted, ascending (default: only the last).
        ``start > 0`` continues a slot whose first ``start`` positions are valid; what was at or after ``start`` is
        overwritten, so many continuations can follow one shared context in turn.
        """
        return self.feed([SlotEntry(slot, tokens, start, positions)])[0]

    def decode(self, tokens: Sequence[int], lengths: Sequence[int], *, first_slot: int = 0) -> FloatArray:
        """One token for each of B neighbouring slots; float32 logits ``[B, V]``.

        Entry i is slot ``first_slot + i``, which already holds ``lengths[i]`` positions; its token is written at
        position ``lengths[i]``.
        """
        return np.concatenate(self.feed(self._decoded(tokens, lengths, first_slot)))

    def decode_greedy(self, tokens: Sequence[int], lengths: Sequence[int], *, first_slot: int = 0) -> TokenArray:
        """As :meth:`decode`, but only the likeliest token of each entry, the first of equals; int64 ``[B]``."""
        return np.concatenate(self.choose(self._decoded(tokens, lengths, first_slot)))

    def feed(self, batch: Sequence[SlotEntry]) -> list[FloatArray]:
        """Feed tokens to several slots, all in one step; float32 logits ``[P, V]`` of each."""
        empty = np.empty((0, self.vocab_size), np.float32)
        return [empty if result.logits is None else result.logits for result in self._step(batch, "logits")]

    def choose(self, batch: Sequence[SlotEntry]) -> list[TokenArray]:
        """As :meth:`feed`, but only the likeliest token of each position, the first of equals; int64 ``[P]``."""
        empty = np.empty(0, np.int64)
        return [empty if result.tokens is None else result.tokens for result in self._step(batch, "token")]

    def copy_slot(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` KV positions of one slot to another."""
        self._require_slots(source, 1)
        self._require_slots(target, 1)
        if not 0 <= length <= self.max_tokens:
            raise RequestError(f"copy of {length} positions", expected=f"at most {self.max_tokens}")
        self._copy(source, target, length, 0)

    @property
    def moves_blocks(self) -> bool:
        """Full blocks are all that a sequence needs to go on in another engine of this bundle."""
        return self._mover is not None

    def read_blocks(self, slot: int, count: int) -> list[bytes]:
        """What the first blocks of a slot hold, which must be full. For :meth:`write_blocks` of another engine."""
        found, mover = list[bytes](), self._required_mover(slot)
        for block in self._tables[slot][:count]:
            content = bytearray(self.engine.capabilities.block_bytes)
            mover.read_block(block, memoryview(content))
            found.append(bytes(content))
        return found

    def write_blocks(self, slot: int, blocks: Sequence[bytes]) -> None:
        """A slot begins with these blocks from now on; what it held behind them is lost."""
        mover = self._required_mover(slot)
        for block, content in zip(self._tables[slot], blocks, strict=False):
            mover.write_block(block, memoryview(content))

    def close(self) -> None:
        self.engine.close()

    def _required_mover(self, slot: int) -> MovesBlocks:
        self._require_slots(slot, 1)
        if self._mover is None:
            raise RequestError("blocks of this engine cannot be moved", expected="paged state without other state")
        return self._mover

    def _copy(self, source: int, target: int, length: int, first_block: int) -> None:
        """Copy what the blocks from ``first_block`` on hold of the first ``length`` positions, and recurrent state."""
        size, (before, after) = self.engine.capabilities.block_tokens, (self._tables[source], self._tables[target])
        for block in range(first_block, -(-length // size) if before else 0):
            self.engine.copy_block(before[block], after[block], min(length - block * size, size))
        if self._states:
            origin, state = self._states[source], self._states[target]
            position, is_copy = origin.nearest(length)
            state.forget()
            if position:
                self.engine.copy_state(origin.copy if is_copy else origin.slot, state.slot)
                state.position = position
            state.tokens = origin.tokens[:length]

    def _decoded(self, tokens: Sequence[int], lengths: Sequence[int], first_slot: int) -> list[SlotEntry]:
        self._require_slots(first_slot, len(tokens))
        if len(tokens) != len(lengths) or min(lengths) < 1:
            raise RequestError(
                f"decode of {len(tokens)} tokens with lengths {list(lengths)[:8]}",
                expected="one length per token, of a slot that holds at least one position",
            )
        fed = enumerate(zip(tokens, lengths, strict=True), first_slot)
        return [SlotEntry(slot, (token,), length) for slot, (token, length) in fed]

    def _step(self, batch: Sequence[SlotEntry], wanted: Wanted) -> list[Result]:
        """One step. :class:`RequestError` of the first entry that has one."""
        entries = [self._entry(each, wanted) for each in batch]
        if not self._states:
            return _sound(self.engine.step(entries))
        states = [self._states[each.slot] for each in batch]
        copied = [state.copied for state in states]
        for state in states:
            state.forget()
        results = _sound(self.engine.step(entries))
        for state, each, entry, before in zip(states, batch, entries, copied, strict=True):
            state.fed(entry.start, entry.tokens, entry.snapshots[0][0] if entry.snapshots else before)
            if each.source not in (None, each.slot):
                state.lose()
        return results

    def _entry(self, each: SlotEntry, wanted: Wanted) -> Entry:
        slot, tokens, start, positions, source, resumed = each
        if source is None and not self._states and 0 <= slot < self.slots:
            return Entry(tokens, start, self._tables[slot], wanted, positions)
        if not 0 <= slot < self.slots:
            self._require_slots(slot, 1)
        blocks: Sequence[int] = self._tables[slot]
        if source is not None and source != slot:
            self._require_slots(source, 1)
            has = self.engine.capabilities
            # Tokens that are fed again are written to blocks of its own: others may share those of the source, too.
            begin = self._states[source].nearest(start)[0] if self._states else start
            shared = begin // has.block_tokens if has.shares_blocks else 0
            self._copy(source, slot, start, shared)
            blocks = [*self._tables[source][:shared], *blocks[shared:]] if shared else blocks
        if not self._states:
            return Entry(tokens, start, blocks, wanted, positions)
        state = self._states[slot]
        if start > len(state.tokens):
            raise RequestError(
                f"slot {slot} holds {len(state.tokens)} positions, and the tokens begin at position {start}",
                expected="tokens that continue what the slot holds",
            )
        begin, is_copy = state.nearest(start)
        if is_copy:
            self.engine.copy_state(state.copy, state.slot)
        if state.copied > start:
            state.copied = UNKNOWN  # tokens before it change
        again = state.tokens[begin:start]
        if positions is not None:
            positions = [len(again) + position for position in positions]
        # Where it went back to, it may again.
        copied = resumed or (start if again else start + len(tokens) if len(tokens) > 1 and not is_copy else 0)
        snapshots = [(copied, state.copy)] if copied > begin and state.copy != NO_SLOT else ()
        return Entry([*again, *tokens], begin, blocks, wanted, positions, slot=state.slot, snapshots=snapshots)

    def _require_slots(self, first: int, count: int) -> None:
        if not (count >= 1 and 0 <= first <= self.slots - count):
            raise RequestError(f"{count} slots from {first}", expected=f"slots 0 to {self.slots - 1}")


def _sound(results: list[Result]) -> list[Result]:
    for result in results:
        if result.error is not None:
            raise result.error
    return results


def room_for(has: EngineCapabilities, max_tokens: int, *, copies: bool = True) -> int:
    """Sequences of so many positions that an engine has room for, in every kind of state, and in a step.

    ``copies``: each has a copy of its recurrent state, too.
    """
    room = [has.max_batch]
    if has.blocks:
        room.append(has.blocks // -(-max_tokens // has.block_tokens))
    if has.slots:
        room.append(has.slots // (SEQUENCE_SLOTS if copies else 1))
    return min(room)
