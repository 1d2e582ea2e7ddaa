"""Defects of blocks that move between engines: found by serving evidence, or by the engine that they come to."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from threading import Event, Semaphore, Thread
from time import monotonic
from typing import Any

import pytest

from engines.load import load
from engines.protocol import Engine, MovesBlocks
from engines.sequences import Sequences
from evals.check import Outcome
from evals.kinds.serving import ServedItem, ServingBounds, ServingSettings, served_checks
from evals.kinds.serving.measure import go_on, moved_tokens, served_items
from evals.kinds.serving.served_log import LoggedPlace, ServedLog, Streams, anchor
from quantization.calibrate import calibrate
from runtime.engine.block_store import BlockStore
from runtime.engine.connections import Connections
from runtime.engine.core import EngineCore
from runtime.engine.moving import sending
from runtime.engine.moving.checksums import checksum
from runtime.engine.moving.fetching import Fetch, PeerLink
from runtime.engine.moving.moves import BlockMoves
from runtime.wire.address import Address
from runtime.wire.block_keys import block_keys
from runtime.wire.limits import Limits
from runtime.wire.messages import EngineInfo, GenerateRequest
from tests.exported import tiny_graph
from tests.fake_engine import History, HistoryEngine
from tests.integration.test_batch_invariance import Model, make_bundle, recipe
from tests.planted.test_served import Wrapped
from tests.tiny import tiny_texts

COUNT = 8  # tokens behind the blocks
SETTINGS = ServingSettings(steps=COUNT, answers=4, new_tokens=5)
TEXT = [number * number % 31 for number in range(400)]

# --- found by the evidence -------------------------------------------------------------------------------------------


class Moving(Wrapped):
    """A compiled engine whose blocks are moved wrongly."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        assert isinstance(engine, MovesBlocks)
        self.mover = engine

    def read_block(self, block: int, content: memoryview) -> None:
        self.mover.read_block(block, content)

    def write_block(self, block: int, content: memoryview) -> None:
        self.mover.write_block(block, content)


class AnotherLayersScale(Moving):
    """Codes of one layer lie where those of another one are read, and multiplied with its scale."""

    def write_block(self, block: int, content: memoryview) -> None:
        half = len(content) // 2
        super().write_block(block, memoryview(bytes(content[half:]) + bytes(content[:half])))


class ShiftedBlock(Moving):
    """Each block holds what the one before it should hold."""

    before = b""

    def write_block(self, block: int, content: memoryview) -> None:
        written, self.before = self.before or bytes(content), bytes(content)
        super().write_block(block, memoryview(written))


class TornBlock(Moving):
    """The last part of a block is what was there before."""

    def write_block(self, block: int, content: memoryview) -> None:
        torn = bytearray(len(content))
        self.mover.read_block(block, memoryview(torn))
        torn[: len(content) * 3 // 4] = content[: len(content) * 3 // 4]
        super().write_block(block, memoryview(torn))


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, graph = tmp_path_factory.mktemp("bundle"), tiny_graph()
    calibration = calibrate(recipe("8-bit").calibrate, graph, tiny_texts(8, 0), folder / "calibration")
    return make_bundle(Model(graph, calibration, []), "int8 KV", folder).folder


def moved(bundle: Path, wrap: Callable[[Engine], Engine]) -> list[ServedItem]:
    """As the evidence does it, with the tiny model's own text."""
    from tokenizers import Tokenizer

    text = Tokenizer.from_file(str(bundle / "tokenizer.json")).encode(" ".join(tiny_texts(4, 5))).ids
    first, other = Sequences(load(bundle, threads=1)), Sequences(wrap(load(bundle, threads=1)))
    log, behind = ServedLog(), moved_tokens(first, COUNT)
    stream = Streams(text).next(behind + COUNT)
    anchor(first, None, [stream], [range(behind, behind + COUNT)])
    other.prefill(other.slots - 1, stream.tokens[::-1])
    sound = LoggedPlace("greedy", 0, 0, 1)
    log.add(sound, stream, behind, stream.own[behind], chosen=int(stream.own[behind].argmax()))
    go_on(other, stream, first.read_blocks(0, behind // first.engine.capabilities.block_tokens), behind, log)
    first.close()
    other.close()
    return log.items()


def failed(items: Sequence[ServedItem]) -> set[str]:
    return {check.name for check in served_checks(items, ServingBounds()) if check.outcome is Outcome.FAIL}


@pytest.mark.parametrize("defect", [AnotherLayersScale, ShiftedBlock, TornBlock])
def test_blocks_that_hold_something_else(bundle: Path, defect: Callable[[Engine], Engine]) -> None:
    assert "serving_kl" in failed(moved(bundle, defect))


def test_sound_blocks_are_as_good_as_computed_ones(bundle: Path) -> None:
    items = moved(bundle, lambda engine: engine)
    assert not failed(items) and max(item.error for item in items) < 1e-2
    assert {item.path for item in items} == {"greedy", "moved"}


def test_the_evidence_moves_blocks_where_the_engine_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the whole measurement. Planted: blocks whose positions are in another order."""

    def items() -> list[ServedItem]:
        one = History(31, slots=3, max_tokens=96, block_tokens=16)
        reopened = History(31, slots=4, max_tokens=96, block_tokens=16)
        assert moved_tokens(one, COUNT) == 80
        return served_items(SETTINGS, None, one, lambda: reopened, TEXT)

    (sound,) = [item for item in items() if item.path == "moved"]
    assert (sound.slot, sound.last) == (3, 80 + COUNT - 1) and not failed(items())

    def reversed_order(self: HistoryEngine, block: int, content: memoryview) -> None:
        self.held[block][:] = list(content)[::-1]

    monkeypatch.setattr(HistoryEngine, "write_block", reversed_order)
    assert "serving_kl" in failed(items())


# --- found by the engine that fetches --------------------------------------------------------------------------------

KEY, BLOCK, VOCAB = b"k" * 32, 16, 31
PROMPT = [1 + number * number % (VOCAB - 1) for number in range(BLOCK * 12 + 1)]
INFO = EngineInfo("digest", "n", 512, VOCAB, BLOCK, 64, BLOCK, 1, frozenset(), level="v4", moves_blocks=True)


def core() -> EngineCore:
    return EngineCore(HistoryEngine(VOCAB, slots=2, max_tokens=512, block_tokens=BLOCK), Limits())


@contextmanager
def peer(folder: Path, info: EngineInfo = INFO, step_seconds: float = 0.0) -> Generator[tuple[str, BlockStore]]:
    """The address of an engine that has the blocks of the prompt, and its store. It hears others between steps of
    ``step_seconds``.
    """
    made, address = core(), Address(path=f"{folder}/peer")
    made.add(GenerateRequest("r", PROMPT, 1), 0)
    while made.busy:
        made.step(0)
    connections = Connections(info, listener=address.listen(KEY), key=KEY)
    connections.offer(made.blocks, moves := BlockMoves(made, info, KEY))
    ended = Event()

    def run() -> None:
        while not ended.wait(step_seconds):
            connections.receive(20)
            moves.work(connections.senders)

    thread = Thread(target=run)
    thread.start()
    try:
        yield str(address), made.blocks
    finally:
        ended.set()
        thread.join()
        connections.close()


def fetched(address: str, info: EngineInfo = INFO, key: bytes = KEY) -> tuple[Fetch, dict[bytes, bytes]]:
    """What came of a fetch of the whole prompt, block by block."""
    store, keys, ended = core().blocks, block_keys(PROMPT, BLOCK), Event()
    link, fetch = PeerLink(address, key, info, store, ended.set), Fetch(keys, store.reserve(len(keys), 0))
    link.start(fetch)
    assert ended.wait(20), "a fetch without an end"
    link.close()
    found, content = dict[bytes, bytes](), memoryview(bytearray(BLOCK))
    for block, name in zip(fetch.blocks[: fetch.done], keys, strict=False):
        store.read(block, content)
        found[name] = bytes(content)
    return fetch, found


def expected() -> dict[bytes, bytes]:
    return {
        key: bytes(PROMPT[number * BLOCK : (number + 1) * BLOCK])
        for number, key in enumerate(block_keys(PROMPT, BLOCK))
    }


@pytest.mark.parametrize("shared", [True, False])
def test_sound_blocks_come_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: bool) -> None:
    """Through memory that both share, and through the socket."""
    if not shared:
        monkeypatch.setattr(sending, "map_shared", lambda _: None)
    with peer(tmp_path) as (address, store):
        fetch, found = fetched(address)
        assert not fetch.failure and found == expected() and store.sent == 12


def test_a_block_that_is_lost_before_those_behind_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: those behind it are still taken, in place of the ones before them."""
    known, lost = BlockStore.lend, block_keys(PROMPT, BLOCK)[5]
    monkeypatch.setattr(BlockStore, "lend", lambda self, key: None if key == lost else known(self, key))
    with peer(tmp_path) as (address, store):
        fetch, found = fetched(address)
        assert not fetch.failure and list(found.items()) == list(expected().items())[:5] and store.sent == 11


def test_fetches_do_not_wait_for_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are lent between two steps, which are long. Planted: each fetch waits for a step of its own."""
    known, times = BlockStore.lend, list[float]()

    def lend(self: BlockStore, key: bytes) -> int | None:
        times.append(monotonic())
        return known(self, key)

    monkeypatch.setattr(BlockStore, "lend", lend)
    keys, store, ended = block_keys(PROMPT, BLOCK), core().blocks, Semaphore(0)
    fetches = [Fetch(keys[at : at + 2], store.reserve(2, 0)) for at in range(0, 12, 2)]
    with peer(tmp_path, step_seconds=0.2) as (address, _):
        link = PeerLink(address, KEY, INFO, store, ended.release)
        for fetch in fetches:
            link.start(fetch)
        assert all(ended.acquire(timeout=20) for _ in fetches)
        link.close()
    assert all(fetch.ended and fetch.done == 2 and not fetch.failure for fetch in fetches)
    steps = 1 + sum(after - before > 0.1 for before, after in pairwise(times))
    assert len(times) == 12 and steps < len(fetches)


def test_a_block_that_is_torn_on_its_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: content that changes once its checksum was taken, in shared memory and in the sender's own."""

    def torn(key: bytes, digest: str, level: str, content: bytes | memoryview) -> bytes:
        found = checksum(key, digest, level, content)
        if key == block_keys(PROMPT, BLOCK)[5] and isinstance(content, memoryview):
            content[len(content) // 2] ^= 1
        return found

    monkeypatch.setattr(sending, "checksum", torn)
    for place in (sending.map_shared, lambda _: None):
        monkeypatch.setattr(sending, "map_shared", place)
        folder = tmp_path / getattr(place, "__name__", "socket").strip("_<>")
        folder.mkdir()
        with peer(folder) as (address, _):
            fetch, found = fetched(address)
            assert "does not match its checksum" in fetch.failure
            assert found.items() <= expected().items() and len(found) == 5


def test_blocks_of_another_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the engine sends the block before the one that was asked for, under its own key, and under the other."""
    keys = block_keys(PROMPT, BLOCK)
    known = BlockStore.lend

    def stale(self: BlockStore, key: bytes) -> int | None:
        return known(self, keys[keys.index(key) - 1] if key in keys[1:] else key)

    monkeypatch.setattr(BlockStore, "lend", stale)
    monkeypatch.setattr(
        sending, "checksum", lambda key, *rest: checksum(keys[keys.index(key) - 1] if key in keys[1:] else key, *rest)
    )
    with peer(tmp_path) as (address, _):
        fetch, found = fetched(address)
        assert "does not match its checksum" in fetch.failure and len(found) == 1


def test_a_block_whose_memory_was_taken(tmp_path: Path) -> None:
    """Planted: keys that stay when a block is taken (``BlockPool._take``), so another sequence's content is sent."""
    engine = HistoryEngine(VOCAB, slots=1, max_tokens=14 * BLOCK, block_tokens=BLOCK)
    made, content = EngineCore(engine, Limits(max_running=1, max_draft_tokens=0)), memoryview(bytearray(BLOCK))
    for prompt in (PROMPT, PROMPT[::-1]):
        made.add(GenerateRequest("r", prompt, 1), 0)
        while made.busy:
            made.step(0)

    def read(key: bytes) -> bytes:
        block = made.blocks.lend(key)
        if block is not None:
            made.blocks.read(block, content)
        return b"" if block is None else bytes(content)

    there = [read(key) for key in block_keys(PROMPT, BLOCK)]
    assert b"" in there
    assert all(not found or found == whole for found, whole in zip(there, expected().values(), strict=True))
    assert all(read(key) for key in block_keys(PROMPT[::-1], BLOCK))


@pytest.mark.parametrize("other", [{"level": "v3"}, {"digest": "other"}, {"block_bytes": 8}, {"moves_blocks": False}])
def test_an_engine_of_another_level_or_bundle(tmp_path: Path, other: dict[str, Any]) -> None:
    with peer(tmp_path, replace(INFO, **other)) as (address, _):
        fetch, found = fetched(address)
        assert "blocks of others do not fit" in fetch.failure and not found


def test_an_engine_that_says_another_level_than_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The level is in the checksum of each block, too."""
    monkeypatch.setattr(sending, "checksum", lambda key, digest, _, content: checksum(key, digest, "v3", content))
    with peer(tmp_path) as (address, _):
        fetch, found = fetched(address)
        assert "does not match its checksum" in fetch.failure and not found


def test_an_engine_with_another_key(tmp_path: Path) -> None:
    with peer(tmp_path) as (address, store):
        fetch, found = fetched(address, key=b"x" * 32)
        assert fetch.failure and not found and not store.sent


def test_a_place_that_is_no_memory_of_a_peer(tmp_path: Path) -> None:
    """A file that somebody names is not written to; nor is memory that could be cut off."""
    from runtime.wire.messages import SharedPlace

    mark = b"m" * 32
    path = tmp_path / "file"
    path.write_bytes(mark + bytes(8192))
    cut = os.memfd_create("tapeout-blocks", os.MFD_ALLOW_SEALING)
    os.write(cut, mark + bytes(8192))
    with path.open("r+b") as file:
        for descriptor in (file.fileno(), cut, 99_999):
            assert sending.map_shared(SharedPlace(os.getpid(), descriptor, mark)) is None
    assert path.read_bytes() == mark + bytes(8192)
    os.close(cut)


def test_an_engine_that_reads_nothing_holds_no_more_than_its_bound() -> None:
    """It asks for many blocks and reads none. Planted: all of them are lent at once, and stay so once it has gone."""
    from runtime.wire.messages import FetchState
    from runtime.wire.session import Session

    (ours, theirs), session, made = socket.socketpair(), Session("engine", b""), core()
    made.add(GenerateRequest("r", PROMPT, 1), 0)
    while made.busy:
        made.step(0)
    store, keys = made.blocks, block_keys(PROMPT, BLOCK)
    store.block_bytes = sending.MOST_LENT_BYTES // 4  # more than a socket holds
    store.read = lambda block, content: None  # type: ignore[method-assign]
    sender = sending.BlockSender(
        theirs, lambda message: theirs.sendall(session.frame(message)), store, "digest", "v4", lambda: None
    )
    sender.ask(FetchState("paged", b"".join(keys)))
    assert not sender.work() and len(keys) == 12 and made.scheduler.cache.held == 4
    sender.close()
    assert not made.scheduler.cache.held
    made.scheduler.check()
    ours.close()
