"""Attention over a paged KV cache for GPUs, its source run as fibers: its reference, and that tokens share nothing.

H, KV  heads of queries, keys     D  channels of a head     L  keys of a sequence
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray

from engines.kernels.cuda.parameters import PagedAttention
from tapeout import e4m3
from tests.cuda import ORDERS, Array, Device, at, host

BLOCK, PART = 64, 512  # keys
EPSILON = 1e-5
POSITIONS = 2700


@dataclass(frozen=True)
class Heads:
    H: int = 4
    KV: int = 2
    D: int = 64
    cache: str = "int8"  # or fp8, float16
    window: int = 0
    softcap: float = 0.0
    interleaved: bool = False
    rotary: bool = True
    norms: bool = False  # of heads of queries and keys

    @property
    def scale(self) -> float:
        return self.D**-0.5


@dataclass
class Pool:
    """A KV cache of NaNs, or of -1, and the tables of its sequences: blocks in a random order."""

    device: Device
    heads: Heads
    lengths: list[int]  # of all sequences when they end
    multiprocessors: int = 132  # of these kernels depend on how many thread blocks share a sequence, and no result does
    tables: Array = field(init=False)

    def __post_init__(self) -> None:
        h, rng = self.heads, np.random.default_rng(7)
        counts = [math.ceil(length / BLOCK) for length in self.lengths]
        blocks = rng.permutation(sum(counts) + 3).tolist()
        self.tables = np.full((len(counts), max(counts) + 1), 2**31 - 1, np.int32)  # what is no block is not read
        for table, count in zip(self.tables, counts, strict=True):
            table[:count] = [blocks.pop() for _ in range(count)]
        shape = (sum(counts) + 3, h.KV, BLOCK, h.D)
        element = "uint8" if h.cache == "fp8" else h.cache
        self.keys, self.values = (self.device.empty(shape, element) for _ in range(2))
        scales = np.random.default_rng(8).uniform(0.01, 0.04, (2, h.KV, h.D)).astype(np.float32)
        self.key_scales, self.value_scales = (self.device.put(one) if h.cache != "float16" else None for one in scales)
        angles = np.outer(np.arange(POSITIONS), 1 / 1000 ** (np.arange(h.D // 2) / (h.D // 2)))
        self.cosines, self.sines = (f(angles).astype(np.float32) for f in (np.cos, np.sin))
        weights = np.random.default_rng(9).uniform(0.5, 1.5, (2, h.D)).astype(np.float32)
        self.query_norm, self.key_norm = weights if h.norms else (None, None)

    def step(self, qkv: list[Array], starts: list[int], few_tokens: int = 1, padding: int = 0) -> list[Array]:
        """New tokens ``[count, (H + 2 KV) D]`` of all sequences; their results in half ``[count, H, D]``."""
        h, put = self.heads, self.device.put
        counts = [len(one) for one in qkv]
        tokens = sum(counts) + padding
        packed = np.full((tokens, (h.H + 2 * h.KV) * h.D), np.nan, np.float32)
        packed[: sum(counts)] = np.concatenate(qkv)
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        parts = math.ceil(max(start + count for start, count in zip(starts, counts, strict=True)) / PART)
        self.query = self.device.empty((tokens, h.H, h.D), np.float16)
        sums = self.device.empty((tokens, h.H, parts, h.D), np.float32)
        rows = self.device.empty((tokens, h.H, parts, 2), np.float32)
        y = self.device.empty((tokens, h.H, h.D), np.float16)
        self.ended = put(np.zeros((tokens, h.H), np.uint32))
        tables = [put(x) if h.rotary else None for x in (self.cosines, self.sines)]
        held = [
            self.device.put(packed),
            *tables,
            self.keys,
            self.values,
            self.key_scales,
            self.value_scales,
            put(offsets),
        ]
        held += [put(np.array(starts, np.int32)), put(self.tables), self.query, sums, rows, self.ended, y]
        held += [None if one is None else put(one) for one in (self.query_norm, self.key_norm)]
        sizes = (tokens, len(counts), self.tables.shape[1], h.H, h.KV, h.D, h.cache == "fp8")
        limits = (h.interleaved, h.window, parts, few_tokens, max(counts))
        parameters = PagedAttention(*map(at, held), *sizes, *limits, h.scale, h.softcap, EPSILON)
        self.device.launch("attention", parameters, ctypes.c_uint32(self.multiprocessors))
        assert (y[sum(counts) :].view(np.uint16) == 0xFFFF).all()  # padding is not written
        assert not self.ended.any()  # as the next launch wants it
        return [y[start:end].copy() for start, end in pairwise(offsets)]

    def held(self, sequence: int, length: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Keys and values ``[KV, L, D]`` as the cache has them."""
        found: list[NDArray[np.float64]] = []
        for cache, scales in ((self.keys, self.key_scales), (self.values, self.value_scales)):
            blocks = cache[self.tables[sequence, : math.ceil(length / BLOCK)]]
            entries = blocks.transpose(1, 0, 2, 3).reshape(self.heads.KV, -1, self.heads.D)[:, :length]
            decoded = e4m3.decoded(entries) if self.heads.cache == "fp8" else entries
            found.append(decoded.astype(np.float64) * (1 if scales is None else scales[:, None]))
        return found[0], found[1]


def tokens(count: int, heads: Heads, seed: int) -> Array:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((count, (heads.H + 2 * heads.KV) * heads.D)).astype(np.float32)


def rotated(pool: Pool, x: Array, start: int, norm: Array | None) -> NDArray[np.float64]:
    """Norm and RoPE of heads ``[count, heads, D]``."""
    x = x.astype(np.float64)
    if norm is not None:
        x = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + EPSILON) * norm
    if not pool.heads.rotary:
        return x
    c, s = (table[start : start + len(x), None].astype(np.float64) for table in (pool.cosines, pool.sines))
    half = pool.heads.D // 2
    y = np.empty_like(x)
    first, second = (
        (slice(0, None, 2), slice(1, None, 2)) if pool.heads.interleaved else (slice(half), slice(half, None))
    )
    y[..., first] = x[..., first] * c - x[..., second] * s
    y[..., second] = x[..., second] * c + x[..., first] * s
    return y


def expected(pool: Pool, sequence: int, query: NDArray[np.float64], start: int) -> NDArray[np.float64]:
    """Of rotated queries ``[count, H, D]``, over what the cache has."""
    h, length = pool.heads, start + len(query)
    keys, values = pool.held(sequence, length)
    y = np.empty_like(query)
    for head in range(h.H):
        scores = query[:, head] @ keys[head * h.KV // h.H].T * h.scale
        if h.softcap:
            scores = h.softcap * np.tanh(scores / h.softcap)
        positions = start + np.arange(len(query))[:, None]
        seen = np.arange(length) <= positions
        if h.window:
            seen &= np.arange(length) > positions - h.window
        weights = np.exp(np.where(seen, scores - scores.max(axis=1, keepdims=True), -np.inf))
        y[:, head] = weights / weights.sum(axis=1, keepdims=True) @ values[head * h.KV // h.H]
    return y


def check_entries(heads: Heads, cached: NDArray[np.float64], wanted: NDArray[np.float64], scales: Array | None) -> None:
    """What a cache has ``[KV, L, D]`` of new keys or values ``[L, KV, D]``."""
    wanted = wanted.transpose(1, 0, 2)
    if heads.cache == "fp8":
        assert scales is not None
        step = scales[:, None].astype(np.float64)
        half_step = np.maximum(np.abs(wanted) * 2.0**-4, step * 2.0**-10)  # three bits of mantissa, the least step 2^-9
        assert (np.abs(cached - np.clip(wanted, -448 * step, 448 * step)) <= half_step * 1.0005).all()
        return
    if scales is None:
        np.testing.assert_allclose(cached, wanted, rtol=2.0**-11 + 1e-6, atol=1e-6)
        return
    step = scales[:, None].astype(np.float64)
    assert (np.abs(cached - np.clip(wanted, -128 * step, 127 * step)) <= step * 0.5001).all()


def split(x: Array, heads: Heads) -> tuple[Array, Array, Array]:
    """Queries, keys and values ``[count, heads, D]``."""
    x = x.reshape(len(x), -1, heads.D)
    return x[:, : heads.H], x[:, heads.H : heads.H + heads.KV], x[:, heads.H + heads.KV :]


@pytest.fixture
def device() -> Iterator[Device]:
    made = Device(host())
    yield made
    made.free()


CASES = {
    "int8": Heads(),
    "float16": Heads(cache="float16"),
    "fp8": Heads(cache="fp8"),
    "fp8, 128 channels, window, norms": Heads(H=6, KV=2, D=128, cache="fp8", window=70, norms=True),
    "fp8, 256 channels": Heads(H=2, KV=1, D=256, cache="fp8"),
    "128 channels": Heads(H=8, KV=1, D=128),
    "128 channels, float16": Heads(H=2, KV=2, D=128, cache="float16"),
    "256 channels": Heads(H=2, KV=1, D=256),
    "256 channels, float16": Heads(H=1, KV=1, D=256, cache="float16"),
    "window": Heads(window=70),
    "a window of one": Heads(window=1, cache="float16"),
    "softcap": Heads(softcap=5.0),
    "interleaved": Heads(interleaved=True),
    "no RoPE, 24 heads of queries": Heads(H=24, KV=1, rotary=False, cache="float16"),
    "3 heads of queries": Heads(H=9, KV=3),
    "norms": Heads(norms=True),
    "norms, interleaved, 128 channels": Heads(norms=True, interleaved=True, D=128, cache="float16"),
    "norms, no RoPE": Heads(norms=True, rotary=False, D=256, H=2, KV=1),
}


@pytest.mark.parametrize("heads", CASES.values(), ids=CASES)
def test_attention_equals_its_reference(device: Device, heads: Heads) -> None:
    """A decode after two parts, a prompt, a prompt that goes on, a decode without a context, and padding."""
    before, counts = [600, 0, 61, 0], [1, 37, 70, 1]
    pool = Pool(device, heads, [start + count for start, count in zip(before, counts, strict=True)])
    earlier = [tokens(count, heads, seed) for seed, count in enumerate(before)]
    pool.step(earlier, [0] * 4, few_tokens=0)
    held = pool.keys.copy(), pool.values.copy()
    new = [tokens(count, heads, 10 + seed) for seed, count in enumerate(counts)]
    results = pool.step(new, before, padding=3)
    written = np.zeros(pool.keys.shape[:3], bool)
    first = 0
    for sequence, (x, start, y) in enumerate(zip(new, before, results, strict=True)):
        query, key, value = split(x, heads)
        exact = rotated(pool, query, start, pool.query_norm)
        factors = np.full((heads.H, heads.D), heads.scale)
        if pool.key_scales is not None:
            unit = 256 if heads.cache == "fp8" else 1  # operands are codes by 256
            factors *= unit * np.repeat(pool.key_scales, heads.H // heads.KV, axis=0)
        if len(x) == 1:  # a decode keeps its query to itself
            made = (exact * factors).astype(np.float16) / factors
        else:
            made = pool.query[first : first + len(x)].astype(np.float64) / factors
            np.testing.assert_allclose(made, exact, rtol=2e-3, atol=2e-4)
        first += len(x)
        keys, values = pool.held(sequence, start + len(x))
        check_entries(heads, keys[:, start:], rotated(pool, key, start, pool.key_norm), pool.key_scales)
        check_entries(heads, values[:, start:], value.astype(np.float64), pool.value_scales)
        positions = start + np.arange(len(x))
        written[pool.tables[sequence, positions // BLOCK], :, positions % BLOCK] = True
        wanted = expected(pool, sequence, made, start)
        size = np.abs(values).max()
        assert np.abs(y - wanted).max() < (2.0**-11 + 1e-3) * size
    for cache, earlier_bytes in zip((pool.keys, pool.values), held, strict=True):
        assert np.array_equal(cache[~written].view(np.uint8), earlier_bytes[~written].view(np.uint8))


@pytest.mark.parametrize(
    "heads",
    [
        Heads(),
        Heads(cache="float16", window=300),
        Heads(H=3, KV=1, cache="fp8"),
        Heads(H=3, KV=1, D=128, softcap=20.0),
        Heads(H=2, KV=1, D=256, norms=True),
    ],
    ids=["int8", "float16, window", "fp8", "128 channels, softcap", "256 channels, norms"],
)
def test_a_token_has_the_same_bits_however_its_prompt_is_cut(heads: Heads) -> None:
    """At once, in chunks, token by token at the end, by either kernel, and beside others."""
    device = Device(host())
    check_cuts(device, heads, 1100 if heads.D == 64 else 600)
    device.free()


def check_cuts(device: Device, heads: Heads, length: int) -> None:
    x, other = tokens(length, heads, 1), tokens(40, heads, 2)
    whole = Pool(device, heads, [length]).step([x], [0], few_tokens=0)[0]
    assert np.isfinite(whole).all()
    for ends, few, multiprocessors in (
        ([length], length, 132),  # all by the other kernel: of many values some would be rounded to another one
        ([130, 513, length], 0, 132),
        ([length - 2, length - 1, length], 1, 132),
        ([length - 9, length - 4, length], 16, 1),  # one thread block for all parts of a sequence
    ):
        pool, found, start = Pool(device, heads, [40, length], multiprocessors), [], 0
        for end in ends:
            beside = other if start == 0 else other[:0]
            found.append(pool.step([beside, x[start:end]], [40 - len(beside), start], few_tokens=few)[1])
            start = end
        assert np.array_equal(np.concatenate(found), whole)


@pytest.mark.parametrize(("multiprocessors", "order"), [(1, 0), (132, 0), (132, 1)])
def test_more_parts_than_are_added_at_once_have_the_bits_of_a_prompt(
    device: Device, multiprocessors: int, order: int
) -> None:
    """With one thread block for all of them, and with one for each."""
    device.order = order
    heads = Heads(H=2)
    x = tokens(5 * PART + 20, heads, 1)
    x *= np.linspace(1, 4, len(x), dtype=x.dtype)[:, None]  # later parts have larger scores
    pool = Pool(device, heads, [len(x)], multiprocessors)
    whole = pool.step([x], [0], few_tokens=0)[0]
    assert np.array_equal(pool.step([x[-1:]], [len(x) - 1])[0], whole[-1:])


@pytest.mark.parametrize("heads", [Heads(), Heads(H=2, KV=1, D=256, cache="float16")], ids=["int8", "float16"])
def test_results_do_not_depend_on_the_order_of_threads(heads: Heads) -> None:
    results: list[Array] = []
    for order in ORDERS:
        device = Device(host(), order)
        pool = Pool(device, heads, [70, 21])
        first = pool.step([tokens(69, heads, 1), tokens(20, heads, 2)], [0, 0])
        results.append(np.concatenate([*first, *pool.step([tokens(1, heads, 3), tokens(1, heads, 4)], [69, 20])]))
        device.free()
    assert np.array_equal(results[0], results[1]) and np.array_equal(results[0], results[2])
