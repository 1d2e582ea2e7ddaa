"""Fleets of models with recurrent state, and with experts: who dies, drains or is for prompts changes no answer."""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections.abc import AsyncGenerator, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import pytest

from runtime.gateway.fleet.client import FleetClient
from runtime.wire.messages import GenerateRequest, Pool
from tests.answering import DRAWN, PENALTIES, Whole, whole
from tests.exported import build_float, family_graph
from tests.families import vocab_size
from tests.fleet import connected, write_list
from tests.listening_engine import ListeningEngine
from tests.waiting import until

NEW, PROMPT, SLOTS = 200, 140, 16  # tokens: more than two blocks of each; and sequences
MOVES = {"qwen3_5": False, "qwen3_moe": True}  # whether blocks are enough to go on


@dataclass
class Model:
    family: str
    bundle: Path

    def requests(self) -> list[GenerateRequest]:
        """Greedy, drawn, with penalties and with log-probabilities."""
        kinds = ({}, {"sampling": DRAWN, "logprobs": 1}, {"sampling": PENALTIES}, {"logprobs": 0})
        vocabulary, found = range(vocab_size(self.family)), list[GenerateRequest]()
        for number in range(8):
            prompt = Random(number).choices(vocabulary, k=PROMPT)
            found.append(GenerateRequest(f"{number}", prompt, NEW, **kinds[number % len(kinds)]))
        return found


@pytest.fixture(scope="module", params=MOVES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp(request.param)
    return Model(
        request.param,
        build_float(family_graph(request.param, max_position_embeddings=384), folder / "engine", SLOTS).folder,
    )


@pytest.fixture
def engines(model: Model, tmp_path: Path) -> Iterator[list[ListeningEngine]]:
    """Two, and one of each pool."""
    pools: Sequence[Pool] = ("mixed", "mixed", "prefill", "decode")
    found = [ListeningEngine(tmp_path, model.bundle, pool=pool) for pool in pools]
    yield found
    for engine in found:
        engine.close()


@asynccontextmanager
async def fleet(folder: Path, engines: Sequence[ListeningEngine]) -> AsyncGenerator[FleetClient]:
    async with connected(folder, engines) as client:
        await until(lambda: [status.state.value for status in client.statuses()] == ["ready"] * len(engines))
        yield client


async def answers(client: FleetClient, requests: Sequence[GenerateRequest]) -> list[Whole]:
    async def one(request: GenerateRequest) -> Whole:
        return whole([delta async for delta in client.generate(request)])

    return await asyncio.gather(*map(one, requests))


def busy(client: FleetClient) -> int:
    """Engines that have answered a part of a request."""
    return sum(status.own > 0 and status.stats.running > 0 for status in client.statuses())


async def asked_until(client: FleetClient, wanted: Sequence[Whole], model: Model, count: str) -> None:
    """Again and again, until a request has gone on elsewhere by ``count``; no answer may differ."""
    turns = itertools.count()
    while not client.counts[count]:
        turn = next(turns)
        requests = [replace(request, id=f"{turn}-{request.id}") for request in model.requests()]
        assert await answers(client, requests) == wanted
    assert not client.counts["lost"]


def run(test: Coroutine[None, None, None]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(test, 240)

    asyncio.run(bounded())


def test_requests_go_on_elsewhere(model: Model, engines: list[ListeningEngine], tmp_path: Path) -> None:
    """Between pools, from an engine that drains, and from one that is killed.

    Recurrent state does not move: prompt and answer so far are computed again, and no fetch is tried. Planted: an
    engine with recurrent state that says its blocks are enough.
    """

    async def test() -> None:
        async with fleet(tmp_path, engines[:1]) as client:
            wanted = await answers(client, model.requests())
        async with fleet(tmp_path, engines[2:]) as client:
            await asked_until(client, wanted, model, "moves")
            stats = client.statuses()[1].stats
            assert bool(stats.blocks_fetched) == MOVES[model.family] and not stats.fetches_failed
        async with fleet(tmp_path, engines[:2]) as client:
            asking = asyncio.ensure_future(asked_until(client, wanted, model, "moves"))
            while not asking.done():  # it may have had no request at the moment at which the list was read
                write_list(tmp_path, [engine.address for engine in engines[:2]])
                await until(lambda: asking.done() or busy(client) == 2)
                write_list(tmp_path, [engines[0].address])
                await until(lambda: asking.done() or len(client.statuses()) == 1)
            await asking
        async with fleet(tmp_path, engines[:2]) as client:
            asking = asyncio.ensure_future(asked_until(client, wanted, model, "resumptions"))
            stopped = False
            while not stopped:  # where its requests had not just ended: they do not while it stands still
                engines[1].process.send_signal(signal.SIGCONT)
                await until(lambda: busy(client) == 2)
                engines[1].process.send_signal(signal.SIGSTOP)
                await asyncio.sleep(0.1)
                stopped = busy(client) == 2
            engines[1].process.send_signal(signal.SIGKILL)
            await asking
            stats = client.statuses()[0].stats
            assert MOVES[model.family] or not (stats.blocks_fetched or stats.fetches_failed)

    run(test())
