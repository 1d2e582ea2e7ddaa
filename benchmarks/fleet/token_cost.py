"""What a token costs on its way through the client of a fleet, beyond that of an engine of the server's own.

The same requests go in turns through the client that `tapeout serve` uses, over a socket pair to a process that it has
started, and through that of `tapeout gateway`, over TCP to engines that listen. Engines cost nothing
(:mod:`benchmarks.fleet.free_engine`), so the processor time of both processes is that of the way of a token, from the
engine's scheduler to whoever reads the stream; HTTP comes after it and is not in it.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from array import array
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from itertools import count
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import process_time
from typing import Any, NamedTuple

from benchmarks.fleet.free_engine import since
from benchmarks.fleet.processes import KEY, fleet_client, processor_seconds
from runtime.gateway.engines.client import EngineClient
from runtime.gateway.engines.local import ProcessClient
from runtime.simulation.fleet import percentile
from runtime.wire.limits import Limits
from runtime.wire.messages import GenerateRequest
from runtime.wire.start import EngineSettings, Start

WORKER = "benchmarks.fleet.free_engine"
STEP_SECONDS = 0.01
BARS_US, BAR_TRANSIT_US = {16: 3.0, 64: 1.5}, 100.0
LOCAL, ONE, TWO = "local engine", "fleet of one", "fleet of two"
ENGINES = {LOCAL: 0, ONE: 1, TWO: 2}  # that listen
PROMPT, WARM_TOKENS = list(range(8)), 20
_ids = count()


class TokenCost(NamedTuple):
    """Microseconds of processor time a token, of both processes, and of its way in microseconds of time."""

    gateway: float
    engine: float
    transit_p50: float
    transit_p99: float

    @property
    def both(self) -> float:
        return self.gateway + self.engine


class Way(NamedTuple):
    """``engines``: their processes."""

    client: EngineClient
    engines: Sequence[int]


async def token_costs(streams: Sequence[int], tokens: int, rounds: int) -> dict[str, Any]:
    """By number of streams an engine and by way. ``tokens``: of each stream. Medians of ``rounds``."""
    found: dict[int, dict[str, list[TokenCost]]] = {each: {name: [] for name in ENGINES} for each in streams}
    for number in range(rounds):
        for name in list(ENGINES) if number % 2 else list(ENGINES)[::-1]:
            # Alone: what a client of a fleet does beside its requests is a part of what they cost.
            async with _opened(ENGINES[name]) as way:
                await _cost(way, min(streams), WARM_TOKENS)
                for each in streams:
                    found[each][name].append(await _cost(way, each, tokens))
    return {
        "step_seconds": STEP_SECONDS,
        "tokens": tokens,
        "rounds": rounds,
        "streams": {str(each): {name: _medians(costs) for name, costs in by.items()} for each, by in found.items()},
    }


def added(costs: Mapping[str, Mapping[str, float]], name: str, figure: str) -> float:
    """Of one number of streams: what a way costs beyond a local engine."""
    return costs[name][figure] - costs[LOCAL][figure]


@asynccontextmanager
async def _opened(engines: int) -> AsyncGenerator[Way]:
    """``engines``: of a fleet; 0 for a local one."""
    if engines:
        with TemporaryDirectory() as folder:
            async with _fleet(Path(folder), engines) as way:
                yield way
        return
    client = ProcessClient(str(STEP_SECONDS), EngineSettings(), Limits(max_draft_tokens=0), worker=WORKER)
    try:
        await client.open()
        yield Way(client, [int(client.info.name)])
    finally:
        await client.close()


@asynccontextmanager
async def _fleet(folder: Path, engines: int) -> AsyncGenerator[Way]:
    start = Start(str(STEP_SECONDS), limits=Limits(max_draft_tokens=0)).encode()
    command = [sys.executable, "-m", WORKER, "tcp:127.0.0.1:0", start]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(engines)]
    try:
        addresses = list[str]()
        for process in processes:
            assert process.stdout is not None
            addresses.append(process.stdout.readline().strip())
        async with fleet_client(folder, addresses, KEY) as client:
            yield Way(client, [process.pid for process in processes])
    finally:
        for process in processes:
            process.kill()
            process.communicate()


async def _cost(way: Way, streams: int, tokens: int) -> TokenCost:
    """While all streams run: from when a tenth of all tokens have come until nine tenths have.

    What a request costs at its beginning and at its end is not in it.
    """
    all_streams = streams * len(way.engines)
    begin, end = (int(share * all_streams * tokens) for share in (0.1, 0.9))
    came, transits, marks = 0, array("q"), list[tuple[float, float]]()

    async def read() -> None:
        nonlocal came
        request = GenerateRequest(f"t{next(_ids)}", PROMPT, tokens)
        async with aclosing(way.client.generate(request)) as deltas:
            async for delta in deltas:
                for token in delta.tokens:
                    transits.append(since(token))
                    came += 1
                    if came in (begin, end):
                        marks.append((process_time(), sum(map(processor_seconds, way.engines))))

    await asyncio.gather(*(read() for _ in range(all_streams)))
    (gateway, engine), (gateway_end, engine_end) = marks
    middle = sorted(transits[begin:end])
    scale = 1e6 / (end - begin)
    return TokenCost(
        (gateway_end - gateway) * scale,
        (engine_end - engine) * scale,
        percentile(middle, 0.5),
        percentile(middle, 0.99),
    )


def _medians(costs: Sequence[TokenCost]) -> dict[str, float]:
    """And the least and most of the sum: how much rounds differ."""
    both = [cost.both for cost in costs]
    figures = {name: median(getattr(cost, name) for cost in costs) for name in TokenCost._fields}
    figures = figures | {"both": median(both), "both_least": min(both), "both_most": max(both)}
    return {name: round(value, 2) for name, value in figures.items()}
