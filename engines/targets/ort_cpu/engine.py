"""Runs an ``ort-cpu`` bundle: one session, KV buffers in place, bindings kept between steps.

The KV buffers are arrays of zeros as ``IOContract`` has them, which cost no memory until touched. A
step binds a window of neighbouring slots by address, as past and as present alike, so nothing is copied; the bindings
of each window are made once and used again. What a step feeds is written where the step before it lay, and bound again
only where its shape is another: after a step every line of Python is out of the processor's caches, and costs tenfold.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from engines.bundle import GREEDY, NEXT_TOKENS, EngineBundle
from engines.protocol import FloatArray, TokenArray
from engines.sessions import cpu_options, library_of
from engines.step_inputs import StepInputs, check_copy, check_decode, prefill_inputs
from tapeout.artifact import Artifact
from tapeout.errors import RequestError

# A prompt is fed in pieces: attention then skips most of what causality hides, and a long prompt needs no more memory
# than a short one. Which size matters little (attention over 1,024 tokens: 144 ms in pieces of 64, 147 of 256).
PROMPT_TOKENS = 256


@dataclass
class _Window:
    """Bindings for rows ``first .. first+rows-1`` of the KV buffers, and the arrays bound beside them by name."""

    binding: ort.IOBinding
    bound: dict[str, NDArray[Any]]
    fed: int = 0  # tokens a row that the arrays are for

    def array(
        self, bind: Callable[..., None], name: str, shape: tuple[int, ...], dtype: Any = np.int64
    ) -> NDArray[Any]:
        """What lies at an input or output of the next run; ``bind`` is the binding's own for either."""
        array = self.bound.get(name)
        if array is None or array.shape != shape:
            array = self.bound[name] = np.empty(shape, dtype)
            bind(name, "cpu", 0, dtype, shape, array.ctypes.data)
        return array


class OrtCpuEngine:
    """See :class:`engines.protocol.Engine`."""

    def __init__(self, bundle: Artifact[EngineBundle], *, threads: int = 0, slots: int | None = None) -> None:
        self._bundle = bundle
        io = bundle.record.io
        options = cpu_options(threads, library_of(bundle))
        self._session = ort.InferenceSession(
            str(bundle.folder / "model.onnx"), options, providers=["CPUExecutionProvider"]
        )
        self._slots = slots or io.slots
        self._vocab_size, self._max_tokens = io.vocab_size, io.max_tokens
        self._element: Any = np.dtype(io.kv_element).type
        self._cache: dict[str, NDArray[Any]] = {}
        for layer, shape in enumerate(io.kv_layers):
            for part in ("key", "value"):
                self._cache[f"{layer}.{part}"] = _zeros(io.kv_shape(shape, self._slots, io.max_tokens), self._element)
        self._windows: dict[tuple[int, int, str], _Window] = {}
        self._wants_positions = "position_ids" in io.inputs
        self._gives_either = GREEDY in io.inputs
        self._wants_total = "total_sequence_length" in io.inputs  # as ONNX Runtime's own attention does

    @property
    def digest(self) -> str:
        return self._bundle.digest

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def slots(self) -> int:
        return self._slots

    @property
    def max_tokens(self) -> int:
        return self._max_tokens

    def prefill(
        self, slot: int, tokens: Sequence[int], *, start: int = 0, rows: Sequence[int] | None = None
    ) -> FloatArray:
        step = prefill_inputs(self, slot, tokens, start, rows)
        logits = np.empty((len(step.rows), self.vocab_size), np.float32)
        for piece, places in step.pieces(PROMPT_TOKENS):
            logits[places] = self._logits(self._feed(slot, piece), len(places))
        return logits

    def decode(self, tokens: Sequence[int], lengths: Sequence[int], *, first_slot: int = 0) -> FloatArray:
        return self._logits(self._feed_one_each(first_slot, tokens, lengths, "logits"), len(tokens))

    def decode_greedy(self, tokens: Sequence[int], lengths: Sequence[int], *, first_slot: int = 0) -> TokenArray:
        if self._gives_either:
            window = self._feed_one_each(first_slot, tokens, lengths, NEXT_TOKENS)
            chosen = window.array(window.binding.bind_output, NEXT_TOKENS, (len(tokens),))
            self._session.run_with_iobinding(window.binding)
        else:
            logits = self.decode(tokens, lengths, first_slot=first_slot)
            chosen = logits.argmax(axis=1)  # stops at what is no number
            chosen[~np.isfinite(logits[np.arange(len(tokens)), chosen])] = -1
        if chosen.min() < 0:
            raise RequestError(
                f"row {int(chosen.argmin())} of a step has no finite largest logit",
                expected="finite logits",
                remedy="rebuild the bundle; `tapeout inspect` shows which quantized layers have the largest errors",
            )
        return chosen.copy()

    def copy_slot(self, source: int, target: int, length: int) -> None:
        check_copy(self, source, target, length)
        for buffer in self._cache.values():
            buffer[target, :, :length] = buffer[source, :, :length]

    def close(self) -> None:
        self._windows.clear()
        self._cache.clear()

    def _window(self, first: int, rows: int, wanted: str) -> _Window:
        window = self._windows.get((first, rows, wanted))
        if window is None:
            binding = self._session.io_binding()
            for name, buffer in self._cache.items():
                part = buffer[first : first + rows]
                for bind, prefix in ((binding.bind_input, "past_key_values"), (binding.bind_output, "present")):
                    bind(f"{prefix}.{name}", "cpu", 0, self._element, part.shape, part.ctypes.data)
            window = _Window(binding, {})
            self._windows[(first, rows, wanted)] = window
        return window

    def _logits(self, window: _Window, rows: int) -> FloatArray:
        logits = np.empty((rows, self.vocab_size), np.float32)  # handed over, so bound anew
        window.binding.bind_output("logits", "cpu", 0, np.float32, logits.shape, logits.ctypes.data)
        self._session.run_with_iobinding(window.binding)
        return logits

    def _feed(self, slot: int, step: StepInputs) -> _Window:
        """A window of one row with all inputs of the step; its logits are to be bound."""
        window = self._window(slot, 1, "logits")
        self._lay_out(window, 1, step.ids.shape[1], "logits")
        bound, last = window.bound, int(step.starts[0]) + step.ids.shape[1] - 1
        window.array(window.binding.bind_input, "logit_positions", step.rows.shape)[:] = step.rows
        bound["input_ids"][:] = step.ids
        bound["seqlens_k"][:] = last  # positions of the rows' last tokens
        if self._wants_total:
            bound["total_sequence_length"][...] = last + 1
        if self._wants_positions:
            bound["position_ids"][:] = step.positions
        window.fed = 0  # rows whose logits are wanted may be any; a decode step lays them out again
        return window

    def _feed_one_each(self, first: int, tokens: Sequence[int], lengths: Sequence[int], wanted: str) -> _Window:
        """A window with a token of each row; of the graph's outputs beside the cache, ``wanted`` is to be bound."""
        check_decode(self, tokens, lengths, first)
        rows = len(tokens)
        window = self._window(first, rows, wanted)
        if window.fed != 1:
            self._lay_out(window, rows, 1, wanted)
            window.array(window.binding.bind_input, "logit_positions", (rows,))[:] = np.arange(rows)
        bound = window.bound
        bound["input_ids"][:, 0] = tokens
        bound["seqlens_k"][:] = lengths
        if self._wants_total:
            bound["total_sequence_length"][...] = max(lengths) + 1
        if self._wants_positions:
            bound["position_ids"][:, 0] = lengths
        return window

    def _lay_out(self, window: _Window, rows: int, fed: int, wanted: str) -> None:
        """Bind what does not depend on how many rows' logits are wanted, for steps of ``fed`` tokens a row."""
        bind, window.fed = window.binding.bind_input, fed
        window.array(bind, "input_ids", (rows, fed))
        window.array(bind, "seqlens_k", (rows,), np.int32)
        if self._wants_total:
            window.array(bind, "total_sequence_length", (), np.int32)
        if self._wants_positions:
            window.array(bind, "position_ids", (rows, fed))
        if self._gives_either:
            window.array(bind, GREEDY, (), np.bool_)[...] = wanted == NEXT_TOKENS


def _zeros(shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """Zeros whose memory is taken page by page as it is written.

    ``numpy.zeros`` asks the operating system for huge pages, and a slot's first token then takes 2 MB in every layer:
    with 32 slots of 192 tokens the default model held 900 MB so, and holds 370 without, at the same speed.
    """
    pages = mmap.mmap(-1, math.prod(shape) * np.dtype(dtype).itemsize)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(pages, dtype).reshape(shape)
