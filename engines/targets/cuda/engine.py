"""Runs a ``cuda`` bundle: packs the entries of a step, and has the host's library run it on the device."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from engines.bundle import BLOCK_TOKENS, EngineBundle, IOContract
from engines.kernels.cuda import HOST, HOST_FILE, cubin_file, device
from engines.kernels.cuda.layout import FEW_ROWS, FEW_TOKENS, RUN_RESULTS, RUN_TOKENS, arena, bucket_of
from engines.kernels.cuda.library import DeviceEngine, DeviceStep, StepResults
from engines.kernels.cuda.parameters import DRAW, MOST_TOP
from engines.kernels.cuda.plan import PLAN_FILE, VERSION, LaunchPlan
from engines.kernels.sampling import normalizer
from engines.protocol import EngineCapabilities, Entry, Finish, FloatArray, Ranked, Result
from engines.step_inputs import NO_SLOTS, StepPiece, check, result_of, runs
from tapeout.artifact import Artifact, verify_files
from tapeout.errors import ArtifactError, RequestError
from tapeout.resources import available_memory
from tapeout.state import paged_buffers

FREE_SHARE = 0.9  # of the device's free memory, for an engine that takes what is left


def plan_of(bundle: Artifact[EngineBundle]) -> LaunchPlan:
    """:class:`ArtifactError` for one of another version of this project: its library has another interface."""
    body = json.loads((bundle.folder / PLAN_FILE).read_bytes())
    if (found := body.get("version", 1)) != VERSION:
        raise ArtifactError(
            f"{bundle.folder} holds version {found} of the plan of kernel launches",
            expected=f"version {VERSION}, which this Tapeout writes",
            remedy=bundle.record.remedy,
        )
    return LaunchPlan.model_validate(body)


def open_device(bundle: Artifact[EngineBundle], plan: LaunchPlan, blocks: int) -> DeviceEngine:
    """``blocks``: of the KV cache. What is code is verified before it is loaded. See :class:`DeviceEngine`."""
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


def open_engine(bundle: Artifact[EngineBundle], *, sequences: int) -> CudaEngine:
    """``sequences``: of full length, that there is memory for."""
    io, on_host = bundle.record.io, bundle.record.hardware[0].level == HOST
    blocks = sequences * -(-io.max_tokens // BLOCK_TOKENS)
    opened = open_device(bundle, plan_of(bundle), blocks)
    return CudaEngine(opened, io, digest=bundle.digest, blocks=blocks, threads=int(on_host))


def free_state_bytes(bundle: Artifact[EngineBundle]) -> int:
    """See :meth:`engines.target.Target.free_state_bytes`. The driver keeps some for kernels and graphs."""
    io, plan = bundle.record.io, plan_of(bundle)
    free = available_memory() if bundle.record.hardware[0].level == HOST else device.free_memory()
    files = {one.file: (bundle.folder / one.file).stat().st_size for one in plan.tensors.values()}
    no_cache = dict.fromkeys((f"past_key_values.{one.name}" for one in paged_buffers(io.state, 0, BLOCK_TOKENS)), 0)
    return max(0, int(FREE_SHARE * free) - arena(plan, files, no_cache, -(-io.max_tokens // BLOCK_TOKENS)).nbytes)


class StepDevice(Protocol):
    """What runs steps: see :class:`engines.kernels.cuda.library.DeviceEngine`."""

    def begin(self, step: DeviceStep, *, ranking: bool, logits: bool) -> Callable[[], StepResults]: ...

    def copy_block(self, source: int, target: int, tokens: int) -> None: ...

    def close(self) -> None: ...


class CudaEngine:
    """See :class:`engines.protocol.Engine`. ``blocks``, ``threads``: see :class:`EngineCapabilities`."""

    def __init__(self, device: StepDevice, io: IOContract, *, digest: str, blocks: int, threads: int) -> None:
        self._columns = -(-io.max_tokens // BLOCK_TOKENS)
        self._device, self.digest = device, digest
        self.capabilities = EngineCapabilities(
            block_tokens=BLOCK_TOKENS,
            blocks=blocks,
            block_bytes=io.token_bytes * BLOCK_TOKENS,
            max_batch=RUN_RESULTS,
            max_tokens=io.max_tokens,
            vocab_size=io.vocab_size,
            shares_blocks=True,
            chooses_tokens=True,
            threads=threads,
            steps_at_once=2,
            draws=True,
        )
        self._last: _BegunStep | None = None

    def step(self, batch: Sequence[Entry]) -> list[Result]:
        return self.begin(batch)()

    def begin(self, batch: Sequence[Entry]) -> Finish:
        before, errors = self._last, check(batch, self.capabilities)
        several = any(entry.positions is not None and len(entry.positions) > 1 for entry in batch)
        most = RUN_RESULTS if several else RUN_TOKENS
        cut = list(runs(batch, errors, most))
        if before is not None and len(cut) > 1:
            before.wait()  # runs end in their order, and all but the last of these end here
        if any(entry.follows is not None for entry in batch):
            tokens = before.last_tokens() if before is not None else {}
            for number, entry in enumerate(batch):
                if entry.follows is not None and errors[number] is None and entry.follows not in tokens:
                    errors[number] = RequestError(
                        f"follows entry {entry.follows} of the step before", expected="one that chooses a token"
                    )
            batch = [_following(entry, tokens) for entry in batch]
            cut = list(runs(batch, errors, most))
        step = self._last = _BegunStep(batch, errors)
        for run in cut:
            step.wait()
            ordered = sorted(run, key=lambda piece: len(piece.tokens))  # see FEW_ROWS
            packed = self._packed(ordered, batch, step.ranked)
            ranking = packed.draws is not None and any(step.ranked[piece.entry] is not None for piece in run)
            logits = any(step.takes_logits[piece.entry] for piece in run)
            step.add(ordered, self._device.begin(packed, ranking=ranking, logits=logits))
        return step.results

    def prepare(self, ahead: int) -> bool:
        return False

    def copy_block(self, source: int, target: int, tokens: int) -> None:
        self._device.copy_block(source, target, tokens)

    def copy_state(self, source: int, target: int) -> None:
        NO_SLOTS.copy(source, target)

    def close(self) -> None:
        self._device.close()

    def _packed(self, run: Sequence[StepPiece], batch: Sequence[Entry], ranked: Sequence[int | None]) -> DeviceStep:
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
            draws=_draws(run, batch, ranked),
            offsets=np.array(offsets, np.int32),
            starts=np.array([piece.start for piece in run], np.int32),
            table=table,
            bucket=bucket_of(len(run)) if most == 1 and all(piece.positions for piece in run) else 0,
            keys=max(piece.start + count for piece, count in zip(run, counts, strict=True)),
            few_tokens=few,
            most_tokens=most,
        )


class _BegunStep:
    """A step in runs, of which the last may not have ended.

    By entry, ``ranked``: so many of the likeliest tokens are wanted of the device; ``takes_logits``: whole rows come to
    the host for it.
    """

    def __init__(self, batch: Sequence[Entry], errors: Sequence[RequestError | None]) -> None:
        self._batch, self._results = batch, [Result(error=error) for error in errors]
        self.ranked = [
            entry.top if entry.wanted == "top" and entry.top <= MOST_TOP else entry.ranked for entry in batch
        ]
        self.takes_logits = [
            entry.wanted != "token" and (entry.wanted == "logits" or entry.top > MOST_TOP) for entry in batch
        ]
        self._logits: dict[int, list[FloatArray]] = {}
        self._running: tuple[Sequence[StepPiece], Callable[[], StepResults]] | None = None
        self._failure: Exception | None = None
        self._runs = 0

    def add(self, run: Sequence[StepPiece], finish: Callable[[], StepResults]) -> None:
        """A run has begun, and all before it have ended."""
        self._running = run, finish
        self._runs += 1

    def wait(self) -> None:
        """For the end of what has begun. What fails fails again each time."""
        if self._failure is not None:
            raise self._failure
        if self._running is None:
            return
        (run, finish), self._running = self._running, None
        try:
            found, first = finish(), 0
        except Exception as failure:
            self._failure = failure
            raise
        finite = not len(found.tokens) or found.tokens.min() >= 0  # quicker than entry by entry
        begin = 0
        for piece in run:
            own, fed = slice(first, first + len(piece.positions)), slice(begin, begin + len(piece.tokens))
            first, begin = own.stop, fed.stop
            if found.finite is not None and not found.finite[fed].all():
                self._results[piece.entry] = Result(error=_beyond_half())
                continue
            if not piece.positions:
                continue
            if self.takes_logits[piece.entry]:
                assert found.logits is not None
                self._logits.setdefault(piece.entry, []).append(found.logits[own])
            elif finite or found.tokens[own].min() >= 0:
                self._add(piece.entry, found.tokens[own], found.rankings[own] if found.rankings is not None else ())
            else:
                self._results[piece.entry] = Result(error=_beyond_half())

    def _add(self, number: int, tokens: NDArray[np.int64], rankings: Sequence[Any] | NDArray[Any]) -> None:
        entry, before = self._batch[number], self._results[number]
        if before.error is not None:
            return
        count = self.ranked[number]
        new = Result(tokens=tokens)
        if count is not None:
            ranked = [_ranking(one, count) for one in rankings]
            new = _likeliest(ranked) if entry.wanted == "top" else new._replace(ranked=ranked)
        self._results[number] = new if before.tokens is None else _joined(before, new)

    def results(self) -> list[Result]:
        self.wait()
        for number, found in self._logits.items():
            if self._results[number].error is None:
                logits = found[0] if len(found) == 1 else np.concatenate(found)
                result = result_of(self._batch[number], logits)
                self._results[number] = result if result.error is None else Result(error=_beyond_half())
        self._logits.clear()
        return self._results

    def last_tokens(self) -> dict[int, int]:
        """As the next step is fed them, by entry: of one that runs, where they will be on the device."""
        if self._running is None or self._runs > 1:
            found = ((number, result.tokens) for number, result in enumerate(self.results()))
            return {number: int(tokens[-1]) for number, tokens in found if tokens is not None and tokens.ndim == 1}
        rows, count = dict[int, int](), 0
        for piece in self._running[0]:
            count += len(piece.positions)
            if piece.positions:
                rows[piece.entry] = -count
        return rows


def _beyond_half() -> RequestError:
    return RequestError(
        "values of a token are not finite on the device",
        expected="activations within the range of float16, 65,504, in which kernels of this target multiply",
        remedy="build this model for ort-cpu, which computes in float32",
    )


def _draws(run: Sequence[StepPiece], batch: Sequence[Entry], ranked: Sequence[int | None]) -> NDArray[Any] | None:
    """How each row's token is drawn and ranked; None where all are greedy, and nothing else is wanted."""
    if all(batch[piece.entry].draw is None and ranked[piece.entry] is None for piece in run):
        return None
    rows = list[tuple[float, ...]]()
    for piece in run:
        entry = batch[piece.entry]
        likeliest, first = ranked[piece.entry], piece.start - entry.start
        top = -1 if likeliest is None else likeliest
        if entry.draw is None:
            rows += [(0, 1.0, 0.0, 0, 0, top)] * len(piece.positions)
            continue
        filters, random = entry.draw
        places = [0] if entry.positions is None else [entry.positions.index(first + p) for p in piece.positions]
        shared = (filters.top_p, filters.scale, filters.top_k, filters.least, top)
        rows += [(random[place], *shared) for place in places[: len(piece.positions)]]
    return np.array(rows, DRAW)


def _ranking(row: Any, count: int) -> Ranked:
    likeliest = zip(row["tokens"][:count].tolist(), row["logits"][:count].tolist(), strict=True)
    return Ranked(normalizer(float(row["max"]), int(row["total"])), float(row["logit"]), [*likeliest])


def _likeliest(ranked: Sequence[Ranked]) -> Result:
    tokens = np.array([[token for token, _ in one.likeliest] for one in ranked])
    logs = [[logit - one.normalizer for _, logit in one.likeliest] for one in ranked]
    return Result(tokens=tokens, log_probabilities=np.array(logs, np.float32))


def _joined(first: Result, second: Result) -> Result:
    """Of two runs of an entry."""
    assert first.tokens is not None and second.tokens is not None
    logs = None
    if first.log_probabilities is not None and second.log_probabilities is not None:
        logs = np.concatenate((first.log_probabilities, second.log_probabilities))
    ranked = None if first.ranked is None or second.ranked is None else [*first.ranked, *second.ranked]
    return Result(np.concatenate((first.tokens, second.tokens)), log_probabilities=logs, ranked=ranked)


def _following(entry: Entry, tokens: Mapping[int, int]) -> Entry:
    """With the token that it is fed. An entry that follows nothing is not run."""
    return entry if entry.follows is None else entry._replace(tokens=(tokens.get(entry.follows, 0),))
