"""Runs an ``ort-cpu`` bundle: one session, KV buffers in place, bindings kept between steps.

The KV buffers are ``[slots, heads, max_tokens, head_size]`` arrays of zeros, which cost no memory until touched
(MEASURED.md). A step binds a window of neighbouring slots by address, as past and as present alike, so nothing is
copied; the bindings of each window are made once and used again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from engines.bundle import EngineBundle
from engines.protocol import FloatArray
from engines.threads import physical_cores
from pipeline.artifact import Artifact
from pipeline.errors import BuildError

_KV_DTYPES: dict[str, Any] = {"float32": np.float32, "int8": np.int8}


@dataclass
class _Window:
    """Bindings for rows ``first .. first+rows-1`` of the KV buffers, and the small inputs that change each step."""

    binding: ort.IOBinding
    seqlens: NDArray[np.int32]
    total: NDArray[np.int32]


class OrtCpuEngine:
    """See :class:`engines.protocol.Engine`."""

    def __init__(self, bundle: Artifact[EngineBundle], *, threads: int = 0, slots: int | None = None) -> None:
        self._bundle = bundle
        record = bundle.record
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads or physical_cores()
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        self._session = ort.InferenceSession(
            str(bundle.folder / "model.onnx"), options, providers=["CPUExecutionProvider"]
        )
        self._slots = slots or record.io.slots
        dtype = _KV_DTYPES[record.io.kv_dtype]
        self._cache: dict[str, NDArray[Any]] = {}
        for layer, shape in enumerate(record.io.kv_layers):
            for part in ("key", "value"):
                self._cache[f"{layer}.{part}"] = np.zeros(
                    (self._slots, shape.heads, record.io.max_tokens, shape.head_size), dtype
                )
        self._element = dtype
        self._windows: dict[tuple[int, int], _Window] = {}
        self._wants_positions = "position_ids" in record.io.inputs

    @property
    def digest(self) -> str:
        return self._bundle.digest

    @property
    def vocab_size(self) -> int:
        return self._bundle.record.io.vocab_size

    @property
    def slots(self) -> int:
        return self._slots

    @property
    def max_tokens(self) -> int:
        return self._bundle.record.io.max_tokens

    def prefill(
        self, slot: int, tokens: Sequence[int], *, start: int = 0, rows: Sequence[int] | None = None
    ) -> FloatArray:
        count = len(tokens)
        if not count or start < 0 or start + count > self.max_tokens or not 0 <= slot < self._slots:
            raise BuildError(
                f"prefill of {count} tokens at {start} in slot {slot}",
                expected=f"at least one token, within {self.max_tokens} positions and {self._slots} slots",
            )
        wanted = np.asarray([count - 1] if rows is None else rows, np.int64)
        if wanted.size and not 0 <= wanted.min() <= wanted.max() < count:
            raise BuildError(
                f"logits asked of rows {wanted.min()} to {wanted.max()}",
                expected=f"rows 0 to {count - 1} of the tokens fed",
            )
        window = self._window(slot, 1)
        window.seqlens[0] = start + count - 1
        window.total[...] = start + count
        ids = np.asarray(tokens, np.int64)[None]
        positions = np.arange(start, start + count, dtype=np.int64)[None] if self._wants_positions else None
        return self._run(window, ids, wanted, positions)

    def decode(self, tokens: Sequence[int], lengths: Sequence[int], *, first_slot: int = 0) -> FloatArray:
        batch = len(tokens)
        if len(lengths) != batch or not batch or not 0 <= first_slot <= self._slots - batch:
            raise BuildError(
                f"decode of {batch} tokens with {len(lengths)} lengths from slot {first_slot}",
                expected=f"one length a token, within {self._slots} slots",
            )
        longest = max(lengths)
        if min(lengths) < 1 or longest >= self.max_tokens:
            raise BuildError(
                f"decode at lengths {min(lengths)} to {longest}",
                expected=f"prefilled slots with room: 1 to {self.max_tokens - 1} positions",
            )
        window = self._window(first_slot, batch)
        window.seqlens[:] = lengths  # valid positions after this step, less one
        window.total[...] = longest + 1
        ids = np.asarray(tokens, np.int64)[:, None]
        positions = np.asarray(lengths, np.int64)[:, None] if self._wants_positions else None
        return self._run(window, ids, np.arange(batch, dtype=np.int64), positions)

    def copy_slot(self, source: int, target: int, length: int) -> None:
        if not (0 <= source < self._slots and 0 <= target < self._slots and 0 <= length <= self.max_tokens):
            raise BuildError(
                f"copy of {length} positions from slot {source} to {target}",
                expected=f"at most {self.max_tokens} positions, within {self._slots} slots",
            )
        for buffer in self._cache.values():
            buffer[target, :, :length] = buffer[source, :, :length]

    def close(self) -> None:
        self._windows.clear()
        self._cache.clear()

    def _window(self, first: int, rows: int) -> _Window:
        window = self._windows.get((first, rows))
        if window is None:
            binding = self._session.io_binding()
            for name, buffer in self._cache.items():
                part = buffer[first : first + rows]
                for bind, prefix in ((binding.bind_input, "past_key_values"), (binding.bind_output, "present")):
                    bind(f"{prefix}.{name}", "cpu", 0, self._element, part.shape, part.ctypes.data)
            window = _Window(binding, np.zeros(rows, np.int32), np.zeros((), np.int32))
            binding.bind_input("seqlens_k", "cpu", 0, np.int32, window.seqlens.shape, window.seqlens.ctypes.data)
            binding.bind_input("total_sequence_length", "cpu", 0, np.int32, (), window.total.ctypes.data)
            self._windows[(first, rows)] = window
        return window

    def _run(
        self,
        window: _Window,
        ids: NDArray[np.int64],
        rows: NDArray[np.int64],
        positions: NDArray[np.int64] | None,
    ) -> FloatArray:
        if ids.min() < 0 or ids.max() >= self.vocab_size:  # a quantized table would be read past its end
            raise BuildError(
                f"token ids {ids.min()} to {ids.max()}",
                expected=f"ids of this model's vocabulary, 0 to {self.vocab_size - 1}",
            )
        binding = window.binding
        logits = np.empty((len(rows), self.vocab_size), np.float32)
        binding.bind_input("input_ids", "cpu", 0, np.int64, ids.shape, ids.ctypes.data)
        binding.bind_input("logit_rows", "cpu", 0, np.int64, rows.shape, rows.ctypes.data)
        if positions is not None:
            binding.bind_input("position_ids", "cpu", 0, np.int64, positions.shape, positions.ctypes.data)
        binding.bind_output("logits", "cpu", 0, np.float32, logits.shape, logits.ctypes.data)
        self._session.run_with_iobinding(binding)
        return logits
