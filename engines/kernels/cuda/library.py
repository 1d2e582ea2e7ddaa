"""The host's library of a bundle, which owns the memory, stream and graphs of an engine (``source/engine.cpp``)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from engines.bundle import NEXT_TOKENS
from engines.kernels.cuda import layout, parameters
from engines.kernels.cuda.layout import Arena
from engines.kernels.cuda.parameters import KINDS, ArenaPiece, CacheTensor, Operation, Settings, StepInputs, Upload
from engines.kernels.cuda.plan import ENDED, RANKING, LaunchPlan, PlanOperation
from tapeout.errors import ArtifactError, DeviceError, FingerprintError, ResourceError, TapeoutError
from tapeout.state import StateBuffer

NO_DRIVER, OLD_DRIVER, NO_GPU, NO_MACHINE_CODE, NO_MEMORY, DRIVER_ERROR, WRONG_PLAN, OVERWRITTEN = range(1, 9)
ERROR_BYTES = 512
_NUMBERS = {name: number for number, (name, _) in enumerate(KINDS)}


@dataclass(frozen=True)
class DeviceStep:
    """Inputs of a step, C-contiguous. ``bucket``: of the graph that runs it; 0: its kernels are launched one by one.

    An id of -1 - i is the token of result i of the step before.
    """

    ids: NDArray[np.int64]  # [M]
    rows: NDArray[np.int64]  # [P]: tokens with results
    draws: NDArray[Any] | None  # [P] of parameters.DRAW; None: all are greedy
    offsets: NDArray[np.int32]  # [B + 1]
    starts: NDArray[np.int32]  # [B]
    table: NDArray[np.int32]  # [B, columns]
    bucket: int
    keys: int  # of the longest sequence
    few_tokens: int
    most_tokens: int


class StepResults(NamedTuple):
    """``rankings``: of rows that want one; ``total`` is 0 where there is none.

    ``finite``: whether each token is finite up to the last norm, of a step in which some tokens have no result.
    """

    tokens: NDArray[np.int64]  # [P]
    rankings: NDArray[Any] | None = None  # [P] of parameters.RANKING
    logits: NDArray[np.float32] | None = None  # [P, V]
    finite: NDArray[np.bool_] | None = None  # [M]


class DeviceEngine:
    """``driver``: the library of a GPU's driver, and ``machine_code`` for that GPU; None: the stand-in, at level host.

    ``cache``: tensors of the KV cache, by names as in the graph. Errors name what was found: :class:`FingerprintError`
    without a driver, GPU or machine code for it, :class:`ResourceError` without memory.
    """

    def __init__(
        self,
        library: Path,
        folder: Path,
        plan: LaunchPlan,
        *,
        cache: Sequence[StateBuffer],
        columns: int,
        driver: str | None,
        machine_code: Path | None,
    ) -> None:
        self._library = _loaded(library)
        self._engine: int | None = None
        self._vocabulary = plan.vocabulary
        files = {one.file: np.memmap(folder / one.file, np.uint8, "r") for one in plan.tensors.values()}
        kept = {f"past_key_values.{one.name}": one for one in cache}
        sizes = {name: int(np.prod(one.shape)) * np.dtype(one.element).itemsize for name, one in kept.items()}
        arena = layout.arena(plan, {name: file.nbytes for name, file in files.items()}, sizes, columns)
        offsets = {piece.name: piece.offset for piece in arena.pieces}
        code = machine_code.read_bytes() if machine_code else b""
        uploads = (Upload * len(files))(
            *(Upload(file.ctypes.data, offsets[name], file.nbytes) for name, file in files.items())
        )
        operations = (Operation * len(plan.operations))(*(_operation(one, arena) for one in plan.operations))
        pieces = (ArenaPiece * len(arena.pieces))(
            *(ArenaPiece(piece.name.encode()[:47], piece.offset, piece.nbytes) for piece in arena.pieces)
        )
        tensors = (CacheTensor * len(kept))(
            *(
                CacheTensor(arena.places[name], one.shape[1], one.shape[3] * np.dtype(one.element).itemsize)
                for name, one in kept.items()
            )
        )
        buckets = (ctypes.c_int32 * len(layout.BUCKETS))(*layout.BUCKETS)
        settings = Settings(
            driver=driver.encode() if driver else None,
            machine_code=ctypes.cast(ctypes.c_char_p(code), ctypes.c_void_p) if code else None,
            **{
                name: ctypes.addressof(array)
                for name, array in (
                    ("operations", operations),
                    ("pieces", pieces),
                    ("uploads", uploads),
                    ("cache", tensors),
                    ("buckets", buckets),
                )
            },
            arena_bytes=arena.nbytes,
            inputs=arena.places["inputs"],
            inputs_bytes=layout.inputs_bytes(columns),
            tokens=arena.places[NEXT_TOKENS],
            logits=arena.places[plan.logits],
            ranking=arena.places[RANKING],
            result_bytes=layout.RUN_RESULTS * (8 + parameters.RANKING.itemsize + 4 * plan.vocabulary)
            + layout.RUN_TOKENS,
            activations=arena.activations[0],
            activations_end=arena.activations[1],
            zeros=arena.places[ENDED],
            zeros_bytes=next(piece.nbytes for piece in arena.pieces if piece.offset == arena.places[ENDED]),
            operation_count=len(operations),
            piece_count=len(pieces),
            upload_count=len(uploads),
            cache_count=len(tensors),
            bucket_count=len(buckets),
            columns=columns,
            vocabulary=plan.vocabulary,
        )
        failure, error = ctypes.c_int(), ctypes.create_string_buffer(ERROR_BYTES)
        self._engine = self._library.tapeout_cuda_open(
            ctypes.byref(settings), ctypes.byref(failure), error, ERROR_BYTES
        )
        if not self._engine:
            raise _refusal(failure.value, error.value.decode(), folder)

    def begin(self, step: DeviceStep, *, ranking: bool, logits: bool) -> Callable[[], StepResults]:
        """Begin a step; what is returned waits for it. ``ranking``, ``logits``: wanted beside the tokens.

        At most two steps have begun and not ended. They end in their order.
        """
        inputs = _inputs(step, ranking=ranking, logits=logits)
        self._check(self._library.tapeout_cuda_begin(self._engine, ctypes.byref(inputs)))
        rows, tokens = len(step.rows), len(step.ids)
        chosen = 8 * rows
        flags = chosen + (-(-tokens // 8) * 8 if tokens > rows else 0)
        ranked = flags + (parameters.RANKING.itemsize * rows if ranking else 0)
        size = ranked + (4 * self._vocabulary * rows if logits else 0)

        def finish() -> StepResults:
            results = np.empty(size, np.uint8)
            self._check(self._library.tapeout_cuda_finish(self._engine, results.ctypes.data))
            ids, finite, rankings, floats = np.split(results, (chosen, flags, ranked))
            return StepResults(
                ids.view(np.int64),
                rankings.view(parameters.RANKING) if ranking else None,
                floats.view(np.float32).reshape(rows, self._vocabulary) if logits else None,
                finite[:tokens].view(np.bool_) if len(finite) else None,
            )

        return finish

    def trace(self, step: DeviceStep, outputs: Sequence[NDArray[np.float32 | np.float16] | None]) -> None:
        """Run as many operations as there are ``outputs``, and fill these: of linears and the embedding in float32, of
        attention in float16.
        """
        pointers = (ctypes.c_void_p * len(outputs))(*(None if one is None else one.ctypes.data for one in outputs))
        inputs = _inputs(step)
        self._check(self._library.tapeout_cuda_trace(self._engine, ctypes.byref(inputs), len(outputs), pointers))

    def copy_block(self, source: int, target: int, tokens: int) -> None:
        self._check(self._library.tapeout_cuda_copy_block(self._engine, source, target, tokens))

    def close(self) -> None:
        """Give everything back. A closed engine may be closed again."""
        if self._engine:
            self._library.tapeout_cuda_close(self._engine)
            self._engine = None

    def __del__(self) -> None:
        self.close()

    def _check(self, failure: int) -> None:
        if not failure:
            return
        found = cast(bytes, self._library.tapeout_cuda_error(self._engine)).decode()
        raise DeviceError(
            f"a step failed on the device: {found}",
            expected="a device that works, and an engine that was built for it",
            remedy="start the engine again; if the error comes back, `nvidia-smi -q` shows what the device reports",
        )


def _inputs(step: DeviceStep, *, ranking: bool = False, logits: bool = False) -> StepInputs:
    arrays = (step.ids, step.rows, step.draws, step.offsets, step.starts, step.table)
    return StepInputs(
        *(None if array is None else array.ctypes.data for array in arrays),
        len(step.ids),
        len(step.starts),
        len(step.rows),
        step.bucket,
        step.keys,
        step.few_tokens,
        step.most_tokens,
        int(ranking),
        int(logits),
    )


def _loaded(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    pointer = ctypes.c_void_p
    library.tapeout_cuda_open.restype = pointer
    library.tapeout_cuda_open.argtypes = [pointer, pointer, ctypes.c_char_p, ctypes.c_size_t]
    library.tapeout_cuda_begin.argtypes = [pointer, pointer]
    library.tapeout_cuda_trace.argtypes = [pointer, pointer, ctypes.c_int, pointer]
    library.tapeout_cuda_finish.argtypes = [pointer, pointer]
    library.tapeout_cuda_copy_block.argtypes = [pointer, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64]
    library.tapeout_cuda_error.argtypes = [pointer]
    library.tapeout_cuda_error.restype = ctypes.c_char_p
    library.tapeout_cuda_close.argtypes = [pointer]
    return library


def _operation(operation: PlanOperation, arena: Arena) -> Operation:
    """With offsets in the arena in place of pointers."""
    made = Operation(kind=_NUMBERS[operation.kind], wanted=int(operation.wanted))
    parameters = getattr(made.parameters, operation.kind)
    values: Mapping[str, int | float] = {
        **{field: arena.places[name] for field, name in operation.pointers.items()},
        **operation.numbers,
    }
    for field, value in values.items():
        *path, last = field.split(".")
        holder = getattr(parameters, path[0]) if path else parameters
        setattr(holder, last, value)
    return made


def _refusal(failure: int, found: str, folder: Path) -> TapeoutError:
    """Why an engine cannot be opened."""
    if failure == NO_DRIVER:
        return FingerprintError(
            f"no driver for a GPU: {found}",
            expected="the library of NVIDIA's driver, which comes with the driver",
            remedy="install the driver, or give the container the GPU (docker run --gpus all)",
        )
    if failure == OLD_DRIVER:
        return FingerprintError(
            f"NVIDIA's driver is too old: {found}",
            expected="a driver for CUDA 13.0 or later: version 580",
            remedy="update the driver",
        )
    if failure == NO_GPU:
        return FingerprintError(
            found, expected="an NVIDIA GPU", remedy="`nvidia-smi` shows what there is; a container needs --gpus all"
        )
    if failure == NO_MACHINE_CODE:
        return FingerprintError(
            f"{folder} has no kernels for this GPU: {found}",
            expected="a GPU of one of the bundle's levels (`tapeout inspect` shows them)",
            remedy="use such a GPU",
        )
    if failure == NO_MEMORY:
        return ResourceError(
            f"no memory on the device: {found}",
            expected="memory for weights, the KV cache and the largest step",
            remedy="open the engine for fewer sequences: --slots or --kv-bytes; or stop what else uses the device",
        )
    if failure == WRONG_PLAN:
        return ArtifactError(
            f"the plan of {folder} does not fit: {found}",
            expected="a plan as this version writes it",
            remedy="build the bundle again",
        )
    return DeviceError(found, expected="a device that works", remedy="`nvidia-smi -q` shows what the device reports")
