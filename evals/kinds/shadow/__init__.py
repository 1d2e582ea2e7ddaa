"""Shadow: chat prompts replayed through the champion and the candidate."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field

from evals.block import QUALITY, Block, FactRow, fact_metrics
from evals.check import Champion, Findings, JudgedVerdict
from evals.kind import Bounds, CountTexts, Evidence, EvidenceKind, EvidenceRecord, Report
from evals.limits import at_most
from evals.rules import Rule, broken, copies, counted, differing, same_numbers, short, token_rules
from tapeout.artifact import Frozen, ParentTypes, load
from tapeout.errors import SourceError
from tapeout.recipe import BaseRecipe, Count, Section

EARLY_TOKENS = 4


class ShadowItem(Frozen):
    """One replayed prompt.

    Teacher-forced numbers (``agree``, ``kl_sum``, ``kl_max``) are over the ``champion_tokens`` positions of the
    champion's own response: both engines are fed its tokens, so one divergence is not counted again at every later
    position. The first token follows the prompt's prefill; every other one a batched decode step, as in service.
    Responses include the stop token they ended with, if they did: to stop is a decision too.
    """

    prompt_hash: str
    prompt_tokens: int
    champion_tokens: int
    candidate_tokens: int
    agree: int
    kl_sum: float
    kl_max: float
    exact_match: bool
    first_divergence: int | None  # token index in the free-running responses; None when they are identical
    champion_stopped: bool  # ended by a stop token rather than by the length limit
    candidate_stopped: bool


class ShadowReport(EvidenceRecord):
    artifact_type: ClassVar[str] = "ShadowReport"
    remedy: ClassVar[str] = "run `dvc repro shadow`"
    schema_version: ClassVar[int] = 4
    parent_types: ClassVar[ParentTypes] = {
        "champion": ("EngineBundle",),
        "candidate": ("EngineBundle",),
        "source": ("Source",),
    }

    champion: str
    candidate: str
    champion_is_baseline: bool  # no registered champion: the float engine stood in
    prompts: int
    max_new_tokens: int


class ShadowSettings(Section):
    prompts: Count = 300
    max_new_tokens: Count = 32
    datasets: Annotated[tuple[str, ...], Field(min_length=1)] = ("nq_open", "trivia_qa")


class ShadowBounds(Bounds):
    min_shadow_prompts: Count = 300
    min_shadow_agreement: float = Field(default=0.90, ge=0.5, lt=1)
    max_shadow_kl: float = Field(default=0.04, gt=0, le=1)
    max_prompt_kl: float = Field(default=0.25, gt=0, le=2)  # mean over the answer to any one prompt
    max_length_change: float = Field(default=0.15, ge=0, le=0.5)  # of free-running answers, longer or shorter
    min_same_ending: float = Field(default=0.7, ge=0.2, le=1)
    max_early_divergence: float = Field(default=0.3, ge=0, le=0.8)


class ShadowKind(EvidenceKind[ShadowReport, ShadowItem, ShadowBounds]):
    order, name, folder, stage = 50, "shadow", "shadow", "shadow"
    measure_module = "evals.kinds.shadow.measure"
    artifact_types, items_file = ("ShadowReport",), "shadow_items.jsonl"
    sections: ClassVar = {"shadow": ShadowSettings}
    report, item, bounds = ShadowReport, ShadowItem, ShadowBounds
    absent = Block(QUALITY, "ShadowKind traffic", missing="No traffic was replayed.")

    def conflicts(self, recipe: BaseRecipe) -> list[str]:
        longest = recipe.section(ShadowSettings).max_new_tokens
        return recipe.too_long({"shadow.max_new_tokens, with a prompt of one": longest + 1})

    def datasets(self, recipe: BaseRecipe) -> tuple[str, ...]:
        return recipe.section(ShadowSettings).datasets

    def check_data(self, recipe: BaseRecipe, data: Path, count: CountTexts) -> None:
        asked = recipe.section(ShadowSettings)
        questions = sum(count(dataset) for dataset in asked.datasets)
        if questions < asked.prompts:
            raise SourceError(
                f"{', '.join(asked.datasets) or 'no data set'} has {questions} different questions",
                expected=f"{asked.prompts}",
                remedy="lower shadow.prompts, or add to shadow.datasets",
            )

    def deviations(self, report: Report[ShadowReport, ShadowItem], recipe: BaseRecipe) -> list[str]:
        record, asked = report.record, recipe.section(ShadowSettings)
        found = {"prompts": (record.prompts, asked.prompts)}
        return differing("ShadowReport", {**found, "new tokens": (record.max_new_tokens, asked.max_new_tokens)})

    def problems(self, report: Report[ShadowReport, ShadowItem], evidence: Evidence) -> list[str]:
        record, items = report.record, report.items
        problems = counted("ShadowReport", "prompts", len(items), record.prompts)
        if record.champion == evidence.candidate:
            problems.append("ShadowReport replayed the candidate against itself")
        if record.champion_is_baseline != (record.champion == evidence.baseline):
            claim = "is" if record.champion_is_baseline else "is not"
            problems.append(f"ShadowReport says its champion {short(record.champion)} {claim} the baseline")
        problems += broken("shadow item", items, lambda i: i.prompt_hash, _rules(record.max_new_tokens), key="prompt")
        return problems + copies("shadow item", items, lambda i: i.prompt_hash, lambda i: same_numbers(i.kl_sum))

    def judge(self, report: Report[ShadowReport, ShadowItem], evidence: Evidence, bounds: ShadowBounds) -> Findings:
        from evals.conditions import Condition, divergence_checks, share_fact
        from evals.statistics import proportion, ratio_of_sums

        items, confidence = report.items, bounds.confidence
        condition = partial(Condition, units="prompts", minimum=bounds.min_shadow_prompts, confidence=confidence)
        answers = f"the {'float engine' if report.record.champion_is_baseline else 'champion'}'s answers"
        champion_tokens = [item.champion_tokens for item in items]
        length = ratio_of_sums([item.candidate_tokens for item in items], champion_tokens, confidence)
        early = sum(i.first_divergence is not None and i.first_divergence < EARLY_TOKENS for i in items)
        change = bounds.max_length_change
        lengths = "answer length, candidate / champion"
        exact = sum(item.exact_match for item in items)
        same_end = sum(item.champion_stopped == item.candidate_stopped for item in items)
        return Findings(
            checks=(
                *divergence_checks(
                    items,
                    champion_tokens,
                    condition("shadow_kl", f"mean KL on {answers}, nats", "at_most", bounds.max_shadow_kl),
                    condition(
                        "shadow_agreement", f"same top token on {answers}", "at_least", bounds.min_shadow_agreement
                    ),
                ),
                at_most(
                    "prompt_kl",
                    f"mean KL of the worst of {answers}, nats",
                    {f"prompt {short(i.prompt_hash)}": i.kl_sum / i.champion_tokens for i in items},
                    bounds.max_prompt_kl,
                    "prompts",
                ),
                condition("answers_not_shorter", lengths, "at_least", 1 - change).check(length),
                condition("answers_not_longer", lengths, "at_most", 1 + change).check(length),
                condition(
                    "same_ending", "answers that both stop, or both do not", "at_least", bounds.min_same_ending
                ).check(proportion(same_end, len(items), confidence)),
                condition(
                    "early_divergence",
                    f"answers that differ in their first {EARLY_TOKENS} tokens",
                    "at_most",
                    bounds.max_early_divergence,
                ).check(proportion(early, len(items), confidence)),
            ),
            facts=(share_fact("exact_match", "answers identical", exact, len(items), confidence),),
            champion=Champion(digest=report.record.champion, is_baseline=report.record.champion_is_baseline),
        )

    def block(self, folder: Path, verdict: JudgedVerdict) -> Block:
        report = load(folder, ShadowReport).record
        champion = "the registered champion"
        if report.champion_is_baseline:
            champion = "the float engine: no champion is registered"
        facts = (
            FactRow("prompts", "Prompts replayed", report.prompts, note=f"against {champion}"),
            FactRow("max_new_tokens", "Longest answer, tokens", report.max_new_tokens),
        )
        return Block(QUALITY, "ShadowKind traffic", facts=facts, metrics=fact_metrics("shadow", facts))


def _rules(limit: int) -> tuple[Rule[ShadowItem], ...]:
    return (
        *token_rules(lambda item: item.champion_tokens),
        (
            "have a mean KL above their largest",
            lambda i: not i.kl_sum <= i.champion_tokens * i.kl_max * (1 + 1e-6) + 1e-9,
        ),
        ("have an impossible response length", lambda i: not (1 <= i.candidate_tokens <= limit >= i.champion_tokens)),
        ("are an exact match that diverges, or neither", lambda i: i.exact_match != (i.first_divergence is None)),
        ("are an exact match of unequal length", lambda i: i.exact_match and i.champion_tokens != i.candidate_tokens),
        (
            "diverge behind the end of a response",
            lambda i: (
                i.first_divergence is not None
                and not 0 <= i.first_divergence <= min(i.champion_tokens, i.candidate_tokens)
            ),
        ),
    )


KIND = ShadowKind()
