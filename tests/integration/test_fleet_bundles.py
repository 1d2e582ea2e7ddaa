"""Two bundles behind one gateway's client: each request runs on engines of its own, whatever becomes of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.cli.fleet_members import reopen
from runtime.gateway.fleet.client import FleetClient
from runtime.gateway.fleet.release import PlanFile, ReleasePlan, plan_path
from runtime.wire.messages import GenerateRequest
from tests.answering import Whole, whole
from tests.faulty_engine import REFUSES, Faulty
from tests.fleet import connected, write_list
from tests.listening_engine import KEY, UNJUDGED, ListeningEngine
from tests.waiting import until

OLD, NEW = Faulty("7", step_seconds=0.01), Faulty("8", step_seconds=0.01, max_tokens=128)
TOKENS = 60
Start = Callable[[Faulty], ListeningEngine]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    engines: list[ListeningEngine] = []

    def started(bundle: Faulty) -> ListeningEngine:
        engines.append(ListeningEngine(tmp_path, bundle, address=f"unix:{tmp_path}/{len(engines)}"))
        return engines[-1]

    yield started
    for engine in engines:
        engine.close()


def run(test: Coroutine[None, None, None]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(test, 120)

    asyncio.run(bounded())


def digest(bundle: Faulty) -> str:
    return f"{int(bundle.name):032x}{0:032x}"


def write_plan(folder: Path, share: float = 0.5) -> None:
    plan = ReleasePlan(stable=digest(OLD), candidate=digest(NEW), share=share, phase="canary")
    plans = PlanFile(plan_path(folder / "fleet.yaml"))
    plans.write(plan, plans.read())


def states(client: FleetClient) -> list[str]:
    return [status.state.value for status in client.statuses()]


async def answer(client: FleetClient, number: int, bundle: Faulty, prefix: str = "r") -> Whole:
    asked = GenerateRequest(f"{prefix}{number}", [1 + number % 9, 2, 3], TOKENS)
    return whole([delta async for delta in client.generate(asked, digest=digest(bundle))])


async def answers(client: FleetClient, prefix: str) -> list[Whole]:
    """Of both bundles, in turns."""
    return await asyncio.gather(*[answer(client, n, (OLD, NEW)[n % 2], prefix) for n in range(8)])


def test_each_request_runs_on_its_bundle_also_when_engines_die(start: Start, tmp_path: Path) -> None:
    """Planted: resumption on any engine, which changes answers."""

    async def test() -> None:
        engines = [start(OLD), start(NEW), start(OLD), start(NEW)]
        write_plan(tmp_path)
        async with connected(tmp_path, engines) as client:
            await until(lambda: states(client) == ["ready"] * 4)
            assert list(client.bundles) == [digest(OLD), digest(NEW)] and client.info.digest == digest(OLD)
            wanted = await answers(client, "e")
            assert wanted[0].tokens != wanted[1].tokens
            running = asyncio.ensure_future(answers(client, "r"))
            await until(lambda: all(status.own for status in client.statuses()))
            await asyncio.sleep(0.1)
            engines[0].process.kill()
            engines[1].process.kill()
            assert await running == wanted
            assert client.counts["resumptions"] >= 2 and not client.counts["lost"]

    run(test())


def test_conversations_are_divided_and_have_the_limits_of_their_bundle(start: Start, tmp_path: Path) -> None:
    async def test() -> None:
        engines = [start(OLD), start(NEW)]
        write_plan(tmp_path, 0.3)
        async with connected(tmp_path, engines) as client:
            await until(lambda: states(client) == ["ready"] * 2)
            openings = [str(number).encode() for number in range(300)]
            begun = {opening: client.info_for(opening) for opening in openings}
            room = {info.digest: info.max_tokens for info in begun.values()}
            assert room == {digest(OLD): 256, digest(NEW): 128}
            new = [opening for opening, info in begun.items() if info.digest == digest(NEW)]
            assert 60 < len(new) < 120
            write_plan(tmp_path, 0.0)
            await until(lambda: client.plan is not None and not client.plan.share)
            assert all(client.info_for(opening).digest == begun[opening].digest for opening in openings)
            assert {client.info_for(f"later {n}".encode()).digest for n in range(50)} == {digest(OLD)}
            engines[1].process.kill()
            await until(lambda: states(client) == ["ready", "open"])
            assert {client.info_for(opening).digest for opening in new} == {digest(OLD)}, "while it is away"

    run(test())


@pytest.mark.parametrize("elsewhere", [False, True])
def test_engines_that_are_all_replaced_bring_their_bundle_without_a_plan(
    start: Start, tmp_path: Path, elsewhere: bool
) -> None:
    """As a Deployment that is rolled out, or a service that is started again. Planted: the first bundle for ever."""

    async def test() -> None:
        old, new = [start(OLD), start(OLD)], list[ListeningEngine]()
        async with connected(tmp_path, old) as client:
            await until(lambda: states(client) == ["ready"] * 2)
            wanted = await answer(client, 1, OLD, "e")
            try:
                for number, engine in enumerate(old):
                    engine.process.kill()
                    engine.process.wait()
                    place = f"unix:{tmp_path}/new{number}" if elsewhere else engine.address
                    new.append(ListeningEngine(tmp_path, NEW, address=place))
                    write_list(tmp_path, [one.address for one in [*new, *old[number + 1 :]]])
                    if not number:
                        await until(lambda: any("serves bundle" in one.why for one in client.statuses()))
                        assert await answer(client, 1, OLD) == wanted, "that of the other one"
                await until(lambda: states(client) == ["ready"] * 2)
                assert client.info.digest == digest(NEW) and list(client.bundles) == [digest(NEW)]
                assert client.info_for(b"a").digest == digest(NEW)
                assert (await answer(client, 1, NEW)).tokens != wanted.tokens
            finally:
                for engine in new:
                    engine.close()

    run(test())


def test_an_engine_opens_another_bundle_and_ends_its_requests_first(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of the only engine: nobody else could go on with them. Planted: connections closed at once."""

    async def test() -> None:
        engine = start(OLD)
        async with connected(tmp_path, [engine]) as client:
            PlanFile(plan_path(tmp_path / "fleet.yaml")).write(ReleasePlan(stable=digest(OLD), phase="done"), None)
            await until(lambda: client.plan is not None)
            await until(client_ready := lambda: client.ready)
            (wanted,) = await asyncio.gather(answer(client, 1, OLD, "e"))
            running = asyncio.ensure_future(answer(client, 1, OLD))
            await until(lambda: bool(client.statuses()[0].own))
            told = asyncio.ensure_future(reopen(engine.address, KEY, str(NEW), 30, 30))
            await until(lambda: states(client) == ["draining"])
            late = asyncio.ensure_future(answer(client, 1, OLD, "late"))  # was encoded for the old one
            info = await told
            assert await running == await late == wanted and not client.counts["resumptions"]
            assert info.digest == digest(NEW)
            await until(lambda: "it serves bundle" in client.statuses()[0].why)
            write_plan(tmp_path)
            await until(client_ready)
            assert client.info_for(b"x").digest == digest(NEW)
            assert (await reopen(engine.address, KEY, "", 30, 30)).digest == digest(OLD), "what it had before"
            await until(lambda: client.ready and client.info_for(b"x").digest == digest(OLD))

    with caplog.at_level(logging.INFO):
        run(test())


@pytest.mark.parametrize("source", [UNJUDGED, str(Faulty(REFUSES))])
def test_what_may_not_be_served_or_does_not_open_changes_nothing(start: Start, tmp_path: Path, source: str) -> None:
    """Such as a bundle without evidence for the level of this machine."""

    async def test() -> None:
        engine = start(OLD)
        async with connected(tmp_path, [engine]) as client:
            await until(lambda: client.ready)
            info = await reopen(engine.address, KEY, source, 30, 30)
            assert info.digest == digest(OLD) and info.notice
            await until(lambda: client.ready)
            assert (await answer(client, 1, OLD)).reason == "length" and not client.counts["lost"]

    run(test())


def test_long_requests_go_on_elsewhere_when_the_time_is_over(start: Start, tmp_path: Path) -> None:
    async def test() -> None:
        engines = [start(replace(OLD, step_seconds=0.04)) for _ in range(2)]
        async with connected(tmp_path, engines) as client:
            await until(lambda: states(client) == ["ready"] * 2)
            wanted = [await answer(client, n, OLD, "e") for n in range(2)]
            running = [asyncio.ensure_future(answer(client, n % 2, OLD, f"{n} ")) for n in range(8)]
            await until(lambda: all(status.own for status in client.statuses()))
            await asyncio.sleep(0.1)
            await reopen(engines[0].address, KEY, str(NEW), 0.0, 30)
            assert await asyncio.gather(*running) == wanted * 4
            assert client.counts["resumptions"] and not client.counts["lost"]

    run(test())
