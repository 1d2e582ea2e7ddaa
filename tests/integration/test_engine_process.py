"""The engine's process and its client: crashes, hangs, cancelled requests, drain, swap, and a server that dies."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from runtime.gateway.engines.client import EngineDownError
from runtime.gateway.engines.local import ProcessClient
from runtime.wire.limits import Limits
from runtime.wire.messages import Delta, GenerateRequest, SamplingSettings
from tapeout.cores import keep_to, usable
from tapeout.errors import ArtifactError, RequestError
from tests.faulty_engine import CRASH, DIES, FAIL, HANG, REFUSES, WORKER, Faulty
from tests.waiting import until

ROOT = Path(__file__).parents[2]


@asynccontextmanager
async def served(bundle: Faulty | None = None, limits: Limits | None = None, **options: Any) -> AsyncGenerator[Any]:
    client = ProcessClient(str(bundle or Faulty()), None, limits, worker=WORKER, **options)
    try:
        await client.open()
        yield client
    finally:
        await client.close()


async def answer(client: ProcessClient, id: str, prompt: list[int], new: int = 20, **settings: Any) -> list[Delta]:
    return [delta async for delta in client.generate(GenerateRequest(id, prompt, new, **settings))]


def tokens(deltas: list[Delta]) -> list[int]:
    assert [delta.finish_reason is None for delta in deltas] == [True] * (len(deltas) - 1) + [False]
    return [token for delta in deltas for token in delta.tokens]


def run(test: Awaitable[None]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(test, 60)

    asyncio.run(bounded())


def test_a_killed_process_is_started_again() -> None:
    async def test() -> None:
        async with served() as client:
            (child,) = psutil.Process().children()
            child.kill()
            await until(lambda: client.restarts == 1 and client.ready)
            assert len(tokens(await answer(client, "a", [1, 2]))) == 20

    run(test())


def test_an_event_loop_that_was_blocked_does_not_take_the_engine_for_stuck() -> None:
    async def test() -> None:
        async with served(quiet_seconds=0.7, stuck_seconds=1.0) as client:
            time.sleep(1.5)
            assert client.healthy
            await asyncio.sleep(0.5)
            assert client.healthy and client.restarts == 0

    run(test())


@pytest.mark.skipif(len(usable()) < 2, reason="needs two cores")
def test_an_engine_that_is_opened_later_may_use_all_cores() -> None:
    """The server keeps to one of them meanwhile, and a process inherits that."""

    async def test() -> None:
        cores = usable()
        async with served() as client:
            try:
                keep_to(frozenset({max(cores)}))
                await client.swap(str(Faulty("8")))
                await until(lambda: len(psutil.Process().children()) == 1)
                assert os.sched_getaffinity(psutil.Process().children()[0].pid) == cores
            finally:
                keep_to(cores)

    run(test())


def test_a_bundle_that_opens_and_gives_no_token_changes_nothing() -> None:
    async def test() -> None:
        async with served() as client:
            running = asyncio.ensure_future(answer(client, "a", [1, 2], 100))
            with pytest.raises(EngineDownError, match="has ended"):
                await client.swap(str(Faulty(DIES)))
            assert client.info.name == "7" and client.ready and len(tokens(await running)) == 100
            assert client.restarts == 0 and len(psutil.Process().children()) == 1

    run(test())


def test_a_bundle_that_does_not_open_is_an_error_at_start() -> None:
    async def test() -> None:
        client = ProcessClient(str(Faulty(REFUSES)), worker=WORKER)
        with pytest.raises(ArtifactError, match=r"no record\.json"):
            await client.open()
        await client.close()
        assert not psutil.Process().children()

    run(test())


def test_an_idle_engine_costs_nothing_and_says_that_it_lives() -> None:
    async def test() -> None:
        async with served() as client:
            await answer(client, "a", [1, 2])
            (child,) = psutil.Process().children()
            before, stats = sum(child.cpu_times()[:2]), client.stats
            await asyncio.sleep(2)
            assert sum(child.cpu_times()[:2]) - before < 0.2
            assert client.stats is not stats and client.silent_seconds < 1 and client.healthy

    run(test())


def test_a_random_crowd_leaves_nothing_behind() -> None:
    """Good and bad requests, some abandoned, with crashes of the engine: each ends once, and nothing stays."""

    async def one(client: ProcessClient, chance: random.Random, number: int) -> str:
        prompt = [chance.randrange(1, FAIL) for _ in range(chance.randrange(1, 40))]
        kind = chance.choices(["plain", "abandoned", "fails", "bad", "crashes"], [60, 25, 8, 6, 1])[0]
        prompt += {"fails": [FAIL], "bad": [-5], "crashes": [CRASH]}.get(kind, [])
        sampling = SamplingSettings(temperature=chance.choice([0.0, 1.0]), seed=chance.randrange(9))
        request = GenerateRequest(f"{number}", prompt, chance.randrange(1, 40), sampling, tenant=chance.choice("ab"))
        stream = client.generate(request)
        try:
            reasons: list[str | None] = []
            async for delta in stream:
                assert None in reasons[-1:] or not reasons, "more of a request that has ended"
                reasons.append(delta.finish_reason)
                if kind == "abandoned" and len(reasons) == 3:
                    return "abandoned"
            assert reasons[-1] == ("error" if kind == "fails" else "length")
            return str(reasons[-1])
        except (RequestError, EngineDownError) as error:
            assert isinstance(error, EngineDownError) or kind == "bad"
            return type(error).__name__
        finally:
            await stream.aclose()

    async def test() -> None:
        async with served(Faulty(step_seconds=0.0, slots=4), Limits(max_running=4, step_tokens=32)) as client:
            chance, handles = random.Random(1), psutil.Process().num_fds()

            async def crowd(first: int) -> list[str]:
                ends: list[str] = []
                for number in range(40):
                    await until(lambda: client.ready)
                    ends.append(await one(client, chance, 1000 * first + number))
                return ends

            ends = Counter(end for ends in await asyncio.gather(*map(crowd, range(12))) for end in ends)
            assert sum(ends.values()) == 480 and ends["length"] > 100 and ends["EngineDownError"] and client.restarts
            await until(lambda: client.ready and client.stats.blocks_held == 0 == client.stats.running)
            assert client.stats.waiting == client.stats.waiting_tokens == 0
            await until(lambda: len(psutil.Process().children()) == 1)
            assert psutil.Process().num_fds() <= handles + 1 and not client._current._streams

    run(test())


SERVER = """
import asyncio
from runtime.gateway.engines.local import ProcessClient
from runtime.wire.messages import GenerateRequest
from tests.faulty_engine import WORKER, Faulty

async def main():
    client = ProcessClient(str(Faulty(max_tokens=8192)), worker=WORKER)
    await client.open()
    print("open", flush=True)
    async for _ in client.generate(GenerateRequest("a", [1, PROMPT], 8000)):
        pass

asyncio.run(main())
"""


@pytest.mark.parametrize("prompt", [2, HANG])
def test_the_engine_ends_with_its_server(prompt: int) -> None:
    """Also in the midst of a step that never ends."""
    program = SERVER.replace("PROMPT", str(prompt))
    server = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None and server.stdout.readline() == "open\n"
        (engine,) = psutil.Process(server.pid).children()
        time.sleep(0.3)
        os.kill(server.pid, signal.SIGKILL)
        server.wait()
        engine.wait(5)
    finally:
        server.kill()
        server.wait()
        assert server.stdout is not None
        server.stdout.close()
