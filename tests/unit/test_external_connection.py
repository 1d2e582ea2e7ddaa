"""A request on a server of another kind, whose answers are made up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from runtime.gateway.fleet.external import ExternalConnection, ExternalServer
from runtime.wire.messages import EngineInfo, FinishReason, GenerateRequest

INFO = EngineInfo("d" * 64, "name", 64, 12, 4, 8, 1, 1, frozenset())


@pytest.mark.parametrize("age", [0.0, 0.3])
def test_a_timeout_counts_from_the_arrival_of_a_request(monkeypatch: pytest.MonkeyPatch, age: float) -> None:
    """Also once it has its first token. Planted: from that on."""

    async def streamed(
        self: ExternalConnection, request: GenerateRequest
    ) -> AsyncIterator[tuple[tuple[int, ...], FinishReason | None]]:
        await asyncio.sleep(0.5)
        yield (1,), None
        await asyncio.sleep(0.4)
        yield (2,), "stop"

    monkeypatch.setattr(ExternalConnection, "_streamed", streamed)

    async def run() -> None:
        connection = ExternalConnection(ExternalServer("http://127.0.0.1:9/v1", "m", Path()))
        connection._info = INFO
        stream = connection.add(GenerateRequest("a", [1], 9, timeout=0.6 + age), age)
        found = await stream.next()
        while not found[-1].finish_reason:
            found += await stream.next()
        assert found[-1].finish_reason == "timeout" and not found[-1].tokens
        await connection.close()

    asyncio.run(run())
