"""Tokens chosen on a GPU: the likeliest, drawn ones and ranked ones, their sources run as fibers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

from engines.kernels.cuda.parameters import ARGMAX_PARTS, DRAW, RANKING, Choose
from tests.cuda import ORDERS, Array, Device, at, host

ONE, LOG2_E = 1 << 30, 1 / math.log(2)
GREEDY = (0, 1.0, 0.0, 0, 0, -1)  # as DRAW


@pytest.fixture(params=ORDERS)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    made = Device(host(), request.param)
    yield made
    made.free()


class Chosen(NamedTuple):
    tokens: list[int]
    rankings: Any


def choose(device: Device, logits: Array, draws: list[tuple[float, ...]] | None = None) -> Chosen:
    rows, columns = logits.shape
    scratch = device.empty((rows, ARGMAX_PARTS), np.float32), device.empty((rows, ARGMAX_PARTS), np.int32)
    y, rankings = device.empty((rows,), np.int64), device.empty((rows,), RANKING)
    wanted = None if draws is None else device.put(np.array(draws, DRAW))
    held = (device.put(logits), *scratch, wanted, rankings if draws else None, y)
    device.launch("choose", Choose(*map(at, held), rows, columns))
    return Chosen(y.tolist(), rankings.copy())


def random(rows: int, columns: int, seed: int = 3) -> Array:
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32) * np.float32(3)


@pytest.mark.parametrize("columns", [7, 100, 33001])
def test_argmax_is_the_first_of_the_largest_and_none_of_what_is_not_finite(device: Device, columns: int) -> None:
    logits = random(6, columns)
    logits[0, [3, columns - 1]] = 99
    logits[1] = -5
    logits[2, 5] = np.nan
    logits[3, 1] = np.inf
    logits[4, columns - 1] = -np.inf
    expected = [3, 0, -1, -1, -1, int(logits[5].argmax())]
    assert choose(device, logits).tokens == choose(device, logits, [GREEDY] * 6).tokens == expected
    drawn = choose(device, logits, [(7, 0.9, 1.0, 5, 0, 3)] * 6)
    assert drawn.tokens[2:5] == [-1] * 3 and drawn.rankings["total"][2:5].tolist() == [0] * 3


def weights(scores: Array, scale: float) -> list[int]:
    """As integers: probabilities over that of the likeliest."""
    with np.errstate(over="ignore"):
        exponents = np.maximum((scores - scores.max()) * np.float32(scale), np.float32(-40))
    whole = np.rint(exponents)
    power = np.zeros_like(exponents)
    for coefficient in (0.0013264727, 0.009671513, 0.055507336, 0.24022242, 0.693147, 1.0):
        power = power * (exponents - whole) + np.float32(coefficient)
    return np.rint(np.ldexp(power, whole.astype(np.int32) + 30)).astype(np.int64).tolist()


def expected(logits: Array, draw: tuple[float, ...]) -> int:
    """Token by token: what the filters leave of a sorted list, and the one that holds the point."""
    random, top_p, scale, top_k, least, _ = draw
    if not scale:
        return int(logits.argmax())
    each = weights(logits, scale)
    likeliest = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if 0 < top_k < len(logits):
        likeliest = likeliest[: int(top_k)]
    if top_p < 1:
        needed, before, kept = top_p * sum(each[token] for token in likeliest), 0, list[int]()
        for token in likeliest:
            if kept and before >= needed:
                break
            kept.append(token)
            before += each[token]
        likeliest = kept
    tokens = sorted(token for token in likeliest if each[token] >= least)
    point = int(random) * sum(each[token] for token in tokens) >> 64
    for token in tokens:
        point -= each[token]
        if point < 0:
            return token
    raise AssertionError("no token holds the point")


def settings(rng: np.random.Generator, columns: int) -> tuple[float, ...]:
    """Each filter alone, and together; narrow, wide and none."""
    temperature = rng.choice([0.3, 1.0, 2.0, 50.0])
    top_k = int(rng.choice([0, 0, 1, 2, 20, columns - 1, columns, columns + 5]))
    top_p = float(rng.choice([1.0, 1.0, 1e-9, 0.1, 0.5, 0.9, 0.999999]))
    least = math.ceil(rng.choice([0, 0, 0.01, 0.5, 1.0]) * ONE)
    random = int(rng.integers(1 << 63)) * 2 if rng.random() < 0.8 else int(rng.choice([0, 1])) * ((1 << 64) - 1)
    top = int(rng.choice([-1, -1, 0, 1, 5, 128]))
    return random, top_p, float(np.float32(LOG2_E / temperature)), top_k, least, top


def rows_to_choose_from(rng: np.random.Generator, columns: int) -> Array:
    """Plain ones, equal ones, many ties, the two zeros, and ones so far apart that most have no weight."""
    plain = rng.standard_normal((6, columns)).astype(np.float32) * np.float32(3)
    plain[1] = -2.5
    plain[2] = np.rint(plain[2])
    plain[3] = np.where(rng.random(columns) < 0.5, np.float32(0), np.float32(-0.0))
    plain[4] *= np.float32(1e37)
    plain[5, : columns // 2] = plain[5].max()
    return plain


def check_draws(device: Device, columns: int, rounds: int, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(rounds):
        logits = rows_to_choose_from(rng, columns)
        draws = [settings(rng, columns) for _ in logits]
        found = choose(device, logits, draws)
        assert found.tokens == [expected(row, draw) for row, draw in zip(logits, draws, strict=True)]
        alone = choose(device, logits[3:4], draws[3:4])
        assert alone.tokens == found.tokens[3:4]
        check_rankings(logits, draws, found)


def check_rankings(logits: Array, draws: list[tuple[float, ...]], found: Chosen) -> None:
    for row, draw, token, ranking in zip(logits, draws, found.tokens, found.rankings, strict=True):
        top = int(draw[-1])
        if top < 0:
            assert ranking["total"] == 0
            continue
        likeliest = np.argsort(-row, kind="stable")[:top]
        assert ranking["tokens"][: len(likeliest)].tolist() == likeliest.tolist()
        assert ranking["logits"][: len(likeliest)].tolist() == row[likeliest].tolist()
        assert ranking["logit"] == row[token] and ranking["max"] == row.max()
        assert ranking["total"] == sum(weights(row, float(np.float32(LOG2_E))))
        exact = np.logaddexp.reduce(row.astype(np.float64))
        found_sum = float(ranking["max"]) + math.log(int(ranking["total"]) / ONE)
        rounded = len(row) * 0.5 / int(ranking["total"])  # each weight by half a unit at most
        assert abs(found_sum - exact) <= rounded + 2e-7 * max(1.0, abs(exact))


@pytest.mark.parametrize("columns", [7, 203, 1500])
def test_draws_and_rankings_are_those_of_a_sorted_list(device: Device, columns: int) -> None:
    check_draws(device, columns, rounds=3)


def test_a_large_vocabulary_is_cut_into_parts_of_parts() -> None:
    device = Device(host())
    logits, draws = random(2, 300_001), [(1 << 62, 0.9, 1.0, 0, 0, 5), (3 << 62, 1.0, 1.4, 1000, 0, -1)]
    found = choose(device, logits, draws)
    assert found.tokens == [expected(row, draw) for row, draw in zip(logits, draws, strict=True)]
    check_rankings(logits, draws, found)
    device.free()


@pytest.mark.parametrize("seed", range(4))
def test_random_draws_in_one_order_of_threads(seed: int) -> None:
    device = Device(host())
    check_draws(device, int(np.random.default_rng(seed).integers(2, 700)), rounds=3, seed=seed)
    device.free()


def test_draws_follow_the_probabilities(device: Device) -> None:
    """Of many rows of the same logits, with other random numbers."""
    row = np.log(np.array([0.5, 0.25, 0.125, 0.0625, 0.0625], np.float32))
    count = 64
    draws = [((number << 64) // count, 1.0, LOG2_E, 0, 0, -1) for number in range(count)]
    tokens = choose(device, np.tile(row, (count, 1)), draws).tokens
    assert np.bincount(tokens, minlength=5).tolist() == [32, 16, 8, 4, 4]
