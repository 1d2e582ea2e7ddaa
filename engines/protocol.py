"""What evaluation, shadow replay and serving ask of a loaded engine: one call, for any mix of prompts and decodes.

S  new tokens of a sequence      P  positions whose logits are wanted      V  vocabulary size

Paged state (keys and values) is a pool of blocks, numbered from 0. A sequence lies in the blocks of its block table:
position p in block ``table[p // block_tokens]``. Recurrent state is a pool of slots, one for each sequence and one for
each snapshot. Who owns which block or slot is the caller's bookkeeping.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from tapeout.errors import RequestError
from tapeout.state import NO_SLOT

FloatArray = NDArray[np.float32]
IntArray = NDArray[np.int64]
TokenArray = NDArray[np.int64]
Wanted = Literal["token", "logits", "top"]
MOST_RANKED = 128


def _as_one(tokens: int) -> float:
    return 1.0


@dataclass(frozen=True)
class EngineCapabilities:
    """``max_tokens``: positions of a sequence. ``max_batch``: entries of a step.

    ``blocks``, ``slots``: of the pools, 0 where the model has no such state. ``snapshot_tokens``: see
    :class:`tapeout.state.Recurrent`.
    ``shares_blocks``: a block may be in several block tables, as long as none of them writes it. Where not, a sequence
    is one block, and a shared prefix is copied.
    ``chooses_tokens``: the likeliest token is found in the graph, without writing logits.
    ``threads``: of the processor that compute a step, as it was opened or as it chose; 0 where it does not compute.
    ``draws``: tokens are drawn and ranked where they are computed (:attr:`Entry.draw`, :attr:`Entry.ranked`).
    ``reads``: bytes of weights that a step of so many tokens is expected to read, over those of a step of one; of a
    mixture of experts each token may choose others.
    ``mapped_bytes``: of weights that are left in their file, and read when memory has no room for all of them; see
    :class:`MapsWeights`.
    ``steps_at_once``: that can have begun and not ended. With two of them, entries may follow others
    (:attr:`Entry.follows`); such engines have no recurrent state.
    """

    block_tokens: int
    blocks: int
    block_bytes: int
    max_batch: int
    max_tokens: int
    vocab_size: int
    shares_blocks: bool
    chooses_tokens: bool
    threads: int = 0
    slots: int = 0
    slot_bytes: int = 0
    snapshot_tokens: int = 0
    steps_at_once: int = 1
    draws: bool = False
    mapped_bytes: int = 0
    reads: Callable[[int], float] = _as_one


class Filters(NamedTuple):
    """``scale``: log2(e) over the temperature; 0 is greedy, also for a top-p of 0.

    ``least``: weight of the least likely token for min-p.
    """

    scale: float
    top_k: int
    top_p: float
    least: int


class Draw(NamedTuple):
    """How the tokens of an entry are drawn. ``random``: 64 random bits for each position."""

    filters: Filters
    random: Sequence[int]


class Ranked(NamedTuple):
    """What log-probabilities at a position need: a token's is its logit less the ``normalizer``.

    ``logit``: of the token that was chosen. ``likeliest``: tokens and their logits, from the likeliest on.
    """

    normalizer: float
    logit: float
    likeliest: Sequence[tuple[int, float]]


class Entry(NamedTuple):
    """New tokens of one sequence, for positions ``start .. start+S-1``; positions before ``start`` are in its blocks.

    ``positions``: indices into ``tokens`` whose results are wanted, ascending; by default the last, ``()`` for none.
    ``wanted``: the likeliest token (the lowest id among equals), all logits, or the ``top`` likeliest with their
    log-probabilities. ``adapter``: 0 is the model itself; no engine has others yet.
    ``slot``: of the recurrent state, which is that of exactly ``start`` positions; what a slot holds does not matter
    where ``start`` is 0. ``snapshots``: positions, ascending and after ``start``, each with a slot that the state there
    is copied to.
    ``follows``: a place in the batch that was begun last. This entry has one token, the last that the entry there
    chooses (it wants tokens), which may not be known yet: the one in ``tokens`` does not matter.
    ``draw``, ``ranked``: of an entry that wants tokens. They are drawn so, to the bit as
    :func:`runtime.engine.draw.draw` does; and so many of the likeliest tokens are wanted beside each, at most
    :data:`MOST_RANKED`.
    """

    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]
    wanted: Wanted = "token"
    positions: Sequence[int] | None = None
    top: int = 0
    adapter: int = 0
    slot: int = NO_SLOT
    snapshots: Sequence[tuple[int, int]] = ()
    follows: int | None = None
    draw: Draw | None = None
    ranked: int | None = None


class Result(NamedTuple):
    """Of one entry, in the order of its positions: what it wanted, or why this entry alone has failed.

    ``tokens`` ``[P]``, or ``[P, top]`` from the likeliest on; ``logits`` ``[P, V]``; ``log_probabilities``
    ``[P, top]``, in nats. ``ranked`` ``[P]``, where the entry asks for it.
    """

    tokens: TokenArray | None = None
    logits: FloatArray | None = None
    log_probabilities: FloatArray | None = None
    ranked: Sequence[Ranked] | None = None
    error: RequestError | None = None


Finish = Callable[[], list[Result]]  # waits for a step that was begun; called once, and steps end as they have begun


class Engine(Protocol):
    @property
    def digest(self) -> str:
        """Content digest of the bundle this engine was opened from."""
        ...

    @property
    def capabilities(self) -> EngineCapabilities: ...

    def step(self, batch: Sequence[Entry]) -> list[Result]:
        """Feed the new tokens of all entries, and give what each wants.

        An entry with tokens, positions, blocks or slots that the engine does not have is not run and has an error; so
        has one whose logits are not finite, and one whose slot holds the state of another position. The others are not
        affected. Of paged state, what was at or after ``start`` is overwritten.
        """
        ...

    def begin(self, batch: Sequence[Entry]) -> Finish:
        """The first half of :meth:`step`, where the caller has other work until the device is done.

        At most ``steps_at_once`` steps have begun and not ended; they run in their order. An engine of one step may
        compute it here. What fails may fail in either half; a step that follows one that failed gives nothing that
        means anything.
        """
        ...

    def prepare(self, ahead: int) -> bool:
        """Do some work that the next steps would otherwise wait for; True if another call would do more.

        ``ahead``: new blocks that the next steps may use. A call takes about a millisecond, and longer only for blocks
        that are larger than 2 MB. No result changes, and it need not be called.
        """
        ...

    def copy_block(self, source: int, target: int, tokens: int) -> None:
        """Copy the first ``tokens`` positions of one block to another."""
        ...

    def copy_state(self, source: int, target: int) -> None:
        """Copy the recurrent state of one slot to another. :class:`RequestError` where the engine has no such slot."""
        ...

    def close(self) -> None: ...


class WholeSteps(ABC):
    """Of an engine that computes a step on the thread that asks for it: nothing is left to wait for."""

    @abstractmethod
    def step(self, batch: Sequence[Entry]) -> list[Result]: ...

    def begin(self, batch: Sequence[Entry]) -> Finish:
        results = self.step(batch)
        return lambda: results


@runtime_checkable
class MapsWeights(Protocol):
    """An engine that can leave weights in their file (:attr:`EngineCapabilities.mapped_bytes`)."""

    def resident_bytes(self, *, exact: bool = False) -> int | None:
        """How many of these bytes are in memory now; an estimate, in 2 ms, unless ``exact``. None where the system does
        not tell.
        """
        ...


@runtime_checkable
class MovesBlocks(Protocol):
    """An engine whose blocks of paged state can be moved to another one of the same bundle and processor level.

    A block's content is ``block_bytes`` long: that of all layers, in the order of the bundle's state. Neither call
    changes the state of other blocks. Both may be made by any thread, also during a step, for blocks that no entry of
    the step writes; of one that no sequence has, one thread at a time writes.
    """

    def read_block(self, block: int, content: memoryview) -> None:
        """Copy what a block holds to ``content``."""
        ...

    def write_block(self, block: int, content: memoryview) -> None:
        """A block holds ``content`` from now on, which :meth:`read_block` of such an engine has given."""
        ...
