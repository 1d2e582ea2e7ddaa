"""Drills of a fleet: engines in processes of their own die, hang, lie and come back; no answer changes."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runtime.gateway.engines.client import EngineDownError
from runtime.gateway.engines.unread import SlowReaderError, UnreadLimits
from runtime.gateway.fleet.client import FleetClient
from runtime.gateway.fleet.replica import Patience
from runtime.gateway.fleet.retries import BUDGET_MOST
from runtime.wire.limits import Limits, QueueFullError
from runtime.wire.messages import Delta, GenerateRequest, SamplingSettings
from tests.answering import Whole, whole
from tests.faulty_engine import CRASH, Faulty
from tests.fleet import connected, session_at, write_list
from tests.listening_engine import ListeningEngine
from tests.waiting import until

NEW = 120
SLOW = Faulty(step_seconds=0.005)
Start = Callable[..., ListeningEngine]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    engines: list[ListeningEngine] = []

    def started(bundle: Faulty = SLOW, limits: Limits | None = None) -> ListeningEngine:
        place = f"unix:{tmp_path}/{len(engines)}" if len(engines) % 2 else "tcp:127.0.0.1:0"
        engines.append(ListeningEngine(tmp_path, bundle, limits, place))
        return engines[-1]

    yield started
    for engine in engines:
        engine.process.send_signal(signal.SIGCONT)
        engine.close()


def request(number: int, prefix: str = "r", **fields: Any) -> GenerateRequest:
    sampling = SamplingSettings(temperature=1.0, seed=number, presence_penalty=0.5, frequency_penalty=0.3)
    known: dict[str, Any] = {"sampling": sampling, "logprobs": 2}
    return GenerateRequest(f"{prefix}{number}", [1 + number % 9, 2, 3], NEW, **(known | fields))


async def answer(client: FleetClient, asked: GenerateRequest, session: str = "") -> Whole:
    return whole([delta async for delta in client.generate(asked, session=session)])


def run(test: Coroutine[None, None, None]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(test, 90)

    asyncio.run(bounded())


def states(client: FleetClient) -> list[str]:
    return [status.state.value for status in client.statuses()]


def all_ready(client: FleetClient, count: int = 2) -> bool:
    return states(client) == ["ready"] * count


async def expected(client: FleetClient, count: int) -> list[Whole]:
    """Answers that nothing interrupts."""
    return await asyncio.gather(*[answer(client, request(number, "e")) for number in range(count)])


async def busy(client: FleetClient) -> None:
    """Requests run on all engines."""
    await until(lambda: all(status.own for status in client.statuses()))
    await asyncio.sleep(0.1)


def test_a_killed_engine_among_eight_streams_changes_no_answer(start: Start, tmp_path: Path) -> None:
    async def test() -> None:
        engines = [start(), start()]
        async with connected(tmp_path, engines) as client:
            await until(lambda: all_ready(client))
            wanted = await expected(client, 8)
            running = [asyncio.ensure_future(answer(client, request(number))) for number in range(8)]
            await busy(client)
            engines[0].process.kill()
            assert await asyncio.gather(*running) == wanted
            assert client.counts["resumptions"] >= 1 and not client.counts["lost"]
            assert client.ready and client.stats.generated_tokens > 8 * NEW

    run(test())


def test_clients_that_read_nothing_hold_a_bounded_part_of_the_gateway_and_nothing_of_the_engines(
    start: Start, tmp_path: Path
) -> None:
    """Of all engines together. Planted: each connection counts for itself; the request is tried elsewhere."""

    async def test() -> None:
        engines = [start(), start()]
        async with connected(tmp_path, engines) as client:
            await until(lambda: all_ready(client))
            client.unread.limits = UnreadLimits(stream_bytes=1 << 20, bytes=150_000)
            slow = [client.generate(request(number)) for number in range(8)]
            for one in slow:
                await anext(one)
            assert len({status.address for status in client.statuses() if status.own}) == 2
            await until(lambda: client.stats.running == 0)
            assert client.unread.ended >= 1 and client.unread.bytes <= 150_000
            ended = 0
            for one in slow:
                try:
                    while True:
                        await anext(one)
                except SlowReaderError:
                    ended += 1
                except StopAsyncIteration:
                    pass
            assert ended == client.unread.ended and client.unread.bytes == 0
            assert not client.counts["retries"] and not client.counts["resumptions"]

    run(test())


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_all_that_wait_at_an_engine_that_is_lost_are_answered(
    start: Start, tmp_path: Path, sent: signal.Signals
) -> None:
    """They are more than may be tried again. Planted: each of them takes from the budget of retries."""

    async def test() -> None:
        few = Limits(max_running=2, max_waiting=1000)
        engines = [start(replace(SLOW, step_seconds=0.02), few), start(SLOW, few)]
        patience = Patience(suspect=1.0, stuck=60.0, open=20.0)
        async with connected(tmp_path, engines, patience) as client:
            await until(lambda: all_ready(client))
            asked = [replace(request(number), max_new_tokens=2) for number in range(600)]
            running = [asyncio.ensure_future(answer(client, one)) for one in asked]
            await until(lambda: all(status.stats.waiting for status in client.statuses()))
            first = next(status for status in client.statuses() if status.address == engines[0].address)
            assert first.own > BUDGET_MOST + 50
            engines[0].process.send_signal(sent)
            assert {len(found.tokens) for found in await asyncio.gather(*running)} == {2}
            assert client.counts["retries"] > BUDGET_MOST and not client.counts["lost"]

    run(test())


def test_a_seed_is_drawn_where_there_is_none(start: Start, tmp_path: Path) -> None:
    """Else the engine draws it, and nobody can go on."""

    async def test() -> None:
        engines = [start(), start()]
        async with connected(tmp_path, engines) as client:
            await until(lambda: all_ready(client))
            asked = request(0, sampling=SamplingSettings(temperature=1.0))
            found = list[Delta]()
            async for delta in client.generate(asked):
                found.append(delta)
                if len(found) == 20:
                    place = next(status.address for status in client.statuses() if status.own)
                    next(engine for engine in engines if engine.address == place).process.kill()
            assert len(whole(found).tokens) == NEW and client.counts["resumptions"] == 1
            assert {delta.id for delta in found} == {asked.id}

    run(test())


def test_a_stopped_engine_is_suspected_and_comes_back(start: Start, tmp_path: Path) -> None:
    async def test() -> None:
        engines = [start(), start()]
        async with connected(tmp_path, engines, Patience(suspect=1.0, stuck=60.0, open=20.0)) as client:
            await until(lambda: all_ready(client))
            wanted = await expected(client, 8)
            running = [asyncio.ensure_future(answer(client, request(number))) for number in range(8)]
            await busy(client)
            engines[0].process.send_signal(signal.SIGSTOP)
            assert await asyncio.gather(*running) == wanted
            assert states(client).count("suspect") == 1
            await answer(client, request(1, "after"))  # goes to the other one
            engines[0].process.send_signal(signal.SIGCONT)
            await until(lambda: all_ready(client))
            assert await expected(client, 8) == wanted

    run(test())


def test_a_silent_engine_is_kept_while_there_is_no_other(start: Start, tmp_path: Path) -> None:
    async def test() -> None:
        engine = start()
        async with connected(tmp_path, [engine], Patience(suspect=0.7, stuck=60.0, open=20.0)) as client:
            wanted = (await expected(client, 1))[0]
            running = asyncio.ensure_future(answer(client, request(0)))
            await busy(client)
            engine.process.send_signal(signal.SIGSTOP)
            await until(lambda: states(client) == ["suspect"])
            assert not client.ready
            engine.process.send_signal(signal.SIGCONT)
            assert await running == wanted and not client.counts["resumptions"]

    run(test())


def test_a_long_step_is_no_silence(start: Start, tmp_path: Path) -> None:
    """A prompt that takes three seconds. Planted: heartbeats from the thread that steps, or none."""

    async def test() -> None:
        engines = [start(Faulty(token_seconds=0.1)), start()]
        session, seen = session_at(engines[0].address, [engine.address for engine in engines]), set[str]()
        async with connected(tmp_path, engines) as client:
            await until(lambda: all_ready(client))
            running = asyncio.ensure_future(answer(client, GenerateRequest("a", [3] * 30, 5), session))
            await until(lambda: client.statuses()[0].own == 1)
            while not running.done():
                seen.update(states(client))
                await asyncio.sleep(0.02)
            assert len((await running).tokens) == 5
            assert seen == {"ready"} and not client.counts["resumptions"] + client.counts["retries"]

    run(test())


def test_an_engine_that_hangs_in_a_step_is_given_up_though_its_heart_beats(start: Start, tmp_path: Path) -> None:
    """Planted: no bound for a step, or one that heartbeats put off."""

    async def test() -> None:
        engines = [start(Faulty(token_seconds=100.0)), start()]
        session = session_at(engines[0].address, [engine.address for engine in engines])
        async with connected(tmp_path, engines, Patience(step=1.0, stuck=2.0, open=20.0)) as client:
            await until(lambda: all_ready(client))
            running = asyncio.ensure_future(answer(client, request(0), session))
            await until(lambda: client.statuses()[0].own == 1)
            assert len((await running).tokens) == NEW and client.counts["retries"] == 1
            await until(lambda: states(client) == ["open", "ready"])
            assert "has ended no step" in client.statuses()[0].why

    run(test())


def test_an_engine_that_is_stuck_is_given_up(start: Start, tmp_path: Path) -> None:
    async def test() -> None:
        engine = start()
        async with connected(tmp_path, [engine], Patience(suspect=0.5, stuck=1.0, open=1.0, wait=1.0)) as client:
            running = asyncio.ensure_future(answer(client, request(0)))
            await busy(client)
            engine.process.send_signal(signal.SIGSTOP)
            wanted = r"no engine has taken the request for 1 seconds \(1 (not answering|being tried again)\)"
            with pytest.raises(EngineDownError, match=wanted):
                await running
            assert client.counts["lost"] == 1

    run(test())


def test_all_engines_dead_ends_requests_with_an_error_or_they_wait_for_one(start: Start, tmp_path: Path) -> None:
    async def test() -> None:
        engines = [start(), start()]
        async with connected(tmp_path, engines) as client:
            await until(lambda: all_ready(client))
            wanted = await expected(client, 4)
            running = [asyncio.ensure_future(answer(client, request(number))) for number in range(4)]
            await busy(client)
            for engine in engines:
                engine.process.kill()
            await until(lambda: not client.ready)
            waiting = asyncio.ensure_future(answer(client, request(0, "new")))
            timed_out = await answer(client, request(0, "late", queue_timeout=0.1))
            assert timed_out.reason == "timeout" and not timed_out.tokens
            await asyncio.to_thread(engines[1].again)
            assert await asyncio.gather(*running) == wanted and await waiting == wanted[0]

    run(test())


def test_an_engine_of_another_bundle_gets_nothing(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        engine = start()
        async with connected(tmp_path, [engine]) as client:
            other = start(Faulty("8"))
            write_list(tmp_path, [engine.address, other.address])
            await until(lambda: states(client) == ["ready", "open"])
            await expected(client, 4)
            refused = client.statuses()[1]
            assert "it serves bundle" in refused.why and not refused.own
            write_list(tmp_path, [engine.address])
            await until(lambda: all_ready(client, 1))

    with caplog.at_level(logging.ERROR):
        run(test())
    assert sum("it serves bundle" in record.message for record in caplog.records) == 1


def test_an_engine_of_another_level_goes_on_with_nothing(start: Start, tmp_path: Path) -> None:
    """It adds floats in another order. New requests it may answer."""

    async def test() -> None:
        engines = [start(Faulty(step_seconds=0.01, level="v4")), start(Faulty(level="v3"))]
        session = session_at(engines[0].address, [e.address for e in engines])
        async with connected(tmp_path, engines) as client:
            await until(lambda: all_ready(client))
            wanted = await answer(client, request(0, "e"), session)
            running = asyncio.ensure_future(answer(client, request(0), session))
            await until(lambda: client.level_of("r0") == "v4")
            engines[0].process.kill()
            await until(lambda: states(client)[0] == "open")
            assert (await answer(client, request(0, "new"))).reason == "length"  # on the other one
            assert not running.done() and client.level_of("r0") == "v4"
            await asyncio.to_thread(engines[0].again)
            assert await running == wanted and client.counts["resumptions"] == 1

    run(test())


def test_the_list_may_change_or_be_away(start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        engines = [start(Faulty(step_seconds=0.03)), start()]
        async with connected(tmp_path, engines[:1]) as client:
            (tmp_path / "fleet.yaml").write_text("engines: 3")
            await until(lambda: any("stay as they are" in record.message for record in caplog.records))
            assert client.ready
            running = asyncio.ensure_future(answer(client, request(0)))
            await busy(client)
            write_list(tmp_path, [engines[1].address])
            await until(lambda: states(client) == ["ready", "draining"])
            assert len((await running).tokens) == NEW and not client.counts["resumptions"]
            await until(lambda: all_ready(client, 1))
            assert client.statuses()[0].address == engines[1].address

    run(test())


def test_a_request_that_ends_its_engines_ends_itself(start: Start, tmp_path: Path) -> None:
    async def test() -> None:
        engines = [start(), start(), start(), start()]
        async with connected(tmp_path, engines) as client:
            await until(lambda: all_ready(client, 4))
            with pytest.raises(EngineDownError, match="has ended"):
                await answer(client, GenerateRequest("poison", [1, CRASH], 5))
            assert client.counts["retries"] == 2 and client.ready

    run(test())


def test_a_full_queue_is_answered_elsewhere(start: Start, tmp_path: Path) -> None:
    """An engine with fewer requests is asked first, until it refuses one: it has less room than the other."""

    async def test() -> None:
        engines = [start(Faulty(step_seconds=0.03), Limits(max_running=1, max_waiting=most)) for most in (1, 4)]

        def asked(number: int) -> asyncio.Future[Whole]:
            return asyncio.ensure_future(answer(client, replace(request(number), prompt=[1])))

        def taken() -> int:
            return sum(status.stats.running + status.stats.waiting for status in client.statuses())

        async with connected(tmp_path, engines) as client:
            await until(lambda: all_ready(client))
            running: list[asyncio.Future[Whole]] = []
            while len(running) < 7:
                running.append(asked(len(running)))
                await until(lambda: taken() == len(running))
            assert client.counts["retries"] >= 1 and [status.own for status in client.statuses()] == [2, 5]
            with pytest.raises(QueueFullError):
                await asked(7)
            assert {found.reason for found in await asyncio.gather(*running)} == {"length"}

    run(test())


def test_there_is_room_for_what_every_listed_engine_takes(start: Start, tmp_path: Path) -> None:
    """Also while the smallest is away: it may come back. Planted: less room for ever after it has left."""

    async def test() -> None:
        engines = [start(), start(Faulty(max_tokens=128))]
        async with connected(tmp_path, engines) as client:
            await until(lambda: all_ready(client))
            assert client.info.max_tokens == 128
            engines[1].process.kill()
            await until(lambda: states(client)[1] == "open")
            assert client.info.max_tokens == 128
            write_list(tmp_path, [engines[0].address])
            await until(lambda: all_ready(client, 1))
            assert client.info.max_tokens == 256

    run(test())


def test_a_reader_that_leaves_cancels_its_request(start: Start, tmp_path: Path) -> None:
    async def test() -> None:
        engine = start()
        async with connected(tmp_path, [engine]) as client:
            stream = client.generate(request(0))
            await anext(stream)
            await stream.aclose()
            await until(lambda: client.statuses()[0].stats.finished == {"cancelled": 1})
            assert not client.statuses()[0].own

    run(test())


def test_draining_waits_then_cancels(start: Start, tmp_path: Path) -> None:
    async def test() -> None:
        async with connected(tmp_path, [start()]) as client:
            short = asyncio.ensure_future(answer(client, request(0)))
            await busy(client)
            await client.drain(60)
            assert (await short).reason == "length" and not client.ready
        async with connected(tmp_path, [start()]) as client:
            long = asyncio.ensure_future(answer(client, request(0)))
            await busy(client)
            await client.drain(0.05)
            assert (await long).reason == "cancelled"

    run(test())


# --- an engine that lies ---------------------------------------------------------------------------------------------

CHANGES: dict[str, Callable[[bytes], bytes]] = {
    "torn": lambda data: data[: len(data) // 2] + b"\0" * 9,
    "foreign": lambda _: b"HTTP/1.1 200 OK\r\n\r\n" * 4,
    "repeated": lambda data: data + data,
    "changed": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
}


@asynccontextmanager
async def between(address: str, change: Callable[[bytes], bytes], lying: asyncio.Event) -> AsyncGenerator[str]:
    """The address of a relay that changes what the engine says, once it is told to."""
    host, port = address.removeprefix("tcp:").split(":")

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(host, int(port))

        async def pump() -> None:
            while data := await reader.read(1 << 16):
                back.write(data)

        asking = asyncio.ensure_future(pump())
        while data := await there.read(1 << 16):
            writer.write(change(data) if lying.is_set() else data)
        asking.cancel()
        writer.close()
        back.close()

    server = await asyncio.start_server(relay, "127.0.0.1", 0)
    yield f"tcp:127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()


@pytest.mark.parametrize("kind", CHANGES)
def test_what_nobody_understands_ends_that_connection_and_nothing_else(
    start: Start, tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        engines, lying = [start(), start()], asyncio.Event()
        async with between(engines[0].address, CHANGES[kind], lying) as address:
            engines[0].address, real = address, engines[0].address
            async with connected(tmp_path, engines) as client:
                await until(lambda: all_ready(client))
                wanted = await expected(client, 8)
                running = [asyncio.ensure_future(answer(client, request(number))) for number in range(8)]
                await busy(client)
                lying.set()
                assert await asyncio.gather(*running) == wanted and client.counts["resumptions"]
                lying.clear()
                await until(lambda: all_ready(client))
            engines[0].address = real

    with caplog.at_level(logging.ERROR):
        run(test())
    lines = [record.message for record in caplog.records if "cannot be understood" in record.message]
    assert len(lines) == 1 and "takes no requests" in lines[0]
