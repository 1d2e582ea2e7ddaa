"""Published numbers, brute force, simulation at the boundary, and properties that must hold for any data."""

from __future__ import annotations

import doctest
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import evals.statistics
from evals.statistics import (
    bounded_mean,
    median_bounds,
    normal_quantile,
    null_variance,
    paired_difference,
    perplexity_ratio,
    proportion,
    ratio_of_sums,
    required_documents,
    required_repeats,
    required_units,
    tango_score,
)

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parents[1] / "golden" / "statistics.json").read_text())
CONFIDENCES = st.floats(0.6, 0.995)


@st.composite
def paired_tables(draw: st.DrawFn, smallest: int = 1) -> tuple[int, int, int]:
    n = draw(st.integers(smallest, 4000))
    lost = draw(st.integers(0, n))
    return lost, draw(st.integers(0, n - lost)), n


# Tango's paired score test


@pytest.mark.parametrize("case", GOLDEN["tango_two_sided"], ids=lambda case: case["source"][:20])
def test_paired_difference_matches_published_intervals(case: dict[str, Any]):
    interval = paired_difference(case["lost"], case["gained"], case["n"], confidence=(1 + case["level"]) / 2)
    assert interval.lower == pytest.approx(case["lower"], abs=5e-5)
    assert interval.upper == pytest.approx(case["upper"], abs=5e-5)


@pytest.mark.parametrize("n", [10, 250, 5000])
def test_without_any_change_the_limit_has_a_closed_form(n: int):
    quantile = normal_quantile(0.95)
    assert paired_difference(0, 0, n, 0.95).lower == pytest.approx(-(quantile**2) / (n + quantile**2))


@pytest.mark.parametrize(("lost", "gained", "n"), [(16, 6, 161), (0, 3, 50), (7, 0, 40), (120, 100, 2500), (0, 0, 30)])
@pytest.mark.parametrize("difference", [-0.3, -0.02, 0.0, 0.1])
def test_null_variance_is_that_of_the_constrained_maximum_likelihood(lost: int, gained: int, n: int, difference: float):
    low, high = max(0.0, -difference), (1 - difference) / 2
    p = np.linspace(low, high, 400_001)
    cells = ((lost, p), (gained, p + difference), (n - lost - gained, 1 - 2 * p - difference))
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = [count * np.log(np.maximum(cell, 0)) for count, cell in cells if count]
    best = float(p[np.argmax(np.sum(terms, axis=0))])
    assert null_variance(lost, gained, n, difference) == pytest.approx(2 * best + difference - difference**2, abs=1e-5)


def test_difference_of_zero_is_mcnemar():
    assert tango_score(16, 6, 161, 0.0) == pytest.approx(-10 / math.sqrt(22))


@given(paired_tables(), CONFIDENCES)
def test_swapping_the_arms_mirrors_the_interval(table: tuple[int, int, int], confidence: float):
    lost, gained, n = table
    there, back = paired_difference(lost, gained, n, confidence), paired_difference(gained, lost, n, confidence)
    assert (there.value, there.lower, there.upper) == (-back.value, -back.upper, -back.lower)


@given(paired_tables(), st.floats(-0.95, 0.95), st.floats(0.001, 0.04))
def test_a_wider_margin_is_never_harder_to_meet(table: tuple[int, int, int], difference: float, step: float):
    assert tango_score(*table, difference) >= tango_score(*table, difference + step) - 1e-9


@given(paired_tables(), st.floats(0.001, 0.5), CONFIDENCES)
def test_limit_and_test_agree(table: tuple[int, int, int], margin: float, confidence: float):
    score, lower = tango_score(*table, -margin), paired_difference(*table, confidence).lower
    if abs(lower + margin) > 1e-9:
        assert (score > normal_quantile(confidence)) == (lower > -margin)


@given(paired_tables(), CONFIDENCES, st.floats(0.0001, 0.004))
def test_paired_interval_contains_its_value_and_widens(table: tuple[int, int, int], confidence: float, step: float):
    narrow, wide = paired_difference(*table, confidence), paired_difference(*table, confidence + step)
    assert -1 <= wide.lower <= narrow.lower <= narrow.value <= narrow.upper <= wide.upper <= 1


@given(paired_tables(smallest=2), CONFIDENCES)
def test_one_more_lost_item_lowers_both_bounds(table: tuple[int, int, int], confidence: float):
    lost, gained, n = table
    if lost + gained == n:
        return
    before, after = paired_difference(lost, gained, n, confidence), paired_difference(lost + 1, gained, n, confidence)
    assert after.lower <= before.lower + 1e-12
    assert after.upper <= before.upper + 1e-12


@pytest.mark.parametrize(("n", "churn"), [(200, 0.06), (600, 0.04), (2500, 0.08)])
def test_type_one_error_at_the_boundary_is_nominal(n: int, churn: float):
    """Truth exactly at the margin: 5 % of experiments may pass, whatever the sample size."""
    margin, trials = 0.02, 20_000
    p_lost, p_gained = (churn + margin) / 2, (churn - margin) / 2
    tables = np.random.default_rng(7).multinomial(n, [p_lost, p_gained, 1 - churn], size=trials)
    counted, times = np.unique(tables[:, :2], axis=0, return_counts=True)
    passed = [tango_score(int(lost), int(gained), n, -margin) > normal_quantile(0.95) for lost, gained in counted]
    error = float(np.dot(passed, times)) / trials
    assert 0.035 < error < 0.058  # simulation error is 0.0015; the rest is discreteness


def test_impossible_tables_are_refused():
    for lost, gained, n in ((-1, 0, 5), (3, 3, 5), (0, 0, 0)):
        with pytest.raises(ValueError, match="paired table"):
            tango_score(lost, gained, n, 0.0)


# proportions


@pytest.mark.parametrize(
    "case", GOLDEN["clopper_pearson_two_sided"], ids=lambda case: f"{case['successes']}/{case['n']}"
)
def test_proportion_matches_published_intervals(case: dict[str, Any]):
    share = proportion(case["successes"], case["n"], confidence=(1 + case["level"]) / 2)
    assert (share.lower, share.upper) == pytest.approx((case["lower"], case["upper"]), abs=5e-5)


@given(st.integers(1, 300), st.data(), CONFIDENCES)
def test_proportion_bounds_are_exact(n: int, data: st.DataObject, confidence: float):
    """At the upper bound, seeing so few has probability 1 - confidence: the definition, summed term by term."""
    k = data.draw(st.integers(0, n - 1))
    share = proportion(k, n, confidence)
    tail = sum(math.comb(n, i) * share.upper**i * (1 - share.upper) ** (n - i) for i in range(k + 1))
    assert tail == pytest.approx(1 - confidence, rel=1e-6)
    mirrored = proportion(n - k, n, confidence)
    assert mirrored.lower == pytest.approx(1 - share.upper, abs=1e-12)


# clustered means


def test_equal_clusters_reduce_to_the_t_interval():
    values = np.array([0.1, 0.4, 0.2, 0.3])
    mean = ratio_of_sums(values * 50, np.full(4, 50), 0.95)
    reach = 2.353363 * values.std(ddof=1) / 2  # t quantile at 0.95 with 3 degrees of freedom
    assert (mean.value, mean.lower, mean.upper) == pytest.approx((0.25, 0.25 - reach, 0.25 + reach), abs=1e-6)


def test_tokens_weigh_equally_whatever_document_they_are_in():
    assert ratio_of_sums([1.0, 300.0], [10, 100], 0.95).value == pytest.approx(301 / 110)


def test_copying_tokens_inside_documents_adds_no_certainty():
    sums, tokens = np.array([3.0, 9.0, 4.0]), np.array([10.0, 20.0, 15.0])
    once, tenfold = ratio_of_sums(sums, tokens, 0.9), ratio_of_sums(10 * sums, 10 * tokens, 0.9)
    assert (once.lower, once.upper) == pytest.approx((tenfold.lower, tenfold.upper))


def test_one_cluster_bounds_nothing():
    alone = ratio_of_sums([1.0], [10], 0.95)
    assert (alone.value, alone.lower, alone.upper) == (0.1, -math.inf, math.inf)


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(1, 500)), min_size=2, max_size=40), CONFIDENCES, st.randoms())
def test_order_of_clusters_changes_no_bit(clusters: list[tuple[float, int]], confidence: float, random: Any):
    shuffled = random.sample(clusters, len(clusters))
    assert ratio_of_sums(*zip(*clusters, strict=True), confidence) == ratio_of_sums(
        *zip(*shuffled, strict=True), confidence
    )


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(1, 500)), min_size=2, max_size=40), CONFIDENCES)
def test_clustered_interval_widens_with_confidence(clusters: list[tuple[float, int]], confidence: float):
    sums, tokens = zip(*clusters, strict=True)
    narrow, wide = ratio_of_sums(sums, tokens, confidence), ratio_of_sums(sums, tokens, confidence + 0.004)
    assert wide.lower <= narrow.lower <= narrow.value <= narrow.upper <= wide.upper


@pytest.mark.parametrize(
    ("sums", "weights"), [([], []), ([1.0], [1.0, 2.0]), ([math.nan], [1.0]), ([1.0], [0.0]), ([1.0], [math.inf])]
)
def test_unsound_clusters_are_refused(sums: list[float], weights: list[float]):
    with pytest.raises(ValueError, match=r"sums"):
        ratio_of_sums(sums, weights, 0.95)


# means of documents

SHARES = st.lists(st.floats(0, 1), min_size=1, max_size=60)


@pytest.mark.parametrize("n", [20, 300])
def test_equal_documents_bound_what_is_too_rare_to_be_seen(n: int):
    """All documents at 0: the share that may be at 1 is about that of the exact binomial bound, 3 / n."""
    upper, exact = bounded_mean([0.0] * n, 0, 1, 0.95).upper, proportion(0, n, 0.95).upper
    assert exact < upper < 1.3 * exact


@given(SHARES, CONFIDENCES, st.randoms())
def test_order_of_documents_changes_no_bit(shares: list[float], confidence: float, random: Any):
    shuffled = random.sample(shares, len(shares))
    assert bounded_mean(shares, 0, 1, confidence) == bounded_mean(shuffled, 0, 1, confidence)


@given(SHARES, CONFIDENCES)
def test_bounds_of_a_mean_contain_it_and_widen(shares: list[float], confidence: float):
    narrow, wide = bounded_mean(shares, 0, 1, confidence), bounded_mean(shares, 0, 1, confidence + 0.004)
    near = 1e-9
    assert 0 <= wide.lower <= narrow.lower + near and narrow.upper <= wide.upper + near and wide.upper <= 1
    assert narrow.lower <= narrow.value <= narrow.upper


@given(SHARES, st.integers(0, 59), st.floats(0, 1), CONFIDENCES)
def test_a_worse_document_never_lowers_a_bound(shares: list[float], number: int, worse: float, confidence: float):
    more = list(shares)
    more[number % len(shares)] = max(more[number % len(shares)], worse)
    before, after = bounded_mean(shares, 0, 1, confidence), bounded_mean(more, 0, 1, confidence)
    assert after.upper >= before.upper - 1e-9 and after.lower >= before.lower - 1e-9


@given(SHARES, CONFIDENCES, st.floats(0.01, 50), st.floats(-5, 5))
def test_units_and_zero_change_nothing(shares: list[float], confidence: float, unit: float, zero: float):
    plain = bounded_mean(shares, 0, 1, confidence)
    other = bounded_mean([zero + unit * share for share in shares], zero, zero + unit, confidence)
    assert (other.lower, other.upper) == pytest.approx(
        (zero + unit * plain.lower, zero + unit * plain.upper), abs=1e-6 * (unit + abs(zero))
    )


def test_a_document_counts_for_no_more_than_its_limit_but_the_mean_is_shown_as_it_is():
    mean = bounded_mean([0.01] * 299 + [30.0], 0, 1, 0.95)
    assert mean.value == pytest.approx((2.99 + 30) / 300)
    assert mean.upper >= mean.value  # which no upper bound may lie below
    assert mean.lower == bounded_mean([0.01] * 299 + [1.0], 0, 1, 0.95).lower


@pytest.mark.parametrize("shape", ["two points", "uniform", "skewed", "rare"])
@pytest.mark.parametrize("n", [8, 40, 300])
def test_no_distribution_breaks_the_bounds(shape: str, n: int):
    """At most 5 % of upper bounds lie below the true mean, and of lower bounds above it; simulation error 0.7 %."""
    rng, trials = np.random.default_rng(5), 1000
    draws = {
        "two points": lambda: (rng.random((trials, n)) < 0.3).astype(float),
        "uniform": lambda: rng.random((trials, n)),
        "skewed": lambda: rng.beta(0.2, 3.0, (trials, n)),
        "rare": lambda: np.where(rng.random((trials, n)) < 0.01, 1.0, 0.01 * rng.random((trials, n))),
    }
    truth = {"two points": 0.3, "uniform": 0.5, "skewed": 0.2 / 3.2, "rare": 0.01 + 0.99 * 0.005}[shape]
    bounds = [bounded_mean(row, 0, 1, 0.95) for row in draws[shape]()]
    assert np.mean([bound.upper < truth for bound in bounds]) < 0.05 + 0.02
    assert np.mean([bound.lower > truth for bound in bounds]) < 0.05 + 0.02


@pytest.mark.parametrize(("mean", "bound"), [(0.01, 0.03), (0.05, 0.03), (0.0, 0.03)])
def test_as_many_documents_as_required_decide(mean: float, bound: float):
    needed = required_documents([mean] * 50, 0, 1, bound, 0.95)
    assert needed is not None

    def decided(n: int) -> bool:
        found = bounded_mean([mean] * n, 0, 1, 0.95)
        return found.upper <= bound or found.lower > bound

    assert decided(needed) and not decided(needed * 4 // 5)
    assert required_documents([bound] * 50, 0, 1, bound, 0.95) is None


@pytest.mark.parametrize(
    ("values", "low", "high"), [([], 0, 1), ([math.nan], 0, 1), ([0.5], 1, 1), ([[0.5]], 0, 1), ([math.inf], 0, 1)]
)
def test_unsound_documents_are_refused(values: list[float], low: float, high: float):
    with pytest.raises(ValueError, match="values"):
        bounded_mean(values, low, high, 0.95)


# perplexity, repeats, sample sizes


def test_perplexity_ratio_is_paired():
    """Every token 1 % of a nat worse in every document, easy or hard: what is left is what no sample can exclude."""
    baseline, tokens = np.array([20.0, 900.0, 310.0] * 100), np.array([10.0, 300.0, 100.0] * 100)
    ratio = perplexity_ratio(baseline, baseline + 0.01 * tokens, tokens, worst=4, confidence=0.95)
    mean = bounded_mean([0.01] * 300, -math.log(4), math.log(4), 0.95)
    assert (ratio.value, ratio.lower, ratio.upper) == pytest.approx(
        (math.exp(0.01), math.exp(mean.lower), math.exp(mean.upper))
    )


def test_a_gain_on_one_document_does_not_pay_for_a_loss_on_many():
    """Without a lower limit, one document of e**-30 the perplexity would outweigh 300 that are 6 % worse."""
    baseline, tokens = np.full(301, 3000.0), np.full(301, 100.0)
    candidate = baseline + 0.06 * tokens
    candidate[0] = 0
    ratio = perplexity_ratio(baseline, candidate, tokens, worst=1.05**32, confidence=0.95)
    assert ratio.value < 1 and ratio.upper > 1.05


def test_median_bounds_leave_out_outliers_when_repeats_allow():
    few = median_bounds([0.1, 1.2, 1.3, 1.4, 9.0], 0.95)  # 2**-5 < 0.05, yet the second smallest would not do
    assert (few.value, few.lower, few.upper) == (1.3, 0.1, 9.0)
    many = median_bounds([0.1, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 9.0], 0.95)  # P(at most 1 of 8 below) = 9/256
    assert (many.lower, many.upper) == (1.1, 1.6)


@pytest.mark.parametrize("confidence", [0.9, 0.95, 0.99, 0.999])
def test_too_few_repeats_bound_no_median(confidence: float):
    needed = required_repeats(confidence)
    assert 2.0**-needed <= 1 - confidence < 2.0 ** -(needed - 1)
    assert median_bounds([2.0] * needed, confidence).lower == 2.0
    few = median_bounds([2.0] * (needed - 1), confidence)
    assert (few.value, few.lower, few.upper) == (2.0, -math.inf, math.inf)


@pytest.mark.parametrize("row", GOLDEN["sample_sizes"]["rows"], ids=lambda row: f"{row['churn']}-{row['margin']}")
def test_required_items_match_the_reference_table(row: dict[str, Any]):
    assert required_units(row["churn"], row["margin"], 0.95) == pytest.approx(row["items"], abs=1)


def test_no_sample_decides_a_value_on_its_bound():
    assert required_units(0.04, 0.0, 0.95) is None
    assert required_units(math.inf, 0.1, 0.95) is None


@pytest.mark.parametrize("confidence", [0.5, 1.0, 95.0])
def test_confidence_must_be_a_probability_above_one_half(confidence: float):
    for call in (
        lambda: proportion(1, 2, confidence),
        lambda: paired_difference(0, 0, 9, confidence),
        lambda: ratio_of_sums([1.0, 2.0], [1, 2], confidence),
        lambda: bounded_mean([0.1, 0.2], 0, 1, confidence),
        lambda: median_bounds([1.0], confidence),
    ):
        with pytest.raises(ValueError, match="confidence"):
            call()


def test_docstring_examples_hold():
    failed, attempted = doctest.testmod(evals.statistics)
    assert (failed, attempted > 0) == (0, True)
