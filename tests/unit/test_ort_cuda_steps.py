"""Bookkeeping of steps for PagedAttention: buckets, bounds, slot mapping and padding, of any courses of sequences."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.bundle import BLOCK_TABLE, BLOCK_TOKENS, OFFSETS, SLOT_MAPPING, STARTS
from engines.step_inputs import StepPiece
from engines.targets.ort_cuda.steps import (
    ALIGNMENT,
    BATCHES,
    MAX_BATCH,
    NO_WRITE,
    LengthBounds,
    bucket_of,
    buckets,
    bytes_of,
    exact_bounds,
    laid_out,
    require_bounds,
    shapes,
    write,
)
from tapeout.errors import ResourceError

MAX_TOKENS = 5000
COLUMNS = -(-MAX_TOKENS // BLOCK_TOKENS)
PAD = 10**6


@st.composite
def runs(draw: st.DrawFn, most: int = 40) -> list[StepPiece]:
    """Sequences of their own blocks, in an order of blocks that means nothing."""
    pieces: list[StepPiece] = []
    order = np.random.default_rng(draw(st.integers(0, 99))).permutation(40 * COLUMNS)
    for number in range(draw(st.integers(1, 8))):
        count = draw(st.integers(1, most))
        start = draw(st.integers(0, MAX_TOKENS - count))
        blocks = order[number * COLUMNS : (number + 1) * COLUMNS][: -(-(start + count) // BLOCK_TOKENS)].tolist()
        tokens = draw(st.lists(st.integers(0, 999), min_size=count, max_size=count))
        positions = sorted(draw(st.sets(st.integers(0, count - 1), max_size=3)))
        pieces.append(StepPiece(number, tokens, start, blocks, positions, -1, -1))
    return pieces


@given(runs(), st.integers(0, 3))
def test_every_token_is_written_where_its_sequence_lies(run: list[StepPiece], padding: int) -> None:
    tokens, entries = sum(len(piece.tokens) for piece in run), len(run)
    wanted = shapes(tokens + padding, entries + padding, 30, COLUMNS)
    memory = np.full(bytes_of(wanted), 0xAB, np.uint8)
    places = laid_out(memory, wanted)
    arrays = {name: array for name, (_, array) in places.items()}
    count = write(arrays, run, PAD)
    offsets, slots, row = arrays[OFFSETS], arrays[SLOT_MAPPING], 0
    assert count == sum(len(piece.positions) for piece in run)
    assert offsets[0] == 0 and offsets[-1] == tokens + padding and (np.diff(offsets) > 0).all()
    expected_positions: list[int] = []
    for number, piece in enumerate(run):
        assert arrays[STARTS][number] == piece.start and offsets[number] == row
        assert arrays[BLOCK_TABLE][number, : len(piece.blocks)].tolist() == piece.blocks
        expected_positions += [row + position for position in piece.positions]
        for index, token in enumerate(piece.tokens):
            place = piece.start + index
            assert arrays["input_ids"][0, row] == token and arrays["position_ids"][0, row] == place
            assert slots[row] == piece.blocks[place // BLOCK_TOKENS] * BLOCK_TOKENS + place % BLOCK_TOKENS
            row += 1
    assert arrays["logit_positions"][:count].tolist() == expected_positions
    # Padding writes nothing, sees a block of its own, and is one token of one sequence a row.
    assert (slots[tokens:] == NO_WRITE).all() and (arrays[BLOCK_TABLE][entries:] == PAD).all()
    assert (arrays[STARTS][entries:] == 0).all() and (arrays["input_ids"][0, tokens:] == 0).all()
    assert len(set(slots[:tokens].tolist())) == tokens


@given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 300))
def test_arrays_of_a_step_do_not_overlap_and_are_aligned(tokens: int, entries: int, wanted: int) -> None:
    every = shapes(tokens, entries, wanted, COLUMNS)
    memory = np.zeros(bytes_of(every), np.uint8)
    end = 0
    for name, (at, array) in laid_out(memory, every).items():
        assert at % ALIGNMENT == 0 and at >= end and array.shape == every[name] and array.flags.c_contiguous
        end = at + array.nbytes
    assert end <= len(memory)


@given(st.integers(1, 40000))
def test_bounds_of_buckets_cover_every_length_once(max_tokens: int) -> None:
    bounds = [bucket.bounds for bucket in buckets(max_tokens, [1])]
    assert bounds[0].least == 1 and bounds[-1].tokens == max_tokens
    assert all(after.least == before.tokens + 1 for before, after in pairwise(bounds))


@given(runs(most=1))
def test_a_decode_step_runs_in_the_smallest_bucket_that_holds_it(run: list[StepPiece]) -> None:
    known = buckets(MAX_TOKENS)
    bucket = bucket_of(run, known)
    assert bucket is not None and bucket.rows >= len(run)
    require_bounds(bucket.bounds, run)
    assert not [rows for rows in BATCHES if len(run) <= rows < bucket.rows]
    others = [one for one in known if one.rows == bucket.rows and one != bucket]
    for other in others:
        with pytest.raises(ResourceError, match="new tokens"):
            require_bounds(other.bounds, run)


@given(runs())
def test_exact_bounds_hold_and_smaller_ones_do_not(run: list[StepPiece]) -> None:
    bounds = exact_bounds(run)
    require_bounds(bounds, run)
    for wrong in (
        bounds._replace(new_tokens=bounds.new_tokens - 1),
        bounds._replace(tokens=bounds.tokens - 1),
        bounds._replace(least=bounds.least + 1),
    ):
        with pytest.raises(ResourceError):
            require_bounds(wrong, run)
    if bounds.new_tokens > 1:
        assert bucket_of(run, buckets(MAX_TOKENS)) is None


def test_more_sequences_than_a_bucket_has_are_not_captured() -> None:
    run = [StepPiece(n, [1], 5, [n], [0], -1, -1) for n in range(5)]
    assert bucket_of(run, buckets(100, [1, 4])) is None
    assert max(BATCHES) == MAX_BATCH == 256
    assert buckets(100, [4])[0].bounds == LengthBounds(1, 100, 1)
