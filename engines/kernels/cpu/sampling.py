"""The native kernel that chooses tokens: ``source/sampling.c`` through ctypes, on several threads.

V  vocabulary size

It computes what ``runtime/engine/draw.py`` does in numpy, to the bit, in a fiftieth of the time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

from engines.kernels.sampling import NONE_LEFT, NOT_FINITE, Drawn, SamplingRow, normalizer
from tapeout.cores import keep_to, usable
from tapeout.errors import BuildError

_NOT_FINITE, _NONE_LEFT = -1, -2  # as sampling.c has them
_SYMBOL = (
    "tapeout_sample_1"  # renamed with every change of `KernelRow`, so that a library of another version is not used
)


class KernelRow(ctypes.Structure):
    """One draw. Pointers are addresses of arrays that must outlive it; sampling.c says what each field is."""

    logits: int  # float32 [V]
    mask: int | None  # uint32 [ceil(V / 32)]
    tokens: int | None  # int32 [adjusted]
    bias: int | None  # float32 [adjusted], as the next two
    factor: int | None
    shift: int | None
    adjusted: int
    random: int
    top_p: float
    scale: float
    top_k: int
    least: int
    top: int
    top_tokens: int | None  # int32 [top]
    total: int
    max: float
    token: int

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("logits", "mask", "tokens", "bias", "factor", "shift")),
        ("adjusted", ctypes.c_int64),
        ("random", ctypes.c_uint64),
        ("top_p", ctypes.c_double),
        ("scale", ctypes.c_float),
        ("top_k", ctypes.c_int32),
        ("least", ctypes.c_int32),
        ("top", ctypes.c_int32),
        ("top_tokens", ctypes.c_void_p),
        ("total", ctypes.c_int64),
        ("max", ctypes.c_float),
        ("token", ctypes.c_int32),
    )


class _KernelDraw:
    """A draw by the native kernel. Keeps the arrays that it points to."""

    def __init__(self, row: SamplingRow) -> None:
        self._logits = np.ascontiguousarray(row.logits)
        self._row = row
        self.native = native = KernelRow()
        native.logits = self._logits.ctypes.data
        native.scale, native.top_k, native.top_p, native.least = row.filters
        native.random = row.random
        native.top = -1
        if row.adjustments is not None:
            native.adjusted = row.adjustments.count
            native.tokens, native.bias, native.factor, native.shift = row.adjustments.addresses
        if row.mask is not None:
            native.mask = row.mask.ctypes.data
        if row.top is not None:
            native.top = min(row.top, len(row.logits))
            self._likeliest = np.zeros(native.top, np.int32)
            native.top_tokens = self._likeliest.ctypes.data

    def drawn(self) -> Drawn:
        native = self.native
        token = {_NOT_FINITE: NOT_FINITE, _NONE_LEFT: NONE_LEFT}.get(native.token, native.token)
        if self._row.top is None or not native.total:
            return Drawn(token)
        return Drawn(token, normalizer(native.max, native.total), self._likeliest.tolist())


class SamplingKernel:
    """See :class:`engines.kernels.sampling.Sampler`. It starts ``threads - 1`` threads of its own."""

    def __init__(self, library: Path, vocab_size: int, threads: int = 1) -> None:
        """``library``: native kernels that this processor can run, with the kernel of this version."""
        loaded = ctypes.CDLL(str(library.resolve()))
        size = loaded.tapeout_sample_bytes
        size.argtypes, size.restype = [ctypes.c_int64], ctypes.c_int64
        self._sample = getattr(loaded, _SYMBOL)
        self._sample.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p]
        self._sample.restype = None
        self._vocab_size = vocab_size
        self._memory = [np.empty(-(-size(vocab_size) // 8), np.int64) for _ in range(threads)]
        # They may start when the calling thread has left a core to the server, and need not leave it themselves.
        start = partial(keep_to, usable())
        self._pool = ThreadPoolExecutor(threads - 1, "sampling", start) if threads > 1 else None

    def draw(self, rows: Sequence[SamplingRow]) -> list[Drawn]:
        calls = [_KernelDraw(row) for row in rows]
        self._run_all([call.native for call in calls])
        return [call.drawn() for call in calls]

    def _run_all(self, rows: Sequence[KernelRow]) -> None:
        """Set the results of all rows."""
        threads = min(len(self._memory), len(rows))
        ends = [len(rows) * part // threads for part in range(threads + 1)]
        others = [
            self._pool.submit(self._run, rows[start:end], memory)
            for start, end, memory in zip(ends[1:], ends[2:], self._memory[1:], strict=False)
            if self._pool is not None
        ]
        self._run(rows[: ends[1]], self._memory[0])
        for other in others:
            other.result()

    def _run(self, rows: Sequence[KernelRow], memory: np.typing.NDArray[np.int64]) -> None:
        pointers = (ctypes.c_void_p * len(rows))(*map(ctypes.addressof, rows))
        self._sample(pointers, len(rows), self._vocab_size, memory.ctypes.data)


def sampling_kernel(library: Path | None, vocab_size: int, threads: int = 1) -> SamplingKernel | None:
    """From a bundle's library; or from one compiled here, if the compiler is installed. None without either.

    ``library``: what :func:`engines.kernels.cpu.serving.library_of` gives. That of an older bundle may lack the kernel.
    """
    if library is not None:
        try:
            return SamplingKernel(library, vocab_size, threads)
        except AttributeError:
            pass
    from engines.kernels.cpu import compiler, level

    here = level()
    if here is None:
        return None
    try:
        return SamplingKernel(compiler.library(here), vocab_size, threads)
    except BuildError:
        return None
