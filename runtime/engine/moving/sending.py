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
from queue import SimpleQueue
from typing import NamedTuple

from runtime.engine.block_store import BlockStore
from runtime.wire.block_keys import checksum
from runtime.wire.codec import WireError
from runtime.wire.failures import Failure
from runtime.wire.messages import (
    MOST_KEYS,
    SHARED_HEAD_BYTES,
    WHOLE_KEY_BYTES,
    FetchState,
    SharedPlace,
    StatePart,
)
from tapeout.errors import TapeoutError

MOST_UNSENT_BYTES = 8 << 20  # copied for one engine that has not read them


class _Wanted(NamedTuple):
    """``place``: in shared memory; None where the content goes through the socket."""

    key: bytes
    place: memoryview | None


class BlockSender:
    """``end``: of the connection. ``send``: a message on it, from any thread.

    ``room``: is called, by another thread, once there is room for more blocks. If sending fails, the connection is shut
    down, which its reader notices.
    """

    def __init__(
        self,
        end: socket.socket,
        send: Callable[[StatePart | Failure], None],
        digest: str,
        level: str,
        room: Callable[[], None],
    ) -> None:
        self._end, self._send, self._room = end, send, room
        self._digest, self._level = digest, level
        self._wanted: deque[_Wanted] = deque()
        self._unsent: SimpleQueue[tuple[StatePart | Failure, memoryview | None] | None] = SimpleQueue()
        self._unsent_bytes, self._lock = 0, threading.Lock()
        self._shared: tuple[SharedPlace, memoryview | None] | None = None
        threading.Thread(target=self._send_all, name="block-sender", daemon=True).start()

    @property
    def ready(self) -> bool:
        """A block is wanted, and there is room for a copy of it."""
        return bool(self._wanted) and self._unsent_bytes < MOST_UNSENT_BYTES

    def ask(self, message: FetchState, store: BlockStore) -> None:
        """:class:`WireError` for keys that are none, more of them than are kept, or places that do not exist."""
        keys = [message.keys[at : at + WHOLE_KEY_BYTES] for at in range(0, len(message.keys), WHOLE_KEY_BYTES)]
        if (keys and len(keys[-1]) != WHOLE_KEY_BYTES) or len(self._wanted) + len(keys) > MOST_KEYS:
            raise WireError(f"{len(message.keys)} bytes of keys", expected=f"whole keys, {MOST_KEYS} at most")
        try:
            store.require(message.kind)
        except TapeoutError as error:
            self._unsent.put((Failure.of(error), None))
            return
        memory = self._opened(message.shared) if message.shared else None
        size = store.block_bytes
        for number, key in enumerate(keys, message.place):
            at = SHARED_HEAD_BYTES + number * size
            if memory is not None and at + size > len(memory):
                raise WireError(f"place {number} in {len(memory)} bytes", expected="places within shared memory")
            self._wanted.append(_Wanted(key, None if memory is None else memory[at : at + size]))

    def copy_next(self, store: BlockStore) -> None:
        """Copy the next block that is wanted, or say that it is not there. Called between steps."""
        key, place = self._wanted.popleft()
        content = memoryview(bytearray(store.block_bytes)) if place is None else place
        if not store.read(key, content):
            self._unsent.put((StatePart(key, found=False), None))
            return
        with self._lock:
            self._unsent_bytes += len(content)
        self._unsent.put((StatePart(key, found=True, shared=place is not None), content))

    def close(self) -> None:
        """What is not sent yet is not sent any more."""
        self._wanted.clear()
        with suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)
        self._unsent.put(None)

    def _send_all(self) -> None:
        """Of the thread."""
        try:
            while (item := self._unsent.get()) is not None:
                message, content = item
                if content is not None and isinstance(message, StatePart):
                    check = checksum(message.key, self._digest, self._level, content)
                    message = message._replace(checksum=check, content=b"" if message.shared else bytes(content))
                self._send(message)
                if content is not None:
                    with self._lock:
                        self._unsent_bytes -= len(content)
                    self._room()
        except (OSError, TapeoutError):
            with suppress(OSError):
                self._end.shutdown(socket.SHUT_RDWR)

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
