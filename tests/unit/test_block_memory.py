"""Pages of KV blocks: there before they are written, and nothing else changes."""

from __future__ import annotations

import resource

import numpy as np
import pytest

from engines.targets.ort_cpu import buffers
from engines.targets.ort_cpu.buffers import BlockMemory
from tapeout.errors import ResourceError
from tapeout.state import StateBuffer, paged_buffers
from tests.native import makes_pages_ready
from tests.states import attention

BLOCKS, PAGES = 64, 3  # 3 pages of 4 KiB a block and cache
CACHES = list(paged_buffers([attention(layer, 3, 64, "int8") for layer in range(8)], BLOCKS, 64))


def faults_of_writing(memory: BlockMemory, block: int) -> int:
    """Pages that the system had to find while all arrays of a block were written."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for array in memory.arrays.values():
        array[block] = 1
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@makes_pages_ready
def test_blocks_that_are_ready_are_written_without_a_page_fault() -> None:
    """Planted: nothing is made ready, or only the first page."""
    memory = BlockMemory(CACHES)
    memory.make_ready(most=2, end=BLOCKS)
    assert memory.ready == 2
    pages = PAGES * len(CACHES)
    assert faults_of_writing(memory, 0) + faults_of_writing(memory, 1) < pages / 4
    assert faults_of_writing(memory, 2) >= pages


@makes_pages_ready
def test_no_more_is_made_ready_than_asked_for() -> None:
    memory = BlockMemory(CACHES)
    for expected, more in ((2, True), (4, True), (5, False), (5, False)):
        assert memory.make_ready(most=2, end=5) == more
        assert memory.ready == expected
    memory.make_ready(most=10 * BLOCKS, end=10 * BLOCKS)
    assert memory.ready == BLOCKS


@makes_pages_ready
def test_what_blocks_hold_is_not_changed() -> None:
    memory = BlockMemory(
        [StateBuffer("a", (5, 1, 3, 7), "float32"), StateBuffer("b", (5, 2, 3, 7), "float32")]
    )  # blocks that share pages
    rng = np.random.default_rng(0)
    for array in memory.arrays.values():
        array[:] = rng.normal(size=array.shape)
    before = {name: array.copy() for name, array in memory.arrays.items()}
    memory.make_ready(most=5, end=5)
    assert memory.ready == 5
    assert all((memory.arrays[name] == before[name]).all() for name in before)


def test_a_system_that_cannot_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "POPULATE_WRITE", 9999)
    memory = BlockMemory(CACHES)
    assert memory.make_ready(most=2, end=BLOCKS) is False, "who asks again while there is more to do would never end"
    assert memory.ready == BLOCKS and not memory.arrays["0.key"][:2].any()


def test_more_state_than_the_system_has_room_for_is_refused() -> None:
    with pytest.raises(ResourceError, match=r"no room for 4000000000\.0 GB of state") as refused:
        BlockMemory([StateBuffer("0.key", (10**15, 1000), "float32")])
    assert "--slots" in refused.value.remedy


def test_more_slots_than_memory_is_available_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "available_memory", lambda: 3_000_000_000)
    buffers.require_slots(30, 100_000_000)
    with pytest.raises(ResourceError, match=r"31 slots of recurrent state take 3\.1 GB") as refused:
        buffers.require_slots(31, 100_000_000)
    assert refused.value.expected == "at most 3.0 GB, which is available" and "--kv-bytes" in refused.value.remedy
