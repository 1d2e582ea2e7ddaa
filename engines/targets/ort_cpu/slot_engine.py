"""Runs an ``ort-cpu`` bundle with ONNX Runtime's own attention: a contiguous KV buffer for each sequence.

A decode step binds a window of neighbouring slots by address, as past and as present, so nothing is copied. Bindings
are made once per window. The buffers are arrays of zeros; a page of them costs no memory until it is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engines.bundle import GREEDY, NEXT_TOKENS, EngineBundle
from engines.protocol import EngineCapabilities, FloatArray, TokenArray
from engines.sessions import cpu_options, keep_mapped, library_of, open_session, threads_of
from engines.slot_engine import SlotEngine
from engines.step_inputs import Int64Array
from engines.targets.ort_cpu.buffers import Bound, bind_cache, zeros
from tapeout.artifact import Artifact
from tapeout.state import paged_buffers

# A prompt is fed in pieces: attention then skips most of what the causal mask hides, and a long prompt needs no more
# memory than a short one. The size matters little (attention over 1,024 tokens: 144 ms in pieces of 64, 147 of 256).
PROMPT_TOKENS = 256


class OrtSlotEngine(SlotEngine):
    prompt_tokens = PROMPT_TOKENS

    def __init__(self, bundle: Artifact[EngineBundle], *, threads: int, slots: int) -> None:
        io = bundle.record.io
        library = library_of(bundle)
        options = cpu_options(threads, library)
        keep_mapped(options, bundle)
        self._session = open_session(str(bundle.folder / "model.onnx"), options)
        self.digest = bundle.digest
        self.capabilities = EngineCapabilities(
            block_tokens=io.max_tokens,
            blocks=slots,
            block_bytes=io.token_bytes * io.max_tokens,
            max_batch=slots,
            max_tokens=io.max_tokens,
            vocab_size=io.vocab_size,
            shares_blocks=False,
            chooses_tokens=GREEDY in io.inputs,
            threads=threads_of(threads, library),
        )
        self._cache: dict[str, NDArray[Any]] = {
            name: zeros(shape, element) for name, shape, element in paged_buffers(io.state, slots, io.max_tokens)
        }
        self._windows: dict[tuple[int, int, str], Bound] = {}
        self._wants_positions = "position_ids" in io.inputs

    def prefill(self, slot: int, tokens: Sequence[int], start: int, positions: Sequence[int]) -> FloatArray:
        ids = np.array(tokens, np.int64)[None]
        bound = self._feed(slot, ids, np.array([start], np.int64), positions, "logits")
        return self._logits(bound, len(positions))

    def decode(self, first_slot: int, tokens: Int64Array, starts: Int64Array) -> FloatArray:
        bound = self._feed(first_slot, tokens[:, None], starts, range(len(tokens)), "logits")
        return self._logits(bound, len(tokens))

    def decode_tokens(self, first_slot: int, tokens: Int64Array, starts: Int64Array) -> TokenArray:
        bound = self._feed(first_slot, tokens[:, None], starts, range(len(tokens)), NEXT_TOKENS)
        chosen = bound.output(NEXT_TOKENS, (len(tokens),))
        self._session.run_with_iobinding(bound.binding)
        return chosen.copy()

    def copy_block(self, source: int, target: int, tokens: int) -> None:
        for buffer in self._cache.values():
            buffer[target, :, :tokens] = buffer[source, :, :tokens]

    def close(self) -> None:
        self._windows.clear()
        self._cache.clear()
        vars(self).pop("_session", None)  # it holds the weights; an engine may be closed twice

    def _window(self, first: int, count: int, wanted: str) -> Bound:
        window = self._windows.get((first, count, wanted))
        if window is None:
            window = self._windows[first, count, wanted] = Bound(self._session.io_binding())
            part = {name: buffer[first : first + count] for name, buffer in self._cache.items()}
            bind_cache(window.binding, part, present=True)
        return window

    def _feed(self, first: int, ids: Int64Array, starts: Int64Array, places: Sequence[int], wanted: str) -> Bound:
        """A window with all inputs of a run of ``ids [B, S]`` at positions ``starts [B]`` of neighbouring slots."""
        batch, count = ids.shape
        bound = self._window(first, batch, wanted)
        bound.input("input_ids", ids.shape)[:] = ids
        bound.input("seqlens_k", (batch,), np.int32)[:] = starts + (count - 1)  # position of the last token
        bound.input("total_sequence_length", (), np.int32)[...] = int(starts.max()) + count
        bound.input("logit_positions", (len(places),))[:] = places
        if self._wants_positions:
            bound.input("position_ids", ids.shape)[:] = starts[:, None] + np.arange(count)
        if self.capabilities.chooses_tokens:
            bound.input(GREEDY, (), np.bool_)[...] = wanted == NEXT_TOKENS
        return bound

    def _logits(self, bound: Bound, count: int) -> FloatArray:
        logits = np.empty((count, self.capabilities.vocab_size), np.float32)  # the caller keeps it: it is bound anew
        bound.binding.bind_output("logits", "cpu", 0, np.float32, logits.shape, logits.ctypes.data)
        self._session.run_with_iobinding(bound.binding)
        return logits
