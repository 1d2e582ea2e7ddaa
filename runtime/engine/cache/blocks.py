"""Blocks of KV memory: who holds them, and which can be found again by what they contain.

A block is *free* (nobody holds it, and nothing is known of its content), *held* (by one sequence or several), or
*cached* (held by nobody, but its content has a key). Blocks are taken from the free ones first, then from the cached
ones, the least recently used first. Neither numpy nor an engine is imported here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from itertools import chain, islice


class BlockPool:
    """``blocks`` blocks, numbered from 0."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self._free = list(range(blocks - 1, -1, -1))
        self._holders = [0] * blocks
        self._key: dict[int, bytes] = {}
        self._block: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # the least recently used first
        self.moving: list[int] = []  # held by nobody's sequence: they are on their way from or to another engine
        self._changes: dict[bytes, bool] | None = None  # keys, and whether they are there now; None: nobody asks

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

    @property
    def keys(self) -> Collection[bytes]:
        """Of all content that can be found."""
        return self._block.keys()

    def recent(self, most: int) -> list[bytes]:
        """Keys of the content that was used last: of blocks that are held, then of cached ones. Of a sequence, the
        first block comes before those behind it.
        """
        held = (key for block, key in self._key.items() if self._holders[block])
        return list(islice(chain(held, (self._key[block] for block in reversed(self._cached))), most))

    def take_changes(self) -> dict[bytes, bool]:
        """Keys that came or went since the last call, and whether each is there now. The first call begins to note
        them, and gives none.
        """
        changes, self._changes = self._changes or {}, {}
        return changes

    def forget_changes(self) -> None:
        """Note them no longer: nobody asks."""
        self._changes = None

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
            key = self._key.pop(block)
            del self._block[key]
            if self._changes is not None:
                self._changes[key] = False
        self._holders[block] = 1
        return block

    def publish(self, block: int, key: bytes) -> None:
        """A held block is full, and this is the key of its content. The first block of a key stays the one found."""
        if block not in self._key and key not in self._block:
            self._key[block], self._block[key] = key, block
            if self._changes is not None:
                self._changes[key] = True

    def forget(self, block: int, key: bytes) -> None:
        """Free a cached block of this key. Nothing changes where it is held, or has been taken since."""
        if block in self._cached and self._key.get(block) == key:
            del self._cached[block], self._key[block], self._block[key]
            self._free.append(block)
            if self._changes is not None:
                self._changes[key] = False

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
        for block in self.moving:
            counts[block] += 1
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
