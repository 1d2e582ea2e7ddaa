"""Blocks of one engine by the keys of their content: read for another engine, and written with what another one sent.

Called between steps, by the thread that steps.
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

    def read(self, key: bytes, content: memoryview) -> bool:
        """Copy the block of a key to ``content``; False, and nothing is copied, where there is none."""
        found = self._pool.find([key])
        if not found or self._engine is None:
            return False
        self._engine.read_block(found[0], content)
        self.sent += 1
        return True

    def write(self, key: bytes, content: memoryview) -> bool:
        """Keep a block that another engine has sent, so that it is found by its key; False where there is no room.

        It takes the memory of the block that nobody has used for longest, as a sequence would, and none that is held.
        """
        if self._pool.find([key]):
            return True
        if self._engine is None or (taken := self._pool.take(1)) is None:
            return False
        try:
            self._engine.write_block(taken[0], content)
            self._pool.publish(taken[0], key)
            self.fetched += 1
        finally:
            self._pool.release(taken)
        return True
