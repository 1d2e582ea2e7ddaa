"""Stage ``source``: the checkpoint's own model in transformers against both engines, and what surrounds the engines."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from lm_eval.api.model import TemplateLM

from engines.bundle import TEXT_FILES, EngineBundle
from engines.protocol import FloatArray
from engines.sequences import Sequences
from evals.kind import Context, SourceModel
from evals.kinds.parity import ParitySettings, TableError
from evals.kinds.parity.embedding import embedding_error
from evals.kinds.shadow import ShadowSettings
from evals.kinds.source import ANSWERS_PER_TASK, KIND, SourceAnswer, SourceItem, SourceReport, TextFile
from evals.kinds.tasks import TaskSettings
from evals.kinds.tasks.questions import LocalTask
from evals.kinds.text import HeldOutSettings
from evals.kinds.text.measure import answers, pairing_key, questions, scored
from evals.text import CHUNK_TOKENS, joined, kl_divergences, log_likelihoods, token_hash
from tapeout.artifact import Artifact, Parents
from tapeout.errors import EvidenceError
from tapeout.fingerprint import Fingerprint
from tapeout.progress import ProgressBar

PROMPTS = 8
BATCH = 16  # texts of one step of the source model


def measure(context: Context, folder: Path) -> None:
    """The stage of `evals/kinds/source/`."""
    text, count = context.section(HeldOutSettings), context.section(ParitySettings).parity_documents
    bundles = {role: context.bundle(role) for role in ("baseline", "candidate")}
    documents = [ids[: text.document_tokens] for ids in context.encode(context.heldout_texts(text.documents)[:count])]
    prompts = context.chat_prompts(context.section(ShadowSettings).datasets, PROMPTS)
    context.progress("loading the checkpoint")
    model, graph, source = context.source_model(), context.graph(), context.source()
    positions = bundles["candidate"].record.io.max_tokens
    texts = [
        *(("document", tokens) for tokens in documents),
        ("long", joined(documents, positions + 1)),
        *(("prompt", tokens) for tokens in prompts),
    ]
    # Before the engines are opened: the probe holds the candidate's weights, too.
    embedding = embedding_error(context.probe().embedding(), model.embedding())
    answers = source_answers(
        model,
        context.tokenizer(),
        context.section(TaskSettings),
        source.folder / source.record.data_entry,
        seed=context.seed,
        max_tokens=positions,
    )
    compare_source(
        model,
        context.engine("baseline", slots=1),
        context.engine("candidate", slots=1),
        texts,
        embedding=embedding,
        answers=answers,
        files=text_files(graph, bundles),
        stop_tokens={
            "source": model.stop_tokens,
            "graph": graph.record.stop_tokens,
            **{role: bundle.record.stop_tokens for role, bundle in bundles.items()},
        },
        executed_on=context.executed_on(),
        folder=folder,
        parents={**bundles, "graph": graph, "source": source},
    )


def compare_source(
    model: SourceModel,
    baseline: Sequences,
    candidate: Sequences,
    texts: Sequence[tuple[str, Sequence[int]]],
    *,
    embedding: TableError,
    answers: tuple[SourceAnswer, ...],
    files: tuple[TextFile, ...],
    stop_tokens: Mapping[str, tuple[int, ...]],
    executed_on: Fingerprint,
    folder: Path,
    parents: Parents,
) -> Artifact[SourceReport]:
    """Write a :class:`SourceReport`; ``texts``: form and token ids of each."""
    rows = ProgressBar(texts, title="source model", unit="text")
    items = [source_item(model, baseline, candidate, form, tokens) for form, tokens in rows]
    record = SourceReport(
        baseline=baseline.digest,
        candidate=candidate.digest,
        documents=len(items),
        max_tokens=candidate.max_tokens,
        vocabulary=candidate.vocab_size,
        embedding=embedding,
        answers=answers,
        files=files,
        stop_tokens=dict(stop_tokens),
        executed_on=executed_on,
    )
    return KIND.write(folder, record, parents=parents, items=items, metrics=source_metrics(items))


def source_metrics(items: Sequence[SourceItem]) -> dict[str, float]:
    """Flat numbers for ``dvc metrics``."""
    tokens = sum(item.tokens for item in items)
    return {
        "kl_mean": sum(item.kl_sum for item in items) / tokens,
        "kl_worst_text": max(item.kl_sum / item.tokens for item in items),
        "kl_max": max(item.kl_max for item in items),
        "agreement": sum(item.agree for item in items) / tokens,
    }


def source_item(
    model: SourceModel, baseline: Sequences, candidate: Sequences, form: str, tokens: Sequence[int]
) -> SourceItem:
    """How the model and both engines predict every token of a text but the first."""
    fed = list(tokens[:-1])
    kl: list[np.ndarray] = []
    done, agree, nll = 0, 0, np.zeros(3)
    for rows in model.parts(fed):
        if rows.shape[1] != baseline.vocab_size:
            raise EvidenceError(
                f"{rows.shape[1]} logits after each token from the source model",
                expected=f"one for each of {baseline.vocab_size} tokens, as in the engines",
                remedy="run `dvc repro export`; the checkpoint is another one",
            )
        for expected in np.split(rows, range(CHUNK_TOKENS, len(rows), CHUNK_TOKENS)):
            part = slice(done, done + len(expected))
            targets = tokens[part.start + 1 : part.stop + 1]
            logits = [_fed(engine, fed, part) for engine in (baseline, candidate)]
            kl.append(kl_divergences(expected, logits[0]))
            agree += int((expected.argmax(axis=1) == logits[0].argmax(axis=1)).sum())
            nll -= [float(log_likelihoods(given, targets).sum()) for given in (expected, *logits)]
            done = part.stop
    if done != len(fed):
        raise EvidenceError(
            f"logits after {done} of {len(fed)} tokens from the source model",
            expected="logits after each token of a text",
            remedy="run `dvc repro export`; if it happens again, report it",
        )
    every = np.concatenate(kl)
    if not (np.isfinite(every).all() and np.isfinite(nll).all()):
        raise EvidenceError(
            "the source model or an engine returned NaN or infinite logits",
            expected="finite float32 logits",
            remedy="`tapeout inspect` shows the scales and kernels; then quantize and build again",
        )
    return SourceItem(
        doc_hash=token_hash(tokens),
        form=form,
        tokens=len(fed),
        kl_sum=float(every.sum()),
        kl_max=float(every.max()),
        agree=agree,
        source_nll=float(nll[0]),
        baseline_nll=float(nll[1]),
        candidate_nll=float(nll[2]),
    )


class SourceLM(TemplateLM):
    """lm-eval's interface over the source model. It shares nothing with that of the engines but lm-eval itself.

    ``tokenizer``: of transformers. ``max_tokens``: positions of the engines.
    """

    def __init__(self, model: SourceModel, tokenizer: Any, max_tokens: int) -> None:
        super().__init__()
        self._model, self._tokenizer, self._max_tokens = model, tokenizer, max_tokens

    @property
    def eot_token_id(self) -> int:
        return self._model.stop_tokens[0]

    @property
    def prefix_token_id(self) -> int:
        """As transformers puts it before a text, if it does."""
        return next(iter(self._tokenizer("").input_ids), self.eot_token_id)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        return self._tokenizer(string, add_special_tokens=add_special_tokens is not False).input_ids

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        # lm-eval's bar over the tokenization would write to logs.
        return super().loglikelihood(requests, disable_tqdm=True)

    def _loglikelihood_tokens(self, requests: Sequence[Any], **kwargs: Any) -> list[tuple[float, bool]]:
        texts = [[*context, *continuation][-(self._max_tokens + 1) :] for _, context, continuation in requests]
        longest = max((len(continuation) for _, _, continuation in requests), default=0)
        if longest > self._max_tokens:
            raise EvidenceError(
                f"{longest} continuation tokens",
                expected=f"at most {self._max_tokens}, the positions of the engines",
                remedy="leave this item's task out of `evaluate.tasks`, or export with a larger `export.max_positions`",
            )
        order = sorted(range(len(texts)), key=lambda number: len(texts[number]))
        found: dict[int, tuple[float, bool]] = {}
        batches = [order[begin:][:BATCH] for begin in range(0, len(order), BATCH)]
        for batch in ProgressBar(batches, title="source model's choices", unit="batch"):
            last = [len(requests[number][2]) for number in batch]
            for number, rows in zip(batch, self._model.batch([texts[n][:-1] for n in batch], last), strict=True):
                tokens = requests[number][2]
                found[number] = float(log_likelihoods(rows, tokens).sum()), rows.argmax(axis=1).tolist() == tokens
        return [found[number] for number in range(len(texts))]

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        raise NotImplementedError("it answers multiple choice")

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        raise NotImplementedError("it answers multiple choice")


def source_answers(
    model: SourceModel, tokenizer: Any, settings: TaskSettings, data: Path, *, seed: int, max_tokens: int
) -> tuple[SourceAnswer, ...]:
    """What the model answers to some of the questions of every multiple-choice task that the engines are asked."""
    lm, found = SourceLM(model, tokenizer, max_tokens), list[SourceAnswer]()
    for task, numbers in questions(settings, data, seed):
        if not isinstance(task, LocalTask):
            continue
        name = str(task.config.task)
        drawn = random.Random(f"{seed}/source/{name}").sample(numbers, min(ANSWERS_PER_TASK, len(numbers)))
        for answer in answers(task, drawn, lm):
            likelihoods, choice = scored(task, answer)
            found.append(SourceAnswer(task=name, choice=choice, loglikelihoods=likelihoods, **pairing_key(answer)))
    return tuple(found)


def _fed(engine: Sequences, tokens: Sequence[int], part: slice) -> FloatArray:
    """Logits of a part of a text whose beginning slot 0 holds."""
    return engine.prefill(0, tokens[part], start=part.start, positions=range(part.stop - part.start))


def text_files(graph: Artifact[Any], bundles: Mapping[str, Artifact[EngineBundle]]) -> tuple[TextFile, ...]:
    """Hashes of what tokenizes, formats and ends texts, in the exported model and beside both engines."""

    def found(artifact: Artifact[Any], name: str) -> str | None:
        return artifact.files[name].sha256 if name in artifact.files else None

    return tuple(
        TextFile(
            name=name,
            graph=found(graph, name),
            baseline=found(bundles["baseline"], name),
            candidate=found(bundles["candidate"], name),
        )
        for name in TEXT_FILES
    )
