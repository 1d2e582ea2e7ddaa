"""Stage ``shadow``: chat prompts replayed through the champion and the candidate.

Free-running answers show what a user would notice. The teacher-forced comparison on the champion's own tokens, in the
decode steps in which the champion chose them, measures how much the engines differ: one early divergence does not make
every later token count as different.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

from engines.protocol import FloatArray, TokenArray
from engines.sequences import Sequences
from evals.generation import Response, greedy
from evals.items import write_items, write_metrics
from evals.kind import Context
from evals.kinds.shadow import ShadowItem, ShadowReport, ShadowSettings
from evals.text import kl_divergences, token_hash
from tapeout.artifact import Artifact, Parents, create, load
from tapeout.errors import EvidenceError
from tapeout.fingerprint import Fingerprint


def measure(context: Context, folder: Path) -> None:
    """The stage of `evals/kinds/shadow.py`."""
    settings, source, bundle = context.section(ShadowSettings), context.source(), context.bundle("candidate")
    champion, engine, is_baseline = context.champion()
    shadow(
        settings,
        engine,
        context.engine("candidate"),
        prompts=context.chat_prompts(settings.datasets, settings.prompts),
        stop_tokens=bundle.record.stop_tokens,
        champion_is_baseline=is_baseline,
        executed_on=context.executed_on(),
        folder=folder,
        parents={"champion": champion, "candidate": bundle, "source": source},
    )


def shadow(
    settings: ShadowSettings,
    champion: Sequences,
    candidate: Sequences,
    *,
    prompts: Sequence[Sequence[int]],
    stop_tokens: Collection[int],
    champion_is_baseline: bool,
    executed_on: Fingerprint,
    folder: Path,
    parents: Parents,
) -> Artifact[ShadowReport]:
    """Write a :class:`ShadowReport` with ``shadow_items.jsonl`` and ``metrics.json`` (flat numbers).

    ``prompts``: chat-formatted token ids. ``champion_is_baseline``: no champion is registered, and the float engine
    stands in for it. Greedy, so the same engines and prompts give the same digest.
    """
    limit = settings.max_new_tokens
    items = shadow_items(champion, candidate, prompts, max_new_tokens=limit, stop_tokens=stop_tokens)
    with create(folder, ShadowReport) as draft:
        write_items(draft.folder / "shadow_items.jsonl", items)
        write_metrics(draft.folder, shadow_metrics(items))
        draft.finish(
            ShadowReport(
                champion=champion.digest,
                candidate=candidate.digest,
                champion_is_baseline=champion_is_baseline,
                prompts=len(items),
                max_new_tokens=limit,
                executed_on=executed_on,
            ),
            parents=parents,
        )
    return load(folder, ShadowReport)


def shadow_items(
    champion: Sequences,
    candidate: Sequences,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_tokens: Collection[int],
) -> list[ShadowItem]:
    """One item per prompt, in order. :class:`EvidenceError` without prompts, or for one that does not fit."""
    if not prompts:
        raise EvidenceError("no prompts to replay", expected="chat prompts", remedy="check `shadow.datasets`")
    both = Lockstep(champion, candidate)
    answers, others = (
        greedy(engine, prompts, max_new_tokens=max_new_tokens, stop_tokens=stop_tokens, progress=label)
        for engine, label in ((both, "champion answers"), (candidate, "candidate answers"))
    )
    rows = zip(prompts, answers, both.answers, others, strict=True)
    return [_item(prompt, answer, forced, other) for prompt, answer, forced, other in rows]


@dataclass
class Forced:
    """The candidate's agreement with the champion, token by token of an answer of the champion."""

    kl: list[float] = field(default_factory=list[float])  # nats
    agree: list[bool] = field(default_factory=list[bool])

    def add(self, champion: FloatArray, candidate: FloatArray) -> None:
        """From logits ``[V]``."""
        self.kl.append(float(kl_divergences(champion[None], candidate[None])[0]))
        self.agree.append(int(champion.argmax()) == int(candidate.argmax()))


class Lockstep:
    """The champion answers, and the candidate is fed the same tokens in the same steps and slots.

    ``answers``: in the order in which :func:`evals.generation.greedy` prefills prompts, which is their own.
    """

    def __init__(self, champion: Sequences, candidate: Sequences) -> None:
        self.champion, self.candidate = champion, candidate
        self.slots = min(champion.slots, candidate.slots)
        self.max_tokens = min(champion.max_tokens, candidate.max_tokens)
        self.answers: list[Forced] = []
        self._held: dict[int, Forced] = {}

    def prefill(self, slot: int, tokens: Sequence[int], *, start: int = 0) -> FloatArray:
        left, right = (engine.prefill(slot, tokens, start=start) for engine in self._engines)
        self._held[slot] = Forced()
        self.answers.append(self._held[slot])
        self._held[slot].add(left[-1], right[-1])
        return left

    def decode_greedy(self, tokens: Sequence[int], lengths: Sequence[int]) -> TokenArray:
        left, right = (engine.decode(tokens, lengths) for engine in self._engines)
        for slot, (one, other) in enumerate(zip(left, right, strict=True)):
            self._held[slot].add(one, other)
        return left.argmax(axis=1)

    def copy_slot(self, source: int, target: int, length: int) -> None:
        for engine in self._engines:
            engine.copy_slot(source, target, length)
        self._held[target] = self._held[source]

    @property
    def _engines(self) -> tuple[Sequences, Sequences]:
        return self.champion, self.candidate


def _item(prompt: Sequence[int], answer: Response, forced: Forced, other: Response) -> ShadowItem:
    divergence = first_divergence(answer.tokens, other.tokens)
    return ShadowItem(
        prompt_hash=token_hash(prompt),
        prompt_tokens=len(prompt),
        champion_tokens=len(answer.tokens),
        candidate_tokens=len(other.tokens),
        agree=sum(forced.agree),
        kl_sum=sum(forced.kl),
        kl_max=max(forced.kl),
        exact_match=divergence is None,
        first_divergence=divergence,
        champion_stopped=answer.stopped,
        candidate_stopped=other.stopped,
    )


def first_divergence(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first token in which two responses differ; where one only goes on, the other's length.

    >>> first_divergence([5, 6, 7], [5, 9]), first_divergence([5], [5, 6]), first_divergence([5], [5])
    (1, 1, None)
    """
    return next((i for i, (left, right) in enumerate(zip_longest(one, other)) if left != right), None)


def shadow_metrics(items: Sequence[ShadowItem]) -> dict[str, float]:
    """Teacher-forced means over the champion's tokens, and what the free-running answers look like."""
    tokens = sum(item.champion_tokens for item in items)
    diverged = [item.first_divergence for item in items if item.first_divergence is not None]
    return {
        "prompts": len(items),
        "champion_tokens": tokens,
        "agreement": sum(item.agree for item in items) / tokens,
        "kl_mean": sum(item.kl_sum for item in items) / tokens,
        "exact_match": sum(item.exact_match for item in items) / len(items),
        "length_ratio": sum(item.candidate_tokens for item in items) / tokens,
        "champion_stopped": sum(item.champion_stopped for item in items) / len(items),
        "candidate_stopped": sum(item.candidate_stopped for item in items) / len(items),
    } | ({"first_divergence_mean": sum(diverged) / len(diverged)} if diverged else {})
