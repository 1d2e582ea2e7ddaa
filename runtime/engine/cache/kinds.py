"""What every kind of state must do for a cache of sequences, and what a sequence has of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeAlias

from runtime.engine.cache.blocks import BlockPool
from tapeout.state import NO_SLOT


@dataclass(eq=False)
class Lease:
    """What one sequence has of the cache: from its arrival on the keys of its full blocks, and state while it runs.

    ``room``: positions that it has state for, or memory for their state. ``due``: computed positions of which the cache
    must be told. ``blocks``, ``slot`` and ``snapshots``: see :class:`engines.protocol.Entry`.
    """

    cache_salt: bytes = b""
    keys: list[bytes] = field(default_factory=list[bytes])
    room: int = 0
    due: int = 0
    blocks: list[int] = field(default_factory=list[int])
    published: int = 0  # blocks that others can find
    slot: int = NO_SLOT
    snapshots: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])


class Match(NamedTuple):
    """Where a sequence can resume. ``known``: where it could, if the state of one kind were all that it needs.

    ``awaited``: it could resume later in its tokens, once a running sequence has computed what it is at.
    """

    tokens: int
    known: int
    awaited: bool


# What a sequence is expected to need: its lease, how many tokens it has, and how many positions it will have computed;
# None: it can be preempted, so what it has counts as free. A plain tuple: an admission makes one for each request.
Demand: TypeAlias = tuple[Lease, int, int | None]


class StateKind(Protocol):
    """One kind of state of all sequences. ``max_tokens``: positions that one of them may have.

    ``trims``: a sequence can drop its last positions, so drafts can be rejected.
    """

    pool: BlockPool
    max_tokens: int
    trims: bool

    def longest(self, keys: Sequence[bytes]) -> tuple[int, int]:
        """After how many of these blocks, at most, a sequence can resume: now, and once running sequences have computed
        what they are at."""
        ...

    def hold(self, lease: Lease, match: Match) -> None:
        """Keep the state that a lease resumes at. :meth:`take` or :meth:`close` must follow."""
        ...

    def fits(self, lease: Lease, tokens: int, demands: Sequence[Demand]) -> bool:
        """Whether there is room for so many tokens beside what is held, and for all demands."""
        ...

    def take(self, lease: Lease, tokens: int) -> None:
        """Take that room."""
        ...

    def grow(self, lease: Lease, end: int) -> int:
        """Take memory for positions below ``end``, or none where there is too little. Positions it has room for now."""
        ...

    def commit(self, lease: Lease, computed: int) -> None:
        """Its state at or before ``computed`` can be found by others from now on."""
        ...

    def due(self, lease: Lease) -> int:
        """Computed positions from which on there is something to commit."""
        ...

    def close(self, lease: Lease) -> None:
        """Give up all state; what others can find stays, until its memory is needed."""
        ...

    def can_grow(self, sequences: int) -> bool:
        """Whether so many sequences can each grow by a token."""
        ...

    def check(self, leases: Iterable[Lease]) -> None:
        """The sums add up, where ``leases`` are all that are open."""
        ...
