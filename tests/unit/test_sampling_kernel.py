"""The native sampling kernel against numpy: the same tokens, to the bit, for whatever logits and settings."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.kernels.cpu import Level, compiler
from engines.kernels.cpu.sampling import SamplingKernel, sampling_kernel
from engines.kernels.sampling import Adjustments, Drawn, SamplingRow
from runtime.engine.draw import filters_of
from runtime.engine.sampling import BatchSampler
from runtime.wire.messages import SamplingSettings
from tests.native import least_level

PLACES = (1, 2, 15, 16, 17, 31, 32, 33, 100, 511, 512, 513, 1025, 5000, 49_152)


def drawn(kernel: SamplingKernel | None, rows: list[SamplingRow]) -> list[Drawn]:
    sampler = BatchSampler(len(rows[0].logits), kernel=kernel)
    return sampler._draw(rows)  # pyright: ignore[reportPrivateUsage]


def random_logits(generator: np.random.Generator, vocab_size: int) -> np.ndarray:
    kind = generator.integers(8)
    logits = generator.normal(0, generator.choice([0.01, 1, 4, 30]), vocab_size)
    if kind == 0:  # ties
        logits = np.rint(logits)
    if kind == 1:  # most tokens excluded
        logits[generator.random(vocab_size) < 0.9] = -np.inf
    if kind == 2:  # one stands out
        logits[generator.integers(vocab_size)] += 50
    if kind == 3:  # as far apart as floats are
        logits = generator.choice([-3e38, -1.0, -0.0, 0.0, 1e-45, 3e38], vocab_size)
    if kind == 4 and generator.random() < 0.3:
        logits[generator.integers(vocab_size)] = generator.choice([np.nan, np.inf, -np.inf])
    if kind == 5 and generator.random() < 0.1:
        logits[:] = -np.inf
    return logits.astype(np.float32)


def random_row(generator: np.random.Generator, vocab_size: int) -> SamplingRow:
    sampling = SamplingSettings(
        temperature=float(generator.choice([0, 1e-300, 0.3, 0.8, 1, 2, 1e30])),
        top_k=int(generator.choice([0, 0, 1, 2, 7, 50, 2000, vocab_size, vocab_size + 1])),
        top_p=float(generator.choice([1, 1, 1e-9, 0.5, 0.95, 0.999999, 1 - 2**-53])),
        min_p=float(generator.choice([0, 0, 1e-9, 0.02, 0.5, 1])),
    )
    adjustments = mask = None
    if generator.random() < 0.5:
        count = int(generator.integers(0, min(vocab_size, 60) + 1))
        adjustments = Adjustments(count + 3)
        for token in generator.choice(vocab_size, count, replace=False).tolist():
            adjustments.add(token)
        used = slice(count)
        adjustments.bias[used] = generator.choice([0, -100, 100, 1.5, -np.inf], count)
        adjustments.factor[used] = generator.choice([1, 1.3, 0.5, 1e-38, 3e38], count)
        adjustments.shift[used] = generator.choice([0, -2, 2, 0.1], count)
    if generator.random() < 0.5:
        density = generator.choice([0.0, 0.01, 0.5, 1.0])
        bits = generator.random(-(-vocab_size // 32) * 32) < density  # those behind the vocabulary mean nothing
        mask = np.packbits(bits, bitorder="little").view(np.uint32)
    top = None if generator.random() < 0.5 else int(generator.integers(0, 130))
    random = int(generator.integers(0, 2**64 - 1, dtype=np.uint64, endpoint=True))
    if generator.random() < 0.1:
        random = [0, 2**64 - 1][generator.integers(2)]
    return SamplingRow(random_logits(generator, vocab_size), filters_of(sampling), random, adjustments, mask, top)


@given(seed=st.integers(0, 2**32), vocab_size=st.sampled_from(PLACES), count=st.integers(1, 5))
@settings(max_examples=300, deadline=None)
def test_the_kernel_draws_what_numpy_draws(level: Level, seed: int, vocab_size: int, count: int) -> None:
    generator = np.random.default_rng(seed)
    rows = [random_row(generator, vocab_size) for _ in range(count)]
    kernel = SamplingKernel(compiler.library(level), vocab_size, threads=2)
    for ours, expected, row in zip(drawn(kernel, rows), drawn(None, rows), rows, strict=True):
        if math.isnan(expected.normalizer):
            assert math.isnan(ours.normalizer)
            expected = expected._replace(normalizer=ours.normalizer)
        assert ours == expected, row


def test_the_same_token_whatever_the_number_of_threads(level: Level) -> None:
    generator = np.random.default_rng(3)
    rows = [random_row(generator, 1000) for _ in range(33)]
    library = compiler.library(level)
    results = [repr(drawn(SamplingKernel(library, 1000, threads), rows)) for threads in (1, 2, 3)]
    assert results[0] == results[1] == results[2]


# None of them reads or writes beyond an array; tests/sanitizers plants those.
DEFECTS = {
    "zero and minus zero differ": ("score += 0.0f;", ""),
    "a fused multiply-add": ("fp contract(off)", "fp contract(fast)"),
    "a nucleus with too much weight": ("row->top_p * (double)total)", "row->top_p * 1.01 * (double)total)"),
    "the mask of the second half of a word": ("(at & 16)", "(at & 0)"),
    "no minimum weight": (
        "find_weights(w, max, row->scale, row->least, 1, 0)",
        "find_weights(w, max, row->scale, 0, 0, 0)",
    ),
    "no bias": ("w->scores[token] + row->bias[i]", "w->scores[token]"),
    "a mask does not exclude tokens whose logits change": (
        "if (row->mask && !(row->mask[token >> 5] >> (token & 31) & 1)) continue;",
        "if (row->mask && !(row->mask[token >> 5] >> (token & 31) & 1)) finite &= 1;",
    ),
}


@pytest.mark.parametrize("defect", DEFECTS.values(), ids=DEFECTS)
def test_a_planted_defect_is_found(level: Level, defect: tuple[str, str], tmp_path: Path) -> None:
    if level != least_level():
        pytest.skip("one level is enough")
    source = tmp_path / "source"
    source.mkdir()
    for path in (compiler.SOURCE / "sampling.c", *compiler.SOURCE.glob("*.h")):
        shutil.copy(path, source)
    text = (source / "sampling.c").read_text()
    assert text.count(defect[0]) == 1
    (source / "sampling.c").write_text(text.replace(*defect))
    library = compiler.library(level, source)
    generator = np.random.default_rng(7)
    differ = False
    for _ in range(120):
        rows = [random_row(generator, 513) for _ in range(8)]
        differ |= repr(drawn(SamplingKernel(library, 513), rows)) != repr(drawn(None, rows))
    assert differ


def test_without_a_library_or_compiler_numpy_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_kernel(library: Path, vocab_size: int, threads: int) -> Any:
        raise AttributeError("undefined symbol: tapeout_sample_1")

    monkeypatch.setattr(compiler, "COMPILER", "no_such_compiler")
    assert sampling_kernel(None, 100) is None
    monkeypatch.setattr("engines.kernels.cpu.sampling.SamplingKernel", no_kernel)
    assert sampling_kernel(tmp_path / "older.so", 100) is None
    monkeypatch.setattr("engines.kernels.cpu.level", lambda: None)
    assert sampling_kernel(None, 100) is None
