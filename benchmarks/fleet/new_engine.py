"""From a step of the load to the first token of another engine, with the loop of `tapeout fleet run` (without Ray).

The loop is that of the command, in this process; it starts engines, writes the list of them, and has a gateway of its
own that gets no requests. Requests come from a gateway's client here, which reads that list as any gateway does. First
one engine idles. Then three times as many clients ask as it has places, each again once it has its answer, until the
other engine has made a token for one of them. Then nobody asks until the fleet is as before.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Literal

import psutil

from benchmarks.fleet.processes import KEY, ready
from runtime.fleet.local import LocalFleet
from runtime.gateway.fleet.client import FleetClient
from runtime.gateway.fleet.discovery import FleetFile, FromFile
from runtime.gateway.fleet.plan import EnginePlan, FleetPlan, GatewayPlan
from runtime.gateway.fleet.scaling import ScalingSettings
from runtime.wire.messages import GenerateRequest
from tapeout.errors import TapeoutError

PLACES, CLIENTS, PROMPT, NEW = 4, 12, 64, 64

WAIT_SECONDS = 60.0  # at most, for each thing that is to come
SPECIAL = 10  # token ids from 0 on that no prompt has
Kind = Literal["cold", "standby"]
BARS_SECONDS: dict[Kind, float] = {"cold": 5.0, "standby": 0.5}
# The number of engines that take requests goes from 1 to 2; on standby there is one more, and another one is started.
SCALING: dict[Kind, ScalingSettings] = {
    "cold": ScalingSettings(least=1, most=2, hold_seconds=1),
    "standby": ScalingSettings(least=2, most=3, standby=1, hold_seconds=1),
}
_ids = count()


@dataclass(frozen=True)
class FirstToken:
    """Seconds from the step of the load. ``decided``: the process of another engine is there, or it is on the list;
    ``listed``: the client has read that it is; ``first_token``: the client has a token of it.

    ``cold_seconds``: from the start of an engine's process until it is open, as engines have measured it.
    """

    decided: float
    listed: float
    first_token: float
    cold_seconds: float


async def first_tokens(bundle: Path, repeats: int) -> dict[Kind, list[FirstToken]]:
    return {kind: await _steps(bundle, kind, repeats) for kind in SCALING}


async def _steps(bundle: Path, kind: Kind, repeats: int) -> list[FirstToken]:
    found = list[FirstToken]()
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "engine.key").write_bytes(KEY)
        async with _fleet(bundle, folder, SCALING[kind]) as listed, _client(listed, folder) as client:
            for _ in range(repeats):
                await _calm(client, SCALING[kind].standby)
                found.append(await _step(client, listed, kind))
    return found


@asynccontextmanager
async def _fleet(bundle: Path, folder: Path, scaling: ScalingSettings) -> AsyncGenerator[Path]:
    """The list of its engines."""
    options = ("--unsafe", "--threads", "1", "--draft-tokens", "0", "--max-running", str(PLACES))
    port = _free_port()
    plan = FleetPlan(
        bundle=str(bundle),
        engines=EnginePlan(options=options),
        gateways=GatewayPlan(port=port),
        drain_seconds=5,
    )
    file = FleetFile(up=plan, key=folder / "engine.key", scaling=scaling)
    ending = asyncio.Event()
    running = asyncio.create_task(LocalFleet(file, folder).run(ending))
    try:
        # The loop begins once the gateway is open.
        await _until(lambda: running.done() or _listens(port))
        if running.done():
            await running
        yield folder / f"{plan.name}.yaml"
    finally:
        ending.set()
        await running


@asynccontextmanager
async def _client(listed: Path, folder: Path) -> AsyncGenerator[FleetClient]:
    client = FleetClient(FromFile(listed), folder / "cache")
    try:
        await client.open()
        yield client
    finally:
        await client.close()


async def _calm(client: FleetClient, standby: int) -> None:
    """Until one engine takes requests, and no other process is there but those on standby."""
    await _until(lambda: len(client.statuses()) == len(ready(client)) == 1 and len(_engines()) == 1 + standby)
    await asyncio.sleep(1)


async def _step(client: FleetClient, listed: Path, kind: Kind) -> FirstToken:
    (before,) = ready(client)
    processes, at, wall, boot = _engines(), monotonic(), time.time(), time.clock_gettime(time.CLOCK_BOOTTIME)
    asking = [asyncio.create_task(_ask(client, Random(number))) for number in range(CLIENTS)]
    try:
        listed_at, made = 0.0, None
        while True:
            await asyncio.sleep(0.001)
            for task in asking:
                if task.done():
                    task.result()
            others = [status for status in client.statuses() if status.address != before]
            _require_time(at)
            if not others:
                continue
            listed_at = listed_at or monotonic()
            reported = [status.stats.generated_tokens for status in others if status.stats.blocks]
            if made is None and reported:
                made = sum(reported)  # for clients of the time before
            if made is not None and sum(reported) > made:
                break
        first = monotonic()
        cold = max(status.info.cold_seconds for status in client.statuses() if status.info is not None)
        decided = listed.stat().st_mtime - wall
        if kind == "cold":
            decided = min(_started(pid) for pid in _engines() - processes) - boot
    finally:
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
    return FirstToken(*(round(one, 3) for one in (decided, listed_at - at, first - at, cold)))


async def _ask(client: FleetClient, random: Random) -> None:
    most = client.info.max_tokens
    while True:
        prompt = random.choices(range(SPECIAL, client.info.vocab_size), k=min(PROMPT, most // 4))
        request = GenerateRequest(f"n{next(_ids)}", prompt, min(NEW, most // 4))
        async with aclosing(client.generate(request)) as deltas:
            async for _ in deltas:
                pass


def _engines() -> set[int]:
    """Processes of engines that this one has started."""
    found = set[int]()
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if "engine" in process.cmdline():
                found.add(process.pid)
    return found


def _started(pid: int) -> float:
    """When a process was started, by the clock since the start of the machine; to 10 ms."""
    after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(after_name[19]) / os.sysconf("SC_CLK_TCK")


async def _until(holds: Callable[[], bool]) -> None:
    began = monotonic()
    while not holds():
        _require_time(began)
        await asyncio.sleep(0.1)


def _require_time(began: float) -> None:
    if monotonic() - began > WAIT_SECONDS:
        raise TapeoutError(
            f"the fleet has not changed for {WAIT_SECONDS:g} seconds",
            expected="engines that follow the load",
            remedy="look at the log of its engines above",
        )


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
