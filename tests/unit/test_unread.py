"""What clients have not read: counted exactly, bounded for each and for all, and ended where it is too much."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import AsyncGenerator
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import generate_latest

from runtime.gateway.engines.unread import DeltaStream, SlowReaderError, Unread, UnreadLimits, held_bytes
from runtime.gateway.http.generation import ResponseChunk, _merged
from runtime.gateway.operations.metrics import Metrics, unfinished
from runtime.gateway.protocol.errors import from_exception
from runtime.wire.messages import Delta, TokenLogprobs
from tests.serving_client import LocalClient, run_call

ONE = held_bytes(Delta("r", (1,)))


def waiting(stream: DeltaStream) -> list[Delta]:
    """What a client that comes back reads; the stream must have something."""
    return asyncio.run(asyncio.wait_for(stream.next(), 5))


def streams(count: int, limits: UnreadLimits) -> tuple[Unread, list[DeltaStream], list[str]]:
    """``cancelled``: names of those whose engines were told."""
    unread, cancelled = Unread(limits), list[str]()
    return unread, [DeltaStream(str(n), unread, lambda one: cancelled.append(one.id)) for n in range(count)], cancelled


ACTIONS = st.lists(st.tuples(st.sampled_from(("push", "large", "take", "leave")), st.integers(0, 3)), max_size=60)


@given(ACTIONS)
def test_what_is_counted_is_what_is_held(actions: list[tuple[str, int]]) -> None:
    """In any course of things. Planted: what was dropped counts on; what a client has taken and not read counts no
    more; a request that was ended is ended again.
    """
    unread, found, cancelled = streams(4, UnreadLimits(stream_bytes=5 * ONE, bytes=12 * ONE))
    queued, taken, ended = dict.fromkeys(found, 0), dict.fromkeys(found, 0), set[DeltaStream]()
    left = set[DeltaStream]()
    for kind, number in actions:
        stream = found[number]
        if stream in left:
            continue
        if kind in ("push", "large"):
            tokens = (1,) if kind == "push" else (1,) * 10
            stream.push(Delta(stream.id, tokens))
            if stream not in ended:
                queued[stream] += held_bytes(Delta(stream.id, tokens))
        elif kind == "take" and (queued[stream] or stream in ended):
            taken[stream] = 0
            try:
                waiting(stream)
            except SlowReaderError:
                assert stream in ended and not queued[stream]
            taken[stream], queued[stream] = queued[stream], 0
        elif kind == "leave":
            stream.leave()
            queued[stream] = taken[stream] = 0
            left.add(stream)
            ended.add(stream)
        for one in found:
            if one not in ended and one.id in cancelled:
                queued[one] = 0
                ended.add(one)
        assert unread.bytes == sum(queued.values()) + sum(taken.values())
        assert unread.bytes == sum(one.unread_bytes for one in found)
        assert unread.bytes <= 12 * ONE or all(one in ended for one in found if one.unread_bytes)
    assert unread.ended <= len(ended)


def test_a_client_that_reads_nothing_is_ended_and_told() -> None:
    unread, (stream,), cancelled = streams(1, UnreadLimits(stream_bytes=10 * ONE))
    for number in range(100):
        stream.push(Delta("0", (number,)))
    assert cancelled == ["0"] and unread.ended == 1 and unread.bytes == 0
    with pytest.raises(SlowReaderError, match="of the response unread") as caught:
        waiting(stream)
    refusal = from_exception(caught.value)
    assert (refusal.status, refusal.code) == (400, "slow_reader"), "neither a fault of the service nor of the engine"


def test_of_many_the_one_that_has_left_most_is_ended() -> None:
    """Planted: the one that happens to get the next token."""
    unread, found, cancelled = streams(5, UnreadLimits(stream_bytes=100 * ONE, bytes=20 * ONE))
    for stream in found:
        for number in range(9 if stream.id == "2" else 2):
            stream.push(Delta(stream.id, (number,)))
    for _ in range(4):
        found[4].push(Delta("4", (1,)))
    assert cancelled == ["2"]
    assert [len(waiting(stream)) for stream in found if stream.id != "2"] == [2, 2, 2, 6]
    assert unread.ended == 1


def test_one_large_delta_is_no_slow_client() -> None:
    """The log-probabilities of a long prompt come at once."""
    unread, (stream,), cancelled = streams(1, UnreadLimits(stream_bytes=10 * ONE))
    listed = tuple(TokenLogprobs(1, -1.0, ((1, -1.0),)) for _ in range(100))
    stream.push(Delta("0", (1,), prompt_logprobs=listed))
    assert len(waiting(stream)) == 1 and not cancelled and unread.bytes > 10 * ONE


def test_a_client_that_waits_is_not_counted() -> None:
    async def test() -> None:
        unread, (stream,), _ = streams(1, UnreadLimits(stream_bytes=1))
        for number in range(10):
            reading = asyncio.ensure_future(stream.next())
            await asyncio.sleep(0)
            stream.push(Delta("0", (number,)))
            assert [delta.tokens for delta in await reading] == [(number,)] and not unread.bytes

    asyncio.run(test())


@pytest.mark.parametrize("likeliest", [None, 0, 5, 20])
def test_bytes_are_about_those_that_deltas_take(likeliest: int | None) -> None:
    def logprobs(number: int) -> tuple[TokenLogprobs, ...] | None:
        if likeliest is None:
            return None
        top = tuple((1000 + number + rank, -1.5 * rank) for rank in range(likeliest))
        return (TokenLogprobs(1000 + number, -0.5 * number, top),)

    sent = [Delta(f"cmpl-{'a' * 32}", (1000 + number,), logprobs(number)) for number in range(500)]
    data, decoder = msgspec.msgpack.encode(sent), msgspec.msgpack.Decoder(list[Delta])
    tracemalloc.start()
    held = decoder.decode(data)
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert 0.8 * taken < sum(map(held_bytes, held)) < 1.5 * taken


def test_choices_of_a_slow_client_wait_in_their_streams() -> None:
    """Where they are counted. Planted: all of them are read ahead into one queue without a bound."""

    async def test() -> None:
        pulled = 0

        async def choice() -> AsyncGenerator[ResponseChunk]:
            nonlocal pulled
            while True:
                pulled += 1
                yield cast(Any, pulled)
                await asyncio.sleep(0)

        chunks = _merged([choice() for _ in range(3)])
        await anext(chunks)
        for _ in range(200):
            await asyncio.sleep(0)
        assert pulled <= 3 * 3
        await chunks.aclose()

    asyncio.run(test())


def test_metrics_count_them_and_no_error_of_the_server() -> None:
    async def test() -> None:
        client = LocalClient()
        metrics = Metrics(client, "m")
        client.unread.ended, client.unread.bytes = 3, 1000
        text = generate_latest(metrics.registry).decode()
        assert "tapeout:slow_readers_total 3.0" in text and "tapeout:unread_bytes 1000.0" in text
        call = await run_call(client, [metrics])
        call.error = from_exception(SlowReaderError("8.4 MB"))
        assert unfinished(call) == "abort"

    asyncio.run(test())
