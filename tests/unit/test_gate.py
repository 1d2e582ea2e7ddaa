"""The gate judges made-up evidence: boundaries of every check, every refusal, and what must hold for any evidence."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from evals.reports import (
    EvalReport,
    ParityItem,
    ParityReport,
    ShadowItem,
    ShadowReport,
    TaskItem,
    TextItem,
    write_items,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evals.evidence import Evidence, ProofSummary, SpeedSample, SpeedSummary, load_evidence
from evals.gate import gate, judge
from evals.verdict import COLUMNS, Outcome, Verdict, combine
from tapeout.artifact import ArtifactRef, create, load
from tapeout.errors import EvidenceError, ExitCode
from tapeout.recipe import Gate

BASELINE, CANDIDATE, QUANTIZED, CHAMPION = "b" * 64, "c" * 64, "9" * 64, "d" * 64
SEVERITY = {Outcome.PASS: 0, Outcome.INCONCLUSIVE: 1, Outcome.FAIL: 2}
SMALL = Gate(min_items=100, min_documents=10, min_shadow_prompts=10)
NOUNS = ("EvalReport", "ShadowReport", "ParityReport", "Benchmark")


def task_item(number: int, baseline: bool, candidate: bool, task: str = "arc") -> TaskItem:
    return TaskItem(
        task=task,
        doc_id=number,
        doc_hash=f"doc{number}",
        prompt_hash=f"prompt{number}",
        target_hash=f"target{number}",
        metric="acc",
        gold=0,
        baseline_choice=0 if baseline else 1,
        candidate_choice=0 if candidate else 1,
        baseline_correct=baseline,
        candidate_correct=candidate,
        baseline_loglikelihoods=(-1.0, -2.0),
        candidate_loglikelihoods=(-1.0, -2.0),
    )


def task_items(n: int = 2500, lost: int = 40, gained: int = 40) -> tuple[TaskItem, ...]:
    """Three fifths right in both arms, besides those that changed; every fifth item belongs to a second task."""
    pairs = [(True, False)] * lost + [(False, True)] * gained
    pairs += [(i % 5 < 3,) * 2 for i in range(n - lost - gained)]
    return tuple(task_item(i, *pair, task="piqa" if i % 5 == 0 else "arc") for i, pair in enumerate(pairs))


def text_items(n: int = 64, kl: float = 0.01, agree: float = 0.95, worse_by: float = 0.005) -> tuple[TextItem, ...]:
    """Documents of 200 tokens whose values vary by a tenth around the mean asked for."""
    return tuple(
        TextItem(
            doc_hash=f"text{i}",
            tokens=200,
            kl_sum=200 * kl * (0.9 + 0.2 * (i % 2)),
            kl_max=10 * kl + 1,
            agree=min(200, round(200 * agree) + (-1) ** i),
            baseline_nll=600.0 + i,
            candidate_nll=600.0 + i + 200 * worse_by * (0.9 + 0.2 * (i % 2)),
        )
        for i in range(n)
    )


def shadow_items(n: int = 200, kl: float = 0.01, agree: float = 0.95) -> tuple[ShadowItem, ...]:
    return tuple(
        ShadowItem(
            prompt_hash=f"shadow{i}",
            prompt_tokens=20,
            champion_tokens=40,
            candidate_tokens=40,
            agree=min(40, max(0, round(40 * agree) + (-1) ** i)),
            kl_sum=40 * kl * (0.9 + 0.2 * (i % 2)),
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
            kl_sum=200 * kl,
            kl_max=kl + 0.1,
            agree=round(200 * agree),
            worst_error=worst,
            worst_linear="layers.3.mlp.down_proj.weight",
            free_kl_sum=1.0,
            free_agree=190,
        )
        for i in range(n)
    )


def speed(*ratios: float, batch: int = 1, phase: str = "decode") -> SpeedSample:
    return SpeedSample(
        batch=batch,
        phase=phase,  # type: ignore[arg-type]
        baseline_tokens_per_s=(100.0,) * len(ratios),
        candidate_tokens_per_s=tuple(100.0 * ratio for ratio in ratios),
    )


PREFILL = speed(1.2, 1.25, 1.3, phase="prefill")


def timed(*samples: SpeedSample) -> tuple[SpeedSample, ...]:
    """What a benchmark records: these, and prefill."""
    return (*samples, PREFILL)


def summary(samples: tuple[SpeedSample, ...], batches: tuple[int, ...] | None = None) -> SpeedSummary:
    """A benchmark asked for these batches, or for those whose decoding it timed."""
    decoded = dict.fromkeys(sample.batch for sample in samples if sample.phase == "decode")
    batches = batches or tuple(decoded) or (1,)
    return SpeedSummary(baseline=BASELINE, candidate=CANDIDATE, batches=batches, samples=samples)


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
    samples = timed(speed(1.5, 1.6, 1.55)) if samples is None else samples
    whole = Evidence(
        baseline=BASELINE,
        candidate=CANDIDATE,
        quantized=QUANTIZED,
        target="cpu",
        executed_on="cpu",
        proof=ProofSummary(quantized=QUANTIZED, ok=True, reasons=(), bits_per_weight=6.2),
        quality=EvalReport(
            baseline=BASELINE,
            candidate=CANDIDATE,
            tasks={task: sum(item.task == task for item in tasks) for task in {item.task for item in tasks}},
            documents=len(texts),
            versions={},
        ),
        task_items=tasks,
        text_items=texts,
        shadow=ShadowReport(
            champion=BASELINE, candidate=CANDIDATE, champion_is_baseline=True, prompts=len(shadow), max_new_tokens=48
        ),
        shadow_items=shadow,
        parity=ParityReport(candidate=CANDIDATE, quantized=QUANTIZED, documents=len(parity)),
        parity_items=parity,
        speed=summary(samples),
        digests={noun: f"digest of {noun}" for noun in NOUNS} | {"QuantizedModel": QUANTIZED},
    )
    return replace(whole, **changes)


# outcomes


def test_good_evidence_passes_with_every_check():
    verdict = judge(make(), Gate())
    assert {check.name: check.outcome for check in verdict.checks} == dict.fromkeys(
        [
            "executed",
            "quantized",
            "accuracy",
            "flips",
            "kl",
            "top_token",
            "perplexity",
            "shadow_kl",
            "shadow_agreement",
            "parity_error",
            "parity_kl",
            "parity_top_token",
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
    ("kl", make(texts=text_items(kl=0.029)), Outcome.PASS),
    ("kl", make(texts=text_items(kl=0.03)), Outcome.INCONCLUSIVE),
    ("kl", make(texts=text_items(kl=0.031)), Outcome.FAIL),
    ("top_token", make(texts=text_items(agree=0.92)), Outcome.PASS),
    ("top_token", make(texts=text_items(agree=0.91)), Outcome.INCONCLUSIVE),
    ("top_token", make(texts=text_items(agree=0.90)), Outcome.FAIL),
    ("perplexity", make(texts=text_items(worse_by=0.045)), Outcome.PASS),
    ("perplexity", make(texts=text_items(worse_by=0.049)), Outcome.INCONCLUSIVE),
    ("perplexity", make(texts=text_items(worse_by=0.055)), Outcome.FAIL),
    ("shadow_kl", make(shadow=shadow_items(kl=0.039)), Outcome.PASS),
    ("shadow_kl", make(shadow=shadow_items(kl=0.04)), Outcome.INCONCLUSIVE),
    ("shadow_kl", make(shadow=shadow_items(kl=0.041)), Outcome.FAIL),
    ("shadow_agreement", make(shadow=shadow_items(agree=0.925)), Outcome.PASS),
    ("shadow_agreement", make(shadow=shadow_items(agree=0.90)), Outcome.INCONCLUSIVE),
    ("shadow_agreement", make(shadow=shadow_items(agree=0.875)), Outcome.FAIL),
    ("parity_error", make(parity=parity_items(worst=9e-3)), Outcome.PASS),
    ("parity_error", make(parity=parity_items(worst=0.02)), Outcome.FAIL),
    ("parity_kl", make(parity=parity_items(kl=9e-4)), Outcome.PASS),
    ("parity_kl", make(parity=parity_items(kl=2e-3)), Outcome.FAIL),
    ("parity_top_token", make(parity=parity_items(agree=1.0)), Outcome.PASS),
    ("parity_top_token", make(parity=parity_items(agree=0.995)), Outcome.INCONCLUSIVE),
    ("parity_top_token", make(parity=parity_items(agree=0.99)), Outcome.FAIL),
    ("decode_speed_b1", make(samples=timed(speed(1.0, 1.3, 1.1))), Outcome.PASS),
    ("decode_speed_b1", make(samples=timed(speed(0.9, 1.3, 1.1))), Outcome.INCONCLUSIVE),
    ("decode_speed_b1", make(samples=timed(speed(0.9, 0.8, 0.7))), Outcome.FAIL),
    ("decode_speed_b16", make(samples=timed(speed(2.0, 2.0, 2.0), speed(0.9, 0.8, 0.7, batch=16))), Outcome.FAIL),
    ("executed", make(executed_on=None), Outcome.INCONCLUSIVE),
    ("executed", make(target="sm89", executed_on="sm120"), Outcome.INCONCLUSIVE),
    (
        "quantized",
        make(proof=ProofSummary(quantized=QUANTIZED, ok=False, reasons=("scales are all one",), bits_per_weight=32)),
        Outcome.FAIL,
    ),
]


@pytest.mark.parametrize(
    ("name", "evidence", "outcome"), BOUNDARIES, ids=[f"{name}-{outcome}" for name, _, outcome in BOUNDARIES]
)
def test_boundaries(name: str, evidence: Evidence, outcome: Outcome):
    verdict = judge(evidence, Gate())
    check = verdict.check(name)
    assert check.outcome is outcome, check.reason
    assert SEVERITY[verdict.outcome] >= SEVERITY[outcome]
    if check.lower is not None and check.upper is not None and check.value is not None:
        assert check.lower <= check.value <= check.upper


STARVED = {
    "items": ("accuracy", make(task_items(n=300, lost=0, gained=0)), "300 of at least 2,500 items: 2,200 more needed"),
    "documents": ("kl", make(texts=text_items(n=29)), "29 of at least 30 documents: 1 more needed"),
    "prompts": ("shadow_kl", make(shadow=shadow_items(n=150)), "150 of at least 200 prompts: 50 more needed"),
    "parity": ("parity_kl", make(parity=parity_items(n=5)), "5 of at least 30 documents: 25 more needed"),
    "products": ("parity_error", make(parity=parity_items(n=29)), "29 of at least 30 documents: 1 more needed"),
    "prefill": (
        "prefill_speed_b1",
        make(samples=(speed(3.0, 3.0, 3.0), speed(3.0, 3.0, phase="prefill"))),
        "2 of at least 3 repeats: 1 more needed",
    ),
    "repeats": ("decode_speed_b1", make(samples=timed(speed(3.0))), "1 of at least 3 repeats: 2 more needed"),
}


@pytest.mark.parametrize("kind", STARVED)
def test_starved_evidence_is_inconclusive_and_says_how_much_is_missing(kind: str):
    name, evidence, reason = STARVED[kind]
    verdict = judge(evidence, Gate())
    assert verdict.check(name).reason == reason
    assert (verdict.outcome, verdict.exit_code) == (Outcome.INCONCLUSIVE, ExitCode.INCONCLUSIVE)


def test_too_few_items_do_not_fail_either():
    check = judge(make(task_items(n=100, lost=60, gained=0)), Gate()).check("accuracy")
    assert check.outcome is Outcome.INCONCLUSIVE


def test_a_product_that_is_off_fails_however_few_documents_show_it():
    """Unlike a mean, a largest error only grows with more documents."""
    check = judge(make(parity=parity_items(n=5, worst=0.02)), Gate()).check("parity_error")
    assert check.outcome is Outcome.FAIL
    assert check.reason.startswith("layers.3.mlp.down_proj.weight is off by 0.02, more than 0.01")


def test_one_document_bounds_nothing_even_if_one_is_enough():
    verdict = judge(make(texts=text_items(n=1)), Gate(min_documents=1))
    assert verdict.check("kl").outcome is Outcome.INCONCLUSIVE
    assert verdict.check("kl").upper is None
    json.dumps(verdict.model_dump(mode="json"), allow_nan=False)


def test_inconclusive_says_how_many_more_would_decide():
    reason = judge(make(task_items(lost=75, gained=40)), Gate()).check("accuracy").reason
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
    verdict = judge(damaged, Gate())
    failed = {check.name for check in verdict.checks if check.outcome is Outcome.FAIL}
    assert failed == {"accuracy", "flips", "kl", "top_token", "perplexity", "shadow_kl", "shadow_agreement"}
    assert (verdict.outcome, verdict.exit_code) == (Outcome.FAIL, ExitCode.GATE_FAILED)


def test_compiled_but_never_executed_is_inconclusive():
    compiled = Evidence(
        baseline=BASELINE,
        candidate=CANDIDATE,
        quantized=QUANTIZED,
        target="sm89",
        executed_on=None,
        proof=ProofSummary(quantized=QUANTIZED, ok=True, reasons=(), bits_per_weight=4.5),
        digests={"QuantizedModel": QUANTIZED},
    )
    verdict = judge(compiled, Gate())
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert verdict.check("executed").reason == (
        "not executed on sm89; missing: EvalReport, ShadowReport, ParityReport, Benchmark"
    )


def test_fail_outweighs_inconclusive_and_nothing_is_not_a_pass():
    assert combine([Outcome.PASS, Outcome.INCONCLUSIVE, Outcome.FAIL]) is Outcome.FAIL
    assert combine([Outcome.INCONCLUSIVE, Outcome.PASS]) is Outcome.INCONCLUSIVE
    assert combine([Outcome.PASS]) is Outcome.PASS
    assert combine([]) is Outcome.INCONCLUSIVE


def test_slices_and_facts_inform_without_deciding():
    verdict = judge(make(task_items(lost=60, gained=40)), Gate())
    assert [(part.task, part.items) for part in verdict.slices] == [("arc", 2000), ("piqa", 500)]
    assert sum(part.lost for part in verdict.slices) == 60
    assert all(part.lower <= part.difference <= part.upper for part in verdict.slices)
    facts = {fact.name: fact.value for fact in verdict.facts}
    assert facts["length_ratio"] == 1.0
    assert facts["exact_match"] == 67 / 200
    assert facts["changed_choices"] == 100 / 2500


# refusals


def with_item(kind: str, **changes: Any) -> Evidence:
    """Sound evidence, but for one changed item of ``task_items``, ``text_items``, ..."""
    evidence = make()
    items = getattr(evidence, kind)
    return replace(evidence, **{kind: (items[0].model_copy(update=changes), *items[1:])})


def with_report(kind: str, **changes: Any) -> Evidence:
    evidence = make()
    return replace(evidence, **{kind: getattr(evidence, kind).model_copy(update=changes)})


def with_proof(**changes: Any) -> Evidence:
    return make(proof=make().proof.model_copy(update=changes))


def with_sample(baseline: tuple[float, ...], candidate: tuple[float, ...]) -> Evidence:
    sample = SpeedSample(batch=1, phase="decode", baseline_tokens_per_s=baseline, candidate_tokens_per_s=candidate)
    return make(samples=timed(sample))


SOUND = make()
REFUSALS: dict[str, tuple[Evidence, str]] = {
    "no task items": (make(tasks=()), "EvalReport has no task items"),
    "no text items": (make(texts=()), "EvalReport has no text items"),
    "no shadow items": (make(shadow=()), "ShadowReport has no prompts"),
    "no parity items": (make(parity=()), "ParityReport has no documents"),
    "no speed samples": (make(samples=()), "Benchmark has no decode samples at batch 1"),
    "only prefill": (make(samples=timed()), "Benchmark has no decode samples at batch 1"),
    "only decode": (make(samples=(speed(1.0, 1.0, 1.0),)), "Benchmark has no prefill samples"),
    "a batch left out": (
        make(speed=summary(timed(speed(1.0), speed(1.0, batch=4)), batches=(1, 4, 16))),
        "Benchmark has no decode samples at batch 16",
    ),
    "prefill at a batch is no decode": (
        make(speed=summary((speed(1.0), speed(1.0, phase="prefill", batch=4)), batches=(1, 4))),
        "Benchmark has no decode samples at batch 4",
    ),
    "no batch wanted": (
        make(speed=SpeedSummary(baseline=BASELINE, candidate=CANDIDATE, batches=(), samples=timed())),
        "Benchmark was asked for no batch",
    ),
    "no evaluation": (
        make(quality=None, task_items=(), text_items=()),
        "EvalReport is missing although the engine was executed",
    ),
    "no benchmark": (make(speed=None), "Benchmark is missing although the engine was executed"),
    "items without report": (make(quality=None), "task items without their EvalReport"),
    "no digest": (make(digests={"QuantizedModel": QUANTIZED}), "no digest of EvalReport"),
    "same engine": (make(baseline=CANDIDATE), "baseline and candidate are the same engine"),
    "unnamed engine": (make(candidate=""), "candidate has no digest"),
    "foreign baseline": (with_report("quality", baseline=CHAMPION), "EvalReport's baseline is dddddddddddd…, not bbbb"),
    "foreign candidate": (with_report("quality", candidate=CHAMPION), "EvalReport's candidate is dddd"),
    "foreign shadow": (with_report("shadow", candidate=CHAMPION), "ShadowReport's candidate is dddd"),
    "foreign parity": (with_report("parity", candidate=CHAMPION), "ParityReport's candidate is dddd"),
    "foreign weights": (with_report("parity", quantized=CHAMPION), "ParityReport's quantized model is dddd"),
    "foreign speed": (with_report("speed", baseline=CHAMPION), "Benchmark's baseline is dddd"),
    "foreign proof": (with_proof(quantized=CHAMPION), "the proof of quantization is dddd"),
    "foreign digest": (
        make(digests={**SOUND.digests, "QuantizedModel": CHAMPION}),
        "the QuantizedModel is dddddddddddd…, not 9999",
    ),
    "self replay": (
        with_report("shadow", champion=CANDIDATE, champion_is_baseline=False),
        "replayed the candidate against itself",
    ),
    "champion mislabelled": (with_report("shadow", champion=CHAMPION), "champion dddddddddddd… is the baseline"),
    "fewer items than claimed": (with_report("quality", tasks={"arc": 2000, "piqa": 501}), "task piqa: 500 items"),
    "unclaimed task": (with_report("quality", tasks={"arc": 2000}), "task piqa: 500 items, but EvalReport claims 0"),
    "fewer documents": (with_report("quality", documents=65), "EvalReport has 64 text items, but claims 65"),
    "fewer prompts": (with_report("shadow", prompts=199), "ShadowReport has 200 prompts, but claims 199"),
    "fewer parity": (with_report("parity", documents=41), "ParityReport has 40 documents, but claims 41"),
    "item twice": (with_item("task_items", doc_id=5), "task item piqa/5 more than once"),
    "document twice": (with_item("text_items", doc_hash="text1"), "document text1 more than once"),
    "prompt twice": (with_item("shadow_items", prompt_hash="shadow1"), "prompt shadow1 more than once"),
    "parity twice": (with_item("parity_items", doc_hash="p1"), "parity document p1 more than once"),
    "batch twice": (make(samples=timed(speed(1.0), speed(1.0))), "speed sample decode at batch 1 more than once"),
    "no hash": (with_item("task_items", prompt_hash=""), "1 of 2500 task items lack a pairing hash: piqa/0"),
    "NaN answer": (with_item("task_items", candidate_loglikelihoods=(math.nan, -1.0)), "non-finite log-likelihoods"),
    "lost option": (with_item("task_items", candidate_loglikelihoods=(-1.0,)), "no log-likelihoods, or unequally"),
    "no options": (
        with_item("task_items", baseline_loglikelihoods=(), candidate_loglikelihoods=()),
        "no log-likelihoods, or unequally",
    ),
    "choice out of range": (with_item("task_items", candidate_choice=2), "an answer that does not exist"),
    "wrong mark": (with_item("task_items", candidate_correct=True), "marked right or wrong against their own choice"),
    "no tokens": (with_item("text_items", tokens=0, agree=0), "text items have no tokens"),
    "too much agreement": (with_item("text_items", agree=201), "agree on more tokens than they have"),
    "negative agreement": (with_item("parity_items", agree=-1), "agree on more tokens than they have, or on fewer"),
    "NaN KL": (with_item("text_items", kl_sum=math.nan), "text items have a non-finite or negative KL: text0"),
    "infinite KL": (with_item("shadow_items", kl_sum=math.inf), "shadow items have a non-finite or negative KL"),
    "negative KL": (with_item("parity_items", kl_sum=-0.1), "parity items have a non-finite or negative KL"),
    "mean above max": (with_item("text_items", kl_max=0.001), "text items have a mean KL above their largest"),
    "NaN max": (with_item("parity_items", kl_max=math.nan), "parity items have a mean KL above their largest"),
    "NaN likelihood": (with_item("text_items", candidate_nll=math.nan), "non-finite or negative log-likelihood"),
    "negative likelihood": (with_item("text_items", baseline_nll=-5.0), "non-finite or negative log-likelihood"),
    "long response": (with_item("shadow_items", candidate_tokens=49), "an impossible response length"),
    "exact, yet divergent": (with_item("shadow_items", first_divergence=3), "an exact match that diverges"),
    "exact, yet longer": (with_item("shadow_items", candidate_tokens=41), "an exact match of unequal length"),
    "late divergence": (with_item("shadow_items", exact_match=False, first_divergence=41), "diverge behind the end"),
    "unpaired repeats": (with_sample((1.0, 2.0), (1.0,)), "speed samples have unpaired repeats: decode at batch 1"),
    "no repeats": (with_sample((), ()), "have no repeats"),
    "zero speed": (with_sample((0.0,), (1.0,)), "a non-finite or non-positive speed"),
    "NaN speed": (with_sample((1.0,), (math.nan,)), "a non-finite or non-positive speed"),
    "proof against itself": (with_proof(reasons=("scales are all one",)), "ok=True with 1 reasons against it"),
    "unexplained failure": (with_proof(ok=False), "ok=False with 0 reasons against it"),
    "NaN bits": (with_proof(bits_per_weight=math.nan), "claims nan bits per weight"),
}


@pytest.mark.parametrize("kind", REFUSALS)
def test_unsound_evidence_is_refused(kind: str):
    evidence, message = REFUSALS[kind]
    with pytest.raises(EvidenceError) as refusal:
        judge(evidence, Gate())
    assert message in str(refusal.value)
    assert "remedy" in str(refusal.value)


def test_every_problem_is_listed_at_once():
    evidence = replace(with_item("text_items", kl_sum=math.nan), baseline=CHAMPION, speed=None)
    with pytest.raises(EvidenceError) as refusal:
        judge(evidence, Gate())
    text = str(refusal.value)
    assert "5 problems" in text
    for part in ("Benchmark is missing", "digest of Benchmark", "EvalReport's baseline", "non-finite", "its champion"):
        assert part in text


def test_rounding_below_zero_is_no_problem():
    assert judge(with_item("parity_items", kl_sum=-1e-7), Gate()).outcome is Outcome.PASS


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
        samples=timed(speed(1.0, 2.0, 1.1), speed(1.3, 1.2, 1.4, batch=4)),
    )
    other = replace(
        evidence,
        **{name: shuffled(getattr(evidence, name)) for name in ("task_items", "text_items", "shadow_items")},
        parity_items=shuffled(evidence.parity_items),
        speed=summary(tuple(reversed(evidence.speed.samples)), (1, 4)),  # type: ignore[union-attr]
    )
    assert judge(other, SMALL) == judge(evidence, SMALL)


def lose_answers(count: int) -> Callable[[Evidence], Evidence]:
    def worsen(evidence: Evidence) -> Evidence:
        kept = [i for i, item in enumerate(evidence.task_items) if item.baseline_correct and item.candidate_correct]
        lost = set(kept[:count])
        update = {"candidate_choice": 1, "candidate_correct": False}
        items = (item.model_copy(update=update) if i in lost else item for i, item in enumerate(evidence.task_items))
        return replace(evidence, task_items=tuple(items))

    return worsen


def scale_kl(factor: float) -> Callable[[Evidence], Evidence]:
    def worsen(evidence: Evidence) -> Evidence:
        def items(kind: str) -> tuple[Any, ...]:
            scaled: list[Any] = []
            for item in getattr(evidence, kind):
                update = {"kl_sum": item.kl_sum * factor}
                if kind != "shadow_items":
                    update["kl_max"] = item.kl_max * factor
                scaled.append(item.model_copy(update=update))
            return tuple(scaled)

        return replace(evidence, **{kind: items(kind) for kind in ("text_items", "shadow_items", "parity_items")})

    return worsen


def raise_nll(nats_per_token: float) -> Callable[[Evidence], Evidence]:
    def worsen(evidence: Evidence) -> Evidence:
        items = (
            item.model_copy(update={"candidate_nll": item.candidate_nll + nats_per_token * item.tokens})
            for item in evidence.text_items
        )
        return replace(evidence, text_items=tuple(items))

    return worsen


def slow_down(factor: float) -> Callable[[Evidence], Evidence]:
    def worsen(evidence: Evidence) -> Evidence:
        assert evidence.speed is not None
        samples = tuple(
            sample.model_copy(
                update={"candidate_tokens_per_s": tuple(speed / factor for speed in sample.candidate_tokens_per_s)}
            )
            for sample in evidence.speed.samples
        )
        return replace(evidence, speed=evidence.speed.model_copy(update={"samples": samples}))

    return worsen


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
        text_items(20, kl=kl, worse_by=worse_by),
        shadow_items(20, kl=kl),
        parity_items(20),
        samples=timed(speed(ratio, ratio * 1.1, ratio * 0.95)),
    )
    good, bad = judge(before, SMALL), judge(harm(before), SMALL)
    for check in good.checks:
        assert SEVERITY[bad.check(check.name).outcome] >= SEVERITY[check.outcome], check.name
    assert SEVERITY[bad.outcome] >= SEVERITY[good.outcome]


@given(items=st.integers(1, 2499), documents=st.integers(1, 29), starved=st.sampled_from(["items", "documents"]))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_starved_evidence_never_passes(items: int, documents: int, starved: str):
    evidence = (
        make(task_items(items, 0, 0))
        if starved == "items"
        else make(texts=text_items(documents, kl=0, agree=1, worse_by=0))
    )
    assert judge(evidence, Gate()).outcome is Outcome.INCONCLUSIVE


@given(st.integers(1, 200))
@settings(max_examples=15, deadline=None)
def test_fewer_reports_never_help(keep: int):
    """Dropping task items from passing evidence leaves it passing or inconclusive, whatever is dropped."""
    items = task_items(300, 2, 2)
    outcome = judge(make(items[: keep + 4], text_items(12), shadow_items(12)), SMALL).check("accuracy").outcome
    assert outcome is not Outcome.FAIL
    assert (outcome is Outcome.INCONCLUSIVE) or keep + 4 >= SMALL.min_items


# the written verdict


def test_table_has_a_row_per_check_and_words_in_every_reason():
    verdict = judge(make(task_items(lost=75, gained=40), executed_on=None), Gate())
    rows = verdict.explain()
    assert len(rows) == len(verdict.checks)
    assert {len(row) for row in rows} == {len(COLUMNS)}
    assert all(row[0] in Outcome.__members__ and row[-1] for row in rows)
    kl = rows[[check.name for check in verdict.checks].index("kl")]
    assert kl[:4] == ("PASS", "mean KL on held-out text, nats", "0.01", "≤ 0.03")
    assert kl[5] == "12800 tokens in 64 clusters"


def test_gate_writes_record_json_junit_and_metrics(tmp_path: Path):
    evidence = make(task_items(lost=75, gained=40), samples=timed(speed(0.5, 0.6, 0.7)))
    artifact = gate(evidence, Gate(), tmp_path / "verdict")
    artifact.verify()
    assert artifact.record == judge(evidence, Gate())
    assert artifact.parents["evaluation"] == ArtifactRef("EvalReport", "digest of EvalReport")
    assert Verdict.model_validate_json((artifact.folder / "verdict.json").read_text()) == artifact.record
    metrics = json.loads((artifact.folder / "metrics.json").read_text())
    assert metrics["kl"] == pytest.approx(0.01)
    assert metrics["exit_code"] == 1
    assert all(isinstance(value, float) for value in metrics.values())
    suite = ElementTree.parse(artifact.folder / "junit.xml").getroot()
    assert (suite.get("failures"), suite.get("errors")) == ("1", "1")
    assert [case.get("name") for case in suite if case.find("failure") is not None] == ["decode_speed_b1"]
    assert [case.get("name") for case in suite if case.find("error") is not None] == ["accuracy"]


def test_same_evidence_gives_the_same_digest(tmp_path: Path):
    assert gate(make(), Gate(), tmp_path / "a").digest == gate(make(), Gate(), tmp_path / "b").digest


def write_reports(folder: Path, evidence: Evidence) -> dict[str, Path]:
    assert evidence.quality and evidence.shadow and evidence.parity
    with create(folder / "evaluation", EvalReport) as draft:
        write_items(draft.folder / "task_items.jsonl", evidence.task_items)
        write_items(draft.folder / "text_items.jsonl", evidence.text_items)
        draft.finish(evidence.quality, parents={})
    with create(folder / "shadow", ShadowReport) as draft:
        write_items(draft.folder / "shadow_items.jsonl", evidence.shadow_items)
        draft.finish(evidence.shadow, parents={})
    with create(folder / "parity", ParityReport) as draft:
        write_items(draft.folder / "parity_items.jsonl", evidence.parity_items)
        draft.finish(evidence.parity, parents={})
    return {name: folder / name for name in ("evaluation", "shadow", "parity")}


def read_back(folders: dict[str, Path]) -> Evidence:
    source = make()
    return load_evidence(
        baseline=BASELINE,
        candidate=CANDIDATE,
        quantized=QUANTIZED,
        target="cpu",
        executed_on="cpu",
        proof=source.proof,
        speed=source.speed,
        digests={"Benchmark": "digest of Benchmark", "QuantizedModel": QUANTIZED},
        **folders,
    )


def test_evidence_is_read_from_the_reports_folders(tmp_path: Path):
    folders = write_reports(tmp_path, make(task_items(200, 0, 0)))
    evidence = read_back(folders)
    assert evidence.task_items == task_items(200, 0, 0)
    assert evidence.digests["ShadowReport"] == load(folders["shadow"], ShadowReport).digest
    assert judge(evidence, SMALL).outcome is Outcome.PASS


def test_edited_items_are_refused(tmp_path: Path):
    folders = write_reports(tmp_path, make(task_items(200, 0, 0)))
    path = folders["parity"] / "parity_items.jsonl"
    path.write_text(path.read_text().replace('"agree": 200', '"agree": 199', 1))
    with pytest.raises(Exception, match=r"parity_items.jsonl has sha256"):
        read_back(folders)
