"""Which evidence may be judged: not what is empty, incomplete, unequal, non-finite, impossible or of another engine.

Every problem is listed at once. Absence is never agreement: only an engine that was not executed may lack reports, and
then it cannot pass.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from evals.evidence import Evidence
from evals.reports import ParityItem, ShadowItem, SpeedSample, TaskItem, TextItem
from evals.verdict import Verdict
from tapeout.errors import EvidenceError

T = TypeVar("T")
Scored = TypeVar("Scored", TextItem, ShadowItem, ParityItem)
Summed = TypeVar("Summed", TextItem, ParityItem)
Rule = tuple[str, Callable[[T], bool]]  # a complaint, and whether an item deserves it

# KL and log-likelihoods are differences of floating-point sums over the vocabulary: one may fall this far below zero.
ROUNDING_NATS = 1e-5
EXAMPLES_SHOWN = 3
DIGEST_CHARS = 64
QUANTIZED = Verdict.parent_roles["quantized"]


def require_sound(evidence: Evidence) -> None:
    """Raise :class:`EvidenceError` with every problem found; return only for evidence that may be judged."""
    problems = [
        *_identity(evidence),
        *_engines(evidence),
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
    judged = next((noun for noun in QUANTIZED if noun in evidence.digests), QUANTIZED[0])
    expected = {*evidence.reports, judged} - set(evidence.missing)
    problems += [f"no digest of {noun}" for noun in sorted(expected) if not evidence.digests.get(noun)]
    problems += [f"a digest of {noun}, which was not given" for noun in evidence.missing if noun in evidence.digests]
    items = (
        ("task items", evidence.task_items, "EvalReport"),
        ("text items", evidence.text_items, "EvalReport"),
        ("shadow items", evidence.shadow_items, "ShadowReport"),
        ("parity items", evidence.parity_items, "ParityReport"),
    )
    problems += [f"{what} without their {noun}" for what, found, noun in items if found and noun in evidence.missing]
    return problems


def _engines(evidence: Evidence) -> list[str]:
    """Every digest a report, the proof or the quantized model names must be of what is being judged."""
    named: list[tuple[str, str, str]] = [
        *((f"the {noun}", evidence.digests.get(noun, evidence.quantized), evidence.quantized) for noun in QUANTIZED),
        ("the proof of quantization", evidence.proof.quantized, evidence.quantized),
    ]
    fields = {"baseline": "baseline", "candidate": "candidate", "quantized": "quantized model"}
    named += [
        (f"{noun}'s {title}", getattr(report, name), getattr(evidence, name))
        for noun, report in evidence.reports.items()
        for name, title in fields.items()
        if hasattr(report, name)
    ]
    return [
        f"{what} is {_short(found)}, not {_short(judged)} which is being judged"
        for what, found, judged in named
        if found != judged
    ]


def _proof(evidence: Evidence) -> list[str]:
    proof = evidence.proof
    problems: list[str] = []
    if not (math.isfinite(proof.bits_per_weight) and proof.bits_per_weight > 0):
        problems.append(f"the proof of quantization claims {proof.bits_per_weight} bits per weight")
    if proof.ok == bool(proof.reasons):
        problems.append(f"the proof of quantization is ok={proof.ok} with {len(proof.reasons)} reasons against it")
    return problems


def _tasks(evidence: Evidence) -> list[str]:
    if evidence.quality is None:
        return []
    items, claimed = evidence.task_items, evidence.quality.tasks
    counts = Counter(item.task for item in items)
    problems = [] if items else ["EvalReport has no task items"]
    problems += [
        f"task {task}: {counts[task]} items, but EvalReport claims {claimed.get(task, 0)}"
        for task in sorted(counts.keys() | claimed.keys())
        if counts[task] != claimed.get(task, 0)
    ]

    def options(item: TaskItem) -> int:
        return len(item.baseline_loglikelihoods)

    rules: tuple[Rule[TaskItem], ...] = (
        ("lack a pairing hash", lambda i: not (i.doc_hash and i.prompt_hash and i.target_hash)),
        (
            "have non-finite log-likelihoods",
            lambda i: not all(map(math.isfinite, (*i.baseline_loglikelihoods, *i.candidate_loglikelihoods))),
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
    return problems + _broken("task item", items, lambda i: f"{i.task}/{i.doc_id}", rules)


def _texts(evidence: Evidence) -> list[str]:
    if evidence.quality is None:
        return []
    items = evidence.text_items
    rules: tuple[Rule[TextItem], ...] = (
        *_token_rules(lambda item: item.tokens),
        (
            "have a non-finite or negative log-likelihood",
            lambda i: not all(_sum_of_nats(nll, i.tokens) for nll in (i.baseline_nll, i.candidate_nll)),
        ),
        ("have a mean KL above their largest", _mean_above_largest),
    )
    return [
        *_counted("EvalReport", "text items", len(items), evidence.quality.documents),
        *_broken("text item", items, lambda i: i.doc_hash, rules, key="document"),
    ]


def _shadow(evidence: Evidence) -> list[str]:
    report, items = evidence.shadow, evidence.shadow_items
    if report is None:
        return []
    problems = _counted("ShadowReport", "prompts", len(items), report.prompts)
    if report.champion == evidence.candidate:
        problems.append("ShadowReport replayed the candidate against itself")
    if report.champion_is_baseline != (report.champion == evidence.baseline):
        claim = "is" if report.champion_is_baseline else "is not"
        problems.append(f"ShadowReport says its champion {_short(report.champion)} {claim} the baseline")
    limit = report.max_new_tokens
    rules: tuple[Rule[ShadowItem], ...] = (
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
    return problems + _broken("shadow item", items, lambda i: i.prompt_hash, rules, key="prompt")


def _parity(evidence: Evidence) -> list[str]:
    if evidence.parity is None:
        return []
    items = evidence.parity_items
    rules: tuple[Rule[ParityItem], ...] = (
        *_token_rules(lambda item: item.tokens),
        ("have a mean KL above their largest", _mean_above_largest),
        ("have no finite error", lambda i: not 0 <= i.worst_error < math.inf),
    )
    return [
        *_counted("ParityReport", "documents", len(items), evidence.parity.documents),
        *_broken("parity item", items, lambda i: i.doc_hash, rules, key="parity document"),
    ]


def _speed(evidence: Evidence) -> list[str]:
    speed = evidence.speed
    if speed is None:
        return []
    problems = [] if speed.batches else ["Benchmark was asked for no batch"]
    decoded = {sample.batch for sample in speed.samples if sample.phase == "decode"}
    if all(sample.phase != "prefill" for sample in speed.samples):
        problems.append("Benchmark has no prefill samples")
    problems += [f"Benchmark has no decode samples at batch {batch}" for batch in speed.batches if batch not in decoded]
    rules: tuple[Rule[SpeedSample], ...] = (
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
    return problems + _broken("speed sample", speed.samples, lambda s: f"{s.phase} at batch {s.batch}", rules)


def _token_rules(tokens: Callable[[Scored], int]) -> tuple[Rule[Scored], ...]:
    """Rules every item with token counts, agreement and a KL sum must keep."""
    return (
        ("have no tokens", lambda i: tokens(i) < 1),
        ("agree on more tokens than they have, or on fewer than none", lambda i: not 0 <= i.agree <= tokens(i)),
        ("have a non-finite or negative KL", lambda i: not _sum_of_nats(i.kl_sum, tokens(i))),
    )


def _sum_of_nats(total: float, tokens: int) -> bool:
    """Whether a sum of KL or negative log-likelihood over ``tokens`` positions is possible."""
    return math.isfinite(total) and total >= -ROUNDING_NATS * max(tokens, 1)


def _mean_above_largest(item: Summed) -> bool:
    if not math.isfinite(item.kl_max):
        return True
    return item.tokens > 0 and item.kl_sum / item.tokens > item.kl_max + ROUNDING_NATS


def _counted(report: str, what: str, found: int, claimed: int) -> list[str]:
    if not found:
        return [f"{report} has no {what}"]
    return [f"{report} has {found} {what}, but claims {claimed}"] if found != claimed else []


def _broken(
    what: str, items: Sequence[T], name: Callable[[T], str], rules: Iterable[Rule[T]], *, key: str = ""
) -> list[str]:
    """One line if a name occurs twice, and one per rule that any item breaks, with how many and the first few by name.

    ``what``: one of the items; ``key``: what its name stands for, if not for the item.
    """
    names = [name(item) for item in items]
    repeated = [each for each, count in Counter(names).items() if count > 1]
    problems = [f"{key or what} {_listed(repeated)} more than once"] if repeated else []
    for complaint, breaks in rules:
        broken = [each for item, each in zip(items, names, strict=True) if breaks(item)]
        if broken:
            problems.append(f"{len(broken)} of {len(items)} {what}s {complaint}: {_listed(broken)}")
    return problems


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(_short, names[:EXAMPLES_SHOWN])) + (", …" if len(names) > EXAMPLES_SHOWN else "")


def _short(name: str) -> str:
    return f"{name[:12]}…" if len(name) == DIGEST_CHARS else name
