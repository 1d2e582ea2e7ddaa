"""One call of the API from its arrival to its end, and who is told of it: limits, metrics, usage records."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from runtime.gateway.protocol.errors import ApiError
from runtime.wire.messages import Delta, GenerateRequest

REQUEST_ID = "x-request-id"
CALLER = "caller"  # name in the state of an ASGI scope, where authentication puts a Caller
ID_CHARACTERS = 128


class Caller(NamedTuple):
    """Who sent a request. ``priority`` None: the request's own counts; else requests cannot rank above it.

    ``cache_salt``: prefixes in the cache are shared only among callers of the same salt.
    """

    name: str = ""
    tenant: str = ""
    priority: int | None = None
    cache_salt: bytes = b""


class Answered(Protocol):
    """Sees the tokens of a call's first choice, which may need more of the engine than the user asks for."""

    def request(self, request: GenerateRequest) -> GenerateRequest:
        """The request that the engine gets. The tokens that it brings are the same."""
        ...

    def delta(self, delta: Delta) -> Delta:
        """What the user gets of a delta."""
        ...


@dataclass
class Call:
    """``n`` responses to each of the ``prompts`` (token ids), whose tokens count once. Times are ``time.monotonic()``.

    ``conversation``: the messages, or the texts of the prompts (None for token ids). ``session``: see
    :meth:`EngineClient.generate`. ``idempotency_key``: the client's name of this request, under which it may send it
    again: what is drawn without a seed is drawn from it. ``queue_seconds``: of the choice that came first, until its
    first step. ``level``: of that choice, see :meth:`EngineClient.level_of`. ``cached``: prompt tokens that were found
    in KV blocks, by prompt. ``finish_reasons`` and ``responses`` (pieces of text): by index of the choice, ``prompt * n
    + response``. ``error``: why the call failed. ``cancelled``: the client went away first. ``answer``: a hook's, from
    :meth:`Hook.admit`.
    """

    id: str
    request_id: str
    endpoint: str
    model: str
    digest: str
    caller: Caller
    stream: bool
    prompts: Sequence[Sequence[int]]
    n: int
    max_new_tokens: int
    arrival: float = field(default_factory=time.monotonic)
    created: int = field(default_factory=lambda: int(time.time()))
    conversation: Sequence[Any] = ()
    session: str = ""
    idempotency_key: str = ""
    queue_seconds: float | None = None
    level: str = ""
    first_token: float | None = None
    end: float | None = None
    completion_tokens: int = 0
    cached: dict[int, int] = field(default_factory=dict[int, int])
    finish_reasons: dict[int, str] = field(default_factory=dict[int, str])
    responses: dict[int, list[str]] = field(default_factory=dict[int, list[str]])
    error: ApiError | None = None
    rejected: bool = False  # by a hook
    cancelled: bool = False
    answer: Answered | None = None

    @property
    def refused(self) -> bool:
        """It was not admitted: it can never run, a queue or a limit was full, or it could not be counted."""
        if self.error is None or self.first_token is not None:
            return False
        return self.rejected or self.error.status in (400, 403, 429)

    @property
    def choices(self) -> int:
        return self.n * len(self.prompts)

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def cached_tokens(self) -> int:
        return sum(self.cached.values())


class Hook:
    """Is told of every call that generates. Every method runs on the event loop; only ``prepare`` may wait."""

    async def prepare(self, call: Call) -> None:
        """Before :meth:`admit`, which then has at hand what it needs. It refuses nothing."""

    def admit(self, call: Call) -> None:
        """Before the engine gets the call; an :class:`ApiError` refuses it."""

    def tokens(self, call: Call, choice: int, count: int, now: float) -> None:
        """A step brought ``count`` tokens for one choice."""

    def ended(self, call: Call) -> None:
        """The call has ended, well or not: once for each call that was admitted."""


def request_id(given: str | None) -> str:
    """The client's own id if it is short and printable, else a new one.

    >>> request_id("trace-7"), len(request_id(None)), len(request_id("a\\r\\nb"))
    ('trace-7', 32, 32)
    """
    if given and len(given) <= ID_CHARACTERS and given.isascii() and given.isprintable():
        return given
    return uuid.uuid4().hex
