"""What the scheduler plans: work, and how work ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from runtime.engine.cache.kinds import Lease
from runtime.wire.messages import FinishReason

UNDECIDED = (0,)  # in place of a token that is not known


class Work(NamedTuple):
    """Tokens that one request feeds in a step, and the state they are fed to. ``samples``: the last of them decides the
    request's next token.

    ``drafts``: so many of the last tokens are guesses. Each token from the last certain one on decides the one after
    it, and a guess holds if it is the token that was decided.

    ``follows``: its one token is the one that the step before decides, which was not known when this was planned.
    """

    id: str
    tokens: Sequence[int]
    start: int
    lease: Lease
    samples: bool
    drafts: int = 0
    follows: bool = False


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
