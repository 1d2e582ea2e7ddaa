"""Blocks on their way to one engine that fetches them."""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import NamedTuple

from runtime.engine.block_store import BlockStore
from runtime.engine.moving.checksums import checksum
from runtime.wire.codec import WireError
from runtime.wire.failures import Failure
from runtime.wire.messages import (
    MOST_KEYS,
    SHARED_HEAD_BYTES,
    WHOLE_KEY_BYTES,
    FetchState,
    FindState,
    SharedPlace,
    StateKeys,
    StatePart,
)
from tapeout.errors import TapeoutError

MOST_LENT_BYTES = 32 << 20  # of blocks that one engine has asked for and not yet got: nobody else can have their memory


class _Wanted(NamedTuple):
    """``place``: in shared memory; None where the content goes through the socket."""

    key: bytes
    place: memoryview | None


class _Lent(NamedTuple):
    """``block``: None where there is none of this key."""

    key: bytes
    block: int | None
    place: memoryview | None


class BlockSender:
    """``end``: of the connection. ``send``: a message on it, from any thread.

    A thread copies blocks and sends them, while the engine steps. Between steps the engine's own thread lends them
    (:meth:`work`). ``sent``: is called by the thread once these can be given back. If sending fails, the connection is
    shut down, which its reader notices.
    """

    def __init__(
        self,
        end: socket.socket,
        send: Callable[[StatePart | StateKeys | Failure], None],
        store: BlockStore,
        digest: str,
        level: str,
        sent: Callable[[], None],
    ) -> None:
        self._end, self._send, self._sent = end, send, sent
        self._store, self._digest, self._level = store, digest, level
        self._wanted: deque[_Wanted] = deque()
        self._lent: SimpleQueue[_Lent | StateKeys | Failure | None] = SimpleQueue()
        self._copied: SimpleQueue[int] = SimpleQueue()
        self._outstanding = list[int]()  # blocks that are lent
        self._most = max(1, MOST_LENT_BYTES // max(1, store.block_bytes))  # 0: an engine without blocks refuses
        self._shared: tuple[SharedPlace, memoryview | None] | None = None
        self._thread = threading.Thread(target=self._send_all, name="block-sender", daemon=True)
        self._thread.start()

    def ask(self, message: FetchState | FindState) -> None:
        """:class:`WireError` for keys that are none, more of them than are kept, or places that do not exist."""
        if isinstance(message, FindState):
            self._lent.put(StateKeys(b"".join(self._store.recent(message.most))))
            return
        keys = [message.keys[at : at + WHOLE_KEY_BYTES] for at in range(0, len(message.keys), WHOLE_KEY_BYTES)]
        if (keys and len(keys[-1]) != WHOLE_KEY_BYTES) or len(self._wanted) + len(keys) > MOST_KEYS:
            raise WireError(f"{len(message.keys)} bytes of keys", expected=f"whole keys, {MOST_KEYS} at most")
        try:
            self._store.require(message.kind)
        except TapeoutError as error:
            self._lent.put(Failure.of(error))
            return
        memory = self._opened(message.shared) if message.shared else None
        size = self._store.block_bytes
        for number, key in enumerate(keys, message.place):
            at = SHARED_HEAD_BYTES + number * size
            if memory is not None and at + size > len(memory):
                raise WireError(f"place {number} in {len(memory)} bytes", expected="places within shared memory")
            self._wanted.append(_Wanted(key, None if memory is None else memory[at : at + size]))
        self.work()

    def work(self) -> bool:
        """Take back what was sent, and lend what is wanted; whether there was any. Called between steps."""
        worked = False
        with suppress(Empty):
            while True:
                block = self._copied.get_nowait()
                self._outstanding.remove(block)
                self._store.give_back([block])
                worked = True
        while self._wanted and len(self._outstanding) < self._most:
            key, place = self._wanted.popleft()
            block = self._store.lend(key)
            if block is not None:
                self._outstanding.append(block)
            self._lent.put(_Lent(key, block, place))
            worked = True
        return worked

    def close(self) -> None:
        """What is not sent yet is not sent any more. Waits until no block is being copied."""
        self._wanted.clear()
        with suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)
        self._lent.put(None)
        self._thread.join()
        self._store.give_back(self._outstanding)
        self._outstanding.clear()

    def _send_all(self) -> None:
        """Of the thread."""
        try:
            while (item := self._lent.get()) is not None:
                if isinstance(item, Failure | StateKeys):
                    self._send(item)
                elif item.block is None:
                    self._send(StatePart(item.key, found=False))
                else:
                    self._send(self._part(item.key, item.block, item.place))
                    self._copied.put(item.block)
                    if self._lent.empty():
                        self._sent()
        except (OSError, TapeoutError):
            with suppress(OSError):
                self._end.shutdown(socket.SHUT_RDWR)

    def _part(self, key: bytes, block: int, place: memoryview | None) -> StatePart:
        content = memoryview(bytearray(self._store.block_bytes)) if place is None else place
        self._store.read(block, content)
        check = checksum(key, self._digest, self._level, content)
        return StatePart(key, True, place is not None, check, b"" if place is not None else bytes(content))

    def _opened(self, shared: SharedPlace) -> memoryview | None:
        """Memory of the other engine; None where it is on another machine, or not to be had for another reason."""
        if self._shared is None or self._shared[0] != shared:
            self._shared = shared, map_shared(shared)
        return self._shared[1]


def map_shared(shared: SharedPlace) -> memoryview | None:
    path = Path(f"/proc/{shared.pid}/fd/{shared.descriptor}")
    try:
        if not str(path.readlink()).startswith("/memfd:"):  # another file is not for us to write to
            return None
        descriptor = os.open(path, os.O_RDWR)
    except OSError:
        return None
    try:
        size = os.fstat(descriptor).st_size
        if size < SHARED_HEAD_BYTES or not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            return None  # memory that its owner cuts off would end this process
        memory = memoryview(mmap.mmap(descriptor, size))
    except (OSError, ValueError):
        return None
    finally:
        os.close(descriptor)
    return memory if bytes(memory[: len(shared.mark)]) == shared.mark else None
