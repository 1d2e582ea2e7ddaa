"""Rows of the checks of tasks, speed, the source model and serving."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import numpy as np
from numpy.random import Generator

from benchmarks.gate import evidence as made
from benchmarks.gate.documents import NO_ERROR
from benchmarks.gate.evidence import Floats, Run, Shape, lognormal, scaled_to
from benchmarks.gate.rows import BAD, BOUND, Outcomes, Row, judged
from evals.check import Outcome, combine
from evals.conditions import times_bound
from evals.kind import Bounds
from evals.kinds import serving, source, speed, tasks
from evals.kinds.serving import ServingReport, ServingSettings
from evals.kinds.source import ANSWERS_PER_TASK, SourceAnswer, SourceReport, TextFile
from evals.kinds.tasks import ChoiceItem

SOURCE_DOCUMENTS = 32
BASELINE, CANDIDATE = "b" * 64, "c" * 64


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
    timed = speed.SpeedSummary.model_construct(batches=(1,))

    def outcomes(rng: Generator, runs: int) -> Iterator[Mapping[str, Outcome]]:
        for _ in range(runs):
            sample = made.speed_sample("decode", 1, noise(rng, repeats).tolist())
            yield judged(speed.KIND, timed, (sample,), bounds)

    return outcomes


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
        asked=ServingSettings(),
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
