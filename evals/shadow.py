"""Stage ``shadow``: chat prompts replayed through the champion and the candidate.

Free-running answers show what a user would notice; the teacher-forced comparison on the champion's own tokens is the
measure the gate reads, because one early divergence does not make every later token count as different.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import zip_longest
from pathlib import Path

from engines.protocol import Engine
from evals.generation import Response, greedy
from evals.items import write_items, write_metrics
from evals.kind import Context
from evals.kinds.shadow import ShadowItem, ShadowReport, ShadowSettings
from evals.text import compare, token_hash
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
    champion: Engine,
    candidate: Engine,
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
    champion: Engine,
    candidate: Engine,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_tokens: Collection[int],
) -> list[ShadowItem]:
    """One item per prompt, in order. :class:`EvidenceError` without prompts, or for one that does not fit."""
    from tqdm import tqdm

    if not prompts:
        raise EvidenceError("no prompts to replay", expected="chat prompts", remedy="check `shadow.datasets`")
    answers, others = (
        greedy(engine, prompts, max_new_tokens=max_new_tokens, stop_tokens=stop_tokens, progress=label)
        for engine, label in ((champion, "champion answers"), (candidate, "candidate answers"))
    )
    rows = tqdm(
        zip(prompts, answers, others, strict=True),
        total=len(prompts),
        desc="champion's tokens",
        unit="prompt",
        disable=None,
    )
    return [_item(champion, candidate, prompt, answer, other) for prompt, answer, other in rows]


def _item(champion: Engine, candidate: Engine, prompt: Sequence[int], answer: Response, other: Response) -> ShadowItem:
    # Both engines are fed in one piece, the champion too, so that an engine compared with itself agrees exactly:
    # its batched decoding rounds differently.
    forced = compare(champion, candidate, [*prompt, *answer.tokens], first=len(prompt))
    divergence = first_divergence(answer.tokens, other.tokens)
    return ShadowItem(
        prompt_hash=token_hash(prompt),
        prompt_tokens=len(prompt),
        champion_tokens=len(answer.tokens),
        candidate_tokens=len(other.tokens),
        agree=int(forced.agree.sum()),
        kl_sum=float(forced.kl.sum()),
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
