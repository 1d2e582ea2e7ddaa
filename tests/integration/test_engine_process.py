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
import uvloop

from runtime.gateway.engines.client import EngineDownError
from runtime.gateway.engines.local import ProcessClient
from runtime.wire.limits import DisplacedError, Limits, QueueFullError
from runtime.wire.messages import Delta, GenerateRequest, SamplingSettings
from tapeout.cores import keep_to, usable
from tapeout.errors import ArtifactError, RequestError
from tests.faulty_engine import CRASH, DIES, FAIL, HANG, REFUSES, WORKER, Faulty, FaultyEngine, alone
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


def test_many_requests_at_once_get_the_answers_each_gets_alone() -> None:
    async def test() -> None:
        async with served() as client:
            prompts = [[1 + i % 5, 2, 3, 4 + i % 7, 5][: 2 + i % 4] * (1 + i % 9) for i in range(40)]
            answers = await asyncio.gather(*[answer(client, f"{i}", prompt) for i, prompt in enumerate(prompts)])
            engine = FaultyEngine(Faulty())
            assert [tokens(deltas) for deltas in answers] == [alone(engine, prompt, 20) for prompt in prompts]
            await until(lambda: client.stats.blocks_held == 0)
            assert client.stats.finished == {"length": 40} and client.ready and client.healthy

    run(test())


def test_a_crash_ends_running_requests_and_the_engine_is_started_again() -> None:
    async def test() -> None:
        async with served() as client:
            running = asyncio.ensure_future(answer(client, "a", [1, 2], 200))
            await until(lambda: client.stats.running == 1)
            with pytest.raises(EngineDownError, match="has ended"):
                await answer(client, "b", [1, CRASH])
            with pytest.raises(EngineDownError):
                await running
            assert not client.ready and not client.healthy
            await until(lambda: client.ready)
            assert client.healthy and client.restarts == 1
            assert len(tokens(await answer(client, "a", [1, 2]))) == 20

    run(test())


def test_a_killed_process_is_started_again() -> None:
    async def test() -> None:
        async with served() as client:
            (child,) = psutil.Process().children()
            child.kill()
            await until(lambda: client.restarts == 1 and client.ready)
            assert len(tokens(await answer(client, "a", [1, 2]))) == 20

    run(test())


def test_a_stuck_engine_is_unhealthy_then_killed_and_started_again() -> None:
    async def test() -> None:
        async with served(quiet_seconds=0.7, stuck_seconds=1.5) as client:
            stuck = asyncio.ensure_future(answer(client, "a", [1, HANG]))
            await until(lambda: not client.healthy)
            assert client.ready and not stuck.done()
            with pytest.raises(EngineDownError, match=r"has not reported for 1\.5 seconds"):
                await stuck
            await until(lambda: client.healthy)
            assert len(tokens(await answer(client, "b", [1, 2]))) == 20

    run(test())


def test_a_busy_engine_is_healthy_longer_than_it_may_be_silent() -> None:
    async def test() -> None:
        async with served(Faulty(step_seconds=0.1), quiet_seconds=0.7, stuck_seconds=1.0) as client:
            running = asyncio.ensure_future(answer(client, "a", [1, 2], 25))
            while not running.done():
                assert client.healthy
                await asyncio.sleep(0.05)
            assert len(tokens(await running)) == 25 and client.restarts == 0

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


def test_a_closed_iterator_frees_everything_within_a_step() -> None:
    async def test() -> None:
        async with served(Faulty(step_seconds=0.05)) as client:
            stream = client.generate(GenerateRequest("a", [1, 2, 3, 4, 5], 200))
            first = await anext(stream)
            assert first.tokens and client.stats.blocks_held
            steps = client.stats.steps
            await stream.aclose()
            await until(lambda: client.stats.finished.get("cancelled") == 1)
            assert client.stats.steps <= steps + 2  # the one that ran, and no other
            assert client.stats.blocks_held == client.stats.running == 0

    run(test())


def test_one_request_that_the_engine_cannot_run_ends_alone() -> None:
    async def test() -> None:
        async with served() as client:
            good = asyncio.ensure_future(answer(client, "good", [1, 2], 100))
            (bad,) = await answer(client, "bad", [1, FAIL])
            assert bad.finish_reason == "error" and "cannot run this batch" in (bad.error or "")
            assert tokens(await good) == alone(FaultyEngine(Faulty()), [1, 2], 100)

    run(test())


@pytest.mark.parametrize(
    ("prompt", "settings"),
    [
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
        ([1], {"salt": "text"}),
    ],
)
def test_no_request_is_bad_enough_to_end_the_engine(prompt: list[Any], settings: dict[str, Any]) -> None:
    async def test() -> None:
        async with served() as client:
            with pytest.raises(RequestError):
                await answer(client, "bad", prompt, **settings)
            assert len(tokens(await answer(client, "good", [1, 2]))) == 20
            assert client.restarts == 0 and client.stats.running == client.stats.waiting == 0

    run(test())


def test_drain_lets_requests_end_and_takes_no_more() -> None:
    async def test() -> None:
        async with served() as client:
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


def test_drain_cancels_what_takes_too_long() -> None:
    async def test() -> None:
        async with served(Faulty(step_seconds=0.05)) as client:
            running = asyncio.ensure_future(answer(client, "a", [1, 2], 200))
            await until(lambda: client.stats.running == 1)
            await client.drain(0.2)
            deltas = await running
            assert deltas[-1].finish_reason == "cancelled" and len(tokens(deltas)) < 200

    run(test())


def test_swap_under_load_loses_no_request() -> None:
    async def test() -> None:
        async with served() as client:
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
            await client.swap(str(Faulty("8")))
            assert client.info.name == "8" and client.ready
            await until(lambda: client.stats.generated_tokens > 100)
            stop = True
            expected = [alone(FaultyEngine(Faulty(name)), [1, 2, 3], 20) for name in ("7", "8")]
            for answers in await asyncio.gather(*loads):
                assert answers[0] == expected[0] and answers[-1] == expected[1]
                assert all(found in expected for found in answers)
            assert len(digests) == 2 and client.restarts == 0
            await until(lambda: len(psutil.Process().children()) == 1)  # the old one is closed

    run(test())


def test_a_bundle_that_does_not_open_changes_nothing() -> None:
    async def test() -> None:
        async with served() as client:
            running = asyncio.ensure_future(answer(client, "a", [1, 2], 100))
            with pytest.raises(ArtifactError, match=r"no record\.json") as caught:
                await client.swap(str(Faulty(REFUSES)))
            assert caught.value.remedy == "build one"
            assert client.ready and len(tokens(await running)) == 100
            assert len(psutil.Process().children()) == 1

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


def test_a_full_queue_refuses_or_displaces() -> None:
    async def test() -> None:
        limits = Limits(max_running=1, max_waiting=1)
        async with served(Faulty(step_seconds=0.02), limits) as client:
            first = asyncio.ensure_future(answer(client, "first", [1, 2], 40, priority=1))
            await until(lambda: client.stats.running == 1)
            waits = asyncio.ensure_future(answer(client, "waits", [1, 2], 2, priority=1))
            await until(lambda: client.stats.waiting == 1)
            with pytest.raises(QueueFullError) as caught:
                await answer(client, "late", [1, 2], 2, priority=1)
            assert caught.value.retry_after is not None and caught.value.retry_after > 0
            urgent = asyncio.ensure_future(answer(client, "urgent", [1, 2], 2, priority=0))
            with pytest.raises(DisplacedError, match="higher priority"):
                await waits
            assert len(tokens(await urgent)) == 2 and len(tokens(await first)) == 40

    run(test())


def test_timeouts_end_requests() -> None:
    async def test() -> None:
        async with served(Faulty(step_seconds=0.05), Limits(max_running=1)) as client:
            total = asyncio.ensure_future(answer(client, "total", [1, 2], 200, timeout=0.5))
            await until(lambda: client.stats.running == 1)
            (queued,) = await answer(client, "queued", [1, 2], 2, queue_timeout=0.2)
            assert queued.finish_reason == "timeout" and not queued.tokens
            deltas = await total
            assert deltas[-1].finish_reason == "timeout" and 2 < len(tokens(deltas)) < 20

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


def test_commands_that_fill_the_socket_during_a_long_step_all_arrive() -> None:
    """Under uvloop, too: its sockets do not block, so a write to a full one must be continued later."""

    async def test() -> None:
        limits = Limits(max_waiting=1000, max_waiting_tokens=10**6)
        async with served(Faulty(step_seconds=0.3), limits) as client:
            prompt = [1, 2] * 100
            bias = dict.fromkeys(range(5), 1.0)
            asked = [
                answer(client, f"{'x' * 2000}{i}", prompt, 1, sampling=SamplingSettings(logit_bias=bias))
                for i in range(300)
            ]
            answers = await asyncio.gather(*asked, return_exceptions=True)
            assert not [found for found in answers if isinstance(found, BaseException)]
            assert client.restarts == 0

    async def bounded() -> None:
        await asyncio.wait_for(test(), 60)

    uvloop.run(bounded())
