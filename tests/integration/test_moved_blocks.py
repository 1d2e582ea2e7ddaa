"""Blocks that an engine fetches from another one rather than computing them, with engines in processes of their own.

Whatever happens to the other one, the answer is the same.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from pipeline.cli.fleet_members import reopen
from runtime.gateway.engines.remote import RemoteEngine
from runtime.wire.limits import Limits
from runtime.wire.messages import Delta, GenerateRequest, Pool, Reopen, SamplingSettings
from tests.answering import KINDS, Whole, whole
from tests.exported import tiny_graph
from tests.faulty_engine import FAIL, Faulty
from tests.fleet import connected, session_at, write_list
from tests.listening_engine import KEY, ListeningEngine
from tests.waiting import until

BLOCK, BLOCKS = 4, 25
# A prompt takes long enough that a fetch is worth it.
BUNDLE = Faulty(step_seconds=0.002, token_seconds=0.001, max_tokens=512, block_tokens=BLOCK)
Start = Callable[..., ListeningEngine]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    engines: list[ListeningEngine] = []

    def started(
        bundle: Faulty | Path = BUNDLE, limits: Limits | None = None, unix: bool = False, pool: Pool = "mixed"
    ) -> ListeningEngine:
        place = f"unix:{tmp_path}/{len(engines)}" if unix else "tcp:127.0.0.1:0"
        engines.append(ListeningEngine(tmp_path, bundle, limits, place, pool))
        return engines[-1]

    yield started
    for engine in engines:
        engine.process.send_signal(signal.SIGCONT)
        engine.close()


def run(test: Coroutine[None, None, None]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(test, 90)

    asyncio.run(bounded())


@asynccontextmanager
async def connections(folder: Path, *engines: ListeningEngine) -> AsyncGenerator[list[RemoteEngine]]:
    async with AsyncExitStack() as stack:
        found = list[RemoteEngine]()
        for engine in engines:
            found.append(connection := RemoteEngine(engine.address, KEY, folder / "cache"))
            stack.push_async_callback(connection.close)
            await connection.open(60)
        yield found


async def answers(engine: RemoteEngine, request: GenerateRequest, source: str = "") -> list[Delta]:
    stream, found = engine.add(request, 0.0, source), list[Delta]()
    while not found or found[-1].finish_reason is None:
        found += await stream.next()
    return found


def prompt(number: int = 0, blocks: int = BLOCKS) -> list[int]:
    """So many full blocks and a token."""
    return Random(number).choices(range(1, FAIL), k=BLOCK * blocks + 1)


def asked(id: str, tokens: list[int], **fields: Any) -> GenerateRequest:
    return GenerateRequest(id, tokens, 12, **({"sampling": SamplingSettings(temperature=1.0, seed=3)} | fields))


@pytest.mark.parametrize("unix", [False, True])
def test_a_prefix_is_fetched_from_a_peer(start: Start, tmp_path: Path, unix: bool) -> None:
    async def test() -> None:
        one, other = start(unix=unix), start(unix=unix)
        async with connections(tmp_path, one, other) as (there, here):
            computed = await answers(there, asked("a", prompt()))
            fetched = await answers(here, asked("a", prompt()), one.address)
            assert whole(fetched) == whole(computed)
            assert (computed[0].cached_tokens, fetched[0].cached_tokens) == (0, BLOCK * BLOCKS)
            assert here.stats.blocks_fetched == BLOCKS and not here.stats.fetches_failed
            await until(lambda: there.stats.blocks_sent == BLOCKS)
            again = await answers(here, asked("b", prompt()), one.address)
            assert whole(again) == whole(computed) and here.stats.blocks_fetched == BLOCKS, "they are here already"

    run(test())


def test_only_what_is_missing_is_fetched_and_only_what_is_there(start: Start, tmp_path: Path) -> None:
    """One engine has the first ten blocks of a prompt, the other the first fifteen, and nobody the rest."""

    async def test() -> None:
        one, other = start(), start()
        whole_prompt = prompt()
        async with connections(tmp_path, one, other) as (there, here):
            await answers(there, asked("a", whole_prompt[: 15 * BLOCK + 1]))
            await answers(here, asked("a", whole_prompt[: 10 * BLOCK + 1]))
            found = await answers(here, asked("b", whole_prompt), one.address)
            assert found[0].cached_tokens == 15 * BLOCK and here.stats.blocks_fetched == 5
            alone = await answers(there, asked("c", whole_prompt, cache_salt=b"computed again"))
            assert whole(found) == whole(alone)

    run(test())


def test_blocks_come_also_from_an_engine_that_is_about_to_open_another_bundle(start: Start, tmp_path: Path) -> None:
    """It says so to everybody who connects. Planted: the fetch ends with that."""

    async def test() -> None:
        one, other = start(), start()
        async with connections(tmp_path, one, other) as (there, here):
            computed = await answers(there, asked("a", prompt()))
            long = there.add(GenerateRequest("long", prompt(1), 250))  # for which it stays
            await long.next()
            there.send(Reopen(str(BUNDLE), 30.0))
            await until(lambda: there.leaving)
            found = await answers(here, asked("a", prompt()), one.address)
            assert whole(found) == whole(computed)
            assert not here.stats.fetches_failed and found[0].cached_tokens == BLOCK * BLOCKS

    run(test())


def test_requests_with_one_prompt_fetch_it_once(start: Start, tmp_path: Path) -> None:
    """One of them is cancelled while it waits. Planted: a cancelled one that is forgotten."""

    async def test() -> None:
        one, other = start(), start()
        async with connections(tmp_path, one, other) as (there, here):
            computed = await answers(there, asked("a", prompt()))
            running = [asyncio.ensure_future(answers(here, asked(f"{n}", prompt()), one.address)) for n in range(4)]
            await asyncio.sleep(0)
            here.cancel_all()
            more = [asyncio.ensure_future(answers(here, asked(f"m{n}", prompt()), one.address)) for n in range(4)]
            reasons = [found[-1].finish_reason for found in await asyncio.gather(*running)]
            assert set(reasons) <= {"cancelled", "length"}
            assert [whole(found) for found in await asyncio.gather(*more)] == [whole(computed)] * 4
            assert here.stats.blocks_fetched <= BLOCKS

    run(test())


def test_a_prefix_of_another_salt_is_not_sent(start: Start, tmp_path: Path) -> None:
    async def test() -> None:
        one, other = start(), start()
        async with connections(tmp_path, one, other) as (there, here):
            await answers(there, asked("a", prompt(), cache_salt=b"tenant"))
            found = await answers(here, asked("b", prompt()), one.address)
            assert not found[0].cached_tokens and not here.stats.blocks_fetched and not here.stats.fetches_failed

    run(test())


@pytest.mark.parametrize("other", [Faulty(**{**BUNDLE.__dict__, "level": "v3"}), replace(BUNDLE, name="8")])
def test_blocks_of_another_level_or_bundle_are_not_taken(start: Start, tmp_path: Path, other: Faulty) -> None:
    """Planted: an engine that does not compare them takes the blocks, and its answer is another one."""

    async def test() -> None:
        one, two = start(other), start()
        async with connections(tmp_path, one, two) as (there, here):
            await answers(there, asked("a", prompt()))
            found = await answers(here, asked("a", prompt()), one.address)
            assert not found[0].cached_tokens and not here.stats.blocks_fetched and here.stats.fetches_failed == 1
            assert whole(found) == whole(await answers(here, asked("b", prompt(), cache_salt=b"again")))

    run(test())


def test_another_key_or_no_engine_at_all(start: Start, tmp_path: Path) -> None:
    async def test() -> None:
        here = start()
        (tmp_path / "stranger").mkdir()
        async with connections(tmp_path, here) as (engine,):
            for number, source in enumerate(("tcp:127.0.0.1:9", "unix:/nowhere", "nonsense", "tcp:127.0.0.1:1")):
                found = await answers(engine, asked(f"{number}", prompt(number)), source)
                assert len(whole(found).tokens) == 12 and not found[0].cached_tokens
            assert engine.stats.fetches_failed == 4

    run(test())


# --- what a peer does in the midst of a transfer ---------------------------------------------------------------------


@asynccontextmanager
async def relay(address: str, change: Callable[[bytes, int], bytes | None]) -> AsyncGenerator[str]:
    """The address of a relay to an engine. ``change``: of what it says, and bytes so far; None: nothing more."""
    host, port = address.removeprefix("tcp:").split(":")

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(host, int(port))

        async def pump() -> None:
            with suppress(ConnectionError):
                while data := await reader.read(1 << 16):
                    back.write(data)

        asking, so_far = asyncio.ensure_future(pump()), 0
        with suppress(ConnectionError):
            while data := await there.read(256):
                changed = change(data, so_far)
                so_far += len(data)
                if changed is None:
                    await asyncio.sleep(60)
                else:
                    writer.write(changed)
        asking.cancel()
        writer.close()
        back.close()

    server = await asyncio.start_server(connect, "127.0.0.1", 0)
    try:
        yield f"tcp:127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


LIES: dict[str, Callable[[bytes, int], bytes | None]] = {
    "stalls": lambda data, so_far: data if so_far < 1024 else None,
    "garbled": lambda data, so_far: data if so_far < 1024 else bytes(len(data)),
    "one bit": lambda data, so_far: data if so_far < 1024 else data[:-1] + bytes([data[-1] ^ 1]),
    "repeats": lambda data, so_far: data if so_far < 1024 else data * 2,
    "stalls at once": lambda data, so_far: None,
}


@pytest.mark.parametrize("lie", LIES)
def test_a_link_that_stalls_or_lies(start: Start, tmp_path: Path, lie: str) -> None:
    async def test() -> None:
        one, other = start(), start()
        async with connections(tmp_path, one, other) as (there, here):
            computed = await answers(there, asked("a", prompt()))
            async with relay(one.address, LIES[lie]) as address:
                found = await answers(here, asked("a", prompt()), address)
                assert whole(found) == whole(computed)
                assert here.stats.fetches_failed == 1 and found[0].cached_tokens < BLOCK * BLOCKS
            await until(lambda: not here.stats.blocks_held)
            assert whole(await answers(here, asked("b", prompt(1)), one.address)).reason == "length"

    run(test())


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_peer_that_dies_or_hangs_in_mid_transfer(start: Start, tmp_path: Path, how: signal.Signals) -> None:
    async def test() -> None:
        one, other = start(), start()

        def end(data: bytes, so_far: int) -> bytes | None:
            if so_far >= 1024:
                one.process.send_signal(how)
            return data

        async with connections(tmp_path, one, other) as (there, here):
            long = prompt(blocks=110)  # more than is asked for ahead
            computed = await answers(there, asked("a", long))
            async with relay(one.address, end) as address:
                found = await answers(here, asked("a", long), address)
                assert whole(found) == whole(computed) and here.stats.fetches_failed == 1
                assert 0 < here.stats.blocks_fetched < 110
            await until(lambda: not here.stats.blocks_held)

    run(test())


def test_the_engine_that_fetches_dies_and_the_other_goes_on(start: Start, tmp_path: Path) -> None:
    async def test() -> None:
        one, other = start(), start()
        async with connections(tmp_path, one, other) as (there, here):
            computed = await answers(there, asked("a", prompt()))
            lost = here.add(asked("a", prompt()), 0.0, one.address)
            await until(lambda: bool(there.stats.blocks_sent) or bool(here.stats.blocks_fetched))
            other.process.kill()
            with pytest.raises(Exception, match="has ended"):
                while True:
                    await lost.next()
            assert whole(await answers(there, asked("b", prompt()))) == whole(computed)
            await until(lambda: not there.stats.blocks_held)

    run(test())


def test_a_gateway_names_the_engine_that_has_a_prompt_and_is_busy(start: Start, tmp_path: Path) -> None:
    """Its steps are short: a fetch waits for the end of one."""
    long = prompt(blocks=100)

    async def test() -> None:
        engines = [start(limits=Limits(step_tokens=16)), start()]
        async with connections(tmp_path, engines[0]) as (there,):
            computed = whole(await answers(there, asked("a", long)))
            async with connected(tmp_path, engines) as client:
                await until(lambda: all(status.state.value == "ready" for status in client.statuses()))
                await until(lambda: len(client.router.index) >= 100)
                busy = [asyncio.ensure_future(answers(there, asked(f"b{n}", prompt(n, 100)))) for n in range(1, 9)]
                await until(lambda: client.statuses()[0].stats.waiting_tokens > 1000)
                found = [delta async for delta in client.generate(asked("c", long))]
                assert whole(found) == computed
                assert client.statuses()[1].stats.blocks_fetched and found[0].cached_tokens
                there.cancel_all()
                await asyncio.gather(*busy)

    run(test())


def test_a_new_engine_is_warmed_before_it_gets_requests(start: Start, tmp_path: Path) -> None:
    """Planted: an engine that is told to warm up by nobody."""

    async def test() -> None:
        one, other = start(), start()
        async with connected(tmp_path, [one]) as client:
            wanted = whole([delta async for delta in client.generate(asked("a", prompt()))])
            write_list(tmp_path, [one.address, other.address])
            await until(lambda: client.statuses()[-1].stats.blocks_fetched >= BLOCKS)
            assert not client.statuses()[-1].stats.steps, "without a request"
        async with connections(tmp_path, other) as (new,):
            found = await answers(new, asked("b", prompt()))
            assert whole(found) == wanted and found[0].cached_tokens == BLOCK * BLOCKS

    run(test())


# --- an engine that drains -------------------------------------------------------------------------------------------

NEW = 300  # more than a busy machine makes before the last one has moved
SLOW = replace(BUNDLE, step_seconds=0.01)


def test_an_engine_that_drains_hands_its_requests_on_with_their_blocks(start: Start, tmp_path: Path) -> None:
    """Planted: requests that are computed again elsewhere, and a gateway that waits until they have ended."""

    async def test() -> None:
        engines = [start(SLOW), start(SLOW)]

        async def ask(number: int, prefix: str) -> Whole:
            sampling = SamplingSettings(temperature=1.0, seed=number, frequency_penalty=0.3)
            request = GenerateRequest(f"{prefix}{number}", prompt(number), NEW, sampling, logprobs=1)
            return whole([delta async for delta in client.generate(request)])

        async with connected(tmp_path, engines[:1]) as client:
            wanted = await asyncio.gather(*[ask(number, "e") for number in range(16)])
        async with connected(tmp_path, engines[:1]) as client:
            running = [asyncio.ensure_future(ask(number, "r")) for number in range(16)]
            await until(lambda: client.statuses()[0].stats.running == 16)
            write_list(tmp_path, [engines[1].address])
            await until(lambda: len(client.statuses()) == 1 and client.statuses()[0].address == engines[1].address)
            moved = sum(not one.done() for one in running)
            assert moved and await asyncio.gather(*running) == wanted
            assert client.counts["moves"] == 16 and not client.counts["resumptions"] and not client.counts["lost"]
            stats = client.statuses()[0].stats
            assert stats.blocks_fetched >= 16 * BLOCKS and not stats.fetches_failed
            assert stats.prefix_queries - stats.prefix_hits < 16 * 2 * BLOCK, "no more than their last tokens"

    run(test())


def test_an_engine_that_opens_another_bundle_hands_its_requests_on_with_their_blocks(
    start: Start, tmp_path: Path
) -> None:
    """As one that drains: a release does not wait for them. Planted: they stay until they end or its time is over, and
    are computed again.
    """

    async def test() -> None:
        engines = [start(SLOW), start(SLOW)]

        async def ask(number: int, prefix: str) -> Whole:
            request = GenerateRequest(f"{prefix}{number}", prompt(number), NEW, logprobs=1)
            session = session_at(engines[0].address, [engine.address for engine in engines])
            return whole([delta async for delta in client.generate(request, session=session)])

        async with connected(tmp_path, engines[:1]) as client:
            wanted = await asyncio.gather(*[ask(number, "e") for number in range(4)])
        async with connected(tmp_path, engines) as client:
            await until(lambda: [status.state.value for status in client.statuses()] == ["ready"] * 2)
            running = [asyncio.ensure_future(ask(number, "r")) for number in range(4)]
            await until(lambda: client.stats.running == 4)
            mine = sum(status.own for status in client.statuses() if status.address == engines[0].address)
            info = await reopen(engines[0].address, KEY, str(replace(SLOW, name="8")), 60, 60)
            assert info.digest != client.info.digest and not all(one.done() for one in running)
            assert await asyncio.gather(*running) == wanted and mine
            assert client.counts["moves"] == mine and not client.counts["resumptions"] and not client.counts["lost"]
            stats = next(one.stats for one in client.statuses() if one.address == engines[1].address)
            assert stats.blocks_fetched >= mine * BLOCKS and not stats.fetches_failed

    run(test())


# --- a real bundle ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["float", "int8 KV"])
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from quantization.calibrate import calibrate
    from tests.exported import build_float
    from tests.integration.test_batch_invariance import Model, make_bundle, recipe
    from tests.tiny import tiny_texts

    folder, graph = tmp_path_factory.mktemp("bundle"), tiny_graph()
    if request.param == "float":
        return build_float(graph, folder / "engine", 16).folder
    calibration = calibrate(recipe("8-bit").calibrate, graph, tiny_texts(8, 0), folder / "calibration")
    return make_bundle(Model(graph, calibration, []), request.param, folder).folder


def test_every_kind_of_request_goes_on_from_fetched_blocks_to_the_bit(
    start: Start, tmp_path: Path, bundle: Path
) -> None:
    """One engine answers; another one fetches the prompt and a part of the answer, and brings the rest."""
    from tokenizers import Tokenizer

    from tests.tiny import tiny_texts

    encode = Tokenizer.from_file(str(bundle / "tokenizer.json")).encode

    async def test() -> None:
        one, other = start(bundle), start(bundle)
        async with connections(tmp_path, one, other) as (there, here):
            for number, (kind, fields) in enumerate(KINDS.items()):
                tokens = encode(tiny_texts(1, number)[0]).ids[:150]
                request = GenerateRequest(f"{number}", tokens, 40, stop_tokens=there.info.stop_tokens, **fields)
                request = replace(request, cache_salt=kind.encode())
                before, expected = here.stats.blocks_fetched, whole(await answers(there, request))
                cut = min(20, len(expected.tokens) - 1)
                rest = replace(request, answered=expected.tokens[:cut], prompt_logprobs=None)
                found = whole(await answers(here, rest, one.address))
                assert found == expected.after(cut), kind
                fetched = (len(tokens) + cut - 1) // here.info.block_tokens
                assert here.stats.blocks_fetched - before == fetched > 1, kind

    run(test())
