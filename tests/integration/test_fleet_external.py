"""Servers of another kind behind the gateway: our own server over HTTP plays them, since it takes token ids, too."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Coroutine, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from runtime.gateway.engines.client import EngineDownError
from runtime.gateway.fleet.client import FleetClient
from runtime.gateway.fleet.discovery import FromFile
from runtime.gateway.fleet.replica import Patience
from runtime.gateway.fleet.scaling import FleetScaler, ScalingSettings
from runtime.wire.messages import Constraint, Delta, GenerateRequest, SamplingSettings
from tapeout.errors import RequestError
from tests.answering import Whole, whole
from tests.http_server import END_TOKEN, MODEL, VOCAB, Served, byte_tokenizer, serving
from tests.serving_client import SlowEngine
from tests.waiting import until

NEW = 60
PATIENCE = Patience(suspect=2.0, stuck=5.0, open=20.0, wait=3.0)
PENALTY = SamplingSettings(frequency_penalty=0.5)
DRAWN = SamplingSettings(temperature=1.0, seed=5)


@pytest.fixture
def servers() -> Iterator[list[Served]]:
    """Two of one model."""
    with ExitStack() as stack:
        yield [stack.enter_context(serving(SlowEngine(VOCAB, slots=8, max_tokens=256))) for _ in range(2)]


def text_side(folder: Path, ends: Any = END_TOKEN) -> Path:
    folder.mkdir(exist_ok=True)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return folder


def written(folder: Path, servers: list[Served], model: str = MODEL, most: int = 64) -> FromFile:
    text_side(folder / "text")
    entries = [{"url": f"{server.url}/v1", "model": model, "text": "text", "most_running": most} for server in servers]
    (folder / "fleet.yaml").write_text(json.dumps({"external": entries}))
    return FromFile(folder / "fleet.yaml")


@asynccontextmanager
async def fronting(folder: Path, servers: list[Served]) -> AsyncGenerator[FleetClient]:
    client = FleetClient(written(folder, servers), folder / "cache", patience=PATIENCE)
    try:
        await asyncio.wait_for(client.open(), 20)
        await until(lambda: states(client) == ["ready"] * len(servers))
        yield client
    finally:
        await client.close()


def states(client: FleetClient) -> list[str]:
    return [status.state.value for status in client.statuses()]


def run(test: Coroutine[None, None, None]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(test, 60)

    asyncio.run(bounded())


def request(name: str, **fields: Any) -> GenerateRequest:
    return GenerateRequest(name, [7, 8, 9], NEW, **fields)


async def answer(client: FleetClient, asked: GenerateRequest) -> Whole:
    return whole([delta async for delta in client.generate(asked)])


async def broken_off(client: FleetClient, servers: list[Served], asked: GenerateRequest) -> Whole:
    """The answer to a request whose server fails after some tokens."""
    found: list[Delta] = []
    async for delta in client.generate(asked):
        found.append(delta)
        if sum(len(one.tokens) for one in found) >= 5 and not any(server.client.down for server in servers):
            place = next(status.address for status in client.statuses() if status.own)
            next(server for server in servers if server.url in place).client.down = True
    return whole(found)


def slow(servers: list[Served], seconds: float = 0.01) -> None:
    for server in servers:
        server.engine.before = lambda: time.sleep(seconds)


def test_token_ids_go_there_and_come_back(servers: list[Served], tmp_path: Path) -> None:
    """What the engine itself says, the token that stops an answer included. Planted: ids read of the text."""

    async def test() -> None:
        async with fronting(tmp_path, servers[:1]) as client:
            engine = servers[0].engine
            assert client.info.max_tokens == 256 and client.info.vocab_size == VOCAB
            tokens = [7, 8, 9]
            for _ in range(NEW):
                tokens.append(int(engine.logits_after(tokens).argmax()))
            assert (await answer(client, request("a"))).tokens == tuple(tokens[3:])
            stop = tokens[3 + 20]
            first = tokens[3:].index(stop)
            stopped = GenerateRequest("b", [7, 8, 9], NEW, stop_tokens=frozenset({stop}))
            found = await answer(client, stopped)
            assert found.reason == "stop" and found.tokens == tuple(tokens[3 : 3 + first + 1])
            drawn = [await answer(client, request(f"d{n}", sampling=DRAWN)) for n in range(2)]
            assert drawn[0] == drawn[1] and drawn[0].tokens != tuple(tokens[3:]), "seeds are those of the request"

    run(test())


def test_a_greedy_answer_goes_on_at_another_server(servers: list[Served], tmp_path: Path) -> None:
    async def test() -> None:
        async with fronting(tmp_path, servers) as client:
            wanted = await answer(client, request("e"))
            slow(servers)
            assert await broken_off(client, servers, request("r")) == wanted
            assert client.counts["resumptions"] == 1 and not client.counts["lost"]

    run(test())


def test_a_server_that_is_removed_ends_what_no_other_can_go_on_with(servers: list[Served], tmp_path: Path) -> None:
    """What is drawn stays until its end. Planted: it moves, which only greedy answers can."""

    async def test() -> None:
        async with fronting(tmp_path, servers) as client:
            drawn = request("d", sampling=DRAWN)
            wanted = await answer(client, drawn), await answer(client, request("g"))
            slow(servers, 0.05)  # so that the list is read again before they end
            answering = [asyncio.create_task(answer(client, one)) for one in (drawn, request("g"))]
            await until(lambda: all(flight.answered for flight in client._flights) and len(client._flights) == 2)
            left = next(flight.replica for flight in client._flights if flight.request.id == "d")
            assert left is not None
            written(tmp_path, [server for server in servers if server.url not in left.address])
            assert tuple(await asyncio.gather(*answering)) == wanted
            assert not client.counts["lost"]

    run(test())


def test_external_servers_are_no_engines_that_scaling_starts(servers: list[Served], tmp_path: Path) -> None:
    async def test() -> None:
        settings = ScalingSettings(least=1, most=4, first_token_seconds=0.001, hold_seconds=0)
        client = FleetClient(written(tmp_path, servers, most=1), tmp_path, scalers={"mixed": FleetScaler(settings)})
        try:
            await asyncio.wait_for(client.open(), 20)
            slow(servers)
            answering = [asyncio.create_task(answer(client, request(str(n)))) for n in range(4)]
            await until(lambda: client.stats.running == 4)
            assert client.replicas_wanted == {"mixed": 1}
            await asyncio.gather(*answering)
        finally:
            await client.close()

    run(test())


@pytest.mark.parametrize("sampling", [DRAWN, PENALTY])
def test_one_that_is_drawn_or_penalized_ends_with_an_error(
    servers: list[Served], tmp_path: Path, sampling: SamplingSettings
) -> None:
    """Rather than go on otherwise. Planted: it goes on, as on engines of ours."""

    async def test() -> None:
        async with fronting(tmp_path, servers) as client:
            slow(servers)
            with pytest.raises(EngineDownError, match="in the midst of an answer that is drawn or has penalties"):
                await broken_off(client, servers, request("r", sampling=sampling))
            assert client.counts["lost"] == 1

    run(test())


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"constraint": Constraint("json_object")}, "structured output and required tools"),
        ({"logprobs": 1}, "log-probabilities"),
        ({"prompt_logprobs": 1}, "log-probabilities"),
    ],
)
def test_what_it_cannot_do_is_refused_before_it_is_sent(
    servers: list[Served], tmp_path: Path, fields: dict[str, Any], said: str
) -> None:
    async def test() -> None:
        async with fronting(tmp_path, servers) as client:
            with pytest.raises(RequestError, match=f"{said} from a server that is not tapeout's"):
                await answer(client, request("a", **fields))
            assert not any(server.client.sessions for server in servers)

    run(test())


def test_a_request_that_it_refuses_is_refused_with_its_words(servers: list[Served], tmp_path: Path) -> None:
    async def test() -> None:
        async with fronting(tmp_path, servers) as client:
            with pytest.raises(RequestError, match="says 400"):
                await answer(client, GenerateRequest("a", [VOCAB + 5], 5))
            assert states(client) == ["ready"] * 2 and not client.counts["retries"]

    run(test())


def test_a_reader_that_leaves_and_a_timeout_end_the_request_there(servers: list[Served], tmp_path: Path) -> None:
    async def test() -> None:
        async with fronting(tmp_path, servers[:1]) as client:
            slow(servers)
            stream = client.generate(request("a"))
            await anext(stream)
            await stream.aclose()
            await until(lambda: servers[0].cancelled() == 1)
            assert (await answer(client, request("b", timeout=0.2))).reason == "timeout"
            await until(lambda: servers[0].cancelled() == 2)

    run(test())


def test_what_is_no_such_server_is_said(
    servers: list[Served], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        client = FleetClient(written(tmp_path, servers[:1], "other"), tmp_path / "cache", patience=PATIENCE)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.open(), 1)
        await client.close()

    run(test())
    assert any("has no model 'other'" in record.message for record in caplog.records)
