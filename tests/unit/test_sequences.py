"""Sequences over every kind of state: whatever was computed before, logits are those of the tokens alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engines.protocol import Entry, Result
from engines.sequences import Sequences, SlotEntry
from tapeout.errors import RequestError
from tests.chain_engine import ChainEngine

SLOTS, MOST = 3, 24
# Whether there is paged state, and how many slots of recurrent state: a copy for each sequence, for one, and for none.
KINDS = {
    "paged": (True, 0),
    "recurrent": (False, 2 * SLOTS),
    "both": (True, 2 * SLOTS),
    "one copy": (True, SLOTS + 1),
    "no copies": (False, SLOTS),
}


def opened(kind: str) -> tuple[ChainEngine, Sequences]:
    paged, slots = KINDS[kind]
    engine = ChainEngine(blocks=SLOTS * MOST // 4 if paged else 0, slots=slots, max_tokens=MOST)
    return engine, Sequences(engine, SLOTS)


def expected(engine: ChainEngine, tokens: list[int]) -> list[int]:
    """The likeliest token after each."""
    return [engine.alone(tokens[: end + 1], 1)[0] for end in range(len(tokens))]


# What a call does to which slot: begin again, go on, go back, copy from another.
CALLS = st.lists(
    st.tuples(
        st.sampled_from(("prefill", "decode", "share", "copy")),
        st.integers(0, SLOTS - 1),
        st.integers(0, SLOTS - 1),
        st.integers(0, MOST),
        st.lists(st.integers(0, 200), min_size=1, max_size=6),
        st.integers(0, 6),
    ),
    max_size=12,
)

# Begun again with one token, of which no copy is kept, and back to where the copy of the tokens before was.
BEGUN_AGAIN = [
    ("prefill", 0, 0, 0, [1, 2], 0),
    ("prefill", 0, 0, 0, [7], 0),
    ("decode", 0, 0, 1, [8], 0),
    ("decode", 0, 0, 2, [9], 0),
    ("decode", 0, 0, 2, [9], 0),
]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(calls=CALLS)
@example(calls=BEGUN_AGAIN)
def test_a_sequence_goes_on_at_any_position_that_it_holds(kind: str, calls: list[tuple[object, ...]]) -> None:
    engine, sequences = opened(kind)
    held: list[list[int]] = [[] for _ in range(SLOTS)]
    for call, slot, source, wanted, tokens, resumed in calls:
        assert isinstance(slot, int) and isinstance(source, int) and isinstance(wanted, int)
        assert isinstance(tokens, list) and isinstance(resumed, int)
        shares = call in ("share", "copy") and slot != source
        before = held[source if shares else slot]
        start = min(wanted, len(before), MOST - len(tokens))
        whole = [*before[:start], *tokens]
        if call == "copy" and shares:
            sequences.copy_slot(source, slot, start)
        elif call == "decode" and start:
            tokens, whole = tokens[:1], whole[: start + 1]
            assert sequences.decode(tokens, [start], first_slot=slot).argmax() == expected(engine, whole)[-1]
        else:
            rest = start + resumed if resumed and start + resumed <= len(whole) else None
            entry = SlotEntry(slot, tokens, start, range(len(tokens)), source if shares else None, rest)
            (rows,) = sequences.feed([entry])
            assert rows.argmax(1).tolist() == expected(engine, whole)[start:]
        if call == "copy" and shares:
            held[slot] = [*before[:start]]
        elif shares or before[:start] + tokens != before[: start + len(tokens)]:  # else what lies behind holds
            held[slot] = [*before[:start], *tokens]
        if call == "share" and shares:
            held[slot] = []  # blocks are shared for one step


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("resumed", [3, 9, None])
def test_several_sequences_go_on_from_one_in_one_step(kind: str, resumed: int | None) -> None:
    """Also those that are fed again from an earlier position: they write no block that they share."""
    engine, sequences = opened(kind)
    tokens = list(range(12))
    sequences.feed([SlotEntry(2, tokens, 0, (), None, resumed)])
    rows = sequences.feed([SlotEntry(0, [50], 9, None, 2), SlotEntry(1, [51, 52], 9, None, 2)])
    found = [int(row.argmax()) for row in rows]
    assert found == [expected(engine, [*tokens[:9], *more])[-1] for more in ([50], [51, 52])]


@pytest.mark.parametrize("kind", ["recurrent", "both"])
def test_what_a_slot_does_not_hold_is_refused(kind: str) -> None:
    _, sequences = opened(kind)
    sequences.prefill(0, [1, 2, 3])
    with pytest.raises(RequestError, match="slot 0 holds 3 positions, and the tokens begin at position 5"):
        sequences.prefill(0, [4], start=5)


class Counted(ChainEngine):
    """``counts``: tokens of each step."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.counts: list[int] = []

    def step(self, batch: Sequence[Entry]) -> list[Result]:
        self.counts.append(sum(len(entry.tokens) for entry in batch))
        return super().step(batch)


def test_few_tokens_are_fed_again() -> None:
    """A sequence that goes on at several places after its prompt is fed from there on, not from the beginning."""
    engine = Counted(blocks=SLOTS * MOST // 4, slots=2 * SLOTS, max_tokens=MOST)
    sequences, counts = Sequences(engine), engine.counts
    sequences.prefill(0, list(range(10)))
    for position in (10, 11, 10, 11):
        sequences.decode([7], [position])
    assert counts == [10, 1, 1, 1, 1]
    for tokens in ([1, 2], [3, 4, 5], [6]):  # several ends of one text, each from the copy
        sequences.prefill(0, tokens, start=10)
    assert counts[5:] == [2, 3, 1]
    sequences.decode([7], [8])  # before the copy, which moves there
    sequences.decode([8], [8])
    assert counts[8:] == [9, 1]
    sequences.feed([SlotEntry(1, list(range(12)), 0, (), None, 7)])
    rows = sequences.feed([SlotEntry(2, [3, 4], 7, None, 1)])
    assert counts[10:] == [12, 2] and np.isfinite(rows[0]).all()
