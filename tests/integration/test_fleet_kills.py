"""Engines die again and again among requests of every kind: none fails, and no answer differs.

``FLEET_KILLS``: how often; 100 by default.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from runtime.gateway.fleet.client import FleetClient
from runtime.wire.messages import Delta, GenerateRequest, SamplingSettings
from tests.answering import Whole, whole
from tests.faulty_engine import STOP, Faulty
from tests.fleet import connected
from tests.forked_engines import ForkedEngine
from tests.waiting import until

KILLS = int(os.environ.get("FLEET_KILLS", "100"))
NEW = 100
# What takes a tokenizer is in test_serve_fleet.py.
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"sampling": SamplingSettings(temperature=1.0, seed=1), "logprobs": 2},
    {"sampling": SamplingSettings(frequency_penalty=1.0, repetition_penalty=1.2), "logprobs": 0},
    {"sampling": SamplingSettings(temperature=1.0, seed=2, presence_penalty=0.5, frequency_penalty=0.3)},
    {"stop_tokens": frozenset({STOP}), "min_new_tokens": 50},
    {"prompt_logprobs": 1, "logprobs": 5, "sampling": SamplingSettings(temperature=0.7, top_p=0.9, seed=3)},
)
STREAMS = 2 * len(KINDS)


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[list[ForkedEngine]]:
    found = [ForkedEngine(tmp_path, f"{number}", Faulty(step_seconds=0.004)) for number in range(3)]
    yield found
    for engine in found:
        engine.close()


@dataclass
class Drill:
    """``struck``: by request, how many engines have died since its last token. ``begun``: those that have one."""

    client: FleetClient
    engines: list[ForkedEngine]
    struck: dict[str, int] = field(default_factory=dict[str, int])
    begun: set[str] = field(default_factory=set[str])

    async def answer(self, number: int, id: str) -> Whole:
        asked = GenerateRequest(id, [1 + number % 9, 2, 3], NEW, **KINDS[number % len(KINDS)])
        self.struck[id], deltas = 0, list[Delta]()
        async for delta in self.client.generate(asked):
            self.struck[id] = 0
            self.begun.add(id)
            deltas.append(delta)
        del self.struck[id]
        self.begun.discard(id)
        return whole(deltas)

    def may_kill(self, engine: ForkedEngine) -> bool:
        """Requests run there, and others can go on.

        One that has lost three engines before its first token, or nine in turn after it, is given up on purpose. So
        none sees more than one death and four; it may also be sent to an engine that has just died.
        """
        own = {status.address: status.own for status in self.client.statuses()}
        return (
            bool(own[engine.address])
            and ready(self.client) > 1
            and all(deaths < (4 if id in self.begun else 1) for id, deaths in self.struck.items())
        )

    async def kill(self, engine: ForkedEngine) -> None:
        for id in self.struck:
            self.struck[id] += 1
        await asyncio.to_thread(engine.kill)


def ready(client: FleetClient) -> int:
    return sum(status.state == "ready" for status in client.statuses())


async def endure(drill: Drill) -> int:
    """How many answers there were."""
    wanted = await asyncio.gather(*[drill.answer(number, f"first-{number}") for number in range(STREAMS)])
    done, answered = False, 0

    async def ask(number: int) -> None:
        nonlocal answered
        while not done:
            answered += 1
            assert await drill.answer(number, f"{answered}") == wanted[number]

    asking = asyncio.gather(*[ask(number) for number in range(STREAMS)])
    for number in range(KILLS):
        engine = drill.engines[number % len(drill.engines)]
        while not (asking.done() or drill.may_kill(engine)):
            await asyncio.sleep(0.005)
        if asking.done():  # an answer differs, or a request has failed
            await asking
        await drill.kill(engine)
    done = True
    await asking
    return answered


def test_kills_in_flight(engines: list[ForkedEngine], tmp_path: Path) -> None:
    async def test() -> None:
        async with connected(tmp_path, engines) as client:
            await until(lambda: ready(client) == len(engines))
            answers = await endure(Drill(client, engines))
            print(f"{KILLS} kills, {answers} answers, {dict(client.counts)}")
            assert client.counts["resumptions"] >= KILLS and not client.counts["lost"]

    asyncio.run(asyncio.wait_for(test(), 60 + 3 * KILLS))
