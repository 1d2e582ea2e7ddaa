"""Which tokens of which requests the next step feeds: iteration-level scheduling over a pool of KV blocks.

A request waits, runs, and ends once. A running request has tokens that its blocks do not hold yet: a part of its
prompt, or the token that was chosen last. Each step first feeds requests that decode, then prompts, in chunks, until
the step's token budget is used. Requests join and leave at any step.

Where blocks run out, the running request of the lowest rank gives up its blocks and is computed again later; full
blocks that nobody has taken meanwhile are found again by their keys. Neither numpy nor an engine is imported here, and
no clock is read: the caller says what time it is, in seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from runtime.blocks import BlockPool, block_keys
from tapeout.errors import RequestError

FinishReason = Literal["stop", "length", "cancelled", "timeout", "error"]


class QueueFullError(RequestError):
    """``retry_after``: seconds after which there should be room, from the throughput so far; None before any."""

    def __init__(self, found: str, *, expected: str, retry_after: float | None) -> None:
        super().__init__(found, expected=expected, remedy="send fewer requests at once, or retry later")
        self.retry_after = retry_after


@dataclass(frozen=True)
class Limits:
    """``step_tokens``: most tokens of a step. ``max_running``: requests that run at once.

    ``max_waiting`` and ``max_waiting_tokens`` (of their prompts) bound the queue. A request that has waited
    ``aging_seconds`` ranks as one of the next higher priority.
    """

    block_tokens: int
    max_tokens: int  # positions of a sequence
    step_tokens: int = 256
    max_running: int = 64
    max_waiting: int = 1024
    max_waiting_tokens: int = 1 << 20
    aging_seconds: float = 5.0


@dataclass(frozen=True)
class Request:
    """``priority``: lower runs first. ``tenant``: step tokens are shared fairly among the tenants of one priority.

    ``salt``: requests share blocks of a prefix only with those of the same salt. Deadlines are points in time: of
    leaving the queue, of the first token and of the last.
    """

    id: str
    prompt: Sequence[int]
    max_new_tokens: int
    priority: int = 0
    tenant: str = ""
    salt: bytes = b""
    queue_deadline: float | None = None
    first_token_deadline: float | None = None
    deadline: float | None = None


class Work(NamedTuple):
    """Tokens that one request feeds in a step. ``samples``: the last of them decides the request's next token."""

    id: str
    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]
    samples: bool


class Finished(NamedTuple):
    id: str
    reason: FinishReason


class Outcome(NamedTuple):
    """Of a request's work. ``token``: the one that was chosen, where the work samples; ``stop``: it ends the answer.

    ``failed``: the engine could not run this request.
    """

    token: int | None = None
    stop: bool = False
    failed: bool = False


@dataclass
class _Sequence:
    request: Request
    arrival: float
    tokens: list[int]  # of the prompt and the answer so far
    computed: int = 0  # positions that its blocks hold
    cached: int = 0  # prompt tokens that were found in blocks when it first ran
    blocks: list[int] = field(default_factory=list[int])
    keys: list[bytes] = field(default_factory=list[bytes])
    published: int = 0  # blocks whose keys the pool was told
    started: bool = False

    @property
    def answered(self) -> int:
        return len(self.tokens) - len(self.request.prompt)


class Scheduler:
    def __init__(self, pool: BlockPool, limits: Limits) -> None:
        self.pool, self.limits = pool, limits
        self._waiting: dict[str, _Sequence] = {}
        self._running: dict[str, _Sequence] = {}
        self._planned: dict[str, Work] = {}
        self._served: dict[str, float] = {}  # tokens fed, by tenant
        self._speed: float | None = None  # tokens per second, smoothed
        self._committed_at: float | None = None
        self.preemptions = 0

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    def cached_tokens(self, id: str) -> int:
        """Prompt tokens of a running request that it did not have to compute."""
        return self._running[id].cached

    def add(self, request: Request, now: float) -> None:
        """Queue a request.

        :class:`RequestError` for one that can never run, :class:`QueueFullError` where the queue has no room.
        """
        size, prompt = self.limits.block_tokens, len(request.prompt)
        if request.id in self._waiting or request.id in self._running:
            raise RequestError(f"request {request.id} is there already", expected="an id of its own")
        # The last new token is never fed, so it needs no position.
        positions = prompt + request.max_new_tokens - 1
        most = min(self.limits.max_tokens, self.pool.blocks * size)
        if not prompt or request.max_new_tokens < 1 or positions > most:
            raise RequestError(
                f"{prompt} prompt tokens and {request.max_new_tokens} new ones",
                expected=f"at least one of each, and at most {most + 1} together",
                remedy="shorten the prompt or ask for fewer new tokens",
            )
        tokens = sum(len(sequence.tokens) for sequence in self._waiting.values())
        if len(self._waiting) >= self.limits.max_waiting or tokens + prompt > self.limits.max_waiting_tokens:
            raise QueueFullError(
                f"{len(self._waiting)} requests of {tokens} tokens are waiting",
                expected=f"at most {self.limits.max_waiting} requests and {self.limits.max_waiting_tokens} tokens",
                retry_after=tokens / self._speed if self._speed else None,
            )
        if request.tenant not in self._active_tenants():
            # A tenant that was away has not saved up its share.
            least = min((self._served[tenant] for tenant in self._active_tenants()), default=0.0)
            self._served[request.tenant] = max(self._served.get(request.tenant, 0.0), least)
        self._waiting[request.id] = _Sequence(request, now, list(request.prompt))

    def cancel(self, id: str) -> Finished | None:
        """End a request now; its blocks are free for the next step. None if there is no such request."""
        return self._finish(id, "cancelled") if id in self._waiting or id in self._running else None

    def expire(self, now: float) -> list[Finished]:
        """End the requests whose deadline has passed."""

        def late(sequence: _Sequence) -> bool:
            request = sequence.request
            passed = [request.deadline]
            if not sequence.answered:
                passed.append(request.first_token_deadline)
            if not sequence.started:
                passed.append(request.queue_deadline)
            return any(deadline is not None and deadline <= now for deadline in passed)

        everyone = (*self._waiting.values(), *self._running.values())
        return [self._finish(sequence.request.id, "timeout") for sequence in everyone if late(sequence)]

    def plan(self, now: float) -> list[Work]:
        """The next step, at most ``step_tokens`` tokens. :meth:`commit` must follow, unless it is empty."""
        assert not self._planned, "the last step was not committed"
        budget, before = self.limits.step_tokens, self.preemptions
        ranked = sorted(self._running.values(), key=lambda sequence: self._rank(sequence, now))
        # A decoding request feeds one token: prompts wait for them, since each would delay all of them.
        for decoding in (True, False):
            for sequence in ranked:
                pending = len(sequence.tokens) - sequence.computed
                if (pending == 1) is decoding and budget and sequence.request.id in self._running:
                    budget -= self._feed(sequence, min(pending, budget), now)
        if self.preemptions == before:  # else those that were preempted would be admitted right away
            self._admit(budget, now)
        return list(self._planned.values())

    def commit(self, outcomes: Mapping[str, Outcome], now: float) -> list[Finished]:
        """What came of the planned work; requests that were cancelled meanwhile may be missing. Who has ended."""
        fed, finished = 0, list[Finished]()
        planned, self._planned = self._planned, {}
        for id, work in planned.items():
            sequence = self._running.get(id)
            if sequence is None:
                continue
            outcome = outcomes[id]
            if outcome.failed:
                finished.append(self._finish(id, "error"))
                continue
            fed += len(work.tokens)
            sequence.computed = work.start + len(work.tokens)
            self._served[sequence.request.tenant] += len(work.tokens)
            self._publish(sequence)
            if not work.samples:
                continue
            assert outcome.token is not None, f"request {id} got no token"
            sequence.tokens.append(outcome.token)
            if outcome.stop:
                finished.append(self._finish(id, "stop"))
            elif sequence.answered == sequence.request.max_new_tokens:
                finished.append(self._finish(id, "length"))
        self._measure(fed, now)
        return finished

    def check(self) -> None:
        """The bookkeeping adds up; for tests, and for a server that is idle."""
        sequences = [*self._waiting.values(), *self._running.values()]
        self.pool.check(sequence.blocks for sequence in sequences)
        assert not self._waiting.keys() & self._running.keys()
        for sequence in sequences:
            assert sequence.computed < len(sequence.tokens)
            assert len(sequence.blocks) * self.limits.block_tokens >= sequence.computed
        for sequence in self._waiting.values():
            assert not sequence.blocks and not sequence.computed, "a waiting request holds blocks"

    def _feed(self, sequence: _Sequence, count: int, now: float) -> int:
        """Plan ``count`` tokens of a running request; 0 if it had to give up its blocks."""
        end, size, id = sequence.computed + count, self.limits.block_tokens, sequence.request.id
        missing = -(-end // size) - len(sequence.blocks)
        while missing > 0:
            taken = self.pool.take(missing)
            if taken is not None:
                sequence.blocks += taken
                break
            others = [other for other in self._running.values() if other.request.id not in self._planned]
            victim = max(others, key=lambda other: self._rank(other, now))
            self._preempt(victim)
            if victim is sequence:
                return 0
        tokens = sequence.tokens[sequence.computed : end]
        self._planned[id] = Work(id, tokens, sequence.computed, sequence.blocks, end == len(sequence.tokens))
        return count

    def _admit(self, budget: int, now: float) -> None:
        """Waiting requests run while there is budget, and room for all their tokens so far and the next one.

        One that does not fit is not overtaken by smaller ones of a lower rank, or it would starve.
        """
        size = self.limits.block_tokens
        for sequence in sorted(self._waiting.values(), key=lambda waiting: self._rank(waiting, now)):
            if not budget or len(self._running) >= self.limits.max_running:
                return
            sequence.keys = block_keys(sequence.tokens, size, sequence.request.salt, sequence.keys)
            # The last token is computed in any case: its logits decide the next one.
            usable = (len(sequence.tokens) - 1) // size
            found = self.pool.find(sequence.keys[:usable])
            self.pool.hold(found)
            rest = self.pool.take(-(-len(sequence.tokens) // size) - len(found))
            if rest is None:
                self.pool.release(found)
                return
            sequence.blocks, sequence.computed, sequence.published = found + rest, len(found) * size, len(found)
            if not sequence.started:
                sequence.cached, sequence.started = sequence.computed, True
            self._running[sequence.request.id] = self._waiting.pop(sequence.request.id)
            budget -= self._feed(sequence, min(len(sequence.tokens) - sequence.computed, budget), now)

    def _preempt(self, sequence: _Sequence) -> None:
        self._release(sequence)
        self._waiting[sequence.request.id] = self._running.pop(sequence.request.id)
        self.preemptions += 1

    def _finish(self, id: str, reason: FinishReason) -> Finished:
        sequence = self._waiting.pop(id, None) or self._running.pop(id)
        self._release(sequence)
        self._planned.pop(id, None)
        if sequence.request.tenant not in self._active_tenants():
            del self._served[sequence.request.tenant]
        return Finished(id, reason)

    def _release(self, sequence: _Sequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks, sequence.computed = [], 0

    def _publish(self, sequence: _Sequence) -> None:
        """Give full blocks their keys, so that others find them."""
        size = self.limits.block_tokens
        full = sequence.computed // size
        if full > len(sequence.keys):
            sequence.keys = block_keys(sequence.tokens[: full * size], size, sequence.request.salt, sequence.keys)
        for index in range(sequence.published, full):
            self.pool.publish(sequence.blocks[index], sequence.keys[index])
        sequence.published = max(sequence.published, full)

    def _rank(self, sequence: _Sequence, now: float) -> tuple[float, float, float, str]:
        """Who comes first: by priority, which rises with waiting; then tenants that were served least; then by age."""
        request = sequence.request
        priority = request.priority - (now - sequence.arrival) // self.limits.aging_seconds
        return priority, self._served[request.tenant], sequence.arrival, request.id

    def _active_tenants(self) -> set[str]:
        everyone: Iterable[_Sequence] = (*self._waiting.values(), *self._running.values())
        return {sequence.request.tenant for sequence in everyone}

    def _measure(self, fed: int, now: float) -> None:
        if fed and self._committed_at is not None and now > self._committed_at:
            speed = fed / (now - self._committed_at)
            self._speed = speed if self._speed is None else 0.9 * self._speed + 0.1 * speed
        self._committed_at = now
