"""Traffic on a fleet in virtual time: the same seed gives the same figures on every machine."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from heapq import heappop, heappush
from itertools import count
from typing import Any, NamedTuple

from runtime.gateway.routing.choice import FETCH_SECONDS
from runtime.simulation.engine import BLOCK_TOKENS, MAX_TOKENS, SimulatedEngine
from runtime.simulation.routing import ExactRouting, PolicyMaker
from runtime.simulation.step_lengths import StepLengths
from runtime.simulation.traffic import Conversation, Traffic
from runtime.wire.block_keys import block_keys
from runtime.wire.limits import Limits
from runtime.wire.messages import GenerateRequest, Pool

WARM = 0.1  # the first part of the time, whose requests do not count: caches are still empty


@dataclass(frozen=True)
class FleetShape:
    """``cache_tokens``: of each engine's KV memory. ``max_tokens``: of a prompt with its answer.

    ``slots``: of each engine's recurrent state, those of snapshots among them. 0 of what the model does not have.
    ``prefill``: so many of the engines are for prompts, and the others for what follows, which fetch a block in
    ``block_seconds``. Without such engines nothing moves.
    """

    engines: int = 8
    cache_tokens: int = 60_000
    limits: Limits = field(default_factory=Limits)
    max_tokens: int = MAX_TOKENS
    slots: int = 0
    prefill: int = 0
    block_seconds: float = 0.001

    def pool(self, number: int) -> Pool:
        if not self.prefill:
            return "mixed"
        return "prefill" if number < self.prefill else "decode"


class Late(NamedTuple):
    """A simulation ends once so many requests waited longer than ``seconds`` for their first token."""

    seconds: float
    requests: int


@dataclass(frozen=True)
class FleetFigures:
    """Of the requests that arrived once caches were warm. Times in ms. ``itl``: between two tokens of a response.

    ``hits``: share of prompt tokens from the cache. ``possible``: hits as a share of what the best engine for each
    request had of its prompt when it arrived. ``tokens_per_second``: of answers, while the middle three fifths of all
    tokens were made. ``busy``: share of its time that an engine stepped, until the last request came. ``whole``: not
    ended early, see :class:`Late`.
    """

    requests: int
    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float
    hits: float
    possible: float
    tokens_per_second: float
    busy: float
    steps: int
    whole: bool = True

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class _Open:
    request: GenerateRequest
    conversation: Conversation
    turn: int
    arrival: float
    best: int  # prompt tokens that some engine had
    last: float = 0.0  # when its last token came


@dataclass
class _Moving:
    """A request whose blocks are on their way to the engine on which it goes on."""

    request: GenerateRequest
    engine: int
    target: int


class FleetSimulation:
    """One run. ``ttft`` and ``itl``: seconds of all counted requests and gaps, once :meth:`run` has ended."""

    def __init__(
        self,
        workload: Traffic,
        lengths: StepLengths,
        shape: FleetShape,
        policy: PolicyMaker = ExactRouting,
        seed: int = 0,
    ) -> None:
        blocks = shape.cache_tokens // BLOCK_TOKENS
        self._workload = workload
        self._shape = shape
        self._engines = [
            SimulatedEngine(
                *(lengths, blocks, shape.limits, shape.max_tokens, shape.slots, shape.pool(number)),
                block_seconds=shape.block_seconds if shape.prefill else 0.0,
            )
            for number in range(shape.engines)
        ]
        self._now = 0.0
        self._policy = policy(self._engines, seed, lambda: self._now)
        starts = [conversation.start for conversation in workload.conversations]
        self._warm = WARM * max(starts, default=0.0)
        self._last_start = max(starts, default=0.0)
        self._opened: dict[str, _Open] = {}
        self._numbers, self._ids = count(), count()
        # A turn that arrives, the number of an engine whose step ends, or a request that changes over.
        self._events: list[tuple[float, int, Conversation | int | _Moving, int]] = []
        self.ttft, self.itl = array("d"), array("d")
        self._prompt_tokens = self._hits = self._possible = self._tokens = self._late = 0
        self._busy = 0.0
        answers = sum(len(turn.answer) for conversation in workload.conversations for turn in conversation.turns)
        self._middle = [share * answers for share in (0.2, 0.8)]
        self._passed = list[tuple[float, int]]()  # when so many tokens had been made

    def run(self, late: Late | None = None) -> FleetFigures:
        for conversation in self._workload.conversations:
            self._push(conversation.start, conversation)
        while self._events and not (late and self._late >= late.requests):
            now, _, what, turn = heappop(self._events)
            self._now = now
            if isinstance(what, Conversation):
                number = self._arrive(what, turn, now)
            else:
                number = self._change_over(what, now) if isinstance(what, _Moving) else self._end(what, now, late)
            if number is not None and (end := self._engines[number].begin(now)) is not None:
                self._busy += max(0.0, min(end, self._last_start) - now)
                self._push(end, number)
        assert self._events or not self._opened, "a request has no end"
        return self._figures(whole=not self._events)

    def _push(self, when: float, what: Conversation | int | _Moving, turn: int = 0) -> None:
        heappush(self._events, (when, next(self._numbers), what, turn))

    def _arrive(self, conversation: Conversation, turn: int, now: float) -> int | None:
        """The engine that can begin a step now, if it waits for one."""
        asked = conversation.turns[turn]
        request = GenerateRequest(f"r{next(self._ids)}", asked.tokens(), len(asked.answer))
        best = max(cached_tokens(self._engines, request))
        number = self._policy.choose(request, conversation.name)
        self._engines[number].add(request, asked.answer, now)
        self._opened[request.id] = _Open(request, conversation, turn, now, best)
        return None if self._engines[number].stepping else number

    def _end(self, number: int, now: float, late: Late | None) -> int:
        ended = self._engines[number].end(now)
        self._tokens += len(ended.sampled)
        if len(self._passed) < 2 and self._tokens >= self._middle[len(self._passed)]:
            self._passed.append((now, self._tokens))
        for id in ended.sampled:
            one = self._opened[id]
            if one.arrival >= self._warm:
                if id in ended.first:
                    self._first(one, ended.first[id], now)
                    self._late += late is not None and now - one.arrival > late.seconds
                else:
                    self.itl.append(now - one.last)
            one.last = now
        for id in ended.finished:
            one = self._opened.pop(id)
            self._policy.ended(number)
            if one.turn + 1 < len(one.conversation.turns):
                think = one.conversation.turns[one.turn + 1].think_seconds
                self._push(now + think, one.conversation, one.turn + 1)
        self._policy.heard(number, ended.report)
        if self._engines[number].engine_pool == "prefill":
            for id in ended.first.keys() & self._opened.keys():
                self._hand_over(self._opened[id], number, now)
        return number

    def _hand_over(self, one: _Open, number: int, now: float) -> None:
        """Its blocks are fetched while it goes on here."""
        answer = one.conversation.turns[one.turn].answer
        request = replace(one.request, answered=tuple(answer[:1]))
        target = self._policy.hand_over(request, number)
        if target is not None:
            blocks = (len(request.prompt) - 1) // BLOCK_TOKENS
            self._push(now + FETCH_SECONDS + blocks * self._shape.block_seconds, _Moving(request, number, target))

    def _change_over(self, moving: _Moving, now: float) -> int | None:
        """The engine that can begin a step now, if it waits for one."""
        id, target = moving.request.id, self._engines[moving.target]
        if (one := self._opened.pop(id, None)) is None:
            return None
        answer = one.conversation.turns[one.turn].answer
        answered = tuple(answer[: self._engines[moving.engine].leave(id)])
        request = one.request = replace(one.request, id=f"{id}~1", answered=answered)
        target.take_blocks(block_keys([*request.prompt, *answered][:-1], BLOCK_TOKENS, request.cache_salt))
        target.add(request, answer, now)
        self._opened[request.id] = one
        return None if target.stepping else moving.target

    def _first(self, one: _Open, cached: int, now: float) -> None:
        self.ttft.append(now - one.arrival)
        self._prompt_tokens += one.conversation.turns[one.turn].prompt_tokens
        self._hits, self._possible = self._hits + cached, self._possible + one.best

    def _figures(self, *, whole: bool) -> FleetFigures:
        ttft, itl = sorted(self.ttft), sorted(self.itl)
        return FleetFigures(
            requests=len(ttft),
            ttft_p50=round(1000 * percentile(ttft, 0.5), 1),
            ttft_p99=round(1000 * percentile(ttft, 0.99), 1),
            itl_p50=round(1000 * percentile(itl, 0.5), 2),
            itl_p99=round(1000 * percentile(itl, 0.99), 2),
            hits=round(self._hits / max(1, self._prompt_tokens), 4),
            possible=round(self._hits / max(1, self._possible), 4),
            tokens_per_second=round(_rate(*self._passed), 1) if len(self._passed) == 2 else 0.0,
            busy=round(self._busy / (len(self._engines) * self._last_start), 4) if self._last_start else 0.0,
            steps=sum(engine.steps for engine in self._engines),
            whole=whole,
        )


def simulate(
    workload: Traffic, lengths: StepLengths, shape: FleetShape, policy: PolicyMaker = ExactRouting, seed: int = 0
) -> FleetFigures:
    return FleetSimulation(workload, lengths, shape, policy, seed).run()


def cached_tokens(engines: Sequence[SimulatedEngine], request: GenerateRequest) -> list[int]:
    """That each need not compute of the prompt."""
    keys = block_keys(request.prompt[:-1], BLOCK_TOKENS, request.cache_salt)
    return [engine.pools.cache.resumable(keys) * BLOCK_TOKENS for engine in engines]


def _rate(begun: tuple[float, int], ended: tuple[float, int]) -> float:
    return (ended[1] - begun[1]) / (ended[0] - begun[0]) if ended[0] > begun[0] else 0.0


def percentile(ordered: Sequence[float], share: float) -> float:
    """
    >>> percentile([1.0, 2.0, 3.0, 4.0], 0.5), percentile([5.0], 0.99)
    (2.0, 5.0)
    """
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)] if ordered else 0.0
