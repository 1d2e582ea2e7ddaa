"""Blocks of KV memory: who holds them, and which can be found again by what they contain.

A block is *free* (nobody holds it, and nothing is known of its content), *held* (by one sequence or several), or
*cached* (held by nobody, but its content has a key). Blocks are taken from the free ones first, then from the cached
ones, the least recently used first. Neither numpy nor an engine is imported here.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence


def block_keys(
    tokens: Sequence[int], block_tokens: int, cache_salt: bytes = b"", known: Sequence[bytes] = ()
) -> list[bytes]:
    """A key for each full block of ``tokens``: the sha256 of the key before it and of its own tokens.

    So a key stands for all tokens up to the end of its block, and for the salt: sequences of
    different salts never share a block. ``known``: keys of the first blocks, which are not computed again.

    >>> first, second = block_keys([1, 2, 3, 4, 5], 2)
    >>> block_keys([1, 2, 9, 9], 2)[0] == first, block_keys([9, 9, 3, 4], 2)[1] == second
    (True, False)
    """
    keys = list(known)
    previous = keys[-1] if keys else hashlib.sha256(cache_salt).digest()
    for start in range(len(keys) * block_tokens, len(tokens) - block_tokens + 1, block_tokens):
        content = array("q", tokens[start : start + block_tokens]).tobytes()
        previous = hashlib.sha256(previous + content).digest()
        keys.append(previous)
    return keys


class BlockPool:
    """``blocks`` blocks, numbered from 0."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self._free = list(range(blocks - 1, -1, -1))
        self._holders = [0] * blocks
        self._key: dict[int, bytes] = {}
        self._block: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # the least recently used first

    @property
    def available(self) -> int:
        """Blocks that can be taken."""
        return len(self._free) + len(self._cached)

    @property
    def held(self) -> int:
        return self.blocks - self.available

    @property
    def cached(self) -> int:
        return len(self._cached)

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """The blocks of the first keys, up to the first that is not known."""
        found: list[int] = []
        for key in keys:
            block = self._block.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def hold(self, blocks: Sequence[int]) -> None:
        """One more sequence holds these, which are held or cached."""
        for block in blocks:
            if not self._holders[block]:
                del self._cached[block]
            self._holders[block] += 1

    def take(self, count: int) -> list[int] | None:
        """Blocks of unknown content for one sequence; None, and nothing changes, if there are not so many."""
        if count > self.available:
            return None
        return [self._take() for _ in range(count)]

    def _take(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            del self._block[self._key.pop(block)]
        self._holders[block] = 1
        return block

    def publish(self, block: int, key: bytes) -> None:
        """A held block is full, and this is the key of its content. The first block of a key stays the one found."""
        if block not in self._key and key not in self._block:
            self._key[block], self._block[key] = key, block

    def release(self, blocks: Sequence[int]) -> None:
        """One sequence gives these up, in the order of its positions. The last are the first to be taken again."""
        for block in reversed(blocks):
            assert self._holders[block] > 0, f"block {block} is held by nobody"
            self._holders[block] -= 1
            if self._holders[block]:
                continue
            if block in self._key:
                self._cached[block] = None
            else:
                self._free.append(block)

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Every block has one state, and is held as often as it is in ``tables``, the blocks of all sequences."""
        counts = [0] * self.blocks
        for table in tables:
            assert len(set(table)) == len(table), f"a block is twice in {table}"
            for block in table:
                counts[block] += 1
        assert counts == self._holders, "blocks are not held as often as they are in block tables"
        idle = {block for block in range(self.blocks) if not counts[block]}
        assert len(self._free) == len(set(self._free)), "a block is free twice"
        assert idle == set(self._free) | self._cached.keys(), "a block that nobody holds is lost"
        assert not set(self._free) & self._key.keys(), "a free block has a key"
        assert set(self._cached) <= self._key.keys(), "a cached block has no key"
        assert {key: block for block, key in self._key.items()} == self._block, "keys and blocks differ"
