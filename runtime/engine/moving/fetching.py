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
from queue import Empty, SimpleQueue
from secrets import token_bytes
from time import monotonic
from typing import Any, NamedTuple

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

    ``since``: when it began, or the one before it had ended. ``failure``: why it has ended, if not because all blocks
    came that there are. ``given_up``: nobody wants it any more. ``short``: the other engine does not have a block, so
    those behind it are of no use.
    """

    def __init__(self, keys: Sequence[bytes], blocks: Sequence[int]) -> None:
        self.keys, self.blocks, self.since = keys, blocks, monotonic()
        self.done = 0
        self.ended = self.given_up = self.short = False
        self.failure = ""


class _Asked(NamedTuple):
    """A block that was asked for. ``at``: of its place, see :meth:`PeerLink._fetch`."""

    fetch: Fetch
    key: bytes
    at: int


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
        self._held = deque[KeysFetch | None]()  # taken from these, to begin once those that have begun have ended
        self._begun = deque[Fetch | KeysFetch]()
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
        while (fetch := self._next_fetch()) is not None:
            self._begun.append(fetch)
            try:
                if not fetch.given_up:
                    self._connect()
                    if isinstance(fetch, KeysFetch):
                        self._fetch_keys(fetch)
                    else:
                        self._fetch(fetch)
            except Exception as error:  # of any kind: what waits for a fetch must hear of its end
                for one in self._begun:
                    one.failure = one_line(error)
                self._leave()
            while self._begun:
                self._end_first()
        self._leave()
        if self._shared is not None:
            os.close(self._shared[0])

    def _next_fetch(self) -> Fetch | KeysFetch | None:
        """Waits for it; None: nobody wants this link any more."""
        while True:
            if self._held:
                return self._held.popleft()
            try:
                return self._fetches.get(timeout=IDLE_SECONDS)
            except Empty:
                self._leave()

    def _another_fetch(self) -> Fetch | None:
        """One that waits, and can be asked for while others are on their way."""
        if not self._held:
            with suppress(Empty):
                fetch = self._fetches.get_nowait()
                if isinstance(fetch, Fetch):
                    return fetch
                self._held.append(fetch)
        return None

    def _end_first(self) -> None:
        """Of those that have begun."""
        self._begun.popleft().ended = True
        self._ended()

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

    def _fetch(self, asking: Fetch) -> None:
        """This one, and those that come meanwhile: the other engine looks at what it is asked for between two steps, so
        each would wait for a step of its own.

        Blocks are asked for in groups. Each has a place of its own until it was taken in. Places are counted on, and
        begin again from the first one where a group would not fit behind the last one.
        """
        shared, wanted, asked, at = self._memory(), deque[_Asked](), 0, 0
        asking.since = monotonic()
        while True:
            while True:
                if asked == len(asking.keys) or asking.short or asking.given_up:
                    if (another := self._another_fetch()) is None:
                        break
                    self._begun.append(another)
                    asking, asked, another.since = another, 0, monotonic()
                    continue
                part = asking.keys[asked : asked + self._at_once]
                if at % self._places + len(part) > self._places:
                    at += self._places - at % self._places
                if wanted and at + len(part) > wanted[0].at + self._places:
                    break
                self._send(FetchState("paged", b"".join(part), shared, at % self._places))
                wanted.extend(_Asked(asking, key, at + number) for number, key in enumerate(part))
                asked, at = asked + len(part), at + len(part)
            while self._begun and not (wanted and wanted[0].fetch is self._begun[0]):
                self._end_first()
                if wanted:
                    wanted[0].fetch.since = monotonic()
            if not wanted:
                return
            self._take(*wanted.popleft())

    def _fetch_keys(self, fetch: KeysFetch) -> None:
        self._send(FindState(fetch.most))
        found = self._next()
        if not isinstance(found, StateKeys) or len(found.keys) % WHOLE_KEY_BYTES:
            raise WireError(f"{type(found).__name__} or parts of keys", expected="keys of state")
        whole = range(0, len(found.keys), WHOLE_KEY_BYTES)
        fetch.keys = [found.keys[at : at + WHOLE_KEY_BYTES] for at in whole]

    def _take(self, fetch: Fetch, key: bytes, at: int) -> None:
        """The next block; of a fetch that ends early, what was asked for comes all the same."""
        part = self._next()
        if not isinstance(part, StatePart) or part.key != key:
            raise WireError(f"{type(part).__name__} of another key", expected="the block that was asked for")
        if not part.found:
            fetch.short = True
            return
        content = self._content(part, at % self._places)
        if len(content) != self._block_bytes:
            raise WireError(f"a block of {len(content)} bytes", expected=f"{self._block_bytes}")
        if checksum(key, self._info.digest, self._info.level, content) != part.checksum:
            raise WireError("a block that does not match its checksum", expected="the content that was sent")
        if not (fetch.short or fetch.given_up):
            self._store.write(fetch.blocks[fetch.done], content)
            fetch.done += 1

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
