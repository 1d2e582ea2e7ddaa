"""Runs an ``ort-cpu`` bundle: one session, and pools of blocks and slots that are bound once.

The tokens of a step are packed. Attention finds each sequence's keys through its block table, recurrent operators its
state by its slot; they begin from zeros where a sequence starts. Buffers are arrays of zeros; a page of them costs no
memory until it is written, or made ready shortly before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path

import numpy as np

from engines.bundle import (
    BLOCK_TABLE,
    BLOCK_TOKENS,
    GREEDY,
    NEXT_TOKENS,
    OFFSETS,
    SLOTS,
    STARTS,
    WEIGHTS_FILE,
    EngineBundle,
)
from engines.kernels.cpu.serving import library_of
from engines.protocol import EngineCapabilities, Entry, FloatArray, Result, WholeSteps
from engines.sessions import cpu_options, keep_mapped, open_session, threads_of
from engines.sessions import map_experts as leave_experts
from engines.state_buffers import bind_state
from engines.state_slots import UNKNOWN, StateSlots
from engines.step_inputs import StepPiece, check, not_finite, result_of, runs
from engines.targets.ort_cpu.buffers import BlockMemory, Bound, require_slots, zeros
from engines.weight_pages import WeightPages, shared_extents
from tapeout.artifact import Artifact
from tapeout.errors import BuildError, RequestError
from tapeout.state import NO_SLOT, SEQUENCE_SLOTS, Recurrent, paged_buffers, recurrent_buffers

# A step is run in pieces of so many tokens: a long prompt then needs no more memory than a short one, and activations
# stay in the processor's caches.
RUN_TOKENS = 256
# Weights that are left in their file may be read from the disk again in each run: fewer runs, for more memory.
MAPPED_RUN_TOKENS = 1024
MAX_BATCH = 1024
# Memory of blocks that one call makes ready, one block at least: 2 MB take about a millisecond. 64 decodes of the
# default model fill one block (0.7 MB) a step, and several where drafts are accepted.
READY_AT_ONCE_BYTES = 2 << 20
READY_AHEAD_BYTES = 64 << 20  # most that is made ready before a sequence needs it, however many blocks are expected


class PagedEngine(WholeSteps):
    """See :class:`engines.protocol.Engine`. ``sequences``: of full length, that there is memory for.

    ``snapshots``: of recurrent state that are kept beside that of sequences; by default as many as these.
    ``map_experts``: weights of experts are left in their file. :class:`BuildError` where its kernels cannot do that.
    """

    def __init__(
        self,
        bundle: Artifact[EngineBundle],
        *,
        threads: int,
        sequences: int,
        snapshots: int | None = None,
        map_experts: bool = False,
    ) -> None:
        io = bundle.record.io
        blocks = sequences * -(-io.max_tokens // BLOCK_TOKENS) if io.token_bytes else 0
        kept = sequences * (SEQUENCE_SLOTS - 1) if snapshots is None else snapshots
        slots = sequences + kept if io.slot_bytes else 0
        require_slots(slots, io.slot_bytes)
        library = library_of(bundle)
        options = cpu_options(threads, library, bundle.record.operator_counts, chooses=True)
        mapped = (keep_mapped(options, bundle) and bundle.record.precision == "float32") or map_experts
        self._run_tokens = MAPPED_RUN_TOKENS if mapped else RUN_TOKENS
        if "RotaryEmbedding" in bundle.record.operator_counts:
            # ONNX Runtime's refuses more tokens, of whatever sequences, than its table has positions.
            self._run_tokens = min(self._run_tokens, io.max_tokens)
        weights = bundle.folder / WEIGHTS_FILE
        if map_experts:
            leave_experts(options, weights)
        self._session = open_session(str(bundle.folder / "model.onnx"), options)
        self._weights = _mapped(weights) if map_experts else None
        self.digest = bundle.digest
        self.capabilities = EngineCapabilities(
            block_tokens=BLOCK_TOKENS,
            blocks=blocks,
            block_bytes=io.token_bytes * BLOCK_TOKENS,
            max_batch=MAX_BATCH,
            max_tokens=io.max_tokens,
            vocab_size=io.vocab_size,
            shares_blocks=True,
            chooses_tokens=GREEDY in io.inputs,
            threads=threads_of(threads, library),
            slots=slots,
            slot_bytes=io.slot_bytes,
            reads=partial(_reads, bundle.record),
            mapped_bytes=self._weights.size if self._weights else 0,
            snapshot_tokens=max((one.snapshot_tokens for one in io.state if isinstance(one, Recurrent)), default=0),
        )
        self._slots = StateSlots(slots)
        self._state = {name: zeros(shape, element) for name, shape, element in recurrent_buffers(io.state, slots)}
        self._memory = BlockMemory(list(paged_buffers(io.state, blocks, BLOCK_TOKENS)))
        self._next_block = 0  # none from this one on was in a block table
        self._columns = -(-io.max_tokens // BLOCK_TOKENS)
        self._wants_positions = "position_ids" in io.inputs
        self._bound = {wanted: self._bind(wanted) for wanted in ("logits", NEXT_TOKENS)}

    def step(self, batch: Sequence[Entry]) -> list[Result]:
        errors = check(batch, self.capabilities, self._slots)
        results = [Result(error=error) for error in errors]
        parts: dict[int, list[FloatArray]] = {}
        for run in runs(batch, errors, self._run_tokens):
            if self._state:
                for piece in run:
                    self._slots.hold(piece.slot, UNKNOWN)
            if self.capabilities.chooses_tokens and all(batch[piece.entry].wanted == "token" for piece in run):
                self._choose(run, batch, results)
            else:
                logits, first = self._logits(run), 0
                for piece in run:
                    if not piece.positions:
                        continue
                    found = logits[first : first + len(piece.positions)]
                    first += len(piece.positions)
                    if batch[piece.entry].wanted == "token":  # another run of it may have chosen tokens
                        _add(results, piece.entry, result_of(batch[piece.entry], found))
                    else:
                        parts.setdefault(piece.entry, []).append(found)
            if self._state:
                self._keep(run)
        for number, found in parts.items():
            results[number] = result_of(batch[number], found[0] if len(found) == 1 else np.concatenate(found))
        return results

    def prepare(self, ahead: int) -> bool:
        each = max(1, self.capabilities.block_bytes)
        ahead = min(ahead, READY_AHEAD_BYTES // each)
        # A pool gives the lowest blocks that nobody has used.
        return self._memory.make_ready(max(1, READY_AT_ONCE_BYTES // each), self._next_block + ahead)

    def copy_block(self, source: int, target: int, tokens: int) -> None:
        for buffer in self._memory.arrays.values():
            buffer[target, :, :tokens] = buffer[source, :, :tokens]

    def read_block(self, block: int, content: memoryview) -> None:
        for part, here, place in self._block_parts(block, content):
            content[place] = part[here]

    def write_block(self, block: int, content: memoryview) -> None:
        for part, here, place in self._block_parts(block, content):
            part[here] = content[place]
        self._next_block = max(self._next_block, 1 + block)
        self._memory.ready = max(self._memory.ready, self._next_block)

    def copy_state(self, source: int, target: int) -> None:
        self._slots.copy(source, target)
        for buffer in self._state.values():
            buffer[target] = buffer[source]

    def resident_bytes(self, *, exact: bool = False) -> int | None:
        return self._weights.resident(exact=exact) if self._weights else None

    def _block_parts(self, block: int, content: memoryview) -> Iterator[tuple[memoryview, slice, slice]]:
        """The bytes of each buffer, where a block is in them, and its place in the block's content.

        Views are copied without leaving Python's lock; numpy leaves it in each of 60 copies, and waits for it then.
        31 blocks take 3.4 ms; with a view of each block's arrays they took 11.8.
        """
        has, buffers = self.capabilities, self._memory.bytes
        if content.nbytes != has.block_bytes or not buffers:  # closed
            raise RequestError(
                f"a block of {content.nbytes} bytes", expected=f"{has.block_bytes}, and an engine that is open"
            )
        at = 0
        for buffer in buffers:
            each = len(buffer) // has.blocks
            yield buffer, slice(block * each, (block + 1) * each), slice(at, at := at + each)

    def close(self) -> None:
        self._bound.clear()
        self._memory.clear()
        self._state.clear()
        if self._weights:
            self._weights.close()
        vars(self).pop("_session", None)  # it holds the weights; an engine may be closed twice

    def _keep(self, run: Sequence[StepPiece]) -> None:
        """Note what slots hold after a run, and copy snapshots."""
        for piece in run:
            self._slots.hold(piece.slot, piece.start + len(piece.tokens))
            if piece.snapshot != NO_SLOT:
                self.copy_state(piece.slot, piece.snapshot)

    def _bind(self, wanted: str) -> Bound:
        bound = Bound(self._session.io_binding())
        bind_state(bound.binding, self._memory.arrays | self._state)
        if self.capabilities.chooses_tokens:
            bound.input(GREEDY, (), np.bool_)[...] = wanted == NEXT_TOKENS
        return bound

    def _feed(self, run: Sequence[StepPiece], wanted: str) -> tuple[Bound, int]:
        """The binding with all inputs of a run, and how many results it gives."""
        bound = self._bound[wanted]
        offsets = [0, *accumulate(len(piece.tokens) for piece in run)]
        places = [offset + p for piece, offset in zip(run, offsets, strict=False) for p in piece.positions]
        entries, tokens = len(run), offsets[-1]
        ids = bound.input("input_ids", (1, tokens))
        if tokens == entries:
            ids[0] = [piece.tokens[0] for piece in run]
        else:
            for piece, offset in zip(run, offsets, strict=False):
                ids[0, offset : offset + len(piece.tokens)] = piece.tokens
        bound.write(OFFSETS, offsets, np.int32)
        bound.write("logit_positions", places)
        if self._state:
            bound.write(SLOTS, [piece.slot for piece in run], np.int32)
        if self.capabilities.blocks and bound.write_rows(
            BLOCK_TABLE, [piece.blocks for piece in run], self._columns, np.int32
        ):
            self._next_block = max(self._next_block, 1 + max(max(piece.blocks) for piece in run))
            self._memory.ready = max(self._memory.ready, self._next_block)
        bound.input(STARTS, (entries,), np.int32)[:] = [piece.start for piece in run]
        if self._wants_positions:
            positions = bound.input("position_ids", (1, tokens))
            for piece, offset in zip(run, offsets, strict=False):
                count = len(piece.tokens)
                positions[0, offset : offset + count] = np.arange(piece.start, piece.start + count)
        return bound, len(places)

    def _logits(self, run: Sequence[StepPiece]) -> FloatArray:
        bound, count = self._feed(run, "logits")
        logits = np.empty((count, self.capabilities.vocab_size), np.float32)  # the caller keeps it: it is bound anew
        bound.binding.bind_output("logits", "cpu", 0, np.float32, logits.shape, logits.ctypes.data)
        self._session.run_with_iobinding(bound.binding)
        return logits

    def _choose(self, run: Sequence[StepPiece], batch: Sequence[Entry], results: list[Result]) -> None:
        """Run pieces of entries that all want tokens, and add these to their results."""
        bound, count = self._feed(run, NEXT_TOKENS)
        chosen = bound.output(NEXT_TOKENS, (count,))
        self._session.run_with_iobinding(bound.binding)
        chosen, first = chosen.copy(), 0
        finite = min(chosen.tolist(), default=0) >= 0  # numpy's minimum takes 40 µs more, as its code is cold
        for piece in run:
            if not piece.positions:
                continue
            found = chosen[first : first + len(piece.positions)]
            first += len(piece.positions)
            lacks = not finite and found.min() < 0
            _add(results, piece.entry, Result(error=not_finite()) if lacks else Result(tokens=found))


def _reads(record: EngineBundle, tokens: int) -> float:
    """See :class:`EngineCapabilities`."""
    return record.step_bytes_of(tokens) / record.step_bytes if record.experts else 1.0


def _mapped(weights: Path) -> WeightPages:
    if not (extents := shared_extents(weights)):
        raise BuildError(
            f"the kernels beside {weights} have copied all experts",
            expected="kernels that can leave them in their file, and experts of a page or more",
            remedy="build the bundle again with `dvc repro`, or open it with --no-map-experts",
        )
    return WeightPages(weights, extents)


def _add(results: list[Result], number: int, new: Result) -> None:
    """What a run has brought an entry that wants tokens, behind what runs before it have."""
    before = results[number]
    if before.error is not None:
        return
    if before.tokens is None or new.tokens is None:
        results[number] = new
    else:
        results[number] = Result(tokens=np.concatenate((before.tokens, new.tokens)))
