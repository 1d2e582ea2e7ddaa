"""The kernels of all levels give the same bits; those of another machine run under qemu-user.

The host of tests/sanitizers runs random nodes of every operator and scheme, and random draws, and compares them with
plain C; here what two levels computed is compared, too. Half of the cases run on threads of the kernels' own.

qemu runs instructions one by one: it shows neither speed nor how a processor reorders memory accesses.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from engines.kernels.cpu import LEVELS, Level, compiler, find_level
from tests.levels import program
from tests.sanitizers import build

SEED = int(os.environ.get("TAPEOUT_FUZZ_SEED", "1"))
CASES = int(os.environ.get("TAPEOUT_LEVEL_CASES", "500"))
PLANTED_CASES = 300
REFERENCE = find_level("x86-64-avx2")  # runs everywhere: qemu knows its instructions
DOTPROD, I8MM = find_level("aarch64-dotprod"), find_level("aarch64-i8mm")
TILED, WIDE = (find_level(name) for name in program.WIDE)
TYPES: dict[int, type[np.generic]] = {
    1: np.float32,
    2: np.uint8,
    3: np.int8,
    6: np.int32,
    7: np.int64,
    16: np.uint16,  # bfloat16
}  # of source/ort.h


@dataclass(frozen=True)
class Result:
    """One tensor of one case, or what a draw gave."""

    case: int
    operator: str
    array: NDArray[Any]


def run(level: Level, folder: Path, cases: int = CASES) -> list[Result]:
    """The results of random cases. The host itself compares them with its reference."""
    runner, file = program.runner(level), folder / f"{level.name}.results"
    command = [*runner, program.linked(level, folder), str(SEED), str(cases), "all", file]
    done = subprocess.run(command, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    return read(file)


def read(file: Path) -> list[Result]:
    found: list[Result] = []
    with file.open("rb") as stream:
        while line := stream.readline():
            case, operator, dtype, size = line.split()
            content = np.frombuffer(stream.read(int(size)), TYPES[int(dtype)])
            found.append(Result(int(case), operator.decode(), content))
    return found


def difference(found: list[Result], wanted: list[Result]) -> str:
    """The first difference, in words; empty where there is none. All NaN are equal."""
    for a, b in zip(found, wanted, strict=True):
        where = f"case {a.case}, {a.operator}"
        if (a.case, a.operator, a.array.dtype, a.array.size) != (b.case, b.operator, b.array.dtype, b.array.size):
            return f"{where}: another tensor than that of case {b.case}, {b.operator}"
        if not np.array_equal(a.array, b.array, equal_nan=a.array.dtype == np.float32):
            at = int(np.flatnonzero(~((a.array == b.array) | ((a.array != a.array) & (b.array != b.array))))[0])
            return f"{where}, {a.array.dtype}: element {at} of {a.array.size} is {a.array[at]!r}, not {b.array[at]!r}"
    return ""


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[Result]:
    return run(REFERENCE, tmp_path_factory.mktemp("reference"))


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> list[Result]:
    """Of as many cases as planted kernels run: at the half of them threads begin, so others have other cases."""
    return run(REFERENCE, tmp_path_factory.mktemp("few"), PLANTED_CASES)


@pytest.mark.parametrize("level", [one for one in LEVELS if one != REFERENCE], ids=lambda level: level.name)
def test_every_level_gives_the_same_bits(level: Level, reference: list[Result], tmp_path: Path) -> None:
    found = run(level, tmp_path)
    assert {one.operator for one in found} >= {
        *("draw", "BlockGather", "CachedAttention", "CausalConv", "HeadLinear", "GatedLinear"),
        *(
            "NormRows",
            "Norm",
            "ResidualNorm",
            "QuantizeActivations",
            "GatedDelta",
            "SelectiveScan",
            "GatedNorm",
            "Scale",
        ),
    }
    if level.name in program.WIDE:  # its attention sums in another order; the host compares it with plain C
        found, reference = (
            [one for one in results if one.operator != "CachedAttention"] for results in (found, reference)
        )
    assert difference(found, reference) == ""


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> list[Result]:
    """Of AVX-512 without AMX, where the processor has both."""
    program.runner(TILED)
    return run(WIDE, tmp_path_factory.mktemp("wide"))


@pytest.fixture(scope="module")
def few_wide(tmp_path_factory: pytest.TempPathFactory) -> list[Result]:
    """See `few`."""
    program.runner(TILED)
    return run(WIDE, tmp_path_factory.mktemp("few_wide"), PLANTED_CASES)


def test_attention_in_tiles_gives_the_bits_of_avx512(wide: list[Result], tmp_path: Path) -> None:
    assert difference(run(TILED, tmp_path), wide) == ""


@pytest.mark.parametrize(("level", "processor"), [(I8MM, "neoverse-n1"), (DOTPROD, "cortex-a72")], ids=str)
def test_a_processor_below_a_level_cannot_run_it(level: Level, processor: str, tmp_path: Path) -> None:
    """So the level is compiled for more than the one below it, and the check of features is needed."""
    emulator = program.emulator(level, processor)
    done = subprocess.run([*emulator, program.linked(level, tmp_path), str(SEED), "40"], capture_output=True)
    assert done.returncode == -signal.SIGILL


# Changes that only some levels see: level, file, text, other text, the file that shows it, and what the host or the
# comparison then says.
DEFECTS = {
    "the upper half of a tile has the codes of the lower": (
        REFERENCE,
        "block_product.c",
        "codes_at(steps + 32 * half,",
        "codes_at(steps,",
        "block_product.c",
        "(BlockExperts|Linear): .*bits.*expected",
    ),
    "a wrong sign offset": (
        DOTPROD,
        "vector.h",
        "codes ^= splat_int((int32_t)0x80808080)",
        "codes ^= splat_int(0x00808080)",
        "block_product.c",
        "(bits 8|8 bits).*expected",
    ),
    "lanes are added in another order": (
        DOTPROD,
        "vector_neon.h",
        "(four[0] + four[2]) + (four[1] + four[3])",
        "(four[0] + four[1]) + (four[2] + four[3])",
        "norm_rows.c",
        "float32: element",
    ),
    "large floats become other integers": (
        DOTPROD,
        "vector_neon.h",
        "& ~inside)",
        "& ~inside & 1)",
        "cached_attention.c",
        "(int8|int32|float32): element",
    ),
}


@pytest.mark.parametrize("defect", DEFECTS.values(), ids=DEFECTS)
def test_a_planted_defect_is_found(
    defect: tuple[Level, str, str, str, str, str], few: list[Result], tmp_path: Path
) -> None:
    level, name, before, after, compiled, expected = defect
    program.runner(level)
    found = findings(level, build.plant(tmp_path, name, (before, after)), compiled, few, tmp_path)
    assert re.search(expected, found), found


@pytest.mark.parametrize("level", [REFERENCE, DOTPROD], ids=lambda level: level.name)
def test_nothing_is_found_where_nothing_is_planted(level: Level, few: list[Result], tmp_path: Path) -> None:
    """Kernels without optimizations, into which defects are planted, give the bits of those of bundles."""
    program.runner(level)
    assert findings(level, compiler.SOURCE, "block_product.c", few, tmp_path) == ""


# Of cached_attention.c: text, other text, and what the host or the comparison with AVX-512 then says.
TILED_DEFECTS = {
    "keys beyond the channels of a head are not zeros": (
        "(-w->D & (TILE_ROW_BYTES - 1)) * KEYS",
        "0",
        "expected",
    ),
    "the last of a group of queries has no row": (
        "rows = (queries + groups - 1) / groups",
        "rows = (queries + groups - 1) / groups - 1",
        "expected",
    ),
    "a bit of a low digit is in the high one": (
        "_mm512_srli_epi16(pairs[0], 8)",
        "_mm512_srli_epi16(pairs[0], 7)",
        "expected",
    ),
    "what is added to the codes of keys is not taken away": (
        "to_float(wrapping_add(wrapping_add(shift_left(high, 8), low), offset))",
        "to_float(wrapping_add(wrapping_add(shift_left(high, 8), low), offset >> 31))",
        "expected",
    ),
    "the lowest bit of a sum is lost": (
        "to_float(wrapping_add(wrapping_add(shift_left(high, 8), low), offset))",
        "to_float(wrapping_add(wrapping_add(shift_left(high, 8), low), offset) & -2)",
        "CachedAttention, float32: element",
    ),
}


@pytest.mark.parametrize("defect", TILED_DEFECTS.values(), ids=TILED_DEFECTS)
def test_a_planted_defect_of_attention_in_tiles_is_found(
    defect: tuple[str, str, str], few_wide: list[Result], tmp_path: Path
) -> None:
    before, after, expected = defect
    source = build.plant(tmp_path, "cached_attention.c", (before, after))
    found = findings(TILED, source, "cached_attention.c", few_wide, tmp_path)
    assert re.search(expected, found), found


def test_nothing_is_found_in_tiles_where_nothing_is_planted(few_wide: list[Result], tmp_path: Path) -> None:
    assert findings(TILED, compiler.SOURCE, "cached_attention.c", few_wide, tmp_path) == ""


def findings(level: Level, source: Path, changed: str, wanted: list[Result], folder: Path) -> str:
    """What the host says of the first cases, or else how they differ from those that are wanted."""
    file, kernels = folder / "results", build.library(level, source, changed, folder / "kernels.so")
    command = [
        *program.runner(level),
        program.linked(level, folder, kernels),
        str(SEED),
        str(PLANTED_CASES),
        "all",
        file,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stderr if done.returncode else difference(read(file), wanted)
