"""The evidence nouns the gate judges. Reports keep per-item results and their pairing keys, not only means.

Every report names the digests of the engines it was taken from, so evidence about another engine is refused.
Items lie in ``task_items.jsonl``, ``text_items.jsonl``, ``shadow_items.jsonl`` and ``parity_items.jsonl`` beside the
record, one JSON object a line. No clock value is among them: the same inputs give the same report.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar, Literal, TypeVar

from tapeout.artifact import Frozen, Record, Roles
from tapeout.errors import EvidenceError

T = TypeVar("T", bound=Frozen)


class TaskItem(Frozen):
    """One multiple-choice question answered by both engines, by the task's own definition."""

    task: str
    doc_id: int
    doc_hash: str
    prompt_hash: str
    target_hash: str
    metric: str  # "acc" or "acc_norm"
    gold: int
    baseline_choice: int
    candidate_choice: int
    baseline_correct: bool
    candidate_correct: bool
    baseline_loglikelihoods: tuple[float, ...]
    candidate_loglikelihoods: tuple[float, ...]


class TextItem(Frozen):
    """One held-out document scored by both engines; the document is the cluster of the statistics.

    ``kl_sum``: summed KL(baseline || candidate) in nats over ``tokens`` predicted positions.
    ``nll``: summed negative log-likelihood in nats of the document's own next tokens.
    """

    doc_hash: str
    tokens: int
    kl_sum: float
    kl_max: float
    agree: int  # positions where both engines rank the same token first
    baseline_nll: float
    candidate_nll: float


class ShadowItem(Frozen):
    """One replayed prompt.

    Teacher-forced numbers (``agree``, ``kl_sum``) are over the ``champion_tokens`` positions of the champion's own
    response: both engines are fed its tokens, so one divergence is not counted again at every later position.
    Responses include the stop token they ended with, if they did: to stop is a decision too.
    """

    prompt_hash: str
    prompt_tokens: int
    champion_tokens: int
    candidate_tokens: int
    agree: int
    kl_sum: float
    exact_match: bool
    first_divergence: int | None  # token index in the free-running responses; None when they are identical
    champion_stopped: bool  # ended by a stop token rather than by the length limit
    candidate_stopped: bool


class ParityItem(Frozen):
    """One document scored by the engine and by the quantized torch model it was built from.

    ``kl_sum``, ``kl_max`` and ``agree`` are of logits with every linear locked to the engine's output, ``worst_error``
    is the largest relative error among those linears, of ``worst_linear``. ``free_*`` are of both running freely.
    """

    doc_hash: str
    tokens: int
    kl_sum: float
    kl_max: float
    agree: int
    worst_error: float
    worst_linear: str
    free_kl_sum: float
    free_agree: int


class EvalReport(Record):
    noun: ClassVar[str] = "EvalReport"
    remedy: ClassVar[str] = "run `dvc repro evaluate`"
    parent_roles: ClassVar[Roles] = {
        "baseline": ("EngineBundle",),
        "candidate": ("EngineBundle",),
        "source": ("Source",),
    }

    baseline: str  # bundle digests
    candidate: str
    tasks: dict[str, int]  # items per task
    documents: int
    versions: dict[str, str]
    beginning_of_text: int | None = None  # the token put before every text; None: the tokenizer adds none


class ShadowReport(Record):
    noun: ClassVar[str] = "ShadowReport"
    remedy: ClassVar[str] = "run `dvc repro shadow`"
    parent_roles: ClassVar[Roles] = {
        "champion": ("EngineBundle",),
        "candidate": ("EngineBundle",),
        "source": ("Source",),
    }

    champion: str
    candidate: str
    champion_is_baseline: bool  # no registered champion: the float engine stood in
    prompts: int
    max_new_tokens: int


class ParityReport(Record):
    noun: ClassVar[str] = "ParityReport"
    remedy: ClassVar[str] = "run `dvc repro parity`"
    parent_roles: ClassVar[Roles] = {"candidate": ("EngineBundle",), "quantized": ("QuantizedModel",)}

    candidate: str
    quantized: str  # digest of the QuantizedModel
    documents: int


class SpeedSample(Frozen):
    """Throughput of both engines at one batch, measured in turn: entry i of both tuples is one paired repeat."""

    batch: int
    phase: Literal["decode", "prefill"]
    baseline_tokens_per_s: tuple[float, ...]
    candidate_tokens_per_s: tuple[float, ...]


class EngineNumbers(Frozen):
    """Medians over the repeats of one engine. Dictionaries are keyed by batch.

    ``roofline_share``: weight bytes over measured read bandwidth, as a share of the step time at the smallest batch.
    ``cost_per_million_tokens``: US dollars per million generated tokens at the fastest batch.
    """

    digest: str
    ttft_ms: float
    prefill_tokens_per_s: float
    itl_ms: dict[int, float]
    decode_tokens_per_s: dict[int, float]
    peak_memory_mb: float
    bundle_mb: float
    roofline_share: float
    cost_per_million_tokens: float


class Benchmark(Record):
    noun: ClassVar[str] = "Benchmark"
    remedy: ClassVar[str] = "run `dvc repro benchmark`"
    parent_roles: ClassVar[Roles] = {"baseline": ("EngineBundle",), "candidate": ("EngineBundle",)}

    baseline: EngineNumbers
    candidate: EngineNumbers
    samples: tuple[SpeedSample, ...]
    threads: int
    prompt_tokens: int
    new_tokens: int
    read_bandwidth_gb_s: float
    price_per_hour: float


def write_items(path: Path, items: Iterable[Frozen]) -> None:
    with path.open("w") as stream:
        for item in items:
            stream.write(json.dumps(item.model_dump(mode="json"), allow_nan=False) + "\n")


def read_items(path: Path, kind: type[T]) -> tuple[T, ...]:
    """All items of a report; a line that does not parse is an :class:`EvidenceError`, never skipped."""
    items: list[T] = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            items.append(kind.model_validate_json(line))
        except ValueError as error:
            raise EvidenceError(f"{path}:{number} is not a {kind.__name__}: {error}") from error
    return tuple(items)
