"""The core that serves, in the caller's process: to answer requests for evidence, or one request of a user.

In modelled time a step takes as long as its tokens say, not as long as the machine took. So what the core learns of
steps, and with it the whole schedule (chunks of prompts, drafts, preemptions), is the same in every run.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace

from engines.protocol import Engine, EngineCapabilities, Entry, Finish, Result
from runtime.engine.core import EngineCore
from runtime.wire.messages import Delta, FinishReason, GenerateRequest, StepReport, TokenLogprobs

# Of a step and of each of its tokens; their ratio decides how many tokens may join a step, and which drafts pay.
STEP_SECONDS, TOKEN_SECONDS = 0.01, 0.0005

# Whether the client of a request leaves, by its tokens so far.
Leaves = Callable[[GenerateRequest, Sequence[int]], bool]


class ModelledTime:
    """An engine with a clock that only its steps move on. ``blocks``: that it shows at most.

    ``steps_ahead``: that began before the one before had ended.
    """

    def __init__(self, engine: Engine, blocks: int | None = None) -> None:
        has = engine.capabilities
        self._engine, self.now = engine, 0.0
        self.steps_ahead = self._running = 0
        self.capabilities: EngineCapabilities = replace(has, blocks=min(has.blocks, blocks or has.blocks))

    @property
    def digest(self) -> str:
        return self._engine.digest

    def clock(self) -> float:
        return self.now

    def step(self, batch: Sequence[Entry]) -> list[Result]:
        return self.begin(batch)()

    def begin(self, batch: Sequence[Entry]) -> Finish:
        """Time goes on when the step ends: where two were begun, they run one after the other."""
        finish, tokens = self._engine.begin(batch), sum(len(entry.tokens) for entry in batch)
        self.steps_ahead += self._running > 0
        self._running += 1

        def ended() -> list[Result]:
            self.now += STEP_SECONDS + TOKEN_SECONDS * tokens
            self._running -= 1
            return finish()

        return ended

    def prepare(self, ahead: int) -> bool:
        return self._engine.prepare(ahead)

    def copy_block(self, source: int, target: int, tokens: int) -> None:
        self._engine.copy_block(source, target, tokens)

    def copy_state(self, source: int, target: int) -> None:
        self._engine.copy_state(source, target)

    def close(self) -> None:
        self._engine.close()


@dataclass
class CoreAnswer:
    """All that the core said of one request. ``preempted``: how often. ``accepted``: tokens that were drafted first."""

    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    cached_tokens: int = 0
    accepted: int = 0
    preempted: int = 0
    reason: FinishReason | None = None
    error: str = ""

    def take(self, delta: Delta) -> None:
        if delta.tokens and not self.tokens:
            self.prompt_logprobs, self.cached_tokens = delta.prompt_logprobs, delta.cached_tokens
        self.tokens += delta.tokens
        self.logprobs += delta.logprobs or ()
        self.accepted += max(len(delta.tokens) - 1, 0)
        self.reason, self.error = delta.finish_reason, delta.error or ""


def answer_all(
    core: EngineCore,
    requests: Sequence[GenerateRequest],
    *,
    leaves: Leaves | None = None,
    ended: Callable[[], object] = lambda: None,
) -> list[CoreAnswer]:
    """Serve requests of different ids to their ends; what came of each, in their order. ``ended``: called for each.

    All of them arrive now, or as soon as the queue has room. One that is refused has an error.
    """
    answers = {request.id: CoreAnswer() for request in requests}
    by_id, arriving = {request.id: request for request in requests}, list(reversed(requests))
    waited: set[str] = set()
    while core.busy or arriving:
        while arriving and _has_room(core, arriving[-1]):
            core.add(arriving.pop(), core.clock())
        for id, answer in _read(core.step(core.clock()), answers):
            if answer.reason:
                ended()
            elif leaves and leaves(by_id[id], answer.tokens):
                core.cancel(id)
        preempted = set(core.scheduler.preempted) & answers.keys()
        for id in preempted - waited:
            answers[id].preempted += 1
        waited = preempted
    return list(answers.values())


def deltas(core: EngineCore, request: GenerateRequest) -> Generator[Delta]:
    """The response to the only request of a core, as it comes. Cancelled if the caller stops reading."""
    core.add(request, core.clock())
    try:
        while core.busy:
            report = core.step(core.clock())
            for refusal in report.refusals:
                raise refusal.error
            yield from report.deltas
    finally:
        core.cancel(request.id)
        core.report()


def _has_room(core: EngineCore, request: GenerateRequest) -> bool:
    scheduler, limits = core.scheduler, core.scheduler.limits
    tokens = scheduler.waiting_tokens + len(request.prompt)
    return not scheduler.waiting or (scheduler.waiting < limits.max_waiting and tokens <= limits.max_waiting_tokens)


def _read(report: StepReport, answers: dict[str, CoreAnswer]) -> Iterator[tuple[str, CoreAnswer]]:
    """The requests that got something."""
    for refusal in report.refusals:
        answers[refusal.id].reason, answers[refusal.id].error = "error", refusal.error.found
        yield refusal.id, answers[refusal.id]
    for delta in report.deltas:
        answers[delta.id].take(delta)
        yield delta.id, answers[delta.id]
