"""Paged state: a sequence has a block for each ``block_tokens`` positions, and shares full ones with others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from runtime.engine.cache.blocks import BlockPool
from runtime.engine.cache.kinds import Demand, Lease, Match


class PagedState:
    """See :class:`runtime.engine.cache.kinds.StateKind`."""

    trims = True

    def __init__(self, pool: BlockPool, block_tokens: int) -> None:
        self.pool, self._size = pool, block_tokens
        self.max_tokens = pool.blocks * block_tokens
        self._promised: dict[bytes, Lease] = {}  # keys of blocks that a running sequence will publish

    def longest(self, keys: Sequence[bytes]) -> tuple[int, int]:
        found = later = len(self.pool.find(keys))
        while later < len(keys) and keys[later] in self._promised:
            later += 1
        return found, later

    def hold(self, lease: Lease, match: Match) -> None:
        lease.blocks = self.pool.find(lease.keys[: match.tokens // self._size])
        lease.published = len(lease.blocks)
        self.pool.hold(lease.blocks)

    def fits(self, lease: Lease, tokens: int, demands: Sequence[Demand]) -> bool:
        available = self.pool.available - self._missing(lease, tokens)
        growth = 0
        for other, has, end in demands:
            blocks = len(other.blocks)
            if end is None:
                growth -= blocks
            elif end > has and end > blocks * self._size:
                growth += -(-end // self._size) - max(blocks, -(-has // self._size))
        return 0 <= available >= growth

    def take(self, lease: Lease, tokens: int) -> None:
        taken = self.pool.take(self._missing(lease, tokens))
        assert taken is not None, "blocks are taken without a look at whether there are so many"
        lease.blocks += taken
        for key in lease.keys[lease.published :]:
            self._promised.setdefault(key, lease)

    def grow(self, lease: Lease, end: int) -> int:
        lease.blocks += self.pool.take(max(0, self._missing(lease, end))) or ()
        return len(lease.blocks) * self._size

    def commit(self, lease: Lease, computed: int) -> None:
        full = computed // self._size
        for index in range(lease.published, full):
            key = lease.keys[index]
            self.pool.publish(lease.blocks[index], key)
            if self._promised.get(key) is lease:
                del self._promised[key]
        lease.published = full

    def due(self, lease: Lease) -> int:
        return (lease.published + 1) * self._size

    def close(self, lease: Lease) -> None:
        for key in lease.keys[lease.published :] if lease.room else ():  # else it has promised nothing
            if self._promised.get(key) is lease:
                del self._promised[key]
        self.pool.release(lease.blocks)
        lease.blocks = []

    def can_grow(self, sequences: int) -> bool:
        return sequences <= self.pool.available

    def check(self, leases: Iterable[Lease]) -> None:
        leases = set(leases)
        self.pool.check(lease.blocks for lease in leases)
        assert set(self._promised.values()) <= leases, "nobody computes a block that others wait for"

    def _missing(self, lease: Lease, tokens: int) -> int:
        return -(-tokens // self._size) - len(lease.blocks)
