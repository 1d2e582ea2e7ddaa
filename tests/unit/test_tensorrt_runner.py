"""The TensorRT runner's bookkeeping, on a GPU that is this process's memory (tests/host_gpu.py).

What is compared is the lowered graph run plainly: buckets, row windows, captured graphs and copies must change nothing.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engines.bundle import LoweredGraph, Profile
from engines.portable import PortableEngine
from engines.sequences import Sequences
from engines.targets.tensorrt.engine import TensorRTEngine
from tapeout.artifact import Artifact
from tapeout.errors import RequestError
from tests.exported import family_graph
from tests.families import MAX_POSITIONS, VOCAB_SIZE
from tests.host_gpu import MODULE, HostCuda, host_bundle, install
from tests.lowered import lowered as lowered_graph

SLOTS = 5
PROFILES = (
    Profile(batch=1, min_tokens=1, opt_tokens=8, max_tokens=MAX_POSITIONS),
    *(Profile(batch=batch, min_tokens=1, opt_tokens=1, max_tokens=1) for batch in (1, 2, 4)),
)


@dataclass
class Pair:
    engine: Sequences
    plain: Sequences
    cuda: HostCuda


@pytest.fixture(scope="module")
def lowered(tmp_path_factory: pytest.TempPathFactory) -> Artifact[LoweredGraph]:
    folder = tmp_path_factory.mktemp("qwen3")
    return lowered_graph(family_graph("qwen3"), folder / "lowered", "fp16", slots=SLOTS)


@pytest.fixture
def pair(lowered: Artifact[LoweredGraph], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[Pair]:
    monkeypatch.setenv("TAPEOUT_CACHE", str(tmp_path / "cache"))
    cuda = install(monkeypatch, lowered, PROFILES)
    engine = Sequences(TensorRTEngine(MODULE, host_bundle(lowered, tmp_path / "bundle", PROFILES)))
    plain = Sequences(PortableEngine(lowered, slots=SLOTS, threads=1))
    yield Pair(engine, plain, cuda)
    engine.close()
    plain.close()


def tokens(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB_SIZE, count).tolist()


def same(actual: Any, expected: Any) -> None:
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, atol=4e-3 * max(np.abs(expected).max(initial=0), 1))


def test_prefill_in_chunks_with_the_rows_asked_for(pair: Pair) -> None:
    text = tokens(20)
    for engine in (pair.engine, pair.plain):
        assert engine.prefill(SLOTS - 1, text[:11], positions=[]).shape == (0, VOCAB_SIZE)
    rest: dict[str, Any] = {"start": 11, "positions": [0, 8]}
    same(pair.engine.prefill(SLOTS - 1, text[11:], **rest), pair.plain.prefill(SLOTS - 1, text[11:], **rest))


@pytest.mark.parametrize(("batch", "first"), [(1, 4), (2, 0), (3, 1), (4, 0), (5, 0)])
def test_decode_in_any_bucket_captured_and_replayed(pair: Pair, batch: int, first: int) -> None:
    """Five rows are four and one, three rows ride in a bucket of four; the third step on replays graphs."""
    lengths = [3 + 4 * row for row in range(batch)]
    for slot in range(SLOTS):
        for engine in (pair.engine, pair.plain):
            engine.prefill(slot, tokens(lengths[slot - first] if 0 <= slot - first < batch else 9, seed=slot))
    for step in range(4):
        now = [length + step for length in lengths]
        ids = tokens(batch, seed=100 + step)
        same(pair.engine.decode(ids, now, first_slot=first), pair.plain.decode(ids, now, first_slot=first))
    assert pair.cuda.launched >= 3
    for slot in range(SLOTS):  # nobody beside the batch was written over
        if not first <= slot < first + batch:
            same(
                pair.engine.prefill(slot, tokens(3, seed=7), start=9),
                pair.plain.prefill(slot, tokens(3, seed=7), start=9),
            )


def test_a_full_neighbour_is_left_alone(pair: Pair) -> None:
    text = tokens(MAX_POSITIONS)
    for engine in (pair.engine, pair.plain):
        engine.prefill(3, text)
        for slot in range(3):
            engine.prefill(slot, text[:5])
    same(pair.engine.decode([7, 8, 9], [5, 5, 5]), pair.plain.decode([7, 8, 9], [5, 5, 5]))
    last: dict[str, Any] = {"start": MAX_POSITIONS - 1}
    same(pair.engine.prefill(3, text[-1:], **last), pair.plain.prefill(3, text[-1:], **last))


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_course_of_calls_is_that_of_the_plain_graph(pair: Pair, data: st.DataObject) -> None:
    held = [0] * SLOTS
    for number in range(data.draw(st.integers(1, 12))):
        kind = data.draw(st.sampled_from(("prefill", "decode", "copy_slot")))
        arguments: tuple[Any, ...]
        options: dict[str, int] = {}
        if kind == "prefill":
            slot = data.draw(st.integers(0, SLOTS - 1))
            start = data.draw(st.integers(0, min(held[slot], MAX_POSITIONS - 1)))
            count = data.draw(st.integers(1, min(6, MAX_POSITIONS - start)))
            arguments, options, held[slot] = (slot, tokens(count, number)), {"start": start}, start + count
        elif kind == "decode":
            first = data.draw(st.integers(0, SLOTS - 1))
            batch = data.draw(st.integers(1, SLOTS - first))
            lengths = held[first : first + batch]
            if not all(1 <= length < MAX_POSITIONS for length in lengths):
                continue
            arguments, options = (tokens(batch, number), lengths), {"first_slot": first}
            held[first : first + batch] = [length + 1 for length in lengths]
        else:
            source, target = data.draw(st.permutations(range(SLOTS)))[:2]
            length = data.draw(st.integers(0, held[source]))
            arguments, held[target] = (source, target, length), length
        results = [getattr(engine, kind)(*arguments, **options) for engine in (pair.engine, pair.plain)]
        if kind != "copy_slot":
            same(*results)


def test_a_call_that_cannot_be_meant_is_refused(pair: Pair) -> None:
    engine = pair.engine
    for call in (
        lambda: engine.prefill(SLOTS, [3]),
        lambda: engine.decode([3], [0]),
        lambda: engine.copy_slot(0, -1, 1),
    ):
        with pytest.raises(RequestError):  # which calls: test_step_inputs.py
            call()


def test_closing_gives_everything_back_and_keeps_the_kernels(pair: Pair, tmp_path: Path) -> None:
    for slot in range(2):
        pair.engine.prefill(slot, [5, 6])
    pair.engine.decode([3, 4], [2, 2])
    assert pair.cuda.memory and pair.cuda.graphs
    pair.engine.close()
    assert not pair.cuda.memory and not pair.cuda.graphs and not pair.cuda.streams
    kept = list((tmp_path / "cache").rglob("*.bin"))
    assert [path.read_bytes() for path in kept] == [b"new kept"]
