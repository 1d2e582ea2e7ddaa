"""Runs a compiled bundle on the GPU it was compiled for. Written against the API; **not executed yet on any GPU**.

One execution context per optimization profile: prefill, and each decode bucket. KV buffers are device arrays
``[rows, kv_heads, max_tokens, head_size]``: a row for each slot, and as many more as the largest bucket needs after the
last slot. A step binds the rows from ``first_slot`` on, as past and as present, so the cache is updated in place. A
decode step of B entries runs in the smallest bucket that holds B. The bucket's other rows are slots, too, so each is
fed token 0 at its own next free position, which is overwritten before anything reads it. If such a neighbour is full,
the step is split into buckets that fit exactly.

After its first step, each (bucket, first slot) is captured as a CUDA graph and replayed: its inputs and logits have
fixed addresses, so a step is small copies, one launch and one copy back. A graph keeps the kernels it was captured
with, so decode contexts compile kernels for the bucket's shape at once. Prefill has many shapes: it starts with general
kernels and switches to specialized ones when they are ready. Steps never overlap, so all contexts share one scratch
memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from engines.bundle import CompiledEngine, EngineBundle, Profile
from engines.passes.tensorrt.fixed_kv_cache import WRITE_POSITIONS
from engines.protocol import EngineCapabilities, FloatArray
from engines.slot_engine import SlotEngine
from engines.step_inputs import Int64Array, SlotInputs
from engines.targets.tensorrt.compiler import ENGINE_FILE, load_module
from engines.targets.tensorrt.hardware import checked
from tapeout.artifact import Artifact
from tapeout.cache import cache_folder
from tapeout.errors import BuildError
from tapeout.state import paged_buffers

HALF_BYTES = 2  # of a value in the KV cache, which is fp16 or bf16


@dataclass
class _EngineStep:
    """A context, the device buffers of its small inputs and logits, and the captured graphs by first slot."""

    context: Any
    profile: Profile
    inputs: dict[str, int]
    logits: int
    graphs: dict[int, Any]


class TensorRTEngine(SlotEngine):
    def __init__(self, module_name: str, bundle: Artifact[EngineBundle], *, slots: int | None = None) -> None:
        try:
            from cuda.bindings import runtime as cuda  # pyright: ignore[reportAttributeAccessIssue]
        except ImportError as error:
            raise BuildError(
                f"cannot run {bundle.folder}: {error}",
                expected="cuda-bindings, and a GPU",
                remedy='pip install "tapeout[tensorrt-rtx]", on a machine with the GPU the bundle was compiled for',
            ) from error
        compiled = bundle.record.compiled
        if compiled is None:
            raise BuildError(f"{bundle.folder} holds no compiled engine", remedy="run `tapeout build`")
        io = bundle.record.io
        slots = slots or io.slots
        self.digest, self.prompt_tokens = bundle.digest, max(p.max_tokens for p in compiled.profiles)
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
        self._cuda: Any = cuda
        self._io = io
        self._module = load_module(module_name)
        self._log = self._module.Logger(self._module.Logger.WARNING)
        self._runtime = self._module.Runtime(self._log)
        self._engine = self._runtime.deserialize_cuda_engine((bundle.folder / ENGINE_FILE).read_bytes())
        if self._engine is None:
            raise BuildError(
                f"{module_name} cannot load {bundle.folder / ENGINE_FILE}",
                expected=f"an engine for {compiled.capability} and these libraries",
                remedy="run `tapeout build` with the libraries installed here",
            )
        self._stream: Any = checked(cuda.cudaStreamCreate())
        self._allocations: list[int] = []
        self._runtime_cache: Any = None
        rows = slots + max(p.batch for p in compiled.profiles) - 1
        self._buffers = list(paged_buffers(io.state, rows, io.max_tokens))
        self._row_bytes = {name: prod(shape[1:]) * HALF_BYTES for name, shape, _ in self._buffers}
        self._cache = {name: self._allocate(size * rows) for name, size in self._row_bytes.items()}
        self._lengths = np.zeros(rows, np.int64)  # where each row's next token would be written
        self._scratch_bytes = int(self._engine.device_memory_size_v2)
        self._scratch = self._allocate(self._scratch_bytes)
        self._steps = [self._step(index, profile, compiled) for index, profile in enumerate(compiled.profiles)]

    def prefill(self, slot: int, tokens: Sequence[int], start: int, positions: Sequence[int]) -> FloatArray:
        step, wanted = self._steps[0], len(positions)
        # A profile's smallest shape has one position.
        places = np.array(positions if wanted else [len(tokens) - 1], np.int64)
        inputs = SlotInputs(np.array(tokens, np.int64)[None], np.array([start], np.int64), places)
        self._feed(step, inputs)
        self._bind(step, inputs, slot)
        self._launch(step)
        self._lengths[slot] = start + len(tokens)
        return self._logits(step, wanted)

    def decode(self, first_slot: int, tokens: Int64Array, starts: Int64Array) -> FloatArray:
        batch = len(tokens)
        self._lengths[first_slot : first_slot + batch] = starts
        parts: list[FloatArray] = []
        done = 0
        while done < batch:
            step, rows = self._bucket(batch - done, first_slot + done)
            parts.append(self._decode(step, tokens[done : done + rows, None], first_slot + done))
            done += rows
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _decode(self, step: _EngineStep, tokens: Int64Array, first_slot: int) -> FloatArray:
        """Feed ``tokens [B, 1]`` in a bucket of at least B rows."""
        batch, size = len(tokens), step.profile.batch
        ids = np.zeros((size, 1), np.int64)
        ids[:batch] = tokens
        starts = self._lengths[first_slot : first_slot + size].copy()
        inputs = SlotInputs(ids, starts, np.arange(size, dtype=np.int64))
        self._feed(step, inputs)
        if first_slot in step.graphs:
            checked(self._cuda.cudaGraphLaunch(step.graphs[first_slot], self._stream))
        else:  # run once, which also prepares the kernels; capturing runs nothing
            self._bind(step, inputs, first_slot)
            self._launch(step)
            checked(self._cuda.cudaStreamSynchronize(self._stream))
            step.graphs[first_slot] = self._capture(step)
        self._lengths[first_slot : first_slot + batch] += 1
        return self._logits(step, batch)

    def copy_block(self, source: int, target: int, tokens: int) -> None:
        kind = self._cuda.cudaMemcpyKind.cudaMemcpyDeviceToDevice
        for name, (_, heads, positions, head_size), _ in self._buffers:
            address, row = self._cache[name], self._row_bytes[name]
            pitch, width = positions * head_size * HALF_BYTES, tokens * head_size * HALF_BYTES
            places = address + target * row, pitch, address + source * row, pitch
            checked(self._cuda.cudaMemcpy2DAsync(*places, width, heads, kind, self._stream))
        checked(self._cuda.cudaStreamSynchronize(self._stream))
        self._lengths[target] = tokens

    def close(self) -> None:
        """Keep the just-in-time kernels for the next start, and free the device's memory."""
        if self._runtime_cache is not None:
            path = self._cache_file()
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(bytes(self._runtime_cache.serialize()))
            self._runtime_cache = None
        for step in self._steps:
            for graph in step.graphs.values():
                checked(self._cuda.cudaGraphExecDestroy(graph))
        self._steps = []
        for address in self._allocations:
            checked(self._cuda.cudaFree(address))
        self._allocations = []
        if self._stream is not None:
            checked(self._cuda.cudaStreamDestroy(self._stream))
            self._stream = None

    def _cache_file(self) -> Path:
        return cache_folder() / "runtime" / f"{self.digest[:16]}.bin"

    def _step(self, index: int, profile: Profile, compiled: CompiledEngine) -> _EngineStep:
        context = self._context(eager=profile.max_tokens == 1)
        if not context.set_optimization_profile_async(index, self._stream):
            raise BuildError(f"the engine has no optimization profile {index}", expected=f"{len(compiled.profiles)}")
        context.set_device_memory(self._scratch, self._scratch_bytes)
        tokens = profile.batch * profile.max_tokens
        sizes = {
            "input_ids": tokens,
            "position_ids": tokens,
            "logit_positions": tokens,
            WRITE_POSITIONS: profile.batch,
        }
        inputs = {name: self._allocate(8 * sizes[name]) for name in self._io.inputs}
        return _EngineStep(context, profile, inputs, self._allocate(4 * tokens * self._io.vocab_size), {})

    def _context(self, *, eager: bool) -> Any:
        """An execution context without memory of its own.

        Where the API has them (TensorRT for RTX): with the kept just-in-time kernels, and with kernels for a new shape
        made at once (``eager``) or in the background.
        """
        user_managed = self._module.ExecutionContextAllocationStrategy.USER_MANAGED
        if not hasattr(self._module, "IRuntimeCache"):
            return self._engine.create_execution_context(user_managed)
        config = self._engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(user_managed)
        strategies = self._module.DynamicShapesKernelSpecializationStrategy
        config.dynamic_shapes_kernel_specialization_strategy = strategies.EAGER if eager else strategies.LAZY
        if self._runtime_cache is None:
            self._runtime_cache = config.create_runtime_cache()
            if self._cache_file().is_file():
                self._runtime_cache.deserialize(self._cache_file().read_bytes())
        config.set_runtime_cache(self._runtime_cache)
        return self._engine.create_execution_context(config)

    def _allocate(self, size: int) -> int:
        address = int(checked(self._cuda.cudaMalloc(size)))
        self._allocations.append(address)
        checked(self._cuda.cudaMemsetAsync(address, 0, size, self._stream))
        return address

    def _bucket(self, batch: int, first_slot: int) -> tuple[_EngineStep, int]:
        """A decode bucket, and how many of the batch it takes: all if its other rows have room, else its size.

        There is always a bucket of one, which fits exactly.
        """
        smaller: list[_EngineStep] = []
        for step in self._steps[1:]:  # by size
            size = step.profile.batch
            if size <= batch:
                smaller.append(step)
            elif (self._lengths[first_slot : first_slot + size] < self._io.max_tokens).all():
                if smaller and smaller[-1].profile.batch == batch:
                    break
                return step, batch
        return smaller[-1], smaller[-1].profile.batch

    def _feed(self, step: _EngineStep, inputs: SlotInputs) -> None:
        """Copy the small inputs to their fixed addresses."""
        kind = self._cuda.cudaMemcpyKind.cudaMemcpyHostToDevice
        for name, value in _small(inputs).items():
            if name in step.inputs:
                # Synchronous, because ``value`` is pageable and gone after this line.
                checked(self._cuda.cudaMemcpy(step.inputs[name], value.ctypes.data, value.nbytes, kind))

    def _bind(self, step: _EngineStep, inputs: SlotInputs, first: int) -> None:
        """Set the shapes and addresses of a step over the rows from ``first`` on."""
        for name, value in _small(inputs).items():
            if name in step.inputs:
                step.context.set_input_shape(name, value.shape)
                step.context.set_tensor_address(name, step.inputs[name])
        step.context.set_tensor_address("logits", step.logits)
        for name, (_, *row), _ in self._buffers:
            address = self._cache[name] + first * self._row_bytes[name]
            step.context.set_input_shape(f"past_key_values.{name}", (step.profile.batch, *row))
            step.context.set_tensor_address(f"past_key_values.{name}", address)
            step.context.set_tensor_address(f"present.{name}", address)

    def _launch(self, step: _EngineStep) -> None:
        if not step.context.execute_async_v3(self._stream):
            raise BuildError("the engine refused a step", expected="shapes within its profile")

    def _capture(self, step: _EngineStep) -> Any:
        mode = self._cuda.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        checked(self._cuda.cudaStreamBeginCapture(self._stream, mode))
        self._launch(step)
        graph = checked(self._cuda.cudaStreamEndCapture(self._stream))
        executable = checked(self._cuda.cudaGraphInstantiate(graph, 0))
        checked(self._cuda.cudaGraphDestroy(graph))
        return executable

    def _logits(self, step: _EngineStep, rows: int) -> FloatArray:
        logits = np.empty((rows, self._io.vocab_size), np.float32)
        kind = self._cuda.cudaMemcpyKind.cudaMemcpyDeviceToHost
        checked(self._cuda.cudaMemcpyAsync(logits.ctypes.data, step.logits, logits.nbytes, kind, self._stream))
        checked(self._cuda.cudaStreamSynchronize(self._stream))
        return logits


def _small(inputs: SlotInputs) -> dict[str, Int64Array]:
    """A step's inputs besides the caches, by the names of the graph's inputs."""
    return {
        "input_ids": inputs.ids,
        "position_ids": inputs.position_ids,
        "logit_positions": inputs.logit_positions,
        WRITE_POSITIONS: inputs.starts,
    }
