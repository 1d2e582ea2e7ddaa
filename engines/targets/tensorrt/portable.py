"""Runs a LoweredGraph on ONNX Runtime's CPU kernels: what a compiler was given, computed by someone else.

Slow, and for evidence only: it shows what the lowering and its precision do to the answers (Q/DQ included), not what
the compiled engine will do. BF16 has no kernels there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from engines.compile import MODEL_FILE
from engines.lowered import LoweredGraph
from engines.protocol import FloatArray
from engines.threads import physical_cores
from pipeline.artifact import Artifact
from pipeline.errors import BuildError


class PortableEngine:
    """See :class:`engines.protocol.Engine`. ``max_tokens`` may be less than the graph's: attention costs its length."""

    def __init__(
        self, lowered: Artifact[LoweredGraph], *, max_tokens: int | None = None, slots: int = 1, threads: int = 0
    ) -> None:
        io = lowered.record.io
        if io.kv_dtype != "float16":
            raise BuildError(
                f"a lowered graph in {lowered.record.precision}",
                expected="fp16, int4 or fp8: ONNX Runtime has no BF16 kernels on CPU",
                remedy="take evidence from the fp16 build",
            )
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads or physical_cores()
        options.log_severity_level = 3
        # Fusing Q/DQ pairs into integer kernels would round where the compiled engine does not.
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
        options.add_session_config_entry("session.disable_quant_qdq", "1")
        self._session = ort.InferenceSession(
            str(lowered.folder / MODEL_FILE), options, providers=["CPUExecutionProvider"]
        )
        self._lowered = lowered
        self._max_tokens = min(max_tokens or io.max_tokens, io.max_tokens)
        self._slots = slots
        self._cache: dict[str, NDArray[np.float16]] = {
            f"{layer}.{part}": np.zeros((slots, shape.heads, self._max_tokens, shape.head_size), np.float16)
            for layer, shape in enumerate(io.kv_layers)
            for part in ("key", "value")
        }

    @property
    def digest(self) -> str:
        return self._lowered.digest

    @property
    def vocab_size(self) -> int:
        return self._lowered.record.io.vocab_size

    @property
    def slots(self) -> int:
        return self._slots

    @property
    def max_tokens(self) -> int:
        return self._max_tokens

    def prefill(
        self, slot: int, tokens: Sequence[int], *, start: int = 0, rows: Sequence[int] | None = None
    ) -> FloatArray:
        count = len(tokens)
        if not count or start < 0 or start + count > self._max_tokens or not 0 <= slot < self._slots:
            raise BuildError(
                f"prefill of {count} tokens at {start} in slot {slot}",
                expected=f"at least one token, within {self._max_tokens} positions and {self._slots} slots",
            )
        wanted = [count - 1] if rows is None else list(rows)
        return self._run(slot, np.asarray(tokens, np.int64)[None], np.array([start], np.int64), wanted)

    def decode(self, tokens: Sequence[int], lengths: Sequence[int], *, first_slot: int = 0) -> FloatArray:
        batch = len(tokens)
        if len(lengths) != batch or not batch or not 0 <= first_slot <= self._slots - batch:
            raise BuildError(
                f"decode of {batch} tokens with {len(lengths)} lengths from slot {first_slot}",
                expected=f"one length a token, within {self._slots} slots",
            )
        if min(lengths) < 1 or max(lengths) >= self._max_tokens:
            raise BuildError(
                f"decode at lengths {min(lengths)} to {max(lengths)}",
                expected=f"prefilled slots with room: 1 to {self._max_tokens - 1} positions",
            )
        return self._run(first_slot, np.asarray(tokens, np.int64)[:, None], np.asarray(lengths, np.int64), range(batch))

    def copy_slot(self, source: int, target: int, length: int) -> None:
        for buffer in self._cache.values():
            buffer[target, :, :length] = buffer[source, :, :length]

    def close(self) -> None:
        self._cache.clear()

    def _run(self, first: int, ids: NDArray[np.int64], starts: NDArray[np.int64], rows: Sequence[int]) -> FloatArray:
        batch, steps = ids.shape
        small: dict[str, NDArray[Any]] = {
            "input_ids": ids,
            "write_positions": starts,
            "position_ids": starts[:, None] + np.arange(steps),
            "logit_rows": np.asarray(rows, np.int64),
        }
        logits = np.empty((len(rows), self.vocab_size), np.float32)
        binding = self._session.io_binding()
        for name in self._lowered.record.io.inputs:
            binding.bind_cpu_input(name, small[name])
        for name, buffer in self._cache.items():
            window = buffer[first : first + batch]
            address = (window.shape, window.ctypes.data)
            binding.bind_input(f"past_key_values.{name}", "cpu", 0, np.float16, *address)
            binding.bind_output(f"present.{name}", "cpu", 0, np.float16, *address)
        binding.bind_output("logits", "cpu", 0, np.float32, logits.shape, logits.ctypes.data)
        self._session.run_with_iobinding(binding)
        return logits
