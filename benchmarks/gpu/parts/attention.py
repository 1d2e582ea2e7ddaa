"""Attention over a paged cache in decode, beside PyTorch's over a contiguous one in 16 bits."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.gpu.driver import Launch
from benchmarks.gpu.llama import Shape
from benchmarks.gpu.place import Call, Place, Record, milliseconds, peers
from engines.kernels.cuda.parameters import ATTENTION_BLOCK, ATTENTION_PART, PagedAttention

CACHE_BYTES = 256 << 20
CASES = ((1, 1024), (8, 1024), (32, 1024), (128, 1024), (8, 8192))  # sequences, keys of each


class Attention:
    """Ours: RoPE, the new entry of the cache, and attention, for one new token of each sequence."""

    def __init__(self, place: Place, shape: Shape, batch: int, keys: int, *, int8: bool) -> None:
        import torch

        self._place, self._library = place, ctypes.CDLL(str(place.library))
        device, s = place.torch_device, shape
        blocks = -(-keys // ATTENTION_BLOCK)
        cache = (batch * blocks, s.kv_heads, ATTENTION_BLOCK, s.head_size)
        if int8:
            make: Callable[[], Any] = lambda: torch.randint(-127, 127, cache, dtype=torch.int8, device=device)  # noqa: E731
        else:
            make = lambda: torch.randn(cache, dtype=torch.float16, device=device)  # noqa: E731
        parts = -(-keys // ATTENTION_PART)
        table = torch.randperm(batch * blocks, device=device).to(torch.int32).reshape(batch, blocks)
        scales = torch.full((s.kv_heads, s.head_size), 0.02, device=device) if int8 else None
        inner = s.heads * s.head_size
        self.y = torch.full((batch, inner), float("nan"), dtype=torch.float16, device=device)
        held = [
            torch.randn(batch, inner + 2 * s.kv_heads * s.head_size, device=device),
            *(torch.rand(keys, s.head_size // 2, device=device) for _ in range(2)),
            make(),
            make(),
            scales,
            scales,
            torch.arange(batch + 1, dtype=torch.int32, device=device),
            torch.full((batch,), keys - 1, dtype=torch.int32, device=device),
            table,
            torch.empty(batch, inner, dtype=torch.float16, device=device),
            torch.empty(batch * s.heads * parts * s.head_size, device=device),
            torch.empty(batch * s.heads * parts * 2, device=device),
            torch.zeros(batch * s.heads, dtype=torch.int32, device=device),
            self.y,
            None,
            None,
        ]
        self._held = held
        pointers = (None if one is None else one.data_ptr() for one in held)
        sizes = (batch, batch, blocks, s.heads, s.kv_heads, s.head_size, 0, 0, 0, parts, 1, 1)
        self._parameters = PagedAttention(*pointers, *sizes, s.head_size**-0.5, 0.0, 0.0)

    def __call__(self) -> None:
        launches = (Launch * 4)()
        count = self._library.tapeout_cuda_attention(
            ctypes.byref(self._parameters), ctypes.c_uint32(self._place.driver.multiprocessors), launches
        )
        for launch in launches[:count]:
            self._place.driver.launch(launch, self._place.stream())


def run(place: Place, record: Record) -> None:
    """Ours and SDPA first: to compile flex_attention takes longer than all of them."""
    shape = place.large
    cases = ((2, 70),) if place.rehearsal else CASES
    for batch, keys in cases:
        for int8 in (True, False):
            _ours(place, record, shape, batch, keys, int8=int8)
        peers(record, "attention", {"SDPA": partial(_sdpa, place, shape, batch, keys)}, batch=batch, keys=keys)
    for batch, keys in cases:
        times = {"flex_attention": partial(_flex, place, shape, batch, keys)}
        peers(record, "attention", times, batch=batch, keys=keys)


def _ours(place: Place, record: Record, shape: Shape, batch: int, keys: int, *, int8: bool) -> None:
    import torch

    copies = _copies(place, shape, batch, keys, 1 if int8 else 2)
    ours = [Attention(place, shape, batch, keys, int8=int8) for _ in range(copies)]
    ms = milliseconds(place, ours)
    size = 2 * batch * keys * shape.kv_heads * shape.head_size * (1 if int8 else 2)
    written = bool(torch.isfinite(ours[0].y).all())
    record("attention", ours="int8" if int8 else "float16", ms=ms, bytes_per_s=size / ms * 1e3, holds=written,
           batch=batch, keys=keys)  # fmt: skip


def _copies(place: Place, shape: Shape, batch: int, keys: int, element_bytes: int) -> int:
    """Of caches, which take turns: together larger than any cache of the GPU, as those of the layers of a model are."""
    each = 2 * batch * keys * shape.kv_heads * shape.head_size * element_bytes
    return 1 if place.rehearsal else max(3, -(-CACHE_BYTES // each))


def _tensors(place: Place, shape: Shape, batch: int, keys: int) -> tuple[Any, list[tuple[Any, Any]]]:
    import torch

    sizes = (batch, shape.kv_heads, keys, shape.head_size)
    like: dict[str, Any] = {"dtype": torch.bfloat16, "device": place.torch_device}
    query = torch.randn(batch, shape.heads, 1, shape.head_size, **like)
    copies = _copies(place, shape, batch, keys, 2)
    return query, [(torch.randn(sizes, **like), torch.randn(sizes, **like)) for _ in range(copies)]


def _sdpa(place: Place, shape: Shape, batch: int, keys: int) -> float:
    from torch.nn.functional import scaled_dot_product_attention

    query, caches = _tensors(place, shape, batch, keys)
    calls: list[Call] = [partial(scaled_dot_product_attention, query, k, v, enable_gqa=True) for k, v in caches]
    return milliseconds(place, calls)


def _flex(place: Place, shape: Shape, batch: int, keys: int) -> float:
    """Compiled, and launched without a graph: its time has the gaps of a launch."""
    import torch
    from torch.nn.attention.flex_attention import flex_attention

    query, caches = _tensors(place, shape, batch, keys)
    attend: Any = flex_attention if place.rehearsal else torch.compile(flex_attention, dynamic=False)
    return milliseconds(place, [partial(attend, query, k, v, enable_gqa=True) for k, v in caches], graph=False)
