"""One client for all servers: sends planned requests to ``/v1/completions`` and records when each piece arrived.

It runs in its own process (``python -m benchmarks.serving.client``), reads a :class:`Plan` as JSON from its input and
writes :class:`Played` as JSON. While requests run it only keeps what it reads; responses are parsed afterwards, so that
it takes little of the processor that it shares with the server. Nor does an event that arrives interrupt the server, as
it would not if the client ran on another machine: :func:`yield_to_servers`. So the client may read an event some
milliseconds late; where the system says when data arrived (Linux), that counts and not when it was read.
"""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import socket
import struct
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import h11
import orjson
import uvloop

END_OF_EVENT = b"\n\n"
READ_BYTES = 1 << 16
SO_TIMESTAMPNS = 35  # of Linux, on x86 and ARM: data comes with the time at which the system received it
LEAD_SECONDS = 0.2  # between the start of the client and the first planned request


@dataclass(frozen=True)
class Planned:
    """One request. ``prompt``: token ids. ``at``: seconds after the start of the load.

    ``after_pieces``: wait, instead of ``at``, until so many pieces were read of each response before it in the plan;
    a piece is nearly always one event.
    """

    prompt: Sequence[int]
    new_tokens: int
    at: float = 0.0
    after_pieces: int = 0


@dataclass(frozen=True)
class Plan:
    url: str  # of the server, without path
    model: str
    requests: Sequence[Planned]
    timeout_seconds: float = 600.0  # of one request


@dataclass(frozen=True)
class Answer:
    """Times in seconds after the start of the load. ``events``: when each piece of text arrived.

    ``sent``: when the request was due, so that a client that is late counts as the server's delay.
    ``tokens``: new tokens as the server counts them. ``error``: why there is no complete answer.
    """

    sent: float
    ended: float
    events: Sequence[float] = ()
    tokens: int = 0
    cached: int = 0
    error: str = ""

    @property
    def first_token_seconds(self) -> float:
        return self.events[0] - self.sent

    @property
    def gaps(self) -> list[float]:
        """Inter-token latencies in seconds."""
        return [after - before for before, after in zip(self.events, self.events[1:], strict=False)]


@dataclass(frozen=True)
class Played:
    """``cpu_share``: of one core, that the client took. ``started``: the start of the load, seconds since the epoch."""

    answers: Sequence[Answer]
    cpu_share: float
    started: float


@dataclass
class _Reading:
    """The bytes of one response, and when they arrived."""

    sent: float = 0.0
    ended: float = 0.0
    error: str = ""
    pieces: list[tuple[float, bytes]] = field(default_factory=list[tuple[float, bytes]])


async def play(plan: Plan) -> Played:
    """Send all requests of the plan, each at its time, whether or not the ones before it have been answered."""
    readings = [_Reading() for _ in plan.requests]
    messages = [_message(plan, request) for request in plan.requests]
    gc.collect()
    gc.disable()
    start = time.time() + LEAD_SECONDS  # the clock that the system takes the times of data from
    used = _cpu_seconds()
    async with asyncio.TaskGroup() as group:
        for number, request in enumerate(plan.requests):
            before = readings[:number] if request.after_pieces else []
            group.create_task(_request(plan, request, messages[number], readings[number], before, start))
    share = (_cpu_seconds() - used) / (time.time() - start + LEAD_SECONDS)
    gc.enable()
    return Played([_parsed(reading) for reading in readings], share, start)


async def _request(
    plan: Plan, request: Planned, message: bytes, reading: _Reading, before: Sequence[_Reading], start: float
) -> None:
    await asyncio.sleep(max(start + request.at - time.time(), 0))
    while any(len(other.pieces) < request.after_pieces and not other.ended for other in before):
        await asyncio.sleep(0.01)
    reading.sent = time.time() - start if request.after_pieces else request.at
    try:
        async with asyncio.timeout(plan.timeout_seconds):
            await _exchange(plan.url, message, reading, start)
    except (TimeoutError, OSError) as error:
        reading.error = f"{type(error).__name__}: {error}"
    reading.ended = time.time() - start


async def _exchange(url: str, message: bytes, reading: _Reading, start: float) -> None:
    """Send a request on a connection of its own, and read until the server closes it."""
    loop, address = asyncio.get_running_loop(), urlsplit(url)
    with socket.socket() as connection:
        connection.setblocking(False)
        if sys.platform == "linux":
            connection.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        await loop.sock_connect(connection, (address.hostname, address.port))
        await loop.sock_sendall(connection, message)
        ended: asyncio.Future[None] = loop.create_future()

        def read() -> None:
            try:
                data, ancillary, _, _ = connection.recvmsg(READ_BYTES, socket.CMSG_SPACE(16))
            except BlockingIOError:
                return
            except OSError as error:
                if not ended.done():
                    ended.set_exception(error)
                return
            if data:
                reading.pieces.append((_arrived(ancillary) - start, data))
            elif not ended.done():
                ended.set_result(None)

        loop.add_reader(connection, read)
        try:
            await ended
        finally:
            loop.remove_reader(connection)


def _arrived(ancillary: Sequence[tuple[int, int, bytes]]) -> float:
    """When the system received what was just read, in seconds since the epoch; now, where it does not say."""
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, SO_TIMESTAMPNS):
            seconds, nanoseconds = struct.unpack("qq", data)
            return seconds + 1e-9 * nanoseconds
    return time.time()


def _message(plan: Plan, request: Planned) -> bytes:
    body = _body(plan.model, request)
    connection = h11.Connection(h11.CLIENT)
    headers = [
        ("Host", urlsplit(plan.url).netloc),
        ("Connection", "close"),
        ("Content-Type", "application/json"),
        ("Content-Length", str(len(body))),
    ]
    head = connection.send(h11.Request(method="POST", target="/v1/completions", headers=headers))
    return b"".join(filter(None, (head, connection.send(h11.Data(data=body)), connection.send(h11.EndOfMessage()))))


def _body(model: str, request: Planned) -> bytes:
    return orjson.dumps(
        {
            "model": model,
            "prompt": list(request.prompt),
            "max_tokens": request.new_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )


def _parsed(reading: _Reading) -> Answer:
    """The events of a response; each has the time of the piece that completed it."""
    status, pieces, failure = _decoded(reading)
    if status != 200 and not reading.error:
        text = b"".join(piece for _, piece in pieces).decode(errors="replace")[:200]
        return Answer(reading.sent, reading.ended, error=f"{status}: {text}" if status else failure)
    times: list[float] = []
    usage: dict[str, Any] = {}
    error, done, rest = reading.error, False, b""
    for at, piece in pieces:
        *events, rest = (rest + piece.replace(b"\r", b"")).split(END_OF_EVENT)
        for event in events:
            data = event.partition(b"data:")[2].strip()
            if data == b"[DONE]":
                done = True
                continue
            if not data:
                continue  # a comment that keeps the connection open
            found = orjson.loads(data)
            usage = found.get("usage") or usage
            if found.get("error"):
                error = str(found["error"])[:200]
            if any(choice.get("text") for choice in found.get("choices") or ()):
                times.append(at)
    if not error and (not done or not times):
        error = "the stream ended early"
    details = usage.get("prompt_tokens_details") or {}
    tokens, cached = usage.get("completion_tokens", len(times)), details.get("cached_tokens") or 0
    return Answer(reading.sent, reading.ended, times, tokens, cached, error)


def _decoded(reading: _Reading) -> tuple[int, list[tuple[float, bytes]], str]:
    """The status of a response, 0 if there is none, its body by time of arrival, and what is wrong with it."""
    connection = h11.Connection(h11.CLIENT)
    connection.send(h11.Request(method="POST", target="/", headers=[("Host", "-")]))
    connection.send(h11.EndOfMessage())
    status, body = 0, list[tuple[float, bytes]]()
    for at, data in [*reading.pieces, (reading.ended, b"")]:  # the last: the connection was closed
        try:
            connection.receive_data(data)
            while not isinstance(event := connection.next_event(), type) and not isinstance(event, h11.EndOfMessage):
                if isinstance(event, h11.Response):
                    status = event.status_code
                elif isinstance(event, h11.Data):
                    body.append((at, bytes(event.data)))
        except h11.RemoteProtocolError as error:
            return status, body, f"no whole response: {error}"
        if isinstance(event, h11.EndOfMessage):
            break
    return status, body, ""


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def yield_to_servers() -> None:
    """Have Linux run this process only when a core is free, or its turn has come, rather than as soon as it wakes.

    Else each event that the server sends takes the core from it, for what comes next to be sent after that: 16 streams
    interrupted our server eight times a step, and cost it 20 % of its tokens instead of 11 (medians of five rounds in
    turns, 2 cores).
    """
    if hasattr(os, "SCHED_BATCH"):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def main() -> None:
    yield_to_servers()
    given = orjson.loads(sys.stdin.buffer.read())
    requests = [Planned(**request) for request in given.pop("requests")]
    played = uvloop.run(play(Plan(requests=requests, **given)))
    sys.stdout.buffer.write(orjson.dumps(played))


if __name__ == "__main__":
    main()
