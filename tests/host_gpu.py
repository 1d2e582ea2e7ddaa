"""A GPU that is this process's memory: what the TensorRT runner asks of CUDA and of TensorRT, done by ONNX Runtime.

It keeps what the real ones demand and a mistake would break: addresses lie within live allocations, shapes within the
context's optimization profile, outputs over the buffers they alias; while a stream is captured nothing runs, and a
replay reads and writes the addresses that were captured. It says nothing of speed, kernels or precision.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from engines.bundle import CompiledEngine, EngineBundle, LoweredGraph, Profile
from tapeout import artifact
from tapeout.artifact import Artifact
from tapeout.fingerprint import Fingerprint

MODULE = "host_gpu_tensorrt"


Copy = Enum("Copy", ["cudaMemcpyHostToDevice", "cudaMemcpyDeviceToHost", "cudaMemcpyDeviceToDevice"])


class HostCuda:
    """The part of ``cuda.bindings.runtime`` the runner uses; every call returns its error code first."""

    cudaMemcpyKind = Copy  # noqa: N815
    cudaStreamCaptureMode = SimpleNamespace(cudaStreamCaptureModeThreadLocal="thread")  # noqa: N815

    def __init__(self) -> None:
        self.memory: dict[int, Any] = {}
        self.streams: set[int] = set()
        self.last_stream = 0
        self.recording: list[Callable[[], object]] | None = None
        self.graphs: dict[int, list[Callable[[], object]]] = {}
        self.launched = 0

    def submit(self, work: Callable[[], object]) -> None:
        """Run now, or keep for a graph while the stream is being captured."""
        work() if self.recording is None else self.recording.append(work)

    def check(self, address: int, size: int) -> None:
        assert any(at <= address and address + size <= at + len(block) for at, block in self.memory.items())

    def cudaStreamCreate(self) -> tuple[int, int]:  # noqa: N802
        self.last_stream += 1
        self.streams.add(self.last_stream)
        return 0, self.last_stream

    def cudaStreamDestroy(self, stream: int) -> tuple[int]:  # noqa: N802
        self.streams.remove(stream)
        return (0,)

    def cudaStreamSynchronize(self, stream: int) -> tuple[int]:  # noqa: N802
        assert stream in self.streams and self.recording is None
        return (0,)

    def cudaMalloc(self, size: int) -> tuple[int, int]:  # noqa: N802
        block = (ctypes.c_ubyte * max(size, 1))()
        ctypes.memset(block, 0xFF, size)  # NaN in every float type
        self.memory[ctypes.addressof(block)] = block
        return 0, ctypes.addressof(block)

    def cudaFree(self, address: int) -> tuple[int]:  # noqa: N802
        del self.memory[address]
        return (0,)

    def cudaMemsetAsync(self, address: int, value: int, size: int, stream: int) -> tuple[int]:  # noqa: N802
        self.check(address, size)
        self.submit(lambda: ctypes.memset(address, value, size))
        return (0,)

    def cudaMemcpy(self, target: int, source: int, size: int, kind: Any) -> tuple[int]:  # noqa: N802
        assert self.recording is None
        self.check(target if kind is not Copy.cudaMemcpyDeviceToHost else source, size)
        ctypes.memmove(target, source, size)
        return (0,)

    def cudaMemcpyAsync(self, target: int, source: int, size: int, kind: Any, stream: int) -> tuple[int]:  # noqa: N802
        assert stream in self.streams
        return self.cudaMemcpy(target, source, size, kind)

    def cudaMemcpy2DAsync(  # noqa: N802
        self, target: int, to_pitch: int, source: int, from_pitch: int, width: int, height: int, kind: Any, stream: int
    ) -> tuple[int]:
        assert width <= min(to_pitch, from_pitch) and stream in self.streams
        for row in range(height):
            self.check(source + row * from_pitch, width)
            self.cudaMemcpy(target + row * to_pitch, source + row * from_pitch, width, kind)
        return (0,)

    def cudaStreamBeginCapture(self, stream: int, mode: Any) -> tuple[int]:  # noqa: N802
        assert stream in self.streams and self.recording is None
        self.recording = []
        return (0,)

    def cudaStreamEndCapture(self, stream: int) -> tuple[int, Any]:  # noqa: N802
        assert self.recording is not None
        captured, self.recording = self.recording, None
        return 0, captured

    def cudaGraphInstantiate(self, graph: Any, flags: int) -> tuple[int, int]:  # noqa: N802
        self.graphs[len(self.graphs)] = list(graph)
        return 0, len(self.graphs) - 1

    def cudaGraphDestroy(self, graph: Any) -> tuple[int]:  # noqa: N802
        graph.clear()
        return (0,)

    def cudaGraphExecDestroy(self, graph: int) -> tuple[int]:  # noqa: N802
        del self.graphs[graph]
        return (0,)

    def cudaGraphLaunch(self, graph: int, stream: int) -> tuple[int]:  # noqa: N802
        assert stream in self.streams
        self.launched += 1
        for work in self.graphs[graph]:
            work()
        return (0,)


@dataclass
class HostContext:
    """An execution context: bound to a profile, then to shapes and addresses, then run."""

    engine: HostEngine
    profile: Profile | None = None
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    addresses: dict[str, int] = field(default_factory=dict[str, int])
    scratch: int = 0

    def set_optimization_profile_async(self, index: int, stream: int) -> bool:
        profiles = self.engine.profiles
        self.profile = profiles[index] if index < len(profiles) else None
        return self.profile is not None

    def set_device_memory(self, address: int, size: int) -> None:
        assert size >= self.engine.device_memory_size_v2
        self.scratch = address

    def set_input_shape(self, name: str, shape: Sequence[int]) -> bool:
        self.shapes[name] = tuple(shape)
        return True

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.addresses[name] = address
        return True

    def execute_async_v3(self, stream: int) -> bool:
        profile, rows = self.profile, self.shapes["logit_positions"][0]
        assert profile is not None and stream in self.engine.cuda.streams and self.scratch
        batch, tokens = self.shapes["input_ids"]
        if batch != profile.batch or not profile.min_tokens <= tokens <= profile.max_tokens:
            return False
        if not 1 <= rows <= profile.batch * profile.max_tokens:
            return False
        shapes, addresses = dict(self.shapes), dict(self.addresses)
        self.engine.cuda.submit(lambda: self.engine.run(shapes, addresses, rows))
        return True


class HostEngine:
    def __init__(self, cuda: HostCuda, lowered: Artifact[LoweredGraph], profiles: Sequence[Profile]) -> None:
        self.cuda, self.profiles = cuda, profiles
        self.device_memory_size_v2 = 256
        self.vocab_size = lowered.record.io.vocab_size
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = ort.InferenceSession(
            str(lowered.folder / "model.onnx"), options, providers=["CPUExecutionProvider"]
        )

    def create_execution_context(self, config: Any) -> HostContext:
        return HostContext(self)

    def create_runtime_config(self) -> Any:
        return SimpleNamespace(
            set_execution_context_allocation_strategy=lambda strategy: None,
            create_runtime_cache=HostCache,
            set_runtime_cache=lambda cache: None,
        )

    def run(self, shapes: dict[str, tuple[int, ...]], addresses: dict[str, int], rows: int) -> None:
        binding = self.session.io_binding()
        for name, shape in shapes.items():
            element = np.float16 if name.startswith("past_") else np.int64
            self.cuda.check(addresses[name], int(np.prod(shape)) * np.dtype(element).itemsize)
            binding.bind_input(name, "cpu", 0, element, shape, addresses[name])
            if name.startswith("past_"):
                output = name.replace("past_key_values", "present")
                assert addresses[output] == addresses[name], "the cache is updated where it lies"
                binding.bind_output(output, "cpu", 0, element, shape, addresses[output])
        self.cuda.check(addresses["logits"], 4 * rows * self.vocab_size)
        binding.bind_output("logits", "cpu", 0, np.float32, (rows, self.vocab_size), addresses["logits"])
        self.session.run_with_iobinding(binding)


class HostCache:
    """Just-in-time kernels: here only a word that is kept."""

    def __init__(self) -> None:
        self.content = b"new"

    def deserialize(self, content: bytes) -> bool:
        self.content = content
        return True

    def serialize(self) -> bytes:
        return self.content + b" kept"


def install(monkeypatch: pytest.MonkeyPatch, lowered: Artifact[LoweredGraph], profiles: Sequence[Profile]) -> HostCuda:
    """Put the host in place of ``cuda.bindings.runtime`` and of a TensorRT module called ``MODULE``."""
    cuda = HostCuda()
    module: Any = ModuleType(MODULE)
    module.Logger = type("Logger", (), {"WARNING": 0, "__init__": lambda self, level: None})
    module.IRuntimeCache = HostCache
    module.ExecutionContextAllocationStrategy = SimpleNamespace(USER_MANAGED="user")
    module.DynamicShapesKernelSpecializationStrategy = SimpleNamespace(EAGER="eager", LAZY="lazy")
    engine = HostEngine(cuda, lowered, profiles)
    module.Runtime = lambda log: SimpleNamespace(deserialize_cuda_engine=lambda plan: engine if plan else None)
    bindings: Any = ModuleType("cuda.bindings")
    bindings.runtime = cuda
    monkeypatch.setitem(sys.modules, MODULE, module)
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    return cuda


def host_bundle(lowered: Artifact[LoweredGraph], folder: Path, profiles: Sequence[Profile]) -> Artifact[EngineBundle]:
    with artifact.create(folder, EngineBundle) as draft:
        (draft.folder / "engine.plan").write_bytes(b"plan")
        compiled = CompiledEngine(
            capability="host",
            executed_on=None,
            engine_bytes=4,
            network={},
            profiles=tuple(profiles),
            warnings=(),
            portable=None,
        )
        draft.finish(
            EngineBundle(
                **lowered.record.fields(),
                target="tensorrt-rtx",
                hardware=(Fingerprint(machine="host", features=("host",), libraries={}),),
                compiled=compiled,
            ),
            parents={},
        )
    return artifact.load(folder, EngineBundle)
