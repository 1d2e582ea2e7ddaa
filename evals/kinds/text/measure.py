"""Stage ``evaluate``: baseline and candidate answer the same questions and score the same held-out text."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from lm_eval.evaluator import evaluate as run_tasks
from tokenizers import Tokenizer

from engines.protocol import Engine
from engines.sequences import Sequences
from evals.answers import Answerer
from evals.items import write_items
from evals.kind import Context
from evals.kinds import tasks
from evals.kinds import text as text_kind
from evals.kinds.tasks import AnswerItem, ChoiceItem, EvalReport, TaskItem, TaskSettings
from evals.kinds.tasks.free_text import FreeTextTask, answer_items, other_scores
from evals.kinds.tasks.harness import EngineLM, bos_token_of, encode
from evals.kinds.tasks.questions import LocalTask, choose_documents, load_tasks
from evals.kinds.text import HeldOutSettings, text_items, text_metrics
from evals.text import joined
from tapeout.artifact import Artifact, Parents
from tapeout.errors import EvidenceError
from tapeout.fingerprint import Fingerprint

log = logging.getLogger(__name__)

PAIRING_KEYS = ("doc_id", "doc_hash", "prompt_hash", "target_hash")


def measure(context: Context, folder: Path) -> None:
    """The stage of `evals/kinds/tasks/`."""
    source, bundle, texts = context.source(), context.bundle("candidate"), context.section(HeldOutSettings)
    evaluate(
        context.section(TaskSettings),
        texts,
        context.engine("baseline"),
        context.engine("candidate"),
        context.answerer,
        tokenizer_file=bundle.folder / "tokenizer.json",
        stop_tokens=bundle.record.stop_tokens,
        data=source.folder / source.record.data_entry,
        heldout_texts=context.heldout_texts(texts.documents),
        seed=context.seed,
        executed_on=context.executed_on(),
        folder=folder,
        parents={"baseline": context.bundle("baseline"), "candidate": bundle, "source": source},
    )


def evaluate(
    settings: TaskSettings,
    text: HeldOutSettings,
    baseline: Sequences,
    candidate: Sequences,
    answerer: Callable[[Engine], Answerer],
    *,
    tokenizer_file: Path,
    stop_tokens: Sequence[int],
    data: Path,
    heldout_texts: Sequence[str],
    seed: int,
    executed_on: Fingerprint,
    folder: Path,
    parents: Parents,
) -> Artifact[EvalReport]:
    """Write an :class:`EvalReport` with ``task_items.jsonl``, ``text_items.jsonl`` and ``metrics.json`` (flat numbers).

    ``data``: the folder that holds ``<dataset>/<configuration>/<split>`` tables. ``heldout_texts``: documents neither
    engine was calibrated on; each is cut to ``evaluate.document_tokens``. ``stop_tokens``: of the model.
    ``answerer``: makes the core that serves, which answers the questions of generative tasks.
    Nothing here is downloaded, and no clock value is written: the same engines and recipe give the same digest.
    """
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    bos_token = bos_token_of(tokenizer)
    left, right = (
        EngineLM(engine, tokenizer, stop_tokens=stop_tokens, bos_token=bos_token, name=name, answerer=answerer)
        for engine, name in ((baseline, "baseline"), (candidate, "candidate"))
    )
    asked = questions(settings, data, seed)
    for task, numbers in asked:
        if isinstance(task, FreeTextTask):
            for lm in (left, right):
                task.require_room(numbers, lm)
    answered = [item for task, numbers in asked for item in task_items(task, numbers, left, right)]
    for lm in (left, right):
        rate = lm.tokens / lm.seconds if lm.seconds else 0.0
        log.info("%s: %d calls, %d tokens, %.0f tokens/s", lm.name, lm.calls, lm.tokens, rate)
    documents = [encode(tokenizer, words, bos_token)[: text.document_tokens] for words in heldout_texts]
    scored = text_items(baseline, candidate, documents)
    positions = min(baseline.max_tokens, candidate.max_tokens)
    longs = [
        joined(documents[number * len(documents) // text.long_documents :] + documents, positions + 1)
        for number in range(text.long_documents)
    ]
    scored += text_items(baseline, candidate, longs, long=True)

    record = EvalReport(
        baseline=baseline.digest,
        candidate=candidate.digest,
        tasks=dict(Counter(item.task for item in answered)),
        shots=settings.examples,
        documents=len(scored),
        max_tokens=positions,
        versions={name: version(name) for name in ("lm-eval", "tokenizers", "datasets", "numpy")},
        beginning_of_text=bos_token,
        executed_on=executed_on,
    )
    return tasks.KIND.write(
        folder,
        record,
        parents=parents,
        items=answered,
        metrics={**task_metrics(answered), **text_metrics(scored)},
        add_files=lambda draft: write_items(draft / text_kind.KIND.items_file, scored),
    )


def questions(settings: TaskSettings, data: Path, seed: int) -> list[tuple[LocalTask | FreeTextTask, list[int]]]:
    """The tasks, and which documents of each are asked."""
    found = load_tasks(settings, data)
    contents = {name: task.contents() for name, task in found.items()}
    chosen = choose_documents(contents, settings.items, seed)
    return [(found[name], numbers) for name, numbers in chosen.items()]


def task_items(
    task: LocalTask | FreeTextTask, numbers: Sequence[int], baseline: EngineLM, candidate: EngineLM
) -> Sequence[TaskItem]:
    """Both engines' answers to the documents ``numbers`` (ascending) of one task, paired."""
    if isinstance(task, FreeTextTask):
        return answer_items(task, numbers, baseline, candidate)
    return choice_items(task, numbers, baseline, candidate)


def choice_items(task: LocalTask, numbers: Sequence[int], baseline: EngineLM, candidate: EngineLM) -> list[ChoiceItem]:
    """Those of multiple choice, paired by document and hashes."""
    left, right = (answers(task, numbers, lm) for lm in (baseline, candidate))
    if [pairing_key(answer) for answer in left] != [pairing_key(answer) for answer in right]:
        raise EvidenceError(
            f"the two engines were not asked the same questions of {task.config.task}",
            expected=f"equal {', '.join(PAIRING_KEYS)} in the same order",
            remedy="run both over the same recipe, tokenizer and data",
        )
    return [_choice_item(task, one, other) for one, other in zip(left, right, strict=True)]


def answers(task: LocalTask, numbers: Sequence[int], lm: Any) -> list[dict[str, Any]]:
    """lm-eval's log of its model ``lm`` on these documents of a task."""
    name = str(task.config.task)
    lm.task = name
    # lm-eval numbers the drawn documents by their place in this list, which must therefore ascend.
    results: Any = run_tasks(
        lm, {"tasks": {name: task}, "groups": {}}, samples={name: sorted(numbers)}, bootstrap_iters=0, log_samples=True
    )
    return results["samples"][name]


def pairing_key(answer: Mapping[str, Any]) -> dict[str, Any]:
    return {key: answer[key] for key in PAIRING_KEYS}


def _choice_item(task: LocalTask, baseline: Mapping[str, Any], candidate: Mapping[str, Any]) -> ChoiceItem:
    gold = task.right_choice(baseline["doc"])
    (left, one), (right, other) = (scored(task, answer) for answer in (baseline, candidate))
    return ChoiceItem(
        task=str(task.config.task),
        metric=task.main_metric,
        gold=gold,
        baseline_choice=one,
        candidate_choice=other,
        baseline_score=float(one == gold),
        candidate_score=float(other == gold),
        baseline_loglikelihoods=left,
        candidate_loglikelihoods=right,
        **pairing_key(baseline),
    )


def scored(task: LocalTask, answer: Mapping[str, Any]) -> tuple[tuple[float, ...], int]:
    """Log-likelihoods of the choices, and the one that the task's metric takes."""
    doc, metric = answer["doc"], task.main_metric
    choices, gold = task.doc_to_choice(doc), task.right_choice(doc)
    lengths = [len(choice) if metric == "acc_norm" else 1 for choice in choices]
    likelihoods = tuple(float(score) for score, _ in answer["filtered_resps"])
    pick = int(np.argmax(np.array(likelihoods) / lengths))
    if float(pick == gold) != float(answer[metric]):
        raise EvidenceError(
            f"{task.config.task} document {answer['doc_id']}: choice {pick} of {len(choices)}, gold {gold}",
            expected=f"lm-eval's own {metric} of {answer[metric]}",
            remedy="this task scores differently from multiple choice: leave it out of `evaluate.tasks`",
        )
    return likelihoods, pick


def task_metrics(items: Sequence[TaskItem]) -> dict[str, float]:
    """Mean scores, pooled and of each task, and flips: the share of questions that the engines score differently.

    Of a generative task also the scores by its other scorers.
    """
    metrics: dict[str, float] = {"items": len(items)}
    if not items:
        return metrics
    metrics["baseline_accuracy"] = fmean(item.baseline_score for item in items)
    metrics["candidate_accuracy"] = fmean(item.candidate_score for item in items)
    metrics["flips"] = sum(item.baseline_score != item.candidate_score for item in items) / len(items)
    for task in dict.fromkeys(item.task for item in items):
        own = [item for item in items if item.task == task]
        metrics[f"baseline_{task}"] = fmean(item.baseline_score for item in own)
        metrics[f"candidate_{task}"] = fmean(item.candidate_score for item in own)
        metrics |= other_scores(task, [item for item in own if isinstance(item, AnswerItem)])
    return metrics
