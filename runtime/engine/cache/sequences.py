"""The cache of sequences over all kinds of state that a model's layers have.

A prefix is found by the keys of its blocks (:func:`runtime.wire.block_keys.block_keys`), and resumed at the longest
point at which *every* kind of state can: keys and values at each full block, recurrent state where a snapshot is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from runtime.engine.cache.kinds import Demand, Lease, Match, StateKind
from runtime.wire.block_keys import block_keys


class SequenceCache:
    """All that a scheduler sees of memory. ``max_tokens``: positions that a sequence may have.

    ``trims``: a sequence can drop its last positions. Where not, it cannot have drafts: those that are rejected would
    stay in its state, and to feed the others again from a snapshot costs what the accepted ones saved.
    """

    def __init__(self, kinds: Sequence[StateKind], block_tokens: int, max_tokens: int) -> None:
        self._kinds, self._size = kinds, block_tokens
        self.max_tokens = min(max_tokens, *(kind.max_tokens for kind in kinds))
        self.trims = all(kind.trims for kind in kinds)

    @property
    def held(self) -> int:
        """Blocks and slots that sequences have."""
        return sum(kind.pool.held for kind in self._kinds)

    def match(self, lease: Lease, tokens: Sequence[int], most: int) -> Match:
        """Where a sequence of these tokens can resume, at most at position ``most``."""
        self._extend_keys(lease, tokens)
        keys = lease.keys[: most // self._size]
        now, later = zip(*[kind.longest(keys) for kind in self._kinds], strict=True)
        resume = self._agreed(keys, now, 0)
        return Match(resume * self._size, max(now) * self._size, self._agreed(keys, later, 1) > resume)

    def resumable(self, keys: Sequence[bytes]) -> int:
        """After how many of these blocks a sequence can resume now."""
        return self._agreed(keys, [kind.longest(keys)[0] for kind in self._kinds], 0)

    def open(self, lease: Lease, match: Match, tokens: int, demands: Sequence[Demand]) -> bool:
        """Give a sequence of so many tokens its state up to a match, and room for the rest.

        False, and it has nothing, where that does not fit beside the ``demands``, its own among them.
        """
        for kind in self._kinds:
            kind.hold(lease, match)
        if not all(kind.fits(lease, tokens, demands) for kind in self._kinds):
            self.close(lease)
            return False
        for kind in self._kinds:
            kind.take(lease, tokens)
        self.grow(lease, match.tokens)
        return True

    def grow(self, lease: Lease, end: int) -> bool:
        """Make room for positions below ``end``; False where there is too little, and ``lease.room`` says for how many.

        Called for positions beyond ``lease.room``, and before their tokens are fed.
        """
        lease.room = min([kind.grow(lease, end) for kind in self._kinds])
        lease.due = min([kind.due(lease) for kind in self._kinds])
        return lease.room >= end

    def commit(self, lease: Lease, tokens: Sequence[int], computed: int) -> None:
        """Others can find the state of the first ``computed`` tokens. Called once these are ``lease.due`` or more."""
        self._extend_keys(lease, tokens[:computed])
        for kind in self._kinds:
            kind.commit(lease, computed)
        lease.due = min([kind.due(lease) for kind in self._kinds])

    def close(self, lease: Lease) -> None:
        """Give up all state. Its keys are kept: it may open again."""
        for kind in self._kinds:
            kind.close(lease)
        lease.room = 0

    def can_grow(self, sequences: int) -> bool:
        """Whether so many sequences can each grow by a token."""
        return all(kind.can_grow(sequences) for kind in self._kinds)

    def check(self, leases: Iterable[Lease]) -> None:
        """The bookkeeping adds up, where ``leases`` are all that are open; for tests, and for a server that is idle."""
        leases = list(leases)
        for kind in self._kinds:
            kind.check(leases)

    def _agreed(self, keys: Sequence[bytes], points: Sequence[int], when: int) -> int:
        """After how many blocks all kinds can resume. ``points``: each of them alone; ``when``: 0 now, 1 later."""
        while min(points) < max(points):
            keys = keys[: min(points)]
            points = [kind.longest(keys)[when] for kind in self._kinds]
        return points[0]

    def _extend_keys(self, lease: Lease, tokens: Sequence[int]) -> None:
        if len(tokens) // self._size > len(lease.keys):
            lease.keys = block_keys(tokens, self._size, lease.cache_salt, lease.keys)
