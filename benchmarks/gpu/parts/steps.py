"""Steps of a whole model in the large shape, beside a plain model in PyTorch with 16-bit weights in a CUDA graph."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from benchmarks.gpu.llama import EPSILON, Shape
from benchmarks.gpu.place import Place, Record, milliseconds, peers
from engines.bundle import BLOCK_TOKENS
from engines.kernels.cuda.library import DeviceEngine, DeviceStep, StepResults
from engines.protocol import Draw, Entry, Filters, Result
from engines.targets.cuda.engine import CudaEngine, open_engine

BATCHES, PREFILLS, CONTEXT = (1, 8, 32, 128), (128, 1024, 2048, 4096), 1024
STEPS, ROUNDS = 40, 5
DRAWN = Draw(Filters(1.44, 50, 0.9, 0), [1 << 63])
DISTINCT = 8  # prompts; other sequences get copies of their blocks


@dataclass(frozen=True)
class Sizes:
    """``blocks``: of a sequence. ``sequences``: of full length, that there is memory for."""

    batches: Sequence[int]
    prefills: Sequence[int]
    context: int
    steps: int
    blocks: int
    sequences: int

    def tables(self, batch: int) -> list[range]:
        return [range(n * self.blocks, (n + 1) * self.blocks) for n in range(batch)]


def _sizes(place: Place) -> Sizes:
    batches, prefills, context, steps = (
        ((1, 2), (8, 70), 70, 2) if place.rehearsal else (BATCHES, PREFILLS, CONTEXT, STEPS)
    )
    blocks = -(-(context + 3 * (steps + 1)) // BLOCK_TOKENS)
    wanted = max(max(batches) * blocks, -(-max(prefills) // BLOCK_TOKENS))
    return Sizes(batches, prefills, context, steps, blocks, -(-wanted // -(-place.large.max_tokens // BLOCK_TOKENS)))


def run(place: Place, record: Record) -> None:
    """The profiler slows what follows: it is last."""
    shape, sizes = place.large, _sizes(place)
    begun = time.perf_counter()
    bundle = place.bundle(shape, place.level)
    record("bundle written", seconds=time.perf_counter() - begun, shape=shape.name, weight_bytes=shape.weight_bytes)

    @contextmanager
    def opened() -> Generator[tuple[CudaEngine, _Watch]]:
        with closing(open_engine(bundle, sequences=sizes.sequences)) as engine:
            watch = _Watch(engine)
            _fill(engine, shape, sizes.context, sizes.blocks, max(sizes.batches))
            yield engine, watch

    with opened() as (engine, watch):
        _times(engine, watch, bundle.record.precision, shape, sizes, record)
    for batch in sizes.batches:
        times = {"torch bf16 in a graph": partial(_torch, place, shape, batch, sizes.context)}
        peers(record, "decode", times, batch=batch, context=sizes.context)
    with opened() as (engine, watch):
        for batch in sizes.batches:
            decode = partial(watch.decode, sizes.tables(batch), sizes.context, 1)
            _kernels(place, record, decode, batch=batch, step="decode")
        prompt = Entry(_words(shape, max(sizes.prefills), 3), 0, range(-(-max(sizes.prefills) // BLOCK_TOKENS)))
        _kernels(place, record, partial(_checked, engine, [prompt]), batch=1, step="prefill")


def _times(engine: CudaEngine, watch: _Watch, name: str, shape: Shape, sizes: Sizes, record: Record) -> None:
    of: dict[str, Any] = {"ours": name, "context": sizes.context}
    for batch in sizes.batches:
        tables = sizes.tables(batch)
        for graph in (True, False):
            watch.graph = graph
            ms, host_ms = watch.twice(tables, sizes.context, sizes.steps)
            size = shape.weight_bytes + batch * shape.cache_bytes(sizes.context)
            record("decode", graph=graph, batch=batch, ms=ms, host_ms=host_ms, read_bytes=size, **of)
        watch.graph = True
        ms, host_ms = watch.twice(tables, sizes.context, sizes.steps, DRAWN)
        record("drawn decode", batch=batch, ms=ms, host_ms=host_ms, **of)
    for tokens in sizes.prefills:
        entry = Entry(_words(shape, tokens, 3), 0, range(-(-tokens // BLOCK_TOKENS)))
        ms = median(_ms(partial(_checked, engine, [entry])) for _ in range(ROUNDS))
        record("prefill", ours=name, tokens=tokens, ms=ms, flop=_flop(shape, tokens))


def _kernels(place: Place, record: Record, call: Callable[[], object], **of: Any) -> None:
    """Launches of each kernel in a call, and their microseconds, as PyTorch's profiler sees them."""
    if place.rehearsal:
        call()
        return
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
    path = place.scratch / "trace.json"
    seen.export_chrome_trace(str(path))
    found = dict[tuple[str, str], list[float]]()
    for event in json.loads(path.read_text())["traceEvents"]:
        if event.get("cat") == "kernel":
            found.setdefault((event["name"], str(event["args"].get("grid"))), []).append(event["dur"])
    for (name, grid), times in sorted(found.items(), key=lambda item: -sum(item[1])):
        record("kernel", kernel=name, grid=grid, launches=len(times), us=median(times), all_us=sum(times), **of)


def _words(shape: Shape, count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, shape.vocabulary, count).tolist()


def _flop(shape: Shape, tokens: int) -> int:
    """Of linears of layers; of attention it is the smaller part."""
    return 2 * tokens * shape.layers * sum(n * k for n, k in shape.linears.values())


def _ms(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - start)


def _checked(engine: CudaEngine, batch: Sequence[Entry]) -> list[Result]:
    results = engine.step(batch)
    assert all(result.error is None for result in results), next(one.error for one in results if one.error)
    return results


def _fill(engine: CudaEngine, shape: Shape, context: int, blocks: int, sequences: int) -> None:
    for number in range(min(DISTINCT, sequences)):
        table = range(number * blocks, (number + 1) * blocks)
        _checked(engine, [Entry(_words(shape, context, number), 0, table, positions=())])
    for number in range(DISTINCT, sequences):
        for block in range(-(-context // BLOCK_TOKENS)):
            engine.copy_block(number % DISTINCT * blocks + block, number * blocks + block, BLOCK_TOKENS)


class _Watch:
    """Times steps, and how much of them is spent before and after the driver is called."""

    def __init__(self, engine: CudaEngine) -> None:
        self._engine, self.graph, self._inside = engine, True, 0.0
        device: DeviceEngine = vars(engine)["_device"]
        begin = device.begin

        def watched(step: DeviceStep, *, ranking: bool, logits: bool) -> Callable[[], StepResults]:
            start = time.perf_counter()
            finish = begin(step if self.graph else replace(step, bucket=0), ranking=ranking, logits=logits)
            self._inside += time.perf_counter() - start

            def waited() -> StepResults:
                start = time.perf_counter()
                found = finish()
                self._inside += time.perf_counter() - start
                return found

            return waited

        device.begin = watched

    def twice(self, tables: Sequence[range], context: int, steps: int, draw: Draw | None = None) -> tuple[float, float]:
        """Of the second time."""
        self.decode(tables, context, steps, draw)
        return self.decode(tables, context, steps, draw)

    def decode(
        self, tables: Sequence[range], context: int, steps: int, draw: Draw | None = None
    ) -> tuple[float, float]:
        """Medians of a step, and of its part outside the driver, in ms. Tokens go on from the context each time."""
        tokens, times, outside = [1] * len(tables), list[float](), list[float]()
        for step in range(steps):
            fed = zip(tokens, tables, strict=True)
            batch = [Entry([token], context + step, table, draw=draw) for token, table in fed]
            self._inside, start = 0.0, time.perf_counter()
            results = _checked(self._engine, batch)
            times.append(1e3 * (time.perf_counter() - start))
            outside.append(times[-1] - 1e3 * self._inside)
            tokens = [int(result.tokens[0]) for result in results if result.tokens is not None]
        return median(times), median(outside)


def _torch(place: Place, shape: Shape, batch: int, context: int) -> float:
    """A decode step as one would write it in PyTorch: merged linears, a contiguous cache, greedy tokens."""
    import torch
    from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

    like: dict[str, Any] = {"dtype": torch.bfloat16, "device": place.torch_device}
    s, cache = shape, (batch, shape.kv_heads, context, shape.head_size)
    norm = torch.ones(s.hidden, **like)
    head = torch.randn(s.vocabulary, s.hidden, **like) * s.hidden**-0.5
    layers = [
        {name: torch.randn(n, k, **like) * k**-0.5 for name, (n, k) in s.linears.items()} for _ in range(s.layers)
    ]
    caches = [(torch.randn(cache, **like), torch.randn(cache, **like)) for _ in range(s.layers)]
    cosine, sine = (torch.rand(s.head_size // 2, **like) for _ in range(2))
    ids = torch.zeros(batch, dtype=torch.int64, device=place.torch_device)

    def rotated(x: Any) -> Any:
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)

    def step() -> None:
        x = head[ids]
        for weights, (keys, values) in zip(layers, caches, strict=True):
            qkv = linear(rms_norm(x, (s.hidden,), norm, EPSILON), weights["qkv"]).view(batch, -1, s.head_size)
            query, key, value = qkv.split((s.heads, s.kv_heads, s.kv_heads), dim=1)
            keys[:, :, -1], values[:, :, -1] = rotated(key), value
            found = scaled_dot_product_attention(rotated(query)[:, :, None], keys, values, enable_gqa=True)
            x = x + linear(found.reshape(batch, -1), weights["o"])
            gate, up = linear(rms_norm(x, (s.hidden,), norm, EPSILON), weights["gate_up"]).chunk(2, dim=-1)
            x = x + linear(silu(gate) * up, weights["down"])
        ids.copy_(linear(rms_norm(x, (s.hidden,), norm, EPSILON), head).argmax(dim=-1))

    with torch.inference_mode():
        return milliseconds(place, [step])
