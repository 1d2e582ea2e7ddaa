"""What the scheduler is given, what it plans, and what it says: limits, requests, work and how requests end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from tapeout.errors import RequestError

FinishReason = Literal["stop", "length", "cancelled", "timeout", "error"]


class QueueFullError(RequestError):
    """``retry_after``: seconds after which there should be room, from the throughput so far; None before any."""

    def __init__(self, found: str, *, expected: str, retry_after: float | None) -> None:
        super().__init__(found, expected=expected, remedy="send fewer requests at once, or retry later")
        self.retry_after = retry_after

    def __reduce__(self) -> tuple[object, ...]:
        return _queue_full, (type(self), self.found, self.expected, self.retry_after)


def _queue_full(kind: type[QueueFullError], found: str, expected: str, retry_after: float | None) -> QueueFullError:
    return kind(found, expected=expected, retry_after=retry_after)


class DisplacedError(QueueFullError):
    """The request waited in a full queue, and one of a higher priority took its place."""


@dataclass(frozen=True)
class Limits:
    """``step_tokens``: most tokens of a step. ``max_running``: requests that run at once.

    ``max_waiting`` and ``max_waiting_tokens`` (of their prompts) bound the queue. A request that has waited
    ``aging_seconds`` ranks as one of the next higher priority. ``scored_tokens``: most prompt tokens of a step whose
    logits are wanted, which bounds their memory. ``most_drafted``: tokens that are guessed for a request in a step; 0
    switches speculation off. The others: see :class:`runtime.step_costs.StepCosts`.
    """

    step_tokens: int = 256
    max_running: int = 64
    max_waiting: int = 1024
    max_waiting_tokens: int = 1 << 20
    aging_seconds: float = 5.0
    scored_tokens: int = 64
    most_drafted: int = 8
    itl_factor: float = 1.5
    itl_seconds: float = 0.0075
    backlog_seconds: float = 0.1
    step_seconds: float = 1.0


@dataclass(frozen=True)
class Request:
    """``priority``: lower runs first. ``tenant``: step tokens are shared fairly among the tenants of one priority.

    ``salt``: requests share blocks of a prefix only with those of the same salt. Deadlines are points in time: of
    leaving the queue, of the first token and of the last. ``scored``: the logits of all prompt tokens are wanted, so
    none of them is taken from blocks of others. ``max_new_tokens`` 0 ends a request with its prompt.
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
    scored: bool = False


class Work(NamedTuple):
    """Tokens that one request feeds in a step. ``samples``: the last of them decides the request's next token.

    ``drafts``: so many of the last tokens are guesses. Each token from the last certain one on decides the one after
    it, and a guess holds if it is the token that was decided.
    """

    id: str
    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]
    samples: bool
    drafts: int = 0


class Finished(NamedTuple):
    id: str
    reason: FinishReason


class Outcome(NamedTuple):
    """Of a request's work. ``tokens``: those that were decided, where the work samples: one, and one more for each
    guess that holds. ``stop``: the last of them ends the answer. ``failed``: the engine could not run this request.
    """

    tokens: Sequence[int] = ()
    stop: bool = False
    failed: bool = False
