"""Where everything lies in the one piece of device memory that an engine takes.

M  tokens of a step, at most     P  of them with results, and sequences of a step, at most
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engines.bundle import NEXT_TOKENS
from engines.kernels.cuda import parameters
from engines.kernels.cuda.parameters import ATTENTION_BLOCK, ATTENTION_PART, DRAW
from engines.kernels.cuda.plan import ENDED, LINEAR_ENDED, LINEAR_SUMS, LaunchPlan, PlanOperation

ALIGNMENT = GUARD = 256  # bytes; guards lie between pieces, and at level host a write to one is an error
RUN_TOKENS = 2048  # M
RUN_RESULTS = 256  # P
FEW_TOKENS = 4  # a sequence of up to so many new tokens is cut into parts of its keys
FEW_ROWS = 512  # tokens of such sequences of a step, at most; they come first
BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # sequences that decode together in one graph


@dataclass(frozen=True)
class MemoryPiece:
    name: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Arena:
    """``places``: offsets of values, tensors and inputs by name. ``activations``: the pieces that steps alone use."""

    pieces: tuple[MemoryPiece, ...]
    places: Mapping[str, int]
    activations: tuple[int, int]
    nbytes: int


def arena(plan: LaunchPlan, files: Mapping[str, int], cache: Mapping[str, int], columns: int) -> Arena:
    """``files``: bytes of those that tensors lie in. ``cache``: bytes of tensors of the KV cache.

    ``columns``: of a block table.
    """
    pieces, places = list[MemoryPiece](), dict[str, int]()

    def add(name: str, nbytes: int) -> int:
        end = pieces[-1].offset + pieces[-1].nbytes + GUARD if pieces else GUARD
        pieces.append(MemoryPiece(name, -(-end // ALIGNMENT) * ALIGNMENT, nbytes))
        return pieces[-1].offset

    for name, nbytes in files.items():
        first = add(name, nbytes)
        places |= {tensor: first + stored.offset for tensor, stored in plan.tensors.items() if stored.file == name}
    places |= {name: add(name, nbytes) for name, nbytes in cache.items()}
    activations = len(pieces)
    for number, shared in enumerate(shared_values(plan)):
        size = max(rows_of(plan, name) * plan.values[name].row_bytes for name in shared)
        if NEXT_TOKENS in shared:
            size += RUN_TOKENS  # a byte for each token of a step: whether it is finite
        place = add(f"activations {number}", size)
        places |= dict.fromkeys(shared, place)
    parts = -(-columns * ATTENTION_BLOCK // ATTENTION_PART)
    rows = FEW_ROWS * plan.heads * parts
    places["attention.sums"] = add("sums of attention", 4 * rows * plan.head_size)
    places["attention.rows"] = add("rows of attention", 8 * rows)
    places[LINEAR_SUMS] = add("sums of linears", 4 * parameters.LINEAR_SUMS)
    places[ENDED] = add("ended blocks", 4 * (FEW_ROWS * plan.heads + parameters.LINEAR_PLACES))
    places[LINEAR_ENDED] = places[ENDED] + 4 * FEW_ROWS * plan.heads
    places["inputs"] = add("inputs of a step", inputs_bytes(columns))
    last = pieces[-1]
    end = last.offset + last.nbytes
    return Arena(tuple(pieces), places, (pieces[activations].offset, end), -(-(end + GUARD) // ALIGNMENT) * ALIGNMENT)


def rows_of(plan: LaunchPlan, name: str) -> int:
    return RUN_RESULTS if plan.values[name].wanted else RUN_TOKENS


def inputs_bytes(columns: int) -> int:
    """Of ids, rows, offsets, starts, block tables and draws; each begins at a multiple of 16."""
    numbers = 2 * RUN_RESULTS + 1 + RUN_RESULTS * columns
    return 8 * (RUN_TOKENS + RUN_RESULTS) + 4 * numbers + DRAW.itemsize * RUN_RESULTS + 6 * 16


def shared_values(plan: LaunchPlan) -> list[list[str]]:
    """Values that take turns in one piece of memory: none is written while another is still read.

    The chosen tokens are read by the next step, too, and have a piece of their own.
    """
    last = {name: number for number, one in enumerate(plan.operations) for name in one.pointers.values()}
    first = dict[str, int]()
    for number, operation in enumerate(plan.operations):
        for name in _written(operation):
            first.setdefault(name, number)
    pieces = list[list[str]]()
    for name in sorted((name for name in plan.values if name in first), key=lambda name: first[name]):
        large = rows_of(plan, name) * plan.values[name].row_bytes
        free = [piece for piece in pieces if NEXT_TOKENS not in (name, *piece) and last[piece[-1]] < first[name]]
        if free:
            sizes = {id(piece): max(rows_of(plan, one) * plan.values[one].row_bytes for one in piece) for piece in free}
            min(free, key=lambda piece: abs(sizes[id(piece)] - large)).append(name)
        else:
            pieces.append([name])
    return pieces


def _written(operation: PlanOperation) -> Sequence[str]:
    return [operation.pointers[field] for field in operation.writes if field in operation.pointers]


def bucket_of(sequences: int) -> int:
    """The least of ``BUCKETS`` for so many sequences.

    >>> bucket_of(1), bucket_of(9), bucket_of(256)
    (1, 16, 256)
    """
    return next(bucket for bucket in BUCKETS if bucket >= sequences)
