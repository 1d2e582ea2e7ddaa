"""Runs an ``ort-cuda`` bundle: one session, a pool of KV blocks on the GPU, and a CUDA graph for each decode bucket.

All inputs of a step lie in one buffer of the host, and one copy takes them to fixed addresses of the GPU. A step of one
token a sequence runs in the smallest bucket that holds it, which was captured when the engine was opened: ONNX Runtime
runs a graph id twice, captures it, and replays it from then on. Any other step runs as it is, with graph id -1. What is
frozen in a graph is the number of rows, and the bounds of attention (``steps.LengthBounds``).

Logits are copied to the host, where tokens are chosen: the provider's ArgMax promises no order among equals.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from engines.bundle import ATTENTION_METADATA, BLOCK_TABLE, BLOCK_TOKENS, EngineBundle, IOContract
from engines.protocol import EngineCapabilities, Entry, FloatArray, Result, WholeSteps
from engines.step_inputs import NO_SLOTS, StepPiece, check, result_of, runs
from engines.targets.ort_cuda.device import CudaDevice
from engines.targets.ort_cuda.steps import (
    BATCHES,
    MAX_BATCH,
    DecodeBucket,
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
from tapeout.artifact import Artifact
from tapeout.errors import BuildError
from tapeout.state import paged_buffers

PROVIDER = "CUDAExecutionProvider"
RUN_TOKENS = 2048  # a step is run in pieces of so many tokens
LOGIT_ROWS = 256  # there is room for: where more are wanted, pieces are of as many tokens
FUSED_LINEARS = "ep.cuda.fpa_intb_gemm"  # else MatMulNBits decodes the whole weight for more than a few tokens
EAGER = -1  # a graph id: nothing is captured


@dataclass
class _Staging:
    """The inputs of a run, on the host and at their addresses on the GPU."""

    host: NDArray[np.uint8]
    address: int
    arrays: dict[str, tuple[int, NDArray[Any]]]

    def views(self) -> dict[str, NDArray[Any]]:
        return {name: array for name, (_, array) in self.arrays.items()}


@dataclass
class _Captured:
    """``metadata`` is bound by address."""

    binding: ort.IOBinding
    options: ort.RunOptions
    metadata: NDArray[np.int32]
    staging: _Staging


class _Cache(NamedTuple):
    """A buffer of one layer's keys or values on the GPU."""

    address: int
    block_bytes: int
    shape: tuple[int, ...]
    element: type[Any]


class CudaPagedEngine(WholeSteps):
    """See :class:`engines.protocol.Engine`. ``sequences``: of full length, that there is memory for.

    ``batches``: rows of the decode buckets; steps of more sequences than the largest are not captured.
    """

    def __init__(self, bundle: Artifact[EngineBundle], *, sequences: int, batches: Sequence[int] = BATCHES) -> None:
        io = bundle.record.io
        self._columns = -(-io.max_tokens // BLOCK_TOKENS)
        blocks = sequences * self._columns
        self.digest = bundle.digest
        self.capabilities = EngineCapabilities(
            block_tokens=BLOCK_TOKENS,
            blocks=blocks,
            block_bytes=io.token_bytes * BLOCK_TOKENS,
            max_batch=MAX_BATCH,
            max_tokens=io.max_tokens,
            vocab_size=io.vocab_size,
            shares_blocks=True,
            chooses_tokens=False,
        )
        self._inputs = frozenset(io.inputs)
        self._run_tokens = RUN_TOKENS
        if "RotaryEmbedding" in bundle.record.operator_counts:
            # ONNX Runtime's refuses more tokens, of whatever sequences, than its table has positions.
            self._run_tokens = min(RUN_TOKENS, io.max_tokens)
        self._session = _open(str(bundle.folder / "model.onnx"))
        self._device = CudaDevice()
        self._pad_block = blocks  # one more than sequences have, for rows that pad a step
        self._cache = _caches(self._device, io, blocks + 1)
        self._logits = self._device.allocate(LOGIT_ROWS * io.vocab_size * 4, "logits")
        self._eager = self._captured(EAGER, self._staging(self._run_tokens, MAX_BATCH, LOGIT_ROWS))
        self._graphs: dict[DecodeBucket, _Captured] = {}
        staged: dict[int, _Staging] = {}
        for number, bucket in enumerate(buckets(io.max_tokens, batches), 1):
            rows = bucket.rows
            if rows not in staged:
                staged[rows] = self._staging(rows, rows, rows)
            self._graphs[bucket] = self._captured(number, staged[rows])
            self._capture(bucket)

    def step(self, batch: Sequence[Entry]) -> list[Result]:
        errors = check(batch, self.capabilities)
        results = [Result(error=error) for error in errors]
        wanted = sum(1 if entry.positions is None else len(entry.positions) for entry in batch)
        most = self._run_tokens if wanted <= LOGIT_ROWS else min(LOGIT_ROWS, self._run_tokens)
        parts: dict[int, list[FloatArray]] = {}
        for run in runs(batch, errors, most):
            logits, first = self._run(run), 0
            for piece in run:
                if piece.positions:
                    parts.setdefault(piece.entry, []).append(logits[first : first + len(piece.positions)])
                    first += len(piece.positions)
        for number, found in parts.items():
            results[number] = result_of(batch[number], found[0] if len(found) == 1 else np.concatenate(found))
        return results

    def prepare(self, ahead: int) -> bool:
        return False

    def copy_block(self, source: int, target: int, tokens: int) -> None:
        for address, block_bytes, _, _ in self._cache.values():
            size = block_bytes // BLOCK_TOKENS * tokens  # positions come first in a block
            self._device.move(address + target * block_bytes, address + source * block_bytes, size)
        self._device.wait()

    def copy_state(self, source: int, target: int) -> None:
        NO_SLOTS.copy(source, target)

    def close(self) -> None:
        self._graphs.clear()
        vars(self).pop("_eager", None)
        vars(self).pop("_session", None)  # it holds the weights; an engine may be closed twice
        self._device.close()

    def _run(self, run: Sequence[StepPiece]) -> FloatArray:
        """Logits ``[P, V]`` of a run."""
        bucket = bucket_of(run, list(self._graphs))
        bounds = exact_bounds(run) if bucket is None else bucket.bounds
        require_bounds(bounds, run)
        chosen = self._eager if bucket is None else self._graphs[bucket]
        if bucket is None:
            tokens, wanted = sum(len(piece.tokens) for piece in run), sum(len(piece.positions) for piece in run)
            self._lay_out(chosen.staging, tokens, len(run), wanted)
            self._bind(chosen, wanted)
            chosen.metadata[:] = bounds
        count = write(chosen.staging.views(), run, self._pad_block)
        self._launch(chosen)
        logits = np.empty((count, self.capabilities.vocab_size), np.float32)
        if count:
            self._device.download(logits, self._logits)
        return logits

    def _launch(self, chosen: _Captured) -> None:
        staging = chosen.staging
        last, array = staging.arrays[BLOCK_TABLE]
        size = max(max(at + found.nbytes for at, found in staging.arrays.values()), last + array.nbytes)
        self._device.upload(staging.address, staging.host, size)
        self._session.run_with_iobinding(chosen.binding, chosen.options)

    def _capture(self, bucket: DecodeBucket) -> None:
        """One call: ONNX Runtime itself runs the step until it is captured. Its rows are padding."""
        chosen = self._graphs[bucket]
        self._bind(chosen, bucket.rows)
        chosen.metadata[:] = bucket.bounds
        write(chosen.staging.views(), (), self._pad_block)
        self._launch(chosen)

    def _staging(self, tokens: int, entries: int, wanted: int) -> _Staging:
        size = bytes_of(shapes(tokens, entries, wanted, self._columns))
        staging = _Staging(self._device.pinned(size), self._device.allocate(size, "the inputs of a step"), {})
        self._lay_out(staging, tokens, entries, wanted)
        return staging

    def _lay_out(self, staging: _Staging, tokens: int, entries: int, wanted: int) -> None:
        every = shapes(tokens, entries, wanted, self._columns)
        staging.arrays = laid_out(staging.host, {name: shape for name, shape in every.items() if name in self._inputs})

    def _captured(self, graph: int, staging: _Staging) -> _Captured:
        options = ort.RunOptions()
        options.add_run_config_entry("gpu_graph_id", str(graph))
        captured = _Captured(
            self._session.io_binding(), options, np.zeros(len(LengthBounds._fields), np.int32), staging
        )
        captured.binding.bind_input(
            ATTENTION_METADATA, "cpu", 0, np.int32, captured.metadata.shape, captured.metadata.ctypes.data
        )
        for name, cache in self._cache.items():
            captured.binding.bind_input(name, "cuda", 0, cache.element, cache.shape, cache.address)
        return captured

    def _bind(self, chosen: _Captured, wanted: int) -> None:
        """Inputs of a step and logits at their addresses on the GPU."""
        staging = chosen.staging
        for name, (at, array) in staging.arrays.items():
            chosen.binding.bind_input(name, "cuda", 0, array.dtype.type, array.shape, staging.address + at)
        shape = (wanted, self.capabilities.vocab_size)
        chosen.binding.bind_output("logits", "cuda", 0, np.float32, shape, self._logits)


def _open(path: str) -> ort.InferenceSession:
    """:class:`BuildError` where a node would compute elsewhere than on the GPU: ONNX Runtime captures no such graph."""
    ort.preload_dlls()
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry(FUSED_LINEARS, "1")
    try:
        session = ort.InferenceSession(path, options, providers=[(PROVIDER, {"enable_cuda_graph": "1"})])
        if session.get_providers()[0] != PROVIDER:
            raise RuntimeError("ONNX Runtime could not load its CUDA provider, and takes the CPU's")
    except Exception as error:  # ONNX Runtime's errors have no class in common
        raise BuildError(
            f"{path} cannot be opened on the GPU: {str(error).splitlines()[0]}",
            expected="a graph that the CUDA provider runs, its libraries, and memory for the weights",
            remedy="run `tapeout doctor`; it names what is missing",
        ) from error
    return session


def _caches(device: CudaDevice, io: IOContract, blocks: int) -> dict[str, _Cache]:
    """By the graph's input. A block is ``[block_tokens, KV, D]``."""
    found: dict[str, _Cache] = {}
    for name, (_, *heads, tokens, columns), element in paged_buffers(io.state, blocks, BLOCK_TOKENS):
        block_bytes = math.prod((*heads, tokens, columns)) * np.dtype(element).itemsize
        address = device.allocate(blocks * block_bytes, f"the KV cache of {blocks * BLOCK_TOKENS} tokens")
        shape = (blocks, tokens, *heads, columns)
        found[f"past_key_values.{name}"] = _Cache(address, block_bytes, shape, np.dtype(element).type)
    return found
