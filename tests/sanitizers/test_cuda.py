"""Kernels for GPUs as fibers, under sanitizers, and with planted defects that tests of their results must find."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from engines.kernels.cuda import compiler
from tests.cuda import OTHER_LIBRARY, Device
from tests.sanitizers import build, cuda_build
from tests.unit import test_cuda_attention as attention
from tests.unit import test_cuda_choose as choose
from tests.unit import test_cuda_linear as linear
from tests.unit import test_cuda_rows as rows

ROOT = Path(__file__).parents[2]
CHECKED = tuple(f"tests/unit/test_cuda_{name}.py" for name in ("rows", "linear", "attention", "choose"))
SMALL = "(rows and 0-) or (sorted and 0-7) or equals_its_reference and (F16 and True or window) or order_of_threads"


@pytest.fixture(scope="module")
def sanitizers() -> None:
    build.require_sanitizers()


def checked(library: Path, only: str) -> subprocess.CompletedProcess[str]:
    """Tests in a process that has a sanitized library. Python's own memory is not checked for leaks."""
    environment = {
        "LD_PRELOAD": cuda_build.runtimes(),
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        OTHER_LIBRARY: str(library),
    }
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-q", "-x", "-s", "-p", "no:cacheprovider", *CHECKED]
    return subprocess.run(
        [*command, "-k", only], cwd=ROOT, capture_output=True, text=True, env=os.environ | environment
    )


@pytest.mark.usefixtures("sanitizers")
def test_kernels_stay_in_their_memory(tmp_path: Path) -> None:
    done = checked(cuda_build.library(compiler.SOURCE, tmp_path / "kernels.so", sanitized=True), SMALL)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) >= 50


def planted(folder: Path, file: str, before: str, after: str) -> Path:
    """Sources with a defect."""
    source = folder / "source"
    shutil.copytree(compiler.SOURCE, source)
    text = (source / file).read_text()
    assert text.count(before) >= 1, f"{file} no longer has: {before}"
    (source / file).write_text(text.replace(before, after, 1))
    return source


@dataclass(frozen=True)
class Overflow:
    """A defect that a sanitizer must find. ``only``: the tests that run."""

    file: str
    before: str
    after: str
    only: str
    found: str


OVERFLOWS = {
    "too little shared memory": Overflow(
        "launch.cpp", "8 * WARP_BYTES * least", "7 * WARP_BYTES * least", "linear and order", "heap-buffer-overflow"
    ),
    "a warp beyond the last": Overflow(
        "block_linear.cu", "[i - done][warp][lane]", "[i - done][warp + 1][lane]", "linear and order", "out of bounds"
    ),
    "outputs of padding are written": Overflow(
        "block_linear.cu", "if (token < p.M) p.y", "p.y", "linear and order", "heap-buffer-overflow"
    ),
    "too little room for the likeliest tokens": Overflow(
        "launch.cpp", "2 * MOST_TOP + 4", "MOST_TOP + 4", "sorted and 0-203", "heap-buffer-overflow"
    ),
    "an id beyond the rows is read": Overflow(
        "rows.cu", "id >= 0 && id < w.N", "id >= 0 && id <= 64", "embedding and 0-", "heap-buffer-overflow"
    ),
}  # fmt: skip


@pytest.mark.usefixtures("sanitizers")
@pytest.mark.parametrize("defect", OVERFLOWS.values(), ids=OVERFLOWS)
def test_a_planted_overflow_is_found(defect: Overflow, tmp_path: Path) -> None:
    source = planted(tmp_path, defect.file, defect.before, defect.after)
    done = checked(cuda_build.library(source, tmp_path / "kernels.so", sanitized=True), defect.only)
    assert done.returncode not in (0, 5), done.stdout[-3000:]  # 5: no test has run
    assert re.search(defect.found, done.stderr), done.stdout[-3000:] + done.stderr[-3000:]


Check = Callable[[Device], None]


def linear_reference(device: Device) -> None:
    linear.test_a_linear_equals_its_reference(device, "F16", False, 4, 32, 16, 96, False)
    linear.test_a_linear_equals_its_reference(device, "BF16", False, 6, 128, 64, 640, True)


def linear_batches(device: Device) -> None:
    linear.test_a_token_has_the_same_bits_alone_and_in_any_batch(device, "F16", 4)


def codes(device: Device) -> None:
    linear.test_every_code_less_every_zero_point_is_exact(device, "BF16", 8)


def halves(device: Device) -> None:
    linear.test_a_linear_over_halves_equals_its_reference(device, 37, 192)


def fp8(device: Device) -> None:
    linear.test_a_linear_in_fp8_equals_its_reference(device, "F16", 37, 192, True)


def fp8_rows(device: Device) -> None:
    rows.test_norms_and_gates_in_fp8_equal_their_references(device, 2112)


def fp8_not_finite(device: Device) -> None:
    linear.test_nan_and_infinity_reach_all_outputs_of_their_token_in_fp8(device)


def norm(device: Device) -> None:
    rows.test_a_norm_equals_its_reference(device, "F16", 2112)


def first_largest(device: Device) -> None:
    choose.test_argmax_is_the_first_of_the_largest_and_none_of_what_is_not_finite(device, 100)


def draws(device: Device) -> None:
    choose.check_draws(device, 203, rounds=4)


def draws_by_probability(device: Device) -> None:
    choose.test_draws_follow_the_probabilities(device)


def attention_reference(cache: str = "int8", window: int = 0, *, norms: bool = False) -> Check:
    heads = attention.Heads(cache=cache, window=window, norms=norms)
    return lambda device: attention.test_attention_equals_its_reference(device, heads)


def attention_cuts(device: Device) -> None:
    attention.check_cuts(device, attention.Heads(), 700)


@dataclass(frozen=True)
class Wrong:
    """A defect that one of the tests of results must find, in one of the orders of fibers."""

    file: str
    before: str
    after: str
    found_by: Check


WRONG = {
    "a linear lacks the barrier before its warps are added": Wrong(
        "block_linear.cu", "    __syncthreads();\n    const int i = done", "    const int i = done", linear_reference
    ),
    "many tokens lack the barrier after activations are staged": Wrong(
        "block_linear.cu", "    __syncthreads();\n    WeightChunk<BITS> now", "    WeightChunk<BITS> now",
        linear_reference,
    ),
    "parts of many tokens are one sum": Wrong(
        "block_linear.cu", "if (!last) continue;", "if (first < WARPS && first < chunks) continue;", linear_batches
    ),
    "a norm lacks its barrier": Wrong("rows.cu", "  __syncthreads();\n  float all", "  float all", norm),
    "a prompt lacks the barrier after a block is staged": Wrong(
        "attention.cu", "memory);\n    __syncthreads();", "memory);", attention_reference()
    ),
    "rows 8 to 15 have the scales of rows 0 to 7": Wrong(
        "block_linear.cu", "fmaf(dot.z, scales.y, sum.z)", "fmaf(dot.z, scales.x, sum.z)", linear_reference
    ),
    "rows 8 to 15 have the zero points of rows 0 to 7": Wrong(
        "block_linear.cu", "D::offset((float)(zero_points >> 8), 1)", "D::offset((float)(zero_points & 255), 1)",
        linear_reference,
    ),
    "weights in float16 of rows 8 to 15 are those of rows 0 to 7": Wrong(
        "weights.cuh", "pair == 1 ? x.y", "pair == 1 ? x.x", halves
    ),
    "the high half of a code is lost": Wrong("weights.cuh", "0x41804180, 0xc500c500", "0x3f803f80, 0xc300c300", codes),
    "larger batches add warps in another order": Wrong(
        "block_linear.cu", "memory.sums[warp][other][lane]",
        "memory.sums[warp][GROUPS > 1 ? WARPS - other : other][lane]", linear_batches,
    ),
    "a window is one key too long": Wrong(
        "attention.cu", "position + 1 - p.window", "position - p.window", attention_reference(window=70)
    ),
    "a token sees the next one": Wrong(
        "attention.cu", "end[i] = rows.position[i] + 1", "end[i] = rows.position[i] + 2", attention_reference()
    ),
    "keys are normalized like queries": Wrong(
        "attention.cu", "is_query ? p.query_norm : p.key_norm", "p.query_norm", attention_reference(norms=True)
    ),
    "a norm of heads takes half of the channels": Wrong(
        "attention.cu", "i < p.D; i += WARP) squares", "i < p.D / 2; i += WARP) squares",
        attention_reference(norms=True),
    ),
    "a decode lacks the barrier after its queries and new entries": Wrong(
        "attention.cu", "rows_here = here;\n  __syncthreads();", "rows_here = here;",
        attention_reference(),
    ),
    "the block that ends last does not add the parts": Wrong(
        "attention.cu", "memory.parts = (uint32_t)parts,", "memory.parts = (uint32_t)parts + 1,", attention_reference()
    ),
    "blocks that have ended stay counted": Wrong("attention.cu", "*ended = 0;", "*ended += 0;", attention_reference()),
    "a new key is written where its prompt began": Wrong(
        "attention.cu", "first_new + entry / 2", "rows.start", attention_cuts
    ),
    "values have the scales of another head": Wrong(
        "attention.cu", "p.value_scales + kv * D + channel", "p.value_scales + channel", attention_reference()
    ),
    "codes of FP8 of rows 8 to 15 are those of rows 0 to 7": Wrong(
        "block_linear.cu", "(low >> 4 & 0x0f0f0f0f) | (high & 0xf0f0f0f0)",
        "(low & 0x0f0f0f0f) | (high & 0x0f0f0f0f) << 4", fp8,
    ),
    "a linear in FP8 has the scale of another token": Wrong(
        "block_linear.cu", "token + 1 < p.M ? p.x_scales[token + 1]", "token + 1 < p.M ? p.x_scales[token]", fp8
    ),
    "a linear in FP8 has the scales of rows 0 to 7 in all": Wrong(
        "block_linear.cu", "sum.z * scales.y * first", "sum.z * scales.x * first", fp8
    ),
    "activations in FP8 are in the order of their channels": Wrong(
        "rows.cu", "e4m3_of(x.z * inverse) << 8 | e4m3_of(x.y * inverse) << 16",
        "e4m3_of(x.y * inverse) << 8 | e4m3_of(x.z * inverse) << 16", fp8_rows,
    ),
    "the scale of a token in FP8 is that of one warp": Wrong(
        "rows.cu", "larger(largest, warps[i])", "warps[0]", fp8_rows
    ),
    "a token in FP8 loses its NaN": Wrong(
        "rows.cu", "fabsf(x) > largest || x != x ? fabsf(x) : largest", "fmaxf(largest, fabsf(x))", fp8_not_finite
    ),
    "E5M2 is taken for E4M3": Wrong(
        "attention.cu", "(pair & 0x80008000) | (pair >> 1 & 0x3f803f80)", "pair & 0xff00ff00",
        attention_reference(cache="fp8"),
    ),
    "a decode lacks the scale of FP8": Wrong(
        "attention.cu", "(p.fp8 ? (float)Fp8::UNIT : 1) / sum", "1 / sum", attention_reference(cache="fp8")
    ),
    "a prompt lacks the scale of FP8": Wrong(
        "attention.cu", "Cache::UNIT / total.sum", "1 / total.sum", attention_reference(cache="fp8")
    ),
    "keys in FP8 are rounded down": Wrong(
        "portable.h", "(bits + 0x7ffff + (bits >> 20 & 1))", "bits", attention_reference(cache="fp8")
    ),
    "keys in FP8 below the normal ones are zero": Wrong(
        "portable.h", "__float2int_rn(magnitude * 512)", "0 * __float2int_rn(magnitude)",
        attention_reference(cache="fp8"),
    ),
    "values behind the last key are read": Wrong(
        "attention.cu", "first_key + 2 * pair + 1 <= last", "true", attention_reference(cache="float16")
    ),
    "sums of a prompt are not moved to a new largest score": Wrong(
        "attention.cu", "to.x * scale[0]), to.y", "to.x), to.y", attention_reference()
    ),
    "a prompt adds blocks across parts": Wrong(
        "attention.cu", "if ((block + 1) % PART_BLOCKS &&", "if (", attention_cuts
    ),
    "keys are rounded down": Wrong(
        "attention.cu", "__float2int_rn(x)", "(int)x", attention_reference()
    ),
    "the last of equal logits is chosen": Wrong("choose.cu", "other == max && at < index", "other == max && at > index",
        first_largest),
    "of equal logits those with higher ids are kept": Wrong("choose.cu", "at <= token", "at >= token", draws),
    "equal logits are ranked by falling ids": Wrong(
        "choose.cu", "memory.tokens[i] < own", "memory.tokens[i] > own", draws
    ),
    "the sum of exponentials lacks the largest": Wrong(
        "choose.cu", "fmaxf((score - max)", "fmaxf((score - 0 * max)", draws
    ),
    "sums of a bin lose their carry": Wrong(
        "choose.cu", "if (before + amount < before)", "if (before > before + 0u)", draws
    ),
    "top-p is taken of all tokens and not of what top-k leaves": Wrong(
        "choose.cu", "return before.has(key_of(score), at) ? (uint64_t)weight_of(score, max, scale) : 0;",
        "return (uint64_t)weight_of(score, max, scale) + 0 * (before.key + at);", draws,
    ),
    "a point at the edge is that of the token before": Wrong(
        "choose.cu", "row.total()) + 1, weight)", "row.total()), weight)",
        draws_by_probability,
    ),
    "sums lack the barrier before they are added": Wrong(
        "choose.cu", "      if (lane == 0) memory.sums[i] = own;\n    }\n    __syncthreads();",
        "      if (lane == 0) memory.sums[i] = own;\n    }", draws,
    ),
}  # fmt: skip


@pytest.mark.usefixtures("sanitizers")
@pytest.mark.parametrize("defect", WRONG.values(), ids=WRONG)
def test_a_planted_defect_is_found(defect: Wrong, tmp_path: Path) -> None:
    source = planted(tmp_path, defect.file, defect.before, defect.after)
    library = cuda_build.library(source, tmp_path / "kernels.so", sanitized=False)
    device = Device(library)
    with pytest.raises(AssertionError):
        defect.found_by(device)
    device.free()
