"""Blocks that another engine sends, in a thread for each such engine."""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from queue import Empty, SimpleQueue
from secrets import token_bytes
from time import monotonic
from typing import Any

from runtime.engine.block_store import BlockStore
from runtime.engine.moving.checksums import checksum
from runtime.wire.address import Address
from runtime.wire.codec import WireError
from runtime.wire.failures import Failure
from runtime.wire.messages import (
    SHARED_HEAD_BYTES,
    WHOLE_KEY_BYTES,
    Close,
    EngineInfo,
    FetchState,
    FindState,
    Heartbeat,
    Leaving,
    SharedPlace,
    StateKeys,
    StatePart,
    StepReport,
)
from runtime.wire.session import Session
from tapeout.errors import ArtifactError, TapeoutError, one_line

# Without a byte from the other engine, which may be in a long step. Requests are less patient, see `moves`.
STALL_SECONDS = 2.0
IDLE_SECONDS = 30.0  # that a connection stays without a fetch
AHEAD_BYTES, MOST_AHEAD = 8 << 20, 64  # blocks that are asked for and not taken in yet
ASK_BYTES = 4 << 20  # asked for at once
RECEIVE_BYTES = 1 << 20
# The other engine says these to everybody, until it knows who this is; one that leaves its bundle still has blocks.
_FOR_SERVERS = StepReport, Heartbeat, Leaving


class Fetch:
    """One chain of blocks, and those that are reserved here for their content. The thread of a link fills one after
    another, counts them in ``done``, and sets ``ended`` once it touches none of them any more.

    ``since``: when it began. ``failure``: why it has ended, if not because all blocks came that there are.
    ``given_up``: nobody wants it any more.
    """

    def __init__(self, keys: Sequence[bytes], blocks: Sequence[int]) -> None:
        self.keys, self.blocks, self.since = keys, blocks, monotonic()
        self.done = 0
        self.ended = self.given_up = False
        self.failure = ""


class KeysFetch:
    """Keys of the blocks that the other engine has used last. ``ended``, ``failure``: see :class:`Fetch`."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.keys: list[bytes] = []
        self.ended = self.given_up = False
        self.failure = ""


class PeerLink:
    """A connection to one engine, made when there is something to fetch and kept for a while.

    ``info``: of this engine; the other one must have the same bundle and level. ``ended``: is called by the thread
    whenever a fetch has ended.
    """

    def __init__(
        self, address: str, key: bytes, info: EngineInfo, store: BlockStore, ended: Callable[[], None]
    ) -> None:
        self.address = address
        self._key, self._info, self._ended, self._store = key, info, ended, store
        self._block_bytes = store.block_bytes
        ahead = max(1, min(AHEAD_BYTES // store.block_bytes, MOST_AHEAD))
        self._at_once = max(1, min(ASK_BYTES // store.block_bytes, ahead // 2))
        self._places = ahead // self._at_once * self._at_once
        self._fetches: SimpleQueue[Fetch | KeysFetch | None] = SimpleQueue()
        self._end: socket.socket | None = None
        self._session = Session("server", key)
        self._messages: deque[Any] = deque()
        self._shared: tuple[int, memoryview, SharedPlace] | None = None
        threading.Thread(target=self._run, name="block-fetcher", daemon=True).start()

    def start(self, fetch: Fetch | KeysFetch) -> None:
        self._fetches.put(fetch)

    def close(self) -> None:
        self._fetches.put(None)

    def _run(self) -> None:
        """Of the thread."""
        while True:
            try:
                fetch = self._fetches.get(timeout=IDLE_SECONDS)
            except Empty:
                self._leave()
                continue
            if fetch is None:
                break
            try:
                if not fetch.given_up:
                    if isinstance(fetch, KeysFetch):
                        self._connect()
                        self._fetch_keys(fetch)
                    else:
                        fetch.since = monotonic()
                        self._connect()
                        self._fetch(fetch)
            except Exception as error:  # of any kind: what waits for the fetch must hear of its end
                fetch.failure = one_line(error)
            finally:
                if fetch.failure:
                    self._leave()
                fetch.ended = True
                self._ended()
        self._leave()
        if self._shared is not None:
            os.close(self._shared[0])

    def _connect(self) -> None:
        """Unless there is a connection. :class:`TapeoutError` where the other engine's blocks are of no use here."""
        if self._end is not None and self._sound(self._end):
            return
        self._leave()
        address = Address.parse(self.address)
        address.require_key(self._key)
        if address.path:
            end = socket.socket(socket.AF_UNIX)
            end.settimeout(STALL_SECONDS)
            self._end = end
            end.connect(address.path)
        else:
            self._end = end = socket.create_connection((address.host, address.port), STALL_SECONDS)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.settimeout(STALL_SECONDS)
        self._session = Session("server", self._key)
        self._messages.clear()
        self._flush()
        other = self._receive()
        if not isinstance(other, EngineInfo):
            raise other.error() if isinstance(other, Failure) else WireError("no EngineInfo", expected="EngineInfo")
        here = self._info
        found, wanted = (
            (one.digest, one.level, one.block_tokens, one.block_bytes, one.moves_blocks) for one in (other, here)
        )
        if found != wanted:
            raise ArtifactError(
                f"the engine at {self.address} has bundle {other.digest[:12]} at level {other.level or 'none'}",
                expected=f"bundle {here.digest[:12]} at level {here.level or 'none'}: blocks of others do not fit",
            )

    def _fetch(self, fetch: Fetch) -> None:
        """Blocks are asked for in groups, each of which has places of its own until it was taken in."""
        shared, keys = self._memory(), fetch.keys
        wanted, asked, whole = deque[tuple[bytes, int]](), 0, True
        while True:
            whole &= not fetch.given_up  # what was asked for comes all the same, and is taken from the connection
            while whole and asked < len(keys) and len(wanted) + self._at_once <= self._places:
                part = keys[asked : asked + self._at_once]
                place = asked % self._places
                wanted.extend(zip(part, count(place)))
                self._send(FetchState("paged", b"".join(part), shared, place))
                asked += len(part)
            if not wanted:
                return
            whole &= self._take(fetch, *wanted.popleft())

    def _fetch_keys(self, fetch: KeysFetch) -> None:
        self._send(FindState(fetch.most))
        found = self._next()
        if not isinstance(found, StateKeys) or len(found.keys) % WHOLE_KEY_BYTES:
            raise WireError(f"{type(found).__name__} or parts of keys", expected="keys of state")
        whole = range(0, len(found.keys), WHOLE_KEY_BYTES)
        fetch.keys = [found.keys[at : at + WHOLE_KEY_BYTES] for at in whole]

    def _take(self, fetch: Fetch, key: bytes, place: int) -> bool:
        """The next block; False where the other engine does not have it (any more)."""
        part = self._next()
        if not isinstance(part, StatePart) or part.key != key:
            raise WireError(f"{type(part).__name__} of another key", expected="the block that was asked for")
        if not part.found:
            return False
        content = self._content(part, place)
        if len(content) != self._block_bytes:
            raise WireError(f"a block of {len(content)} bytes", expected=f"{self._block_bytes}")
        if checksum(key, self._info.digest, self._info.level, content) != part.checksum:
            raise WireError("a block that does not match its checksum", expected="the content that was sent")
        if not fetch.given_up:
            self._store.write(fetch.blocks[fetch.done], content)
            fetch.done += 1
        return True

    def _next(self) -> Any:
        """What the other engine says to this one."""
        found = self._receive()
        while isinstance(found, _FOR_SERVERS):
            found = self._receive()
        if isinstance(found, Failure):
            raise found.error()
        return found

    def _content(self, part: StatePart, place: int) -> memoryview:
        if not part.shared:
            return memoryview(part.content)
        if self._shared is None:
            raise WireError("a block in shared memory that was not offered", expected="its content")
        at = SHARED_HEAD_BYTES + place * self._block_bytes
        return self._shared[1][at : at + self._block_bytes]

    def _memory(self) -> SharedPlace | None:
        """That the other engine can write to, if it is on this machine; None where the system has no such memory.

        It has no name, so it is gone with this process. It cannot be made smaller, so who writes to it is safe.
        """
        if self._shared is None:
            size = SHARED_HEAD_BYTES + self._places * self._block_bytes
            try:
                descriptor = os.memfd_create("tapeout-blocks", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
                os.ftruncate(descriptor, size)
                fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
                memory = memoryview(mmap.mmap(descriptor, size))
            except OSError:
                return None
            place = SharedPlace(os.getpid(), descriptor, token_bytes(32))
            memory[: len(place.mark)] = place.mark
            self._shared = descriptor, memory, place
        return self._shared[2]

    def _send(self, message: FetchState | FindState | Close) -> None:
        assert self._end is not None
        self._end.sendall(self._session.frame(message))

    def _receive(self) -> Any:
        """The next message. :class:`TimeoutError` after :data:`STALL_SECONDS` without a byte."""
        end = self._end
        assert end is not None
        while not self._messages:
            data = end.recv(RECEIVE_BYTES)
            if not data:
                raise ConnectionError("the other engine has closed the connection")
            try:
                self._messages.extend(self._session.receive(data))
            finally:
                self._flush()
        return self._messages.popleft()

    def _flush(self) -> None:
        if self._session.outgoing and self._end is not None:
            self._end.sendall(self._session.outgoing)
            self._session.outgoing.clear()

    def _sound(self, end: socket.socket) -> bool:
        """The connection was not closed meanwhile. What the other engine reported while nobody listened is dropped."""
        try:
            end.setblocking(False)
            while data := end.recv(RECEIVE_BYTES):
                for message in self._session.receive(data):
                    if not isinstance(message, _FOR_SERVERS):
                        return False
            return False
        except BlockingIOError:
            return True
        except (OSError, TapeoutError):
            return False
        finally:
            end.settimeout(STALL_SECONDS)

    def _leave(self) -> None:
        if self._end is not None:
            with suppress(OSError):
                if self._session.established:
                    self._send(Close())
                self._end.close()
            self._end = None
