"""An ``ort-cuda`` engine that computes on the CPU: its own code, over memory and a session that stand for the GPU's.

PagedAttention is written as CachedAttention in float32, with its norms before it; all else of the lowered graph runs as
it is, in float16. What a GPU demands is checked: addresses lie in live memory, and a captured graph keeps its shapes,
addresses and bounds. Caches are arrays of the session, as the two operators lay them out differently.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from engines.bundle import ATTENTION_METADATA, BLOCK_TABLE, BLOCK_TOKENS, OFFSETS, SLOT_MAPPING, STARTS, EngineBundle
from engines.kernels.operators import DOMAIN
from engines.passes.base import attribute, initializer, replace
from engines.sessions import cpu_options, open_session
from engines.targets.ort_cpu import library
from engines.targets.ort_cuda import engine as ort_cuda
from tapeout.artifact import Artifact

BATCHES = (1, 2, 4)
ALIGNED = 256
PAST = "past_key_values."


def cpu_engine(
    bundle: Artifact[EngineBundle], patch: pytest.MonkeyPatch, *, sequences: int = 8
) -> tuple[ort_cuda.CudaPagedEngine, HostSession]:
    """The engine of a bundle, and the session that it runs."""
    session = HostSession(bundle.folder / "model.onnx")
    patch.setattr(ort_cuda, "_open", lambda path: session)  # pyright: ignore[reportUnknownLambdaType]
    patch.setattr(ort_cuda, "CudaDevice", lambda: session.device)
    return ort_cuda.CudaPagedEngine(bundle, sequences=sequences, batches=BATCHES), session


class HostDevice:
    """See :class:`engines.targets.ort_cuda.device.CudaDevice`. Memory begins as NaN."""

    def __init__(self) -> None:
        self.memory: dict[int, NDArray[np.uint8]] = {}
        self.copies: list[tuple[str, int]] = []
        self.moved: Callable[[int, int, int], None] = lambda target, source, size: None

    def allocate(self, size: int, what: str) -> int:
        block = np.full(size + ALIGNED, 0xFF, np.uint8)
        address = -(-block.ctypes.data // ALIGNED) * ALIGNED
        self.memory[address] = block[address - block.ctypes.data :][:size]
        return address

    def pinned(self, size: int) -> NDArray[np.uint8]:
        return np.zeros(size, np.uint8)

    def upload(self, address: int, array: NDArray[Any], size: int) -> None:
        self.require(address, size)
        assert size <= array.nbytes
        ctypes.memmove(address, array.ctypes.data, size)
        self.copies.append(("up", size))

    def download(self, array: NDArray[Any], address: int) -> None:
        self.require(address, array.nbytes)
        ctypes.memmove(array.ctypes.data, address, array.nbytes)
        self.copies.append(("down", array.nbytes))

    def move(self, target: int, source: int, size: int) -> None:
        self.require(target, size)
        self.require(source, size)
        ctypes.memmove(target, source, size)
        self.moved(target, source, size)
        self.copies.append(("within", size))

    def wait(self) -> None:
        pass

    def close(self) -> None:
        self.memory.clear()

    def require(self, address: int, size: int) -> None:
        assert any(at <= address and address + size <= at + len(block) for at, block in self.memory.items())


@dataclass
class HostBinding:
    """What a session is given: arrays by name, at the addresses that the engine bound."""

    session: HostSession
    bound: dict[str, tuple[int, tuple[int, ...], Any]] = field(default_factory=dict[str, Any])

    def bind_input(self, name: str, device: str, number: int, element: Any, shape: tuple[int, ...], at: int) -> None:
        assert number == 0 and device == ("cpu" if name == ATTENTION_METADATA else "cuda")
        if device == "cuda":
            self.session.device.require(at, math.prod(shape) * np.dtype(element).itemsize)
        self.bound[name] = at, tuple(shape), element
        if name.startswith(PAST):
            self.session.places[name] = at, tuple(shape), np.dtype(element).itemsize

    def bind_output(self, name: str, device: str, number: int, element: Any, shape: tuple[int, ...], at: int) -> None:
        self.bind_input(name, device, number, element, shape, at)

    def array(self, name: str) -> NDArray[Any]:
        at, shape, element = self.bound[name]
        size = math.prod(shape) * np.dtype(element).itemsize
        return np.frombuffer(memoryview((ctypes.c_uint8 * size).from_address(at)), element).reshape(shape)


class HostSession:
    """Runs the graph on the CPU. ``replays``: runs of each graph id after the first."""

    def __init__(self, path: Path) -> None:
        model = ir.load(path)
        with_cached_attention(model)
        options = cpu_options(1, library())
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
        self._session = open_session(_serialized(model), options)
        self.device = HostDevice()
        self.device.moved = self._moved
        self.caches: dict[str, NDArray[Any]] = {}
        self.places: dict[str, tuple[int, tuple[int, ...], int]] = {}  # addresses, shapes and sizes of caches' elements
        self.replays: dict[str, int] = {}
        self._frozen: dict[str, Any] = {}

    def _moved(self, target: int, source: int, size: int) -> None:
        """The first tokens of a block, in the array that stands for the cache at that address."""
        for name, (at, (blocks, *shape), element) in self.places.items():
            block_bytes = math.prod(shape) * element
            if at <= source < at + blocks * block_bytes and name in self.caches:
                tokens, cache = size * shape[0] // block_bytes, self.caches[name]
                to, of = ((address - at) // block_bytes for address in (target, source))
                cache[to, :, :tokens] = cache[of, :, :tokens]

    def get_inputs(self) -> list[ort.NodeArg]:
        return list(self._session.get_inputs())

    def io_binding(self) -> HostBinding:
        return HostBinding(self)

    def run_with_iobinding(self, binding: HostBinding, options: ort.RunOptions) -> None:
        graph = options.get_run_config_entry("gpu_graph_id")
        metadata = binding.array(ATTENTION_METADATA)
        self._check_bounds(binding, metadata)
        if graph != str(ort_cuda.EAGER):
            frozen = {**binding.bound, "metadata": tuple(metadata.tolist())}
            assert self._frozen.setdefault(graph, frozen) == frozen, "a captured graph keeps these"
            self.replays[graph] = self.replays.get(graph, -1) + 1
        found = self._session.run(["logits"], self._feeds(binding))[0]
        binding.array("logits")[...] = np.asarray(found)

    def _feeds(self, binding: HostBinding) -> dict[str, NDArray[Any]]:
        feeds: dict[str, NDArray[Any]] = {}
        for value in self._session.get_inputs():
            if value.name.startswith(PAST):
                if value.name not in self.caches:
                    blocks, tokens, kv_heads, columns = binding.bound[value.name][1]
                    element = np.int8 if "int8" in value.type else np.float32
                    self.caches[value.name] = np.zeros((blocks, kv_heads, tokens, columns), element)
                feeds[value.name] = self.caches[value.name]
            else:
                feeds[value.name] = binding.array(value.name)
        return feeds

    def _check_bounds(self, binding: HostBinding, metadata: NDArray[np.int32]) -> None:
        """As PagedAttention reads them: lengths, bounds, and where each token is written."""
        offsets, starts, table = (binding.array(name).astype(np.int64) for name in (OFFSETS, STARTS, BLOCK_TABLE))
        counts, slots = np.diff(offsets), binding.array(SLOT_MAPPING)
        most, longest, least = metadata.tolist()
        assert offsets[0] == 0 and offsets[-1] == len(slots) and (counts > 0).all()
        assert counts.max() <= most and (starts + counts).max() <= longest
        written = 0
        for row, (offset, count) in enumerate(zip(offsets, counts, strict=False)):
            places = np.arange(starts[row], starts[row] + count)
            expected = table[row, places // BLOCK_TOKENS] * BLOCK_TOKENS + places % BLOCK_TOKENS
            own = slots[offset : offset + count]
            assert (own == expected).all() or (own == -1).all()
            written += int((own >= 0).any())
        assert not written or (starts + counts).max() >= least


def with_cached_attention(model: ir.Model) -> None:
    """Replace every PagedAttention by what it computes, in float32."""
    for node in [n for n in model.graph if n.op_type == "PagedAttention"]:
        _replace(model, node)
    model.opset_imports[DOMAIN] = 1


def _replace(model: ir.Model, node: ir.Node) -> None:
    query, key, value, key_cache, value_cache, offsets, starts, table = node.inputs[:8]
    cos, sin = node.inputs[8:10]
    query_norm, key_norm, key_scale, value_scale = node.inputs[12:16]
    heads, kv_heads = node.attributes["num_heads"].as_int(), node.attributes["kv_num_heads"].as_int()
    assert key_cache is not None and value_cache is not None and key_cache.shape is not None and query is not None
    head_size = int(key_cache.shape[3])  # type: ignore[arg-type]
    new: list[ir.Node] = []

    def add(op_type: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
        new.append(ir.node(op_type, inputs, attributes=attributes))
        return new[-1].outputs[0]

    def shaped(value: ir.Value, *shape: int) -> ir.Value:
        name = f"on_cpu.{'.'.join(map(str, shape))}"
        known = model.graph.initializers.get(name)
        return add("Reshape", value, known or initializer(model, name, np.array(shape, np.int64)))

    def widened(value: ir.Value | None) -> ir.Value | None:
        return None if value is None else add("Cast", value, to=ir.DataType.FLOAT)

    parts: list[ir.Value | None] = [widened(part) for part in (query, key, value)]
    if query_norm is not None:
        if key is None:
            name = f"{node.outputs[0].name}.sizes"
            sizes = np.array([heads * head_size, kv_heads * head_size, kv_heads * head_size], np.int64)
            new.append(
                ir.node("Split", [parts[0], initializer(model, name, sizes)], attributes={"axis": -1}, num_outputs=3)
            )
            parts = list(new[-1].outputs)
        for place, (weight, count) in enumerate(((query_norm, heads), (key_norm, kv_heads))):
            part = parts[place]
            assert part is not None
            epsilon = attribute(node, "qk_norm_epsilon", 1e-6)
            normed = add("RMSNormalization", shaped(part, -1, count, head_size), widened(weight), epsilon=epsilon)
            parts[place] = shaped(normed, -1, count * head_size)
    counts = [heads + 2 * kv_heads if parts[1] is None else heads, kv_heads, kv_heads]
    inputs = [
        None if part is None else shaped(part, 1, -1, count * head_size)
        for part, count in zip(parts, counts, strict=True)
    ]
    for cache in (key_cache, value_cache):
        cache.shape = ir.Shape(["blocks", kv_heads, "block_tokens", head_size])
        if cache.dtype == ir.DataType.FLOAT16:
            cache.type = ir.TensorType(ir.DataType.FLOAT)
    scales = [None if s is None else shaped(s, 1, kv_heads, 1, head_size) for s in (key_scale, value_scale)]
    kept = ("num_heads", "kv_num_heads", "scale", "do_rotary", "rotary_interleaved", "softcap", "local_window_size")
    attributes = [node.attributes[name] for name in kept if name in node.attributes]
    caches = [key_cache, value_cache]
    attention = ir.Node(
        DOMAIN,
        "CachedAttention",
        [*inputs, *caches, offsets, starts, table, widened(cos), widened(sin), *scales],
        attributes=attributes,
    )
    new.append(attention)
    rows = shaped(attention.outputs[0], -1, heads * head_size)
    result = add("Cast", rows, to=ir.DataType.FLOAT16)
    replace(model, [node], new, {node.outputs[0]: result})


def _serialized(model: ir.Model) -> bytes:
    for value in model.graph.initializers.values():
        if isinstance(value.const_value, ir.ExternalTensor):
            value.const_value = ir.tensor(value.const_value.numpy().copy(), name=value.name)
    model.graph.sort()
    return ir.to_proto(model).SerializeToString()
