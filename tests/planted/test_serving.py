"""Cases that have taken other servers down or made them hang, tried on ours: scheduler, engine process and HTTP.

Each is answered or refused, and afterwards the blocks balance and a good request gets its answer.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from runtime.engine.core import EngineCore
from runtime.gateway.engines.client import EngineDownError
from runtime.gateway.engines.local import ProcessClient
from runtime.gateway.operations.health import Health
from runtime.wire.limits import Limits
from runtime.wire.messages import Delta, GenerateRequest
from tapeout.errors import RequestError
from tests.fake_engine import HistoryEngine
from tests.faulty_engine import CRASH, HANG, WORKER, Faulty
from tests.http_server import MODEL, VOCAB, Served, serving
from tests.serving_client import SlowEngine

MAX_TOKENS, BLOCK_TOKENS = 64, 4


def core_of(slots: int = 1, **limits: Any) -> EngineCore:
    """A pool of ``slots`` sequences of full length, and steps of up to 8 sequences."""
    engine = HistoryEngine(12, slots=slots, max_tokens=MAX_TOKENS, block_tokens=BLOCK_TOKENS)
    engine.capabilities = replace(engine.capabilities, max_batch=8)
    return EngineCore(engine, Limits(**limits))


def finished(
    core: EngineCore, *requests: GenerateRequest, cancel: Callable[[int], str] = lambda now: ""
) -> dict[str, list[Delta]]:
    """All requests, added at once, to their ends. ``cancel``: whom to cancel before a step."""
    for request in requests:
        core.add(request, 0)
    deltas: dict[str, list[Delta]] = {request.id: [] for request in requests}
    for now in range(1, 2000):
        if not core.busy:
            break
        core.cancel(cancel(now))
        for delta in core.step(now).deltas:
            deltas[delta.id].append(delta)
    assert not core.busy, "requests wait forever"
    core.scheduler.check()
    assert core.scheduler.cache.held == 0, "blocks leaked"
    assert [sum(d.finish_reason is not None for d in found) for found in deltas.values()] == [1] * len(deltas)
    return deltas


def said(deltas: Sequence[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.tokens]


def alone(request: GenerateRequest) -> list[int]:
    return said(finished(core_of(8), request)[request.id])


@contextmanager
def slow_server(**core: Any) -> Generator[Served]:
    engine = SlowEngine(VOCAB, slots=2, max_tokens=256, block_tokens=BLOCK_TOKENS)
    engine.before = lambda: time.sleep(0.01)
    with serving(engine, core=Limits(**core)) as served:
        yield served
        assert served.settled()
        assert served.post("/v1/completions", {"prompt": "good", "max_tokens": 2}).status_code == 200
        assert served.settled()


def test_requests_that_wait_for_a_prefix_fill_all_places() -> None:
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    requests = [GenerateRequest(f"{i}", prompt, 4) for i in range(12)]
    deltas = finished(core_of(4, max_running=2), *requests)
    assert {tuple(said(found)) for found in deltas.values()} == {tuple(alone(requests[0]))}


def test_whoever_computes_a_shared_prefix_is_cancelled() -> None:
    prompt = [1 + i % 9 for i in range(40)]
    requests = [GenerateRequest(f"{i}", prompt, 4) for i in range(4)]
    deltas = finished(core_of(4, step_tokens=8), *requests, cancel=lambda now: "0" if now == 2 else "")
    assert deltas["0"][-1].finish_reason == "cancelled"
    assert said(deltas["3"]) == alone(requests[3])


def test_a_prompt_that_needs_every_block() -> None:
    whole = GenerateRequest("whole", [1 + i % 9 for i in range(MAX_TOKENS)], 1)
    deltas = finished(core_of(), GenerateRequest("before", [1, 2], 5), whole, GenerateRequest("after", [3, 4], 5))
    assert said(deltas["whole"]) == alone(whole)
    core = core_of()
    core.add(GenerateRequest("more", [1] * (MAX_TOKENS + 1), 1), 0)
    (refusal,) = core.step(1).refusals
    assert isinstance(refusal.error, RequestError) and not core.busy


def test_answers_outgrow_the_pool() -> None:
    """Room for one sequence of full length, and six that each come to need most of it."""
    requests = [GenerateRequest(f"{i}", [1 + i, 2, 3], 50) for i in range(6)]
    core = core_of()
    # Answers were short so far, so more is admitted than fits in the end.
    finished(core, *[GenerateRequest(f"short {i}", [1, i + 1], 1) for i in range(9)])
    deltas = finished(core, *requests)
    assert core.scheduler.preemptions
    assert {id: said(found) for id, found in deltas.items()} == {request.id: alone(request) for request in requests}


@pytest.mark.parametrize("step", range(1, 9))
def test_requests_are_cancelled_at_any_step(step: int) -> None:
    """While they wait, in the midst of a prompt, while they decode, and at the last step."""
    requests = [GenerateRequest(f"{i}", [1 + i % 9] * (1 + 5 * i), 3) for i in range(5)]
    for victim in range(5):
        deltas = finished(
            core_of(2, max_running=2, step_tokens=16),
            *requests,
            cancel=lambda now, victim=victim: f"{victim}" if now == step else "",
        )
        others = [request for request in requests if request.id != f"{victim}"]
        assert [said(deltas[request.id]) for request in others] == [alone(request) for request in others]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_leaves_while_its_request_waits(stream: bool) -> None:
    with slow_server(max_running=1) as served:
        before = served.cancelled()
        body = json.dumps({"prompt": "queued", "max_tokens": 100, "ignore_eos": True, "stream": stream}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        active: list[Any] = []

        def post() -> None:
            active.append(served.post("/v1/completions", {"prompt": "active", "max_tokens": 60, "ignore_eos": True}))

        neighbour = threading.Thread(target=post)
        neighbour.start()
        _until(lambda: served.client.stats.running == 1)
        with socket.create_connection(("127.0.0.1", int(served.url.rpartition(":")[2]))) as raw:
            raw.sendall(head + body)
            _until(lambda: served.client.stats.waiting == 1)
        neighbour.join()
        assert served.settled()
        assert served.cancelled() == before + 1
        assert active[0].json()["usage"]["completion_tokens"] == 60, "the active request was cancelled, too"


def test_many_clients_leave_at_once() -> None:
    with slow_server() as served:
        body = json.dumps({"prompt": "gone", "max_tokens": 200, "ignore_eos": True, "stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        address = ("127.0.0.1", int(served.url.rpartition(":")[2]))
        for _ in range(3):
            sockets = [socket.create_connection(address) for _ in range(20)]
            for each in sockets:
                each.sendall(head + body)
            time.sleep(0.05)
            for each in sockets:
                each.close()


def test_the_queue_overflows() -> None:
    """Each request beyond the queue is told so at once, and none hangs."""
    with slow_server(max_running=1, max_waiting=2) as served:
        statuses: list[int] = []

        def post() -> None:
            statuses.append(served.post("/v1/completions", {"prompt": "x", "max_tokens": 9}).status_code)

        threads = [threading.Thread(target=post) for _ in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert set(statuses) == {200, 429} and len(statuses) == 20


BAD: dict[str, dict[str, Any]] = {
    "logit_bias beyond the vocabulary": {"prompt": "a", "logit_bias": {str(VOCAB): 1}},
    "stop token beyond the vocabulary": {"prompt": "a", "stop_token_ids": [1 << 40]},
    "negative stop token": {"prompt": "a", "stop_token_ids": [-1]},
    "no prompt token": {"prompt": []},
    "negative prompt token": {"prompt": [-1]},
    "prompt token beyond the vocabulary": {"prompt": [VOCAB]},
    "prompt_logprobs of -1": {"prompt": "a", "prompt_logprobs": -1},
    "schema that is none": {
        "prompt": "a",
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}},
    },
    "expression that is none": {"prompt": "a", "structured_outputs": {"regex": "("}},
    "temperature of nan": {"prompt": "a", "temperature": float("nan")},
    "response that cannot fit": {"prompt": "a", "max_tokens": 1 << 40},
}


@pytest.mark.parametrize("body", BAD.values(), ids=BAD.keys())
def test_one_bad_request_among_good_ones(body: dict[str, Any]) -> None:
    with slow_server() as served:
        good: list[Any] = []

        def post() -> None:
            good.append(served.post("/v1/completions", {"prompt": "good", "max_tokens": 20, "ignore_eos": True}))

        thread = threading.Thread(target=post)
        thread.start()
        content = json.dumps(body | {"model": MODEL})
        refused = served.http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
        assert refused.status_code == 400 and refused.json()["error"]["message"]
        thread.join()
        assert good[0].json()["usage"]["completion_tokens"] == 20


def test_a_prompt_is_scored_and_nothing_generated() -> None:
    with slow_server() as served:
        answer = served.post("/v1/completions", {"prompt": "ab", "max_tokens": 0, "echo": True, "logprobs": 1})
        assert answer.status_code == 200 and answer.json()["choices"][0]["text"] == "ab"


def test_a_prefix_of_another_salt_is_not_found() -> None:
    """Neither the text of another tenant nor, by its time, that somebody else has sent it."""
    prompt = [1 + i % 9 for i in range(41)]
    core = core_of(4)
    first = finished(core, GenerateRequest("first", prompt, 1, cache_salt=b"a"))["first"]
    other = finished(core, GenerateRequest("other", prompt, 1, cache_salt=b"b"))["other"]
    same = finished(core, GenerateRequest("same", prompt, 1, cache_salt=b"a"))["same"]
    assert [found[0].cached_tokens for found in (first, other, same)] == [0, 0, 40]


def _process(test: Callable[[ProcessClient], Awaitable[None]], **options: Any) -> None:
    async def run() -> None:
        client = ProcessClient(str(Faulty()), worker=WORKER, **options)
        try:
            await client.open()
            await asyncio.wait_for(test(client), 60)
        finally:
            await client.close()

    asyncio.run(run())


async def _answer(client: ProcessClient, id: str, prompt: Sequence[int]) -> int:
    return len(said([delta async for delta in client.generate(GenerateRequest(id, prompt, 5))]))


def test_an_engine_that_crashed_is_not_ready() -> None:
    async def test(client: ProcessClient) -> None:
        health = Health(client, lambda: False)
        assert health.not_ready() is None
        with pytest.raises(EngineDownError):
            await _answer(client, "a", [1, CRASH])
        assert health.not_ready()
        while health.not_ready():
            await asyncio.sleep(0.05)
        assert await _answer(client, "b", [1, 2]) == 5

    _process(test)


def test_an_engine_that_is_stuck_is_unhealthy() -> None:
    async def test(client: ProcessClient) -> None:
        health = Health(client, lambda: False)
        stuck = asyncio.ensure_future(_answer(client, "a", [1, HANG]))
        while not health.unhealthy():
            await asyncio.sleep(0.05)
        with pytest.raises(EngineDownError):
            await stuck
        while health.unhealthy():
            await asyncio.sleep(0.05)
        assert await _answer(client, "b", [1, 2]) == 5

    _process(test, quiet_seconds=0.7, stuck_seconds=2.0)


@pytest.mark.parametrize("place", [0, 5, 10, 23])
def test_bytes_between_server_and_engine_are_damaged(place: int) -> None:
    """In its length, checksum and MAC, and in its content, where a changed token would be another answer."""

    async def test(client: ProcessClient) -> None:
        connection = client._current
        taken, connection.data_received = connection.data_received, lambda data: taken(damaged(data))

        def damaged(data: bytes) -> bytes:
            at = place if place < 23 else len(data) - 1
            return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]

        with pytest.raises(EngineDownError, match="cannot be understood"):
            await _answer(client, "a", [1, 2])
        while not client.ready:
            await asyncio.sleep(0.01)
        assert await _answer(client, "b", [1, 2]) == 5

    _process(test)


def test_a_drain_meets_new_requests_and_a_long_one() -> None:
    async def test(client: ProcessClient) -> None:
        request = GenerateRequest("long", [1, 2], 250)
        long = asyncio.ensure_future(_reasons(client, request))
        while not client.stats.running:
            await asyncio.sleep(0.01)
        drained = asyncio.ensure_future(client.drain(0.1))
        await asyncio.sleep(0)
        with pytest.raises(EngineDownError):
            await _answer(client, "late", [1, 2])
        await drained
        assert await long == ["cancelled"]

    _process(test)


async def _reasons(client: ProcessClient, request: GenerateRequest) -> list[str]:
    return [delta.finish_reason async for delta in client.generate(request) if delta.finish_reason]


def _until(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.005)
