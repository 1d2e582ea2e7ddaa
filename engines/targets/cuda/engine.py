"""Runs a ``cuda`` bundle: packs the entries of a step, and has the host's library run it on the device."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from engines.bundle import BLOCK_TOKENS, EngineBundle
from engines.kernels.cuda import HOST, HOST_FILE, cubin_file, device
from engines.kernels.cuda.layout import FEW_ROWS, FEW_TOKENS, RUN_RESULTS, RUN_TOKENS, bucket_of
from engines.kernels.cuda.library import DeviceEngine, DeviceStep
from engines.kernels.cuda.plan import PLAN_FILE, LaunchPlan
from engines.protocol import EngineCapabilities, Entry, FloatArray, Result
from engines.step_inputs import NO_SLOTS, StepPiece, check, not_finite, result_of, runs
from tapeout.artifact import Artifact, verify_files
from tapeout.state import paged_buffers


def plan_of(bundle: Artifact[EngineBundle]) -> LaunchPlan:
    return LaunchPlan.model_validate_json((bundle.folder / PLAN_FILE).read_bytes())


def open_device(bundle: Artifact[EngineBundle], plan: LaunchPlan, blocks: int) -> DeviceEngine:
    """``blocks``: of the KV cache. What is code is verified before it is loaded."""
    io, (hardware, *_) = bundle.record.io, bundle.record.hardware
    on_host = hardware.level == HOST
    code = None if on_host else cubin_file(hardware.level)
    verify_files(bundle.folder, {name: bundle.files[name] for name in (HOST_FILE, code) if name})
    return DeviceEngine(
        bundle.folder / HOST_FILE,
        bundle.folder,
        plan,
        cache=list(paged_buffers(io.state, blocks, BLOCK_TOKENS)),
        columns=-(-io.max_tokens // BLOCK_TOKENS),
        driver=None if on_host else device.DRIVER,
        machine_code=bundle.folder / code if code else None,
    )


class CudaEngine:
    """See :class:`engines.protocol.Engine`. ``sequences``: of full length, that there is memory for."""

    def __init__(self, bundle: Artifact[EngineBundle], *, sequences: int) -> None:
        io, on_host = bundle.record.io, bundle.record.hardware[0].level == HOST
        self._columns = -(-io.max_tokens // BLOCK_TOKENS)
        blocks = sequences * self._columns
        self._device = open_device(bundle, plan_of(bundle), blocks)
        self.digest = bundle.digest
        self.capabilities = EngineCapabilities(
            block_tokens=BLOCK_TOKENS,
            blocks=blocks,
            block_bytes=io.token_bytes * BLOCK_TOKENS,
            max_batch=RUN_RESULTS,
            max_tokens=io.max_tokens,
            vocab_size=io.vocab_size,
            shares_blocks=True,
            chooses_tokens=True,
            threads=int(on_host),
        )

    def step(self, batch: Sequence[Entry]) -> list[Result]:
        errors = check(batch, self.capabilities)
        results = [Result(error=error) for error in errors]
        parts: dict[int, list[FloatArray]] = {}
        several = any(entry.positions is not None and len(entry.positions) > 1 for entry in batch)
        for run in runs(batch, errors, RUN_RESULTS if several else RUN_TOKENS):
            ordered = sorted(run, key=lambda piece: len(piece.tokens) > FEW_TOKENS)  # see FEW_ROWS
            choose = all(batch[piece.entry].wanted == "token" for piece in run)
            found, first = self._device.begin(self._packed(ordered), logits=not choose)(), 0
            for piece in ordered:
                own = found[first : first + len(piece.positions)]
                first += len(piece.positions)
                if not len(own):
                    continue
                if choose:
                    _add_tokens(results, piece.entry, own)
                else:
                    parts.setdefault(piece.entry, []).append(own)
        for number, found in parts.items():
            if results[number].error is None:
                results[number] = result_of(batch[number], found[0] if len(found) == 1 else np.concatenate(found))
        return results

    def prepare(self, ahead: int) -> bool:
        return False

    def copy_block(self, source: int, target: int, tokens: int) -> None:
        self._device.copy_block(source, target, tokens)

    def copy_state(self, source: int, target: int) -> None:
        NO_SLOTS.copy(source, target)

    def close(self) -> None:
        self._device.close()

    def _packed(self, run: Sequence[StepPiece]) -> DeviceStep:
        counts = [len(piece.tokens) for piece in run]
        offsets = [0, *accumulate(counts)]
        most = max(counts)
        table = np.zeros((len(run), self._columns), np.int32)
        for number, piece in enumerate(run):
            table[number, : len(piece.blocks)] = piece.blocks
        rows = sum(count for count in counts if count <= FEW_TOKENS)
        few = 0 if not rows else FEW_TOKENS if rows <= FEW_ROWS else 1
        return DeviceStep(
            ids=np.fromiter((token for piece in run for token in piece.tokens), np.int64, offsets[-1]),
            rows=np.array(
                [offset + p for piece, offset in zip(run, offsets, strict=False) for p in piece.positions], np.int64
            ),
            offsets=np.array(offsets, np.int32),
            starts=np.array([piece.start for piece in run], np.int32),
            table=table,
            bucket=bucket_of(len(run)) if most == 1 else 0,
            keys=max(piece.start + count for piece, count in zip(run, counts, strict=True)),
            few_tokens=few,
            most_tokens=most,
        )


def _add_tokens(results: list[Result], number: int, found: np.ndarray) -> None:
    before = results[number]
    if before.error is not None:
        return
    if found.min() < 0:
        results[number] = Result(error=not_finite())
    else:
        results[number] = Result(tokens=found if before.tokens is None else np.concatenate((before.tokens, found)))
