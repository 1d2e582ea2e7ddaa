"""Blocks of one engine by the keys of their content: lent to another engine, and taken in from one.

Which blocks move is said between steps, by the thread that steps. Their content may be copied meanwhile, by any thread:
a block with a key is never written again while somebody holds it, and one that is reserved belongs to no sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

from engines.protocol import Engine, MovesBlocks
from runtime.engine.cache.blocks import BlockPool
from runtime.wire.block_keys import block_keys
from runtime.wire.messages import MovedKind
from tapeout.errors import RequestError


class BlockStore:
    """``pool``: of the engine's blocks. ``fetched``, ``sent``, ``failed``: see :class:`EngineStats`.

    ``fetch_seconds``: see :class:`EngineLoad`.
    """

    def __init__(self, engine: Engine, pool: BlockPool) -> None:
        has = engine.capabilities
        self.digest = engine.digest
        self.block_tokens, self.block_bytes = has.block_tokens, has.block_bytes
        self.fetched = self.sent = self.failed = 0
        self.fetch_seconds = 0.0
        self._pool, self._recurrent = pool, bool(has.slots)
        self._engine = engine if has.blocks and has.shares_blocks and isinstance(engine, MovesBlocks) else None

    @property
    def moves(self) -> bool:
        """Blocks are all the state that sequences have, and the engine can read and write them."""
        return self._engine is not None and not self._recurrent

    def require(self, kind: MovedKind) -> None:
        """:class:`RequestError` for state that this engine does not send."""
        if kind == "recurrent" or not self.moves:
            what = "recurrent state" if kind == "recurrent" or self._recurrent else "blocks of this kind of engine"
            raise RequestError(f"{what} cannot be moved yet", expected="paged state of an engine without other state")

    def missing(self, tokens: Sequence[int], cache_salt: bytes) -> list[bytes]:
        """Keys of the blocks of these tokens that are not here, from the first such block on.

        The last token is left out: it is computed in any case.
        """
        keys = block_keys(tokens[:-1], self.block_tokens, cache_salt)
        return keys[len(self._pool.find(keys)) :]

    def absent(self, keys: Sequence[bytes]) -> list[bytes]:
        """Those of these keys that no block here has."""
        return [key for key in keys if not self._pool.find([key])]

    def recent(self, most: int) -> list[bytes]:
        """See :meth:`BlockPool.recent`."""
        return self._pool.recent(most)

    @property
    def empty(self) -> bool:
        """No content is known of any block."""
        return not self._pool.keys

    @property
    def unused(self) -> int:
        """Blocks that neither sequences have nor content is known of."""
        return self._pool.available - self._pool.cached

    def lend(self, key: bytes) -> int | None:
        """The block of a key, which stays what it is until it is given back; None where there is none."""
        found = self._pool.find([key])
        if not found or self._engine is None:
            return None
        self._pool.hold(found)
        self._pool.moving += found
        self.sent += 1
        return found[0]

    def reserve(self, most: int, spare: int) -> list[int]:
        """Up to so many blocks for content that comes, where ``spare`` ones are left to sequences that run.

        They are the ones that nobody has used for longest, as a sequence would take them.
        """
        if self._engine is None:
            return []
        taken = self._pool.take(max(0, min(most, self._pool.available - spare))) or []
        self._pool.moving += taken
        return taken

    def keep(self, blocks: Sequence[int], keys: Sequence[bytes]) -> None:
        """These reserved blocks hold what their keys say, from now on to be found by them."""
        for block, key in zip(blocks, keys, strict=True):
            self._pool.publish(block, key)
        self.fetched += len(blocks)
        self.give_back(blocks)

    def give_back(self, blocks: Sequence[int]) -> None:
        """Blocks that were lent, or reserved for content that has not come."""
        for block in blocks:
            self._pool.moving.remove(block)
        self._pool.release(blocks)

    def read(self, block: int, content: memoryview) -> None:
        """Copy a block that is lent to ``content``. Called by any thread."""
        assert self._engine is not None, "no block was lent"
        self._engine.read_block(block, content)

    def write(self, block: int, content: memoryview) -> None:
        """Fill a block that is reserved. Called by any thread."""
        assert self._engine is not None, "no block was reserved"
        self._engine.write_block(block, content)
