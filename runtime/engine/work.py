"""What the scheduler is given and what it plans: requests, work, and how work ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from runtime.engine.cache.kinds import Lease
from runtime.wire.messages import FinishReason


@dataclass(frozen=True)
class ScheduledRequest:
    """``priority``: lower runs first. ``tenant``: step tokens are shared fairly among the tenants of one priority.

    ``cache_salt``: requests share a prefix only with those of the same salt. Deadlines are points in time: of
    leaving the queue, of the first token and of the last. ``scored``: the logits of all prompt tokens are wanted, so
    none of them is taken from the cache. ``max_new_tokens`` 0 ends a request with its prompt.
    """

    id: str
    prompt: Sequence[int]
    max_new_tokens: int
    priority: int = 0
    tenant: str = ""
    cache_salt: bytes = b""
    queue_deadline: float | None = None
    first_token_deadline: float | None = None
    deadline: float | None = None
    scored: bool = False


class Work(NamedTuple):
    """Tokens that one request feeds in a step, and the state they are fed to. ``samples``: the last of them decides the
    request's next token.

    ``drafts``: so many of the last tokens are guesses. Each token from the last certain one on decides the one after
    it, and a guess holds if it is the token that was decided.
    """

    id: str
    tokens: Sequence[int]
    start: int
    lease: Lease
    samples: bool
    drafts: int = 0


class Finished(NamedTuple):
    id: str
    reason: FinishReason


class WorkResult(NamedTuple):
    """Of a request's work. ``tokens``: those that were decided, where the work samples: one, and one more for each
    guess that holds. ``stop``: the last of them ends the answer. ``failed``: the engine could not run this request.
    """

    tokens: Sequence[int] = ()
    stop: bool = False
    failed: bool = False
