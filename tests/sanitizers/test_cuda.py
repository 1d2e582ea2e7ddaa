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
FEW_AND_MANY = "linear and any_batch[4]"
SMALL = "(rows and [0) or (sorted and 0-7) or equals_its_reference and (linear or window) or order_of_threads"


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


# Memory far beyond an array may belong to nobody. The processor stops such an access before the redzone is read.
OUTSIDE = "heap-buffer-overflow|SEGV on unknown address"
OVERFLOWS = {
    "too little shared memory": Overflow(
        "launch.cpp", "2 * LINEAR_SLICES * WARP_BYTES", "LINEAR_SLICES * WARP_BYTES", FEW_AND_MANY,
        "heap-buffer-overflow",
    ),
    "a stage that shared memory has no room for": Overflow(
        "launch.cpp", "WIDE_STAGES(bits) * stage", "WIDE_STAGES(bits) * stage - 512", FEW_AND_MANY,
        "heap-buffer-overflow",
    ),
    "too little shared memory of a decode": Overflow(
        "launch.cpp", "8 * 8 + 32", "8 * 8", "attention and order", "heap-buffer-overflow"
    ),
    "a warp beyond the last": Overflow(
        "linear_few.cu", "memory.sums[warp][slice][lane]", "memory.sums[warp][slice + 1][lane]", FEW_AND_MANY,
        "out of bounds",
    ),
    "activations of padding are read": Overflow(
        "linear_wide.cu", "smaller(first_token + row, p.M - 1)", "first_token + row", "linear and order",
        OUTSIDE,
    ),
    "outputs of padding are written": Overflow(
        "linear.cuh", "if (token < p.M) p.y", "p.y", "linear and order", OUTSIDE
    ),
    "sums of a split linear lie behind those of its blocks": Overflow(
        "linear_wide.cu", "place * LINEAR_SLICES * WIDE_WARPS", "(place + 1) * LINEAR_SLICES * WIDE_WARPS",
        "linear and order", "heap-buffer-overflow",
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
    linear.test_a_linear_equals_its_reference(device, False, 4, 32, 16, 96, False)
    linear.test_a_linear_equals_its_reference(device, False, 6, 128, 64, 640, True)


def finite(device: Device) -> None:
    rows.test_tokens_that_are_not_finite_are_found(device, 96)


def linear_plain(device: Device) -> None:
    """Many chunks, whose scales are in half and whose zero points are the middle."""
    linear.test_a_linear_equals_its_reference(device, True, 4, 64, 32, 2368, True)


def linear_many_chunks(device: Device) -> None:
    linear.test_a_linear_equals_its_reference(device, False, 4, 64, 32, 2368, True)


def linear_last_blocks_first(device: Device) -> None:
    device.order = 1
    linear_batches(device)


def linear_blocks(device: Device) -> None:
    linear.test_blocks_of_outputs_and_of_tokens_have_the_bits_of_few_tokens(device, 70)


def linear_batches(device: Device) -> None:
    linear.test_a_token_has_the_same_bits_alone_and_in_any_batch(device, 4)


def codes(device: Device) -> None:
    linear.test_every_code_less_every_zero_point_is_exact(device, 8)


def halves(device: Device) -> None:
    linear.test_a_linear_over_halves_equals_its_reference(device, 37, 192)


def fp8(device: Device) -> None:
    linear.test_a_linear_in_fp8_equals_its_reference(device, 37, 192, True)


def fp8_rows(device: Device) -> None:
    rows.test_norms_and_gates_in_fp8_equal_their_references(device, 2112)


def fp8_batches(device: Device) -> None:
    linear.test_a_token_in_fp8_has_the_same_bits_alone_and_in_any_batch(device)


def fp8_not_finite(device: Device) -> None:
    linear.test_nan_and_infinity_reach_all_outputs_of_their_token_in_fp8(device)


def norm(device: Device) -> None:
    rows.test_a_norm_equals_its_reference(device, 2112)


def gate(device: Device) -> None:
    rows.test_a_gate_equals_its_reference(device)


def wide_norm(device: Device) -> None:
    """More channels than registers hold."""
    rows.test_a_norm_equals_its_reference(device, 4160)


def first_largest(device: Device) -> None:
    choose.test_argmax_is_the_first_of_the_largest_and_none_of_what_is_not_finite(device, 100)


def draws(device: Device) -> None:
    choose.check_draws(device, 203, rounds=4)


def draws_by_probability(device: Device) -> None:
    choose.test_draws_follow_the_probabilities(device)


def attention_reference(cache: str = "int8", window: int = 0, *, norms: bool = False, wide: bool = False) -> Check:
    heads = attention.Heads(cache=cache, window=window, norms=norms)
    if wide:  # results of a part of the channels at once
        heads = attention.Heads(cache=cache, H=2, KV=1, D=256)
    return lambda device: attention.test_attention_equals_its_reference(device, heads)


def attention_cuts(device: Device) -> None:
    attention.check_cuts(device, attention.Heads(), 700)


def attention_window_cuts(device: Device) -> None:
    """Of sequences whose first part is not the first that is seen."""
    attention.check_cuts(device, attention.Heads(H=2, KV=1, window=300), 1100)


def attention_many_rows(device: Device) -> None:
    attention.test_attention_equals_its_reference(device, attention.Heads(H=24, KV=1, rotary=False, cache="float16"))


def attention_many_parts(device: Device) -> None:
    attention.test_more_parts_than_are_added_at_once_have_the_bits_of_a_prompt(device, 132, 0)


def attention_last_blocks_first(device: Device) -> None:
    attention.test_more_parts_than_are_added_at_once_have_the_bits_of_a_prompt(device, 132, 1)


def attention_parts_in_turn(device: Device) -> None:
    """By one thread block."""
    attention.test_more_parts_than_are_added_at_once_have_the_bits_of_a_prompt(device, 1, 0)


@dataclass(frozen=True)
class Wrong:
    """A defect that one of the tests of results must find, in one of the orders of fibers; or the fibers themselves."""

    file: str
    before: str
    after: str
    found_by: Check
    raised: type[Exception] = AssertionError  # RuntimeError: what a GPU would not do, or not each time alike


WRONG = {
    "a linear lacks the barrier before its warps are added": Wrong(
        "linear_few.cu", "  __syncthreads();\n  if (warp >= GROUPS)", "  if (warp >= GROUPS)", linear_reference
    ),
    "many tokens lack the barrier after activations are staged": Wrong(
        "linear_wide.cu",
        "    __syncthreads();\n    if (chunk + STAGES - 1 < end)",
        "    if (chunk + STAGES - 1 < end)",
        linear_reference,
    ),
    "parts of many tokens are one sum": Wrong(
        "linear_wide.cu", "if (chunk + 1 < next) continue;", "if (chunk + 1 < end) continue;", linear_batches
    ),
    "a norm lacks its barrier": Wrong("rows.cu", "  __syncthreads();\n  float all", "  float all", norm),
    "a prompt lacks the barrier after a block is staged": Wrong(
        "attention.cu", "memory);\n    __syncthreads();", "memory);", attention_reference()
    ),
    "rows 8 to 15 have the scales of rows 0 to 7": Wrong(
        "linear.cuh", "fmaf(dot.z, scales.y, sum.z)", "fmaf(dot.z, scales.x, sum.z)", linear_reference
    ),
    "rows 8 to 15 have the zero points of rows 0 to 7": Wrong(
        "linear.cuh", "(float)(rows.zero_points >> 8), 1", "(float)(rows.zero_points & 255), 1", linear_reference
    ),
    "weights in float16 of rows 8 to 15 are those of rows 0 to 7": Wrong(
        "weights.cuh", "pair == 1 ? x.y", "pair == 1 ? x.x", halves
    ),
    "the high half of a code is lost": Wrong(
        "weights.cuh", "field<4 * pair, to, 0x000f000f>(high_word<step>(), others)", "others", codes
    ),
    "larger batches add warps in another order": Wrong(
        "linear_few.cu",
        "memory.sums[warp][slice][lane]",
        "memory.sums[warp][GROUPS > 1 ? LINEAR_SLICES - 1 - slice : slice][lane]",
        linear_batches,
    ),
    "a window is one key too long": Wrong(
        "attention.cu", "position + 1 - p.window", "position - p.window", attention_reference(window=70)
    ),
    "a token sees the next one": Wrong(
        "attention.cu", "end[i] = position[i] + 1 - first_key", "end[i] = position[i] + 2 - first_key",
        attention_reference(),
    ),
    "keys are normalized like queries": Wrong(
        "attention.cu", "is_query ? p.query_norm : p.key_norm", "p.query_norm", attention_reference(norms=True)
    ),
    "a norm of heads takes half of the channels": Wrong(
        "attention.cu", "i < p.D; i += WARP) squares", "i < p.D / 2; i += WARP) squares",
        attention_reference(norms=True),
    ),
    "a decode lacks the barrier after its queries and new entries": Wrong(
        "attention.cu",
        "memory.positions[threadIdx.x] = last;\n      __syncthreads();",
        "memory.positions[threadIdx.x] = last;",
        attention_reference(), RuntimeError,
    ),
    "the block that ends last does not add the parts": Wrong(
        "attention.cu", "memory.before + 1 < (uint32_t)of_rows", "memory.before < (uint32_t)of_rows",
        attention_reference(),
    ),
    "blocks that have ended stay counted": Wrong("attention.cu", "*ended = 0;", "*ended += 0;", attention_reference()),
    "a new key is written where its prompt began": Wrong(
        "attention.cu",
        "rotate_head<Cache>(p, {sequence, position}",
        "rotate_head<Cache>(p, {sequence, i < span.rows ? position : rows.start}",
        attention_cuts,
    ),
    "values of a prompt have the scales of another head": Wrong(
        "attention.cu", "p.value_scales + kv * D + channel", "p.value_scales + channel", attention_reference()
    ),
    "values of a decode have the scales of another head": Wrong(
        "attention.cu", "p.value_scales + kv * p.D + channel", "p.value_scales + 0 * kv + channel",
        attention_reference(),
    ),
    "codes of FP8 of rows 8 to 15 are those of rows 0 to 7": Wrong(
        "linear.cuh", "(low >> 4 & 0x0f0f0f0f) | (high & 0xf0f0f0f0)",
        "(low & 0x0f0f0f0f) | (high & 0x0f0f0f0f) << 4", fp8,
    ),
    "a linear in FP8 has the scale of another token": Wrong(
        "linear.cuh", "token + 1 < p.M ? p.x_scales[token + 1]", "token + 1 < p.M ? p.x_scales[token]", fp8
    ),
    "a linear in FP8 has the scales of rows 0 to 7 in all": Wrong(
        "linear.cuh", "sum.z * scales.y * first", "sum.z * scales.x * first", fp8
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
    "a token is finite whose residual is not": Wrong(
        "rows.cu", "y = b ? b[i] : make_float4(0, 0, 0, 0);\n    sum",
        "y = b && 0 * i ? b[i] : make_float4(0, 0, 0, 0);\n    sum", finite,
    ),
    "a channel of each four is not looked at": Wrong("rows.cu", " + (x.w + y.w) * 0", "", finite),
    "E5M2 is taken for E4M3": Wrong(
        "attention.cu", "(pair & 0x80008000) | (pair >> 1 & 0x3f803f80)", "pair & 0xff00ff00",
        attention_reference(cache="fp8"),
    ),
    "a decode of several parts lacks the scale of FP8": Wrong(
        "attention.cu", "y, Cache::UNIT / sum", "y, 1 / sum", attention_reference(cache="fp8")
    ),
    "a decode of one part lacks the scale of FP8": Wrong(
        "attention.cu", "total, Cache::UNIT / sum", "total, 1 / sum", attention_reference(cache="fp8")
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
    "a split linear adds its slices in another order": Wrong(
        "linear_wide.cu", "parts + i / AT_ONCE * OTHER", "parts + (LINEAR_SLICES - 1 - i / AT_ONCE) * OTHER",
        linear_batches,
    ),
    "a split linear lacks its last slice": Wrong(
        "linear_wide.cu", "i < LINEAR_SLICES * AT_ONCE", "i < (LINEAR_SLICES - 1) * AT_ONCE", linear_batches
    ),
    "results that are added later have the sums of the first": Wrong(
        "linear_wide.cu", "(done + i % AT_ONCE) * WARP", "i % AT_ONCE * WARP", linear_batches
    ),
    "a split linear is added before its last slice has ended": Wrong(
        "linear_wide.cu", "*before + 1 < LINEAR_SLICES", "*before + 2 < LINEAR_SLICES", linear_batches
    ),
    "the block of the last slice adds those that have not ended": Wrong(
        "linear_wide.cu", "*before + 1 < LINEAR_SLICES", "blockIdx.z + 1 < LINEAR_SLICES", linear_last_blocks_first
    ),
    "blocks of a split linear that have ended stay counted": Wrong(
        "linear_wide.cu", "p.ended[place] = 0;", "p.ended[place] += 0;", linear_batches
    ),
    "other tokens have the same place in a split linear": Wrong(
        "linear_wide.cu", "(int64_t)blockIdx.y * gridDim.x + blockIdx.x;", "blockIdx.x;", linear_batches
    ),
    "other outputs have the same place in a split linear": Wrong(
        "linear_wide.cu", "(int64_t)blockIdx.y * gridDim.x + blockIdx.x;", "blockIdx.y;", linear_blocks
    ),
    "all blocks of a linear have the first outputs": Wrong(
        "linear_wide.cu", "((int)blockIdx.x * WIDE_WARPS + warp) * TILES", "warp * TILES", linear_blocks
    ),
    "a linear goes on with the sum of the slice before": Wrong(
        "linear_wide.cu",
        "sums[i / GROUPS][i % GROUPS]);\n        sums[i / GROUPS][i % GROUPS] = make_float4(0, 0, 0, 0);",
        "sums[i / GROUPS][i % GROUPS]);",
        linear_reference,
    ),
    "a linear does not wait for its copies": Wrong(
        "linear_wide.cu", "    wait_for_copies<STAGES - 2>();\n", "", linear_reference
    ),
    "a linear waits for all copies but the chunk's own": Wrong(
        "linear_wide.cu", "wait_for_copies<STAGES - 2>", "wait_for_copies<STAGES - 1>", linear_reference
    ),
    "a linear counts no copies where it begins none": Wrong(
        "linear_wide.cu",
        "    }\n    end_of_copies();\n    const Stage& stage",
        "      end_of_copies();\n    }\n    const Stage& stage",
        linear_reference,
    ),
    "a stage is refilled before all warps have read it": Wrong(
        "linear_wide.cu",
        "    wait_for_copies<STAGES - 2>();\n    __syncthreads();\n    if (chunk + STAGES - 1 < end) {\n"
        "      copy_weights(chunk + STAGES - 1, stages[to]);\n"
        "      copy_activations(chunk + STAGES - 1, stages[to]);\n    }\n    end_of_copies();\n",
        "    if (chunk + STAGES - 1 < end) {\n      copy_weights(chunk + STAGES - 1, stages[to]);\n"
        "      copy_activations(chunk + STAGES - 1, stages[to]);\n    }\n    end_of_copies();\n"
        "    wait_for_copies<STAGES - 1>();\n    __syncthreads();\n",
        linear_many_chunks,
    ),
    "a stage is refilled while it is read": Wrong(
        "linear_wide.cu", "int from = 0, to = STAGES - 1,", "int from = 0, to = 0,", linear_many_chunks
    ),
    "activations are swizzled where they are stored alone": Wrong(
        "linear_wide.cu", "&stage.x[g][swizzled<PIECES>(g, bytes / 16)]", "&stage.x[g][bytes / 16]", linear_reference
    ),
    "activations in FP8 are swizzled where they are read alone": Wrong(
        "linear_wide.cu", "swizzled<PIECES>(row, piece)", "PIECES == 8 ? swizzled<PIECES>(row, piece) : piece",
        fp8_batches,
    ),
    "few tokens have the zero point of the first span in both": Wrong(
        "linear.cuh", "w.zero_points ? zero_points[span]", "w.zero_points ? zero_points[0]", linear_reference
    ),
    "many tokens have the zero point of the first span in both": Wrong(
        "linear_wide.cu", "(stage.zero_points[warp][i])[span * 8 + g]", "(stage.zero_points[warp][i])[g]",
        linear_reference,
    ),
    "few tokens have the plain scales of the chunk before": Wrong(
        "linear_few.cu", "(chunk + next) >> shift", "(chunk + next - (chunk + next > 0)) >> shift", linear_plain
    ),
    "many tokens have the plain scales of the chunk before": Wrong(
        "linear_wide.cu",
        "rows_at(w, tile, channel + lane / 8 * SPAN",
        "rows_at(w, tile, channel - (PLAIN && chunk ? CHUNK : 0) + lane / 8 * SPAN",
        linear_plain,
    ),
    "a span behind the last channels is added": Wrong(
        "linear.cuh", "if (chunk * CHUNK + SPAN < w.K) add_span", "add_span", linear_reference
    ),
    "few tokens have the activations of the next chunk": Wrong(
        "linear_few.cu", "activations[i % AHEAD][group]", "activations[(i + 1) % AHEAD][group]", linear_reference,
    ),
    "few tokens have codes that are loaded too early": Wrong(
        "linear_few.cu", "      add_chunk<T", "      load(i, i + DEPTH);\n      add_chunk<T", linear_plain
    ),
    "a decode does not wait for its values": Wrong(
        "attention.cu", "          wait_for_copies<ON_THE_WAY - 1>();\n", "", attention_reference()
    ),
    "a decode waits for all values but the step's own": Wrong(
        "attention.cu", "wait_for_copies<ON_THE_WAY - 1>", "wait_for_copies<ON_THE_WAY>", attention_reference()
    ),
    "a decode counts no copies of values where it begins none": Wrong(
        "attention.cu", "          } else {\n            end_of_copies();\n          }", "          }",
        attention_reference(),
    ),
    "a decode lacks the barrier after its wait for values": Wrong(
        "attention.cu",
        "wait_for_copies<ON_THE_WAY - 1>();\n          __syncwarp();",
        "wait_for_copies<ON_THE_WAY - 1>();",
        attention_reference(),
    ),
    "a decode lacks the barrier before its warps are added": Wrong(
        "attention.cu",
        "      __syncthreads();\n#pragma unroll 1\n      for (int slot",
        "#pragma unroll 1\n      for (int slot",
        attention_reference(),
    ),
    "a decode lacks the barrier after its warps are added": Wrong(
        "attention.cu", "      __syncthreads();\n    }\n    part += blocks;", "    }\n    part += blocks;",
        attention_parts_in_turn,
    ),
    "values are swizzled where they are stored alone": Wrong(
        "attention.cu", "staged<Memory>(2 * t + i % 2, byte / 16, t)", "staged<Memory>(2 * t + i % 2, byte / 16, 0)",
        attention_reference(),
    ),
    "values of a decode behind the last key are read": Wrong(
        "attention.cu", "16 * step + row < count", "16 * step + row < count + BLOCK",
        attention_reference(cache="float16"),
    ),
    "values of a wide head are those of its first channels": Wrong(
        "attention.cu", "byte % Memory::LANE_BYTES + begin * Cache::BYTES", "byte % Memory::LANE_BYTES + 0 * begin",
        attention_reference(wide=True),
    ),
    "a thread block skips a part": Wrong(
        "attention.cu", "part += blocks;", "part += 2 * blocks;", attention_parts_in_turn
    ),
    "a thread block has the keys of its last part again": Wrong(
        "attention.cu", "number = cache_block(part + blocks)", "number = cache_block(part)", attention_parts_in_turn
    ),
    "a thread block begins with a part of another": Wrong(
        "attention.cu", "part += parts_of(span.first_part - part, blocks) * blocks;", "part = span.first_part;",
        attention_window_cuts,
    ),
    "new entries are written by the block of this number alone": Wrong(
        "attention.cu", "position / ATTENTION_PART % blocks !=", "position / ATTENTION_PART !=", attention_cuts
    ),
    "no more parts are added than at once": Wrong(
        "attention.cu", "part < end; part += AT_ONCE", "part < end && part < first + AT_ONCE; part += AT_ONCE",
        attention_many_parts,
    ),
    "sums of parts are not moved to a new largest score": Wrong(
        "attention.cu", "add_moved(y, {scale, scale}", "add_moved(y, {1, 1}", attention_many_parts
    ),
    "the block of the last part adds those that have not ended": Wrong(
        "attention.cu", "memory.before + 1 < (uint32_t)of_rows", "blockIdx.x + 1 < (uint32_t)of_rows",
        attention_last_blocks_first,
    ),
    "thread blocks of other heads are counted together": Wrong(
        "attention.cu", "p.ended + memory.heads[0]", "p.ended + sequence", attention_last_blocks_first
    ),
    "more than eight rows have the sums of eight": Wrong(
        "attention.cu", "if (memory.span.rows <= 8) continue;", "if (memory.span.rows <= 16) continue;",
        attention_many_rows,
    ),
    "a wide norm lacks the channels that registers do not hold": Wrong(
        "rows.cu", "i < fourths; i += NORM_THREADS) add_squares", "i < 0; i += NORM_THREADS) add_squares", wide_norm
    ),
    "channels of a norm that registers hold have the first weights": Wrong(
        "rows.cu", "weights[j] = weight[i];", "weights[j] = weight[threadIdx.x];",
        norm,
    ),
    "keys and values are loaded before new ones are written": Wrong(
        "attention.cu",
        "    const int first_key = (part * PART_BLOCKS + warp) * BLOCK, turn_of_keys = first_key + BLOCK > "
        "rows.start;",
        "    const int first_key = (part * PART_BLOCKS + warp) * BLOCK, turn_of_keys = 0;",
        attention_reference(), RuntimeError,
    ),
}  # fmt: skip


@pytest.mark.usefixtures("sanitizers")
@pytest.mark.parametrize("defect", WRONG.values(), ids=WRONG)
def test_a_planted_defect_is_found(defect: Wrong, tmp_path: Path) -> None:
    source = planted(tmp_path, defect.file, defect.before, defect.after)
    library = cuda_build.library(source, tmp_path / "kernels.so", sanitized=False)
    device = Device(library)
    with pytest.raises(defect.raised):
        defect.found_by(device)
    device.free()
