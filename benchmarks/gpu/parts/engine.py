"""A small engine on the driver: its bits do not depend on the batch, and its results are those of level host."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing

import numpy as np

from benchmarks.gpu.llama import Shape, blocks_of
from benchmarks.gpu.place import Place, Record
from engines.kernels.cuda import HOST
from engines.kernels.cuda.layout import BUCKETS
from engines.protocol import Engine, Entry, FloatArray
from engines.targets.cuda.engine import open_engine

HALF = 1e-2  # of the largest logit: GPUs sum in another order, and a key may fall on the next code of eight
COURSE_SECONDS = 20


def run(place: Place, record: Record) -> None:
    shape = place.small
    sequences = 5 if place.rehearsal else max(BUCKETS)
    bundle = place.bundle(shape, place.level)
    with closing(open_engine(bundle, sequences=sequences)) as engine:
        _equal_alone_and_together(engine, shape, sequences, record)
        _cut_prompts(engine, shape, record)
        _courses(engine, shape, sequences, 1 if place.rehearsal else COURSE_SECONDS, record)
        on_device = _some_logits(engine, shape)
        engine.step([_prompt(shape, 0, 60)])
        first = _logits(engine, [Entry([9], 60, blocks_of(shape, 0), "logits")])
        engine.copy_block(blocks_of(shape, 0)[0], blocks_of(shape, 1)[0], 60)
        again = _logits(engine, [Entry([9], 60, blocks_of(shape, 1), "logits")])
        record("a copied block continues as its source", holds=bool(np.array_equal(first, again)))
    host = place.bundle(shape, HOST) if place.level != HOST else bundle
    with closing(open_engine(host, sequences=2)) as engine:
        difference = float(np.abs(_some_logits(engine, shape) - on_device).max() / np.abs(on_device).max())
    record("logits of level host", holds=difference < HALF, difference=difference)


def tokens_of(shape: Shape, count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, shape.vocabulary, count).tolist()


def _prompt(shape: Shape, sequence: int, count: int, positions: Sequence[int] = ()) -> Entry:
    return Entry(tokens_of(shape, count, sequence), 0, blocks_of(shape, sequence), "logits", positions)


def _logits(engine: Engine, batch: Sequence[Entry]) -> FloatArray:
    """Of all results, ``[P, V]``. A step's error fails the part."""
    results = engine.step(batch)
    errors = [str(result.error) for result in results if result.error]
    assert not errors, errors[0]
    return np.concatenate([result.logits for result in results if result.logits is not None])


def _some_logits(engine: Engine, shape: Shape) -> FloatArray:
    """A prompt, and tokens after it one by one."""
    parts = [_logits(engine, [_prompt(shape, 1, 90, range(90))])]
    steps = (Entry([at % shape.vocabulary], at, blocks_of(shape, 1), "logits") for at in range(90, 98))
    parts.extend(_logits(engine, [entry]) for entry in steps)
    return np.concatenate(parts)


def _equal_alone_and_together(engine: Engine, shape: Shape, sequences: int, record: Record) -> None:
    """In every bucket, beside others, and in a step without a graph."""
    lengths = [3 + 17 * number % 200 for number in range(sequences)]
    for first in range(0, sequences, 8):
        engine.step([_prompt(shape, n, lengths[n]) for n in range(first, min(first + 8, sequences))])
    entries = [Entry([n % shape.vocabulary], lengths[n], blocks_of(shape, n), "logits") for n in range(sequences)]
    alone = [_logits(engine, [entry])[0] for entry in entries]
    for bucket in BUCKETS:
        if bucket > sequences:
            break
        for count in sorted({bucket, max(bucket - 1, 1)}):
            chosen = entries[-count:]
            together = _logits(engine, chosen)
            holds = all(np.array_equal(row, alone[sequences - count + n]) for n, row in enumerate(together))
            record("the same bits alone and in a batch", holds=holds, batch=count)
    mixed = [entries[0]._replace(tokens=[0, 1], positions=[0]), *entries[1:4]]
    holds = bool(np.array_equal(_logits(engine, mixed), np.stack(alone[:4])))
    record("the same bits in a step without graph", holds=holds)


def _cut_prompts(engine: Engine, shape: Shape, record: Record) -> None:
    """At once, in chunks, and token by token at the end."""
    count = min(600, shape.max_tokens - 1)
    tokens = tokens_of(shape, count, 77)
    whole = _logits(engine, [Entry(tokens, 0, blocks_of(shape, 0), "logits", [count - 1])])
    for ends in ([130, 513, count], [64, 65, count], [count - 3, count - 2, count - 1, count]):
        start, found = 0, whole[:0]
        for end in ends:
            entry = Entry(tokens[start:end], start, blocks_of(shape, 2), "logits", [end - start - 1])
            found, start = _logits(engine, [entry]), end
        holds = bool(np.array_equal(found, whole))
        record("the same bits however a prompt is cut", holds=holds, cuts=ends[:-1])


def _courses(engine: Engine, shape: Shape, sequences: int, seconds: float, record: Record) -> None:
    """Random mixed steps; each result again by a prompt in one piece, to the bit."""
    rng, deadline, steps, wrong = np.random.default_rng(5), time.monotonic() + seconds, 0, 0
    texts: list[list[int]] = [[] for _ in range(min(sequences - 1, 24))]
    while time.monotonic() < deadline:
        chosen = rng.choice(len(texts), rng.integers(1, len(texts) + 1), replace=False).tolist()
        batch = list[Entry]()
        for number in chosen:
            if len(texts[number]) > shape.max_tokens - 70:
                texts[number] = []
            new = tokens_of(shape, int(rng.choice([1, 1, 1, 2, 5, 60])), int(rng.integers(1 << 30)))
            batch.append(Entry(new, len(texts[number]), blocks_of(shape, number), "logits"))
            texts[number] += new
        found = _logits(engine, batch)
        number = int(rng.integers(len(chosen)))
        text = texts[chosen[number]]
        again = _logits(engine, [Entry(text, 0, blocks_of(shape, sequences - 1), "logits")])[0]
        steps, wrong = steps + 1, wrong + (not np.array_equal(found[number], again))
    record("random courses of steps", holds=not wrong and steps > 0, steps=steps, wrong=wrong)
