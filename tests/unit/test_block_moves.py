"""Requests that wait for blocks of another engine: whatever comes of a fetch, each is answered and no memory is lost.

The thread of the link is the test, so any course of events can be drawn.
"""

from __future__ import annotations

import gc
import os
import socket
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from queue import SimpleQueue
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.engine.block_store import BlockStore
from runtime.engine.core import EngineCore
from runtime.engine.moving import moves as moves_module
from runtime.engine.moving.costs import MOST_LINKS, PAUSE_SECONDS, LinkCosts
from runtime.engine.moving.fetching import Fetch, KeysFetch
from runtime.engine.moving.moves import MOST_SECONDS, BlockMoves
from runtime.engine.moving.sending import BlockSender
from runtime.wire.block_keys import block_keys
from runtime.wire.failures import Failure
from runtime.wire.limits import Limits
from runtime.wire.messages import (
    WHOLE_KEY_BYTES,
    Add,
    Cancel,
    Delta,
    EngineInfo,
    FetchAhead,
    FetchState,
    GenerateRequest,
    WarmUp,
)
from tapeout.errors import RequestError
from tests.chain_engine import ChainEngine
from tests.fake_engine import HistoryEngine
from tests.faulty_engine import alone

BLOCK, VOCAB, NEW = 4, 12, 6


class Link:
    """Stands for :class:`PeerLink`: says what the test wants."""

    def __init__(self, *_: Any) -> None:
        self.fetches: list[Fetch] = []
        self.asked: list[KeysFetch] = []
        self.closed = False

    def start(self, fetch: Fetch | KeysFetch) -> None:
        if isinstance(fetch, KeysFetch):
            self.asked.append(fetch)
        else:
            self.fetches.append(fetch)

    def close(self) -> None:
        self.closed = True

    @property
    def current(self) -> Fetch | None:
        return next((fetch for fetch in self.fetches if not fetch.ended), None)


class Course:
    """An engine with few blocks, requests to it, and another engine that has all blocks."""

    def __init__(self, blocks: int = 24, new: int = NEW) -> None:
        self.engine = HistoryEngine(VOCAB, slots=blocks * BLOCK // 64 or 1, max_tokens=64, block_tokens=BLOCK)
        self.core = EngineCore(self.engine, Limits(max_running=4, max_draft_tokens=0))
        info = EngineInfo("d", "n", 64, VOCAB, BLOCK, blocks, BLOCK, 1, frozenset(), moves_blocks=True)
        self.moves, self.now, self.new = BlockMoves(self.core, info, b""), 0.0, new
        self.deltas: dict[str, list[Delta]] = {}
        self.requests: dict[str, GenerateRequest] = {}
        self.content: dict[bytes, bytes] = {}

    @property
    def link(self) -> Link | None:
        found: Any = self.moves._links.get("peer")
        return found

    def add(self, prompt: Sequence[int], source: str = "peer") -> str:
        id = f"{len(self.requests)}"
        request = GenerateRequest(id, prompt, self.new)
        for number, key in enumerate(block_keys(prompt, BLOCK)):
            self.content[key] = bytes(prompt[number * BLOCK : (number + 1) * BLOCK])
        self.requests[id], self.deltas[id] = request, []
        self.moves.take(Add(request, 0.0, source))
        return id

    def ahead(self, prompt: Sequence[int]) -> None:
        """As :meth:`add`, without the request."""
        for number, key in enumerate(block_keys(prompt, BLOCK)):
            self.content[key] = bytes(prompt[number * BLOCK : (number + 1) * BLOCK])
        self.moves.take(FetchAhead(tuple(prompt), b"", "peer"))

    def cancel(self, id: str) -> None:
        self.moves.take(Cancel(id))

    def arrive(self) -> None:
        """The next block, also after the fetch was given up: its thread may be in the midst of one."""
        fetch = self.link.current if self.link else None
        if fetch is not None and fetch.done < len(fetch.keys):
            self.core.blocks.write(fetch.blocks[fetch.done], memoryview(self.content[fetch.keys[fetch.done]]))
            fetch.done += 1

    def end(self, failure: str = "") -> None:
        fetch = self.link.current if self.link else None
        if fetch is not None:
            fetch.failure, fetch.ended = failure, True

    def work(self) -> None:
        self.moves.work(())

    def step(self) -> None:
        if self.core.busy:
            self.now += 0.01
            for delta in self.core.step(self.now).deltas:
                self.deltas[delta.id].append(delta)
            self.core.scheduler.check()

    def finish(self) -> None:
        """Nothing more comes from the other engine, whose threads end."""
        self.now += MOST_SECONDS + 1
        self.work()
        self.arrive()
        while self.link is not None and self.link.current is not None:
            self.end("it ends")
        self.work()
        assert not self.moves.waiting, "requests wait for a fetch that is over"
        while self.core.busy:
            self.step()
        assert not self.core.scheduler.cache.held, "blocks leaked"
        for id, found in self.deltas.items():
            assert [delta.finish_reason is not None for delta in found].count(True) == 1, "each ends once"
            tokens = [token for delta in found for token in delta.tokens]
            wanted = alone(HistoryEngine(VOCAB), self.requests[id].prompt, self.new)
            assert tokens == wanted or (found[-1].finish_reason == "cancelled" and tokens == wanted[: len(tokens)])


@contextmanager
def course(**options: Any) -> Generator[Course]:
    found = Course(**options)
    with patch.object(moves_module, "PeerLink", Link), patch.object(moves_module, "monotonic", lambda: found.now):
        yield found


def prompt(number: int, blocks: int) -> list[int]:
    """Prompts of one number begin alike."""
    return [1 + (number * 5 + place * place) % (VOCAB - 1) for place in range(blocks * BLOCK + 1)]


actions = st.one_of(
    st.tuples(st.sampled_from(["add", "ahead"]), st.integers(0, 2), st.integers(0, 12)),
    st.tuples(st.just("arrive"), st.integers(1, 4)),
    st.tuples(st.sampled_from(["work", "step", "end", "fail", "cancel", "wait"]), st.integers(0, 20)),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(actions, max_size=40), st.sampled_from([16, 24, 64]))
def test_any_course_of_a_fetch_gives_every_answer_and_all_memory_back(events: list[Any], blocks: int) -> None:
    """Planted: a request that is forgotten when it is cancelled while it waits, and blocks that stay held."""
    with course(blocks=blocks) as one:
        for event, *values in events:
            if event == "add":
                one.add(prompt(values[0], values[1]))
            elif event == "ahead":
                one.ahead(prompt(values[0], values[1]))
            elif event == "arrive":
                for _ in range(values[0]):
                    one.arrive()
            elif event == "cancel" and one.requests:
                one.cancel(f"{values[0] % len(one.requests)}")
            elif event == "wait":
                one.now += values[0] / 10
            elif event in ("end", "fail"):
                one.end("it failed" if event == "fail" else "")
            elif event == "work":
                one.work()
            elif event == "step":
                one.step()
        one.finish()


def test_a_fetched_prefix_is_found_and_published() -> None:
    with course() as one:
        id, keys = one.add(prompt(1, 5)), block_keys(prompt(1, 5), BLOCK)
        one.core.routing.next([watcher := moves_watcher()])
        for _ in range(5):
            one.arrive()
        one.work()
        one.end()
        one.work()
        one.finish()
        assert one.deltas[id][0].cached_tokens == 5 * BLOCK and one.core.blocks.fetched == 5
        published = one.core.routing.next([watcher])[0].blocks.published
        assert all(key[:16] in published for key in keys), "other engines and gateways hear of them"


def test_what_was_fetched_ahead_is_there_when_its_request_comes() -> None:
    """Planted: blocks that are reserved and not kept, and a second fetch of what is on its way."""
    with course() as one:
        one.ahead(prompt(1, 5))
        one.arrive()
        one.ahead(prompt(1, 5))
        assert one.link is not None and len(one.link.fetches) == 1
        for _ in range(4):
            one.arrive()
        one.end()
        one.work()
        one.core.scheduler.check()
        assert one.core.blocks.fetched == 5 and not one.moves.waiting
        id = one.add(prompt(1, 5))
        assert not one.moves.waiting, "all is there"
        one.finish()
        assert one.deltas[id][0].cached_tokens == 5 * BLOCK


def test_what_a_gateway_waits_for_is_fetched_also_where_it_is_computed_sooner() -> None:
    """The last block of a prompt whose others are here: the gateway has weighed the fetch of all of them. Planted: it
    is left to be computed, by a request that waits for it elsewhere.
    """
    with course() as one, patch.object(type(one.core.scheduler.costs), "prompt_seconds", 1e-9):
        one.ahead(prompt(1, 5))
        assert one.link is not None and len(one.link.fetches) == 1
        one.arrive()
        one.finish()
        id = one.add(prompt(2, 5))
        assert not one.moves.waiting, "nobody else has weighed this one"
        one.finish()
        assert not one.deltas[id][0].cached_tokens


def test_behind_what_is_on_its_way_the_rest_is_fetched() -> None:
    """Of a prompt that is being computed elsewhere, and of one that only begins alike. Planted: the rest is left out;
    all that is on its way counts as common.
    """
    with course(new=2) as one:
        begun = prompt(1, 5)
        other = [*begun[: 2 * BLOCK], *prompt(2, 2)]
        one.ahead(begun[: 3 * BLOCK + 1])
        one.ahead(begun)
        assert one.link is not None
        one.ahead(begun)
        id = one.add(other)
        found, keys = [list(fetch.keys) for fetch in one.link.fetches], block_keys(begun, BLOCK)
        assert found == [keys[:3], keys[3:5], block_keys(other, BLOCK)[2:4]]
        for fetch in list(one.link.fetches):
            for _ in fetch.keys:
                one.arrive()
            one.end()
        one.work()
        one.finish()
        assert one.core.blocks.fetched == 7 and one.deltas[id][0].cached_tokens == 4 * BLOCK


def warmed(one: Course, blocks: int) -> Link:
    """The link of an engine that is told to warm up, and hears the keys of two prompts of five blocks."""
    one.moves.take(WarmUp("peer", blocks))
    assert one.link is not None
    (asked,) = one.link.asked
    assert asked.most == blocks
    for number in (1, 2):
        known = block_keys(prompt(number, 5), BLOCK)
        asked.keys += known
        tokens = prompt(number, 5)
        for at, key in enumerate(known):
            one.content[key] = bytes(tokens[at * BLOCK : (at + 1) * BLOCK])
    asked.ended = True
    return one.link


def test_a_new_engine_fetches_what_others_have_used() -> None:
    """In parts, so that a request's fetch comes in between. Planted: only the first part is fetched."""
    with course() as one, patch.object(moves_module, "WARM_BYTES", 3 * BLOCK):
        link = warmed(one, 10)
        for part in (3, 3, 3, 1):
            one.work()
            assert link.current is not None and len(link.current.keys) == part
            for _ in range(part):
                one.arrive()
            one.end()
        one.work()
        assert one.core.blocks.fetched == 10 and not one.moves.waiting
        one.moves.take(WarmUp("peer", 10))
        assert len(link.asked) == 1, "it has blocks by now"
        id = one.add(prompt(2, 5))
        one.finish()
        assert one.deltas[id][0].cached_tokens == 5 * BLOCK


def test_a_warm_up_takes_only_memory_that_is_unused_and_ends_in_time() -> None:
    """Planted: it takes cached blocks of requests that have come meanwhile, or goes on for ever."""
    with course(blocks=16) as one:
        link = warmed(one, 10)
        one.add(prompt(0, 12), source="")
        while one.core.busy:
            one.step()
        one.work()
        assert link.current is not None and 0 < len(link.current.keys) < 10 and not one.core.blocks.unused
        assert not one.core.blocks.absent(block_keys(prompt(0, 12), BLOCK))
        one.finish()
    with course() as one, patch.object(moves_module, "WARM_BYTES", 3 * BLOCK):
        link = warmed(one, 10)
        one.work()
        one.now += moves_module.WARM_SECONDS + 1
        one.end()
        one.work()
        one.work()
        assert link.current is None and not one.moves.waiting
        one.finish()


def moves_watcher() -> Any:
    from runtime.engine.routing import RoutingWatcher

    watcher = RoutingWatcher()
    watcher.begin(1)
    return watcher


def test_a_fetch_that_brings_nothing_is_given_up_in_time() -> None:
    with course() as one:
        id = one.add(prompt(1, 5))
        one.arrive()
        one.work()
        one.now += MOST_SECONDS + 0.1
        one.work()
        assert not one.moves.waiting and one.core.blocks.failed == 1
        one.finish()
        assert one.deltas[id][0].cached_tokens == BLOCK, "what came is used"
        one.add(prompt(2, 5))
        assert not one.moves.waiting, "nothing is fetched over a link that has just failed"
        one.now += PAUSE_SECONDS
        one.add(prompt(0, 5))
        assert one.moves.waiting
        one.finish()


def test_an_engine_that_opens_another_bundle_in_the_midst_of_a_fetch_leaves_nothing() -> None:
    """The thread of the fetch ends, and with it what holds the engine. Planted: it waits for room for ever."""
    with course() as one:
        one.add(prompt(1, 5))
        one.arrive()
        fetch, descriptor = one.link.fetches[0] if one.link else None, one.moves.wake
        one.moves.close()
        assert fetch is not None and fetch.given_up
        del one.moves
        gc.collect()
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


def test_blocks_that_are_computed_sooner_are_not_fetched() -> None:
    costs = LinkCosts(block_bytes=1 << 20, block_tokens=64)
    assert costs.worth("a", 10, prompt_seconds=0.0002), "10 MB against 128 ms"
    assert not costs.worth("a", 10, prompt_seconds=0.00001), "against 6 ms"
    costs.observe("a", 10, 10.0)
    for _ in range(9):
        costs.observe("a", 10, 1000.0)
    assert not costs.worth("a", 10, prompt_seconds=0.0002), "a slow link"
    assert costs.worth("b", 10, prompt_seconds=0.0002), "another one"


def test_recurrent_state_is_refused_by_name_and_computed() -> None:
    engine = ChainEngine(blocks=16, slots=4)
    core = EngineCore(engine, Limits(max_running=2))
    assert not core.blocks.moves
    with pytest.raises(RequestError, match="recurrent state cannot be moved yet"):
        core.blocks.require("paged")
    info = EngineInfo("chain", "n", 64, 211, 4, 16, 4, 1, frozenset())
    moves = BlockMoves(core, info, b"")
    moves.take(Add(GenerateRequest("a", [1] * 20, 3), 0.0, "unix:/nowhere"))
    assert not moves.waiting and core.busy
    sound = HistoryEngine(VOCAB, slots=2, max_tokens=64, block_tokens=BLOCK)
    with pytest.raises(RequestError, match="recurrent state cannot be moved yet"):
        EngineCore(sound, Limits()).blocks.require("recurrent")


def test_an_engine_without_blocks_says_so_to_one_that_asks_for_them() -> None:
    """It knows nothing of the other end but its key. Planted: most bytes over those of a block."""
    engine = ChainEngine(slots=4)
    engine.capabilities = replace(engine.capabilities, block_bytes=0)
    core, said = EngineCore(engine, Limits(max_running=2)), SimpleQueue[Any]()
    here, other = socket.socketpair()
    sender = BlockSender(here, said.put, core.blocks, "d", "", lambda: None)
    sender.ask(FetchState("paged", bytes(WHOLE_KEY_BYTES)))
    failure = said.get(timeout=60)
    assert isinstance(failure, Failure) and "recurrent state cannot be moved yet" in str(failure.error())
    sender.close()
    here.close()
    other.close()


def store(blocks: int) -> tuple[HistoryEngine, EngineCore, BlockStore]:
    engine = HistoryEngine(VOCAB, slots=1, max_tokens=blocks * BLOCK, block_tokens=BLOCK)
    core = EngineCore(engine, Limits(max_running=1, max_draft_tokens=0))
    return engine, core, core.blocks


def test_a_block_that_comes_takes_no_memory_that_is_in_use() -> None:
    """Planted: memory of a running request is taken where nothing else is free, or all that it needs next."""
    _, core, blocks = store(5)
    core.add(GenerateRequest("r", prompt(1, 3), 3), 0)
    core.step(0)
    assert core.scheduler.cache.held == 4
    assert not blocks.reserve(1, spare=1)
    while core.busy:
        core.step(0)
    (block,) = blocks.reserve(9, spare=4)
    blocks.write(block, memoryview(bytes([1, 2, 3, 4])))
    blocks.keep([block], [b"k" * 32])
    content, found = memoryview(bytearray(BLOCK)), blocks.lend(b"k" * 32)
    assert found == block and not core.scheduler.running
    blocks.read(block, content)
    assert bytes(content) == bytes([1, 2, 3, 4])
    blocks.give_back([block])
    core.scheduler.check()


def test_a_block_that_is_lent_stays_what_it_is() -> None:
    """Planted: one that is not held, which a running request then takes and fills while a thread copies it."""
    _, core, blocks = store(4)
    core.add(GenerateRequest("r", prompt(1, 2), 1), 0)
    while core.busy:
        core.step(0)
    content, key = memoryview(bytearray(BLOCK)), block_keys(prompt(1, 2), BLOCK)[0]
    lent = blocks.lend(key)
    assert lent is not None and blocks.lend(b"k" * 32) is None
    core.add(GenerateRequest("s", prompt(2, 2), 1), 0)
    while core.busy:
        core.step(0)
        core.scheduler.check()
    blocks.read(lent, content)
    assert bytes(content) == bytes(prompt(1, 2)[:BLOCK])
    blocks.give_back([lent])
    core.scheduler.check()


def test_links_that_are_not_used_any_more_are_forgotten() -> None:
    """Engines of a cluster come and go, each at another address. Planted: all that ever were count for ever."""
    costs = LinkCosts(block_bytes=1 << 20, block_tokens=64)
    for number in range(1000):
        costs.observe("tcp:stays:7000", 8, 8.0)
        costs.observe(f"tcp:10.0.0.{number}:7000", 8, 0.1)
    assert len(costs._speeds) <= MOST_LINKS
    assert costs.seconds("tcp:stays:7000", 8) > 7 and costs.seconds("tcp:10.0.0.1:7000", 8) < 1
    mean = costs.block_seconds
    for number in range(MOST_LINKS):
        costs.observe(f"tcp:later:{number}", 8, 8.0)
    assert costs.block_seconds > 2 * mean
