"""The gate: a pure function from evidence and bounds to a verdict, and the stage that writes it down.

A check passes when its confidence bound, not its mean, lies on the good side; fails when even the opposite bound
lies on the bad side; else it is inconclusive and says how much more evidence would decide it. "Not significantly
worse" is never a pass: with little evidence nothing is significant.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal
from xml.etree import ElementTree

from evals.evidence import Evidence, SpeedSample, require_sound
from evals.reports import ParityItem, ShadowItem, ShadowReport, TaskItem, TextItem
from evals.statistics import (
    Estimate,
    clustered_proportion,
    median_bounds,
    null_variance,
    paired_difference,
    perplexity_ratio,
    proportion,
    ratio_of_sums,
    required_units,
)
from evals.verdict import Check, Fact, Outcome, Slice, Verdict, combine
from pipeline.artifact import Artifact, create, load
from pipeline.recipe import Gate


def judge(evidence: Evidence, bounds: Gate) -> Verdict:
    """Judge sound evidence; :class:`pipeline.errors.EvidenceError` lists every problem of evidence that is not."""
    require_sound(evidence)
    checks = [_executed(evidence), _quantized(evidence)]
    slices: tuple[Slice, ...] = ()
    facts: list[Fact] = []
    if evidence.quality is not None:
        checks += [*_task_checks(evidence.task_items, bounds), *_text_checks(evidence.text_items, bounds)]
        slices = _slices(evidence.task_items, bounds.confidence)
        facts += _task_facts(evidence.task_items, bounds.confidence)
    if evidence.shadow is not None:
        checks += _shadow_checks(evidence.shadow_items, evidence.shadow, bounds)
        facts += _shadow_facts(evidence.shadow_items, bounds.confidence)
    if evidence.parity is not None:
        checks += _parity_checks(evidence.parity_items, bounds)
    if evidence.speed is not None:
        samples = sorted(evidence.speed.samples, key=lambda sample: (sample.phase, sample.batch))
        checks += [_speed_check(sample, bounds) for sample in samples]
    return Verdict(
        outcome=combine(check.outcome for check in checks),
        checks=tuple(checks),
        slices=slices,
        facts=tuple(facts),
        bounds=bounds,
        baseline=evidence.baseline,
        candidate=evidence.candidate,
        quantized=evidence.quantized,
        champion=evidence.shadow.champion if evidence.shadow else None,
        champion_is_baseline=evidence.shadow.champion_is_baseline if evidence.shadow else False,
        target=evidence.target,
        executed_on=evidence.executed_on,
        evidence=dict(sorted(evidence.digests.items())),
    )


def gate(evidence: Evidence, bounds: Gate, folder: Path) -> Artifact[Verdict]:
    """Write the Verdict artifact: its record, ``verdict.json``, ``junit.xml`` for CI, ``metrics.json`` for DVC.

    The verdict is written whatever its outcome; the caller turns ``record.exit_code`` into the process's own.
    """
    verdict = judge(evidence, bounds)
    with create(folder, Verdict) as draft:
        _write_json(draft.folder / "verdict.json", verdict.model_dump(mode="json"))
        _write_json(draft.folder / "metrics.json", verdict.metrics())
        ElementTree.ElementTree(junit(verdict)).write(
            draft.folder / "junit.xml", encoding="utf-8", xml_declaration=True
        )
        draft.finish(
            verdict,
            parents={"baseline": verdict.baseline, "candidate": verdict.candidate, **verdict.evidence},
        )
    return load(folder, Verdict)


def junit(verdict: Verdict) -> ElementTree.Element:
    """One test case per check. INCONCLUSIVE is an error, not a skip: CI shows skipped tests as green."""
    counts = {outcome: sum(check.outcome is outcome for check in verdict.checks) for outcome in Outcome}
    suite = ElementTree.Element(
        "testsuite",
        name="tapeout gate",
        tests=str(len(verdict.checks)),
        failures=str(counts[Outcome.FAIL]),
        errors=str(counts[Outcome.INCONCLUSIVE]),
    )
    for check in verdict.checks:
        case = ElementTree.SubElement(suite, "testcase", classname="gate", name=check.name)
        if check.outcome is Outcome.FAIL:
            ElementTree.SubElement(case, "failure", message=check.reason, type="FAIL")
        elif check.outcome is Outcome.INCONCLUSIVE:
            ElementTree.SubElement(case, "error", message=check.reason, type="INCONCLUSIVE")
    return suite


def _executed(evidence: Evidence) -> Check:
    title = f"executed on {evidence.target}"
    if evidence.executed_on == evidence.target:
        return Check(name="executed", title=title, outcome=Outcome.PASS, reason=f"ran on {evidence.target}")
    where = "" if evidence.executed_on is None else f", but on {evidence.executed_on}"
    lacking = f"; missing: {', '.join(evidence.missing)}" if evidence.missing else ""
    reason = f"not executed on {evidence.target}{where}{lacking}"
    return Check(name="executed", title=title, outcome=Outcome.INCONCLUSIVE, reason=reason)


def _quantized(evidence: Evidence) -> Check:
    proof = evidence.proof
    return Check(
        name="quantized",
        title="proof of quantization (bits per weight)",
        outcome=Outcome.PASS if proof.ok else Outcome.FAIL,
        reason="every proof holds" if proof.ok else "; ".join(proof.reasons),
        value=proof.bits_per_weight,
    )


def _task_checks(items: Sequence[TaskItem], bounds: Gate) -> list[Check]:
    n, lost, gained = len(items), *_discordant(items)
    margin = -bounds.accuracy_margin
    difference = paired_difference(lost, gained, n, bounds.confidence)
    return [
        _measured(
            "accuracy",
            "accuracy, candidate - baseline, pooled",
            difference,
            "at_least",
            margin,
            bounds,
            units="items",
            minimum=bounds.min_items,
            variance=null_variance(lost, gained, n, margin),
        ),
        _measured(
            "flips",
            "answers whose correctness changed",
            proportion(lost + gained, n, bounds.confidence),
            "at_most",
            bounds.max_flips,
            bounds,
            units="items",
            minimum=bounds.min_items,
            variance=bounds.max_flips * (1 - bounds.max_flips),
        ),
    ]


def _text_checks(items: Sequence[TextItem], bounds: Gate) -> list[Check]:
    tokens = [item.tokens for item in items]
    ratio = perplexity_ratio(
        [item.baseline_nll for item in items], [item.candidate_nll for item in items], tokens, bounds.confidence
    )
    return [
        *_agreement_checks(
            ("kl", "mean KL on held-out text, nats"),
            ("top_token", "same top token on held-out text"),
            items,
            tokens,
            bounds,
            max_kl=bounds.max_kl,
            min_agreement=bounds.min_top_token,
            units="documents",
            minimum=bounds.min_documents,
        ),
        _measured(
            "perplexity",
            "perplexity, candidate / baseline",
            ratio,
            "at_most",
            bounds.max_perplexity_ratio,
            bounds,
            units="documents",
            minimum=bounds.min_documents,
            n=sum(tokens),
            gap=_log(ratio.value) - math.log(bounds.max_perplexity_ratio),  # its variance is of the logarithm
        ),
    ]


def _shadow_checks(items: Sequence[ShadowItem], report: ShadowReport, bounds: Gate) -> list[Check]:
    champion = "float engine" if report.champion_is_baseline else "champion"
    return _agreement_checks(
        ("shadow_kl", f"mean KL on the {champion}'s answers, nats"),
        ("shadow_agreement", f"same top token on the {champion}'s answers"),
        items,
        [item.champion_tokens for item in items],
        bounds,
        max_kl=bounds.max_shadow_kl,
        min_agreement=bounds.min_shadow_agreement,
        units="prompts",
        minimum=bounds.min_shadow_prompts,
    )


def _parity_checks(items: Sequence[ParityItem], bounds: Gate) -> list[Check]:
    """Divergence with every product locked to the engine's, and the largest error of any single product."""
    worst = max(items, key=lambda item: item.worst_error)
    sound = worst.worst_error <= bounds.max_parity_error
    error = Check(
        name="parity_error",
        title="largest relative error of one product, engine against quantized model",
        outcome=Outcome.PASS if sound else Outcome.FAIL,
        reason=f"{worst.worst_linear} is off by {worst.worst_error:.2g}, "
        f"{'within' if sound else 'more than'} {bounds.max_parity_error:g}; every other product is off by less",
        direction="at_most",
        value=worst.worst_error,
        bound=bounds.max_parity_error,
        unit="documents",
        n=len(items),
    )
    return [error, *_parity_divergence(items, bounds)]


def _parity_divergence(items: Sequence[ParityItem], bounds: Gate) -> list[Check]:
    return _agreement_checks(
        ("parity_kl", "mean KL, engine against quantized model, nats"),
        ("parity_top_token", "same top token, engine and quantized model"),
        items,
        [item.tokens for item in items],
        bounds,
        max_kl=bounds.max_parity_kl,
        min_agreement=bounds.min_parity_top_token,
        units="documents",
        minimum=bounds.min_documents,
    )


def _agreement_checks(
    kl: tuple[str, str],
    agreement: tuple[str, str],
    items: Sequence[TextItem] | Sequence[ShadowItem] | Sequence[ParityItem],
    tokens: Sequence[int],
    bounds: Gate,
    *,
    max_kl: float,
    min_agreement: float,
    units: str,
    minimum: int,
) -> list[Check]:
    """Mean KL and top-token agreement per token, each item one cluster of ``tokens`` correlated positions."""
    divergence = ratio_of_sums([item.kl_sum for item in items], tokens, bounds.confidence)
    agree = clustered_proportion([item.agree for item in items], tokens, bounds.confidence)
    return [
        _measured(*kl, divergence, "at_most", max_kl, bounds, units=units, minimum=minimum, n=sum(tokens)),
        _measured(*agreement, agree, "at_least", min_agreement, bounds, units=units, minimum=minimum, n=sum(tokens)),
    ]


def _speed_check(sample: SpeedSample, bounds: Gate) -> Check:
    """Repeats are paired, so what slows the machine for a while slows both engines and leaves the ratio alone."""
    ratios = [
        candidate / baseline
        for candidate, baseline in zip(sample.candidate_tokens_per_s, sample.baseline_tokens_per_s, strict=True)
    ]
    return _measured(
        f"{sample.phase}_speed_b{sample.batch}",
        f"{sample.phase} tokens/s at batch {sample.batch}, candidate / baseline",
        median_bounds(ratios, bounds.confidence),
        "at_least",
        bounds.min_speed_ratio,
        bounds,
        units="repeats",
        minimum=bounds.min_repeats,
    )


def _measured(
    name: str,
    title: str,
    estimate: Estimate,
    direction: Literal["at_least", "at_most"],
    bound: float,
    bounds: Gate,
    *,
    units: str,
    minimum: int,
    n: int | None = None,
    variance: float | None = None,
    gap: float | None = None,
) -> Check:
    """Three-valued comparison of an estimate with a bound.

    ``units``: what the independent units are called, and ``minimum`` how many there must be. ``n``: tokens, where a
    unit is a cluster of them. ``variance`` and ``gap`` plan how many more units would decide, where those of the
    estimate are not the right ones.
    """
    if direction == "at_least":
        good, bad = estimate.lower >= bound, estimate.upper < bound
        near, far, side = estimate.lower, estimate.upper, ("lower", "at least", "upper", "below")
    else:
        good, bad = estimate.upper <= bound, estimate.lower > bound
        near, far, side = estimate.upper, estimate.lower, ("upper", "at most", "lower", "above")
    level = f"{100 * bounds.confidence:g} %"
    if estimate.units < minimum:
        outcome = Outcome.INCONCLUSIVE
        reason = f"{estimate.units:,} of at least {minimum:,} {units}: {minimum - estimate.units:,} more needed"
    elif good:
        outcome, reason = Outcome.PASS, f"{level} {side[0]} bound {near:.4g} is {side[1]} {bound:g}"
    elif bad:
        outcome, reason = Outcome.FAIL, f"even the {level} {side[2]} bound {far:.4g} is {side[3]} {bound:g}"
    else:
        needed = required_units(
            estimate.variance if variance is None else variance,
            estimate.value - bound if gap is None else gap,
            bounds.confidence,
        )
        more = "more" if needed is None else f"about {max(needed - estimate.units, 1):,} more"
        outcome = Outcome.INCONCLUSIVE
        reason = f"{bound:g} lies between the {level} bounds {estimate.lower:.4g} and {estimate.upper:.4g}: "
        reason += f"{more} {units} would decide"
    return Check(
        name=name,
        title=title,
        outcome=outcome,
        reason=reason,
        direction=direction,
        value=_finite(estimate.value),
        bound=bound,
        lower=_finite(estimate.lower),
        upper=_finite(estimate.upper),
        unit=units if n is None else "tokens",
        n=estimate.units if n is None else n,
        clusters=estimate.units,
    )


def _slices(items: Sequence[TaskItem], confidence: float) -> tuple[Slice, ...]:
    slices: list[Slice] = []
    for task in sorted({item.task for item in items}):
        of_task = [item for item in items if item.task == task]
        lost, gained = _discordant(of_task)
        difference = paired_difference(lost, gained, len(of_task), confidence)
        slices.append(
            Slice(
                task=task,
                items=len(of_task),
                baseline_accuracy=sum(item.baseline_correct for item in of_task) / len(of_task),
                candidate_accuracy=sum(item.candidate_correct for item in of_task) / len(of_task),
                difference=difference.value,
                lower=difference.lower,
                upper=difference.upper,
                lost=lost,
                gained=gained,
            )
        )
    return tuple(slices)


def _task_facts(items: Sequence[TaskItem], confidence: float) -> list[Fact]:
    shares = {
        "baseline_accuracy": ("baseline accuracy, pooled", sum(item.baseline_correct for item in items)),
        "candidate_accuracy": ("candidate accuracy, pooled", sum(item.candidate_correct for item in items)),
        "changed_choices": (
            "answers changed, right or wrong",
            sum(item.baseline_choice != item.candidate_choice for item in items),
        ),
    }
    return [_share(name, title, count, len(items), confidence) for name, (title, count) in shares.items()]


def _shadow_facts(items: Sequence[ShadowItem], confidence: float) -> list[Fact]:
    length = ratio_of_sums(
        [item.candidate_tokens for item in items], [item.champion_tokens for item in items], confidence
    )
    same_end = sum(item.champion_stopped == item.candidate_stopped for item in items)
    return [
        _share("exact_match", "answers identical", sum(item.exact_match for item in items), len(items), confidence),
        _share("same_ending", "answers that both stop, or both do not", same_end, len(items), confidence),
        Fact(
            name="length_ratio",
            title="answer length, candidate / champion",
            value=length.value,
            lower=_finite(length.lower),
            upper=_finite(length.upper),
        ),
    ]


def _share(name: str, title: str, count: int, n: int, confidence: float) -> Fact:
    share = proportion(count, n, confidence)
    return Fact(name=name, title=title, value=share.value, lower=share.lower, upper=share.upper)


def _discordant(items: Sequence[TaskItem]) -> tuple[int, int]:
    """How many items only the baseline answers rightly, and only the candidate."""
    lost = sum(item.baseline_correct and not item.candidate_correct for item in items)
    gained = sum(item.candidate_correct and not item.baseline_correct for item in items)
    return lost, gained


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf  # a perplexity ratio can underflow to zero


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n")
