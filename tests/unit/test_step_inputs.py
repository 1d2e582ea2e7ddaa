"""What calls are fed: refused where they cannot be meant, and cut into pieces that together are the whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.protocol import Entry
from engines.sequences import Sequences
from engines.step_inputs import runs
from tapeout.errors import RequestError
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
    batch = [
        Entry(range(count), start, [number], "logits", positions)
        for number, (count, start, positions) in enumerate(zip(counts, range(10, 100), wanted, strict=False))
    ]
    fed: list[list[int]] = [[] for _ in counts]
    found: list[list[int]] = [[] for _ in counts]
    for run in runs(batch, [None] * len(batch), most):
        assert 1 <= sum(len(piece.tokens) for piece in run) <= most
        for piece in run:
            assert piece.start == batch[piece.entry].start + len(fed[piece.entry])
            found[piece.entry] += [piece.tokens[position] for position in piece.positions]
            fed[piece.entry] += piece.tokens
    assert fed == [list(range(count)) for count in counts] and found == wanted
