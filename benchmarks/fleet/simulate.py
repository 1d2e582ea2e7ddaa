"""A workload on a fleet under one policy, in virtual time: the same seed gives the same figures on every machine."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import Any

from benchmarks.fleet.engines import BLOCK_TOKENS, SimulatedEngine, StepLengths
from benchmarks.fleet.policies import POLICIES, cached_tokens
from benchmarks.fleet.workloads import Conversation, Workload
from runtime.wire.limits import Limits
from runtime.wire.messages import GenerateRequest

WARM = 0.1  # the first part of the time, whose requests do not count: caches are still empty


@dataclass(frozen=True)
class FleetShape:
    """``cache_tokens``: of each engine's KV memory."""

    engines: int = 8
    cache_tokens: int = 60_000
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True)
class Figures:
    """Of the requests that arrived once caches were warm. TTFT in ms. ``hits``: share of prompt tokens from the cache.

    ``possible``: hits as a share of what the best engine for each request had of its prompt when it arrived.
    ``tokens_per_second``: of answers, while the middle three fifths of all tokens were made.
    """

    policy: str
    requests: int
    ttft_p50: float
    ttft_p99: float
    hits: float
    possible: float
    tokens_per_second: float
    steps: int

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class _Open:
    conversation: Conversation
    turn: int
    arrival: float
    engine: int
    best: int  # prompt tokens that some engine had


def simulate(workload: Workload, policy: str, lengths: StepLengths, shape: FleetShape, seed: int = 0) -> Figures:
    blocks = shape.cache_tokens // BLOCK_TOKENS
    engines = [SimulatedEngine(lengths, blocks, shape.limits) for _ in range(shape.engines)]
    chosen = POLICIES[policy](engines, seed)
    warm = WARM * max((conversation.start for conversation in workload.conversations), default=0.0)
    numbers, ids = count(), count()
    events: list[tuple[float, int, Conversation | int, int]] = []  # a turn that arrives, or an engine whose step ends
    for conversation in workload.conversations:
        heappush(events, (conversation.start, next(numbers), conversation, 0))
    opened, ttft = dict[str, _Open](), list[float]()
    prompt_tokens = hits = possible = tokens = 0
    middle = [share * sum(map(_answer_tokens, workload.conversations)) for share in (0.2, 0.8)]
    passed = list[tuple[float, int]]()  # when so many tokens had been made
    while events:
        now, _, what, turn = heappop(events)
        if isinstance(what, Conversation):
            asked = what.turns[turn]
            request = GenerateRequest(f"r{next(ids)}", asked.tokens(), len(asked.answer))
            best = max(cached_tokens(engines, request))
            number = chosen.choose(request, what.name)
            engines[number].add(request, asked.answer, now)
            opened[request.id] = _Open(what, turn, now, number, best)
            if engines[number].stepping:
                continue
        else:
            number, ended = what, engines[what].end(now)
            tokens += ended.tokens
            if len(passed) < 2 and tokens >= middle[len(passed)]:
                passed.append((now, tokens))
            for id, cached in ended.first.items():
                of = opened[id]
                if of.arrival >= warm:
                    ttft.append(1000 * (now - of.arrival))
                    prompt_tokens += of.conversation.turns[of.turn].prompt_tokens
                    hits, possible = hits + cached, possible + of.best
            for id in ended.finished:
                of = opened.pop(id)
                chosen.ended(number)
                if of.turn + 1 < len(of.conversation.turns):
                    later = now + of.conversation.turns[of.turn + 1].think_seconds
                    heappush(events, (later, next(numbers), of.conversation, of.turn + 1))
            chosen.heard(number, ended.report)
        if (end := engines[number].begin(now)) is not None:
            heappush(events, (end, next(numbers), number, 0))
    assert not opened, "a request has no end"
    ttft.sort()
    return Figures(
        policy,
        len(ttft),
        round(percentile(ttft, 0.5), 1),
        round(percentile(ttft, 0.99), 1),
        round(hits / max(1, prompt_tokens), 4),
        round(hits / max(1, possible), 4),
        round(_rate(*passed), 1) if len(passed) == 2 else 0.0,
        sum(engine.steps for engine in engines),
    )


def _answer_tokens(conversation: Conversation) -> int:
    return sum(len(turn.answer) for turn in conversation.turns)


def _rate(begun: tuple[float, int], ended: tuple[float, int]) -> float:
    return (ended[1] - begun[1]) / (ended[0] - begun[0]) if ended[0] > begun[0] else 0.0


def percentile(ordered: list[float], share: float) -> float:
    """
    >>> percentile([1.0, 2.0, 3.0, 4.0], 0.5), percentile([5.0], 0.99)
    (2.0, 5.0)
    """
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)] if ordered else 0.0
