"""A fleet sends a prompt to where its blocks are, with engines in processes of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import NamedTuple

import pytest

from runtime.gateway.fleet.client import FleetClient
from runtime.wire.messages import GenerateRequest, SamplingSettings
from tests.answering import whole
from tests.faulty_engine import FAIL, Faulty
from tests.fleet import connected, session_at, write_list
from tests.listening_engine import ListeningEngine
from tests.waiting import until

BLOCK, BLOCKS = 4, 25
FULL = BLOCK * BLOCKS
# A prompt takes long enough that it matters where its blocks are; an answer, that the list can change meanwhile.
BUNDLE = Faulty(step_seconds=0.015, token_seconds=0.001, max_tokens=512, block_tokens=BLOCK)


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[list[ListeningEngine]]:
    found = [ListeningEngine(tmp_path, BUNDLE, address=f"unix:{tmp_path}/engine{number}") for number in range(3)]
    yield found
    for engine in found:
        engine.close()


class Answered(NamedTuple):
    address: str
    cached: int


def prompt(number: int) -> list[int]:
    """So many full blocks and a token."""
    return Random(number).choices(range(1, FAIL), k=FULL + 1)


async def ask(client: FleetClient, tokens: list[int], session: str = "") -> Answered:
    """Where a request was answered that is alone, and how many tokens of its prompt were there already."""
    found: Answered | None = None
    async with aclosing(client.generate(GenerateRequest("r", tokens, 2), session=session)) as deltas:
        async for delta in deltas:
            if found is None and delta.tokens:
                place = next(status.address for status in client.statuses() if status.own)
                found = Answered(place, delta.cached_tokens)
    assert found is not None
    return found


def run(test: Coroutine[None, None, None]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(test, 90)

    asyncio.run(bounded())


def all_ready(client: FleetClient) -> bool:
    return [status.state.value for status in client.statuses()] == ["ready"] * len(client.statuses())


def heard(client: FleetClient, engine: ListeningEngine, number: int) -> bool:
    """The client knows that this engine has the blocks of a prompt."""
    asked = GenerateRequest("x", prompt(number), 2)
    return client.router.choose(asked, [engine.address])[0].tokens == 1


def test_a_repeated_prompt_goes_where_its_blocks_are(engines: list[ListeningEngine], tmp_path: Path) -> None:
    """Each time from another session. Planted: the session decides."""

    async def test() -> None:
        async with connected(tmp_path, engines) as client:
            await until(lambda: all_ready(client))
            first = [await ask(client, prompt(number), f"a{number}") for number in range(9)]
            assert {found.cached for found in first} == {0} and len({found.address for found in first}) > 1
            again = [await ask(client, prompt(number), f"b{number}") for number in range(9)]
            assert again == [Answered(found.address, FULL) for found in first]

    run(test())


def test_sessions_spread_and_stay(engines: list[ListeningEngine], tmp_path: Path) -> None:
    """Of prompts without a full block, which nothing else decides."""

    async def test() -> None:
        async with connected(tmp_path, engines) as client:
            await until(lambda: all_ready(client))
            for engine in engines:
                session = session_at(engine.address, [e.address for e in engines])
                found = {(await ask(client, [number, 2], session)).address for number in range(1, 5)}
                assert found == {engine.address}

    run(test())


def test_an_engine_that_was_started_again_has_nothing_until_it_says_so(
    engines: list[ListeningEngine], tmp_path: Path
) -> None:
    async def test() -> None:
        there, elsewhere = [session_at(engine.address, [e.address for e in engines]) for engine in engines[:2]]
        async with connected(tmp_path, engines) as client:
            await until(lambda: all_ready(client))
            assert await ask(client, prompt(0), there) == Answered(engines[0].address, 0)
            assert await ask(client, prompt(0), elsewhere) == Answered(engines[0].address, FULL)
            engines[0].process.kill()
            await until(lambda: client.statuses()[0].state.value == "open")
            assert not len(client.router.index)
            await asyncio.to_thread(engines[0].again)
            await until(lambda: all_ready(client))
            assert not heard(client, engines[0], 0)
            assert (await ask(client, prompt(0), there)).cached == 0
            await until(lambda: any(heard(client, engine, 0) for engine in engines))
            client.router.index.check()

    run(test())


def test_an_engine_that_is_listed_again_while_it_drains_is_routed_to(
    engines: list[ListeningEngine], tmp_path: Path
) -> None:
    """There are two connections to it then. Planted: the end of the first one takes the engine from the router.

    The other engine is of another level, so that the request stays where it is.
    """
    engines.append(ListeningEngine(tmp_path, replace(BUNDLE, level="v3"), address=f"unix:{tmp_path}/other"))

    async def test() -> None:
        both = [engines[0], engines[-1]]
        there = session_at(engines[0].address, [engine.address for engine in both])
        async with connected(tmp_path, both) as client:
            await until(lambda: all_ready(client))
            running = asyncio.ensure_future(_all(client, _long([1, 2]), there))
            await until(lambda: client.statuses()[0].own == 1)
            write_list(tmp_path, [both[1].address])
            await until(lambda: "draining" in [status.state.value for status in client.statuses()])
            write_list(tmp_path, [engine.address for engine in both])
            await until(lambda: [s.state.value for s in client.statuses()] == ["ready", "ready", "draining"])
            assert not running.done()
            assert len(await running) == 400
            await until(lambda: len(client.statuses()) == 2)
            assert await ask(client, prompt(0), there) == Answered(engines[0].address, 0)
            assert await ask(client, prompt(0)) == Answered(engines[0].address, FULL)

    run(test())


def test_a_request_goes_on_where_its_prompt_is(engines: list[ListeningEngine], tmp_path: Path) -> None:
    """Two requests lose their engine; another gateway has asked one prompt here and the other one there."""

    async def test() -> None:
        for number in (1, 2):
            folder = tmp_path / str(number)
            folder.mkdir()
            (folder / "key").write_bytes((tmp_path / "key").read_bytes())
            async with connected(folder, engines[number : number + 1]) as other:
                assert (await ask(other, prompt(number))).cached == 0
        async with connected(tmp_path, engines[:1]) as client:
            running = [asyncio.ensure_future(_all(client, _long(prompt(number)))) for number in (1, 2)]
            await until(lambda: client.statuses()[0].own == 2)
            write_list(tmp_path, [engine.address for engine in engines])
            await until(lambda: len(client.statuses()) == 3 and all_ready(client))
            await until(lambda: all(heard(client, engines[number], number) for number in (1, 2)))
            await until(lambda: client.statuses()[0].stats.generated_tokens > 10)
            assert not any(one.done() for one in running)
            engines[0].process.kill()
            assert [len(tokens) for tokens in await asyncio.gather(*running)] == [400, 400]
            assert client.counts["resumptions"] == 2
            await until(lambda: all(status.stats.prefix_hits >= FULL for status in client.statuses()[1:]))

    run(test())


def _long(tokens: list[int]) -> GenerateRequest:
    """Sampled, since drafts make short work of a greedy answer that repeats itself."""
    sampling = SamplingSettings(temperature=1.0, seed=1)
    return GenerateRequest(f"long {tokens}", tokens, 400, sampling=sampling)


async def _all(client: FleetClient, asked: GenerateRequest, session: str = "") -> tuple[int, ...]:
    return whole([delta async for delta in client.generate(asked, session=session)]).tokens
