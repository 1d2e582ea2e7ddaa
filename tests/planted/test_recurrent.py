"""Defects of recurrent state, found by the evidence of serving: in every way of use, and under pressure.

The engine has both kinds of state, as a model with short convolutions has, or recurrent state alone. Its bookkeeping of
positions (:mod:`engines.state_slots`) is sound and refuses nothing: only tokens can show that a state is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from engines.protocol import Entry, FloatArray, Result, Wanted
from engines.sequences import Sequences, SlotEntry
from engines.step_inputs import StepPiece
from evals.check import Outcome
from evals.kinds.serving import (
    ServingBounds,
    ServingSettings,
    pressure_check,
    pressure_problems,
    served_checks,
    served_problems,
)
from evals.kinds.serving.measure import served_items
from evals.kinds.serving.pressure import under_pressure
from evals.kinds.serving.served_log import Streams
from pipeline.stages.answering import CoreAnswerer
from runtime.wire.limits import Limits
from tapeout.state import NO_SLOT
from tests.chain_engine import BEGIN, ChainEngine

SEQUENCES, MAX_TOKENS, BLOCK, VOCAB = 6, 128, 16, 211
TEXT = [number * number * 7 % VOCAB for number in range(4001)]
SETTINGS = ServingSettings()


@pytest.fixture(params=[True, False], ids=["blocks and slots", "slots alone"])
def paged(request: pytest.FixtureRequest) -> bool:
    return request.param


def opened_by(
    kind: type[Sequences] = Sequences,
    engine: type[ChainEngine] = ChainEngine,
    sequences: int = SEQUENCES,
    paged: bool = True,
) -> Sequences:
    blocks, slots = sequences * MAX_TOKENS // BLOCK * paged, 2 * sequences
    return kind(engine(blocks=blocks, slots=slots, block_tokens=BLOCK, max_tokens=MAX_TOKENS, vocab_size=VOCAB))


def failed(paged: bool, engine: type[ChainEngine] = ChainEngine) -> set[str]:
    """The checks of a verdict that fail."""

    def opened(sequences: int = SEQUENCES) -> Sequences:
        return opened_by(engine=engine, sequences=sequences, paged=paged)

    items = served_items(SETTINGS, None, opened(), lambda: opened(SEQUENCES + 1), TEXT)
    assert served_problems("report", items, SEQUENCES, MAX_TOKENS) == []
    pressure = under_pressure(
        opened(),
        lambda engine, blocks: CoreAnswerer(engine, Limits(), blocks=blocks),
        lambda tokens: "",
        Streams(TEXT),
        SETTINGS,
        [],
    )
    assert pressure.scarce == paged
    assert paged or pressure_problems("report", pressure) == []  # few run at once here, so blocks suffice
    bounds = ServingBounds()
    checks = (*served_checks(items, bounds), pressure_check(pressure, bounds))
    return {check.name for check in checks if check.outcome is not Outcome.PASS}


class KeptStates(ChainEngine):
    """A sequence begins with the state that its slot was left with."""

    def first_state(self, slot: int) -> int:
        return int(self.recurrent[slot]) or BEGIN


class EarlySnapshots(ChainEngine):
    """A snapshot is taken before the last of its tokens."""

    def _feed(self, piece: StepPiece) -> list[FloatArray]:
        if piece.snapshot == NO_SLOT:
            return super()._feed(piece)
        last = len(piece.tokens) - 1
        early = piece._replace(tokens=piece.tokens[:last], positions=[p for p in piece.positions if p < last])
        late = piece._replace(
            tokens=piece.tokens[last:],
            start=piece.start + last,
            positions=[p - last for p in piece.positions if p >= last],
            snapshot=NO_SLOT,
        )
        rows = super()._feed(early) + super()._feed(late)
        self.slots.hold(piece.snapshot, piece.start + len(piece.tokens))
        return rows


class NeighboursStates(ChainEngine):
    """Sequences that go on in one step have the states of each other."""

    def step(self, batch: Sequence[Entry]) -> list[Result]:
        going = [entry.slot for entry in batch if entry.start]
        self.recurrent[going] = np.roll(self.recurrent[going], 1)
        return super().step(batch)


class StaleCopies(Sequences):
    """The copy of a state stays where its sequence goes back to before it, and other tokens follow."""

    def _entry(self, each: SlotEntry, wanted: Wanted) -> Entry:
        copied = self._states[each.slot].copied
        entry = super()._entry(each, wanted)
        self._states[each.slot].copied = copied
        return entry


def test_sound_recurrent_state(paged: bool) -> None:
    assert failed(paged) == set()


def test_a_slot_that_is_not_reset_when_another_request_takes_it(paged: bool) -> None:
    assert {"serving_kl", "serving_answers"} <= failed(paged, KeptStates)


def test_a_snapshot_that_is_taken_one_token_too_early(paged: bool) -> None:
    assert {"serving_kl", "serving_answers"} <= failed(paged, EarlySnapshots)


def test_states_of_a_neighbour(paged: bool) -> None:
    assert {"serving_kl", "serving_answers"} <= failed(paged, NeighboursStates)


def test_a_stale_copy_after_going_back() -> None:
    """It is of what evidence feeds engines with. Only one that begins again with a single token meets it."""

    def chosen(kind: type[Sequences]) -> int:
        sequences = opened_by(kind)
        sequences.prefill(0, TEXT[:40])  # a copy is kept there
        sequences.prefill(0, TEXT[100:101])
        for position in range(1, 50):
            sequences.decode([TEXT[100 + position]], [position])
        return int(sequences.decode([TEXT[145]], [45]).argmax())

    assert chosen(StaleCopies) != chosen(Sequences) == int(opened_by(Sequences).prefill(0, TEXT[100:146]).argmax())
