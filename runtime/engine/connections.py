"""The engine's ends of its connections. Commands of all servers come in; each server gets what concerns its requests.

Nothing here waits for a server that has sent half a message, or for one that does not read its reports: these are kept
for it, and after :data:`SEND_SECONDS` it is given up. The process's own parent is waited for. All of it belongs to the
thread that steps, except :meth:`Connections.beat`.
"""

from __future__ import annotations

import logging
import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from time import monotonic

from runtime.engine.block_store import BlockStore
from runtime.engine.moving.moves import BlockMoves, EngineCommand
from runtime.engine.moving.sending import BlockSender
from runtime.engine.routing import RoutingReports, RoutingWatcher
from runtime.wire.codec import Message, WireError
from runtime.wire.failures import Failure
from runtime.wire.messages import (
    PART_BYTES,
    Add,
    Cancel,
    Close,
    EngineInfo,
    EngineStats,
    FetchAhead,
    FetchState,
    FilePart,
    FindState,
    Heartbeat,
    Leaving,
    ReadFile,
    RefusedRequest,
    Reopen,
    StepReport,
    WarmUp,
    WatchBlocks,
)
from runtime.wire.session import Session
from tapeout.errors import RequestError, TapeoutError, one_line

SEND_SECONDS = 10.0  # that a server has to read what was sent to it
ASK_SECONDS = 10  # without a word on a connection, after which the kernel asks whether the other machine is there
CLOSE_SECONDS = 1.0  # and what is left of it at the end
GREETING_SECONDS = 5.0  # that it has to prove its key
MOST_STRANGERS = 16  # connections that have not
RECEIVE_BYTES = 1 << 18
RECEIVE_SECONDS = 0.05  # beyond that an engine looks at what has come once it has made a step
BEAT_SECONDS = 0.25  # without a report, after which servers hear that the engine's process runs
MOST_FETCHING = 16  # engines that fetch blocks at once

log = logging.getLogger(__name__)


class _ServerEnd:
    def __init__(self, end: socket.socket, key: bytes) -> None:
        self.socket, self.since, self.answered = end, monotonic(), False
        self.watcher = RoutingWatcher()
        self.sender: BlockSender | None = None  # of an engine that fetches blocks
        self._session = Session("engine", key)
        self._sending = threading.Lock()  # frames are numbered, and must not mix
        self._sent_at = monotonic()
        self._unsent, self._behind_since = bytearray(), 0.0  # what there was no room for yet, if anything
        self.awaits_room = False  # whoever reads from it is told once there is some
        self._room = select.poll()
        self._room.register(end, select.POLLOUT)
        self._flush()

    @property
    def established(self) -> bool:
        return self._session.established

    def receive(self) -> Iterator[Message]:
        """What has arrived. It must not be called before something has."""
        data = self.socket.recv(RECEIVE_BYTES)
        if not data:
            raise ConnectionError("the server has closed it")
        try:
            yield from self._session.receive(data)
        finally:
            self._flush()

    def send(self, message: Message) -> None:
        """Only what an engine fetches is waited for, by a thread of its own, and the process's own parent."""
        with self._sending:
            self._unsent += self._session.frame(message)
            if self.sender is not None or self.socket.gettimeout() is None:
                self.socket.sendall(self._unsent)
                self._unsent.clear()
            else:
                self._pass_on()
            self._sent_at = monotonic()

    def beat(self) -> None:
        """From any thread. Nothing where a report is on its way or was just sent, nor for an engine that fetches
        blocks.
        """
        if self.sender or monotonic() - self._sent_at < BEAT_SECONDS or not self._sending.acquire(blocking=False):
            return
        try:
            if not self._unsent:
                self._unsent += self._session.frame(Heartbeat())
            self._pass_on()
            self._sent_at = monotonic()
        except (OSError, ValueError):  # of a socket that is closed, too
            with suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)  # the other thread finds its end, and drops it
        finally:
            self._sending.release()

    def close(self) -> None:
        with self._sending:
            self.socket.close()

    @property
    def behind(self) -> bool:
        """There was no room for all that was sent."""
        return bool(self._unsent)

    def pass_on(self) -> None:
        """What there is room for now."""
        with self._sending:
            self._pass_on()

    def finish(self) -> None:
        """Before it is closed in an orderly way: what the server has not read yet."""
        with self._sending, suppress(OSError):
            if self._unsent:
                self.socket.settimeout(CLOSE_SECONDS)
                self.socket.sendall(self._unsent)

    def _pass_on(self) -> None:
        """As much as there is room for. :class:`TimeoutError` where the server has been behind for too long."""
        before, self._behind_since = self._behind_since, 0.0
        while self._unsent and any(event & select.POLLOUT for _, event in self._room.poll(0)):
            del self._unsent[: self.socket.send(self._unsent)]
        if self._unsent:
            self._behind_since = before or monotonic()
            if monotonic() - self._behind_since > SEND_SECONDS:
                raise TimeoutError(f"it has not read what was sent for {SEND_SECONDS:g} seconds")

    def fetch(
        self, message: FetchState | FindState, info: EngineInfo, store: BlockStore, sent: Callable[[], None]
    ) -> None:
        """The other end is an engine, and gets blocks instead of reports from now on."""
        if self.sender is None:
            self.sender = BlockSender(self.socket, self.send, store, info.digest, info.level, sent)
        self.sender.ask(message)

    def _flush(self) -> None:
        if self._session.outgoing:
            self.socket.sendall(self._session.outgoing)
            self._session.outgoing.clear()


class Connections:
    """``answer``: what each server hears first, once it is known. ``folder``: of the files that the answer names.

    ``ends``: connected sockets. ``listener``: where servers with the same ``key`` connect; they come and go. Engines
    that fetch blocks connect there, too, once there is something to :meth:`offer`.
    """

    def __init__(
        self,
        answer: EngineInfo | Failure,
        folder: Path = Path(),
        *,
        ends: tuple[socket.socket, ...] = (),
        listener: socket.socket | None = None,
        key: bytes = b"",
    ) -> None:
        self._answer, self._folder, self._listener, self._key = answer, folder, listener, key
        self._open: dict[int, _ServerEnd] = {}  # by descriptor
        self._owners: dict[str, _ServerEnd] = {}  # of requests
        self._abandoned: list[Add | Cancel] = []  # of servers that have gone
        self._stats = EngineStats()
        self.answered = False  # a server has heard the answer
        self.quiet = False  # nothing came while the last receive waited
        self.reopen: Reopen | None = None  # which a server has asked for
        self._store: BlockStore | None = None
        self._moves: BlockMoves | None = None
        self._arrived = select.poll()
        if listener is not None:
            listener.setblocking(False)
            self._arrived.register(listener, select.POLLIN)
        for end in ends:
            self._add(end)

    @property
    def ended(self) -> bool:
        """No command can come any more."""
        return self._listener is None and not self._open

    @property
    def behind(self) -> bool:
        """A server has more to hear than the last report had room for."""
        return any(connection.watcher.behind for connection in self._open.values())

    @property
    def senders(self) -> list[BlockSender]:
        """Of the engines that fetch blocks."""
        return [found for connection in self._open.values() if (found := connection.sender) is not None]

    def offer(self, store: BlockStore, moves: BlockMoves) -> None:
        """Send blocks to engines that ask for them, and stop waiting where blocks can be copied."""
        self._store, self._moves = store, moves
        self._arrived.register(moves.wake, select.POLLIN)

    def waiting(self) -> bool:
        """There is something to receive."""
        return bool(self._abandoned or self._arrived.poll(0))

    def receive(self, milliseconds: int) -> list[EngineCommand]:
        """The commands that have come, or come first within so many milliseconds. Of who sends without end, those of
        :data:`RECEIVE_SECONDS`: others wait for a step.
        """
        found, events = list[EngineCommand](), self._arrived.poll(0 if self._abandoned else milliseconds)
        self.quiet = not (events or self._abandoned)
        until = monotonic() + RECEIVE_SECONDS
        while events:
            for descriptor, event in events:
                connection = self._open.get(descriptor)
                if connection is not None:
                    if event & select.POLLOUT:
                        self._pass_on(connection)
                    if event & ~select.POLLOUT:
                        found += self._read(connection)
                    self._await_room(connection)
                elif self._moves is not None and descriptor == self._moves.wake:
                    self._moves.awake()
                else:
                    self._accept()
            events = self._arrived.poll(0) if monotonic() < until else []
        if self._listener is not None:
            self._refuse_strangers()
        found += self._abandoned
        self._abandoned.clear()
        return found

    def send(self, report: StepReport, routing: RoutingReports) -> None:
        """To each server the part of a report that concerns it, and how it may route where it has asked for that."""
        self._stats, owners = report.stats, self._owners
        known = [connection for connection in self._open.values() if connection.answered and not connection.sender]
        reports = iter(routing.next([connection.watcher for connection in known if connection.watcher.asks]))
        for connection in known:
            part = report if len(known) == 1 else self._part_of(report, connection)
            self._send(connection, part._replace(routing=next(reports)) if connection.watcher.asks else part)
        for delta in report.deltas:
            if delta.finish_reason is not None:
                owners.pop(delta.id, None)
        for refusal in report.refusals:
            owners.pop(refusal.id, None)

    def beat(self) -> None:
        """From any thread, again and again: servers hear that the process runs where no step has ended for a while."""
        for connection in list(self._open.values()):
            if connection.answered:
                connection.beat()

    def close(self) -> None:
        """Of all servers. The listener stays its owner's."""
        for connection in list(self._open.values()):
            connection.finish()
            self._drop(connection)

    def _part_of(self, report: StepReport, connection: _ServerEnd) -> StepReport:
        owners = self._owners
        return StepReport(
            tuple(delta for delta in report.deltas if owners.get(delta.id) is connection),
            report.stats,
            tuple(refusal for refusal in report.refusals if owners.get(refusal.id) is connection),
        )

    def _read(self, connection: _ServerEnd) -> Iterator[EngineCommand]:
        try:
            for message in connection.receive():
                if isinstance(message, Add | Cancel):
                    if self._take(message, connection):
                        yield message
                elif isinstance(message, FetchAhead | WarmUp):
                    yield message
                elif isinstance(message, ReadFile):
                    connection.send(self._file_part(message))
                elif isinstance(message, WatchBlocks):
                    connection.watcher.begin(message.turn)
                elif isinstance(message, Reopen):
                    self._leave(message)
                elif isinstance(message, FetchState | FindState):
                    self._fetch(connection, message)
                elif isinstance(message, Close):
                    self._drop(connection)
                    return
                else:
                    raise WireError(f"{type(message).__name__} from a server", expected="a command")
            if connection.established and not connection.answered:
                connection.send(self._answer)
                connection.answered = self.answered = True
                if self.reopen is not None:
                    connection.send(Leaving())
        except (OSError, TapeoutError) as error:
            self._drop(connection, error)

    def _leave(self, command: Reopen) -> None:
        """Tell every server, once. An engine of a server's own belongs to that, which opens another one itself."""
        if self._listener is None:
            raise WireError("Reopen to an engine that does not listen", expected="a swap by its server")
        if self.reopen is None:
            self.reopen = command
            for connection in list(self._open.values()):
                if connection.answered:
                    self._send(connection, Leaving())

    def _take(self, command: Add | Cancel, connection: _ServerEnd) -> bool:
        """Whether it is for the engine: no server touches the requests of another."""
        if isinstance(command, Cancel):
            return self._owners.get(command.id) is connection
        id = command.request.id
        connection.watcher.received += connection.watcher.asks
        if self._owners.setdefault(id, connection) is connection:
            return True
        error = RequestError(f"request {id} is there already", expected="an id of its own")
        connection.send(StepReport((), self._stats, (RefusedRequest(id, error),)))
        return False

    def _fetch(self, connection: _ServerEnd, message: FetchState | FindState) -> None:
        if self._store is None or self._moves is None or not isinstance(self._answer, EngineInfo):
            raise WireError("a request for state", expected="a command that this engine takes")
        if connection.sender is None and len(self.senders) >= MOST_FETCHING:
            raise WireError(f"more than {MOST_FETCHING} engines fetch blocks", expected="fewer at once")
        connection.fetch(message, self._answer, self._store, self._moves.notify)

    def _file_part(self, command: ReadFile) -> FilePart:
        files = self._answer.files if isinstance(self._answer, EngineInfo) else {}
        name = next((name for name, sha256 in files.items() if sha256 == command.sha256), None)
        if name is None or command.offset < 0:
            raise WireError("a request for a file that was not offered", expected="one of the bundle's text files")
        with (self._folder / name).open("rb") as file:
            file.seek(command.offset)
            return FilePart(command.sha256, command.offset, file.read(PART_BYTES))

    def _add(self, end: socket.socket) -> None:
        try:
            connection = _ServerEnd(end, self._key)
        except OSError:
            end.close()
            return
        self._open[end.fileno()] = connection
        self._arrived.register(end, select.POLLIN)

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            end, _ = self._listener.accept()
        except OSError:  # it has gone again
            return
        end.settimeout(SEND_SECONDS)
        if end.family != socket.AF_UNIX:
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SEND_SECONDS * 1000))
            # An engine that has fetched blocks is sent nothing more: only so its end is noticed.
            end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
                end.setsockopt(socket.IPPROTO_TCP, option, ASK_SECONDS)
        self._add(end)

    def _refuse_strangers(self) -> None:
        """The oldest beyond :data:`MOST_STRANGERS`, and those that take too long."""
        strangers = [connection for connection in self._open.values() if not connection.established]
        late = monotonic() - GREETING_SECONDS
        for place, connection in enumerate(reversed(strangers)):
            if place >= MOST_STRANGERS or connection.since < late:
                self._drop(connection, TimeoutError("no key was proven"))

    def _send(self, connection: _ServerEnd, message: Message) -> None:
        try:
            connection.send(message)
        except (OSError, WireError) as error:
            self._drop(connection, error)
        self._await_room(connection)

    def _pass_on(self, connection: _ServerEnd) -> None:
        try:
            connection.pass_on()
        except OSError as error:
            self._drop(connection, error)

    def _await_room(self, connection: _ServerEnd) -> None:
        """Be told once there is room, where there was none for all that was sent."""
        if connection.awaits_room != connection.behind and self._open.get(connection.socket.fileno()) is connection:
            connection.awaits_room = connection.behind
            room = select.POLLOUT if connection.awaits_room else 0
            self._arrived.modify(connection.socket, select.POLLIN | room)

    def _drop(self, connection: _ServerEnd, error: Exception | None = None) -> None:
        """Close it, and cancel its requests."""
        if self._open.pop(connection.socket.fileno(), None) is None:
            return
        if error is not None:
            log.warning("the connection of a server is closed: %s", one_line(error))
        self._arrived.unregister(connection.socket)
        if connection.sender is not None:
            connection.sender.close()  # first: its thread may be about to send
        connection.close()
        mine = [id for id, owner in self._owners.items() if owner is connection]
        for id in mine:
            del self._owners[id]
        self._abandoned += map(Cancel, mine)
