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
    clustered_proportion,
    median_bounds,
    normal_quantile,
    null_variance,
    paired_difference,
    perplexity_ratio,
    proportion,
    ratio_of_sums,
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


def test_clustered_bound_covers_in_simulation():
    """Documents of unequal length with skewed KL: the one-sided bound holds about as often as it says."""
    rng, clusters, trials = np.random.default_rng(11), 40, 4000
    lengths = rng.integers(60, 256, size=(trials, clusters)).astype(float)
    rates = rng.gamma(shape=4.0, scale=0.01 / 4.0, size=(trials, clusters))  # mean 0.01
    bounds = [ratio_of_sums(rate * length, length, 0.95) for rate, length in zip(rates, lengths, strict=True)]
    assert 0.92 < np.mean([bound.upper >= 0.01 for bound in bounds]) < 0.97
    assert 0.93 < np.mean([bound.lower <= 0.01 for bound in bounds]) < 0.98


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


def test_full_agreement_is_not_certainty():
    """No spread between documents: the bound is that of as many independent tokens, 0.05 ** (1 / n)."""
    share = clustered_proportion([100] * 30, [100] * 30, 0.95)
    assert share.lower == pytest.approx(0.05 ** (1 / 3000))
    assert share.upper == 1.0


def test_clustering_widens_a_share():
    uneven = clustered_proportion([100, 60] * 15, [100] * 30, 0.95)
    assert uneven.lower < proportion(2400, 3000, 0.95).lower
    assert uneven.upper > proportion(2400, 3000, 0.95).upper


@pytest.mark.parametrize(
    ("sums", "weights"), [([], []), ([1.0], [1.0, 2.0]), ([math.nan], [1.0]), ([1.0], [0.0]), ([1.0], [math.inf])]
)
def test_unsound_clusters_are_refused(sums: list[float], weights: list[float]):
    with pytest.raises(ValueError, match=r"sums"):
        ratio_of_sums(sums, weights, 0.95)


# perplexity, repeats, sample sizes


def test_perplexity_ratio_is_paired():
    """Every token 1 % of a nat worse in every document, easy or hard: no spread is left after pairing."""
    baseline, tokens = np.array([20.0, 900.0, 310.0]), np.array([10.0, 300.0, 100.0])
    ratio = perplexity_ratio(baseline, baseline + 0.01 * tokens, tokens, 0.95)
    assert (ratio.value, ratio.lower, ratio.upper) == pytest.approx((math.exp(0.01),) * 3)


def test_median_bounds_leave_out_outliers_when_repeats_allow():
    assert median_bounds([1.0, 2.0, 3.0], 0.95).lower == 1.0
    few = median_bounds([0.1, 1.2, 1.3, 1.4, 9.0], 0.95)  # 2**-5 < 0.05, yet the second smallest would not do
    assert (few.value, few.lower, few.upper) == (1.3, 0.1, 9.0)
    many = median_bounds([0.1, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 9.0], 0.95)  # P(at most 1 of 8 below) = 9/256
    assert (many.lower, many.upper) == (1.1, 1.6)


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
        lambda: median_bounds([1.0], confidence),
    ):
        with pytest.raises(ValueError, match="confidence"):
            call()


def test_docstring_examples_hold():
    failed, attempted = doctest.testmod(evals.statistics)
    assert (failed, attempted > 0) == (0, True)
