"""What calls are fed: refused where they cannot be meant, and cut into pieces that together are the whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.protocol import Entry
from engines.sequences import Sequences
from engines.state_slots import UNKNOWN, StateSlots
from engines.step_inputs import check, runs
from tapeout.errors import RequestError
from tapeout.state import NO_SLOT
from tests.chain_engine import ChainEngine
from tests.fake_engine import HistoryEngine

SLOTS, VOCAB_SIZE, MAX_TOKENS = 4, 32, 16


@pytest.fixture
def engine() -> Sequences:
    return Sequences(HistoryEngine(VOCAB_SIZE, slots=SLOTS, max_tokens=MAX_TOKENS))


BAD_CALLS: dict[str, tuple[Callable[[Sequences], object], str]] = {
    "no tokens": (lambda e: e.prefill(0, []), "at least one token"),
    "a slot that is not there": (lambda e: e.prefill(SLOTS, [3]), "slots 0 to 3"),
    "a negative slot": (lambda e: e.prefill(-1, [3]), "slots 0 to 3"),
    "a negative start": (lambda e: e.prefill(0, [3], start=-1), "16 positions"),
    "more tokens than positions": (lambda e: e.prefill(0, [3] * (MAX_TOKENS + 1)), "16 positions"),
    "tokens past the last position": (lambda e: e.prefill(0, [3, 3], start=MAX_TOKENS - 1), "16 positions"),
    "logits of a token that was not fed": (lambda e: e.prefill(0, [3, 4], positions=[2]), "positions from 0 to 1"),
    "a negative position": (lambda e: e.prefill(0, [3, 4], positions=[-1]), "positions from 0 to 1"),
    "positions that descend": (lambda e: e.prefill(0, [3, 4], positions=[1, 0]), "ascending"),
    "a token outside the vocabulary": (lambda e: e.prefill(0, [3, VOCAB_SIZE]), "0 to 31"),
    "a negative token": (lambda e: e.decode([-1], [3]), "0 to 31"),
    "no batch entries": (lambda e: e.decode([], []), "slots 0 to 3"),
    "a length too few": (lambda e: e.decode([3, 3], [1]), "one length per token"),
    "more batch entries than slots": (lambda e: e.decode([3] * (SLOTS + 1), [1] * (SLOTS + 1)), "slots 0 to 3"),
    "batch entries past the last slot": (lambda e: e.decode([3, 3], [1, 1], first_slot=SLOTS - 1), "slots 0 to 3"),
    "a slot that holds nothing": (lambda e: e.decode([3], [0]), "holds at least one position"),
    "a slot that is full": (lambda e: e.decode([3], [MAX_TOKENS]), "16 positions"),
    "a copy from nowhere": (lambda e: e.copy_slot(SLOTS, 0, 1), "slots 0 to 3"),
    "a copy to nowhere": (lambda e: e.copy_slot(0, -1, 1), "slots 0 to 3"),
    "a copy longer than a slot": (lambda e: e.copy_slot(0, 1, MAX_TOKENS + 1), "at most 16"),
}


@pytest.mark.parametrize(("call", "expected"), BAD_CALLS.values(), ids=BAD_CALLS)
def test_a_call_that_cannot_be_meant_is_refused(
    engine: Sequences, call: Callable[[Sequences], object], expected: str
) -> None:
    with pytest.raises(RequestError) as caught:
        call(engine)
    assert caught.value.found and expected in caught.value.expected


@given(st.data())
def test_pieces_hold_every_token_once_and_every_position_in_its_place(data: st.DataObject) -> None:
    counts = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=5))
    most = data.draw(st.integers(1, 14))
    wanted = [sorted(data.draw(st.sets(st.integers(0, count - 1)))) for count in counts]
    kept = [sorted(data.draw(st.sets(st.integers(1, count), max_size=3))) for count in counts]
    batch = [
        Entry(range(count), 10 + number, [number], "logits", positions, slot=number)
        for number, (count, positions) in enumerate(zip(counts, wanted, strict=True))
    ]
    batch = [
        entry._replace(snapshots=[(entry.start + place, 100 + place) for place in places])
        for entry, places in zip(batch, kept, strict=True)
    ]
    fed: list[list[int]] = [[] for _ in counts]
    found: list[list[int]] = [[] for _ in counts]
    for run in runs(batch, [None] * len(batch), most):
        assert 1 <= sum(len(piece.tokens) for piece in run) <= most
        assert len({piece.entry for piece in run}) == len(run), "state is copied between two pieces of an entry"
        for piece in run:
            assert piece.start == batch[piece.entry].start + len(fed[piece.entry])
            found[piece.entry] += [piece.tokens[position] for position in piece.positions]
            fed[piece.entry] += piece.tokens
            assert piece.slot == piece.entry
            if piece.snapshot != NO_SLOT:
                assert piece.snapshot == 100 + len(fed[piece.entry])
                kept[piece.entry].remove(len(fed[piece.entry]))
    assert fed == [list(range(count)) for count in counts] and found == wanted
    assert not any(kept), "a snapshot is left out"


@pytest.mark.parametrize("entry", [Entry([3], 0, [0], slot=0), Entry([3], 0, [0], snapshots=[(1, 0)])])
def test_an_engine_without_recurrent_state_refuses_what_names_a_slot(entry: Entry) -> None:
    """Planted: it ran the entry, and whoever resumed at that slot would have read nothing."""
    engine = HistoryEngine(VOCAB_SIZE, slots=SLOTS, max_tokens=MAX_TOKENS)
    (result,) = engine.step([entry])
    assert result.error is not None and result.error.expected == "none: this engine has no recurrent state"
    with pytest.raises(RequestError, match=r"state slots \[0, 1\]"):
        engine.copy_state(0, 1)


BAD_STATE: dict[str, tuple[Entry, str]] = {
    "no slot": (Entry([3], 0, [0]), "slots 0 to 3"),
    "a slot that is not there": (Entry([3], 0, [0], slot=4), "slots 0 to 3"),
    "a snapshot in no slot": (Entry([3], 0, [0], slot=0, snapshots=[(1, 4)]), "slots 0 to 3"),
    "a snapshot in its own slot": (Entry([3], 0, [0], slot=0, snapshots=[(1, 0)]), "nothing else in this step"),
    "a slot that another writes": (Entry([3], 0, [0], slot=3), "nothing else in this step"),
    "a snapshot before its tokens": (Entry([3, 4], 2, [0], slot=1, snapshots=[(2, 0)]), "after 2, up to 4"),
    "a snapshot behind its tokens": (Entry([3, 4], 2, [0], slot=1, snapshots=[(5, 0)]), "after 2, up to 4"),
    "snapshots that descend": (Entry([3, 4], 0, [0], slot=1, snapshots=[(2, 0), (1, 2)]), "ascending"),
    "state of fewer positions": (Entry([3], 3, [0], slot=1), "exactly the positions before"),
    "state of more positions": (Entry([3], 1, [0], slot=1), "exactly the positions before"),
    "state that a failed step left": (Entry([3], 1, [0], slot=2), "exactly the positions before"),
}


@pytest.mark.parametrize(("entry", "expected"), BAD_STATE.values(), ids=BAD_STATE)
def test_state_that_an_entry_cannot_mean_is_refused(entry: Entry, expected: str) -> None:
    """Slot 1 holds two positions."""
    engine = ChainEngine(blocks=4, slots=4)
    engine.step([Entry([5, 6], 0, [3], slot=1)])
    engine.slots.hold(2, UNKNOWN)
    other = Entry([9], 0, [2], slot=3)
    first, second = check([other, entry], engine.capabilities, engine.slots)
    assert first is None and second is not None and expected in second.expected
    assert check([other, Entry([3], 2, [3], slot=1)], engine.capabilities, engine.slots) == [None, None]


def test_a_copied_slot_holds_what_its_source_held() -> None:
    slots = StateSlots(2)
    slots.hold(0, 7)
    slots.copy(0, 1)
    assert slots.unfit(Entry([3], 7, [], slot=1), set()) is None
    with pytest.raises(RequestError, match=r"state slots \[0, 2\]"):
        slots.copy(0, 2)
