"""The entries of one step, checked once for every engine, and laid out as arrays.

N  tokens of a run      B  entries of a run      P  positions whose logits are wanted
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engines.protocol import MOST_RANKED, EngineCapabilities, Entry, FloatArray, Result
from engines.state_slots import StateSlots
from tapeout.errors import RequestError
from tapeout.state import NO_SLOT

Int64Array = NDArray[np.int64]


class SlotInputs(NamedTuple):
    """What one run over neighbouring slots is fed. All arrays are C-contiguous: engines bind them by address."""

    ids: Int64Array  # [B, S]
    starts: Int64Array  # [B]: where the first token of each is written
    logit_positions: Int64Array  # [P]: indices into the B·S tokens

    @property
    def position_ids(self) -> Int64Array:
        """``[B, S]``."""
        return self.starts[:, None] + np.arange(self.ids.shape[1], dtype=np.int64)


class StepPiece(NamedTuple):
    """A part of an entry that one run takes. ``positions``: indices into its own ``tokens``.

    ``snapshot``: the slot that the state after it is copied to.
    """

    entry: int  # its place in the batch
    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]
    positions: Sequence[int]
    slot: int
    snapshot: int = NO_SLOT


NO_SLOTS = StateSlots(0)


def check(
    batch: Sequence[Entry], engine: EngineCapabilities, slots: StateSlots = NO_SLOTS
) -> list[RequestError | None]:
    """Why an entry cannot be run, or None, entry by entry."""
    if len(batch) > engine.max_batch:
        raise RequestError(f"a step of {len(batch)} entries", expected=f"at most {engine.max_batch}")
    written = set[int]()
    errors = [_check_entry(entry, engine, written) for entry in batch]
    if engine.slots:
        written = set[int]()
        errors = [error or slots.unfit(entry, written) for entry, error in zip(batch, errors, strict=True)]
    return errors


def _check_entry(entry: Entry, engine: EngineCapabilities, written: set[int]) -> RequestError | None:
    """``written``: blocks that entries before it write; its own are added."""
    # Quicker than one by one.
    tokens, start, blocks, wanted, positions, top, adapter, slot, snapshots, follows, draw, ranked = entry
    count, size = len(tokens), engine.block_tokens
    end = start + count
    if not count or start < 0 or end > engine.max_tokens:
        return RequestError(
            f"{count} tokens at position {start}", expected=f"at least one token, within {engine.max_tokens} positions"
        )
    least, highest = (tokens[0], tokens[0]) if count == 1 else (min(tokens), max(tokens))
    if least < 0 or highest >= engine.vocab_size:  # the embedding would be read past its end
        return RequestError(
            f"token ids {least} to {highest}",
            expected=f"ids of this model's vocabulary, 0 to {engine.vocab_size - 1}",
        )
    needed = -(-end // size)
    read = blocks if len(blocks) == needed else blocks[:needed]
    if engine.blocks and (len(read) < needed or min(read) < 0 or max(read) >= engine.blocks):
        return RequestError(
            f"block table {list(blocks)[:8]} for {end} positions",
            expected=f"{needed} of the blocks 0 to {engine.blocks - 1}, each of {size} positions",
        )
    own = read[start // size :]
    if not written.isdisjoint(own):
        return RequestError(f"another entry of this step writes block {min(written & set(own))}, too")
    written.update(own)
    if positions is not None and len(positions):
        ascending = all(before < after for before, after in pairwise(positions))
        if not (ascending and positions[0] >= 0 and positions[-1] < count):
            return RequestError(
                f"results wanted at positions {', '.join(map(str, positions[:8]))}",
                expected=f"ascending positions from 0 to {count - 1} of the tokens fed",
            )
    if wanted == "top" and not 1 <= top <= engine.vocab_size:
        return RequestError(f"top {top} tokens", expected=f"1 to {engine.vocab_size}")
    if follows is not None and (engine.steps_at_once == 1 or count != 1):
        return RequestError(
            f"{count} tokens that follow entry {follows} of the step before",
            expected="one token, of an engine that takes two steps at once",
        )
    if (draw is not None or ranked is not None) and (reason := _unfit_draw(entry, engine)):
        return reason
    if adapter:
        return RequestError(f"adapter {adapter}", expected="0: this engine has no adapters")
    if (slot != NO_SLOT or snapshots) and not engine.slots:
        return NO_SLOTS.unfit(entry, set[int]())
    return None


def _unfit_draw(entry: Entry, engine: EngineCapabilities) -> RequestError | None:
    _, _, _, wanted, positions, _, _, _, _, _, draw, ranked = entry
    if not engine.draws or wanted != "token":
        return RequestError(
            f"{'a draw' if ranked is None else 'a ranking'} beside {wanted}",
            expected="an entry that wants tokens, of an engine that draws them",
        )
    count = 1 if positions is None else len(positions)
    if draw is not None and len(draw.random) != count:
        return RequestError(f"{len(draw.random)} random numbers", expected=f"{count}: one for each position")
    if ranked is not None and not 0 <= ranked <= MOST_RANKED:
        return RequestError(f"the {ranked} likeliest tokens", expected=f"0 to {MOST_RANKED}")
    return None


def runs(batch: Sequence[Entry], errors: Sequence[RequestError | None], most: int) -> Iterator[list[StepPiece]]:
    """The tokens of all entries without an error, in order, cut into runs of at most ``most``.

    An entry is cut at its snapshots, too, and goes on in the next run: the state there is copied between the two.
    """
    run: list[StepPiece] = []
    room = most
    for number, (entry, error) in enumerate(zip(batch, errors, strict=True)):
        if error is not None:
            continue
        tokens, start, blocks, _, positions, _, _, slot, snapshots, *_ = entry
        count, done = len(tokens), 0
        if count <= room and not snapshots:
            room -= count
            run.append(StepPiece(number, tokens, start, blocks, (count - 1,) if positions is None else positions, slot))
            continue
        while done < count:
            if not room:
                yield run
                run, room = [], most
            stop = _next_snapshot(entry, done) if entry.snapshots else count
            taken = min(room, stop - done)
            run.append(_piece(number, entry, done, taken))
            done, room = done + taken, room - taken
            if done == stop < count:
                room = 0
    if run:
        yield run


def _next_snapshot(entry: Entry, done: int) -> int:
    """Tokens of the entry up to its next snapshot after ``done``; all where there is none."""
    places = (place - entry.start for place, _ in entry.snapshots)
    return next((place for place in places if place > done), len(entry.tokens))


def _piece(number: int, entry: Entry, done: int, taken: int) -> StepPiece:
    end, snapshot = entry.start + done + taken, NO_SLOT
    if entry.snapshots:
        snapshot = dict(entry.snapshots).get(end, NO_SLOT)
    if taken == len(entry.tokens):
        return StepPiece(number, entry.tokens, entry.start, entry.blocks, _positions(entry), entry.slot, snapshot)
    wanted = [p - done for p in _positions(entry) if done <= p < done + taken]
    return StepPiece(number, entry.tokens[done : done + taken], end - taken, entry.blocks, wanted, entry.slot, snapshot)


def _positions(entry: Entry) -> Sequence[int]:
    return (len(entry.tokens) - 1,) if entry.positions is None else entry.positions


def result_of(entry: Entry, logits: FloatArray) -> Result:
    """What an entry wants of its logits ``[P, V]``; an error if one of them is not finite."""
    if not np.isfinite(logits.sum()):  # quicker than to look at each; the sum of finite logits does not overflow
        return Result(error=not_finite())
    if entry.wanted == "logits":
        return Result(logits=logits)
    if entry.wanted == "token":
        return Result(tokens=logits.argmax(axis=1))
    return _top(logits, entry.top)


def _top(logits: FloatArray, count: int) -> Result:
    """The ``count`` likeliest tokens, the lower id first among equals, with log-probabilities."""
    tokens = np.argsort(-logits, axis=1, kind="stable")[:, :count]
    highest = logits.max(axis=1, keepdims=True)
    total = np.log(np.exp(logits - highest, dtype=np.float32).sum(axis=1, keepdims=True, dtype=np.float64))
    chosen = np.take_along_axis(logits, tokens, axis=1) - highest
    return Result(tokens=tokens, log_probabilities=(chosen - total).astype(np.float32))


def not_finite() -> RequestError:
    return RequestError(
        "the engine's logits are not finite",
        expected="finite logits",
        remedy="rebuild the bundle; `tapeout inspect` shows which quantized layers have the largest errors. Where "
        "a target computes in float16, activations end at 65,504: ort-cpu computes in float32",
    )
