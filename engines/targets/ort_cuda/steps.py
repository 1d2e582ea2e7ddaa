"""What a step feeds to a graph with PagedAttention: decode buckets, bounds, and inputs laid out in one buffer.

N  rows of a run (tokens and padding)      B  sequences of a run      P  rows whose logits are wanted      M  columns
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engines.bundle import BLOCK_TABLE, BLOCK_TOKENS, OFFSETS, SLOT_MAPPING, STARTS
from engines.step_inputs import StepPiece
from tapeout.errors import ResourceError

MAX_BATCH = 256  # sequences of a step: PagedAttention sums their lengths in one block of so many threads
BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
FIRST_BOUND = 1024  # tokens of a sequence; each further bound is twice as large
ALIGNMENT = 256  # bytes: of the arrays in a buffer, as CUDA aligns its own allocations
NO_WRITE = -1  # in the slot mapping
_ELEMENTS: Mapping[str, Any] = {"input_ids": np.int64, "logit_positions": np.int64, "position_ids": np.int64}


class LengthBounds(NamedTuple):
    """``attention_metadata``. ``tokens``: of a sequence after the step. ``least``: of the longest sequence.

    They need not be exact. A ``new_tokens`` or ``tokens`` that is too small omits attention without an error, and a
    captured graph keeps those of its capture.
    """

    new_tokens: int
    tokens: int
    least: int


class DecodeBucket(NamedTuple):
    """A captured decode step: ``rows`` sequences of one new token, under ``bounds``."""

    rows: int
    bounds: LengthBounds


def exact_bounds(run: Sequence[StepPiece]) -> LengthBounds:
    longest = max(piece.start + len(piece.tokens) for piece in run)
    return LengthBounds(max(len(piece.tokens) for piece in run), longest, longest)


def require_bounds(bounds: LengthBounds, run: Sequence[StepPiece]) -> None:
    """:class:`ResourceError` where a run does not keep bounds: its attention would be wrong without an error."""
    found = exact_bounds(run)
    if found.new_tokens > bounds.new_tokens or found.tokens > bounds.tokens or found.tokens < bounds.least:
        raise ResourceError(
            f"a step of {found.new_tokens} new tokens and {found.tokens} in all a sequence",
            expected=f"at most {bounds.new_tokens} new ones, and {bounds.least} to {bounds.tokens} in all",
            remedy="this is a defect of the engine; please report it",
        )


def buckets(max_tokens: int, batches: Sequence[int] = BATCHES) -> list[DecodeBucket]:
    """All that are captured, for sequences of up to ``max_tokens``.

    >>> [bucket.bounds for bucket in buckets(3000, [8])]
    [LengthBounds(new_tokens=1, tokens=1024, least=1), LengthBounds(new_tokens=1, tokens=2048, least=1025), \
LengthBounds(new_tokens=1, tokens=3000, least=2049)]
    """
    ends = [min(FIRST_BOUND, max_tokens)]
    while ends[-1] < max_tokens:
        ends.append(min(2 * ends[-1], max_tokens))
    bounds = [LengthBounds(1, end, before + 1) for before, end in zip([0, *ends], ends, strict=False)]
    return [DecodeBucket(rows, bound) for rows in batches for bound in bounds]


def bucket_of(run: Sequence[StepPiece], known: Sequence[DecodeBucket]) -> DecodeBucket | None:
    """The smallest that a run fits; None for a run that is not one token each of at most as many sequences."""
    if any(len(piece.tokens) != 1 for piece in run):
        return None
    longest = max(piece.start for piece in run) + 1
    fitting = (b for b in known if b.rows >= len(run) and b.bounds.least <= longest <= b.bounds.tokens)
    return min(fitting, default=None)


def shapes(tokens: int, entries: int, wanted: int, columns: int) -> dict[str, tuple[int, ...]]:
    """Of the inputs of a run on the GPU."""
    return {
        "input_ids": (1, tokens),
        "position_ids": (1, tokens),
        "logit_positions": (wanted,),
        OFFSETS: (entries + 1,),
        STARTS: (entries,),
        BLOCK_TABLE: (entries, columns),
        SLOT_MAPPING: (tokens,),
    }


def laid_out(memory: NDArray[np.uint8], wanted: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, NDArray[Any]]]:
    """Arrays of these shapes one after another in ``memory``, each with its offset in bytes."""
    found: dict[str, tuple[int, NDArray[Any]]] = {}
    at = 0
    for name, shape in wanted.items():
        element = np.dtype(_ELEMENTS.get(name, np.int32))
        size = int(np.prod(shape)) * element.itemsize
        found[name] = at, memory[at : at + size].view(element).reshape(shape)
        at += -(-size // ALIGNMENT) * ALIGNMENT
    return found


def bytes_of(wanted: Mapping[str, tuple[int, ...]]) -> int:
    sizes = (int(np.prod(shape)) * np.dtype(_ELEMENTS.get(name, np.int32)).itemsize for name, shape in wanted.items())
    return sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)


def write(arrays: Mapping[str, NDArray[Any]], run: Sequence[StepPiece], pad_block: int) -> int:
    """Fill the arrays of a run; how many of the first ``logit_positions`` are wanted.

    Rows behind the run's own are sequences of one token that nobody wants: they write nothing and see ``pad_block``,
    which no sequence has.
    """
    offsets = [0, *accumulate(len(piece.tokens) for piece in run)]
    tokens, entries = offsets[-1], len(run)
    ids, table, slots = arrays["input_ids"][0], arrays[BLOCK_TABLE], arrays[SLOT_MAPPING]
    starts, positions = arrays[STARTS], np.zeros(len(ids), np.int64)
    ids[tokens:] = 0
    slots[tokens:] = NO_WRITE
    starts[entries:] = 0
    starts[:entries] = [piece.start for piece in run]
    padding = len(starts) - entries
    arrays[OFFSETS][: entries + 1] = offsets
    arrays[OFFSETS][entries + 1 :] = range(tokens + 1, tokens + 1 + padding)
    table[...] = pad_block
    for row, (piece, offset) in enumerate(zip(run, offsets, strict=False)):
        end = offset + len(piece.tokens)
        ids[offset:end] = piece.tokens
        table[row, : len(piece.blocks)] = piece.blocks
        positions[offset:end] = range(piece.start, piece.start + len(piece.tokens))
        blocks = np.asarray(piece.blocks, np.int64)[positions[offset:end] // BLOCK_TOKENS]
        slots[offset:end] = blocks * BLOCK_TOKENS + positions[offset:end] % BLOCK_TOKENS
    if "position_ids" in arrays:
        arrays["position_ids"][0] = positions
    places = [offset + p for piece, offset in zip(run, offsets, strict=False) for p in piece.positions]
    arrays["logit_positions"][: len(places)] = places
    arrays["logit_positions"][len(places) :] = 0
    return len(places)
