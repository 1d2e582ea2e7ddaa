"""All state of one engine's sequences: a pool for each kind that its model has, and the cache over both."""

from __future__ import annotations

from dataclasses import replace

from runtime.engine.cache.blocks import BlockPool
from runtime.engine.cache.paged import PagedState
from runtime.engine.cache.recurrent import RecurrentState
from runtime.engine.cache.sequences import SequenceCache
from runtime.wire.limits import Limits


class StatePools:
    """``blocks``, ``slots``, ``snapshot_tokens``: see :class:`engines.protocol.EngineCapabilities`."""

    def __init__(
        self, *, blocks: int, slots: int, block_tokens: int, max_tokens: int, snapshot_tokens: int = 0
    ) -> None:
        self.paged = PagedState(BlockPool(blocks), block_tokens)
        self.recurrent = RecurrentState(BlockPool(slots), block_tokens, snapshot_tokens)
        kinds = [kind for kind in (self.paged, self.recurrent) if kind.pool.blocks]
        self.cache = SequenceCache(kinds, block_tokens, max_tokens)

    def within(self, limits: Limits) -> Limits:
        """Each running request has a slot of recurrent state: whoever looks at the load sees how many can run."""
        slots = self.recurrent.pool.blocks
        return replace(limits, max_running=min(limits.max_running, slots or limits.max_running))
