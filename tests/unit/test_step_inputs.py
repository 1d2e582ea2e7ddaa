"""What a step is fed: refused where it cannot be meant, and laid out as every engine binds it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.sequences import Sequences
from engines.step_inputs import check_copy, decode_inputs, prefill_inputs
from tapeout.errors import RequestError
from tests.fake_engine import HistoryEngine

SLOTS, VOCAB_SIZE, MAX_TOKENS = 4, 32, 16


@pytest.fixture
def engine() -> Sequences:
    return HistoryEngine(VOCAB_SIZE, slots=SLOTS, max_tokens=MAX_TOKENS)


def prefill(
    engine: Sequences, slot: int, tokens: list[int], start: int = 0, positions: list[int] | None = None
) -> object:
    return prefill_inputs(engine, slot, tokens, start, positions)


def decode(engine: Sequences, tokens: list[int], lengths: list[int], first_slot: int = 0) -> object:
    return decode_inputs(engine, tokens, lengths, first_slot)


BAD_CALLS: dict[str, tuple[Callable[[Sequences], object], str]] = {
    "no tokens": (lambda e: prefill(e, 0, []), "at least one token"),
    "a slot that is not there": (lambda e: prefill(e, SLOTS, [3]), "4 slots"),
    "a negative slot": (lambda e: prefill(e, -1, [3]), "4 slots"),
    "a negative start": (lambda e: prefill(e, 0, [3], start=-1), "16 positions"),
    "more tokens than positions": (lambda e: prefill(e, 0, [3] * (MAX_TOKENS + 1)), "16 positions"),
    "tokens past the last position": (lambda e: prefill(e, 0, [3, 3], start=MAX_TOKENS - 1), "16 positions"),
    "logits of a token that was not fed": (lambda e: prefill(e, 0, [3, 4], positions=[2]), "positions 0 to 1"),
    "a negative position": (lambda e: prefill(e, 0, [3, 4], positions=[-1]), "positions 0 to 1"),
    "a token outside the vocabulary": (lambda e: prefill(e, 0, [3, VOCAB_SIZE]), "0 to 31"),
    "a negative token": (lambda e: decode(e, [-1], [3]), "0 to 31"),
    "no batch entries": (lambda e: decode(e, [], []), "one length per token"),
    "a length too few": (lambda e: decode(e, [3, 3], [1]), "one length per token"),
    "more batch entries than slots": (lambda e: decode(e, [3] * (SLOTS + 1), [1] * (SLOTS + 1)), "4 slots"),
    "batch entries past the last slot": (lambda e: decode(e, [3, 3], [1, 1], first_slot=SLOTS - 1), "4 slots"),
    "a slot that holds nothing": (lambda e: decode(e, [3], [0]), "1 to 15 positions"),
    "a slot that is full": (lambda e: decode(e, [3], [MAX_TOKENS]), "1 to 15 positions"),
    "a copy from nowhere": (lambda e: check_copy(e, SLOTS, 0, 1), "4 slots"),
    "a copy to nowhere": (lambda e: check_copy(e, 0, -1, 1), "4 slots"),
    "a copy longer than a slot": (lambda e: check_copy(e, 0, 1, MAX_TOKENS + 1), "16 positions"),
}


@pytest.mark.parametrize(("call", "expected"), BAD_CALLS.values(), ids=BAD_CALLS)
def test_a_call_that_cannot_be_meant_is_refused(
    engine: Sequences, call: Callable[[Sequences], object], expected: str
) -> None:
    with pytest.raises(RequestError) as caught:
        call(engine)
    assert caught.value.found and expected in caught.value.expected


def test_a_prefill_stands_behind_its_start_and_asks_for_its_last_position(engine: Sequences) -> None:
    step = prefill_inputs(engine, SLOTS - 1, [5, 6, 7], MAX_TOKENS - 3, None)
    assert (step.ids.tolist(), step.position_ids.tolist(), step.logit_positions.tolist()) == (
        [[5, 6, 7]],
        [[13, 14, 15]],
        [2],
    )
    assert prefill_inputs(engine, 0, [5, 6, 7], 0, [2, 0, 2]).logit_positions.tolist() == [2, 0, 2]
    assert prefill_inputs(engine, 0, [5], 0, []).logit_positions.shape == (0,)


def test_a_decode_writes_each_token_behind_its_own_length(engine: Sequences) -> None:
    step = decode_inputs(engine, [5, 6], [1, MAX_TOKENS - 1], SLOTS - 2)
    assert (step.ids.tolist(), step.position_ids.tolist(), step.logit_positions.tolist()) == (
        [[5], [6]],
        [[1], [15]],
        [0, 1],
    )


def test_what_engines_bind_by_address_is_contiguous(engine: Sequences) -> None:
    every_other = np.arange(12, dtype=np.int64)[::2]
    prefill = prefill_inputs(engine, 0, every_other, 0, every_other[:3])  # type: ignore[arg-type]
    decode = decode_inputs(engine, every_other[:3], every_other[1:4], 0)  # type: ignore[arg-type]
    for step in (prefill, decode):
        assert all(part.flags.c_contiguous for part in (step.ids, step.starts, step.logit_positions, step.position_ids))


@given(st.data())
def test_pieces_hold_every_token_once_and_every_position_in_its_place(data: st.DataObject) -> None:
    count, most = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 14))
    start = data.draw(st.integers(0, MAX_TOKENS - count))
    wanted = data.draw(st.lists(st.integers(0, count - 1)))
    engine = HistoryEngine(VOCAB_SIZE, slots=SLOTS, max_tokens=MAX_TOKENS)
    step = prefill_inputs(engine, 0, list(range(count)), start, wanted)
    fed: list[int] = []
    found = np.full(len(wanted), -1)
    for piece, places in step.pieces(most):
        assert 1 <= piece.ids.shape[1] <= most and piece.starts.tolist() == [start + len(fed)]
        found[places] = piece.ids[0, piece.logit_positions]
        fed += piece.ids[0].tolist()
    assert fed == list(range(count)) and found.tolist() == wanted
