"""Linears by tiles of AMX: the bits of AVX-512 VNNI, also where Linux does not let a process use tiles."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from engines.kernels.cpu import compiler, find_level
from tapeout.quantized import QuantizedWeight
from tapeout.schemes import Scheme
from tests import native
from tests.random_linears import MXFP4, random_linear
from tests.sanitizers import build
from tests.unit import test_native_block_experts as block_experts

TILES, VECTORS = find_level("x86-64-amx"), find_level("x86-64-avx512vnni")
REFUSAL = TILES.refusal()
needs_tiles = pytest.mark.skipif(bool(REFUSAL), reason=REFUSAL)
# Tokens: too few for tiles, the fewest, groups of 11 to 16, of two sizes, and many.
TOKENS = (23, 24, 33, 37, 48, 65, 130)
SCHEMES = [
    Scheme(bits=bits, group_size=block, symmetric=symmetric)
    for bits in (4, 5, 6, 8)
    for block in (16, 32, 64, 128, 256)
    for symmetric in (True, False)
    if (bits, block) != (5, 16)  # such codes are stored in 6 bits
] + [MXFP4]


def computed(library: Path, linear: QuantizedWeight, kind: str = "BlockLinear", threads: int = 1) -> list[native.Array]:
    """The outputs of all ``TOKENS``."""
    columns = linear.codes.shape[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "library", lambda: library)
        run = native.linear_session(kind, linear, threads=threads)
        rng, found = np.random.default_rng(3), list[native.Array]()
        for count in TOKENS:
            x = (rng.standard_normal((count, columns)) * 10.0 ** rng.integers(-3, 4, (count, 1))).astype(np.float32)
            x[1, 5] = np.nan
            found += run(x, np.array(True))[1:] if kind == "HeadLinear" else run(x)
        return found


def same(found: list[native.Array], wanted: list[native.Array]) -> bool:
    return all(np.array_equal(a, b, equal_nan=a.dtype == np.float32) for a, b in zip(found, wanted, strict=True))


@needs_tiles
@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_tiles_give_the_bits_of_vectors(scheme: Scheme) -> None:
    columns = 9 * scheme.group_size
    for outputs, half in ((37, True), (300, False)):  # padding within a run of tiles, several runs
        linear = random_linear(outputs, columns, scheme, half=half)
        if scheme.bits == 8 and linear.zero_points is not None:
            np.maximum(linear.zero_points, 1, out=linear.zero_points)  # tiles do not take others
        assert same(*(computed(compiler.library(level), linear) for level in (TILES, VECTORS)))


@needs_tiles
def test_tiles_choose_the_tokens_of_vectors_and_threads_share_nothing() -> None:
    linear = random_linear(700, 576, Scheme(bits=8, group_size=64, symmetric=True))
    assert same(*(computed(compiler.library(level), linear, "HeadLinear") for level in (TILES, VECTORS)))
    one, three = (computed(compiler.library(TILES), linear, threads=threads) for threads in (1, 3))
    assert same(one, three)


@needs_tiles
def test_experts_by_tiles_give_the_bits_of_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some experts have tokens enough for tiles, others have not."""
    rng = np.random.default_rng(4)
    scheme = Scheme(bits=5, group_size=64, symmetric=False)
    up, down = block_experts.weights(scheme, True, hidden=192, inner=320)
    x = rng.standard_normal((120, 192)).astype(np.float32)
    index = rng.choice(block_experts.EXPERTS, (120, 2), p=(0.4, 0.3, 0.2, 0.05, 0.03, 0.02)).astype(np.int64)
    share = rng.random((120, 2), np.float32)
    found: list[native.Array] = []
    for level in (TILES, VECTORS):
        monkeypatch.setattr(block_experts, "library", lambda level=level: compiler.library(level))
        session = block_experts.opened(block_experts.experts_model(block_experts.GATES[0], up, down))
        found.append(block_experts.run(session, x, index, share))
    assert same(found[:1], found[1:])


@needs_tiles
def test_zero_points_that_do_not_fit_a_signed_byte() -> None:
    for linear in (far(), far_of_bytes()):
        assert same(*(computed(compiler.library(level), linear) for level in (TILES, VECTORS)))


def far() -> QuantizedWeight:
    return with_zero_points(4, {90: 200})


def far_of_bytes() -> QuantizedWeight:
    """128 less a zero point of 0 is no signed byte."""
    return with_zero_points(8, {90: 0})


def bytes_with_zero_points() -> QuantizedWeight:
    return with_zero_points(8, {})


def with_zero_points(bits: int, others: dict[int, int]) -> QuantizedWeight:
    """``others``: of some outputs; the rest take tiles."""
    linear = random_linear(128, 640, Scheme(bits=bits, group_size=64, symmetric=False))
    assert linear.zero_points is not None
    np.maximum(linear.zero_points, 1, out=linear.zero_points)
    for output, zero_point in others.items():
        linear.zero_points[output] = zero_point
    return linear


def small_blocks() -> QuantizedWeight:
    return random_linear(100, 640, Scheme(bits=6, group_size=32, symmetric=True))


def plain() -> QuantizedWeight:
    """Two chunks of blocks; a chunk has several."""
    return random_linear(100, 1024, Scheme(bits=4, group_size=64, symmetric=True))


# Changes of the kernel, each with a linear whose results then differ.
DEFECTS = {
    "a group has the scales of the first rows": (
        plain,
        (("at->x += count * row_bytes(k->K), at->x_scales += count;", "at->x += count * row_bytes(k->K);"),),
    ),
    "registers have the rows of the smallest groups": (
        plain,
        (
            ("0, ACTIVATIONS, count,", "0, ACTIVATIONS, (int)(rows / groups),"),
            ("ACTIVATIONS, WEIGHTS, count,", "ACTIVATIONS, WEIGHTS, (int)(rows / groups),"),
        ),
    ),
    "a block has the scales of its neighbour": (
        plain,
        (("store(scales, scale_at(w, tile, b))", "store(scales, scale_at(w, tile, b ^ 1))"),),
    ),
    "blocks are added in another order": (
        plain,
        (
            ("y[m] = p->block ? load(so_far + m * TILE) : splat(0);", "(void)p, (void)so_far, y[m] = splat(0);"),
            (
                "finish_tile(p, &last, y, count);",
                "{ for (int m = 0; m < count; m++) y[m] += load(so_far + 16 * m); finish_tile(p, &last, y, count); }",
            ),
        ),
    ),
    "products of a block of 32 channels have 64": (
        small_blocks,
        (("smaller(k->block & -k->block, TILE_ROW_BYTES)", "TILE_ROW_BYTES"),),
    ),
    "zero points need not fit a signed byte": (far, (("reduce_max(most) < 128", "reduce_max(most) < 255"),)),
    "zero points of 8 bits may be 0": (far_of_bytes, (("reduce_min(least) > 0", "reduce_min(least) >= 0"),)),
    "zero points of 8 bits are 128": (bytes_with_zero_points, (("if (!p->rests) continue;", "continue;"),)),
}


@needs_tiles
@pytest.mark.parametrize("defect", DEFECTS.values(), ids=DEFECTS)
def test_a_planted_defect_is_found(
    defect: tuple[Callable[[], QuantizedWeight], tuple[tuple[str, str], ...]], tmp_path: Path
) -> None:
    linear, changes = defect
    assert not agree(linear(), build.plant(tmp_path, "block_product.c", *changes), tmp_path)


@needs_tiles
def test_nothing_is_found_where_nothing_is_planted(tmp_path: Path) -> None:
    for linear in {linear for linear, _ in DEFECTS.values()}:
        assert agree(linear(), compiler.SOURCE, tmp_path)


def agree(linear: QuantizedWeight, source: Path, folder: Path) -> bool:
    """Whether tiles, of a library without optimizations, give the bits of vectors."""
    tiles = build.library(TILES, source, "block_product.c", folder / "kernels.so")
    return same(computed(tiles, linear), computed(compiler.library(VECTORS), linear))


# A process whose main thread has an alternate signal stack of 4 KB, which cannot save tiles.
REFUSED = """
import ctypes, sys
class Stack(ctypes.Structure):
    _fields_ = [("memory", ctypes.c_void_p), ("flags", ctypes.c_int), ("bytes", ctypes.c_size_t)]
memory = ctypes.create_string_buffer(4096)
assert ctypes.CDLL(None).sigaltstack(ctypes.byref(Stack(ctypes.addressof(memory), 0, 4096)), None) == 0
from engines.kernels import cpu
from tapeout.fingerprint import amx_refusal
from tests.unit import test_native_amx as here
from pathlib import Path
tiles, vectors = map(Path, sys.argv[1:])
assert here.same(*(here.computed(library, here.plain()) for library in (tiles, vectors)))
assert cpu.find_level("x86-64-amx").refusal() == amx_refusal()  # not that the processor lacks it
print(cpu.level().name, amx_refusal())
"""


@needs_tiles
def test_where_linux_refuses_tiles_the_library_computes_the_same_bits_and_another_level_is_taken() -> None:
    done = fresh("-c", REFUSED, str(compiler.library(TILES)), str(compiler.library(VECTORS)))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{VECTORS.name} Linux does not let this process use AMX, which the processor has: ")
    assert "native kernels of another level are used" in done.stderr


@needs_tiles
def test_the_signal_stack_of_faulthandler_can_save_tiles() -> None:
    show = "from engines.kernels import cpu; print(cpu.level().name)"
    assert fresh("-X", "faulthandler", "-c", show).stdout.strip() == TILES.name


@needs_tiles
def test_a_forked_process_computes_by_tiles() -> None:
    """Tiles that Linux does not permit would end it with SIGILL."""
    wanted = computed(compiler.library(VECTORS), plain())
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe()
    child = context.Process(target=lambda: send.send(computed(compiler.library(TILES), plain())))
    child.start()
    assert receive.poll(60) and same(receive.recv(), wanted)
    child.join()
    assert child.exitcode == 0


def fresh(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Python in a process of its own, in the checkout."""
    root = Path(__file__).parents[2]
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=root)
