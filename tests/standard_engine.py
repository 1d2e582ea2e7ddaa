"""An engine over standard operators: attention of opset 24 over one buffer for each sequence, no kernel of ours.

``PASSES`` write its graphs. What it checks is what every such engine inherits, and that a target needs no more.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnxruntime as ort

from engines.bundle import EngineBundle
from engines.passes.graph import linears, logit_positions, rotary_tables
from engines.passes.onnxruntime import linear_kernels
from engines.passes.tensorrt import fixed_kv_cache
from engines.protocol import EngineCapabilities, FloatArray
from engines.sessions import cpu_options, open_session
from engines.slot_engine import SlotEngine
from engines.step_inputs import Int64Array, SlotInputs
from engines.target import Capabilities, GraphTarget, Passes
from tapeout.artifact import Artifact
from tapeout.state import paged_buffers

PROMPT_TOKENS = 256  # fed at once


class StandardTarget(GraphTarget):
    """To build for; ``StandardEngine`` opens its bundles, as no module of ``engines/targets`` is found by its name."""

    name = "standard"
    capabilities = Capabilities(libraries=("onnxruntime",), kv_dtypes=("float32",))

    def passes(self) -> Passes:
        return Passes((rotary_tables, linears, fixed_kv_cache, logit_positions, linear_kernels))

    def open(
        self,
        bundle: Artifact[EngineBundle],
        *,
        threads: int,
        slots: int | None,
        snapshots: int | None = None,
        map_experts: bool = False,
    ) -> StandardEngine:
        return StandardEngine(bundle, threads=threads, slots=slots or bundle.record.io.slots)


class StandardEngine(SlotEngine):
    prompt_tokens = PROMPT_TOKENS

    def __init__(self, bundle: Artifact[EngineBundle], *, threads: int, slots: int) -> None:
        io = bundle.record.io
        options = cpu_options(threads, None)
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
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
            chooses_tokens=False,
        )
        self._cache = {
            buffer.name: np.zeros(buffer.shape, np.float32) for buffer in paged_buffers(io.state, slots, io.max_tokens)
        }
        self._inputs = io.inputs

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
            fixed_kv_cache.WRITE_POSITIONS: step.starts,
            "position_ids": step.position_ids,
            "logit_positions": step.logit_positions,
        }
        part = slice(first, first + len(step.ids))
        past = {f"past_key_values.{name}": buffer[part] for name, buffer in self._cache.items()}
        names = ["logits", *(f"present.{name}" for name in self._cache)]
        logits, *present = self._session.run(names, {name: small[name] for name in self._inputs} | past)
        for buffer, after in zip(self._cache.values(), present, strict=True):
            buffer[part] = np.asarray(after)
        return np.asarray(logits)
