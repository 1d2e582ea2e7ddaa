"""What holds wherever an engine runs: in a process of the server's own, or behind an address."""

from __future__ import annotations

import asyncio
import os
import random
import socket
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import uvloop

from runtime.gateway.engines.client import EngineDownError
from runtime.gateway.engines.local import ProcessClient
from runtime.gateway.engines.remote import RemoteClient
from runtime.gateway.engines.unread import SlowReaderError, UnreadLimits
from runtime.gateway.routing.router import FleetRouter
from runtime.wire.codec import WireError
from runtime.wire.limits import DisplacedError, Limits, QueueFullError
from runtime.wire.messages import Delta, FilePart, GenerateRequest, SamplingSettings, StepReport
from runtime.wire.session import PROTOCOL, VERSION, Session
from runtime.wire.start import EngineSettings
from tapeout.errors import ArtifactError, RequestError, SignatureError, TapeoutError
from tests.faulty_engine import CRASH, FAIL, HANG, REFUSES, WORKER, Faulty, FaultyEngine, alone
from tests.listening_engine import KEY, ListeningEngine
from tests.waiting import until

Client = ProcessClient | RemoteClient


@dataclass
class Place:
    """Where engines run. ``folder``: of sockets, keys and the server's cache."""

    kind: str
    folder: Path
    listening: list[ListeningEngine] = field(default_factory=list[ListeningEngine])

    def source(self, bundle: Faulty, limits: Limits | None = None) -> str:
        """Where a client finds an engine of ``bundle``."""
        if self.kind == "process":
            return str(bundle)
        address = "tcp:127.0.0.1:0" if self.kind == "tcp" else f"unix:{self.folder}/{len(self.listening)}"
        self.listening.append(ListeningEngine(self.folder, bundle, limits, address))
        return self.listening[-1].address

    @asynccontextmanager
    async def served(
        self, bundle: Faulty | None = None, limits: Limits | None = None, **options: Any
    ) -> AsyncGenerator[Client]:
        source = self.source(bundle or Faulty(), limits)
        client = self.client(source, limits, **options)
        try:
            await client.open()
            yield client
        finally:
            await client.close()

    def client(self, source: str, limits: Limits | None = None, **options: Any) -> Client:
        if self.kind == "process":
            return ProcessClient(source, None, limits, worker=WORKER, **options)
        return RemoteClient(source, KEY, self.folder / "cache", **options)

    async def revive(self) -> None:
        """What has ended or is stuck is started again by whoever runs it; a process of its own by the client."""
        for engine in self.listening:
            await asyncio.to_thread(engine.again)


@pytest.fixture(params=["process", "tcp", "unix"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    found = Place(request.param, tmp_path)
    yield found
    for engine in found.listening:
        engine.close()


async def answer(client: Client, id: str, prompt: list[int], new: int = 20, **settings: Any) -> list[Delta]:
    return [delta async for delta in client.generate(GenerateRequest(id, prompt, new, **settings))]


def tokens(deltas: list[Delta]) -> list[int]:
    assert [delta.finish_reason is None for delta in deltas] == [True] * (len(deltas) - 1) + [False]
    return [token for delta in deltas for token in delta.tokens]


def run(test: Coroutine[None, None, None], runner: Callable[[Coroutine[None, None, None]], None] = asyncio.run) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(test, 90)

    runner(bounded())


def test_many_requests_at_once_get_the_answers_each_gets_alone(place: Place) -> None:
    async def test() -> None:
        async with place.served() as client:
            prompts = [[1 + i % 5, 2, 3, 4 + i % 7, 5][: 2 + i % 4] * (1 + i % 9) for i in range(40)]
            answers = await asyncio.gather(*[answer(client, f"{i}", prompt) for i, prompt in enumerate(prompts)])
            engine = FaultyEngine(Faulty())
            assert [tokens(deltas) for deltas in answers] == [alone(engine, prompt, 20) for prompt in prompts]
            await until(lambda: client.stats.blocks_held == 0)
            assert client.stats.finished == {"length": 40} and client.ready and client.healthy

    run(test())


def test_a_crash_ends_running_requests_and_the_engine_is_opened_again(place: Place) -> None:
    async def test() -> None:
        async with place.served() as client:
            running = asyncio.ensure_future(answer(client, "a", [1, 2], 200))
            await until(lambda: client.stats.running == 1)
            with pytest.raises(EngineDownError, match="has ended"):
                await answer(client, "b", [1, CRASH])
            with pytest.raises(EngineDownError):
                await running
            assert not client.ready and not client.healthy
            await place.revive()
            await until(lambda: client.ready)
            assert client.healthy and client.restarts >= 1
            assert len(tokens(await answer(client, "a", [1, 2]))) == 20

    run(test())


def test_a_stuck_engine_is_unhealthy_then_given_up_and_opened_again(place: Place) -> None:
    async def test() -> None:
        async with place.served(quiet_seconds=0.7, stuck_seconds=1.5) as client:
            stuck = asyncio.ensure_future(answer(client, "a", [1, HANG]))
            await until(lambda: not client.healthy)
            assert client.ready and not stuck.done()
            with pytest.raises(EngineDownError, match=r"has not reported for 1\.5 seconds"):
                await stuck
            await place.revive()
            await until(lambda: client.healthy)
            assert len(tokens(await answer(client, "b", [1, 2]))) == 20

    run(test())


def test_a_busy_engine_is_healthy_longer_than_it_may_be_silent(place: Place) -> None:
    async def test() -> None:
        async with place.served(Faulty(step_seconds=0.1), quiet_seconds=0.7, stuck_seconds=1.0) as client:
            running = asyncio.ensure_future(answer(client, "a", [1, 2], 25))
            while not running.done():
                assert client.healthy
                await asyncio.sleep(0.05)
            assert len(tokens(await running)) == 25 and client.restarts == 0

    run(test())


def test_an_idle_engine_says_that_it_lives(place: Place) -> None:
    async def test() -> None:
        async with place.served() as client:
            stats = client.stats
            await asyncio.sleep(1.5)
            assert client.stats is not stats and client.silent_seconds is not None and client.silent_seconds < 1
            assert client.healthy and client.restarts == 0

    run(test())


def test_a_connection_that_routes_hears_what_is_cached(place: Place) -> None:
    """Also after a report was lost. Planted: the engine is not asked again."""

    async def test() -> None:
        async with place.served() as client:
            router, prompt, lost = FleetRouter(), [1, 2, 3, 4, 5, 6, 7, 8, 9], [False]

            def heard(report: StepReport) -> int | None:
                return None if lost[0] else router.heard("e", report)

            def missing() -> int:
                return router.choose(GenerateRequest("x", prompt, 1), ["e"])[0].tokens

            client._current.watch(router.join("e", client.info.block_tokens), heard)
            assert missing() == len(prompt)
            await answer(client, "a", prompt[:5], 2)
            await until(lambda: missing() == len(prompt) - 4)
            lost[0] = True
            await answer(client, "b", prompt, 2)
            lost[0] = False
            await until(lambda: missing() == 1)

    run(test())


def test_a_closed_iterator_frees_everything_within_a_step(place: Place) -> None:
    async def test() -> None:
        async with place.served(Faulty(step_seconds=0.05)) as client:
            stream = client.generate(GenerateRequest("a", [1, 2, 3, 4, 5], 200))
            first = await anext(stream)
            assert first.tokens and client.stats.blocks_held
            steps = client.stats.steps
            await stream.aclose()
            await until(lambda: client.stats.finished.get("cancelled") == 1)
            assert client.stats.steps <= steps + 2  # the one that ran, and no other
            assert client.stats.blocks_held == client.stats.running == 0

    run(test())


def test_a_client_that_reads_nothing_is_ended_and_holds_nothing_of_the_engine(place: Place) -> None:
    """Beside one that reads. Planted: what comes for it is kept without a limit."""

    async def test() -> None:
        async with place.served() as client:
            client.unread.limits = UnreadLimits(stream_bytes=20_000)
            engine = FaultyEngine(Faulty())
            slow = client.generate(GenerateRequest("slow", [1, 2], 200))
            first = await anext(slow)
            assert tokens(await answer(client, "a", [3, 4], 200)) == alone(engine, [3, 4], 200)
            await until(lambda: client.stats.finished.get("cancelled", 0) == 1 and client.stats.blocks_held == 0)
            assert client.unread.ended == 1 and client.unread.bytes < 20_000
            with pytest.raises(SlowReaderError, match="unread"):
                while True:
                    await anext(slow)
            assert first.tokens and client.unread.bytes == 0
            assert tokens(await answer(client, "b", [3, 4], 20)) == alone(engine, [3, 4], 20)

    run(test())


def test_one_request_that_the_engine_cannot_run_ends_alone(place: Place) -> None:
    async def test() -> None:
        async with place.served() as client:
            good = asyncio.ensure_future(answer(client, "good", [1, 2], 100))
            (bad,) = await answer(client, "bad", [1, FAIL])
            assert bad.finish_reason == "error" and "cannot run this batch" in (bad.error or "")
            assert tokens(await good) == alone(FaultyEngine(Faulty()), [1, 2], 100)

    run(test())


BAD: list[tuple[list[Any], dict[str, Any]]] = [
    ([], {}),
    ([-1], {}),
    ([99], {}),
    (["one"], {}),
    ([1.5, None], {}),
    ([1] * 999, {}),
    ([1], {"stop_tokens": frozenset({99})}),
    ([1], {"prompt_logprobs": -1}),
    ([1], {"logprobs": 10**9}),
    ([1], {"min_new_tokens": 99}),
    ([1], {"priority": "high"}),
    ([1], {"cache_salt": "text"}),
    ([1], {"timeout": float("nan")}),
    ([1 << 70], {}),
]


def test_no_request_is_bad_enough_to_end_the_engine(place: Place) -> None:
    async def test() -> None:
        async with place.served() as client:
            for prompt, settings in BAD:
                with pytest.raises(RequestError):
                    await answer(client, "bad", prompt, **settings)
                assert len(tokens(await answer(client, "good", [1, 2]))) == 20
            assert client.restarts == 0 and client.stats.running == client.stats.waiting == 0

    run(test())


def test_drain_lets_requests_end_and_takes_no_more(place: Place) -> None:
    async def test() -> None:
        async with place.served() as client:
            running = asyncio.ensure_future(answer(client, "a", [1, 2], 100))
            await until(lambda: client.stats.running == 1)
            drain = asyncio.ensure_future(client.drain(30))
            await asyncio.sleep(0)
            assert not client.ready and client.healthy
            with pytest.raises(EngineDownError, match="shutting down"):
                await answer(client, "b", [1])
            await drain
            assert len(tokens(await running)) == 100

    run(test())


def test_drain_cancels_what_takes_too_long(place: Place) -> None:
    async def test() -> None:
        async with place.served(Faulty(step_seconds=0.05)) as client:
            running = asyncio.ensure_future(answer(client, "a", [1, 2], 200))
            await until(lambda: client.stats.running == 1)
            await client.drain(0.2)
            deltas = await running
            assert deltas[-1].finish_reason == "cancelled" and len(tokens(deltas)) < 200

    run(test())


def test_swap_under_load_loses_no_request(place: Place) -> None:
    async def test() -> None:
        async with place.served() as client:
            other = await asyncio.to_thread(place.source, Faulty("8"))
            digests: set[str] = set()
            stop = False

            async def load(name: int) -> list[list[int]]:
                answers: list[list[int]] = []
                while not stop:
                    digests.add(client.info.digest)
                    answers.append(tokens(await answer(client, f"{name}-{len(answers)}", [1, 2, 3])))
                return answers

            loads = [asyncio.ensure_future(load(name)) for name in range(8)]
            await until(lambda: client.stats.generated_tokens > 100)
            await client.swap(other)
            assert client.info.name == "8" and client.ready
            await until(lambda: client.stats.generated_tokens > 100)
            stop = True
            expected = [alone(FaultyEngine(Faulty(name)), [1, 2, 3], 20) for name in ("7", "8")]
            for answers in await asyncio.gather(*loads):
                assert answers[0] == expected[0] and answers[-1] == expected[1]
                assert all(found in expected for found in answers)
            assert len(digests) == 2 and client.restarts == 0
            await until(lambda: len(client._connections) == 1)  # the old one is closed

    run(test())


def test_a_swap_to_what_does_not_open_changes_nothing(place: Place) -> None:
    async def test() -> None:
        async with place.served() as client:
            running = asyncio.ensure_future(answer(client, "a", [1, 2], 100))
            nothing = str(Faulty(REFUSES)) if place.kind == "process" else f"unix:{place.folder}/nothing"
            with pytest.raises(ArtifactError if place.kind == "process" else EngineDownError) as caught:
                await client.swap(nothing)
            assert caught.value.expected and caught.value.remedy
            assert client.ready and len(tokens(await running)) == 100 and len(client._connections) == 1

    run(test())


def test_what_fails_once_an_engine_has_opened_keeps_the_old_one(place: Place) -> None:
    async def test() -> None:
        client, seen = place.client(place.source(Faulty())), list[str]()

        async def opened(engine: Any) -> None:
            seen.append(engine.info.name)
            if engine.info.name == "8":
                raise ArtifactError("no tokenizer")

        try:
            await client.open(opened)
            with pytest.raises(ArtifactError, match="no tokenizer"):
                await client.swap(await asyncio.to_thread(place.source, Faulty("8")))
            assert seen == ["7", "8"] and client.info.name == "7" and len(tokens(await answer(client, "a", [1]))) == 20
        finally:
            await client.close()

    run(test())


def test_a_full_queue_refuses_or_displaces(place: Place) -> None:
    async def test() -> None:
        limits = Limits(max_running=1, max_waiting=1)
        async with place.served(Faulty(step_seconds=0.02), limits) as client:
            first = asyncio.ensure_future(answer(client, "first", [1, 2], 40, priority=1))
            await until(lambda: client.stats.running == 1)
            waits = asyncio.ensure_future(answer(client, "waits", [1, 2], 2, priority=1))
            await until(lambda: client.stats.waiting == 1)
            with pytest.raises(QueueFullError) as caught:
                await answer(client, "late", [1, 2], 2, priority=1)
            assert caught.value.retry_after is not None and caught.value.retry_after > 0
            urgent = asyncio.ensure_future(answer(client, "urgent", [1, 2], 2, priority=0))
            with pytest.raises(DisplacedError, match="took the place of this one in the full queue"):
                await waits
            assert len(tokens(await urgent)) == 2 and len(tokens(await first)) == 40

    run(test())


def test_timeouts_end_requests(place: Place) -> None:
    async def test() -> None:
        async with place.served(Faulty(step_seconds=0.05), Limits(max_running=1)) as client:
            total = asyncio.ensure_future(answer(client, "total", [1, 2], 200, timeout=0.5))
            await until(lambda: client.stats.running == 1)
            (queued,) = await answer(client, "queued", [1, 2], 2, queue_timeout=0.2)
            assert queued.finish_reason == "timeout" and not queued.tokens
            deltas = await total
            assert deltas[-1].finish_reason == "timeout" and 2 < len(tokens(deltas)) < 20

    run(test())


def test_timeouts_count_from_when_a_request_arrived(place: Place) -> None:
    """Its age says so, not a clock. Planted: an age that the engine ignores."""

    async def test() -> None:
        async with place.served() as client:
            late = GenerateRequest("late", [1, 2], 5, queue_timeout=30.0)
            (ended,) = [delta async for delta in client.generate(late, 40.0)]
            assert ended.finish_reason == "timeout"
            deltas = [delta async for delta in client.generate(GenerateRequest("old", [1, 2], 5, timeout=90.0), 40.0)]
            assert len(tokens(deltas)) == 5 and deltas[0].queue_seconds is not None
            assert 40 <= deltas[0].queue_seconds < 50

    run(test())


def test_commands_that_fill_the_socket_during_a_long_step_all_arrive(place: Place) -> None:
    """Under uvloop, too: its sockets do not block, so a write to a full one must be continued later."""

    async def test() -> None:
        limits = Limits(max_waiting=1000, max_waiting_tokens=10**6)
        async with place.served(Faulty(step_seconds=0.3), limits) as client:
            prompt = [1, 2] * 100
            bias = dict.fromkeys(range(5), 1.0)
            asked = [
                answer(client, f"{'x' * 2000}{i}", prompt, 1, sampling=SamplingSettings(logit_bias=bias))
                for i in range(300)
            ]
            answers = await asyncio.gather(*asked, return_exceptions=True)
            assert not [found for found in answers if isinstance(found, BaseException)]
            assert client.restarts == 0

    run(test(), uvloop.run)


def test_damage_to_the_engine_ends_the_connection_and_a_new_one_serves(place: Place) -> None:
    """Whatever arrives there in place of a command: cut, changed, repeated or random."""
    chance = random.Random(5)

    async def test() -> None:
        async with place.served() as client:
            for damage in ("changed", "cut", "repeated", "random"):
                await until(lambda: client.ready)
                connection = client._current
                running = asyncio.ensure_future(answer(client, damage, [1, 2], 250))
                await until(lambda: client.stats.running == 1)
                frame = connection._session.frame(FilePart("s", 0, bytes(100)))
                content = {
                    "changed": frame[:60] + bytes([frame[60] ^ 4]) + frame[61:],
                    "cut": frame[:50] + frame[70:] + frame,
                    "repeated": frame + frame,
                    "random": chance.randbytes(200),
                }[damage]
                assert connection._transport is not None
                connection._transport.write(content)
                with pytest.raises(EngineDownError):
                    await running
                await until(lambda: client.ready)
                assert len(tokens(await answer(client, f"{damage} again", [1, 2]))) == 20
            assert client.restarts == 4
            assert all(engine.process.poll() is None for engine in place.listening), "the engine itself lives on"

    run(test())


def test_damage_to_the_server_ends_the_connection_and_a_new_one_serves(place: Place) -> None:
    chance = random.Random(6)

    async def test() -> None:
        async with place.served() as client:
            for size in (1, 24, 300):
                await until(lambda: client.ready)
                connection = client._current
                running = asyncio.ensure_future(answer(client, f"{size}", [1, 2], 200))
                await until(lambda: client.stats.running == 1)
                connection.data_received(chance.randbytes(size))
                with pytest.raises(EngineDownError, match="cannot be understood"):
                    await running
                await until(lambda: client.ready)
                assert len(tokens(await answer(client, f"{size} again", [1, 2]))) == 20

    run(test())


# --- behind an address -----------------------------------------------------------------------------------------------


@pytest.fixture
def engine(tmp_path: Path) -> Any:
    found = ListeningEngine(tmp_path)
    yield found
    found.close()


def opened(address: str, key: bytes, cache: Path) -> RemoteClient:
    async def test() -> RemoteClient:
        client = RemoteClient(address, key, cache, open_seconds=5)
        try:
            await client.open()
        finally:
            await client.close()
        return client

    return asyncio.run(test())


@pytest.mark.parametrize("key", [b"x" * 32, KEY[:-1] + b"?"])
def test_another_key_opens_nothing_and_the_engine_serves_on(
    engine: ListeningEngine, tmp_path: Path, key: bytes
) -> None:
    with pytest.raises(SignatureError, match="another key") as caught:
        opened(engine.address, key, tmp_path)
    assert caught.value.expected and caught.value.remedy
    assert opened(engine.address, KEY, tmp_path).info.name == "7"


def test_no_key_is_refused_before_anything_is_sent(engine: ListeningEngine, tmp_path: Path) -> None:
    with pytest.raises(SignatureError, match="without a key"):
        RemoteClient(engine.address, b"", tmp_path)


def test_another_version_is_refused_on_both_sides(
    engine: ListeningEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as other:
        other.setattr("runtime.wire.session.VERSION", 99)
        with pytest.raises(WireError, match=f"the engine speaks {PROTOCOL} {VERSION}") as caught:
            opened(engine.address, KEY, tmp_path)
        assert caught.value.expected == f"{PROTOCOL} 99" and "same version" in caught.value.remedy
    assert opened(engine.address, KEY, tmp_path).info.name == "7"


def test_strangers_keep_nobody_out(engine: ListeningEngine, tmp_path: Path) -> None:
    """Connections that say nothing, half a greeting, or something else."""
    host, _, port = engine.address.removeprefix("tcp:").rpartition(":")
    strangers = [socket.create_connection((host, int(port))) for _ in range(40)]
    try:
        for place, stranger in enumerate(strangers):
            stranger.sendall([b"", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", os.urandom(500), bytes(20)][place % 4])
        stranger = Session("server", KEY)
        strangers[0].sendall(bytes(stranger.outgoing)[:30])
        assert opened(engine.address, KEY, tmp_path).info.name == "7"
    finally:
        for stranger in strangers:
            stranger.close()


def test_two_servers_share_an_engine_and_touch_nothing_of_each_other(engine: ListeningEngine, tmp_path: Path) -> None:
    """Planted: reports that go to everybody, and commands that anybody may give."""

    async def test() -> None:
        first, second = (RemoteClient(engine.address, KEY, tmp_path) for _ in range(2))
        try:
            await asyncio.gather(first.open(), second.open())
            long = asyncio.ensure_future(answer(first, "a", [1, 2], 200))
            await until(lambda: second.stats.running == 1)
            with pytest.raises(RequestError, match="is there already"):
                await answer(second, "a", [1, 2])
            second._current._streams["a"] = second._current._streams.get("a") or object()  # type: ignore[assignment]
            second._current.cancel_all()
            del second._current._streams["a"]
            theirs = [await answer(second, f"{i}", [1, 3]) for i in range(5)]
            assert [tokens(deltas) for deltas in theirs] == [alone(FaultyEngine(Faulty()), [1, 3], 20)] * 5
            assert tokens(await long) == alone(FaultyEngine(Faulty()), [1, 2], 200)
            left = asyncio.ensure_future(answer(first, "b", [1, 2], 250))
            await until(lambda: second.stats.running == 1)
            await first.close()
            with pytest.raises(EngineDownError):
                await left
            await until(lambda: second.stats.finished.get("cancelled") == 1)
            assert second.ready and len(tokens(await answer(second, "b", [1, 2]))) == 20
        finally:
            await first.close()
            await second.close()

    run(test())


def test_a_swap_with_settings_is_refused_where_the_engine_has_its_own(engine: ListeningEngine, tmp_path: Path) -> None:
    async def test() -> None:
        client = RemoteClient(engine.address, KEY, tmp_path)
        try:
            await client.open()
            with pytest.raises(RequestError, match="settings for the engine") as caught:
                await client.swap(engine.address, EngineSettings(threads=2))
            assert caught.value.expected and caught.value.remedy and client.ready
        finally:
            await client.close()

    run(test())


def test_files_come_by_their_digest_and_are_kept(tmp_path: Path) -> None:
    """Planted: a file that is not what the engine says, and one that was changed in the cache."""
    contents = {"tokenizer.json": os.urandom(3_000_000), "empty.json": b"", "chat_template.jinja": b"{{ x }}"}
    theirs, cache = tmp_path / "theirs", tmp_path / "cache"
    theirs.mkdir()
    for name, content in contents.items():
        (theirs / name).write_bytes(content)
    engine = ListeningEngine(tmp_path, Faulty(folder=str(theirs)))

    async def files() -> Path:
        client = RemoteClient(engine.address, KEY, cache)
        try:
            await client.open()
            found, deltas = await asyncio.gather(
                client.files(), answer(client, "a", [1, 2], 100), return_exceptions=True
            )
            if isinstance(found, BaseException):
                raise found
            assert not isinstance(deltas, BaseException) and len(tokens(deltas)) == 100, "requests go on meanwhile"
            assert client.info.files == {name: sha256(content).hexdigest() for name, content in contents.items()}
            return found
        finally:
            await client.close()

    try:
        folder = asyncio.run(files())
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == contents
        (folder / "chat_template.jinja").write_bytes(b"{{ y }}")
        (theirs / "tokenizer.json").unlink()  # it need not come again
        assert asyncio.run(files()) == folder and (folder / "chat_template.jinja").read_bytes() == b"{{ x }}"
        (theirs / "empty.json").write_bytes(b"changed")
        (folder / "empty.json").unlink()
        with pytest.raises(WireError, match="has sha256") as caught:
            asyncio.run(files())
        assert caught.value.remedy and not list(folder.glob("*.part")) and not (folder / "empty.json").exists()
    finally:
        engine.close()


@pytest.mark.parametrize(
    "address", ["", "tcp:", "tcp:host", "tcp:host:", "tcp:host:x", "tcp:host:70000", "unix:", "http://x:1", "7000"]
)
def test_what_is_no_address_says_what_one_is(address: str, tmp_path: Path) -> None:
    with pytest.raises(TapeoutError) as caught:
        RemoteClient(address, KEY, tmp_path)
    assert "tcp:HOST:PORT" in caught.value.expected
