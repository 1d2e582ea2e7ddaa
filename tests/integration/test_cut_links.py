"""Links between machines that go down in the midst of answers, and come back: nobody is told, packets are only lost.

Machines are network namespaces, with real processes in them. A gateway that is stopped is here, too: the kernel still
takes what is sent to it until its buffers are full, and these are of a size that a test can fill here.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

import pytest
import sqlalchemy as sa
import yaml
from sqlalchemy import exc

from runtime.gateway.engines.remote import RemoteEngine
from runtime.wire.messages import Delta, GenerateRequest
from tapeout.database import open_database
from tests import command, web
from tests.answering import whole
from tests.command import ROOT, Running
from tests.faulty_engine import Faulty
from tests.fleet_load import build_tiny, replicas
from tests.integration.test_serve_elsewhere import Engine
from tests.listening_engine import KEY, ListeningEngine
from tests.network import Network, network
from tests.postgres import running_postgres
from tests.waiting import until, wait_for

GATEWAYS, ENGINES = ("gateway", "other"), ("one", "two")
GIVEN_UP = ("open", "half-open")
CUTS = int(os.environ.get("LINK_CUTS", "2"))
LONG = {"model": "tiny", "prompt": "The list is", "max_tokens": 440, "min_tokens": 440, "stream": True}
ASKED: list[dict[str, Any]] = [
    *(LONG | {"temperature": 0.9, "seed": seed, "frequency_penalty": 0.3} for seed in range(4)),
    *(LONG | {"temperature": 0.8, "seed": seed, "n": 2} for seed in range(2)),
    *(LONG | {"temperature": 0, "presence_penalty": penalty, "logprobs": 2} for penalty in (0.0, 0.5)),
]


@pytest.fixture(scope="module")
def net() -> Iterator[Network]:
    with network(*GATEWAYS, *ENGINES) as found:
        yield found


@pytest.fixture(scope="module")
def engines(net: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Engine]]:
    folder = tmp_path_factory.mktemp("fleet")
    build_tiny(folder)
    found = [
        Engine(folder, folder / "engine.key", f"tcp:{net.address(host)}:7000", net.within(host)) for host in ENGINES
    ]
    for engine in found:
        engine.start(folder / "tiny")
    listed = {"engines": [engine.address for engine in found], "key": "engine.key"}
    (folder / "fleet.yaml").write_text(yaml.safe_dump(listed))
    yield found
    for engine in found:
        assert engine.stop() == 0


Choice = tuple[str, tuple[float, ...]]  # text, and log-probabilities where they were asked for


class Answer(NamedTuple):
    """``gap``: the longest time between two events, in seconds."""

    choices: tuple[Choice, ...]
    gap: float


class Gateway:
    """With clients on its machine."""

    def __init__(self, running: Running, net: Network, host: str) -> None:
        self.running = running
        self._pool = ThreadPoolExecutor(len(ASKED) + 1, initializer=net.enter, initargs=(host,))

    def begin(self) -> list[Future[Answer]]:
        """All that is asked, each with some of its answer."""
        begun = threading.Barrier(len(ASKED) + 1)
        found = [self._pool.submit(self._stream, body, begun) for body in ASKED]
        begun.wait(60)
        return found

    def fleet(self, name: str) -> Any:
        return self._pool.submit(lambda: web.get(f"{self.running.url}/fleet", timeout=30).json()[name]).result()

    def states(self) -> list[str]:
        """Of the engines."""
        return [one["state"] for one in self._pool.submit(replicas, self.running.url).result()]

    def close(self) -> None:
        self.running.process.kill()  # clients would go on waiting
        self._pool.shutdown()

    def _stream(self, body: dict[str, Any], begun: threading.Barrier) -> Answer:
        choices = range(body.get("n", 1))
        texts, logprobs = ["" for _ in choices], [list[float]() for _ in choices]
        gap = last = 0.0
        with web.stream("POST", f"{self.running.url}/v1/completions", json=body, timeout=120) as answer:
            assert answer.status_code == 200
            for line in answer.iter_lines():
                if line == "data: [DONE]":
                    return Answer(tuple(zip(texts, map(tuple, logprobs), strict=True)), gap)
                if line.startswith("data: "):
                    event = json.loads(line.removeprefix("data: "))
                    assert "error" not in event, event
                    for choice in event["choices"]:
                        texts[choice["index"]] += choice["text"]
                        logprobs[choice["index"]] += (choice.get("logprobs") or {}).get("token_logprobs", [])
                    if last:
                        gap = max(gap, monotonic() - last)
                    else:
                        begun.wait(60)
                    last = monotonic()
        raise AssertionError("the stream ended before its end")


Start = Callable[[str], Gateway]


@pytest.fixture
def start(net: Network, engines: Sequence[Engine], tmp_path: Path) -> Iterator[Start]:
    """A gateway on a machine, once it has both engines."""
    with ExitStack() as stack:

        def started(host: str) -> Gateway:
            options = [str(engines[0].folder / "fleet.yaml"), "--served-model-name", "tiny", "--wait-seconds", "110"]
            variables = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path / host)}
            served = command.served(
                *options, variables=variables, folder=tmp_path, command="gateway", within=net.within(host)
            )
            found = Gateway(stack.enter_context(served), net, host)
            stack.callback(found.close)
            wait_for(lambda: found.states() == ["ready"] * 2)
            return found

        yield started
        mend_all(net)


def mend_all(net: Network) -> None:
    for host in (*GATEWAYS, *ENGINES):
        net.mend(host)


def results(running: Sequence[Future[Answer]]) -> list[Answer]:
    return [one.result(120) for one in running]


def bits(answers: Sequence[Answer]) -> list[tuple[Choice, ...]]:
    return [answer.choices for answer in answers]


def test_the_link_of_an_engine_goes_down_among_streams(net: Network, start: Start) -> None:
    """They go on at the other one with the same bits, and the first one is used again once its link is back."""
    gateway = start("gateway")
    wanted, gaps = bits(results(gateway.begin())), list[float]()
    for attempt in range(CUTS):
        host, resumed = ENGINES[attempt % 2], gateway.fleet("resumptions")
        running = gateway.begin()
        net.cut(host)
        found = results(running)
        assert bits(found) == wanted
        assert gateway.fleet("resumptions") > resumed and gateway.fleet("lost") == 0
        gaps.append(max(answer.gap for answer in found))
        if attempt % 2:  # else it is back before anybody has given it up
            wait_for(lambda host=host: gateway.states()[ENGINES.index(host)] in GIVEN_UP)
        net.mend(host)
        wait_for(lambda: gateway.states() == ["ready"] * 2)
        running = gateway.begin()
        assert all(one["requests"] for one in gateway.fleet("replicas"))
        assert bits(results(running)) == wanted
    print("longest gap of each cut:", *(f"{gap:.2f} s" for gap in gaps))


def test_the_link_of_a_gateway_goes_down_among_its_streams(net: Network, start: Start) -> None:
    """They go on once it is back, also when all engines were given up; another gateway notices nothing."""
    gateway, other = start("gateway"), start("other")
    wanted = bits(results(gateway.begin()))
    running = gateway.begin()
    net.cut("gateway")
    assert bits(results(other.begin())) == wanted and other.fleet("resumptions") == 0
    wait_for(lambda: all(state in GIVEN_UP for state in gateway.states()))
    wait_for(lambda: all(one["running"] == 0 and one["kv_usage"] == 0 for one in other.fleet("replicas")))
    net.mend("gateway")
    assert bits(results(running)) == wanted
    wait_for(lambda: gateway.states() == ["ready"] * 2)
    assert bits(results(gateway.begin())) == wanted and gateway.fleet("lost") == 0


def test_a_gateway_that_is_stopped_holds_up_nobody(net: Network, engines: Sequence[Engine], start: Start) -> None:
    """The engines keep what is for it, and leave it once it has read nothing for 10 seconds: its requests are
    cancelled. When it goes on, its streams end with the same bits, and it serves again.
    """
    net.limit_buffers("gateway", 16384, 16384)
    for host in ENGINES:
        net.limit_buffers(host, 16384, 16384)
    gateway, other = start("gateway"), start("other")
    wanted, resumed = bits(results(gateway.begin())), 0
    for left in (False, True):
        running = gateway.begin()
        gateway.running.process.send_signal(signal.SIGSTOP)
        try:
            for _ in range(3):
                assert bits(results(other.begin())) == wanted
            if left:
                wait_for(lambda: not any(connected_to(one.process, net.address("gateway")) for one in engines))
            wait_for(lambda: all(one["running"] == 0 and one["kv_usage"] == 0 for one in other.fleet("replicas")))
        finally:
            gateway.running.process.send_signal(signal.SIGCONT)
        assert bits(results(running)) == wanted
        wait_for(lambda: gateway.states() == ["ready"] * 2)
        assert bits(results(gateway.begin())) == wanted and gateway.fleet("lost") == 0
        resumed = gateway.fleet("resumptions")
    assert resumed and other.fleet("resumptions") == 0


def connected_to(process: subprocess.Popen[str] | None, host: str) -> bool:
    """Whether it, or another process of its machine, has a connection to this address."""
    assert process is not None
    sockets = [line.split() for line in Path(f"/proc/{process.pid}/net/tcp").read_text().splitlines()[1:]]
    address = f"{int.from_bytes(socket.inet_aton(host), sys.byteorder):08X}"
    # Those that a process has closed have no inode any more; the kernel may still try to send what is left.
    return any(remote.startswith(address) and inode != "0" for _, _, remote, *_, inode in (one[:10] for one in sockets))


# --- what an engine keeps for machines that are gone ------------------------------------------------------------------

Listen = Callable[[str, Faulty], ListeningEngine]


@pytest.fixture
def listen(net: Network, tmp_path: Path) -> Iterator[Listen]:
    found: list[ListeningEngine] = []

    def listening(host: str, bundle: Faulty) -> ListeningEngine:
        place, within = f"tcp:{net.address(host)}:7100", net.within(host)
        found.append(ListeningEngine(tmp_path, bundle, address=place, within=within))
        return found[-1]

    yield listening
    mend_all(net)
    for engine in found:
        engine.close()


def run(test: Coroutine[None, None, None]) -> None:
    """In a thread of its own, which goes from one machine to the next."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(asyncio.run, test).result()


async def opened(net: Network, host: str, engine: ListeningEngine, cache: Path) -> RemoteEngine:
    """From this machine."""
    net.enter(host)
    found = RemoteEngine(engine.address, KEY, cache)
    await found.open(60)
    return found


async def deltas(engine: RemoteEngine, request: GenerateRequest, source: str = "") -> list[Delta]:
    stream, found = engine.add(request, 0.0, source), list[Delta]()
    while not found or found[-1].finish_reason is None:
        found += await stream.next()
    return found


def test_an_engine_cancels_what_a_machine_that_is_gone_has_asked_for(
    net: Network, listen: Listen, tmp_path: Path
) -> None:
    """Its answer would take minutes. Planted: the engine waits for the kernel, which tries for a quarter of an hour."""
    engine = listen("one", Faulty(step_seconds=0.4, max_tokens=512))

    async def test() -> None:
        lost, other = [await opened(net, host, engine, tmp_path) for host in GATEWAYS]
        stream = lost.add(GenerateRequest("a", [1, 2, 3], 500))
        await stream.next()
        await until(lambda: other.stats.running == 1)
        net.cut("gateway")
        assert len(whole(await deltas(other, GenerateRequest("b", [1, 2, 3], 3))).tokens) == 3
        await until(lambda: other.stats.finished.get("cancelled") == 1)
        assert other.stats.running == other.stats.blocks_held == 0
        for one in (lost, other):
            await one.close()

    run(test())


def test_an_engine_leaves_a_peer_that_is_gone_and_has_fetched_blocks(
    net: Network, listen: Listen, tmp_path: Path
) -> None:
    """Nothing is sent to it any more, so only a question can show that it is gone. Planted: its connection stays, and
    after 16 such peers nobody can fetch.
    """
    bundle = Faulty(step_seconds=0.002, token_seconds=0.001, block_tokens=4)
    one, two = (listen(host, bundle) for host in ENGINES)
    prompt = [1 + number % 9 for number in range(101)]

    async def test() -> None:
        here, there = await opened(net, "gateway", one, tmp_path), await opened(net, "gateway", two, tmp_path)
        computed = await deltas(there, GenerateRequest("a", prompt, 5))
        assert whole(await deltas(here, GenerateRequest("a", prompt, 5), two.address)) == whole(computed)
        assert here.stats.blocks_fetched == 25
        assert connected_to(two.process, net.address("one"))
        net.cut("one")
        await until(lambda: not connected_to(two.process, net.address("one")))
        assert whole(await deltas(there, GenerateRequest("b", prompt, 5))) == whole(computed)
        for engine in (here, there):
            await engine.close()

    run(test())


def test_a_question_to_a_database_that_is_gone_ends(net: Network) -> None:
    """It has the question, so nothing that is sent is missing an answer. Planted: who asks waits for two hours, and
    every limit, record or beat behind that with it.
    """
    asking = threading.Event()

    def ask(url: str) -> None:
        net.enter("gateway")
        engine = open_database(url, "limits")
        with engine.connect() as connection:
            connection.execute(sa.text("SELECT 1"))
            asking.set()
            connection.execute(sa.text("SELECT pg_sleep(4)"))

    with (
        running_postgres(within=net.within("one"), host=net.address("one")) as postgres,
        ThreadPoolExecutor(1) as pool,
    ):
        asked = pool.submit(ask, postgres.address)
        try:
            wait_for(lambda: asking.is_set() or asked.done())
            time.sleep(1)
            net.cut("one")
            with pytest.raises(exc.OperationalError):
                asked.result(60)
        finally:
            net.mend("one")
