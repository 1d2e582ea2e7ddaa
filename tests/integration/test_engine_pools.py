"""Two engines for prompts and two for what follows, in processes of their own: the same answers, whoever dies."""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from runtime.gateway.engines.remote import RemoteEngine
from runtime.gateway.fleet import moves, retries
from runtime.gateway.fleet.client import FleetClient
from runtime.gateway.fleet.discovery import FromFile
from runtime.gateway.fleet.replica import Patience
from runtime.gateway.fleet.scaling import EngineReport, FleetScaler, ScalingSettings
from runtime.wire.limits import Limits
from runtime.wire.messages import GenerateRequest, Pool, Reopen
from tests.answering import KINDS, Whole, whole
from tests.exported import build_float, tiny_graph
from tests.faulty_engine import Faulty
from tests.fleet import connected, write_list
from tests.integration.test_moved_blocks import BLOCK, BUNDLE, asked, prompt
from tests.listening_engine import KEY, ListeningEngine
from tests.tiny import tiny_texts
from tests.waiting import until

POOLS = ("prefill", "prefill", "decode", "decode")
# Steps take long enough that a request is still there when a test looks at it.
SLOW = replace(BUNDLE, step_seconds=0.01)
# Where none is stopped. On a machine that also does other things an engine may be silent for seconds.
CALM = Patience(suspect=30.0, stuck=60.0, open=60.0, wait=60.0)


class Pools:
    """Engines of each pool, and one of its own that answers all of a request."""

    def __init__(self, folder: Path, bundle: Faulty | Path) -> None:
        self.alone = ListeningEngine(folder, bundle)
        self.engines = [ListeningEngine(folder, bundle, pool=pool) for pool in POOLS]  # type: ignore[arg-type]

    def close(self) -> None:
        for engine in (self.alone, *self.engines):
            engine.process.send_signal(signal.SIGCONT)
            engine.close()


@pytest.fixture
def pools(tmp_path: Path) -> Iterator[Pools]:
    found = Pools(tmp_path, SLOW)
    yield found
    found.close()


def run(test: Coroutine[None, None, None]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(test, 120)

    asyncio.run(bounded())


async def answers(client: FleetClient, requests: Sequence[GenerateRequest]) -> list[Whole]:
    async def one(request: GenerateRequest) -> Whole:
        return whole([delta async for delta in client.generate(request)])

    return await asyncio.gather(*map(one, requests))


async def expected(folder: Path, engine: ListeningEngine, requests: Sequence[GenerateRequest]) -> list[Whole]:
    (there := folder / "alone").mkdir()
    (there / "key").write_bytes(engine.key.read_bytes())
    async with connected(there, [engine]) as client:
        return await answers(client, requests)


async def all_ready(client: FleetClient, count: int) -> None:
    await until(lambda: sum(status.state.value == "ready" for status in client.statuses()) == count)


NEW = 200  # tokens: some of them are there before a busy machine has handed a request over
REQUESTS = [replace(asked(f"{number}", prompt(number)), max_new_tokens=NEW) for number in range(12)]


def test_prompts_are_computed_in_one_pool_and_answers_in_the_other(pools: Pools, tmp_path: Path) -> None:
    """Planted: a request that stays where its prompt was computed, and one whose prompt is computed again."""

    async def test() -> None:
        wanted = await expected(tmp_path, pools.alone, REQUESTS)
        async with connected(tmp_path, pools.engines, CALM) as client:
            await all_ready(client, 4)
            assert await answers(client, REQUESTS) == wanted
            assert client.counts["moves"] == len(REQUESTS) and not client.counts["resumptions"]
            stats = [status.stats for status in client.statuses()]
            prompts, decodes = stats[:2], stats[2:]
            assert all(one.prefix_hits == 0 and one.blocks_sent for one in prompts), "each had some of the prompts"
            assert sum(stats.generated_tokens for stats in decodes) > NEW / 2 * len(REQUESTS)
            computed = sum(stats.prefix_queries - stats.prefix_hits for stats in decodes)
            assert computed <= len(REQUESTS) * 4 * BLOCK, "the tokens behind the last full block, and those since"
            assert not any(stats.fetches_failed for stats in decodes)

    run(test())


def test_blocks_are_there_before_the_first_token(tmp_path: Path) -> None:
    """All but those of the last steps. Planted: they are fetched once the first token has come."""
    slow = replace(SLOW, token_seconds=0.01)
    small = Limits(step_tokens=64)
    engines = [ListeningEngine(tmp_path, slow, small, pool=pool) for pool in ("prefill", "decode")]
    request = replace(asked("a", prompt(0, 100)), max_new_tokens=60)

    async def test() -> None:
        async with connected(tmp_path, engines, CALM) as client:
            await all_ready(client, 2)
            running = asyncio.ensure_future(answers(client, [request]))
            await until(lambda: client.statuses()[1].stats.blocks_fetched >= 100 // BLOCK)  # 3 s before the last step
            assert not client.statuses()[0].stats.generated_tokens
            (found,) = await running
            assert len(found.tokens) == 60 and client.counts["moves"] == 1
            stats = client.statuses()[1].stats
            assert stats.prefix_queries - stats.prefix_hits < 4 * BLOCK and not stats.fetches_failed

    try:
        run(test())
    finally:
        for engine in engines:
            engine.close()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("dead", [0, 2])
def test_an_engine_of_either_pool_dies(pools: Pools, tmp_path: Path, dead: int, how: signal.Signals) -> None:
    async def test() -> None:
        wanted = await expected(tmp_path, pools.alone, REQUESTS)
        async with connected(tmp_path, pools.engines) as client:
            await all_ready(client, 4)
            running = asyncio.ensure_future(answers(client, REQUESTS))
            address = pools.engines[dead].address
            await until(lambda: any(s.address == address and s.own for s in client.statuses()))
            pools.engines[dead].process.send_signal(how)
            assert await running == wanted and not client.counts["lost"]

    run(test())


def test_without_the_other_pool_each_does_all(pools: Pools, tmp_path: Path) -> None:
    async def test() -> None:
        wanted = await expected(tmp_path, pools.alone, REQUESTS)
        for engines in (pools.engines[:2], pools.engines[2:]):
            async with connected(tmp_path, engines) as client:
                await all_ready(client, 2)
                assert await answers(client, REQUESTS) == wanted and not client.counts["moves"]

    run(test())


def test_every_kind_of_request_changes_over_to_the_bit(tmp_path: Path) -> None:
    """With a bundle that was built."""
    from tokenizers import Tokenizer

    bundle = build_float(tiny_graph(), tmp_path / "engine", 16).folder
    encode, found = Tokenizer.from_file(str(bundle / "tokenizer.json")).encode, Pools(tmp_path, bundle)

    async def test() -> None:
        async with connected(tmp_path, found.engines) as client:
            await all_ready(client, 4)
            stops = client.info.stop_tokens
            requests = [
                GenerateRequest(
                    f"{number}", encode(tiny_texts(1, number)[0]).ids[:150], 80, stop_tokens=stops, **fields
                )
                for number, fields in enumerate(KINDS.values())
            ]
            wanted = await expected(tmp_path, found.alone, requests)
            assert await answers(client, requests) == wanted
            assert client.counts["moves"] and not client.counts["lost"]

    try:
        run(test())
    finally:
        found.close()


def test_a_request_that_has_left_the_queue_in_time_does_so_once(tmp_path: Path) -> None:
    """It changes over when the longest wait in a queue has passed since it came: its prompt takes twice as long.

    Planted: the next engine gets the timeouts of the first one; and, while it is idle, tells of blocks that have come
    with its next report.
    """
    slow = replace(SLOW, token_seconds=0.01, block_tokens=16)
    engines = [ListeningEngine(tmp_path, slow, pool=pool) for pool in ("prefill", "decode")]
    request = replace(asked("a", prompt(0, 100)), max_new_tokens=100, queue_timeout=2.0, first_token_timeout=60.0)

    async def test() -> None:
        async with connected(tmp_path, engines, CALM) as client:
            await all_ready(client, 2)
            (found,) = await answers(client, [request])
            assert found.reason == "length" and len(found.tokens) == 100 and client.counts["moves"] == 1

    try:
        run(test())
    finally:
        for engine in engines:
            engine.close()


def test_a_request_stays_where_the_engine_that_it_should_go_to_is_lost(tmp_path: Path) -> None:
    """Before its blocks are there. Planted: it changes over to another engine for prompts."""
    slow = replace(SLOW, token_seconds=0.002)
    engines = [ListeningEngine(tmp_path, slow, pool=pool) for pool in ("prefill", "prefill", "decode")]
    request = replace(asked("a", prompt(0, 50)), max_new_tokens=250)

    async def test() -> None:
        async with connected(tmp_path, engines) as client:
            await all_ready(client, 3)
            engines[2].process.send_signal(signal.SIGSTOP)
            (found,) = await answers(client, [request])
            assert found.reason == "length" and not client.counts["moves"]

    try:
        run(test())
    finally:
        for engine in engines:
            engine.process.send_signal(signal.SIGCONT)
            engine.close()


def test_the_only_engine_for_prompts_leaves_the_list(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It has prompts that are not computed yet; those that come later go to the engine for what follows.

    Planted: a change-over that asks for the load of an engine that has left.
    """
    requests = [replace(asked(f"{number}", prompt(number, 100)), max_new_tokens=60) for number in range(8)]
    engines = [ListeningEngine(tmp_path, SLOW, pool=pool) for pool in ("prefill", "decode")]

    async def test() -> None:
        async with connected(tmp_path, engines[1:]) as client:
            wanted = await answers(client, requests)
        async with connected(tmp_path, engines) as client:
            await all_ready(client, 2)
            running = asyncio.ensure_future(answers(client, requests))
            await until(lambda: any(s.address == engines[0].address and s.own == 8 for s in client.statuses()))
            write_list(tmp_path, [engines[1].address])
            assert await running == wanted
            later = [replace(request, id=f"later{request.id}") for request in requests]
            assert await answers(client, later) == wanted
            assert not client.counts["lost"]
            await until(lambda: len(client.statuses()) == 1)

    try:
        run(test())
    finally:
        for engine in engines:
            engine.close()
    gc.collect()
    assert not [record.message for record in caplog.records if record.name == "asyncio"]


def test_a_hand_over_is_tried_elsewhere_where_the_other_engine_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two engines for what follows hangs; some requests choose it, since nobody knows yet.

    Planted: one try, after which a request stays where its prompt was computed.
    """
    monkeypatch.setattr(moves, "AHEAD_SECONDS", 0.5)  # long before the answers end
    slow = replace(SLOW, token_seconds=0.002)
    engines = [ListeningEngine(tmp_path, slow, pool=pool) for pool in ("prefill", "decode", "decode")]
    requests = [replace(asked(f"{number}", prompt(number, 50)), max_new_tokens=300) for number in range(8)]

    async def test() -> None:
        async with connected(tmp_path, engines) as client:
            await all_ready(client, 3)
            engines[1].process.send_signal(signal.SIGSTOP)
            found = await answers(client, requests)
            assert {one.reason for one in found} == {"length"} and not client.counts["lost"]
            assert client.counts["moves"] == len(requests)

    try:
        run(test())
    finally:
        for engine in engines:
            engine.process.send_signal(signal.SIGCONT)
            engine.close()


def test_hand_overs_leave_retries_to_requests_that_would_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two engines for what follows hangs, and half of the budget is there. Planted: all of it is theirs."""
    monkeypatch.setattr(retries, "BUDGET_PER_SECOND", 0.0)
    monkeypatch.setattr(moves, "AHEAD_SECONDS", 0.1)
    slow = replace(SLOW, token_seconds=0.002)
    engines = [ListeningEngine(tmp_path, slow, pool=pool) for pool in ("prefill", "decode", "decode")]
    requests = [replace(asked(f"{number}", prompt(number, 50)), max_new_tokens=100) for number in range(8)]

    async def test() -> None:
        async with connected(tmp_path, engines, CALM) as client:  # which has not noticed yet
            await all_ready(client, 3)
            engines[1].process.send_signal(signal.SIGSTOP)
            client._budget._level = retries.BUDGET_SPARE
            found = await answers(client, requests)
            assert {one.reason for one in found} == {"length"} and not client.counts["lost"]
            assert client.counts["moves"] < len(requests), "some have chosen the engine that hangs"
            assert client._budget._level >= retries.BUDGET_SPARE

    try:
        run(test())
    finally:
        for engine in engines:
            engine.process.send_signal(signal.SIGCONT)
            engine.close()


@pytest.mark.parametrize(
    ("started", "scaled"),
    [(("prefill", "decode"), ("mixed",)), (("mixed", "mixed"), ("prefill", "decode"))],
    ids=["scaling", "pools"],
)
def test_engines_of_other_pools_than_those_that_are_scaled_count(
    tmp_path: Path, started: tuple[Pool, ...], scaled: tuple[Pool, ...]
) -> None:
    """Planted: only those of the same pool, so that the number stays whatever the load."""
    engines = [ListeningEngine(tmp_path, SLOW, pool=pool) for pool in started]

    async def test() -> None:
        listed = write_list(tmp_path, [engine.address for engine in engines])
        settings = ScalingSettings(least=1, most=9, first_token_seconds=1e-6, hold_seconds=0)
        scalers = {pool: FleetScaler(settings) for pool in scaled}
        client = FleetClient(FromFile(listed), tmp_path / "cache", scalers=scalers)
        try:
            await client.open()
            await all_ready(client, 2)
            running = asyncio.ensure_future(answers(client, REQUESTS))
            await until(lambda: all(wanted > 1 for wanted in client.replicas_wanted.values()))
            await running
        finally:
            await client.close()

    try:
        run(test())
    finally:
        for engine in engines:
            engine.close()


def test_how_long_engines_took_to_open_counts_where_a_gateway_says_how_many(tmp_path: Path) -> None:
    """It starts none itself. Planted: the file's `cold_seconds`, whatever the engines have measured."""
    engine = ListeningEngine(tmp_path, replace(SLOW, cold_seconds=77.0))
    scaler = FleetScaler(ScalingSettings())
    seen = list[float]()

    def look(reports: Mapping[str, EngineReport], now: float) -> int:
        seen.extend(report.cold_seconds for report in reports.values())
        return 1

    scaler.look = look  # type: ignore[method-assign]

    async def test() -> None:
        listed = write_list(tmp_path, [engine.address])
        client = FleetClient(FromFile(listed), tmp_path / "cache", scalers={"mixed": scaler})
        try:
            await client.open()
            await until(lambda: bool(client.replicas_wanted and seen))
        finally:
            await client.close()

    try:
        run(test())
    finally:
        engine.close()
    assert set(seen) == {77.0}


def test_a_hand_over_waits_for_an_engine(tmp_path: Path) -> None:
    """The only one for what follows comes while the request runs. Planted: one look, at the first token."""
    engines = [ListeningEngine(tmp_path, SLOW, pool=pool) for pool in ("prefill", "decode")]
    request = replace(asked("a", prompt(0, 50)), max_new_tokens=300)

    async def test() -> None:
        async with connected(tmp_path, engines[:1], CALM) as client:
            await all_ready(client, 1)
            running = asyncio.ensure_future(answers(client, [request]))
            await until(lambda: any(status.stats.generated_tokens > 3 for status in client.statuses()))
            write_list(tmp_path, [engine.address for engine in engines])
            (found,) = await running
            assert found.reason == "length" and client.counts["moves"] == 1

    try:
        run(test())
    finally:
        for engine in engines:
            engine.close()


def test_nothing_is_handed_over_to_an_engine_that_is_about_to_leave(tmp_path: Path) -> None:
    """It still ends what other gateways have there before it opens another bundle, and what it has of this one goes on
    at the engine for prompts. Planted: it counts as an engine that could go on.
    """
    # The other gateway's request outlasts both by far.
    slow = replace(SLOW, step_seconds=0.02)
    engines = [ListeningEngine(tmp_path, slow, pool=pool) for pool in ("prefill", "decode")]
    first, second = replace(asked("a", prompt(0, 50)), max_new_tokens=200), asked("b", prompt(1, 50))

    async def test() -> None:
        other = RemoteEngine(engines[1].address, KEY, tmp_path / "other")
        async with connected(tmp_path, engines, CALM) as client:
            await all_ready(client, 2)
            await other.open(60)
            await other.add(replace(asked("other's", prompt(2, 1)), max_new_tokens=500)).next()
            running = [asyncio.ensure_future(answers(client, [first]))]
            await until(lambda: client.counts["moves"] == 1)
            decode = next(one for one in client._members.listed.values() if one.pool == "decode")
            assert decode.connection is not None
            decode.connection.send(Reopen("", 60.0))
            await until(lambda: decode.lingers)
            running.append(asyncio.ensure_future(answers(client, [second])))
            for one in running:
                (found,) = await one
                assert found.reason == "length"
            assert decode.lingers and client.counts["moves"] == 2 and not client.counts["lost"]
        await other.close()

    try:
        run(test())
    finally:
        for engine in engines:
            engine.close()
