"""Runs an ``ort-cpu`` bundle: one session, KV buffers in place, bindings kept between steps.

The KV buffers are arrays of zeros as ``IOContract`` has them; pages cost no memory until they are written. A step binds
a window of neighbouring slots by address, as past and as present, so nothing is copied. Bindings are made once per
window. Input buffers are reused and rebound only when the shape changes: after a step, Python's code and data are out
of the processor's caches, and a line of it costs ten times as much.
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
from engines.sessions import CPU, cpu_options, library_of
from engines.step_inputs import StepInputs, check_copy, check_decode, prefill_inputs
from tapeout.artifact import Artifact
from tapeout.errors import RequestError

# A prompt is fed in pieces: attention then skips most of what the causal mask hides, and a long prompt needs no more
# memory than a short one. The size matters little (attention over 1,024 tokens: 144 ms in pieces of 64, 147 of 256).
PROMPT_TOKENS = 256


@dataclass
class _Window:
    """Bindings for neighbouring slots of the KV buffers, and the other bound arrays by name."""

    binding: ort.IOBinding
    bound: dict[str, NDArray[Any]]
    fed: int = 0  # tokens per entry that the arrays are for

    def array(
        self, bind: Callable[..., None], name: str, shape: tuple[int, ...], dtype: Any = np.int64
    ) -> NDArray[Any]:
        """The array of an input or output of the next run; ``bind`` is ``bind_input`` or ``bind_output``."""
        array = self.bound.get(name)
        if array is None or array.shape != shape:
            array = self.bound[name] = np.empty(shape, dtype)
            bind(name, "cpu", 0, dtype, shape, array.ctypes.data)
        return array


class OrtCpuEngine:
    """See :class:`engines.protocol.Engine`."""

    def __init__(self, bundle: Artifact[EngineBundle], *, threads: int = 0, slots: int | None = None) -> None:
        io = bundle.record.io
        options = cpu_options(threads, library_of(bundle))
        self._session = ort.InferenceSession(str(bundle.folder / "model.onnx"), options, providers=CPU)
        self.digest, self.slots = bundle.digest, slots or io.slots
        self.vocab_size, self.max_tokens = io.vocab_size, io.max_tokens
        self._element: Any = np.dtype(io.kv_element).type
        self._cache: dict[str, NDArray[Any]] = {}
        for layer, shape in enumerate(io.kv_layers):
            for part in ("key", "value"):
                self._cache[f"{layer}.{part}"] = _zeros(io.kv_shape(shape, self.slots, io.max_tokens), self._element)
        self._windows: dict[tuple[int, int, str], _Window] = {}
        self._wants_positions = "position_ids" in io.inputs
        self._gives_either = GREEDY in io.inputs
        self._wants_total = "total_sequence_length" in io.inputs  # as ONNX Runtime's own attention does

    def prefill(
        self, slot: int, tokens: Sequence[int], *, start: int = 0, positions: Sequence[int] | None = None
    ) -> FloatArray:
        step = prefill_inputs(self, slot, tokens, start, positions)
        logits = np.empty((len(step.logit_positions), self.vocab_size), np.float32)
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
            chosen = logits.argmax(axis=1)  # of a NaN, if there is one
            chosen[~np.isfinite(logits[np.arange(len(tokens)), chosen])] = -1
        if chosen.min() < 0:
            raise RequestError(
                f"batch entry {int(chosen.argmin())} of a step has no finite largest logit",
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

    def _window(self, first: int, entries: int, wanted: str) -> _Window:
        window = self._windows.get((first, entries, wanted))
        if window is None:
            binding = self._session.io_binding()
            for name, buffer in self._cache.items():
                part = buffer[first : first + entries]
                for bind, prefix in ((binding.bind_input, "past_key_values"), (binding.bind_output, "present")):
                    bind(f"{prefix}.{name}", "cpu", 0, self._element, part.shape, part.ctypes.data)
            window = _Window(binding, {})
            self._windows[(first, entries, wanted)] = window
        return window

    def _logits(self, window: _Window, entries: int) -> FloatArray:
        logits = np.empty((entries, self.vocab_size), np.float32)  # the caller keeps it, so it is bound anew
        window.binding.bind_output("logits", "cpu", 0, np.float32, logits.shape, logits.ctypes.data)
        self._session.run_with_iobinding(window.binding)
        return logits

    def _feed(self, slot: int, step: StepInputs) -> _Window:
        """A window of one slot with all inputs of the step. The caller binds its logits."""
        window = self._window(slot, 1, "logits")
        self._lay_out(window, 1, step.ids.shape[1], "logits")
        bound, last = window.bound, int(step.starts[0]) + step.ids.shape[1] - 1
        window.array(window.binding.bind_input, "logit_positions", step.logit_positions.shape)[:] = step.logit_positions
        bound["input_ids"][:] = step.ids
        bound["seqlens_k"][:] = last  # position of the last token
        if self._wants_total:
            bound["total_sequence_length"][...] = last + 1
        if self._wants_positions:
            bound["position_ids"][:] = step.position_ids
        window.fed = 0  # wanted logits differ from step to step; a decode step lays the inputs out again
        return window

    def _feed_one_each(self, first: int, tokens: Sequence[int], lengths: Sequence[int], wanted: str) -> _Window:
        """A window with one token of each entry. The caller binds the output ``wanted``, logits or next tokens."""
        check_decode(self, tokens, lengths, first)
        entries = len(tokens)
        window = self._window(first, entries, wanted)
        if window.fed != 1:
            self._lay_out(window, entries, 1, wanted)
            window.array(window.binding.bind_input, "logit_positions", (entries,))[:] = np.arange(entries)
        bound = window.bound
        bound["input_ids"][:, 0] = tokens
        bound["seqlens_k"][:] = lengths
        if self._wants_total:
            bound["total_sequence_length"][...] = max(lengths) + 1
        if self._wants_positions:
            bound["position_ids"][:, 0] = lengths
        return window

    def _lay_out(self, window: _Window, entries: int, fed: int, wanted: str) -> None:
        """Bind what does not depend on how many logits are wanted, for steps of ``fed`` tokens per entry."""
        bind, window.fed = window.binding.bind_input, fed
        window.array(bind, "input_ids", (entries, fed))
        window.array(bind, "seqlens_k", (entries,), np.int32)
        if self._wants_total:
            window.array(bind, "total_sequence_length", (), np.int32)
        if self._wants_positions:
            window.array(bind, "position_ids", (entries, fed))
        if self._gives_either:
            window.array(bind, GREEDY, (), np.bool_)[...] = wanted == NEXT_TOKENS


def _zeros(shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """Zeros whose memory is taken page by page as it is written.

    ``numpy.zeros`` asks the operating system for huge pages, and a slot's first token then takes 2 MB in every layer:
    with 32 slots of 192 tokens the default model held 900 MB with them, and holds 370 without, at the same speed.
    """
    pages = mmap.mmap(-1, math.prod(shape) * np.dtype(dtype).itemsize)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(pages, dtype).reshape(shape)
