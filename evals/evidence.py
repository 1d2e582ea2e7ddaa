"""Evidence: all the gate may look at, gathered in one frozen value, and the reasons to refuse it.

:func:`require_sound` refuses evidence that is empty, unequal, non-finite, impossible or of another engine, and lists
every problem at once. Absence is never agreement: only an engine that was not executed may lack reports, and then
it cannot pass.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from evals.reports import (
    EvalReport,
    ParityItem,
    ParityReport,
    ShadowItem,
    ShadowReport,
    SpeedSample,
    TaskItem,
    TextItem,
    read_items,
)
from pipeline.artifact import Artifact, Frozen, load
from pipeline.errors import EvidenceError

T = TypeVar("T")

# KL and log-likelihoods are differences of floating-point sums over the vocabulary: one may fall this far below zero.
ROUNDING_NATS = 1e-5
EXAMPLES_SHOWN = 3


class SpeedSummary(Frozen):
    """What a benchmark says to the gate: which bundles (digests) it timed, and the samples."""

    baseline: str
    candidate: str
    samples: tuple[SpeedSample, ...]


class ProofSummary(Frozen):
    """Proof of quantization of the QuantizedModel with digest ``quantized``; ``reasons`` say why it is not ok."""

    quantized: str
    ok: bool
    reasons: tuple[str, ...]
    bits_per_weight: float


@dataclass(frozen=True)
class Evidence:
    """``digests`` maps the noun of every report given to its digest. Reports are None only if nothing was executed."""

    baseline: str  # bundle digests
    candidate: str
    quantized: str  # digest of the QuantizedModel the candidate was built from
    target: str  # hardware the candidate was built for, such as "sm89" or a CPU's fingerprint
    executed_on: str | None  # the hardware it ran on; None: compiled only
    proof: ProofSummary
    quality: EvalReport | None = None
    task_items: tuple[TaskItem, ...] = ()
    text_items: tuple[TextItem, ...] = ()
    shadow: ShadowReport | None = None
    shadow_items: tuple[ShadowItem, ...] = ()
    parity: ParityReport | None = None
    parity_items: tuple[ParityItem, ...] = ()
    speed: SpeedSummary | None = None
    digests: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def missing(self) -> tuple[str, ...]:
        reports = {
            "EvalReport": self.quality,
            "ShadowReport": self.shadow,
            "ParityReport": self.parity,
            "Benchmark": self.speed,
        }
        return tuple(noun for noun, report in reports.items() if report is None)


def load_evidence(
    *,
    baseline: str,
    candidate: str,
    quantized: str,
    target: str,
    executed_on: str | None,
    proof: ProofSummary,
    speed: SpeedSummary | None,
    digests: Mapping[str, str],
    evaluation: Path | None,
    shadow: Path | None,
    parity: Path | None,
) -> Evidence:
    """Read the reports' folders, hashing every file again. A folder that is not given is missing evidence.

    ``digests``: of the nouns read by the caller (``Benchmark``, ``QuantizedModel``).
    """
    quality_report = load(evaluation, EvalReport) if evaluation else None
    shadow_report = load(shadow, ShadowReport) if shadow else None
    parity_report = load(parity, ParityReport) if parity else None
    reports: list[Artifact[EvalReport] | Artifact[ShadowReport] | Artifact[ParityReport]] = [
        report for report in (quality_report, shadow_report, parity_report) if report
    ]
    for report in reports:
        report.verify()
    return Evidence(
        baseline=baseline,
        candidate=candidate,
        quantized=quantized,
        target=target,
        executed_on=executed_on,
        proof=proof,
        quality=quality_report.record if quality_report else None,
        task_items=read_items(quality_report.folder / "task_items.jsonl", TaskItem) if quality_report else (),
        text_items=read_items(quality_report.folder / "text_items.jsonl", TextItem) if quality_report else (),
        shadow=shadow_report.record if shadow_report else None,
        shadow_items=read_items(shadow_report.folder / "shadow_items.jsonl", ShadowItem) if shadow_report else (),
        parity=parity_report.record if parity_report else None,
        parity_items=read_items(parity_report.folder / "parity_items.jsonl", ParityItem) if parity_report else (),
        speed=speed,
        digests={**digests, **{report.record.noun: report.digest for report in reports}},
    )


def require_sound(evidence: Evidence) -> None:
    """Raise :class:`EvidenceError` with every problem found; return only for evidence that may be judged."""
    problems = [
        *_identity(evidence),
        *_proof(evidence),
        *_tasks(evidence),
        *_texts(evidence),
        *_shadow(evidence),
        *_parity(evidence),
        *_speed(evidence),
    ]
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise EvidenceError(
            f"the evidence has {count}:" + "".join(f"\n  - {problem}" for problem in problems),
            expected="complete, paired and finite reports about the engines being judged",
            remedy="run `dvc repro`; it measures again whatever is missing or belongs to another engine",
        )


def _identity(evidence: Evidence) -> list[str]:
    problems = [
        f"{name} has no digest" for name in ("baseline", "candidate", "quantized") if not getattr(evidence, name)
    ]
    if evidence.baseline == evidence.candidate:
        problems.append(f"baseline and candidate are the same engine {_short(evidence.candidate)}")
    if evidence.executed_on is not None:
        problems += [f"{noun} is missing although the engine was executed" for noun in evidence.missing]
    expected = {"EvalReport", "ShadowReport", "ParityReport", "Benchmark", "QuantizedModel"} - set(evidence.missing)
    problems += [f"no digest of {noun}" for noun in sorted(expected) if not evidence.digests.get(noun)]
    problems += [f"a digest of {noun}, which was not given" for noun in evidence.missing if noun in evidence.digests]
    if evidence.digests.get("QuantizedModel", evidence.quantized) != evidence.quantized:
        problems.append(_foreign("the QuantizedModel", evidence.digests["QuantizedModel"], evidence.quantized))
    return problems


def _proof(evidence: Evidence) -> list[str]:
    proof = evidence.proof
    problems: list[str] = []
    if proof.quantized != evidence.quantized:
        problems.append(_foreign("the proof of quantization", proof.quantized, evidence.quantized))
    if not (math.isfinite(proof.bits_per_weight) and proof.bits_per_weight > 0):
        problems.append(f"the proof of quantization claims {proof.bits_per_weight} bits per weight")
    if proof.ok == bool(proof.reasons):
        problems.append(f"the proof of quantization is ok={proof.ok} with {len(proof.reasons)} reasons against it")
    return problems


def _tasks(evidence: Evidence) -> list[str]:
    report, items = evidence.quality, evidence.task_items
    if report is None:
        return ["task items without their EvalReport"] if items else []
    problems: list[str] = []
    if report.baseline != evidence.baseline:
        problems.append(_foreign("EvalReport's baseline", report.baseline, evidence.baseline))
    if report.candidate != evidence.candidate:
        problems.append(_foreign("EvalReport's candidate", report.candidate, evidence.candidate))
    if not items:
        problems.append("EvalReport has no task items")
    counts = Counter(item.task for item in items)
    problems += [
        f"task {task}: {counts[task]} items, but EvalReport claims {report.tasks.get(task, 0)}"
        for task in sorted(counts.keys() | report.tasks.keys())
        if counts[task] != report.tasks.get(task, 0)
    ]
    problems += _twice("task item", [f"{item.task}/{item.doc_id}" for item in items])

    def name(item: TaskItem) -> str:
        return f"{item.task}/{item.doc_id}"

    def options(item: TaskItem) -> int:
        return len(item.baseline_loglikelihoods)

    rules: tuple[tuple[str, Callable[[TaskItem], bool]], ...] = (
        ("lack a pairing hash", lambda i: not (i.doc_hash and i.prompt_hash and i.target_hash)),
        (
            "have non-finite log-likelihoods",
            lambda i: not _finite(*i.baseline_loglikelihoods, *i.candidate_loglikelihoods),
        ),
        ("have no log-likelihoods, or unequally many", lambda i: not options(i) == len(i.candidate_loglikelihoods) > 0),
        (
            "choose or want an answer that does not exist",
            lambda i: not all(0 <= choice < options(i) for choice in (i.gold, i.baseline_choice, i.candidate_choice)),
        ),
        (
            "are marked right or wrong against their own choice",
            lambda i: (
                i.baseline_correct != (i.baseline_choice == i.gold)
                or i.candidate_correct != (i.candidate_choice == i.gold)
            ),
        ),
    )
    return problems + _broken("task items", items, name, rules)


def _texts(evidence: Evidence) -> list[str]:
    report, items = evidence.quality, evidence.text_items
    if report is None:
        return ["text items without their EvalReport"] if items else []
    problems = _counted("EvalReport", "text items", len(items), report.documents)
    problems += _twice("document", [item.doc_hash for item in items])
    rules: tuple[tuple[str, Callable[[TextItem], bool]], ...] = (
        *_token_rules(lambda item: item.tokens),
        (
            "have a non-finite or negative log-likelihood",
            lambda i: not all(_sum_of_nats(nll, i.tokens) for nll in (i.baseline_nll, i.candidate_nll)),
        ),
        ("have a mean KL above their largest", lambda i: _mean_above_max(i.kl_sum, i.kl_max, i.tokens)),
    )
    return problems + _broken("text items", items, lambda item: _short(item.doc_hash), rules)


def _shadow(evidence: Evidence) -> list[str]:
    report, items = evidence.shadow, evidence.shadow_items
    if report is None:
        return ["shadow items without their ShadowReport"] if items else []
    problems = _counted("ShadowReport", "prompts", len(items), report.prompts)
    if report.candidate != evidence.candidate:
        problems.append(_foreign("ShadowReport's candidate", report.candidate, evidence.candidate))
    if report.champion == evidence.candidate:
        problems.append("ShadowReport replayed the candidate against itself")
    if report.champion_is_baseline != (report.champion == evidence.baseline):
        claim = "is" if report.champion_is_baseline else "is not"
        problems.append(f"ShadowReport says its champion {_short(report.champion)} {claim} the baseline")
    problems += _twice("prompt", [item.prompt_hash for item in items])
    limit = report.max_new_tokens
    rules: tuple[tuple[str, Callable[[ShadowItem], bool]], ...] = (
        *_token_rules(lambda item: item.champion_tokens),
        ("have an impossible response length", lambda i: not (1 <= i.candidate_tokens <= limit >= i.champion_tokens)),
        ("are an exact match that diverges, or neither", lambda i: i.exact_match != (i.first_divergence is None)),
        (
            "are an exact match of unequal length",
            lambda i: i.exact_match and i.champion_tokens != i.candidate_tokens,
        ),
        (
            "diverge behind the end of a response",
            lambda i: (
                i.first_divergence is not None
                and not 0 <= i.first_divergence <= min(i.champion_tokens, i.candidate_tokens)
            ),
        ),
    )
    return problems + _broken("shadow items", items, lambda item: _short(item.prompt_hash), rules)


def _parity(evidence: Evidence) -> list[str]:
    report, items = evidence.parity, evidence.parity_items
    if report is None:
        return ["parity items without their ParityReport"] if items else []
    problems = _counted("ParityReport", "documents", len(items), report.documents)
    if report.candidate != evidence.candidate:
        problems.append(_foreign("ParityReport's candidate", report.candidate, evidence.candidate))
    if report.quantized != evidence.quantized:
        problems.append(_foreign("ParityReport's quantized model", report.quantized, evidence.quantized))
    problems += _twice("parity document", [item.doc_hash for item in items])
    rules: tuple[tuple[str, Callable[[ParityItem], bool]], ...] = (
        *_token_rules(lambda item: item.tokens),
        ("have a mean KL above their largest", lambda i: _mean_above_max(i.kl_sum, i.kl_max, i.tokens)),
        ("have no finite error", lambda i: not 0 <= i.worst_error < math.inf),
    )
    return problems + _broken("parity items", items, lambda item: _short(item.doc_hash), rules)


def _speed(evidence: Evidence) -> list[str]:
    speed = evidence.speed
    if speed is None:
        return []
    problems: list[str] = []
    if speed.baseline != evidence.baseline:
        problems.append(_foreign("Benchmark's baseline", speed.baseline, evidence.baseline))
    if speed.candidate != evidence.candidate:
        problems.append(_foreign("Benchmark's candidate", speed.candidate, evidence.candidate))
    if not any(sample.phase == "decode" for sample in speed.samples):
        problems.append("Benchmark has no decode samples")

    def name(sample: SpeedSample) -> str:
        return f"{sample.phase} at batch {sample.batch}"

    problems += _twice("speed sample", [name(sample) for sample in speed.samples])
    rules: tuple[tuple[str, Callable[[SpeedSample], bool]], ...] = (
        ("have no batch", lambda s: s.batch < 1),
        ("have no repeats", lambda s: not s.baseline_tokens_per_s or not s.candidate_tokens_per_s),
        ("have unpaired repeats", lambda s: len(s.baseline_tokens_per_s) != len(s.candidate_tokens_per_s)),
        (
            "have a non-finite or non-positive speed",
            lambda s: (
                not all(math.isfinite(v) and v > 0 for v in (*s.baseline_tokens_per_s, *s.candidate_tokens_per_s))
            ),
        ),
    )
    return problems + _broken("speed samples", speed.samples, name, rules)


Scored = TypeVar("Scored", TextItem, ShadowItem, ParityItem)


def _token_rules(tokens: Callable[[Scored], int]) -> tuple[tuple[str, Callable[[Scored], bool]], ...]:
    """Rules every item with token counts, agreement and a KL sum must keep."""
    return (
        ("have no tokens", lambda i: tokens(i) < 1),
        ("agree on more tokens than they have, or on fewer than none", lambda i: not 0 <= i.agree <= tokens(i)),
        (
            "have a non-finite or negative KL",
            lambda i: not _sum_of_nats(i.kl_sum, tokens(i)),
        ),
    )


def _counted(report: str, what: str, found: int, claimed: int) -> list[str]:
    if not found:
        return [f"{report} has no {what}"]
    return [f"{report} has {found} {what}, but claims {claimed}"] if found != claimed else []


def _twice(what: str, keys: Iterable[str]) -> list[str]:
    repeated = [key for key, count in Counter(keys).items() if count > 1]
    return [f"{what} {_listed([_short(key) for key in repeated])} more than once"] if repeated else []


def _broken(
    what: str,
    items: Sequence[T],
    name: Callable[[T], str],
    rules: Iterable[tuple[str, Callable[[T], bool]]],
) -> list[str]:
    """One line per rule that any item breaks, with how many break it and the first few by name."""
    problems: list[str] = []
    for complaint, breaks in rules:
        names = [name(item) for item in items if breaks(item)]
        if names:
            problems.append(f"{len(names)} of {len(items)} {what} {complaint}: {_listed(names)}")
    return problems


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:EXAMPLES_SHOWN]) + (", …" if len(names) > EXAMPLES_SHOWN else "")


def _foreign(what: str, found: str, expected: str) -> str:
    return f"{what} is {_short(found)}, not {_short(expected)} which is being judged"


def _short(digest: str) -> str:
    return digest if len(digest) <= 24 else f"{digest[:12]}…"


def _finite(*values: float) -> bool:
    return all(math.isfinite(value) for value in values)


def _sum_of_nats(total: float, tokens: int) -> bool:
    """Whether a sum of KL or negative log-likelihood over ``tokens`` positions is possible."""
    return math.isfinite(total) and total >= -ROUNDING_NATS * max(tokens, 1)


def _mean_above_max(total: float, largest: float, tokens: int) -> bool:
    return not math.isfinite(largest) or (tokens > 0 and total / tokens > largest + ROUNDING_NATS)
