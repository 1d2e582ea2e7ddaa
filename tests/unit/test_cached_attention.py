"""CachedAttention, the operator: against numpy, against ONNX Runtime's own, and a sequence against itself elsewhere."""

from __future__ import annotations

import _ctypes
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from engines.kernels import cpu as native
from engines.kernels.cpu.clipping import clippings
from engines.kernels.operators import DOMAIN
from engines.kernels.serving import Clipping, ValueCounts
from engines.sessions import cpu_options, open_session
from engines.targets.ort_cpu import library
from tests.attention_graph import unpacked

pytestmark = pytest.mark.usefixtures("level")

Array = NDArray[Any]
MAX_TOKENS = 150  # more than two tiles of 64 keys, and no multiple of one
BLOCK_TOKENS = 64


def rounds_queries(case: Case) -> bool:
    """Whether queries and weights of the softmax are rounded to 16 bits (``cached_attention.c``)."""
    level = native.level()
    return case.codes and level is not None and level.name in ("x86-64-amx", "x86-64-avx512vnni")


def limit(case: Case) -> float:
    """Largest error of a result, as a share of the largest result."""
    return 2e-4 if rounds_queries(case) else 3e-6


@dataclass(frozen=True)
class Case:
    heads: int = 9
    kv_heads: int = 3
    head_size: int = 64
    values: int = 0  # channels of a value; 0: as many as a key has
    bits: int = 8  # of a channel in the cache: 32 (float), 8 or 4
    packed: bool = True
    rotary: str = "half"  # half, interleaved, none
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    threads: int = 2
    max_tokens: int = MAX_TOKENS

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def codes(self) -> bool:
        return self.bits < 32

    @property
    def value_size(self) -> int:
        return self.values or self.head_size

    @property
    def columns(self) -> tuple[int, int]:
        """Of a row of the cache of keys, and of that of values."""
        packed = 2 if self.bits == 4 else 1
        return self.head_size // packed, self.value_size // packed

    @property
    def range(self) -> tuple[int, int]:
        """The least and the largest code."""
        return -(1 << (self.bits - 1)), (1 << (self.bits - 1)) - 1


@dataclass(frozen=True)
class Step:
    """What an operator is given, and the cache it leaves."""

    query: Array  # [B, S, H, D]
    key: Array  # [B, S, KV, D]
    value: Array  # [B, S, KV, E]
    past_key: Array  # [B, KV, T, D], or [B, KV, T, D / 2] bytes; of values E
    past_value: Array
    last: Array

    def row(self, index: int) -> Step:
        of = slice(index, index + 1)
        caches = self.past_key[of], self.past_value[of]
        return Step(self.query[of], self.key[of], self.value[of], *caches, self.last[of])


def constants(case: Case) -> dict[str, Array]:
    rng = np.random.default_rng(7)
    angles = np.arange(case.max_tokens)[:, None] * 1000.0 ** -np.linspace(0, 1, case.head_size // 2)
    found = {"cos": np.cos(angles), "sin": np.sin(angles)} if case.rotary != "none" else {}
    if case.codes:
        least = 0.01 if case.bits == 8 else 0.1
        sizes = {"ks": case.head_size, "vs": case.value_size}
        found |= {name: rng.uniform(least, 4 * least, (1, case.kv_heads, 1, size)) for name, size in sizes.items()}
    if case.sinks:  # far below all scores, among them, and far above
        found["sinks"] = np.resize([-1e3, 0.0, 3.0, 40.0, -2.0, 1.0], case.heads)
    return {name: array.astype(np.float32) for name, array in found.items()}


def step_of(case: Case, tokens: int, past: list[int], seed: int = 0) -> Step:
    """Random tokens after ``past[b]`` random ones; the rest of the buffers is random too."""
    rng, rows = np.random.default_rng(seed), len(past)
    shapes = [(rows, case.kv_heads, case.max_tokens, columns) for columns in case.columns]
    if case.codes:
        caches = [rng.integers(-128, 128, shape).astype(np.int8) for shape in shapes]
        if case.bits == 4:
            caches = [cache.view(np.uint8) for cache in caches]
    else:
        caches = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    of_heads = (case.heads, case.head_size), (case.kv_heads, case.head_size), (case.kv_heads, case.value_size)
    query, key, value = (
        rng.standard_normal((rows, tokens, heads, size)).astype(np.float32) for heads, size in of_heads
    )
    return Step(query, key, value, caches[0], caches[1], np.array([n + tokens - 1 for n in past], np.int32))


def model(case: Case, op_type: str) -> bytes:
    found = constants(case)
    attributes: dict[str, Any] = {
        "num_heads": case.heads,
        "kv_num_heads": case.kv_heads,
        "scale": case.head_size**-0.5,
        "do_rotary": int(case.rotary != "none"),
        "rotary_interleaved": int(case.rotary == "interleaved"),
        "softcap": case.softcap,
    }
    if case.window:
        attributes["local_window_size"] = case.window
    tables = ["cos", "sin"] if "cos" in found else ["", ""]
    scales = ["ks", "vs"] if case.codes else []
    own = op_type == "CachedAttention"
    if case.sinks and own:
        scales += [*[""] * (4 - len(scales)), "sinks"]
    inputs = ["q", "", ""] if case.packed else ["q", "k", "v"]
    inputs += ["past_key", "past_value", *(["offsets", "starts", "table"] if own else ["last", "total"]), *tables]
    if (case.codes or case.sinks) and not own:
        inputs += ["", "", "sinks" if case.sinks else ""]
    if case.codes and not own:
        attributes |= {"k_quant_type": "PER_CHANNEL", "v_quant_type": "PER_CHANNEL", "kv_cache_bit_width": case.bits}
    domain = DOMAIN if own else "com.microsoft"
    outputs = ["y"] if own else ["y", "key", "value"]  # ours writes its inputs
    node = helper.make_node(op_type, [*inputs, *scales], outputs, domain=domain, **attributes)
    cache_type = {32: TensorProto.FLOAT, 8: TensorProto.INT8, 4: TensorProto.UINT8}[case.bits]
    caches = {
        part: ["blocks", case.kv_heads, "block_tokens", columns]
        for part, columns in zip(("key", "value"), case.columns, strict=True)
    }

    def info(name: str, kind: int, shape: list[Any]) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, kind, shape)

    widths = {"q": case.heads * case.head_size}
    parts = {"k": case.kv_heads * case.head_size, "v": case.kv_heads * case.value_size}
    widths = {"q": widths["q"] + sum(parts.values())} if case.packed else widths | parts
    graph_inputs = [info(name, TensorProto.FLOAT, ["rows", "tokens", width]) for name, width in widths.items()]
    graph_inputs += [info(f"past_{part}", cache_type, cache) for part, cache in caches.items()]
    if own:
        shapes: dict[str, list[Any]] = {"offsets": ["ends"], "starts": ["sequences"], "table": ["sequences", "columns"]}
        graph_inputs += [info(name, TensorProto.INT32, shape) for name, shape in shapes.items()]
    else:
        graph_inputs += [info("last", TensorProto.INT32, ["rows"]), info("total", TensorProto.INT32, [])]
    graph_outputs = [info("y", TensorProto.FLOAT, ["rows", "tokens", case.heads * case.value_size])]
    graph_outputs += [info(name, cache_type, caches[name]) for name in outputs[1:]]
    initializers = [numpy_helper.from_array(array, name) for name, array in found.items()]
    graph = helper.make_graph([node], "attention", graph_inputs, graph_outputs, initializers)
    opsets = [helper.make_opsetid(name, version) for name, version in (("", 21), ("com.microsoft", 1), (DOMAIN, 1))]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()


SESSIONS: dict[tuple[Case, str, native.Level | None], ort.InferenceSession] = {}


def session(case: Case, op_type: str) -> ort.InferenceSession:
    key = case, op_type, native.level()
    if key not in SESSIONS:
        options = cpu_options(case.threads, library())
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        SESSIONS[key] = open_session(model(case, op_type), options)
    return SESSIONS[key]


def run(case: Case, step: Step, op_type: str = "CachedAttention", *, paged: bool = False) -> tuple[Array, Array, Array]:
    """``y [B, S, H, E]`` and both caches. ``paged``: they lie in blocks of a pool, in any order, while it runs."""
    rows, tokens = step.query.shape[:2]
    parts = [x.reshape(*x.shape[:2], x.shape[2] * x.shape[3]) for x in (step.query, step.key, step.value)]
    feeds = {"q": np.concatenate(parts, axis=2)} if case.packed else dict(zip("qkv", parts, strict=True))
    if op_type != "CachedAttention":
        total = np.array(step.last.max() + 1, np.int32)
        feeds |= {"past_key": step.past_key, "past_value": step.past_value, "last": step.last, "total": total}
        y, key, value = (np.asarray(result) for result in session(case, op_type).run(["y", "key", "value"], feeds))
        return y.reshape(step.query.shape), key, value  # heads of one size
    table = (Table.random if paged else Table.of_one_block_each)(rows, case.max_tokens)
    y, key, value = compute(
        case,
        feeds,
        [tokens] * rows,
        (step.last + 1 - tokens).tolist(),
        (table.pool(step.past_key), table.pool(step.past_value)),
        table.blocks,
    )
    return (
        y.reshape(rows, tokens, case.heads, case.value_size),
        table.logical(key, step.past_key),
        table.logical(value, step.past_value),
    )


@dataclass(frozen=True)
class Table:
    """Where the caches of sequences lie in a pool of blocks."""

    blocks: Array  # [B, M] int32
    block_tokens: int
    spare: int = 0  # blocks of nobody

    @staticmethod
    def of_one_block_each(rows: int, max_tokens: int = MAX_TOKENS) -> Table:
        return Table(np.arange(rows, dtype=np.int32)[:, None], max_tokens)

    @staticmethod
    def random(rows: int, max_tokens: int = MAX_TOKENS, seed: int = 3) -> Table:
        each, spare = -(-max_tokens // BLOCK_TOKENS), 2
        places = np.random.default_rng(seed).permutation(rows * each + spare)[: rows * each]
        return Table(places.reshape(rows, each).astype(np.int32), BLOCK_TOKENS, spare)

    def pool(self, caches: Array) -> Array:
        """Caches ``[B, KV, T, D]`` as ``[blocks, KV, block_tokens, D]``."""
        rows, heads, _, size = caches.shape
        shape = (self.blocks.size + self.spare, heads, self.block_tokens, size)
        pool = np.full(shape, 77, caches.dtype)
        for row in range(rows):
            for column, block in enumerate(self.blocks[row]):
                part = caches[row, :, column * self.block_tokens : (column + 1) * self.block_tokens]
                pool[block, :, : part.shape[1]] = part
        return pool

    def logical(self, pool: Array, like: Array) -> Array:
        """Caches in the shape of ``like`` again."""
        caches = np.empty_like(like)
        for row in range(len(like)):
            whole = np.concatenate([pool[block] for block in self.blocks[row]], axis=1)
            caches[row] = whole[:, : like.shape[2]]
        return caches


def compute(
    case: Case,
    feeds: dict[str, Array],
    counts: list[int],
    starts: list[int],
    pools: tuple[Array, Array],
    table: Array,
) -> tuple[Array, Array, Array]:
    """One run over packed tokens. ``feeds``: queries, or queries, keys and values, ``[.., .., columns]``.

    The operator writes its caches in place; ``pools`` stay, and what became of them is returned.
    """
    offsets = np.cumsum([0, *counts]).astype(np.int32)
    feeds = feeds | {"past_key": pools[0], "past_value": pools[1], "offsets": offsets, "table": table}
    feeds["starts"] = np.array(starts, np.int32)
    runner = session(case, "CachedAttention")
    feeds = {name: np.array(array, order="C") for name, array in feeds.items()}
    binding = runner.io_binding()
    y = np.zeros((*feeds["q"].shape[:2], case.heads * case.value_size), np.float32)
    for bind, arrays in ((binding.bind_input, feeds), (binding.bind_output, {"y": y})):
        for name, array in arrays.items():
            bind(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
    runner.run_with_iobinding(binding)
    return y, feeds["past_key"], feeds["past_value"]


def rotated(case: Case, x: Array, positions: Array) -> Array:
    """``x [S, heads, D]`` in float64."""
    if case.rotary == "none":
        return x.astype(np.float64)
    cos, sin = (constants(case)[name][positions, None].astype(np.float64) for name in ("cos", "sin"))
    result = np.empty(x.shape)
    half = case.head_size // 2
    parts = (slice(None, half), slice(half, None)) if case.rotary == "half" else (slice(0, None, 2), slice(1, None, 2))
    first, second = (x[..., part].astype(np.float64) for part in parts)
    result[..., parts[0]], result[..., parts[1]] = first * cos - second * sin, second * cos + first * sin
    return result


def written(case: Case, step: Step) -> tuple[Array, Array]:
    """New rows of both caches ``[B, S, KV, D]`` in float64, those of codes not yet rounded."""
    tokens = step.query.shape[1]
    key = np.stack(
        [rotated(case, k, n + 1 - tokens + np.arange(tokens)) for k, n in zip(step.key, step.last, strict=True)]
    )
    if not case.codes:
        return key, step.value
    return key / constants(case)["ks"][0, :, 0], step.value / constants(case)["vs"][0, :, 0]


def channels(case: Case, cache: Array) -> Array:
    """A cache as ``[B, KV, T, D]``."""
    return unpacked(cache) if case.bits == 4 else cache


def attended(case: Case, step: Step, key: Array, value: Array) -> Array:
    """``y`` in float64 over caches ``[B, KV, T, D]`` that hold the new rows."""
    rows, tokens = step.query.shape[:2]
    scales = constants(case)
    y = np.empty((rows, tokens, case.heads, case.value_size))
    for b in range(rows):
        positions = step.last[b] + 1 - tokens + np.arange(tokens)
        queries, total = rotated(case, step.query[b], positions), step.last[b] + 1
        columns = np.arange(total)
        visible = columns <= positions[:, None]
        if case.window:
            visible &= columns > positions[:, None] - case.window
        for head in range(case.heads):
            of = head // case.group
            keys, values = key[b, of, :total].astype(np.float64), value[b, of, :total].astype(np.float64)
            if case.codes:
                keys, values = keys * scales["ks"][0, of], values * scales["vs"][0, of]
            scores = queries[:, head] @ keys.T * case.head_size**-0.5
            if case.softcap:
                scores = case.softcap * np.tanh(scores / case.softcap)
            scores = np.where(visible, scores, -np.inf)
            largest, sum_of_sinks = scores.max(-1, keepdims=True), 0.0
            if case.sinks:
                largest = np.maximum(largest, scales["sinks"][head])
                sum_of_sinks = np.exp(scales["sinks"][head] - largest)
            weights = np.exp(scores - largest)
            y[b, :, head] = weights / (weights.sum(-1, keepdims=True) + sum_of_sinks) @ values
    return y


def new_rows(step: Step, cache: Array) -> Array:
    """Of caches ``[B, KV, T, D]`` the rows of this step, ``[B, S, KV, D]``."""
    tokens = step.query.shape[1]
    return np.stack([c[:, n + 1 - tokens : n + 1].swapaxes(0, 1) for c, n in zip(cache, step.last, strict=True)])


def check(case: Case, step: Step, result: tuple[Array, Array, Array]) -> None:
    y, key, value = result[0], *(channels(case, cache) for cache in result[1:])
    new_key, new_value = written(case, step)
    tokens = step.query.shape[1]
    pasts = channels(case, step.past_key), channels(case, step.past_value)
    for cache, past, new in ((key, pasts[0], new_key), (value, pasts[1], new_value)):
        for b, length in enumerate(step.last):
            np.testing.assert_array_equal(cache[b, :, : length + 1 - tokens], past[b, :, : length + 1 - tokens])
        if case.codes:  # to the nearest code, or to either where there are two but for float's rounding
            assert np.abs(new_rows(step, cache) - np.clip(new, *case.range)).max() <= 0.5 + 1e-4
        else:
            np.testing.assert_allclose(new_rows(step, cache), new, rtol=1e-5, atol=1e-6)
    expected = attended(case, step, key, value)
    largest = np.abs(expected).max()
    assert np.abs(y - expected).max() <= limit(case) * largest


SHAPES = {
    "decode": (1, [0, 1, 63, 64, 65, 140]),
    "prompt": (100, [0]),
    "prompt with a past": (70, [33]),
    "few tokens of several rows": (3, [0, 61, 130]),
    "prompts of several rows": (40, [0, 5, 77]),
}
UNEVEN = {
    "keys of 192, values of 128": Case(heads=4, kv_heads=4, head_size=192, values=128),
    "keys of 192, values of 128, separate, sinks": Case(
        heads=8, kv_heads=2, head_size=192, values=128, packed=False, sinks=True, window=40
    ),
    "keys of 16, values of 208": Case(heads=9, kv_heads=1, head_size=16, values=208),
    "keys of 512, values of 16": Case(heads=2, kv_heads=1, head_size=512, values=16, softcap=3.0),
}
CASES = {
    "default": Case(),
    "float cache": Case(bits=32),
    "separate q, k, v": Case(packed=False),
    "interleaved": Case(rotary="interleaved"),
    "no rotary": Case(rotary="none", bits=32, packed=False),
    "window": Case(window=40),
    "window of floats": Case(window=3, bits=32),
    "soft cap": Case(softcap=3.0),
    "soft cap and window": Case(softcap=3.0, window=70, bits=32),
    "sinks": Case(sinks=True),
    "sinks, float cache, window": Case(sinks=True, bits=32, window=40),
    "sinks, 4 bits, soft cap": Case(sinks=True, bits=4, softcap=3.0),
    "sinks, group of 8": Case(heads=16, kv_heads=2, sinks=True, window=128, packed=False),
    "heads of 16": Case(heads=4, kv_heads=4, head_size=16),
    "heads of 80": Case(heads=4, kv_heads=2, head_size=80),
    "float heads of 80": Case(heads=4, kv_heads=2, head_size=80, bits=32),
    "group of 8, heads of 128": Case(heads=8, kv_heads=1, head_size=128),
    "no groups": Case(heads=3, kv_heads=3),
    "group of 50": Case(heads=50, kv_heads=1, head_size=16),
    "4 bits": Case(bits=4),
    "4 bits, separate q, k, v": Case(bits=4, packed=False, rotary="interleaved"),
    "4 bits, window and soft cap": Case(bits=4, window=40, softcap=3.0),
    "4 bits, heads of 16": Case(heads=4, kv_heads=4, head_size=16, bits=4),
    "4 bits, heads of 80": Case(heads=4, kv_heads=2, head_size=80, bits=4),
    "4 bits, group of 8, heads of 128": Case(heads=8, kv_heads=1, head_size=128, bits=4, rotary="none"),
    **{f"{name}, {bits} bits": replace(case, bits=bits) for name, case in UNEVEN.items() for bits in (32, 8, 4)},
}


@pytest.mark.parametrize(("tokens", "past"), SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_it_computes_what_it_says(case: Case, tokens: int, past: list[int]) -> None:
    step = step_of(case, tokens, past)
    alone, paged = run(case, step), run(case, step, paged=True)
    check(case, step, alone)
    for one, other in zip(alone, paged, strict=True):
        np.testing.assert_array_equal(one, other)
    for before, after in ((step.past_key, alone[1]), (step.past_value, alone[2])):
        assert np.count_nonzero((before != after).any(axis=-1)) <= len(past) * case.kv_heads * tokens


@pytest.mark.parametrize(
    ("tokens", "past", "bits", "sinks"),
    [
        (1, [8191, 63, 5000], 8, False),
        (4096, [0], 8, False),
        (300, [7892], 8, False),
        (1, [8191, 63, 5000], 4, False),
        (70, [8122, 0], 8, True),
    ],
    ids=["decode", "prompt", "last of a prompt", "decode of 4 bits", "sinks"],
)
def test_contexts_of_8192_tokens(tokens: int, past: list[int], bits: int, sinks: bool) -> None:
    case = Case(heads=2, kv_heads=1, bits=bits, sinks=sinks, threads=2, max_tokens=8192)
    step = step_of(case, tokens, past)
    result = run(case, step, paged=True)
    check(case, step, result)
    for threads in (1, 16):
        for one, other in zip(result, run(replace(case, threads=threads), step, paged=True), strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(("tokens", "past"), [(1, [0, 5, 63, 140]), (70, [33]), (100, [0])], ids=str)
@pytest.mark.parametrize(
    "case",
    [
        *(Case(), Case(bits=32), Case(bits=4), Case(window=40), Case(softcap=3.0), Case(rotary="interleaved")),
        *(Case(sinks=True), Case(bits=32, sinks=True), Case(window=40, sinks=True)),
    ],
    ids=str,
)
def test_it_equals_the_stock_operator(case: Case, tokens: int, past: list[int]) -> None:
    step = step_of(case, tokens, past)
    own, stock = (run(case, step, op_type)[0] for op_type in ("CachedAttention", "GroupQueryAttention"))
    # Of an int8 cache a code in a thousand or so differs by one: the stock operator multiplies by 1 / scale.
    most = 5e-3 if case.codes and tokens > 1 else limit(case)
    assert np.abs(own - stock).max() <= most * np.abs(stock).max()


@pytest.mark.parametrize(
    "case",
    [
        *(Case(), Case(bits=32), Case(bits=4), Case(window=40), Case(heads=3, kv_heads=3), Case(sinks=True)),
        *(Case(head_size=96, values=64, bits=bits) for bits in (32, 8, 4)),
    ],
    ids=str,
)
@pytest.mark.parametrize("tokens", [1, 2, 30])
def test_a_sequence_is_the_same_to_the_bit_in_any_batch(case: Case, tokens: int) -> None:
    step = step_of(case, tokens, [0, 17, 64, 101])
    together = run(case, step)[0]
    for row in range(4):
        for threads in (1, 2):
            alone = run(replace(case, threads=threads), step.row(row))[0]
            np.testing.assert_array_equal(alone[0], together[row])


@pytest.mark.parametrize(
    "case",
    [
        *(Case(), Case(bits=32), Case(bits=4), Case(window=40), Case(softcap=2.0)),
        *(Case(sinks=True), Case(sinks=True, bits=32, window=40)),
        *(Case(head_size=48, values=80, bits=bits) for bits in (32, 8, 4)),
    ],
    ids=str,
)
@pytest.mark.parametrize("pieces", [(99,), (1,) * 99, (64, 35), (1, 50, 48)], ids=["whole", "single", "two", "three"])
def test_a_prompt_is_the_same_to_the_bit_however_it_is_cut(case: Case, pieces: tuple[int, ...]) -> None:
    whole = step_of(case, 99, [0])
    expected = run(case, whole)[0]
    key, value, at = whole.past_key, whole.past_value, 0
    for count in pieces:
        part = slice(at, at + count)
        at += count
        tokens = whole.query[:, part], whole.key[:, part], whole.value[:, part]
        y, key, value = run(case, Step(*tokens, key, value, np.array([at - 1], np.int32)))
        np.testing.assert_array_equal(y, expected[:, part])


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 9),
    head_size=st.sampled_from([16, 48, 64, 96]),
    values=st.sampled_from([0, 16, 32, 80]),
    bits=st.sampled_from([32, 8, 4]),
    window=st.sampled_from([0, 1, 30, 100]),
    sinks=st.booleans(),
    tokens=st.integers(1, 60),
    past=st.lists(st.integers(0, MAX_TOKENS - 60), min_size=1, max_size=4),
)
def test_any_shape(
    kv_heads: int,
    group: int,
    head_size: int,
    values: int,
    bits: int,
    window: int,
    sinks: bool,
    tokens: int,
    past: list[int],
) -> None:
    case = Case(kv_heads * group, kv_heads, head_size, values, bits=bits, window=window, sinks=sinks)
    step = step_of(case, tokens, past)
    check(case, step, run(case, step))


@pytest.mark.parametrize("softcap", [0.0, 30.0])
def test_scores_far_apart_leave_no_trace_of_the_small_ones(softcap: float) -> None:
    case = Case(softcap=softcap)
    step = step_of(case, 5, [120])
    step = replace(step, query=step.query * 1000)
    y, key, value = run(case, step)
    expected = attended(case, step, channels(case, key), channels(case, value))
    # A float that counts in thousands has no more digits. A rounded query moves such scores by a thirtieth of what the
    # rounding of keys moves them.
    most = 5e-2 if rounds_queries(case) else 2e-3
    assert np.abs(y - expected).max() <= most * np.abs(expected).max()


def test_queries_of_zeros_average_the_values() -> None:
    step = step_of(Case(), 1, [100])
    step = replace(step, query=np.zeros_like(step.query))
    check(Case(), step, run(Case(), step))


def test_what_lies_behind_a_sequence_is_not_read() -> None:
    case = Case(bits=32)
    step = step_of(case, 2, [70, 3])
    expected = run(case, step)[0]
    for cache in (step.past_key, step.past_value):
        for row, length in zip(cache, step.last, strict=True):
            row[:, length + 1 :] = np.nan
    np.testing.assert_array_equal(run(case, step)[0], expected)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    counts=st.lists(st.sampled_from([0, 1, 1, 2, 17, 40, 70]), min_size=1, max_size=5),
    past=st.lists(st.integers(0, MAX_TOKENS - 70), min_size=5, max_size=5),
    case=st.sampled_from(
        [
            *(Case(), Case(bits=32), Case(bits=4), Case(window=40), Case(heads=3, kv_heads=3), Case(packed=False)),
            *(Case(sinks=True), Case(sinks=True, bits=32, window=40)),
            *(Case(head_size=80, values=48), Case(head_size=32, values=96, bits=4, packed=False)),
        ]
    ),
)
def test_any_mix_of_prompts_and_single_tokens_equals_each_alone(counts: list[int], past: list[int], case: Case) -> None:
    """To the bit, and nothing else in the pool changes."""
    pairs = list(zip(counts, past, strict=False))
    steps = [step_of(case, max(count, 1), [start], seed) for seed, (count, start) in enumerate(pairs)]
    table = Table.random(len(counts))
    pools = [table.pool(np.concatenate([getattr(s, name) for s in steps])) for name in ("past_key", "past_value")]
    names = ("query", "key", "value")
    packed = [
        np.concatenate([flat(getattr(s, name)[0, :count]) for s, count in zip(steps, counts, strict=True)])
        for name in names
    ]
    feeds = {"q": np.concatenate(packed, axis=1)[None]}
    if not case.packed:
        feeds = {name: part[None] for name, part in zip("qkv", packed, strict=True)}
    y, key, value = compute(case, feeds, counts, past[: len(counts)], (pools[0], pools[1]), table.blocks)
    first, expected = 0, [pool.copy() for pool in pools]
    for row, (step, count) in enumerate(zip(steps, counts, strict=True)):
        if not count:
            continue
        alone = run(case, step)
        found = y[0, first : first + count].reshape(alone[0][0].shape)
        np.testing.assert_array_equal(found, alone[0][0])
        first += count
        for pool, cache in zip(expected, alone[1:], strict=True):
            for at in range(past[row], past[row] + count):
                pool[table.blocks[row, at // BLOCK_TOKENS], :, at % BLOCK_TOKENS] = cache[0, :, at]
    np.testing.assert_array_equal(key, expected[0])
    np.testing.assert_array_equal(value, expected[1])


def test_sequences_may_share_blocks_that_are_only_read() -> None:
    """Two sequences with one prefix of two blocks equal two that hold it twice."""
    case = Case()
    prefix, steps = 2 * BLOCK_TOKENS, [step_of(case, 3, [2 * BLOCK_TOKENS], seed) for seed in (0, 1)]
    steps = [replace(step, past_key=steps[0].past_key, past_value=steps[0].past_value) for step in steps]
    table = Table.random(2)
    pools = [table.pool(np.concatenate([getattr(s, name) for s in steps])) for name in ("past_key", "past_value")]
    shared = table.blocks.copy()
    shared[1, :2] = shared[0, :2]
    rows = [np.concatenate([s.query, s.key, s.value], axis=2).reshape(3, -1) for s in steps]
    feeds = {"q": np.concatenate(rows)[None]}
    results = [
        compute(case, feeds, [3, 3], [prefix, prefix], (pools[0], pools[1]), blocks)[0]
        for blocks in (table.blocks, shared)
    ]
    np.testing.assert_array_equal(results[0], results[1])


def flat(x: Array) -> Array:
    """``[S, heads, D]`` as ``[S, columns]``."""
    return x.reshape(len(x), x.shape[1] * x.shape[2])


def malformed(**changed: Any) -> None:
    """A run of two sequences of two tokens with other inputs than it should have."""
    case, table = Case(), Table.random(2)
    step = step_of(case, 2, [9, 4])
    q = np.concatenate([step.query, step.key, step.value], axis=2).reshape(2, 2, -1)
    feeds = {"q": q, "past_key": table.pool(step.past_key), "past_value": table.pool(step.past_value)}
    feeds |= {"offsets": np.array([0, 2, 4], np.int32), "starts": np.array([9, 4], np.int32), "table": table.blocks}
    session(case, "CachedAttention").run(None, feeds | changed)


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("starts", [9, 191], "longer than its blocks"),
        ("starts", [-1, 4], "longer than its blocks"),
        ("offsets", [0, 3, 2], "offsets do not begin with 0, or end with the tokens"),
        ("offsets", [1, 2, 4], "offsets do not begin with 0, or end with the tokens"),
        ("offsets", [0, 5, 4], "ends before it begins"),
        ("offsets", [0, 4], "are int32"),
        ("starts", [9], "are int32"),
        ("table", [[0, 1, 2], [8, 4, 5]], "a block that is not there"),
        ("table", [[-1, 1, 2], [3, 4, 5]], "a block that is not there"),
    ],
)
def test_a_malformed_table_is_an_error(name: str, wrong: list[Any], message: str) -> None:
    malformed()
    with pytest.raises(Exception, match=message):
        malformed(**{name: np.array(wrong, np.int32)})


def test_blocks_of_several_tiles_only() -> None:
    """A tile of keys lies in one block, so a sequence has one block or blocks of whole tiles."""
    pool = np.zeros((6, Case().kv_heads, BLOCK_TOKENS - 1, Case().head_size), np.int8)
    with pytest.raises(Exception, match="a cache of an unsupported shape"):
        malformed(past_key=pool, past_value=pool)


@pytest.mark.parametrize("bits", [32, 8, 4])
def test_every_run_is_checked_anew(bits: int) -> None:
    """A session that ran before, then with values and keys of another shape."""
    case = Case(bits=bits, packed=False)
    step = step_of(case, 2, [9, 4])
    expected = run(case, step)[0]
    table = Table.of_one_block_each(2)
    parts = [x.reshape(2, 2, -1) for x in (step.query, step.key, step.value)]
    feeds = dict(zip("qkv", parts, strict=True))
    pools = table.pool(step.past_key), table.pool(step.past_value)
    with pytest.raises(Exception, match="a cache of an unsupported shape or type"):
        compute(case, feeds, [2, 2], [9, 4], (pools[0], pools[1][:, :, :-1].copy()), table.blocks)
    with pytest.raises(Exception, match="queries, keys or values of another shape"):
        compute(case, feeds | {"v": feeds["v"][:, :1].copy()}, [2, 2], [9, 4], pools, table.blocks)
    np.testing.assert_array_equal(run(case, step)[0], expected)


@pytest.mark.parametrize(
    "case",
    [
        *(CASES[name] for name in ("default", "heads of 80", "separate q, k, v", "4 bits")),
        CASES["keys of 192, values of 128, separate, sinks, 8 bits"],
    ],
)
def test_values_that_the_scales_clip_are_counted(case: Case) -> None:
    """In whatever units: several tokens of several sequences, and one token of one."""
    for tokens, past in ((70, [0, 5, 77]), (1, [40])):
        step = step_of(case, tokens, past)
        counted = clippings(library())
        run(case, step)
        found, codes = counted().kv, np.rint(np.concatenate(written(case, step), axis=-1))
        clipped = int(((codes < case.range[0]) | (codes > case.range[1])).sum())
        assert found.stored == codes.size
        assert clipped > 0.01 * codes.size and abs(found.clipped - clipped) <= 3  # float's rounding beside a half
        assert counted() == Clipping(kv=found)


def test_a_cache_of_floats_clips_nothing() -> None:
    counted = clippings(library())
    run(CASES["float cache"], step_of(CASES["float cache"], 3, [0, 61]))
    assert counted().kv == ValueCounts()


def test_without_a_library_nothing_is_counted() -> None:
    assert clippings(None)() == Clipping()
    assert clippings(Path(_ctypes.__file__))() == Clipping()  # a library that does not count


def test_no_new_tokens_leave_the_cache_as_it_was() -> None:
    case = Case()
    step = step_of(case, 1, [9, 4])
    none = replace(step, query=step.query[:, :0], key=step.key[:, :0], value=step.value[:, :0])
    y, key, value = run(case, none)
    assert y.shape == (2, 0, case.heads, case.head_size)
    for cache, past in ((key, step.past_key), (value, step.past_value)):
        for row, before, length in zip(cache, past, step.last, strict=True):
            np.testing.assert_array_equal(row[:, : length + 1], before[:, : length + 1])
