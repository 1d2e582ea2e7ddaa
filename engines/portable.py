"""Runs a LoweredGraph, which is what a compiler is given, on ONNX Runtime's CPU kernels.

It is slow and for evidence only: it shows what lowering and precision do to the outputs (Q/DQ included), not what the
compiled engine does. ONNX Runtime has no BF16 kernels on CPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from engines.bundle import LoweredGraph
from engines.compile import MODEL_FILE
from engines.passes.tensorrt.fixed_kv_cache import WRITE_POSITIONS
from engines.protocol import EngineCapabilities, FloatArray
from engines.sessions import cpu_options, open_session
from engines.slot_engine import SlotEngine
from engines.step_inputs import Int64Array, SlotInputs
from tapeout.artifact import Artifact
from tapeout.errors import BuildError
from tapeout.state import paged_buffers


class PortableEngine(SlotEngine):
    """``max_tokens`` may be less than the graph's, to save time."""

    def __init__(
        self, lowered: Artifact[LoweredGraph], *, max_tokens: int | None = None, slots: int = 1, threads: int = 0
    ) -> None:
        io = lowered.record.io
        buffers = list(paged_buffers(io.state, slots, tokens := min(max_tokens or io.max_tokens, io.max_tokens)))
        if any(buffer.element != "float16" for buffer in buffers):
            raise BuildError(
                f"a lowered graph in {lowered.record.precision}",
                expected="fp16, int4 or fp8: ONNX Runtime has no BF16 kernels on CPU",
                remedy="take evidence from the fp16 build",
            )
        options = cpu_options(threads, None)
        # Fusing Q/DQ pairs into integer kernels would round where the compiled engine does not.
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
        options.add_session_config_entry("session.disable_quant_qdq", "1")
        self._session = open_session(str(lowered.folder / MODEL_FILE), options)
        self.digest, self.prompt_tokens = lowered.digest, tokens
        self.capabilities = EngineCapabilities(
            block_tokens=tokens,
            blocks=slots,
            block_bytes=io.token_bytes * tokens,
            max_batch=slots,
            max_tokens=tokens,
            vocab_size=io.vocab_size,
            shares_blocks=False,
            chooses_tokens=False,
        )
        self._inputs = io.inputs
        self._cache: dict[str, NDArray[np.float16]] = {
            buffer.name: np.zeros(buffer.shape, np.float16) for buffer in buffers
        }

    def prefill(self, slot: int, tokens: Sequence[int], start: int, positions: Sequence[int]) -> FloatArray:
        ids, starts = np.array(tokens, np.int64)[None], np.array([start], np.int64)
        return self._run(slot, SlotInputs(ids, starts, np.array(positions, np.int64)))

    def decode(self, first_slot: int, tokens: Int64Array, starts: Int64Array) -> FloatArray:
        return self._run(first_slot, SlotInputs(tokens[:, None], starts, np.arange(len(tokens), dtype=np.int64)))

    def copy_block(self, source: int, target: int, tokens: int) -> None:
        for buffer in self._cache.values():
            buffer[target, :, :tokens] = buffer[source, :, :tokens]

    def close(self) -> None:
        self._cache.clear()

    def _run(self, first: int, step: SlotInputs) -> FloatArray:
        small = {
            "input_ids": step.ids,
            WRITE_POSITIONS: step.starts,
            "position_ids": step.position_ids,
            "logit_positions": step.logit_positions,
        }
        logits = np.empty((len(step.logit_positions), self.capabilities.vocab_size), np.float32)
        binding = self._session.io_binding()
        for name in self._inputs:
            binding.bind_cpu_input(name, small[name])
        for name, buffer in self._cache.items():
            window = buffer[first : first + len(step.ids)]
            address = (window.shape, window.ctypes.data)
            binding.bind_input(f"past_key_values.{name}", "cpu", 0, np.float16, *address)
            binding.bind_output(f"present.{name}", "cpu", 0, np.float16, *address)
        binding.bind_output("logits", "cpu", 0, np.float32, logits.shape, logits.ctypes.data)
        self._session.run_with_iobinding(binding)
        return logits
