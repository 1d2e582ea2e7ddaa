"""Caches of sequences for tests of what stands on them."""

from __future__ import annotations

from runtime.engine.cache.blocks import BlockPool
from runtime.engine.cache.paged import PagedState
from runtime.engine.cache.sequences import SequenceCache


def paged_cache(blocks: int, block_tokens: int, max_tokens: int) -> SequenceCache:
    """Of a dense decoder."""
    return SequenceCache([PagedState(BlockPool(blocks), block_tokens)], block_tokens, max_tokens)
