"""The index of a fleet is the union of its pools, after any course of requests, losses, reconnects and restarts."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from runtime.engine import routing
from runtime.engine.cache.blocks import BlockPool
from runtime.engine.cache.kinds import Lease
from runtime.engine.core import EngineCore
from runtime.engine.routing import RoutingReports, RoutingWatcher
from runtime.gateway.routing.index import PrefixIndex
from runtime.wire.block_keys import block_keys
from runtime.wire.codec import WireError, decode, encode
from runtime.wire.limits import Limits
from runtime.wire.messages import (
    KEY_BYTES,
    EngineLoad,
    EngineStats,
    GenerateRequest,
    KeyChanges,
    RoutingReport,
    StepReport,
)
from tests.chain_engine import ChainEngine

BLOCK, MAX_TOKENS = 4, 64
KINDS = {"paged": (1, 0), "recurrent": (0, 1), "mixed": (1, 1)}  # whether there are blocks, and slots
prompts = st.builds(
    lambda begins, rest: ([1, 2, 3, 4, 5, 6, 7] * begins + rest)[:40],
    st.integers(0, 5),
    st.lists(st.integers(1, 4), min_size=1, max_size=9),
)


@dataclass
class Replica:
    """``link``: reports under way, each with the keys that the pools had when it was made."""

    core: EngineCore
    watchers: list[RoutingWatcher]  # that of this index is the last; the others are of other servers
    link: deque[tuple[StepReport, set[bytes], set[bytes]]] = field(
        default_factory=deque[tuple[StepReport, set[bytes], set[bytes]]]
    )

    @property
    def pools(self) -> tuple[BlockPool, BlockPool]:
        return self.core._paged.pool, self.core._recurrent.pool

    def report(self) -> None:
        """What the engine's process does after a step."""
        asking = [watcher for watcher in self.watchers if watcher.asks]
        reports = self.core.routing.next(asking)
        if self.watchers[-1].asks:
            blocks, snapshots = ({key[:KEY_BYTES] for key in pool.keys} for pool in self.pools)
            self.link.append((StepReport((), self.core.stats(), (), reports[-1]), blocks, snapshots))


class Fleet(RuleBasedStateMachine):
    @initialize(most_keys=st.sampled_from([1, 3, 4096]))
    def start(self, most_keys: int) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(routing, "MOST_KEYS", most_keys)
        self.index, self.now, self.number = PrefixIndex(), 0.0, 0
        self.replicas: dict[str, Replica] = {}

    @rule(
        name=st.sampled_from("ab"),
        kind=st.sampled_from(sorted(KINDS)),
        blocks=st.integers(4, 12),
        slots=st.integers(1, 4),
    )
    def open(self, name: str, kind: str, blocks: int, slots: int) -> None:
        """An engine comes, or comes again with empty pools."""
        paged, recurrent = KINDS[kind]
        engine = ChainEngine(blocks=paged * blocks, slots=recurrent * slots, block_tokens=BLOCK)
        core = EngineCore(engine, Limits(16, max_running=4), clock=lambda: self.now)
        self.replicas[name] = Replica(core, [RoutingWatcher()])
        self.replicas[name].watchers[-1].begin(self.index.join(name))

    @precondition(lambda self: self.replicas)
    @rule(data=st.data())
    def go(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.replicas)))
        del self.replicas[name]
        self.index.leave(name)

    @precondition(lambda self: self.replicas)
    @rule(data=st.data(), others=st.integers(0, 2))
    def connect_again(self, data: st.DataObject, others: int) -> None:
        """``others``: servers that are connected beside this one. Without any nothing was noted meanwhile."""
        name = data.draw(st.sampled_from(sorted(self.replicas)))
        replica = self.replicas[name]
        replica.link.clear()
        replica.core.routing.next([])
        replica.watchers = [RoutingWatcher() for _ in range(others + 1)]
        for watcher in replica.watchers[:-1]:
            watcher.begin(0)
        replica.watchers[-1].begin(self.index.join(name))

    @precondition(lambda self: self.replicas)
    @rule(
        data=st.data(),
        asked=st.lists(st.tuples(prompts, st.integers(1, 9)), min_size=1, max_size=4),
        steps=st.integers(1, 12),
        salt=st.sampled_from("xy"),
    )
    def work(self, data: st.DataObject, asked: list[tuple[list[int], int]], steps: int, salt: str) -> None:
        """Blocks are published and evicted; each step is reported."""
        replica = self.replicas[data.draw(st.sampled_from(sorted(self.replicas)))]
        most = replica.core.scheduler.cache.max_tokens
        for prompt, new in asked:
            self.number += 1
            request = GenerateRequest(f"r{self.number}", prompt[: most - 9], new, cache_salt=salt.encode())
            replica.core.add(request, self.now)
        for _ in range(steps):
            self.now += 1
            replica.core.step(self.now)
            replica.report()

    @precondition(lambda self: any(replica.link for replica in self.replicas.values()))
    @rule(data=st.data(), lost=st.integers(0, 3), count=st.integers(1, 5))
    def deliver(self, data: st.DataObject, lost: int, count: int) -> None:
        """Some reports, after others that were lost."""
        name = data.draw(st.sampled_from([name for name, replica in sorted(self.replicas.items()) if replica.link]))
        for _ in range(min(lost, len(self.replicas[name].link) - 1)):
            self.replicas[name].link.popleft()
        self.hear(name, count)

    def hear(self, name: str, count: int) -> None:
        """Where all has been heard, the index has what the pools had."""
        replica = self.replicas[name]
        for _ in range(min(count, len(replica.link))):
            report, blocks, snapshots = replica.link.popleft()
            received = decode(encode(report))
            turn = self.index.apply(name, received.routing, received.stats)
            if turn is not None:
                replica.watchers[-1].begin(turn)
            known, routing_report = self.index._reported[name], received.routing
            if not routing_report.behind and known.turn == routing_report.turn:
                assert self.keys(name, self.index._blocks) == blocks
                assert self.keys(name, self.index._snapshots) == snapshots
            elif not known.next:
                assert not self.keys(name, self.index._blocks) | self.keys(name, self.index._snapshots)

    def keys(self, name: str, keys: dict[bytes, int]) -> set[bytes]:
        bit = self.index._reported[name].bit
        return {key for key, engines in keys.items() if engines & bit}

    @rule(prompt=prompts, salt=st.sampled_from("xy"))
    def match(self, prompt: list[int], salt: str) -> None:
        """Once all have been heard, a prompt resumes where the index says."""
        for name, replica in self.replicas.items():
            replica.report()
            self.hear(name, len(replica.link))
            while replica.watchers[-1].behind or not self.index._reported[name].next:
                replica.report()
                self.hear(name, 1)
        found = self.index.resumable(block_keys(prompt[:-1], BLOCK, salt.encode()))
        for name, replica in self.replicas.items():
            match = replica.core.scheduler.cache.match(Lease(salt.encode()), prompt, len(prompt) - 1)
            assert found.get(name, 0) * BLOCK == match.tokens

    @invariant()
    def adds_up(self) -> None:
        if hasattr(self, "index"):
            self.index.check()

    def teardown(self) -> None:
        if hasattr(self, "index"):
            for name in self.replicas:
                self.index.leave(name)
            assert not len(self.index), "keys of engines that have left"
            self.patch.undo()


TestFleet = Fleet.TestCase
TestFleet.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


# --- reports ---------------------------------------------------------------------------------------------------------


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")[::-1]


def pool_of(*numbers: int, blocks: int = 20) -> BlockPool:
    pool = BlockPool(blocks)
    for number in numbers:
        publish(pool, number)
    return pool


def publish(pool: BlockPool, number: int) -> None:
    taken = pool.take(1)
    assert taken
    pool.publish(taken[0], key(number))
    pool.release(taken)


def reports_of(pool: BlockPool) -> RoutingReports:
    return RoutingReports(pool, BlockPool(0), EngineLoad)


def shorts(*numbers: int) -> bytes:
    return b"".join(key(number)[:KEY_BYTES] for number in numbers)


def test_a_large_list_goes_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "MOST_KEYS", 2)
    reports, watcher = reports_of(pool_of(1, 2, 3, 4, 5)), RoutingWatcher()
    watcher.begin(7)
    found = [reports.next([watcher])[0] for _ in range(4)]
    assert [(report.turn, report.number, report.whole, report.behind) for report in found] == [
        (7, 0, True, 3), (7, 1, False, 1), (7, 2, False, 0), (7, 3, False, 0),
    ]  # fmt: skip
    assert b"".join(report.blocks.published for report in found) == shorts(1, 2, 3, 4, 5)


def test_changes_come_once_and_only_what_holds_now() -> None:
    pool = pool_of(1, blocks=2)
    reports, watcher = reports_of(pool), RoutingWatcher()
    watcher.begin(0)
    reports.next([watcher])
    publish(pool, 2)
    publish(pool, 3)  # in the place of 1
    publish(pool, 4)  # in the place of 2
    (report,) = reports.next([watcher])
    assert report.blocks == KeyChanges(shorts(3, 4), shorts(2, 1)) or report.blocks == KeyChanges(
        shorts(3, 4), shorts(1, 2)
    )
    assert reports.next([watcher])[0].blocks == KeyChanges()


def test_a_block_that_is_forgotten_is_told() -> None:
    """As the snapshot of an answer that a later one replaces. Planted: only blocks that are taken again are told."""
    pool = pool_of(1, blocks=2)
    reports, watcher = reports_of(pool), RoutingWatcher()
    watcher.begin(0)
    reports.next([watcher])
    (block,) = pool.find([key(1)])
    pool.forget(block, key(1))
    assert reports.next([watcher])[0].blocks == KeyChanges(b"", shorts(1))


def test_one_that_hears_too_little_is_told_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has yet to hear stays bounded by the pool."""
    monkeypatch.setattr(routing, "MOST_KEYS", 1)
    pool = pool_of(blocks=3)
    reports, watcher = reports_of(pool), RoutingWatcher()
    watcher.begin(0)
    most, wholes = 0, 0
    for number in range(60):
        publish(pool, number)
        publish(pool, 100 + number)
        wholes += reports.next([watcher])[0].whole
        most = max(most, watcher.behind)
    assert most <= 1 + 2 * 3 + 2 and wholes > 1


def test_a_pool_notes_nothing_while_nobody_asks() -> None:
    pool = pool_of(1)
    reports = reports_of(pool)
    assert reports.next([]) == [] and pool._changes is None
    watcher = RoutingWatcher()
    watcher.begin(0)
    reports.next([watcher])
    assert pool._changes == {}
    reports.next([])
    publish(pool, 2)
    assert pool._changes is None


@pytest.mark.parametrize("length", [1, KEY_BYTES - 1, KEY_BYTES + 1])
def test_keys_of_a_wrong_length_are_refused(length: int) -> None:
    index = PrefixIndex()
    turn = index.join("a")
    report = RoutingReport(turn, 0, True, 0, KeyChanges(b"x" * length), KeyChanges(), 0, EngineLoad())
    with pytest.raises(WireError, match="bytes of keys"):
        index.apply("a", report, EngineStats(blocks=1))


def listed(index: PrefixIndex, engine: str, numbers: Sequence[int], **stats: Any) -> None:
    changes = KeyChanges(shorts(*numbers))
    report = RoutingReport(index.join(engine), 0, True, 0, changes, KeyChanges(), 0, EngineLoad())
    assert index.apply(engine, report, EngineStats(blocks=8, **stats)) is None


def test_engines_beyond_a_machine_word_are_told_apart() -> None:
    index = PrefixIndex()
    for engine in range(200):
        listed(index, f"e{engine}", range(engine % 7))
    found = index.resumable([key(number) for number in range(10)])
    assert found == {f"e{engine}": engine % 7 for engine in range(200) if engine % 7}
    index.check()
    index.leave("e6")
    listed(index, "new", range(3))
    assert index.resumable([key(number) for number in range(10)])["new"] == 3
    index.check()


def test_a_chain_ends_at_the_first_block_that_is_missing() -> None:
    index = PrefixIndex()
    listed(index, "a", [0, 2, 3])
    assert index.resumable([key(number) for number in range(4)]) == {"a": 1}
    assert index.resumable([key(9), key(0)]) == {}
