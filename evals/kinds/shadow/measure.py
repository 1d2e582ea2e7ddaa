"""Stage ``shadow``: chat prompts replayed through the champion and the candidate, by the core that serves.

Free-running answers show what a user would notice. The teacher-forced comparison on the champion's own tokens, in the
steps in which the champion chose them, measures how much the engines differ: one early divergence does not make every
later token count as different.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path

import numpy as np

from engines.protocol import Engine, EngineCapabilities, Entry, Result, WholeSteps
from evals.answers import Answer, Answerer, greedy
from evals.kind import Context
from evals.kinds.shadow import KIND, ShadowItem, ShadowReport, ShadowSettings
from evals.text import kl_divergences, token_hash
from tapeout.artifact import Artifact, Parents
from tapeout.errors import EvidenceError
from tapeout.fingerprint import Fingerprint
from tapeout.state import NO_SLOT


def measure(context: Context, folder: Path) -> None:
    """The stage of `evals/kinds/shadow/`."""
    settings, source, bundle = context.section(ShadowSettings), context.source(), context.bundle("candidate")
    champion, engine, is_baseline = context.champion()
    shadow(
        settings,
        engine.engine,
        context.engine("candidate").engine,
        context.answerer,
        prompts=context.chat_prompts(settings.datasets, settings.prompts),
        stop_tokens=bundle.record.stop_tokens,
        champion_is_baseline=is_baseline,
        executed_on=context.executed_on(),
        folder=folder,
        parents={"champion": champion, "candidate": bundle, "source": source},
    )


def shadow(
    settings: ShadowSettings,
    champion: Engine,
    candidate: Engine,
    answerer: Callable[[Engine], Answerer],
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
    items = shadow_items(champion, candidate, answerer, prompts, max_new_tokens=limit, stop_tokens=stop_tokens)
    record = ShadowReport(
        champion=champion.digest,
        candidate=candidate.digest,
        champion_is_baseline=champion_is_baseline,
        prompts=len(items),
        max_new_tokens=limit,
        executed_on=executed_on,
    )
    return KIND.write(folder, record, parents=parents, items=items, metrics=shadow_metrics(items))


def shadow_items(
    champion: Engine,
    candidate: Engine,
    answerer: Callable[[Engine], Answerer],
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_tokens: Collection[int],
) -> list[ShadowItem]:
    """One item per prompt, in order. ``answerer``: makes the core that serves, over an engine.

    :class:`EvidenceError` without prompts, for one that does not fit, and where an answer was computed from other
    tokens than those of its prompt and its own.
    """
    if not prompts:
        raise EvidenceError("no prompts to replay", expected="chat prompts", remedy="check `shadow.datasets`")
    both = Lockstep(champion, candidate)
    answers, others = (
        greedy(answerer(engine), prompts, max_new_tokens=max_new_tokens, stop_tokens=stop_tokens, progress=label)
        for engine, label in ((both, "champion answers"), (candidate, "candidate answers"))
    )
    rows = zip(prompts, answers, others, strict=True)
    return [_item(prompt, answer, both.forced(prompt, answer.tokens), other) for prompt, answer, other in rows]


@dataclass
class Forced:
    """The candidate's agreement with the champion, token by token of an answer of the champion."""

    kl: list[float] = field(default_factory=list[float])  # nats
    agree: list[bool] = field(default_factory=list[bool])


class Lockstep(WholeSteps):
    """An engine of which the champion chooses the tokens, and the candidate is fed the same tokens in the same steps.

    What was compared is kept by the tokens that the blocks hold, not by the request that was meant: an answer that was
    computed from other tokens has no comparison. Where the two have blocks of different sizes, or one of them cannot
    share blocks, a block of this engine is a whole sequence.
    """

    def __init__(self, champion: Engine, candidate: Engine) -> None:
        self._engines = (champion, candidate)
        one, other = (engine.capabilities for engine in self._engines)
        alike = one.block_tokens == other.block_tokens and one.shares_blocks == other.shares_blocks
        most = min(one.max_tokens, other.max_tokens)
        size = one.block_tokens if alike else most
        # The blocks of each engine that one block of this engine stands for.
        self._each = [1 if alike else -(-most // has.block_tokens) for has in (one, other)]
        blocks = min(has.blocks // each for has, each in zip((one, other), self._each, strict=True))
        self.capabilities: EngineCapabilities = replace(
            one,
            block_tokens=size,
            blocks=blocks,
            max_batch=min(one.max_batch, other.max_batch),
            max_tokens=most,
            slots=min((has.slots for has in (one, other) if has.slots), default=0),
            shares_blocks=alike and one.shares_blocks,
            chooses_tokens=False,
            steps_at_once=1,
        )
        self._held = np.zeros((blocks, size), np.int64)  # tokens
        self._found: dict[bytes, tuple[float, bool]] = {}  # KL, and whether both choose the same token

    @property
    def digest(self) -> str:
        return self._engines[0].digest

    def step(self, batch: Sequence[Entry]) -> list[Result]:
        left, right = (
            engine.step([_fed(entry, engine.capabilities, each) for entry in batch])
            for engine, each in zip(self._engines, self._each, strict=True)
        )
        return [self._compare(*row) for row in zip(batch, left, right, strict=True)]

    def forced(self, prompt: Sequence[int], answer: Sequence[int]) -> Forced:
        """What was compared along an answer of the champion."""
        tokens, forced = np.array([*prompt, *answer], np.int64), Forced()
        for end in range(len(prompt), len(tokens)):
            found = self._found.get(tokens[:end].tobytes())
            if found is None:
                raise EvidenceError(
                    f"token {end - len(prompt)} of the answer to prompt {token_hash(prompt)[:12]} was not chosen after "
                    "the tokens before it",
                    expected="a scheduler that feeds every request its own tokens",
                    remedy="report this: blocks of sequences were mixed up",
                )
            forced.kl.append(found[0])
            forced.agree.append(found[1])
        return forced

    def prepare(self, ahead: int) -> bool:
        champion, candidate = zip(self._engines, self._each, strict=True)
        return champion[0].prepare(ahead * champion[1]) | candidate[0].prepare(ahead * candidate[1])

    def copy_block(self, source: int, target: int, tokens: int) -> None:
        raise NotImplementedError("the core that serves computes a prefix again where it cannot share blocks")

    def copy_state(self, source: int, target: int) -> None:
        for engine in self._engines:
            if engine.capabilities.slots:
                engine.copy_state(source, target)

    def close(self) -> None:
        for engine in self._engines:
            engine.close()

    def _compare(self, entry: Entry, left: Result, right: Result) -> Result:
        """What the champion chooses, compared as far as its own choices go: behind a wrong guess nothing is meant."""
        size, start = self.capabilities.block_tokens, entry.start
        for position, token in enumerate(entry.tokens, start=start):
            self._held[entry.blocks[position // size], position % size] = token
        if left.error or right.error:
            return Result(error=left.error or right.error)
        if left.logits is None or right.logits is None:
            return Result()
        chosen = left.logits.argmax(axis=1)
        wanted = range(len(entry.tokens))[-1:] if entry.positions is None else entry.positions
        history = self._held[list(entry.blocks)].reshape(-1)
        for row, at in enumerate(wanted):
            one, other = left.logits[row], right.logits[row]
            kl = float(kl_divergences(one[None], other[None])[0])
            agree = int(chosen[row]) == int(other.argmax())
            self._found[history[: start + at + 1].tobytes()] = kl, agree
            if at + 1 < len(entry.tokens) and entry.tokens[at + 1] != chosen[row]:
                break
        return Result(tokens=chosen) if entry.wanted == "token" else left


def _fed(entry: Entry, has: EngineCapabilities, each: int) -> Entry:
    """The entry that one of the engines is fed. ``each``: of its blocks, that stand for one of the entry's."""
    fed = entry._replace(wanted="logits", blocks=_spread(entry.blocks, each))
    return fed if has.slots else fed._replace(slot=NO_SLOT, snapshots=())


def _spread(blocks: Sequence[int], each: int) -> Sequence[int]:
    """The block table of an engine of which ``each`` blocks stand for one."""
    return blocks if each == 1 else [block * each + part for block in blocks for part in range(each)]


def _item(prompt: Sequence[int], answer: Answer, forced: Forced, other: Answer) -> ShadowItem:
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
