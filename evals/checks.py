"""The gate's checks, one function per report: what its items amount to, and the conditions that is held against."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from evals.conditions import Condition
from evals.evidence import Evidence, SpeedSummary
from evals.facts import discordant
from evals.reports import ParityItem, ShadowItem, ShadowReport, SpeedSample, TaskItem, TextItem
from evals.statistics import (
    clustered_proportion,
    median_bounds,
    null_variance,
    paired_difference,
    perplexity_ratio,
    proportion,
    ratio_of_sums,
)
from evals.verdict import Check, Outcome
from tapeout.recipe import Gate


def executed(evidence: Evidence) -> Check:
    title = f"executed on {evidence.target}"
    if evidence.executed_on == evidence.target:
        return Check(name="executed", title=title, outcome=Outcome.PASS, reason=f"ran on {evidence.target}")
    where = "" if evidence.executed_on is None else f", but on {evidence.executed_on}"
    lacking = f"; missing: {', '.join(evidence.missing)}" if evidence.missing else ""
    reason = f"not executed on {evidence.target}{where}{lacking}"
    return Check(name="executed", title=title, outcome=Outcome.INCONCLUSIVE, reason=reason)


def quantized(evidence: Evidence) -> Check:
    proof = evidence.proof
    return Check(
        name="quantized",
        title="proof of quantization (bits per weight)",
        outcome=Outcome.PASS if proof.ok else Outcome.FAIL,
        reason="every proof holds" if proof.ok else "; ".join(proof.reasons),
        value=proof.bits_per_weight,
    )


def task_checks(items: Sequence[TaskItem], bounds: Gate) -> list[Check]:
    n, lost, gained = len(items), *discordant(items)
    margin = -bounds.accuracy_margin
    condition = partial(Condition, units="items", minimum=bounds.min_items, confidence=bounds.confidence)
    accuracy = condition("accuracy", "accuracy, candidate - baseline, pooled", "at_least", margin)
    flips = condition("flips", "answers whose correctness changed", "at_most", bounds.max_flips)
    return [
        accuracy.check(
            paired_difference(lost, gained, n, bounds.confidence), variance=null_variance(lost, gained, n, margin)
        ),
        flips.check(
            proportion(lost + gained, n, bounds.confidence), variance=bounds.max_flips * (1 - bounds.max_flips)
        ),
    ]


def text_checks(items: Sequence[TextItem], bounds: Gate) -> list[Check]:
    condition = partial(Condition, units="documents", minimum=bounds.min_documents, confidence=bounds.confidence)
    highest = bounds.max_perplexity_ratio
    tokens = [item.tokens for item in items]
    ratio = perplexity_ratio(
        [item.baseline_nll for item in items], [item.candidate_nll for item in items], tokens, bounds.confidence
    )
    perplexity = condition("perplexity", "perplexity, candidate / baseline", "at_most", highest)
    return [
        *_divergence_checks(
            items,
            tokens,
            condition("kl", "mean KL on held-out text, nats", "at_most", bounds.max_kl),
            condition("top_token", "same top token on held-out text", "at_least", bounds.min_top_token),
        ),
        # the estimate's variance is of the logarithm, so the gap is too
        perplexity.check(ratio, n=sum(tokens), gap=_log(ratio.value) - math.log(highest)),
    ]


def shadow_checks(items: Sequence[ShadowItem], report: ShadowReport, bounds: Gate) -> list[Check]:
    condition = partial(Condition, units="prompts", minimum=bounds.min_shadow_prompts, confidence=bounds.confidence)
    answers = f"the {'float engine' if report.champion_is_baseline else 'champion'}'s answers"
    return _divergence_checks(
        items,
        [item.champion_tokens for item in items],
        condition("shadow_kl", f"mean KL on {answers}, nats", "at_most", bounds.max_shadow_kl),
        condition("shadow_agreement", f"same top token on {answers}", "at_least", bounds.min_shadow_agreement),
    )


def parity_checks(items: Sequence[ParityItem], bounds: Gate) -> list[Check]:
    """The largest error of any single product, and divergence with every product locked to the engine's."""
    condition = partial(Condition, units="documents", minimum=bounds.min_documents, confidence=bounds.confidence)
    error = "largest relative error of one product, engine against quantized model"
    kl, top = "mean KL, engine against quantized model, nats", "same top token, engine and quantized model"
    return [
        _worst(items, condition("parity_error", error, "at_most", bounds.max_parity_error)),
        *_divergence_checks(
            items,
            [item.tokens for item in items],
            condition("parity_kl", kl, "at_most", bounds.max_parity_kl),
            condition("parity_top_token", top, "at_least", bounds.min_parity_top_token),
        ),
    ]


def speed_checks(speed: SpeedSummary, bounds: Gate) -> list[Check]:
    """One for each phase and batch that was timed; :mod:`evals.soundness` saw to it that none is missing."""
    samples = sorted(speed.samples, key=lambda sample: (sample.phase, sample.batch))
    return [_speed_check(sample, bounds) for sample in samples]


def _worst(items: Sequence[ParityItem], condition: Condition) -> Check:
    """A largest value is decided at once where it is too large: further documents can only raise it."""
    worst = max(items, key=lambda item: item.worst_error)
    if worst.worst_error > condition.bound:
        outcome, side = Outcome.FAIL, "more than"
    else:
        outcome, side = Outcome.PASS, "within"
    reason = f"{worst.worst_linear} is off by {worst.worst_error:.2g}, {side} {condition.bound:g}"
    reason += "; every other product is off by less"
    if outcome is Outcome.PASS and (too_few := condition.too_few(len(items))):
        outcome, reason = Outcome.INCONCLUSIVE, too_few
    return Check(
        name=condition.name,
        title=condition.title,
        outcome=outcome,
        reason=reason,
        direction=condition.direction,
        value=worst.worst_error,
        bound=condition.bound,
        unit=condition.units,
        n=len(items),
    )


def _divergence_checks(
    items: Sequence[TextItem] | Sequence[ShadowItem] | Sequence[ParityItem],
    tokens: Sequence[int],
    kl: Condition,
    agreement: Condition,
) -> list[Check]:
    """Mean KL and top-token agreement per token, each item one cluster of ``tokens`` correlated positions."""
    divergence = ratio_of_sums([item.kl_sum for item in items], tokens, kl.confidence)
    agree = clustered_proportion([item.agree for item in items], tokens, agreement.confidence)
    return [kl.check(divergence, n=sum(tokens)), agreement.check(agree, n=sum(tokens))]


def _speed_check(sample: SpeedSample, bounds: Gate) -> Check:
    """Repeats are paired, so what slows the machine for a while slows both engines and leaves the ratio alone."""
    ratios = [
        candidate / baseline
        for candidate, baseline in zip(sample.candidate_tokens_per_s, sample.baseline_tokens_per_s, strict=True)
    ]
    condition = Condition(
        name=f"{sample.phase}_speed_b{sample.batch}",
        title=f"{sample.phase} tokens/s at batch {sample.batch}, candidate / baseline",
        direction="at_least",
        bound=bounds.min_speed_ratio,
        units="repeats",
        minimum=bounds.min_repeats,
        confidence=bounds.confidence,
    )
    return condition.check(median_bounds(ratios, bounds.confidence))


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf  # a perplexity ratio can underflow to zero
