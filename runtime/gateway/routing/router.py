"""The choice among the engines of a fleet, from their reports. Waits for nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic

from runtime.gateway.routing.choice import (
    FETCH_SECONDS,
    NEAR,
    SOLE_COPY,
    UNKNOWN_SECONDS,
    EngineOption,
    Speed,
    ranked,
    step_seconds,
)
from runtime.gateway.routing.index import PrefixIndex
from runtime.gateway.routing.prefixes import PrefixUses
from runtime.wire.block_keys import block_keys
from runtime.wire.messages import EngineLoad, GenerateRequest, StepReport


@dataclass
class _Engine:
    """``unseen``: tokens and tenants of the requests that were sent to it, and that its last report does not count yet.

    ``kind``: engines of the same one can fetch blocks from each other; empty where it cannot.
    """

    block_tokens: int
    kind: str
    load: EngineLoad = field(default_factory=EngineLoad)
    sent: int = 0  # requests
    unseen: deque[tuple[int, str]] = field(default_factory=deque[tuple[int, str]])
    step_ends: float = 0.0  # by the clock, as far as its last report says
    tokens: int = 0  # of the backlog and the unseen
    others_tokens: int = 0  # of these, all but those of large tenants
    requests: int = 0  # that run or wait, and the unseen
    speed: Speed = field(init=False)


class FleetRouter:
    """One for all connections of a gateway. Engines go by names of the caller's choice, the same in every gateway.

    ``clock``: seconds.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self.index = PrefixIndex()
        self._uses = PrefixUses()
        self._engines: dict[str, _Engine] = {}
        self._unknown = UNKNOWN_SECONDS
        self._unmeasured: set[str] = set()  # engines that have computed no prompt yet

    def join(self, engine: str, block_tokens: int, kind: str = "") -> int:
        """An engine was connected to, perhaps not for the first time. The turn of the WatchBlocks to send it.

        ``kind``: of the engines with which it can exchange blocks.
        """
        self._engines[engine] = joined = _Engine(block_tokens, kind)
        self._unmeasured.add(engine)
        self._count(joined)
        return self.index.join(engine)

    def leave(self, engine: str) -> None:
        self._engines.pop(engine, None)
        self._unmeasured.discard(engine)
        self.index.leave(engine)

    def heard(self, engine: str, report: StepReport) -> int | None:
        """A report of an engine: the turn of the WatchBlocks to send it, where reports before this one are missing."""
        routing, known = report.routing, self._engines[engine]
        if routing is None:
            return None
        while known.unseen and known.sent - len(known.unseen) < routing.received:
            known.unseen.popleft()
        known.load, known.step_ends = routing.load, self._clock() + routing.load.step_seconds
        self._count(known)
        if measured := routing.load.prompt_seconds:
            self._unknown = measured
            self._unmeasured.discard(engine)
            for other in self._unmeasured:  # else they might seem slow, and never compute one
                self._count(self._engines[other])
        return self.index.apply(engine, routing, report.stats)

    def load(self, engine: str) -> EngineLoad:
        """As it has reported last."""
        return self._engines[engine].load

    def choose(self, request: GenerateRequest, engines: Sequence[str], session: str = "") -> list[EngineOption]:
        """These engines, the best first. ``session``: the conversation of the request, if its client names it.

        The blocks say already where a conversation is, so it only decides between engines that are equal otherwise.
        What is answered already is computed like a prompt.
        """
        prompt = [*request.prompt, *request.answered] if request.answered else request.prompt
        tokens = len(prompt)
        cached, keys, tie = self._cached(request, prompt, engines)
        sources = self._sources(cached, engines)
        most, second = _two_most([cached.get(name, 0) for name in engines])
        known = keys[most - 1] if keys and most else b""
        # What one engine alone has of a conversation is not given up lightly; what many begin with is soon everywhere.
        shared = bool(known) and self._uses.of(known) >= len(engines)
        sole = 0 if shared else most - second
        options, near, now, tenant = list[EngineOption](), NEAR, self._clock(), request.tenant
        for name in engines:
            engine, blocks, source = self._engines[name], cached.get(name, 0), ""
            missing = tokens - blocks * engine.block_tokens
            speed, ahead = engine.speed, engine.tokens
            if engine.load.large and tenant not in engine.load.large:  # which rest meanwhile
                speed, ahead = speed.first(max(0.0, engine.step_ends - now)), engine.others_tokens
                near = 1.0  # what is left of the steps is known
            seconds = speed.seconds(ahead + missing)
            extra = SOLE_COPY * sole * engine.block_tokens * engine.speed.token if blocks < most else 0.0
            if engine.load.fetch_seconds and (having := sources.get(engine.kind)) and cached[having] > blocks:
                fetched = cached[having] - blocks
                left = missing - fetched * engine.block_tokens
                # The other engine looks at what it is asked for between two steps.
                fetch = FETCH_SECONDS + step_seconds(self._engines[having].load) + fetched * engine.load.fetch_seconds
                fetch += speed.seconds(ahead + left)
                if fetch < seconds:
                    source, missing, seconds, extra = having, left, fetch, 0.0
            if shared and blocks < most:  # as if it had the prefix: many will find it there
                seconds = speed.seconds(ahead + tokens - most * engine.block_tokens)
            options.append(EngineOption(name, seconds + extra, missing, engine.requests, source, known, tenant))
        return ranked(options, session.encode("utf-8", "surrogatepass") or tie, near)

    def hand_over_pays(self, request: GenerateRequest, source: str, target: str) -> bool:
        """Whether the rest of an answer, with what it takes to move it, comes sooner from ``target`` than from
        ``source``, whose steps also compute prompts. It does until both have measured their steps, and does not where
        it would wait for the end of another answer: users see that as one long gap.
        """
        here, engine = self._engines[source].load, self._engines[target]
        there, tokens = engine.load, len(request.prompt) + len(request.answered)
        if there.most_running and engine.requests >= there.most_running:
            return False
        stays = here.decode_seconds + here.chunk_tokens * here.prompt_seconds
        if not (stays and there.decode_seconds and there.prompt_seconds):
            return True
        rest = max(1, min(request.max_new_tokens - len(request.answered), there.answer_tokens or tokens))
        blocks = (tokens - 1) // engine.block_tokens
        if there.fetch_seconds and engine.kind and engine.kind == self._engines[source].kind:
            moved = FETCH_SECONDS + step_seconds(here) + blocks * there.fetch_seconds
            tokens -= blocks * engine.block_tokens
        else:
            moved = 0.0
        return moved + tokens * there.prompt_seconds + rest * step_seconds(there) < rest * stays

    def sent(self, option: EngineOption) -> None:
        """A request is on its way to the engine of an option: the next choice counts it."""
        engine = self._engines[option.engine]
        engine.sent += 1
        engine.unseen.append((option.tokens, option.tenant))
        self._count(engine)
        if option.known:
            self._uses.add(option.known)

    def _cached(
        self, request: GenerateRequest, prompt: Sequence[int], engines: Sequence[str]
    ) -> tuple[dict[str, int], Sequence[bytes], bytes]:
        """Blocks of the prompt by engine, others than these among them, the keys of all of them, and the first key; of
        a prompt without any, the prompt itself. No keys where engines have blocks of several sizes.
        """
        cached, tie = dict[str, int](), b""
        sizes = {self._engines[name].block_tokens for name in engines}
        for size in sizes:
            keys = block_keys(prompt[:-1], size, request.cache_salt)  # the last token is computed in any case
            tie = keys[0] if keys else repr(prompt).encode()
            if request.prompt_logprobs is None:  # else every token is computed
                found = self.index.resumable(keys)
                if len(sizes) == 1:
                    return found, keys, tie
                cached |= {name: blocks for name, blocks in found.items() if self._engines[name].block_tokens == size}
        return cached, (), tie

    def _sources(self, cached: dict[str, int], engines: Sequence[str]) -> dict[str, str]:
        """That of these engines which has most of the prompt, by kind."""
        found = dict[str, str]()
        for name in cached.keys() & engines:
            kind = self._engines[name].kind
            if kind and cached[name] > cached.get(found.get(kind, ""), 0):
                found[kind] = name
        return found

    def _count(self, engine: _Engine) -> None:
        load = engine.load
        engine.tokens, engine.others_tokens = load.backlog_tokens, load.others_tokens
        for tokens, tenant in engine.unseen:
            engine.tokens += tokens
            engine.others_tokens += 0 if tenant in load.large else tokens
        engine.requests = engine.load.running + engine.load.waiting + len(engine.unseen)
        engine.speed = Speed.of(engine.load, len(engine.unseen), self._unknown)


def _two_most(numbers: Sequence[int]) -> tuple[int, int]:
    """The largest two; 0 for those that there are not."""
    most = second = 0
    for number in numbers:
        if number > most:
            most, second = number, most
        elif number > second:
            second = number
    return most, second
