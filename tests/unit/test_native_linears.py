"""Native linears and gathers alone: their reference, their limits, and that tokens share nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.kernels.cpu import Level
from quantization.reference import round_activations
from tapeout.schemes import Scheme
from tests.native import Matrix, Run, check, expected, gather_session, linear_session
from tests.random_linears import MXFP4, random_linear

pytestmark = pytest.mark.usefixtures("level")

BITS = (4, 5, 6, 8)
TOKENS = (*range(1, 14), 64)  # groups of every size, and several
MADE = 3e-6  # relative error of activations that an operator computes itself
EPSILON = 0.03


def random_matrix(count: int, columns: int, seed: int = 1) -> Matrix:
    """Of very different sizes from token to token."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((count, columns)) * 10.0 ** rng.integers(-3, 4, (count, 1))).astype(np.float32)


def bias(outputs: int) -> Matrix:
    return np.random.default_rng(2).standard_normal(outputs).astype(np.float32)


@pytest.mark.parametrize("half", [True, False], ids=["float16 scales", "float32 scales"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("bits", "block"), [(bits, block) for bits in BITS for block in (16, 32, 64, 128) if (bits, block) != (5, 16)]
)
def test_a_linear_equals_its_reference(bits: int, block: int, symmetric: bool, half: bool) -> None:
    for outputs in (1, 37, 96):
        linear = random_linear(outputs, 3 * block, Scheme(bits=bits, group_size=block, symmetric=symmetric), half=half)
        assert np.array_equal(linear.scales, linear.scales.astype(np.float16)) == half
        for added in (None, bias(outputs)):
            run = linear_session("BlockLinear", linear, bias=added)
            x = random_matrix(max(TOKENS), 3 * block)
            y, bound = expected(x, linear, added)  # of each token alone
            for count in TOKENS:
                check(run(x[-count:])[0], (y[-count:], bound[-count:]))


@pytest.mark.parametrize("kind", ["BlockLinear", "GatedLinear", "NormLinear", "HeadLinear"])
def test_floats_of_4_bits_give_the_bits_of_the_integers_that_hold_them(kind: str) -> None:
    columns = 192
    linear = random_linear(75, columns, MXFP4)
    wide = linear.widened(5)
    assert wide is not None
    norm = random_matrix(1, columns, 5)[0] if kind == "NormLinear" else None
    one, other = (linear_session(kind, stored, weight=norm) for stored in (linear, wide))
    for count in TOKENS:
        given = [random_matrix(count, 2 * columns if kind == "GatedLinear" else columns)]
        given += [np.array(False)] if kind == "HeadLinear" else []
        np.testing.assert_array_equal(one(*given)[0], other(*given)[0])
        if kind == "BlockLinear":
            check(one(*given)[0], expected(given[0], linear))


def test_embeddings_in_floats_of_4_bits() -> None:
    table = random_linear(100, 96, MXFP4)
    table.codes[:16] = np.arange(16, dtype=np.uint8)[:, None]
    ids = np.arange(-100, 100)[None]
    np.testing.assert_array_equal(gather_session(table)(ids)[0][0], table.dequantize()[ids[0]])


def test_the_reference_is_that_of_the_quantized_model() -> None:
    import torch

    linear = random_linear(37, 192, Scheme(bits=6, group_size=64, symmetric=False))
    x = random_matrix(13, 192)
    rounded = round_activations(torch.from_numpy(x), 64).numpy().astype(np.float64)
    np.testing.assert_allclose(rounded @ linear.dequantize().astype(np.float64).T, expected(x, linear)[0], rtol=1e-4)


@pytest.mark.parametrize("bits", BITS)
def test_ties_fall_on_even_codes(bits: int) -> None:
    """127 · x / 127 is exact for these: halves stay halves."""
    linear = random_linear(32, 32, Scheme(bits=bits, group_size=32, symmetric=False))
    x = np.arange(-8, 8, 0.5, dtype=np.float32)[None]
    x[0, -1] = 127
    check(linear_session("BlockLinear", linear)(x)[0], expected(np.rint(x), linear))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", BITS)
def test_the_largest_codes_and_inputs_do_not_overflow(bits: int, symmetric: bool) -> None:
    linear = random_linear(16, 1024, Scheme(bits=bits, group_size=256, symmetric=symmetric))
    linear.codes[:] = (1 << bits) - 1
    for size in (1.0, -1.0, 3e38 / 1e6):
        x = np.full((2, 1024), size, np.float32)
        check(linear_session("BlockLinear", linear)(x)[0], expected(x, linear))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", BITS)
def test_sums_of_the_smallest_and_largest_codes_are_exact(bits: int, symmetric: bool) -> None:
    """Inputs of 127 and -127 are codes themselves, scales are one: results are whole, and float32 holds them."""
    rng = np.random.default_rng(bits)
    linear = random_linear(96, 256, Scheme(bits=bits, group_size=256, symmetric=symmetric))
    linear.scales[:] = 1
    linear.codes[:] = rng.choice([0, (1 << bits) - 1], linear.codes.shape)
    linear.codes[:2] = [[0], [(1 << bits) - 1]]  # all neighbours alike
    x = rng.choice([-127, 127], (13, 256)).astype(np.float32)
    x[:2] = [[-127], [127]]
    for codes in (linear.codes, rng.integers(0, 1 << bits, linear.codes.shape, np.uint8)):
        exact = replace(linear, codes=codes)
        np.testing.assert_array_equal(linear_session("BlockLinear", exact)(x)[0], expected(x, exact)[0])


@pytest.mark.parametrize("bits", BITS)
def test_sums_of_the_longest_block_do_not_overflow_and_longer_ones_are_refused(bits: int) -> None:
    for symmetric in (True, False):
        linear = random_linear(3, 32768, one_group(bits, 32768, symmetric))
        linear.codes[:] = (1 << bits) - 1
        x = np.full((2, 32768), 1.0, np.float32)
        x[1] = -1
        check(linear_session("BlockLinear", linear)(x)[0], expected(x, linear))
    linear = random_linear(3, 32768 + 32, one_group(bits, 32768 + 32, True))
    with pytest.raises(Exception, match="sums over more than 32768 channels overflow"):
        linear_session("BlockLinear", linear)


def one_group(bits: int, columns: int, symmetric: bool) -> Scheme:
    """Groups as wide as no recipe can ask for, but a graph may."""
    return Scheme.model_construct(
        bits=bits,
        group_size=columns,
        symmetric=symmetric,
        positive_scales=False,
        activations="float",
        format=f"int{bits}",
    )


@pytest.mark.parametrize("kind", ["BlockLinear", "GatedLinear", "ResidualNormLinear", "HeadLinear"])
def test_a_long_prompt_is_computed_in_chunks_of_the_same_bits(kind: str) -> None:
    """More quantized activations than a thread's scratch memory has room for."""
    columns, count = 4096, 1500
    linear = random_linear(20, columns, Scheme(bits=4, group_size=32, symmetric=False))
    width = 2 * columns if kind == "GatedLinear" else columns
    arrays: list[np.ndarray] = [random_matrix(count, width, n) for n in range(1 + (kind == "ResidualNormLinear"))]
    weight = random_matrix(1, columns, 5)[0] if kind == "ResidualNormLinear" else None
    run = linear_session(kind, linear, weight=weight, threads=2)
    rest = [GREEDY] if kind == "HeadLinear" else []
    together = run(*arrays, *rest)
    for token in (0, 700, 1000, count - 1):
        alone = run(*(array[token : token + 1] for array in arrays), *rest)
        for output, single in zip(together, alone, strict=True):
            np.testing.assert_array_equal(output[token : token + 1], single)


@pytest.mark.parametrize("threads", [4, 16])
@pytest.mark.parametrize(("outputs", "columns"), [(14336, 896), (896, 14336), (2048, 4096)], ids=str)
def test_linears_of_models_of_8_billion_weights(outputs: int, columns: int, threads: int) -> None:
    """Many outputs, long sums, and more threads than there are cores; every 61st output is compared."""
    linear = random_linear(outputs, columns, Scheme(bits=6, group_size=64, symmetric=True))
    run, alone = (linear_session("BlockLinear", linear, threads=count) for count in (threads, 1))
    part = replace(linear, codes=linear.codes[::61], scales=linear.scales[::61])
    for count in (1, 8, 70):
        x = random_matrix(count, columns)
        y = run(x)[0]
        check(y[:, ::61], expected(x, part))
        np.testing.assert_array_equal(y, alone(x)[0])


@pytest.mark.parametrize("rank", [1, 2, 3, 4])
def test_leading_axes_are_kept(rank: int) -> None:
    linear = random_linear(24, 64, Scheme(bits=6, group_size=32, symmetric=True))
    x = random_matrix(24, 64).reshape(2, 3, 4, 64)[(0,) * (4 - rank)]
    y = linear_session("BlockLinear", linear, rank=rank)(x)[0]
    assert y.shape == (*x.shape[:-1], 24)
    check(y.reshape(-1, 24), expected(x.reshape(-1, 64), linear))


def test_no_tokens_give_no_outputs() -> None:
    linear = random_linear(24, 64, Scheme(bits=4, group_size=32, symmetric=True))
    assert linear_session("BlockLinear", linear)(np.zeros((0, 64), np.float32))[0].shape == (0, 24)


def all_kinds(threads: int = 1) -> list[tuple[Run, int, int]]:
    """One session of every operator with its number of inputs and their width; tiles beyond a whole number of parts."""
    found: list[tuple[Run, int, int]] = []
    for bits, symmetric in ((4, True), (6, False), (8, True), (4, False)):
        linear = random_linear(295, 192, Scheme(bits=bits, group_size=64, symmetric=symmetric), seed=bits)
        norm = random_matrix(1, 192, 5)[0]
        found += [
            (linear_session("BlockLinear", linear, bias=bias(295), threads=threads), 1, 192),
            (linear_session("GatedLinear", linear, threads=threads), 1, 384),
            (linear_session("NormLinear", linear, weight=norm, threads=threads), 1, 192),
            (linear_session("ResidualNormLinear", linear, weight=norm, threads=threads), 2, 192),
        ]
    return found


@pytest.fixture(scope="module")
def kinds(level: Level) -> list[tuple[Run, int, int]]:
    return all_kinds()


@given(seed=st.integers(0, 999), kind=st.integers(0, 15), order=st.permutations(range(25)), count=st.integers(1, 25))
@settings(max_examples=60, deadline=None)
def test_a_token_alone_is_that_token_in_any_batch_bit_for_bit(
    kinds: list[tuple[Run, int, int]], seed: int, kind: int, order: list[int], count: int
) -> None:
    run, inputs, columns = kinds[kind]
    arrays = [random_matrix(25, columns, seed + n) for n in range(inputs)]
    picked = order[:count]
    together = run(*(array[picked] for array in arrays))
    for at, token in enumerate(picked[:3]):
        alone = run(*(array[token : token + 1] for array in arrays))
        for output, single in zip(together, alone, strict=True):
            np.testing.assert_array_equal(output[at].view(np.uint32), single[0].view(np.uint32))


def test_more_threads_give_the_same_bits(kinds: list[tuple[Run, int, int]]) -> None:
    for (run, inputs, columns), (other, _, _) in zip(kinds, all_kinds(threads=2), strict=True):
        for count in (1, 6, 64):  # 64 tokens are quantized by both threads, too
            arrays = [random_matrix(count, columns, n) for n in range(inputs)]
            for first, second in zip(run(*arrays), other(*arrays), strict=True):
                np.testing.assert_array_equal(first.view(np.uint32), second.view(np.uint32))


def test_one_session_runs_on_several_threads_at_once(kinds: list[tuple[Run, int, int]]) -> None:
    from concurrent.futures import ThreadPoolExecutor

    run, _, columns = kinds[0]
    batches = [random_matrix(count, columns, count) for count in (1, 40, 3, 64) * 5]
    alone = [run(batch)[0] for batch in batches]
    with ThreadPoolExecutor(4) as pool:
        for (y,), wanted in zip(pool.map(run, batches), alone, strict=True):
            np.testing.assert_array_equal(y, wanted)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", BITS)
def test_a_token_of_zeros_gives_the_bias(bits: int, symmetric: bool) -> None:
    linear = random_linear(40, 64, Scheme(bits=bits, group_size=32, symmetric=symmetric))
    x = random_matrix(7, 64)
    x[3] = 0
    x[4, :32] = 0  # one block of two
    y = linear_session("BlockLinear", linear, bias=bias(40))(x)[0]
    np.testing.assert_array_equal(y[3], bias(40))
    check(y, expected(x, linear, bias(40)))


def test_activations_too_small_to_divide_by_count_as_zeros() -> None:
    linear = random_linear(40, 64, Scheme(bits=8, group_size=32, symmetric=True))
    x = np.full((1, 64), 1e-40, np.float32)
    x[0, 5] = -2e-39
    assert not linear_session("BlockLinear", linear)(x)[0].any()


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_a_token_that_is_not_finite_gives_no_finite_output_and_leaves_the_others_alone(
    kinds: list[tuple[Run, int, int]], poison: float
) -> None:
    for run, inputs, columns in kinds:
        arrays = [random_matrix(8, columns, n) for n in range(inputs)]
        clean = run(*arrays)[0]
        for column in (0, columns // 2 + 7, columns - 1):
            broken = [array.copy() for array in arrays]
            broken[-1][3, column] = poison
            y = run(*broken)[0]
            others = np.arange(8) != 3
            np.testing.assert_array_equal(y[others], clean[others])
            assert not np.isfinite(y[3]).any()


LOGITS, GREEDY = np.array(False), np.array(True)


@pytest.mark.parametrize("outputs", [1, 16, 53, 295, 1024])
@pytest.mark.parametrize("count", [1, 2, 6, 33])
def test_a_head_gives_logits_or_where_they_are_largest(outputs: int, count: int) -> None:
    linear = random_linear(outputs, 64, Scheme(bits=8, group_size=32, symmetric=True))
    x, head = random_matrix(count, 64), linear_session("HeadLinear", linear, bias=bias(outputs), threads=2)
    logits, none = head(x, LOGITS)
    np.testing.assert_array_equal(logits, linear_session("BlockLinear", linear, bias=bias(outputs))(x)[0])
    assert none.shape == (0,)
    nothing, chosen = head(x, GREEDY)
    assert nothing.shape == (0, outputs) and chosen.dtype == np.int64
    np.testing.assert_array_equal(chosen, logits.argmax(axis=1))


def test_of_equal_logits_a_head_chooses_the_first() -> None:
    linear = random_linear(300, 64, Scheme(bits=8, group_size=32, symmetric=True))
    same = replace(linear, codes=linear.codes[[7] * 300], scales=linear.scales[[7] * 300])
    assert linear_session("HeadLinear", same)(random_matrix(5, 64), GREEDY)[1].tolist() == [0] * 5
    rising = np.zeros(300, np.float32)
    rising[[201, 17, 250]] = 100
    assert linear_session("HeadLinear", same, bias=rising)(random_matrix(5, 64), GREEDY)[1].tolist() == [17] * 5


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_head_chooses_no_id_for_a_token_that_is_not_finite(poison: float) -> None:
    head = linear_session("HeadLinear", random_linear(300, 64, Scheme(bits=8, group_size=32, symmetric=True)))
    x = random_matrix(4, 64)
    clean = head(x, GREEDY)[1]
    x[2, 5] = poison
    assert head(x, GREEDY)[1].tolist() == [clean[0], clean[1], -1, clean[3]]


def silu(x: Matrix) -> np.ndarray:
    with np.errstate(over="ignore"):
        return x.astype(np.float64) / (1 + np.exp(-x.astype(np.float64)))


def normed(x: np.ndarray, weight: Matrix) -> np.ndarray:
    x = x.astype(np.float64)
    return x / np.sqrt((x * x).mean(axis=1, keepdims=True) + EPSILON) * weight


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", BITS)
def test_a_gate_before_a_linear(bits: int, symmetric: bool) -> None:
    linear = random_linear(37, 128, Scheme(bits=bits, group_size=32, symmetric=symmetric))
    run = linear_session("GatedLinear", linear, bias=bias(37))
    for count in TOKENS:
        x = np.random.default_rng(count).standard_normal((count, 256)).astype(np.float32)
        x[:, :128:5] *= 30  # gates that are as good as open or shut
        x[0, :3] = -200, 200, 0
        made = silu(x[:, :128]) * x[:, 128:]
        check(run(x)[0], expected(made, linear, bias(37), slack=MADE))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", BITS)
def test_a_norm_before_a_linear(bits: int, symmetric: bool) -> None:
    linear = random_linear(37, 128, Scheme(bits=bits, group_size=32, symmetric=symmetric))
    weight = random_matrix(1, 128, 3)[0]
    norm, residual = (
        linear_session(kind, linear, weight=weight, bias=bias(37), epsilon=EPSILON)
        for kind in ("NormLinear", "ResidualNormLinear")
    )
    for count in TOKENS:
        a, b = random_matrix(count, 128, 4), random_matrix(count, 128, 5)
        a[0] = 0  # what is left is the epsilon
        (y,) = norm(a)
        check(y, expected(normed(a, weight), linear, bias(37), slack=MADE))
        y, total = residual(a, b)
        np.testing.assert_array_equal(total, a + b)
        check(y, expected(normed(a + b, weight), linear, bias(37), slack=MADE))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", BITS)
def test_embeddings_are_read_by_ids_from_either_end(bits: int, symmetric: bool) -> None:
    for half in (True, False):
        table = random_linear(53, 96, Scheme(bits=bits, group_size=32, symmetric=symmetric), half=half)
        ids = np.array([[0, 52, 17, -1], [-53, 16, 15, 0]], np.int64)
        np.testing.assert_array_equal(gather_session(table)(ids)[0], table.dequantize()[ids])
        assert gather_session(table)(ids[:, :0])[0].shape == (2, 0, 96)


@pytest.mark.parametrize("bad", [53, -54, 2**40, -(2**63)])
def test_an_id_outside_the_embedding_is_an_error(bad: int) -> None:
    run = gather_session(random_linear(53, 96, Scheme(bits=4, group_size=32, symmetric=True)))
    with pytest.raises(Exception, match="BlockGather: an id is outside the embedding"):
        run(np.array([[0, bad, 1]], np.int64))


@pytest.mark.parametrize(("kind", "columns"), [("BlockLinear", 80), ("BlockLinear", 32), ("GatedLinear", 64)])
def test_inputs_of_another_width_are_an_error(kind: str, columns: int) -> None:
    run = linear_session(kind, random_linear(24, 64, Scheme(bits=4, group_size=32, symmetric=True)))
    with pytest.raises(Exception, match="the input does not have K columns"):
        run(np.zeros((2, columns), np.float32))


@pytest.mark.parametrize(
    "wrong",
    [{"bits": 7}, {"bits": 5, "block_size": 16}, {"block_size": 8}, {"block_size": 24}, {"K": 72}, {"N": 0}],
    ids=str,
)
def test_an_unsupported_format_is_an_error_when_the_session_starts(wrong: dict[str, int]) -> None:
    with pytest.raises(Exception, match="unsupported N, K, block_size or bits"):
        linear_session("BlockLinear", random_linear(24, 64, Scheme(bits=4, group_size=32, symmetric=True)), **wrong)
