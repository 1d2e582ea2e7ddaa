"""Made-up evidence for the gate: items whose truth is known, in the shapes that real and hostile data have.

R  simulated runs      G  documents (or prompts) of a run
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from evals.items import read_items
from evals.kinds.parity import ParityItem
from evals.kinds.serving import CONTEXT, DRAWN, PATHS, PRESSED, SEVERAL, TURNS, Draws, Pressed, Pressure, ServedItem
from evals.kinds.shadow import ShadowItem
from evals.kinds.source import ANSWERS_PER_TASK, SourceAnswer, SourceItem
from evals.kinds.speed import Benchmark, SpeedSample
from evals.kinds.tasks import ChoiceItem, discordant
from evals.kinds.text import TextItem
from tapeout.artifact import load

Floats = NDArray[np.float64]
Shape = Callable[[Generator, tuple[int, int]], Floats]  # KL of documents as multiples of their mean, [R, G]

RUN_FILE = Path(__file__).with_name("run.json")
CALIBRATION_DRAWS = 200_000


@dataclass(frozen=True)
class Run:
    """What a real run of the default recipe measured, as far as a simulation needs it.

    ``text``, ``shadow``, ``parity``: tokens, KL a token, share of tokens that disagree, and for text the logarithm of
    the perplexity ratio, of each document. ``source``: the logarithm of the perplexity ratio to the source model.
    ``tasks``: items, baseline right, lost, gained. ``speed``: ratios.
    """

    text: tuple[tuple[float, float, float, float], ...]
    shadow: tuple[tuple[float, float, float], ...]
    parity: tuple[tuple[float, float, float], ...]
    source: tuple[tuple[float, float], ...]
    tasks: Mapping[str, tuple[int, int, int, int]]
    speed: Mapping[str, tuple[float, ...]]

    @classmethod
    def kept(cls) -> Run:
        return cls(**json.loads(RUN_FILE.read_text()))

    def column(self, kind: str, number: int) -> Floats:
        return np.array([row[number] for row in getattr(self, kind)])


def keep(artifacts: Path) -> None:
    """Write the figures of a run to ``run.json``."""
    text = read_items(artifacts / "evaluation/text_items.jsonl", TextItem)
    shadow = read_items(artifacts / "shadow/shadow_items.jsonl", ShadowItem)
    parity = read_items(artifacts / "parity/parity_items.jsonl", ParityItem)
    source = read_items(artifacts / "source-model/source_items.jsonl", SourceItem)
    answered = read_items(artifacts / "evaluation/task_items.jsonl", ChoiceItem)
    tasks: dict[str, tuple[int, int, int, int]] = {}
    for task in dict.fromkeys(item.task for item in answered):
        own = [item for item in answered if item.task == task]
        lost, gained = discordant(own)
        tasks[task] = (len(own), int(sum(item.baseline_score for item in own)), int(lost), int(gained))
    samples = load(artifacts / "benchmark", Benchmark).record.samples
    figures = {
        "text": [
            (i.tokens, i.kl_sum / i.tokens, 1 - i.agree / i.tokens, (i.candidate_nll - i.baseline_nll) / i.tokens)
            for i in text
            if not i.long
        ],
        "shadow": [(i.champion_tokens, i.kl_sum / i.champion_tokens, 1 - i.agree / i.champion_tokens) for i in shadow],
        "parity": [(i.tokens, i.kl_sum / i.tokens, 1 - i.agree / i.tokens) for i in parity],
        "source": [(i.tokens, (i.candidate_nll - i.source_nll) / i.tokens) for i in source if i.form == "document"],
        "tasks": tasks,
        "speed": {f"{s.phase} {s.batch}": _ratios(s) for s in samples},
    }
    lines = [f" {json.dumps(name)}: {json.dumps(rows)}" for name, rows in figures.items()]
    RUN_FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _ratios(sample: SpeedSample) -> list[float]:
    pairs = zip(sample.candidate_tokens_per_s, sample.baseline_tokens_per_s, strict=True)
    return [candidate / baseline for candidate, baseline in pairs]


# shapes: how documents differ


def resampled(values: Floats) -> Shape:
    multiples: Floats = values / values.mean()
    return lambda rng, size: multiples[rng.integers(0, len(multiples), size)]


def lognormal(sigma: float) -> Shape:
    return lambda rng, size: np.exp(rng.normal(-(sigma**2) / 2, sigma, size))


def rare(share: float, times: float, others: Shape) -> Shape:
    """``share`` of all documents have ``times`` the KL of the others."""

    def draw(rng: Generator, size: tuple[int, int]) -> Floats:
        values = others(rng, size) / (1 - share + share * times)
        return np.where(rng.random(size) < share, times * values, values)

    return draw


def scaled_to(shape: Shape, most: float) -> float:
    """The factor that brings the mean of a shape, clipped at ``most``, to 1: the truth lies on the bound."""
    draws = shape(np.random.default_rng(1), (1, CALIBRATION_DRAWS))
    return _root(lambda factor: float(np.minimum(factor * draws, most).mean()) - 1)


def disagreeing(
    shape: Shape, factor: float, tokens: Floats, rng: Generator, size: tuple[int, int]
) -> tuple[Floats, Floats]:
    """Tokens and share of tokens that disagree, of each document, where a token's probability is of this shape."""
    sizes = rng.choice(tokens, size).astype(int)
    return sizes.astype(float), rng.binomial(sizes, np.minimum(factor * shape(rng, size), 1.0)) / sizes


def scaled_to_share(shape: Shape, tokens: Floats, most: float, share: float) -> float:
    """As :func:`scaled_to`, for a share of tokens."""

    def excess(factor: float) -> float:
        rng, size = np.random.default_rng(1), (1, CALIBRATION_DRAWS // 4)
        return float(np.minimum(disagreeing(shape, factor, tokens, rng, size)[1], most).mean()) - share

    return _root(excess)


def _root(excess: Callable[[float], float]) -> float:
    low, high = 0.0, 64.0
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) < 0 else (low, middle)
    return (low + high) / 2


def clustered(mean: float, correlation: float) -> Shape:
    """Shares that differ between documents: beta, with this correlation of two tokens of one document."""
    size = 1 / correlation - 1
    return lambda rng, shape: rng.beta(mean * size, (1 - mean) * size, shape)


def all_or_little(mean: float, share: float) -> Shape:
    """``share`` of all documents disagree everywhere, the others so little that the mean is ``mean``."""
    little = (mean - share) / (1 - share)
    return lambda rng, size: np.where(rng.random(size) < share, 1.0, little)


# items


def text_items(tokens: Floats, kl: Floats, differ: Floats, log_ratio: Floats) -> tuple[TextItem, ...]:
    """One run's documents ``[G]``."""
    rows = zip(tokens.astype(int).tolist(), kl.tolist(), differ.tolist(), log_ratio.tolist(), strict=True)
    return tuple(
        TextItem.model_construct(
            doc_hash=f"text {i}",
            tokens=t,
            kl_sum=k * t,
            kl_max=10 * k + 1,
            agree=t - round(d * t),
            baseline_nll=3.0 * t + i,
            candidate_nll=3.0 * t + i + r * t,
            ranges=(k,),
            long=False,
        )
        for i, (t, k, d, r) in enumerate(rows)
    )


def shadow_items(tokens: Floats, kl: Floats, differ: Floats) -> tuple[ShadowItem, ...]:
    rows = zip(tokens.astype(int).tolist(), kl.tolist(), differ.tolist(), strict=True)
    return tuple(
        ShadowItem.model_construct(
            prompt_hash=f"prompt {i}",
            prompt_tokens=20,
            champion_tokens=t,
            candidate_tokens=t,
            agree=t - round(d * t),
            kl_sum=k * t,
            kl_max=10 * k + 1,
            exact_match=True,
            first_divergence=None,
            champion_stopped=True,
            candidate_stopped=True,
        )
        for i, (t, k, d) in enumerate(rows)
    )


def parity_items(tokens: Floats, kl: Floats, differ: Floats) -> tuple[ParityItem, ...]:
    rows = zip(tokens.astype(int).tolist(), kl.tolist(), differ.tolist(), strict=True)
    return tuple(
        ParityItem.model_construct(
            doc_hash=f"parity {i}",
            tokens=t,
            kl_sum=k * t,
            kl_max=10 * k + 1,
            agree=t - round(d * t),
            errors={"layers.3.mlp.down_proj.weight": 1e-4},
            position_error=1e-4 + 1e-9 * i,
            position_linear="layers.3.mlp.down_proj.weight",
            free_kl_sum=1.0 + i,
            free_agree=t,
        )
        for i, (t, k, d) in enumerate(rows)
    )


LAST = CONTEXT  # position of an engine that is served, the first at which it is compared with the float engine


SERVED = tuple(path for path in PATHS if path not in SEVERAL)  # by an engine with one slot


def served_items(wrong: str = "", kl: float = 0) -> tuple[ServedItem, ...]:
    """Of a sound engine with one slot, but for the KL of one path. Nothing is drawn: an engine serves as it does."""
    return tuple(
        ServedItem(
            path=path, slot=0, first_slot=0, batch=1, first=LAST, last=LAST, tokens=1, agree=1, error=0, gap=0,
            kl_sum=kl if path == wrong else 0, kl_max=kl if path == wrong else 0, float_kl_sum=0,
        )
        for path in SERVED
    )  # fmt: skip


def draws(wrong: str = "") -> tuple[Draws, ...]:
    """Of a library that draws what numpy draws, but for one draw with one of the settings."""
    return tuple(Draws(settings=name, draws=256, differ=int(name == wrong)) for name in DRAWN)


def pressure(wrong: str = "", share: float = 0) -> Pressure:
    """Of a sound serving core, but for a share of the tokens of one kind of requests."""
    tokens = 240
    return Pressure(
        shares=True,
        scarce=True,
        constrains=True,
        steps_at_once=1,
        steps_ahead=0,
        answers=tuple(
            Pressed(
                settings=name, answers=10, tokens=tokens, wrong=round(share * tokens) if name == wrong else 0,
                gap=5.0 if name == wrong else 0.0, preempted=2, cached=64, accepted=0,
            )
            for name in (*PRESSED, TURNS)
        ),
    )  # fmt: skip


def source_answers(
    asked: Sequence[ChoiceItem],
    rng: Generator | None = None,
    other: float = 0,
    shift: Mapping[str, float] | None = None,
) -> tuple[SourceAnswer, ...]:
    """The source model's answers to the first questions of each task: the baseline's.

    ``other``: share of them that are another choice. ``shift``: of the log-likelihoods of some tasks.
    """
    found: dict[str, list[SourceAnswer]] = {}
    for item in asked:
        if len(own := found.setdefault(item.task, [])) < ANSWERS_PER_TASK:
            hashes = {name: getattr(item, name) for name in ("doc_hash", "prompt_hash", "target_hash")}
            changed = int(rng is not None and rng.random() < other)
            by = (shift or {}).get(item.task, 0)
            own.append(
                SourceAnswer(
                    task=item.task, doc_id=item.doc_id, choice=(item.baseline_choice + changed) % 2,
                    loglikelihoods=tuple(score + by for score in item.baseline_loglikelihoods), **hashes,
                )
            )  # fmt: skip
    return tuple(answer for own in found.values() for answer in own)


def source_items(tokens: Floats, log_ratio: Floats) -> tuple[SourceItem, ...]:
    """Documents ``[G]``, and the other texts. ``log_ratio``: of the perplexity, candidate over source model."""
    forms = ("long", "prompt", *["document"] * len(tokens))
    sizes, ratios = [1, 1, *tokens.astype(int).tolist()], [0.0, 0.0, *log_ratio.tolist()]
    return tuple(
        SourceItem.model_construct(
            doc_hash=f"source {i}", form=form, tokens=size, kl_sum=0, kl_max=0, agree=size, source_nll=3.0 * size,
            baseline_nll=3.0 * size, candidate_nll=(3.0 + ratio) * size,
        )
        for i, (form, size, ratio) in enumerate(zip(forms, sizes, ratios, strict=True))
    )  # fmt: skip


def guessed(rng: Generator, size: int, accuracy: float) -> tuple[ChoiceItem, ...]:
    """A task with three choices that an engine answers with this accuracy."""
    right = rng.binomial(size, accuracy)
    return task_items({"guessed": [right, 0, 0, size - right]})


ANSWERS = ((True, True), (True, False), (False, True), (False, False))  # baseline and candidate are right
Table = Sequence[int]  # how many items have each of these answers


def task_items(tables: Mapping[str, Table]) -> tuple[ChoiceItem, ...]:
    chosen = (_items(task, answer)[:count] for task, table in tables.items() for answer, count in enumerate(table))
    return tuple(item for items in chosen for item in items)


@cache
def _items(task: str, answer: int, most: int = 2500) -> tuple[ChoiceItem, ...]:
    """Items of one task that are answered alike; built once, since a simulation takes them again and again."""
    baseline, candidate = ANSWERS[answer]
    return tuple(
        ChoiceItem.model_construct(
            task=task,
            doc_id=most * answer + number,
            doc_hash=f"{task} {answer} {number}",
            prompt_hash=f"{task} {answer} {number}",
            target_hash=f"{task} {answer} {number}",
            metric="acc",
            gold=0,
            baseline_choice=int(not baseline),
            candidate_choice=int(not candidate),
            baseline_score=float(baseline),
            candidate_score=float(candidate),
            baseline_loglikelihoods=(-1.0, -float(len(task)), -float(answer + 4 * number)),
            candidate_loglikelihoods=(-1.0, -float(sum(task.encode())), -float(answer + 4 * number)),
        )
        for number in range(most)
    )


def task_tables(
    rng: Generator, sizes: Mapping[str, int], difference: Mapping[str, float], churn: float
) -> dict[str, Table]:
    """A run's table of each task: so many items, this true difference in accuracy, this share of changed answers."""
    tables: dict[str, Table] = {}
    for task, size in sizes.items():
        change = difference.get(task, 0.0)
        share = max(churn, abs(change))
        lost, gained = (share - change) / 2, (share + change) / 2
        right = (1 - share) * 0.6
        tables[task] = rng.multinomial(size, [right, lost, gained, 1 - right - lost - gained]).tolist()
    return tables


def speed_sample(phase: str, batch: int, ratios: Sequence[float]) -> SpeedSample:
    return SpeedSample.model_construct(
        batch=batch,
        phase=phase,
        baseline_tokens_per_s=(100.0,) * len(ratios),
        candidate_tokens_per_s=tuple(100.0 * ratio for ratio in ratios),
    )


def standard_error(count: int, runs: int) -> float:
    """Of a simulated share; never zero, since no share is known exactly from so many runs."""
    share = min(max(count / runs, 1 / runs), 1 - 1 / runs)
    return math.sqrt(share * (1 - share) / runs)
