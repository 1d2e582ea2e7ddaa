"""The gate judges made-up evidence: boundaries of every check, every refusal, and what must hold for any evidence."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evals.check import Outcome, combine
from evals.gate import gate, judge
from evals.items import write_items
from evals.kind import Bounds, Evidence, Report
from evals.kinds.parity import ParityItem, ParityReport, TableError
from evals.kinds.portable import PortableReport
from evals.kinds.proof import ProofSummary
from evals.kinds.serving import (
    AHEAD,
    DRAWN,
    PRESSED,
    TURNS,
    Draws,
    Pressed,
    Pressure,
    ServedItem,
    ServingReport,
    ServingSettings,
)
from evals.kinds.shadow import ShadowItem, ShadowReport
from evals.kinds.source import ANSWERS_PER_TASK, SourceAnswer, SourceItem, SourceReport, TextFile
from evals.kinds.speed import Benchmark, EngineNumbers, SpeedSample, SpeedSummary
from evals.kinds.tasks import ChoiceItem, EvalReport, TaskItem
from evals.kinds.text import TextItem
from evals.known import kinds
from evals.policy import Policy
from evals.verdict import COLUMNS
from pipeline.recipe import Recipe
from quantization.checkpoint import KVScheme, QuantizedModel
from quantization.proof import QuantizationProof
from tapeout.artifact import ArtifactRef, create
from tapeout.errors import EvidenceError, ExitCode
from tapeout.recipe import Quantize
from tests.fake_engine import MACHINE

BASELINE, CANDIDATE, QUANTIZED, CHAMPION = "b" * 64, "c" * 64, "9" * 64, "d" * 64
SEVERITY = {Outcome.PASS: 0, Outcome.INCONCLUSIVE: 1, Outcome.FAIL: 2}
SOURCES = {"model": {"source": "file:model"}, "data": {"source": "file:data"}}
OTHER_MACHINE = MACHINE.model_copy(update={"features": ("avx512f",)})


def gate_section(**bounds: float) -> Bounds:
    """Section ``gate`` of a recipe."""
    return Recipe.model_validate({**SOURCES, "gate": bounds}).section(Bounds)


DEFAULT = gate_section()
SMALL = gate_section(min_items=100, min_documents=10, min_text_documents=10, min_shadow_prompts=10)


def task_item(number: int, baseline: bool, candidate: bool, task: str = "arc") -> ChoiceItem:
    return ChoiceItem(
        task=task,
        doc_id=number,
        doc_hash=f"doc{number}",
        prompt_hash=f"prompt{number}",
        target_hash=f"target{number}",
        metric="acc",
        gold=0,
        baseline_choice=0 if baseline else 1,
        candidate_choice=0 if candidate else 1,
        baseline_score=float(baseline),
        candidate_score=float(candidate),
        baseline_loglikelihoods=(-1.0, -2.0 - number),
        candidate_loglikelihoods=(-1.0, -2.0 - number),
    )


@cache
def task_items(n: int = 2500, lost: int = 40, gained: int = 40) -> tuple[ChoiceItem, ...]:
    """Three fifths right in both arms, besides those that changed; every fifth item belongs to a second task.

    Made once for equal arguments: most evidence shares them.
    """
    pairs = [(True, False)] * lost + [(False, True)] * gained
    pairs += [(i % 5 < 3,) * 2 for i in range(n - lost - gained)]
    return tuple(task_item(i, *pair, task="piqa" if i % 5 == 0 else "arc") for i, pair in enumerate(pairs))


@cache
def text_items(n: int = 300, kl: float = 0.01, agree: float = 0.95, worse_by: float = 0.005) -> tuple[TextItem, ...]:
    """Documents of 200 tokens whose values vary by a tenth around the mean asked for."""
    return tuple(
        TextItem(
            doc_hash=f"text{i}",
            tokens=200,
            kl_sum=200 * kl * (0.9 + 0.2 * (i % 2)) * (1 + 1e-9 * i),
            kl_max=10 * kl + 1,
            agree=min(200, round(200 * agree) + (-1) ** i),
            baseline_nll=600.0 + i,
            candidate_nll=600.0 + i + 200 * worse_by * (0.9 + 0.2 * (i % 2)),
            ranges=(kl * (0.9 + 0.2 * (i % 2)),),
        )
        for i in range(n)
    )


@cache
def shadow_items(n: int = 300, kl: float = 0.01, agree: float = 0.95) -> tuple[ShadowItem, ...]:
    return tuple(
        ShadowItem(
            prompt_hash=f"shadow{i}",
            prompt_tokens=20,
            champion_tokens=40,
            candidate_tokens=40,
            agree=min(40, max(0, round(40 * agree) + (-1) ** i)),
            kl_sum=40 * kl * (0.9 + 0.2 * (i % 2)) * (1 + 1e-9 * i),
            kl_max=10 * kl + 1,
            exact_match=i % 3 == 0,
            first_divergence=None if i % 3 == 0 else 7,
            champion_stopped=True,
            candidate_stopped=True,
        )
        for i in range(n)
    )


def parity_items(n: int = 40, kl: float = 1e-4, agree: float = 1.0, worst: float = 1e-4) -> tuple[ParityItem, ...]:
    return tuple(
        ParityItem(
            doc_hash=f"p{i}",
            tokens=200,
            kl_sum=200 * kl * (1 + 1e-9 * i),
            kl_max=kl + 0.1,
            agree=round(200 * agree),
            errors={"layers.3.mlp.down_proj.weight": worst} | {f"other.{n}": 0.0 for n in range(99)},
            position_error=2 * worst,
            position_linear="layers.3.mlp.down_proj.weight",
            free_kl_sum=1.0,
            free_agree=190,
        )
        for i in range(n)
    )


TABLE = TableError(rows=10, error=1e-4, worst=3)


def served(path: str, slot: int, **changes: Any) -> ServedItem:
    fields: dict[str, Any] = {"path": path, "slot": slot, "first_slot": slot, "batch": 1, "first": 30, "last": 63}
    fields |= {"tokens": 8, "agree": 8, "kl_sum": 0.0, "kl_max": 0.0, "error": 0.0, "gap": 0.0, "float_kl_sum": 0.08}
    return ServedItem(**fields | changes)


def served_items() -> tuple[ServedItem, ...]:
    """Of an engine with two slots of 64 positions."""
    both = [
        served(path, slot)
        for path in ("pieces", "decode", "greedy", "mixed", "reuse", "copy", "share")
        for slot in (0, 1)
    ]
    full = [served(path, slot, first_slot=0, batch=2) for path in ("decode", "greedy") for slot in (0, 1)]
    sizes = [
        served(path, size - 1, first_slot=0, batch=size, float_kl_sum=None)
        for path in ("running", "joining", "resumed", "drafts")
        for size in (1, 2)
    ]
    return (*both, *full, *sizes, served("generation", 0, float_kl_sum=None), served("reopened", 1), served("moved", 1))


def source_items(n: int = 30, kl: float = 1e-7) -> tuple[SourceItem, ...]:
    return tuple(
        SourceItem(
            doc_hash=f"source{i}",
            form={0: "long", 1: "prompt"}.get(i, "document"),
            tokens=64,
            kl_sum=64 * kl,
            kl_max=10 * kl,
            agree=64,
            source_nll=200.0 + i,
            baseline_nll=200.0 + i,
            candidate_nll=200.5 + i + 0.1 * (i % 2),
        )
        for i in range(n + 2)
    )


def source_answers(asked: Sequence[TaskItem]) -> tuple[SourceAnswer, ...]:
    """The source model answers the first questions of each multiple-choice task as the baseline does."""
    choices = [item for item in asked if isinstance(item, ChoiceItem)]
    tasks = {item.task for item in choices}
    first = ([item for item in choices if item.task == task][:ANSWERS_PER_TASK] for task in sorted(tasks))
    return tuple(
        SourceAnswer(
            **{name: getattr(item, name) for name in ("task", "doc_id", "doc_hash", "prompt_hash", "target_hash")},
            choice=item.baseline_choice,
            loglikelihoods=item.baseline_loglikelihoods,
        )
        for own in first
        for item in own
    )


def speed(*ratios: float, batch: int = 1, phase: str = "decode") -> SpeedSample:
    return SpeedSample(
        batch=batch,
        phase=phase,  # type: ignore[arg-type]
        baseline_tokens_per_s=(100.0,) * len(ratios),
        candidate_tokens_per_s=tuple(100.0 * ratio for ratio in ratios),
    )


PREFILL = speed(1.2, 1.25, 1.3, 1.2, 1.3, phase="prefill")


def timed(*samples: SpeedSample) -> tuple[SpeedSample, ...]:
    """What a benchmark records: these, and prefill."""
    return (*samples, PREFILL)


def report(artifact_type: str, record: Any, items: tuple[Any, ...] = ()) -> Report[Any, Any]:
    return Report(ArtifactRef(artifact_type, f"digest of {artifact_type}"), record, items)


def benchmark(samples: tuple[SpeedSample, ...], batches: tuple[int, ...] | None = None) -> dict[str, Report[Any, Any]]:
    """A benchmark asked for these batches, or for those whose decoding it timed."""
    decoded = dict.fromkeys(sample.batch for sample in samples if sample.phase == "decode")
    batches = (tuple(decoded) or (1,)) if batches is None else batches
    summary = SpeedSummary(baseline=BASELINE, candidate=CANDIDATE, batches=batches, executed_on=MACHINE)
    return {"speed": report("Benchmark", summary, samples)}


def proof(**changes: Any) -> Report[Any, Any]:
    summary = ProofSummary(ok=True, reasons=(), bits_per_weight=6.2)
    return Report(ArtifactRef("QuantizedModel", QUANTIZED), summary.model_copy(update=changes))


def pressure(kinds: Sequence[str] = (*PRESSED, TURNS), **changes: Any) -> Pressure:
    numbers: dict[str, Any] = {"answers": 10, "tokens": 240, "wrong": 0, "gap": 0.0, "preempted": 2, "cached": 64}
    answers = tuple(Pressed(settings=name, accepted=0, **numbers | changes) for name in kinds)
    return Pressure(shares=True, scarce=True, constrains=True, steps_at_once=1, steps_ahead=0, answers=answers)


def make(
    tasks: tuple[TaskItem, ...] | None = None,
    texts: tuple[TextItem, ...] | None = None,
    shadow: tuple[ShadowItem, ...] | None = None,
    parity: tuple[ParityItem, ...] | None = None,
    samples: tuple[SpeedSample, ...] | None = None,
    **changes: Any,
) -> Evidence:
    """Sound evidence that passes, with some of it replaced; reports claim exactly the items given."""
    tasks = task_items() if tasks is None else tasks
    texts = text_items() if texts is None else texts
    shadow = shadow_items() if shadow is None else shadow
    parity = parity_items() if parity is None else parity
    samples = timed(speed(1.5, 1.6, 1.55, 1.5, 1.6)) if samples is None else samples
    evaluation = EvalReport(
        baseline=BASELINE,
        candidate=CANDIDATE,
        tasks={task: sum(item.task == task for item in tasks) for task in {item.task for item in tasks}},
        documents=len(texts),
        max_tokens=0,  # no long document is asked for
        shots={},
        versions={},
        executed_on=MACHINE,
    )
    replayed = ShadowReport(
        champion=BASELINE,
        candidate=CANDIDATE,
        champion_is_baseline=True,
        prompts=len(shadow),
        max_new_tokens=48,
        executed_on=MACHINE,
    )
    compared = ParityReport(
        candidate=CANDIDATE,
        built_from=QUANTIZED,
        documents=len(parity),
        vocabulary=10,
        max_tokens=200,
        embedding=TABLE,
        head=TABLE,
        executed_on=MACHINE,
    )
    both: dict[str, Any] = {"baseline": BASELINE, "candidate": CANDIDATE, "executed_on": MACHINE}
    serving = ServingReport(
        **both,
        asked=ServingSettings(),
        slots=2,
        max_tokens=64,
        max_running=2,
        step_tokens=256,
        draft_tokens=8,
        moved_tokens=16,
        items=len(served_items()),
        draws=tuple(Draws(settings=name, draws=32, differ=0) for name in DRAWN),
        pressure=pressure(),
    )
    source = SourceReport(
        **both,
        documents=len(source_items()),
        max_tokens=64,
        vocabulary=10,
        embedding=TABLE,
        answers=source_answers(tasks),
        files=(TextFile(name="tokenizer.json", graph="t", baseline="t", candidate="t"),),
        stop_tokens=dict.fromkeys(("source", "graph", "baseline", "candidate"), (2,)),
    )
    whole = Evidence(
        baseline=BASELINE,
        candidate=CANDIDATE,
        built_from=ArtifactRef("QuantizedModel", QUANTIZED),
        target="cpu",
        hardware=(MACHINE,),
        reports={
            "proof": proof(),
            "tasks": report("EvalReport", evaluation, tasks),
            "text": report("EvalReport", evaluation, texts),
            "shadow": report("ShadowReport", replayed, shadow),
            "parity": report("ParityReport", compared, parity),
            "serving": report("ServingReport", serving, served_items()),
            "source": report("SourceReport", source, source_items()),
            **benchmark(samples),
        },
    )
    return replace(whole, **changes)


def with_reports(evidence: Evidence, **changes: Report[Any, Any]) -> Evidence:
    return replace(evidence, reports={**evidence.reports, **changes})


def without(*names: str) -> Evidence:
    evidence = make()
    return replace(evidence, reports={name: r for name, r in evidence.reports.items() if name not in names})


BEHIND = "other.5"  # of the linears of `parity_items`


def of_attention(error: float, position: float) -> Evidence:
    """Attention before one linear is judged on its own: one document has these errors, all others half of them."""

    def changed(number: int, item: ParityItem) -> ParityItem:
        share = 1 if number == 7 else 0.5
        return item.model_copy(
            update={"attention_errors": {BEHIND: share * error}, "attention_position_error": share * position}
        )

    evidence = make(parity=tuple(changed(number, item) for number, item in enumerate(parity_items())))
    found = evidence.reports["parity"]
    return with_reports(
        evidence, parity=replace(found, record=found.record.model_copy(update={"attention": (BEHIND,)}))
    )


EXPERTS = "layers.3.mlp.experts.down_proj"


def of_experts(visits: Sequence[tuple[int, ...]], differ: int = 0) -> Evidence:
    """Evidence of a mixture of four experts, two for each token. ``visits``: on each parity document, in turns.

    ``differ``: tokens of each that choose others than in the quantized model.
    """
    items = tuple(
        item.model_copy(
            update={
                "errors": item.errors | {EXPERTS: 0.0},
                "visits": {EXPERTS: visits[number % len(visits)]},
                "routed": {EXPERTS: item.tokens - differ},
                "free_routed": {} if item.free_kl_sum is None else {EXPERTS: item.tokens},
            }
        )
        for number, item in enumerate(parity_items())
    )
    evidence = make(parity=items)
    found = evidence.reports["parity"]
    record = found.record.model_copy(update={"experts": {EXPERTS: 4}})
    return with_reports(evidence, parity=replace(found, record=record))


ALL_EXPERTS = of_experts([(200, 150, 50, 0), (0, 0, 200, 200)])


# outcomes


def test_good_evidence_passes_with_every_check():
    verdict = judge(make(), DEFAULT)
    assert {check.name: check.outcome for check in verdict.checks} == dict.fromkeys(
        [
            "executed",
            "quantized",
            "accuracy",
            "accuracy_worst_task",
            "flips",
            "kl",
            "top_token",
            "perplexity",
            "document_kl",
            "shadow_kl",
            "shadow_agreement",
            "prompt_kl",
            "answers_not_shorter",
            "answers_not_longer",
            "same_ending",
            "early_divergence",
            "serving_kl",
            "serving_position_kl",
            "serving_agreement",
            "serving_greedy",
            "serving_draws",
            "serving_answers",
            "serving_float_kl",
            "parity_error",
            "parity_mean_error",
            "parity_position_error",
            "parity_row_error",
            "parity_document_kl",
            "parity_kl",
            "parity_top_token",
            "source_kl",
            "source_answers",
            "source_loglikelihood",
            "source_perplexity",
            "perplexity_floor",
            "embedding_rows",
            "text_files",
            "accuracy_above_chance",
            "accuracy_floor",
            "decode_speed_b1",
            "prefill_speed_b1",
        ],
        Outcome.PASS,
    )
    assert (verdict.outcome, verdict.exit_code) == (Outcome.PASS, ExitCode.PASS)
    assert (verdict.baseline, verdict.candidate, verdict.champion) == (BASELINE, CANDIDATE, BASELINE)


BOUNDARIES: list[tuple[str, Evidence, Outcome]] = [
    # accuracy: margin 2 points of 2,500 items, 4 % churn
    ("accuracy", make(task_items(lost=60, gained=40)), Outcome.PASS),
    ("accuracy", make(task_items(lost=75, gained=40)), Outcome.INCONCLUSIVE),
    ("accuracy", make(task_items(lost=120, gained=40)), Outcome.FAIL),
    ("flips", make(task_items(lost=130, gained=130)), Outcome.PASS),
    ("flips", make(task_items(lost=150, gained=150)), Outcome.INCONCLUSIVE),
    ("flips", make(task_items(lost=180, gained=180)), Outcome.FAIL),
    ("kl", make(texts=text_items(kl=0.016)), Outcome.PASS),
    ("kl", make(texts=text_items(kl=0.028)), Outcome.INCONCLUSIVE),
    ("kl", make(texts=text_items(kl=0.033)), Outcome.FAIL),
    ("top_token", make(texts=text_items(agree=0.93)), Outcome.PASS),
    ("top_token", make(texts=text_items(agree=0.91)), Outcome.INCONCLUSIVE),
    ("top_token", make(texts=text_items(agree=0.89)), Outcome.FAIL),
    ("perplexity", make(texts=text_items(worse_by=0.01)), Outcome.PASS),
    ("perplexity", make(texts=text_items(worse_by=0.049)), Outcome.INCONCLUSIVE),
    ("perplexity", make(texts=text_items(worse_by=0.09)), Outcome.FAIL),
    ("shadow_kl", make(shadow=shadow_items(kl=0.022)), Outcome.PASS),
    ("shadow_kl", make(shadow=shadow_items(kl=0.04)), Outcome.INCONCLUSIVE),
    ("shadow_kl", make(shadow=shadow_items(kl=0.045)), Outcome.FAIL),
    ("shadow_agreement", make(shadow=shadow_items(agree=0.925)), Outcome.PASS),
    ("shadow_agreement", make(shadow=shadow_items(agree=0.90)), Outcome.INCONCLUSIVE),
    ("shadow_agreement", make(shadow=shadow_items(agree=0.875)), Outcome.FAIL),
    ("parity_error", make(parity=parity_items(worst=9e-3)), Outcome.PASS),
    ("parity_error", make(parity=parity_items(worst=0.02)), Outcome.FAIL),
    ("parity_mean_error", make(parity=parity_items(worst=0.02)), Outcome.PASS),
    ("parity_mean_error", make(parity=parity_items(worst=0.04)), Outcome.FAIL),
    ("parity_position_error", make(parity=parity_items(worst=0.02)), Outcome.PASS),
    ("parity_position_error", make(parity=parity_items(worst=0.03)), Outcome.FAIL),
    ("parity_attention_error", of_attention(0.0019, 0.0099), Outcome.PASS),
    ("parity_attention_error", of_attention(0.0021, 0.0099), Outcome.FAIL),
    ("parity_attention_position_error", of_attention(0.0019, 0.0099), Outcome.PASS),
    ("parity_attention_position_error", of_attention(0.0019, 0.0101), Outcome.FAIL),
    ("parity_document_kl", make(parity=parity_items(kl=9e-3)), Outcome.PASS),
    ("parity_document_kl", make(parity=parity_items(kl=2e-2)), Outcome.FAIL),
    ("document_kl", make(texts=text_items(kl=0.09)), Outcome.PASS),
    ("document_kl", make(texts=text_items(kl=0.1)), Outcome.FAIL),
    ("prompt_kl", make(shadow=shadow_items(kl=0.22)), Outcome.PASS),
    ("prompt_kl", make(shadow=shadow_items(kl=0.24)), Outcome.FAIL),
    ("parity_experts", ALL_EXPERTS, Outcome.PASS),
    ("parity_experts", of_experts([(200, 200, 0, 0), (100, 200, 100, 0)]), Outcome.INCONCLUSIVE),  # three of four
    ("parity_routing", of_experts([(200, 200, 0, 0), (0, 0, 200, 200)], differ=2), Outcome.PASS),  # of 200
    ("parity_routing", of_experts([(200, 200, 0, 0), (0, 0, 200, 200)], differ=3), Outcome.FAIL),
    ("parity_kl", make(parity=parity_items(kl=4e-4)), Outcome.PASS),
    ("parity_kl", make(parity=parity_items(kl=2e-3)), Outcome.FAIL),
    ("parity_top_token", make(parity=parity_items(agree=1.0)), Outcome.PASS),
    ("parity_top_token", make(parity=parity_items(agree=0.995)), Outcome.INCONCLUSIVE),
    ("parity_top_token", make(parity=parity_items(agree=0.99)), Outcome.FAIL),
    ("decode_speed_b1", make(samples=timed(speed(1.0, 1.3, 1.1, 1.2, 1.2))), Outcome.PASS),
    ("decode_speed_b1", make(samples=timed(speed(0.9, 1.3, 1.1, 1.2, 1.2))), Outcome.INCONCLUSIVE),
    ("decode_speed_b1", make(samples=timed(speed(0.9, 0.8, 0.7, 0.9, 0.9))), Outcome.FAIL),
    (
        "decode_speed_b16",
        make(samples=timed(speed(*[2.0] * 5), speed(0.9, 0.8, 0.7, 0.9, 0.9, batch=16))),
        Outcome.FAIL,
    ),
    ("executed", make(target="sm89", hardware=(OTHER_MACHINE,)), Outcome.INCONCLUSIVE),
    (
        "quantized",
        with_reports(make(), proof=proof(ok=False, reasons=("scales are all one",), bits_per_weight=32.0)),
        Outcome.FAIL,
    ),
]


@pytest.mark.parametrize(
    ("name", "evidence", "outcome"), BOUNDARIES, ids=[f"{name}-{outcome}" for name, _, outcome in BOUNDARIES]
)
def test_boundaries(name: str, evidence: Evidence, outcome: Outcome):
    verdict = judge(evidence, DEFAULT)
    check = verdict.check(name)
    assert check.outcome is outcome, check.reason
    assert SEVERITY[verdict.outcome] >= SEVERITY[outcome]
    if check.lower is not None and check.upper is not None and check.value is not None:
        assert check.lower <= check.value <= check.upper


STARVED = {
    "items": ("accuracy", make(task_items(n=300, lost=0, gained=0)), "300 of at least 2,500 items: 2,200 more needed"),
    "documents": ("kl", make(texts=text_items(n=299)), "299 of at least 300 documents: 1 more needed"),
    "prompts": ("shadow_kl", make(shadow=shadow_items(n=150)), "150 of at least 300 prompts: 150 more needed"),
    "parity": ("parity_kl", make(parity=parity_items(n=5)), "5 of at least 30 documents: 25 more needed"),
    "products": ("parity_error", make(parity=parity_items(n=29)), "29 of at least 30 documents: 1 more needed"),
    "prefill": (
        "prefill_speed_b1",
        make(samples=(speed(*[3.0] * 5), speed(*[3.0] * 4, phase="prefill"))),
        "4 of at least 5 repeats: 1 more needed",
    ),
    "repeats": ("decode_speed_b1", make(samples=timed(speed(3.0))), "1 of at least 5 repeats: 4 more needed"),
}


@pytest.mark.parametrize("kind", STARVED)
def test_starved_evidence_is_inconclusive_and_says_how_much_is_missing(kind: str):
    name, evidence, reason = STARVED[kind]
    verdict = judge(evidence, DEFAULT)
    assert verdict.check(name).reason == reason
    assert (verdict.outcome, verdict.exit_code) == (Outcome.INCONCLUSIVE, ExitCode.INCONCLUSIVE)


def test_too_few_items_do_not_fail_either():
    check = judge(make(task_items(n=100, lost=60, gained=0)), DEFAULT).check("accuracy")
    assert check.outcome is Outcome.INCONCLUSIVE


def test_a_product_that_is_off_fails_however_few_documents_show_it():
    """Unlike a mean, a largest error only grows with more documents."""
    check = judge(make(parity=parity_items(n=5, worst=0.02)), DEFAULT).check("parity_error")
    assert check.outcome is Outcome.FAIL
    assert check.reason.startswith("layers.3.mlp.down_proj.weight is off by 0.02, more than 0.01")


def test_one_document_bounds_nothing_even_if_one_is_enough():
    verdict = judge(make(texts=text_items(n=1, kl=0.0)), gate_section(min_text_documents=1))
    assert verdict.check("kl").outcome is Outcome.INCONCLUSIVE
    json.dumps(verdict.model_dump(mode="json"), allow_nan=False)


def test_inconclusive_says_how_many_more_would_decide():
    reason = judge(make(task_items(lost=75, gained=40)), DEFAULT).check("accuracy").reason
    said = re.fullmatch(
        r"-0.02 lies between the 95 % bounds -0.02\d+ and -0.00\d+: about ([\d,]+) more items would decide", reason
    )
    assert said, reason
    # The textbook sample size takes the churn for the variance; ours takes the variance at the margin.
    textbook = 6.18 * (115 / 2500) / (0.02 - 35 / 2500) ** 2 - 2500
    assert int(said[1].replace(",", "")) == pytest.approx(textbook, rel=0.1)


def test_heavy_damage_fails():
    """What 4-bit rounding of everything does to the default model: KL 0.34, 68 % of top tokens kept."""
    damaged = make(
        task_items(lost=500, gained=150),
        text_items(kl=0.345, agree=0.685, worse_by=0.35),
        shadow_items(kl=0.3, agree=0.7),
    )
    verdict = judge(damaged, DEFAULT)
    failed = {check.name for check in verdict.checks if check.outcome is Outcome.FAIL}
    assert failed == {
        *("accuracy", "accuracy_worst_task", "flips", "kl", "top_token", "perplexity", "document_kl"),
        *("shadow_kl", "shadow_agreement", "prompt_kl"),
    }
    assert (verdict.outcome, verdict.exit_code) == (Outcome.FAIL, ExitCode.GATE_FAILED)


def compiled(**reports: Report[Any, Any]) -> Evidence:
    """Of an engine that was compiled and never executed."""
    return make(target="sm89", reports={"proof": proof(), **reports})


def test_compiled_but_never_executed_is_inconclusive():
    verdict = judge(compiled(), DEFAULT)
    assert verdict.outcome is Outcome.INCONCLUSIVE and verdict.executed_on is None
    assert verdict.check("executed").reason == (
        "not executed on sm89; missing: EvalReport, ShadowReport, ServingReport, ParityReport, SourceReport, Benchmark"
    )


def portable(**changes: Any) -> Report[Any, Any]:
    items = text_items(3)
    fields: dict[str, Any] = {"built_from": QUANTIZED, "baseline": BASELINE, "documents": 3, "tokens": 600}
    fields |= {"kl": 0.01, "top_token": 0.95, "perplexity_ratio": 1.005}
    return report("PortableReport", PortableReport(**fields | changes), items)


def test_evidence_from_another_processor_informs_and_decides_nothing():
    verdict = judge(compiled(portable=portable()), DEFAULT)
    assert [check.name for check in verdict.checks] == ["executed", "quantized"]
    assert {fact.name: fact.value for fact in verdict.facts}["portable_kl"] == 0.01
    assert verdict.evidence["PortableReport"] == "digest of PortableReport"
    with pytest.raises(EvidenceError, match="PortableReport's QuantizedModel is dddd"):
        judge(compiled(portable=portable(built_from=CHAMPION)), DEFAULT)


@pytest.mark.parametrize("name", ["tasks", "shadow", "parity", "serving", "source", "speed"])
def test_a_report_taken_on_another_machine_does_not_pass(name: str):
    shares = ("tasks", "text") if name == "tasks" else (name,)
    evidence = make()
    for kind in shares:
        evidence = with_report(kind, evidence, executed_on=OTHER_MACHINE)
    verdict = judge(evidence, DEFAULT)
    check = verdict.check("executed")
    assert (check.outcome, verdict.outcome) == (Outcome.INCONCLUSIVE, Outcome.INCONCLUSIVE)
    artifact_type = evidence.reports[name].ref.artifact_type
    assert check.reason.startswith(f"not executed on cpu; {artifact_type}: the candidate was built for other hardware")
    assert "lacks avx2" in check.reason and verdict.executed_on != "cpu"


def test_a_verdict_names_the_one_level_that_its_reports_were_taken_at():
    levels = tuple(
        MACHINE.model_copy(update={"level": level, "features": features, "more_features": True})
        for level, features in (("best", ("avx512f",)), ("least", ("avx2",)))
    )
    evidence = make(hardware=levels)
    for kind in ("tasks", "text", "shadow", "parity", "serving", "source", "speed"):
        evidence = with_report(kind, evidence, executed_on=MACHINE.model_copy(update={"level": "least"}))
    verdict = judge(evidence, DEFAULT)
    assert (verdict.outcome, verdict.executed_on) == (Outcome.PASS, "cpu:least")
    assert verdict.check("executed").reason == "ran on cpu:least"
    both = OTHER_MACHINE.model_copy(update={"level": "best"})
    mixed = judge(with_report("parity", evidence, executed_on=both), DEFAULT)
    assert mixed.check("executed").outcome is Outcome.INCONCLUSIVE
    assert "reports were taken at the levels best, least" in mixed.check("executed").reason
    lacking = with_report("parity", evidence, executed_on=MACHINE.model_copy(update={"level": "best"}))
    assert "best: this CPU lacks avx512f" in judge(lacking, DEFAULT).check("executed").reason


def test_an_emulation_is_no_evidence_of_hardware():
    """All of it may pass at the level where kernels are emulated, which is all that such a bundle is for."""
    emulated = MACHINE.model_copy(update={"level": "host", "emulated": True, "more_features": True})
    gpu = MACHINE.model_copy(update={"level": "sm90", "features": ("avx2", "sm90"), "more_features": True})
    for hardware, outcome in (((gpu, emulated), Outcome.INCONCLUSIVE), ((emulated,), Outcome.PASS)):
        evidence = make(hardware=hardware)
        for kind in ("tasks", "text", "shadow", "parity", "serving", "source", "speed"):
            evidence = with_report(kind, evidence, executed_on=emulated)
        verdict = judge(evidence, DEFAULT)
        assert (verdict.check("executed").outcome, verdict.outcome) == (outcome, outcome)
        assert ("kernels were emulated at the level host" in verdict.check("executed").reason) == (gpu in hardware)
        assert (verdict.executed_on == "cpu:host") == (gpu not in hardware)


def test_reports_of_other_libraries_do_not_pass():
    elsewhere = MACHINE.model_copy(update={"libraries": {"onnxruntime": "0.9"}})
    check = judge(with_report("parity", executed_on=elsewhere), DEFAULT).check("executed")
    assert check.outcome is Outcome.INCONCLUSIVE and "onnxruntime is 0.9, not 1.0" in check.reason


def test_fail_outweighs_inconclusive_and_nothing_is_not_a_pass():
    assert combine([Outcome.PASS, Outcome.INCONCLUSIVE, Outcome.FAIL]) is Outcome.FAIL
    assert combine([Outcome.INCONCLUSIVE, Outcome.PASS]) is Outcome.INCONCLUSIVE
    assert combine([Outcome.PASS]) is Outcome.PASS
    assert combine([]) is Outcome.INCONCLUSIVE


def test_slices_and_facts_inform_without_deciding():
    verdict = judge(make(task_items(lost=60, gained=40)), DEFAULT)
    assert [(part.task, part.items) for part in verdict.slices] == [("arc", 2000), ("piqa", 500)]
    assert sum(part.lost for part in verdict.slices) == 60
    assert all(part.lower <= part.difference <= part.upper for part in verdict.slices)
    facts = {fact.name: fact.value for fact in verdict.facts}
    assert facts["exact_match"] == 100 / 300
    assert facts["changed_choices"] == 100 / 2500


# refusals


def with_item(kind: str, evidence: Evidence | None = None, **changes: Any) -> Evidence:
    """Sound evidence, but for one changed item of a kind."""
    evidence = evidence or make()
    first, *others = evidence.reports[kind].items
    items = (first.model_copy(update=changes), *others)
    return with_reports(evidence, **{kind: replace(evidence.reports[kind], items=items)})


def with_copy(kind: str, **changes: Any) -> Evidence:
    """Sound evidence, but its last item is a copy of the second under another name."""
    evidence = make()
    items = evidence.reports[kind].items
    tasks = {"task": items[-1].task} if kind == "tasks" else {}
    items = (*items[:-1], items[1].model_copy(update={**tasks, **changes}))
    return with_reports(evidence, **{kind: replace(evidence.reports[kind], items=items)})


def with_report(kind: str, evidence: Evidence | None = None, **changes: Any) -> Evidence:
    evidence = evidence or make()
    found = evidence.reports[kind]
    return with_reports(evidence, **{kind: replace(found, record=found.record.model_copy(update=changes))})


def with_digest(kind: str, digest: str) -> Evidence:
    evidence = make()
    found = evidence.reports[kind]
    return with_reports(evidence, **{kind: replace(found, ref=ArtifactRef(found.ref.artifact_type, digest))})


def with_sample(baseline: tuple[float, ...], candidate: tuple[float, ...]) -> Evidence:
    sample = SpeedSample(batch=1, phase="decode", baseline_tokens_per_s=baseline, candidate_tokens_per_s=candidate)
    return make(samples=timed(sample))


def with_items(evidence: Evidence, kind: str, change: Callable[[Any], Any]) -> Evidence:
    found = evidence.reports[kind]
    return with_reports(evidence, **{kind: replace(found, items=tuple(map(change, found.items)))})


def with_served(kept: Callable[[ServedItem], bool]) -> Evidence:
    """Only some of the served items, and a report that claims no more."""
    found = make().reports["serving"]
    items = tuple(item for item in found.items if kept(item))
    record = found.record.model_copy(update={"items": len(items)})
    return with_reports(make(), serving=replace(found, record=record, items=items))


def with_pressed(**changes: Any) -> Evidence:
    found = make().reports["serving"]
    record = found.record.model_copy(update={"pressure": pressure(**changes)})
    return with_reports(make(), serving=replace(found, record=record))


REFUSALS: dict[str, tuple[Evidence, str]] = {
    "no task items": (make(tasks=()), "EvalReport has no task items"),
    "no text items": (make(texts=()), "EvalReport has no text items"),
    "no shadow items": (make(shadow=()), "ShadowReport has no prompts"),
    "no parity items": (make(parity=()), "ParityReport has no documents"),
    "no speed samples": (make(samples=()), "Benchmark has no decode samples at batch 1"),
    "only prefill": (make(samples=timed()), "Benchmark has no decode samples at batch 1"),
    "only decode": (make(samples=(speed(1.0, 1.0, 1.0),)), "Benchmark has no prefill samples"),
    "a batch left out": (
        with_reports(make(), **benchmark(timed(speed(1.0), speed(1.0, batch=4)), batches=(1, 4, 16))),
        "Benchmark has no decode samples at batch 16",
    ),
    "prefill at a batch is no decode": (
        with_reports(make(), **benchmark((speed(1.0), speed(1.0, phase="prefill", batch=4)), batches=(1, 4))),
        "Benchmark has no decode samples at batch 4",
    ),
    "no batch wanted": (
        with_reports(make(), **benchmark(timed(), batches=())),
        "Benchmark was asked for no batch",
    ),
    "no evaluation": (
        without("tasks", "text"),
        "EvalReport is missing although the engine was executed",
    ),
    "no benchmark": (without("speed"), "Benchmark is missing although the engine was executed"),
    "tasks without text": (without("text"), "EvalReport is missing although the engine was executed"),
    "no proof": (without("proof"), "QuantizedModel is missing"),
    "no digest": (with_digest("shadow", ""), "no digest of ShadowReport"),
    "two evaluations": (with_digest("text", "another"), "two different artifacts EvalReport"),
    "same engine": (make(baseline=CANDIDATE), "baseline and candidate are the same engine"),
    "unnamed engine": (make(candidate=""), "candidate has no digest"),
    "foreign baseline": (with_report("tasks", baseline=CHAMPION), "EvalReport's baseline is dddddddddddd…, not bbbb"),
    "foreign candidate": (with_report("tasks", candidate=CHAMPION), "EvalReport's candidate is dddd"),
    "foreign shadow": (with_report("shadow", candidate=CHAMPION), "ShadowReport's candidate is dddd"),
    "foreign parity": (with_report("parity", candidate=CHAMPION), "ParityReport's candidate is dddd"),
    "foreign weights": (with_report("parity", built_from=CHAMPION), "ParityReport's QuantizedModel is dddd"),
    "foreign speed": (with_report("speed", baseline=CHAMPION), "Benchmark's baseline is dddd"),
    "foreign proof": (
        with_digest("proof", CHAMPION),
        "the proof of quantization is of QuantizedModel dddddddddddd…, not of QuantizedModel 9999",
    ),
    "a lowered graph for a quantized model": (
        make(built_from=ArtifactRef("LoweredGraph", QUANTIZED)),
        "is of QuantizedModel 999999999999…, not of LoweredGraph 9999",
    ),
    "self replay": (
        with_report("shadow", champion=CANDIDATE, champion_is_baseline=False),
        "replayed the candidate against itself",
    ),
    "champion mislabelled": (with_report("shadow", champion=CHAMPION), "champion dddddddddddd… is the baseline"),
    "fewer items than claimed": (with_report("tasks", tasks={"arc": 2000, "piqa": 501}), "task piqa: 500 items"),
    "unclaimed task": (with_report("tasks", tasks={"arc": 2000}), "task piqa: 500 items, but EvalReport claims 0"),
    "fewer documents": (with_report("text", documents=301), "EvalReport has 300 text items, but claims 301"),
    "fewer prompts": (with_report("shadow", prompts=199), "ShadowReport has 300 prompts, but claims 199"),
    "fewer parity": (with_report("parity", documents=41), "ParityReport has 40 documents, but claims 41"),
    "item twice": (with_item("tasks", doc_id=5), "task item piqa/5 more than once"),
    "document twice": (with_item("text", doc_hash="text1"), "document text1 more than once"),
    "prompt twice": (with_item("shadow", prompt_hash="shadow1"), "prompt shadow1 more than once"),
    "parity twice": (with_item("parity", doc_hash="p1"), "parity document p1 more than once"),
    "question under another number": (with_copy("tasks", doc_id=9999), "with the same document: arc/9999 is arc/1"),
    "question under another hash": (
        with_copy("tasks", doc_id=9999, doc_hash="new", prompt_hash="new", target_hash="new"),
        "1 of 2500 task items are copies, with the same log-likelihoods: arc/9999 is arc/1",
    ),
    "document under another hash": (with_copy("text", doc_hash="new"), "same numbers: new is text1"),
    "prompt under another hash": (with_copy("shadow", prompt_hash="new"), "same numbers: new is shadow1"),
    "parity under another hash": (with_copy("parity", doc_hash="new"), "same numbers: new is p1"),
    "batch twice": (make(samples=timed(speed(1.0), speed(1.0))), "speed sample decode at batch 1 more than once"),
    "no hash": (with_item("tasks", prompt_hash=""), "1 of 2500 task items lack a pairing hash: piqa/0"),
    "NaN answer": (with_item("tasks", candidate_loglikelihoods=(math.nan, -1.0)), "non-finite log-likelihoods"),
    "lost option": (with_item("tasks", candidate_loglikelihoods=(-1.0,)), "no log-likelihoods, or unequally"),
    "no options": (
        with_item("tasks", baseline_loglikelihoods=(), candidate_loglikelihoods=()),
        "no log-likelihoods, or unequally",
    ),
    "choice out of range": (with_item("tasks", candidate_choice=2), "an answer that does not exist"),
    "wrong mark": (with_item("tasks", candidate_score=1.0), "marked right or wrong against their own choice"),
    "no long text": (with_report("text", max_tokens=512), "EvalReport scores 0 positions of a long document, of 512"),
    "short parity": (with_report("parity", max_tokens=201), "ParityReport reaches 200 positions, of 201"),
    "other linears": (with_item("parity", errors={"one": 0.0}), "compares other linears on some documents"),
    "a text without visits": (with_item("parity", ALL_EXPERTS, visits={}), "does not count the visits of every expert"),
    "a text without choices": (
        with_item("parity", ALL_EXPERTS, routed={}),
        "does not compare on every document which experts were chosen",
    ),
    "a text without free choices": (
        with_item("parity", ALL_EXPERTS, free_kl_sum=0.0, free_agree=200, free_routed={}),
        "does not compare which experts were chosen where both run freely",
    ),
    "more choices than tokens": (
        with_item("parity", ALL_EXPERTS, routed={EXPERTS: 201}),
        "have more or fewer tokens that choose the same experts than there are",
    ),
    "fewer experts": (
        with_item("parity", ALL_EXPERTS, visits={EXPERTS: (200, 200, 0)}),
        "does not count the visits of every expert",
    ),
    "experts without outputs": (
        with_report("parity", make(parity=parity_items()), experts={EXPERTS: 4}),
        "names experts whose outputs it does not compare",
    ),
    "a text without attention": (
        with_item("parity", of_attention(1e-4, 1e-4), attention_errors={}),
        "does not compare every attention on every document",
    ),
    "attention of no linear": (
        with_items(
            with_report("parity", attention=("other.500",)),
            "parity",
            lambda item: item.model_copy(update={"attention_errors": {"other.500": 0.0}}),
        ),
        "names attention before linears whose outputs it does not compare",
    ),
    "NaN of attention": (
        with_item("parity", of_attention(1e-4, 1e-4), attention_errors={BEHIND: math.nan}),
        "have no finite error",
    ),
    "NaN of attention at a position": (
        with_item("parity", of_attention(1e-4, 1e-4), attention_position_error=math.nan),
        "have no finite error",
    ),
    "a token too many": (
        with_item("parity", ALL_EXPERTS, visits={EXPERTS: (200, 200, 1, 0)}),
        "have experts that more or fewer tokens chose than there are",
    ),
    "no errors": (with_item("parity", errors={}), "parity items have no finite error"),
    "few rows": (with_report("parity", vocabulary=11), "compares 10 rows of the embedding, of 11 tokens"),
    "NaN rows": (
        with_report("parity", head=TABLE.model_copy(update={"error": math.nan})),
        "no finite error of the",
    ),
    "no path": (with_served(lambda i: i.path != "copy"), "ServingReport has nothing on the path 'copy'"),
    "nothing moved": (with_served(lambda i: i.path != "moved"), "ServingReport has nothing on the path 'moved'"),
    "no slot": (
        with_served(lambda i: (i.path, i.slot) != ("reuse", 1)),
        "ServingReport has nothing of slots 1 on the path 'reuse'",
    ),
    "no full batch": (
        with_served(lambda i: i.batch == 1),
        "ServingReport has no step of batch size 2 on the path 'decode'",
    ),
    "no later batch": (
        with_served(lambda i: i.first_slot == 0 or i.path != "greedy"),
        "ServingReport has no batch behind the first slot on the path 'greedy'",
    ),
    "not to the end": (
        with_report("serving", max_tokens=65),
        "ServingReport reaches position 63 on the path 'decode', not 64",
    ),
    "more slots": (with_report("serving", slots=3), "ServingReport has nothing of slots 2 on the path 'pieces'"),
    "no pressure": (
        with_report("serving", pressure=pressure(preempted=0)),
        "ServingReport was not under pressure: no request lost its blocks",
    ),
    "no greedy requests alone": (
        with_report("serving", pressure=pressure().model_copy(update={"steps_at_once": 2, "steps_ahead": 9})),
        "ServingReport has no answers under pressure with ahead",
    ),
    "no second turns": (
        with_report("serving", pressure=pressure(PRESSED)),
        "ServingReport has no answers under pressure with turns",
    ),
    "no step ahead": (
        with_report("serving", pressure=pressure((*PRESSED, TURNS, AHEAD)).model_copy(update={"steps_at_once": 2})),
        "ServingReport has no step that began before the one before had ended",
    ),
    "no hit": (with_report("serving", pressure=pressure(cached=0)), "no prompt was found again"),
    "no hit of an engine without blocks": (
        with_report("serving", pressure=pressure(cached=0, preempted=0).model_copy(update={"scarce": False})),
        "no prompt was found again",
    ),
    "one kind of answers": (
        with_report("serving", pressure=pressure(["greedy"])),
        "ServingReport has no answers under pressure with penalties",
    ),
    "no answers": (
        with_report("serving", pressure=pressure(answers=0)),
        "impossible numbers of answers under pressure",
    ),
    "fewer requests under pressure": (
        with_pressed(answers=8),
        "ServingReport has 8 answers under pressure with greedy, not 10 as it claims",
    ),
    "NaN gap": (with_item("serving", gap=math.nan), "served items have no finite error, gap or KL: path 'pieces'"),
    "outside its batch": (with_item("serving", slot=1), "lie in slots that their batch does not have"),
    "no prompt": (
        with_items(make(), "source", lambda i: i.model_copy(update={"form": "document"})),
        "SourceReport has no prompt",
    ),
    "short source": (
        with_report("source", max_tokens=65),
        "scores 64 positions of a long document, of 65",
    ),
    "no files": (with_report("source", files=()), "SourceReport does not compare tokenizers and stop tokens"),
    "no tokens": (with_item("text", tokens=0, agree=0), "text items have no tokens"),
    "too much agreement": (with_item("text", agree=201), "agree on more tokens than they have"),
    "negative agreement": (with_item("parity", agree=-1), "agree on more tokens than they have, or on fewer"),
    "NaN KL": (with_item("text", kl_sum=math.nan), "text items have a non-finite or negative KL: text0"),
    "infinite KL": (with_item("shadow", kl_sum=math.inf), "shadow items have a non-finite or negative KL"),
    "negative KL": (with_item("parity", kl_sum=-0.1), "parity items have a non-finite or negative KL"),
    "mean above max": (with_item("text", kl_max=0.001), "text items have a mean KL above their largest"),
    "NaN max": (with_item("parity", kl_max=math.nan), "parity items have a mean KL above their largest"),
    "NaN likelihood": (with_item("text", candidate_nll=math.nan), "non-finite or negative log-likelihood"),
    "negative likelihood": (with_item("text", baseline_nll=-5.0), "non-finite or negative log-likelihood"),
    "long response": (with_item("shadow", candidate_tokens=49), "an impossible response length"),
    "exact, yet divergent": (with_item("shadow", first_divergence=3), "an exact match that diverges"),
    "exact, yet longer": (with_item("shadow", candidate_tokens=41), "an exact match of unequal length"),
    "late divergence": (with_item("shadow", exact_match=False, first_divergence=41), "diverge behind the end"),
    "unpaired repeats": (with_sample((1.0, 2.0), (1.0,)), "speed samples have unpaired repeats: decode at batch 1"),
    "no repeats": (with_sample((), ()), "have no repeats"),
    "zero speed": (with_sample((0.0,), (1.0,)), "a non-finite or non-positive speed"),
    "NaN speed": (with_sample((1.0,), (math.nan,)), "a non-finite or non-positive speed"),
    "proof against itself": (
        with_report("proof", reasons=("scales are all one",)),
        "ok=True with 1 reasons against it",
    ),
    "unexplained failure": (with_report("proof", ok=False), "ok=False with 0 reasons against it"),
    "NaN bits": (with_report("proof", bits_per_weight=math.nan), "claims nan bits per weight"),
}


@pytest.mark.parametrize("kind", REFUSALS)
def test_unsound_evidence_is_refused(kind: str):
    evidence, message = REFUSALS[kind]
    with pytest.raises(EvidenceError) as refusal:
        judge(evidence, DEFAULT)
    assert message in str(refusal.value)
    assert "remedy" in str(refusal.value)


def test_every_problem_is_listed_at_once():
    broken = with_item("text", kl_sum=math.nan)
    reports = {name: r for name, r in broken.reports.items() if name != "speed"}
    evidence = replace(broken, baseline=CHAMPION, reports=reports)
    with pytest.raises(EvidenceError) as refusal:
        judge(evidence, DEFAULT)
    text = str(refusal.value)
    assert "7 problems" in text
    for part in ("Benchmark is missing", "EvalReport's baseline", "non-finite", "its champion"):
        assert part in text


def test_rounding_below_zero_is_no_problem():
    assert judge(with_item("parity", kl_sum=-1e-7), DEFAULT).outcome is Outcome.PASS


# what must hold for any evidence


@given(st.randoms(use_true_random=False))
@settings(max_examples=10, deadline=None)
def test_order_of_evidence_changes_nothing(random: Any):
    def shuffled(items: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(random.sample(items, len(items)))

    evidence = make(
        task_items(300, 9, 5),
        text_items(20),
        shadow_items(20),
        parity_items(20),
        samples=timed(speed(1.0, 2.0, 1.1, 1.2, 1.3), speed(1.3, 1.2, 1.4, 1.1, 1.5, batch=4)),
    )
    reports = {name: replace(r, items=shuffled(r.items)) for name, r in evidence.reports.items()}
    other = replace(evidence, reports=reports)
    assert judge(other, SMALL) == judge(evidence, SMALL)


def lose_answers(count: int) -> Callable[[Evidence], Evidence]:
    def worsen(evidence: Evidence) -> Evidence:
        right = [i for i in evidence.reports["tasks"].items if i.baseline_score and i.candidate_score]
        lost, update = {item.doc_id for item in right[:count]}, {"candidate_choice": 1, "candidate_score": 0.0}
        return with_items(evidence, "tasks", lambda i: i.model_copy(update=update) if i.doc_id in lost else i)

    return worsen


def scale_kl(factor: float) -> Callable[[Evidence], Evidence]:
    def scaled(item: Any) -> Any:
        fields = {"kl_sum", "kl_max"} & type(item).model_fields.keys()
        update = {name: getattr(item, name) * factor for name in fields}
        if isinstance(item, TextItem):
            update["ranges"] = tuple(kl * factor for kl in item.ranges)
        return item.model_copy(update=update)

    def worsen(evidence: Evidence) -> Evidence:
        for kind in ("text", "shadow", "parity"):
            evidence = with_items(evidence, kind, scaled)
        return evidence

    return worsen


def raise_nll(nats_per_token: float) -> Callable[[Evidence], Evidence]:
    def raised(item: TextItem) -> TextItem:
        return item.model_copy(update={"candidate_nll": item.candidate_nll + nats_per_token * item.tokens})

    return lambda evidence: with_items(evidence, "text", raised)


def slow_down(factor: float) -> Callable[[Evidence], Evidence]:
    def slowed(sample: SpeedSample) -> SpeedSample:
        speeds = tuple(speed / factor for speed in sample.candidate_tokens_per_s)
        return sample.model_copy(update={"candidate_tokens_per_s": speeds})

    return lambda evidence: with_items(evidence, "speed", slowed)


HARM = st.one_of(
    st.integers(0, 60).map(lose_answers),
    st.floats(1, 40).map(scale_kl),
    st.floats(0, 0.1).map(raise_nll),
    st.floats(1, 3).map(slow_down),
)


@given(
    lost=st.integers(0, 30),
    gained=st.integers(0, 30),
    kl=st.floats(0.001, 0.05),
    worse_by=st.floats(-0.01, 0.06),
    ratio=st.floats(0.7, 2.0),
    harm=HARM,
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_worse_evidence_never_improves_a_check(
    lost: int, gained: int, kl: float, worse_by: float, ratio: float, harm: Callable[[Evidence], Evidence]
):
    before = make(
        task_items(300, lost, gained),
        text_items(80, kl=kl, worse_by=worse_by),
        shadow_items(80, kl=kl),
        parity_items(40),
        samples=timed(speed(ratio, ratio * 1.1, ratio * 0.95, ratio, ratio * 1.05)),
    )
    good, bad = judge(before, SMALL), judge(harm(before), SMALL)
    for check in good.checks:
        assert SEVERITY[bad.check(check.name).outcome] >= SEVERITY[check.outcome], check.name
    assert SEVERITY[bad.outcome] >= SEVERITY[good.outcome]


@given(items=st.integers(1, 2499), documents=st.integers(1, 299), starved=st.sampled_from(["items", "documents"]))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_starved_evidence_never_passes(items: int, documents: int, starved: str):
    evidence = (
        make(task_items(items, 0, 0))
        if starved == "items"
        else make(texts=text_items(documents, kl=0, agree=1, worse_by=0))
    )
    assert judge(evidence, DEFAULT).outcome is Outcome.INCONCLUSIVE


@given(st.integers(1, 200))
@settings(max_examples=15, deadline=None)
def test_fewer_reports_never_help(keep: int):
    """Dropping task items from passing evidence leaves it passing or inconclusive, whatever is dropped."""
    items = task_items(300, 2, 2)
    outcome = judge(make(items[: keep + 4], text_items(12), shadow_items(12)), SMALL).check("accuracy").outcome
    assert outcome is not Outcome.FAIL
    assert (outcome is Outcome.INCONCLUSIVE) or keep + 4 >= 100


# the written verdict


def test_table_has_a_row_per_check_and_words_in_every_reason():
    verdict = judge(make(task_items(lost=75, gained=40)), DEFAULT)
    rows = verdict.explain()
    assert len(rows) == len(verdict.checks)
    assert {len(row) for row in rows} == {len(COLUMNS)}
    assert all(row[0] in Outcome.__members__ and row[-1] for row in rows)
    kl = rows[[check.name for check in verdict.checks].index("kl")]
    assert kl[:4] == ("PASS", "mean KL on held-out text, nats", "0.01", "≤ 0.03")
    assert kl[5] == "60000 tokens in 300 clusters"


def test_gate_writes_record_and_metrics(tmp_path: Path):
    evidence = make(task_items(lost=75, gained=40), samples=timed(speed(0.5, 0.6, 0.7, 0.5, 0.6)))
    artifact = gate(evidence, DEFAULT, tmp_path / "verdict")
    artifact.verify()
    assert artifact.record == judge(evidence, DEFAULT)
    assert artifact.parents["evaluation"] == ArtifactRef("EvalReport", "digest of EvalReport")
    assert artifact.parents["quantized"] == ArtifactRef("QuantizedModel", QUANTIZED)
    metrics = json.loads((artifact.folder / "metrics.json").read_text())
    assert metrics["kl"] == pytest.approx(0.01)
    assert metrics["exit_code"] == 1
    assert all(isinstance(value, float) for value in metrics.values())


def test_same_evidence_gives_the_same_digest(tmp_path: Path):
    assert gate(make(), DEFAULT, tmp_path / "a").digest == gate(make(), DEFAULT, tmp_path / "b").digest


def numbers(digest: str) -> EngineNumbers:
    return EngineNumbers(
        digest=digest,
        ttft_ms=60.0,
        prefill_tokens_per_s=2000.0,
        itl_ms={1: 10.0},
        decode_tokens_per_s={1: 100.0},
        resident_share=1.0,
        page_faults=0,
        peak_memory_mb=400.0,
        kv_token_bytes=1024,
        bundle_mb=120.0,
        roofline_share=0.5,
        cost_per_million_tokens=0.04,
    )


def quantized_model(by: Recipe | None = None) -> QuantizedModel:
    counts: dict[str, Any] = {"quantized_tensors": 1, "planned_tensors": 1, "size_bytes": 1, "size_ratio": 0.4}
    return QuantizedModel(
        asked=by.quantize if by else Quantize(),
        linears=(),
        kv_cache=KVScheme(dtype="float32", granularity="per_channel"),
        proof=QuantizationProof(**counts, bits_per_weight=6.2, planned_bits_per_weight=6.2, reasons=()),
        source_bytes=1,
        notes=(),
    )


def write_reports(folder: Path, evidence: Evidence) -> None:
    """The folders that blocks are drawn from, as the stages of the evidence leave them."""
    for kind in kinds():
        if kind.items_file and (found := evidence.reports.get(kind.name)):
            (folder / kind.folder).mkdir(parents=True, exist_ok=True)
            write_items(folder / kind.folder / kind.items_file, found.items)
    for name in ("tasks", "shadow", "parity", "serving", "source"):
        kind = next(kind for kind in kinds() if kind.name == name)
        with create(folder / kind.folder, kind.report) as draft:
            for path in (folder / kind.folder).glob("*.jsonl"):
                shutil.copy(path, draft.folder)
            draft.finish(evidence.reports[name].record, parents={})
    with create(folder / "benchmark", Benchmark) as draft:
        sizes = {"threads": 1, "prompt_tokens": 1, "new_tokens": 1, "read_bandwidth_gb_s": 10.0, "price_per_hour": 0.1}
        both = {"baseline": numbers(BASELINE), "candidate": numbers(CANDIDATE)}
        draft.finish(
            Benchmark(**both, **sizes, samples=evidence.reports["speed"].items, executed_on=MACHINE),  # type: ignore[arg-type]
            parents={},
        )
    with create(folder / "quantized", QuantizedModel) as draft:
        draft.finish(quantized_model(), parents={})


def test_each_kind_shows_its_report_and_every_number_of_it_is_a_metric(tmp_path: Path):
    evidence = make()
    write_reports(tmp_path, evidence)
    verdict = judge(evidence, DEFAULT)
    blocks = {
        kind.name: kind.block(tmp_path / kind.folder, verdict) for kind in kinds() if kind.name in evidence.reports
    }
    assert blocks["parity"] is None  # its checks say everything
    shown = {name: block for name, block in blocks.items() if block}
    charts = {name for block in shown.values() for name in block.charts}
    assert charts == {"accuracy", "kl", "throughput", "latency", "memory", "roofline"}
    assert all(block.metrics for block in shown.values())
    metrics = shown["speed"].metrics
    assert metrics["roofline.candidate_share"] == pytest.approx(0.5)
    assert metrics["speed.prefill.candidate"] == 2000.0 and metrics["decode.batch_1.baseline_itl_ms"] == 10.0
    assert shown["tasks"].metrics["accuracy.arc.difference"] == verdict.slices[0].difference


def test_the_report_says_which_experts_no_token_chose(tmp_path: Path):
    evidence = of_experts([(200, 150, 50, 0), (0, 200, 200, 0)], differ=1)
    write_reports(tmp_path, evidence)
    kind = next(kind for kind in kinds() if kind.name == "parity")
    block = kind.block(tmp_path / "parity", judge(evidence, DEFAULT))
    assert block is not None and block.table is not None
    tokens = sorted(20 * (one + other) for one, other in ((200, 0), (150, 200), (50, 200), (0, 0)))
    assert block.table.rows == ((EXPERTS, 4, 0.75, tokens[0], (tokens[1] + tokens[2]) / 2, tokens[3], 0.995, 1.0),)
    assert block.table.note == f"No token chose {EXPERTS}: 3."
    assert block.metrics == {f"experts.{EXPERTS}.reached": 0.75, f"experts.{EXPERTS}.routed": 0.995}


def test_a_policy_says_of_every_bound_which_way_is_looser() -> None:
    """Planted: a wider margin of a task was called tighter."""
    bounds = SMALL.model_dump(mode="json")
    for name, bound in bounds.items():
        wider = name.startswith("max_") or name.endswith("_margin")
        looser = Policy(bounds={**bounds, name: bound + (1 if wider else -1)}, settings={})
        (difference,) = looser.differences(Policy(bounds=bounds, settings={}))
        assert f"gate.{name}" in difference and "(looser than in force)" in difference
