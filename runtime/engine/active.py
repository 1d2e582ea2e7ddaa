"""One request of an engine's core, from its arrival to its end, and what the step that ended last has brought it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from runtime.engine.scheduling.work import Work
from runtime.engine.speculation import Speculation
from runtime.wire.messages import GenerateRequest, TokenLogprobs


@dataclass(eq=False)
class ActiveRequest:
    request: GenerateRequest
    arrival: float
    queued: float = 0.0  # seconds until its first step
    answered: int = 0  # tokens of the response that were reported, or brought by another engine
    cached: int | None = None  # prompt tokens found in the cache, once it runs
    scores: list[TokenLogprobs | None] = field(default_factory=lambda: [None])  # of the prompt
    tokens: tuple[int, ...] = ()
    stops: bool = False  # the last of them ends the response
    logprobs: tuple[TokenLogprobs, ...] = ()
    error: str | None = None
    speculation: Speculation | None = None
    last: int = 0  # token that was chosen
    ended: bool = False

    def take(self, tokens: Sequence[int]) -> None:
        """New tokens, up to one that stops the response.

        Before it has ``min_new_tokens``, the sampler chooses one only where a constraint leaves nothing else.
        """
        stops = self.request.stop_tokens
        for count, token in enumerate(tokens):
            if token in stops:
                self.stops, tokens = True, tokens[: count + 1]
                break
        self.tokens, self.last = tuple(tokens), tokens[-1]

    def unscored(self, work: Work) -> range:
        """Tokens of its work that precede a prompt token without a score; with them the last, if it decides a token."""
        first = max(len(self.scores) - 1 - work.start, 0)
        end = len(self.request.prompt) - 1 - work.start
        if first >= min(end, len(work.tokens)):
            return range(0)
        return range(first, len(work.tokens) if work.samples else min(end, len(work.tokens)))
