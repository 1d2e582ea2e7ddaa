"""Simulate the gate: how often each check passes where the truth lies on its bound, and how often a good engine does.

``make simulate-gate`` writes docs/benchmarks/gate.md and gate.json. Every figure comes from the code that judges:
``EvidenceKind.judge`` of one kind, or ``evals.gate.judge`` of all. docs/statistics.md says what is promised and why.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.random import Generator

from benchmarks.gate import evidence as made
from benchmarks.gate.evidence import (
    Floats,
    Run,
    Shape,
    all_or_little,
    clustered,
    disagreeing,
    lognormal,
    rare,
    resampled,
    scaled_to,
    scaled_to_share,
    standard_error,
)
from evals.check import Outcome, combine
from evals.conditions import times_bound
from evals.gate import judge
from evals.kind import Bounds, Evidence, EvidenceKind, Report
from evals.kinds import parity, serving, shadow, source, speed, tasks, text
from evals.kinds.parity import ParityReport, TableError
from evals.kinds.proof import ProofSummary
from evals.kinds.serving import ServingReport
from evals.kinds.shadow import ShadowReport
from evals.kinds.source import ANSWERS_PER_TASK, SourceAnswer, SourceReport, TextFile
from evals.kinds.speed import SpeedSettings, SpeedSummary
from evals.kinds.tasks import ChoiceItem, EvalReport
from pipeline.recipe import load_recipe
from tapeout.artifact import ArtifactRef
from tapeout.fingerprint import Fingerprint

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "benchmarks" / "gate.md"
RUNS = 2000
REPEATS = SpeedSettings().repeats
SOURCE_DOCUMENTS = 32
# What a row promises, where "often" is 1 - confidence of all runs:
BOUND = "bound"  # the truth lies on the bound: the check passes no more often, and fails no more often
EQUAL = "equal"  # both engines are equal in law: the gate fails no more often
GOOD = "good"  # the engine is good: the gate passes in 95 % of all runs
BAD = "bad"  # the engine is worse than a bound: the gate passes no more often
RARE = "rare"  # the mean without a limit for a document lies on the bound: the check passes no more often
NONE = "none"  # the same, and nothing is promised: a sample of this size cannot see it

Outcomes = Callable[[Generator, int], Iterator[Mapping[str, Outcome]]]
WHOLE = "the whole gate"
NO_ERROR = TableError(rows=1, error=0, worst=0)


@dataclass(frozen=True)
class Row:
    """Evidence of one law. ``checks``: what is counted of it, and the distribution that matters to it."""

    checks: Mapping[str, str]
    units: str
    promise: str
    outcomes: Outcomes


@dataclass(frozen=True)
class Result:
    check: str
    distribution: str
    units: str
    promise: str
    runs: int
    passed: int
    failed: int

    def holds(self, confidence: float) -> bool:
        """Whether the promise is kept, as far as so many runs can tell: three standard errors are allowed."""

        def most(count: int) -> bool:
            return count / self.runs <= 1 - confidence + 3 * standard_error(count, self.runs)

        return {
            BOUND: most(self.passed) and most(self.failed),
            EQUAL: most(self.failed),
            GOOD: most(self.runs - self.passed),
            BAD: most(self.passed),
            RARE: most(self.passed),
            NONE: True,
        }[self.promise]


def run_row(row: Row, runs: int, seed: int = 0) -> list[Result]:
    rng = np.random.default_rng([seed, *f"{dict(row.checks)} {row.units} {row.promise}".encode()])
    counts = {check: Counter[Outcome]() for check in row.checks}
    for outcomes in row.outcomes(rng, runs):
        for check, count in counts.items():
            count[outcomes[check]] += 1
    return [
        Result(check, row.checks[check], row.units, row.promise, runs, count[Outcome.PASS], count[Outcome.FAIL])
        for check, count in counts.items()
    ]


def judged(
    kind: EvidenceKind[Any, Any, Any],
    record: Any,
    items: tuple[Any, ...],
    bounds: Bounds,
    answered: tuple[ChoiceItem, ...] = (),
) -> dict[str, Outcome]:
    """The outcome of each check of one kind. ``answered``: what another kind has of tasks."""
    report: Report[Any, Any] = Report(ArtifactRef(kind.name, "digest"), record, items)
    rest: Any = SimpleNamespace(reports={"tasks": Report(report.ref, record, answered)} if answered else {})
    return {check.name: check.outcome for check in kind.judge(report, rest, bounds).checks}


# checks of documents


@dataclass(frozen=True)
class Documents:
    """Evidence whose independent units are documents. ``minimum``, ``kl``, ``agreement``: parameters of the gate."""

    kind: EvidenceKind[Any, Any, Any]
    units: str
    minimum: str
    count: int  # documents of the default recipe
    kl: str
    agreement: str
    kl_check: str
    agreement_check: str

    def items(self, tokens: Floats, kl: Floats, differ: Floats, log_ratio: Floats) -> tuple[Any, ...]:
        if self.kind.name == "text":
            return made.text_items(tokens, kl, differ, log_ratio)
        return (made.shadow_items if self.kind.name == "shadow" else made.parity_items)(tokens, kl, differ)

    def judge(self, items: tuple[Any, ...], bounds: Bounds) -> dict[str, Outcome]:
        records = {
            "shadow": ShadowReport.model_construct(champion="b", champion_is_baseline=True),
            "parity": ParityReport.model_construct(embedding=NO_ERROR, head=NO_ERROR),
        }
        return judged(self.kind, records.get(self.kind.name), items, bounds)


TEXT = Documents(
    text.KIND, "documents", "min_text_documents", 300, "max_kl", "min_top_token", "kl", "top_token"
)  # fmt: skip
SHADOW = Documents(
    shadow.KIND, "prompts", "min_shadow_prompts", 300, "max_shadow_kl", "min_shadow_agreement", "shadow_kl",
    "shadow_agreement",
)  # fmt: skip
PARITY = Documents(
    parity.KIND, "documents", "min_documents", 32, "max_parity_kl", "min_parity_top_token", "parity_kl",
    "parity_top_token",
)  # fmt: skip


def document_rows(of: Documents, run: Run, bounds: Bounds, *, count: int, promise: str = BOUND) -> Iterator[Row]:
    """The truth of each check lies on its bound; but for ``BOUND``, that of the mean without a limit for a document."""
    bounds = bounds.model_copy(update={of.minimum: min(getattr(bounds, of.minimum), count)})
    limit, allowed = times_bound(getattr(bounds, of.minimum)), 1 - getattr(bounds, of.agreement)
    own = resampled(run.column(of.kind.name, 1))
    free = limit * allowed >= 1  # a document may disagree everywhere
    garbage = ("1 % of documents disagree everywhere", all_or_little(allowed, min(0.01, allowed / 2)))
    shapes: list[tuple[str, Shape]] = [
        ("rare: 1 % of documents, 50 times", rare(0.01, 50, own)),
        ("rare: 2 % of documents, 50 times", rare(0.02, 50, own)),
        ("rare: 0.5 % of documents, 100 times", rare(0.005, 100, own)),
    ]
    shares: list[tuple[str, Shape]] = [garbage]
    if promise == BOUND:
        shapes = [
            ("the run's own", own),
            ("log-normal, σ = 1", lognormal(1.0)),
            ("log-normal, σ = 1.5", lognormal(1.5)),
            *shapes,
        ]
        shares = [
            ("independent tokens", lambda rng, size: np.full(size, allowed)),
            *(
                (f"correlation of tokens {each}", clustered(allowed, each))
                for each in ((0.1, 0.5) if free else (0.01, 0.03))
            ),
            *([garbage] if free else []),
        ]
    for number, (title, shape) in enumerate(shapes):
        other, share = shares[min(number, len(shares) - 1)]
        checks = {of.kl_check: title} | ({"perplexity": title} if of is TEXT else {})
        if number < len(shares):
            checks[of.agreement_check] = other
        outcomes = _documents(of, run, bounds, count, shape, share, limit if promise == BOUND else 0)
        yield Row(checks, f"{count} {of.units}", promise, outcomes)


def _documents(
    of: Documents, run: Run, bounds: Bounds, count: int, shape: Shape, share: Shape, limit: float
) -> Outcomes:
    """``limit``: how many times the bound a document counts for at most, where the truth is of that mean; or 0."""

    def outcomes(rng: Generator, runs: int) -> Iterator[Mapping[str, Outcome]]:
        tokens, allowed = run.column(of.kind.name, 0), 1 - getattr(bounds, of.agreement)
        ratio = math.log(bounds.max_perplexity_ratio) if isinstance(bounds, text.TextBounds) else 0.0
        many = scaled_to(shape, limit) if limit else 1.0
        disagree = scaled_to_share(share, tokens, min(limit * allowed, 1.0), allowed) if limit else 1.0
        for _ in range(runs):
            sizes, differ = disagreeing(share, disagree, tokens, rng, (1, count))
            multiples = many * shape(rng, (1, count))[0]
            items = of.items(sizes[0], getattr(bounds, of.kl) * multiples, differ[0], ratio * multiples)
            yield of.judge(items, bounds)

    return outcomes


# tasks and speed


def task_rows(run: Run, bounds: Bounds) -> Iterator[Row]:
    assert isinstance(bounds, tasks.TaskBounds)
    sizes = {task: table[0] for task, table in run.tasks.items()}
    small, large = min(sizes, key=sizes.__getitem__), max(sizes, key=sizes.__getitem__)
    everywhere = dict.fromkeys(sizes, -bounds.accuracy_margin)
    items, worst = f"{sum(sizes.values()):,} items", "accuracy_worst_task"

    def row(check: str, distribution: str, units: str, lost: Mapping[str, float], churn: float, promise: str) -> Row:
        def outcomes(rng: Generator, runs: int) -> Iterator[Mapping[str, Outcome]]:
            for _ in range(runs):
                answered = made.task_items(made.task_tables(rng, sizes, lost, churn))
                found = judged(tasks.KIND, None, answered, bounds)
                yield found | {"all of tasks": combine(found.values())}

        return Row({check: distribution}, units, promise, outcomes)

    for churn in (0.04, 0.1):
        title = f"{100 * churn:.0f} % of answers change, the same loss on every task"
        yield row("accuracy", title, items, everywhere, churn, BOUND)
    yield row("flips", "as many lost as gained", items, {}, bounds.max_flips, BOUND)
    for task in (small, large):
        alone = {task: -bounds.task_margin}
        yield row(worst, f"{task} alone loses the margin", f"{sizes[task]} items", alone, 0.08, BOUND)
    lost = dict.fromkeys(sizes, -bounds.task_margin)
    yield row(worst, "every task loses the margin", items, lost, 0.08, BOUND)
    for task in (small, large):
        yield row("all of tasks", f"{task} alone loses 9 points", f"{sizes[task]} items", {task: -0.09}, 0.04, BAD)


def speed_rows(bounds: Bounds) -> Iterator[Row]:
    noises: dict[str, Callable[[Generator, int], Floats]] = {
        "log-normal noise": lambda rng, repeats: np.exp(rng.normal(0, 0.1, repeats)),
        "skewed noise": lambda rng, repeats: 0.8 + 0.2 * rng.exponential(1 / math.log(2), repeats),
    }
    for repeats in (3, 5, 7):
        for title, noise in noises.items():
            yield Row({"decode_speed_b1": title}, f"{repeats} repeats", BOUND, _speed(bounds, noise, repeats))


def _speed(bounds: Bounds, noise: Callable[[Generator, int], Floats], repeats: int) -> Outcomes:
    def outcomes(rng: Generator, runs: int) -> Iterator[Mapping[str, Outcome]]:
        for _ in range(runs):
            sample = made.speed_sample("decode", 1, noise(rng, repeats).tolist())
            yield judged(speed.KIND, None, (sample,), bounds)

    return outcomes


# the source model, and what is served


def source_record(answers: tuple[SourceAnswer, ...] = ()) -> SourceReport:
    return SourceReport.model_construct(
        baseline=BASELINE, candidate=CANDIDATE, documents=SOURCE_DOCUMENTS + 2, max_tokens=1, vocabulary=1,
        embedding=NO_ERROR, answers=answers,
        files=(TextFile(name="tokenizer.json", graph="t", baseline="t", candidate="t"),),
        stop_tokens=dict.fromkeys(("source", "graph", "baseline", "candidate"), (2,)),
    )  # fmt: skip


def source_rows(run: Run, bounds: Bounds) -> Iterator[Row]:
    assert isinstance(bounds, source.SourceBounds)
    sizes, ratio = run.column("source", 0), math.log(bounds.max_source_perplexity_ratio)
    limit, n = times_bound(bounds.min_documents), SOURCE_DOCUMENTS

    def perplexity(shape: Shape) -> Outcomes:
        def outcomes(rng: Generator, runs: int) -> Iterator[Mapping[str, Outcome]]:
            many = scaled_to(shape, limit)
            for _ in range(runs):
                items = made.source_items(rng.choice(sizes, n), ratio * many * shape(rng, (1, n))[0])
                yield judged(source.KIND, source_record(), items, bounds)

        return outcomes

    def asked(
        answered: Callable[[Generator], tuple[ChoiceItem, ...]],
        answers: Callable[[Generator, tuple[ChoiceItem, ...]], tuple[SourceAnswer, ...]],
    ) -> Outcomes:
        documents = made.source_items(sizes, np.zeros(len(sizes)))

        def outcomes(rng: Generator, runs: int) -> Iterator[Mapping[str, Outcome]]:
            for _ in range(runs):
                items = answered(rng)
                yield judged(source.KIND, source_record(answers(rng, items)), documents, bounds, items)

        return outcomes

    for title, shape in (("log-normal, σ = 1", lognormal(1.0)), ("log-normal, σ = 1.5", lognormal(1.5))):
        yield Row({"source_perplexity": title}, f"{n} documents of source", BOUND, perplexity(shape))
    chance, guesses = (
        1 / 3 + bounds.min_above_chance,
        asked(lambda rng: made.guessed(rng, 2500, chance), lambda _, items: made.source_answers(items)),
    )
    yield Row({"accuracy_above_chance": "the engine guesses"}, "2,500 items", BOUND, guesses)
    tables = {task: [table[0], 0, 0, 0] for task, table in run.tasks.items()}
    for check, title, answers in (
        (
            "source_answers",
            "the source model answers a fifth of all questions in another way",
            lambda rng, items: made.source_answers(items, rng, other=0.2),
        ),
        (
            "source_loglikelihood",
            "the log-likelihoods of one task are shifted by twice the bound",
            lambda rng, items: made.source_answers(
                items, shift={str(rng.choice(list(tables))): 2 * bounds.max_answer_error}
            ),
        ),
    ):
        units = f"{ANSWERS_PER_TASK * len(tables)} questions"
        yield Row({check: title}, units, BAD, asked(lambda _: made.task_items(tables), answers))


def serving_rows(bounds: Bounds) -> Iterator[Row]:
    assert isinstance(bounds, serving.ServingBounds)
    record = ServingReport.model_construct(
        slots=1, max_tokens=made.LAST + 1, max_running=1, step_tokens=256, draft_tokens=0, moved_tokens=0,
        draws=made.draws(), pressure=made.pressure(),
    )  # fmt: skip

    def path(rng: Generator, runs: int) -> Iterator[Mapping[str, Outcome]]:
        paths = [path for path in made.SERVED if path != "generation"]  # which has tokens to compare, and no KL
        for _ in range(runs):
            items = made.served_items(str(rng.choice(paths)), 2 * bounds.max_serving_kl)
            yield judged(serving.KIND, record, items, bounds)

    def drawn(rng: Generator, runs: int) -> Iterator[Mapping[str, Outcome]]:
        for _ in range(runs):
            wrong = record.model_copy(update={"draws": made.draws(str(rng.choice(serving.DRAWN)))})
            yield judged(serving.KIND, wrong, made.served_items(), bounds)

    def answered(rng: Generator, runs: int) -> Iterator[Mapping[str, Outcome]]:
        for _ in range(runs):
            pressure = made.pressure(str(rng.choice(serving.PRESSED)), 2 * bounds.max_wrong_answers)
            yield judged(serving.KIND, record.model_copy(update={"pressure": pressure}), made.served_items(), bounds)

    yield Row({"serving_kl": "one way of serving has twice the bound"}, "one slot", BAD, path)
    yield Row({"serving_draws": "one token is drawn that numpy does not draw"}, "256 draws a setting", BAD, drawn)
    yield Row(
        {"serving_answers": "twice the bound of one kind's tokens do not follow"}, "240 tokens a kind", BAD, answered
    )


# the whole gate


BASELINE, CANDIDATE = "b" * 64, "c" * 64


def whole(
    task_items: tuple[Any, ...],
    text_items: tuple[Any, ...],
    shadow_items: tuple[Any, ...],
    parity_items: tuple[Any, ...],
    source_items: tuple[Any, ...],
    samples: tuple[Any, ...],
) -> Evidence:
    machine = Fingerprint(machine="x86_64", features=("avx2",), libraries={"onnxruntime": "1"})
    built_from = ArtifactRef("QuantizedModel", "9" * 64)
    evaluation = EvalReport.model_construct(
        baseline=BASELINE,
        candidate=CANDIDATE,
        executed_on=machine,
        tasks=dict(Counter(item.task for item in task_items)),
        documents=len(text_items),
        max_tokens=0,  # no long document
        shots={},
        versions={},
    )
    replayed = ShadowReport.model_construct(
        champion=BASELINE, candidate=CANDIDATE, champion_is_baseline=True, prompts=len(shadow_items),
        max_new_tokens=10**6, executed_on=machine,
    )  # fmt: skip
    compared = ParityReport.model_construct(
        candidate=CANDIDATE, built_from=built_from.digest, documents=len(parity_items), vocabulary=1, max_tokens=1,
        embedding=NO_ERROR, head=NO_ERROR, executed_on=machine,
    )  # fmt: skip
    both: dict[str, Any] = {"baseline": BASELINE, "candidate": CANDIDATE, "executed_on": machine}
    served = made.served_items()
    as_served = ServingReport.model_construct(
        **both, slots=1, max_tokens=made.LAST + 1, max_running=1, step_tokens=256, draft_tokens=0, moved_tokens=0,
        items=len(served), draws=made.draws(), pressure=made.pressure(),
    )  # fmt: skip
    of_source = source_record(made.source_answers(task_items)).model_copy(update={"executed_on": machine})
    batches = tuple(sample.batch for sample in samples if sample.phase == "decode")
    proof = ProofSummary(ok=True, reasons=(), bits_per_weight=7.5)
    return Evidence(
        baseline=BASELINE,
        candidate=CANDIDATE,
        built_from=built_from,
        target="ort-cpu",
        hardware=(machine,),
        reports={
            "proof": Report(built_from, proof),
            "tasks": Report(ArtifactRef("EvalReport", "e"), evaluation, task_items),
            "text": Report(ArtifactRef("EvalReport", "e"), evaluation, text_items),
            "shadow": Report(ArtifactRef("ShadowReport", "s"), replayed, shadow_items),
            "parity": Report(ArtifactRef("ParityReport", "p"), compared, parity_items),
            "serving": Report(ArtifactRef("ServingReport", "v"), as_served, served),
            "source": Report(ArtifactRef("SourceReport", "o"), of_source, source_items),
            "speed": Report(
                ArtifactRef("Benchmark", "t"),
                SpeedSummary(baseline=BASELINE, candidate=CANDIDATE, executed_on=machine, batches=batches),
                samples,
            ),
        },
    )


def good_evidence(rng: Generator, run: Run) -> Evidence:
    """A good engine: items drawn again from those of the real run."""

    def documents(of: Documents) -> list[Floats]:
        found = np.array(getattr(run, of.kind.name))
        drawn = found[rng.integers(0, len(found), of.count)].T
        drawn[1] *= 1 + 1e-9 * np.arange(of.count)  # the same document drawn twice would be refused as a copy
        return list(drawn)

    tables = {
        task: rng.multinomial(n, np.array([right - lost, lost, gained, n - right - gained]) / n).tolist()
        for task, (n, right, lost, gained) in run.tasks.items()
    }
    samples = [
        made.speed_sample(phase, int(batch), rng.choice(ratios, REPEATS).tolist())
        for (phase, batch), ratios in ((name.split(), ratios) for name, ratios in run.speed.items())
    ]
    return whole(
        made.task_items(tables),
        made.text_items(*documents(TEXT)),
        made.shadow_items(*documents(SHADOW)),
        made.parity_items(*documents(PARITY)),
        made.source_items(*np.array(run.source)[rng.integers(0, len(run.source), SOURCE_DOCUMENTS)].T),
        tuple(samples),
    )


def equal_evidence(rng: Generator, run: Run) -> Evidence:
    """Two engines of the same law: what differs is noise."""
    sizes = {task: table[0] for task, table in run.tasks.items()}
    tokens = [rng.choice(run.column(of.kind.name, 0), of.count) for of in (TEXT, SHADOW, PARITY)]
    noise = [(sizes, 1e-8 * rng.exponential(size=len(sizes)), np.zeros(len(sizes))) for sizes in tokens]
    return whole(
        made.task_items(made.task_tables(rng, sizes, {}, 0.005)),
        made.text_items(*noise[0], 1e-6 * rng.normal(size=TEXT.count)),
        made.shadow_items(*noise[1]),
        made.parity_items(*noise[2]),
        made.source_items(run.column("source", 0), 1e-6 * rng.normal(size=len(run.source))),
        tuple(
            made.speed_sample(phase, int(batch), np.exp(rng.normal(0, 0.1, REPEATS)).tolist())
            for phase, batch in (name.split() for name in run.speed)
        ),
    )


def gate_rows(run: Run, bounds: Bounds) -> Iterator[Row]:
    def of(evidence: Callable[[Generator, Run], Evidence]) -> Outcomes:
        return lambda rng, runs: ({WHOLE: judge(evidence(rng, run), bounds).outcome} for _ in range(runs))

    yield Row({WHOLE: "a good engine: the real run, drawn again"}, "default evidence", GOOD, of(good_evidence))
    yield Row({WHOLE: "equal engines, equally fast"}, "default evidence", EQUAL, of(equal_evidence))


def rows() -> list[Row]:
    run, bounds = Run.kept(), load_recipe(ROOT / "params.yaml").section(Bounds)
    few = list(document_rows(TEXT, run, bounds, count=30))
    return [
        *(row for of in (TEXT, SHADOW, PARITY) for row in document_rows(of, run, bounds, count=of.count)),
        *few[:4],
        *task_rows(run, bounds),
        *source_rows(run, bounds),
        *serving_rows(bounds),
        *speed_rows(bounds),
        *gate_rows(run, bounds),
        *(row for of in (TEXT, SHADOW) for row in document_rows(of, run, bounds, count=of.count, promise=RARE)),
        *document_rows(PARITY, run, bounds, count=PARITY.count, promise=NONE),
    ]


def run_number(number: int, runs: int) -> list[Result]:
    """For another process: a row itself cannot be sent there."""
    return run_row(rows()[number], runs)


# the page


PROMISES = {
    BOUND: (
        "The truth lies on the bound",
        "The value that the check bounds lies exactly on its bound: a pass is wrong, and so is a fail. Each may happen "
        "in 5 % of runs; the rest is INCONCLUSIVE.",
    ),
    BAD: ("Worse than a bound", "A pass is wrong."),
    EQUAL: (
        "Equal engines",
        "Candidate and baseline have the same law: a fail is wrong. Their speed ratio, of median 1, lies on the "
        "default bound, so such an engine does not pass either: it is not shown to be as fast.",
    ),
    GOOD: ("A good engine", "It passes in at least 95 % of runs."),
    RARE: (
        "Rare bad documents, without a limit for a document",
        "The mean lies on the bound when a document counts for whatever it has. A pass is wrong.",
    ),
    NONE: (
        "What is not promised",
        "The same with the few documents of parity. Of 32 documents, none is among the worst 1 % in 72 % of runs.",
    ),
}


def page(results: list[Result], runs: int, confidence: float) -> str:
    lines = [
        "# How often the gate is wrong",
        "",
        "Written by `make simulate-gate`, which judges made-up evidence with the code that judges real evidence, under",
        f"the bounds of `params.yaml`: {runs:,} runs a row. [statistics.md](../statistics.md) says what is promised.",
        "± is one standard error of the simulation.",
    ]
    for promise, (title, explanation) in PROMISES.items():
        found = [result for result in results if result.promise == promise]
        if not found:
            continue
        lines += ["", f"## {title}", "", explanation, "", "| check | distribution | evidence | PASS | FAIL |"]
        lines.append("|---|---|---|--:|--:|")
        for result in found:
            cells = (_share(count, result.runs) for count in (result.passed, result.failed))
            lines.append(f"| {result.check} | {result.distribution} | {result.units} | {' | '.join(cells)} |")
    broken = [result for result in results if not result.holds(confidence)]
    lines += ["", f"{len(results) - len(broken)} of {len(results)} rows keep their promise."]
    return "\n".join(lines) + "\n"


def _share(count: int, runs: int) -> str:
    return f"{100 * count / runs:.1f} ± {100 * standard_error(count, runs):.2f} %"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--page", type=Path, default=PAGE, help="a .json file is written beside it")
    parser.add_argument("--keep", type=Path, metavar="ARTIFACTS", help="take the figures of this real run from now on")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    if options.keep:
        made.keep(options.keep)
    confidence = load_recipe(ROOT / "params.yaml").section(Bounds).confidence
    results: list[Result] = []
    with ProcessPoolExecutor(options.workers) as pool:
        for found in pool.map(partial(run_number, runs=options.runs), range(len(rows()))):
            for result in found:
                shares = (_share(count, result.runs) for count in (result.passed, result.failed))
                print(f"{result.check:20} {result.distribution:60} {result.units:18} {'   '.join(shares)}", flush=True)
            results += found
    options.page.write_text(page(results, options.runs, confidence))
    options.page.with_suffix(".json").write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")
    broken = [f"{result.check}: {result.distribution}" for result in results if not result.holds(confidence)]
    print("\n".join(f"does not keep its promise: {name}" for name in broken) or "every row keeps its promise")
    return bool(broken)


if __name__ == "__main__":
    raise SystemExit(main())
