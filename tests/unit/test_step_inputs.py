"""What a step is fed: refused where it cannot be meant, and laid out as every engine binds it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.protocol import Engine
from engines.step_inputs import check_copy, decode_inputs, prefill_inputs
from tapeout.errors import BuildError
from tests.fake_engine import HistoryEngine

SLOTS, VOCAB_SIZE, MAX_TOKENS = 4, 32, 16


@pytest.fixture
def engine() -> Engine:
    return HistoryEngine(VOCAB_SIZE, slots=SLOTS, max_tokens=MAX_TOKENS)


def prefill(engine: Engine, slot: int, tokens: list[int], start: int = 0, rows: list[int] | None = None) -> object:
    return prefill_inputs(engine, slot, tokens, start, rows)


def decode(engine: Engine, tokens: list[int], lengths: list[int], first_slot: int = 0) -> object:
    return decode_inputs(engine, tokens, lengths, first_slot)


BAD_CALLS: dict[str, tuple[Callable[[Engine], object], str]] = {
    "no tokens": (lambda e: prefill(e, 0, []), "at least one token"),
    "a slot that is not there": (lambda e: prefill(e, SLOTS, [3]), "4 slots"),
    "a negative slot": (lambda e: prefill(e, -1, [3]), "4 slots"),
    "a negative start": (lambda e: prefill(e, 0, [3], start=-1), "16 positions"),
    "more tokens than positions": (lambda e: prefill(e, 0, [3] * (MAX_TOKENS + 1)), "16 positions"),
    "tokens past the last position": (lambda e: prefill(e, 0, [3, 3], start=MAX_TOKENS - 1), "16 positions"),
    "a row that was not fed": (lambda e: prefill(e, 0, [3, 4], rows=[2]), "rows 0 to 1"),
    "a negative row": (lambda e: prefill(e, 0, [3, 4], rows=[-1]), "rows 0 to 1"),
    "a token outside the vocabulary": (lambda e: prefill(e, 0, [3, VOCAB_SIZE]), "0 to 31"),
    "a negative token": (lambda e: decode(e, [-1], [3]), "0 to 31"),
    "no rows": (lambda e: decode(e, [], []), "one length a token"),
    "a length too few": (lambda e: decode(e, [3, 3], [1]), "one length a token"),
    "more rows than slots": (lambda e: decode(e, [3] * (SLOTS + 1), [1] * (SLOTS + 1)), "4 slots"),
    "rows past the last slot": (lambda e: decode(e, [3, 3], [1, 1], first_slot=SLOTS - 1), "4 slots"),
    "a slot that holds nothing": (lambda e: decode(e, [3], [0]), "1 to 15 positions"),
    "a slot that is full": (lambda e: decode(e, [3], [MAX_TOKENS]), "1 to 15 positions"),
    "a copy from nowhere": (lambda e: check_copy(e, SLOTS, 0, 1), "4 slots"),
    "a copy to nowhere": (lambda e: check_copy(e, 0, -1, 1), "4 slots"),
    "a copy longer than a slot": (lambda e: check_copy(e, 0, 1, MAX_TOKENS + 1), "16 positions"),
}


@pytest.mark.parametrize(("call", "expected"), BAD_CALLS.values(), ids=BAD_CALLS)
def test_a_call_that_cannot_be_meant_is_refused(
    engine: Engine, call: Callable[[Engine], object], expected: str
) -> None:
    with pytest.raises(BuildError) as caught:
        call(engine)
    assert caught.value.found and expected in caught.value.expected


def test_a_prefill_stands_behind_its_start_and_asks_for_its_last_row(engine: Engine) -> None:
    step = prefill_inputs(engine, SLOTS - 1, [5, 6, 7], MAX_TOKENS - 3, None)
    assert (step.ids.tolist(), step.positions.tolist(), step.rows.tolist()) == ([[5, 6, 7]], [[13, 14, 15]], [2])
    assert prefill_inputs(engine, 0, [5, 6, 7], 0, [2, 0, 2]).rows.tolist() == [2, 0, 2]
    assert prefill_inputs(engine, 0, [5], 0, []).rows.shape == (0,)


def test_a_decode_writes_each_token_behind_its_own_length(engine: Engine) -> None:
    step = decode_inputs(engine, [5, 6], [1, MAX_TOKENS - 1], SLOTS - 2)
    assert (step.ids.tolist(), step.positions.tolist(), step.rows.tolist()) == ([[5], [6]], [[1], [15]], [0, 1])


def test_what_engines_bind_by_address_is_contiguous(engine: Engine) -> None:
    every_other = np.arange(12, dtype=np.int64)[::2]
    prefill = prefill_inputs(engine, 0, every_other, 0, every_other[:3])  # type: ignore[arg-type]
    decode = decode_inputs(engine, every_other[:3], every_other[1:4], 0)  # type: ignore[arg-type]
    for step in (prefill, decode):
        assert all(part.flags.c_contiguous for part in (step.ids, step.starts, step.rows, step.positions))


@given(st.data())
def test_pieces_hold_every_token_once_and_every_row_in_its_place(data: st.DataObject) -> None:
    count, most = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 14))
    start = data.draw(st.integers(0, MAX_TOKENS - count))
    rows = data.draw(st.lists(st.integers(0, count - 1)))
    engine = HistoryEngine(VOCAB_SIZE, slots=SLOTS, max_tokens=MAX_TOKENS)
    step = prefill_inputs(engine, 0, list(range(count)), start, rows)
    fed: list[int] = []
    found = np.full(len(rows), -1)
    for piece, places in step.pieces(most):
        assert 1 <= piece.ids.shape[1] <= most and piece.starts.tolist() == [start + len(fed)]
        found[places] = piece.ids[0, piece.rows]
        fed += piece.ids[0].tolist()
    assert fed == list(range(count)) and found.tolist() == rows
