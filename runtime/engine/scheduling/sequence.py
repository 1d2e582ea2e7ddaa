"""One request as the scheduler sees it, from its arrival to its end: its tokens, and how far its state has come."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.engine.cache.kinds import Lease
from runtime.wire.messages import GenerateRequest


@dataclass(eq=False)
class ScheduledSequence:
    """It knows nothing of other requests. Tokens of the answer follow those of the prompt, those that another engine
    has brought already among them.
    """

    request: GenerateRequest
    arrival: float
    computed: int = 0  # positions that its state holds
    fed: int = 0  # positions that it holds once all planned steps have ended
    undecided: int = 0  # tokens that these steps decide
    planned: int = 0  # these steps
    missing: int | None = None  # while it waits: tokens that the cache did not have when the load was asked for
    cached: int = 0  # prompt tokens that were found in the cache when it first ran
    lost: int = 0  # prompt tokens behind those that one kind of state was found of, and another was not
    started: bool = False
    ended: bool = False
    last: float = 0.0  # when its last token came

    def __post_init__(self) -> None:
        request = self.request
        self.id, self.tenant, self.priority = request.id, request.tenant, request.priority
        self.tokens, self.lease = [*request.prompt, *request.answered], Lease(request.cache_salt)
        self.most_tokens = len(request.prompt) + request.max_new_tokens
        # The logits of all prompt tokens are wanted, so none of them is taken from the cache.
        self.scored = request.prompt_logprobs is not None

    @property
    def answered(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def pending(self) -> int:
        """Tokens that are to be fed, those among them that a planned step decides."""
        undecided = self.undecided
        tokens = len(self.tokens) + undecided
        if undecided and tokens >= self.most_tokens:
            return 0  # the last new token is never fed
        return tokens - self.fed

    @property
    def draft_room(self) -> int:
        """Guesses that may be fed after its tokens. The last new token is never fed."""
        return self.most_tokens - len(self.tokens) - 1

    @property
    def most_cached(self) -> int:
        """Tokens that may come from the cache. The last is computed in any case: its logits decide the next one."""
        return 0 if self.scored else len(self.tokens) - 1
