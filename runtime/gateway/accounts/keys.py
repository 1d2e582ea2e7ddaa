"""API keys: who may call the server, how much, and with which models.

A key is random (256 bits), so its sha256 without salt is safe to keep: nobody can try that many. Only hashes are kept.
Keys come from the command line, from ``TAPEOUT_API_KEYS`` (separated by commas) or from a YAML file::

    keys:
      - name: search-team
        hash: 5d41402abc4b…        # of `tapeout keys new`
        tenant: search             # by default the name; tenants share neither KV blocks nor their share of steps
        priority: 0                # lower runs first; requests cannot rank above it
        requests_per_minute: 600   # without: no limit, as all that follow
        tokens_per_minute: 100000  # of prompts and answers
        token_budget: 50000000     # in total; the usage records say what is used
        models: [smollm2]

The file is read again when it changes. A file that is invalid then changes nothing, and says so in the log.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Protocol

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.datastructures import MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.gateway.protocol.calls import CALLER, Call, Caller, Hook
from runtime.gateway.protocol.errors import ApiError
from tapeout.errors import TapeoutError, one_line

PREFIX = "tk-"
ENVIRONMENT = "TAPEOUT_API_KEYS"
CHECK_SECONDS = 1.0  # between two looks at the file
OPEN_PATHS = frozenset({"/", "/health", "/ready", "/metrics", "/version"})
Positive = Annotated[int, Field(gt=0)]

log = logging.getLogger(__name__)


class KeyFileError(TapeoutError):
    """The file of keys cannot be read."""


class ApiKey(BaseModel):
    """``hash``: sha256 of the key, in hex. Limits that are None do not exist."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[str, Field(pattern=r"^[\w.@-]{1,64}$")]
    hash: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    tenant: str = ""
    priority: int | None = None
    requests_per_minute: Positive | None = None
    tokens_per_minute: Positive | None = None
    token_budget: Positive | None = None
    models: tuple[str, ...] | None = None

    def model_post_init(self, context: Any, /) -> None:
        if not self.tenant:
            object.__setattr__(self, "tenant", self.name)

    def require_model(self, model: str) -> None:
        if self.models is not None and model not in self.models:
            raise ApiError(
                403,
                f"the API key {self.name} may not use the model {model}; expected: {', '.join(self.models)}",
                param="model",
                code="model_not_found",
            )

    @property
    def caller(self) -> Caller:
        """Tenants have different salts, so none can learn from response times what another has sent."""
        cache_salt = hashlib.sha256(b"tenant\0" + self.tenant.encode()).digest()
        return Caller(self.name, self.tenant, self.priority, cache_salt)


class Quota(Protocol):
    """What one key may still use. A request reserves the most it can use, and gives back the rest at its end."""

    key: ApiKey

    def change(self, key: ApiKey) -> None:
        """Limits as the key has them now."""
        ...

    async def prepare(self, tokens: int) -> None:
        """Wait for what :meth:`admit` takes, where it has to be fetched."""
        ...

    def admit(self, tokens: int) -> Grant:
        """Reserve one request of at most ``tokens`` prompt and new tokens; a refused one uses nothing.

        :class:`ApiError` 429: ``retry-after`` says when to come again, ``x-should-retry: false`` that it never fits.
        """
        ...

    def settle(self, reserved: int, tokens: int) -> None:
        """A request has ended that had ``reserved`` tokens, and used ``tokens``."""
        ...

    def headers(self) -> dict[str, str]:
        """``x-ratelimit-…`` of the limits that exist."""
        ...


def new_key() -> tuple[str, str]:
    """A key to hand out, and its hash to keep."""
    key = PREFIX + secrets.token_urlsafe(32)
    return key, hash_of(key)


def hash_of(key: str) -> str:
    """
    >>> hash_of("tk-example")[:16]
    '3de9f2651031f9be'
    """
    return hashlib.sha256(key.encode()).hexdigest()


class Keys(Hook):
    """Every key that the server accepts, and what it may still use. Without any key, everyone may call the server.

    A hook of all calls: it reserves the most that a call can use, and gives back the rest at its end.
    ``given``: keys themselves. ``quota``: makes what counts for a key, from tokens that it has used before. ``used``:
    such tokens, by name of the key, from before this server started.
    """

    def __init__(
        self,
        given: Sequence[str] = (),
        file: Path | None = None,
        quota: Callable[[ApiKey, int], Quota] | None = None,
    ) -> None:
        given = [*given, *filter(None, (key.strip() for key in os.environ.get(ENVIRONMENT, "").split(",")))]
        self._given = [ApiKey(name=f"key-{number}", hash=hash_of(key)) for number, key in enumerate(given, start=1)]
        self._file, self._stamp, self._looked_at = file, _stamp(file), time.monotonic()
        self._keys: list[ApiKey] = []
        self._take(read_keys(file) if file else [])
        self._new_quota = quota or KeyQuota
        self._limits: dict[str, Quota] = {}
        self.used: Mapping[str, int] = {}
        self._grants: dict[str, Grant] = {}
        self.protected = bool(self._keys) or file is not None

    @property
    def have_budgets(self) -> bool:
        return any(key.token_budget for key in self._keys)

    def authenticate(self, authorization: str | None) -> ApiKey:
        """The key of an ``Authorization: Bearer …`` header; :class:`ApiError` 401 without a valid one."""
        self._reload()
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise _unauthorized("no API key was given; send it as the header `Authorization: Bearer KEY`")
        offered, found = hash_of(key.strip()), None
        for known in self._keys:  # all of them: the time does not depend on which one it is
            if hmac.compare_digest(known.hash, offered):
                found = known
        if found is None:
            raise _unauthorized("the API key is not valid")
        return found

    def limits(self, key: ApiKey) -> Quota:
        """The state of a key's limits. It outlives a change of the file; the tokens used are those of the name."""
        limits = self._limits.get(key.name)
        if limits is None:
            limits = self._limits[key.name] = self._new_quota(key, self.used.get(key.name, 0))
        elif limits.key != key:
            limits.change(key)
        return limits

    async def prepare(self, call: Call) -> None:
        key = self._by_name.get(call.caller.name)
        if key is not None:
            await self.limits(key).prepare(_most_tokens(call))

    def admit(self, call: Call) -> None:
        key = self._by_name.get(call.caller.name)
        if key is not None:
            key.require_model(call.model)
            self._grants[call.id] = self.limits(key).admit(_most_tokens(call))

    def ended(self, call: Call) -> None:
        if grant := self._grants.pop(call.id, None):
            grant.settle(0 if call.refused else call.prompt_tokens + call.completion_tokens)

    def _take(self, keys: list[ApiKey]) -> None:
        self._keys = [*self._given, *keys]
        self._by_name = {key.name: key for key in self._keys}

    def _reload(self) -> None:
        now = time.monotonic()
        if self._file is None or now - self._looked_at < CHECK_SECONDS:
            return
        self._looked_at = now
        stamp = _stamp(self._file)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._take(read_keys(self._file))
            log.info("%s was read again: %d keys", self._file, len(self._keys))
        except KeyFileError as error:
            log.error("the keys stay as they were: %s", one_line(error))


def _most_tokens(call: Call) -> int:
    return call.prompt_tokens + call.choices * call.max_new_tokens


def _stamp(file: Path | None) -> tuple[int, int, int] | None:
    try:
        found = file.stat() if file else None
    except OSError:
        return None
    return (found.st_mtime_ns, found.st_size, found.st_ino) if found else None


def read_keys(file: Path) -> list[ApiKey]:
    """:class:`KeyFileError` says what is wrong with the file."""
    expected, remedy = "a list `keys` of name and hash (docs/operations.md)", "`tapeout keys new` prints an entry"
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise KeyFileError(f"{file} cannot be read: {one_line(error)}", expected=expected, remedy=remedy) from error
    entries: Any = content.get("keys") if isinstance(content, dict) and set(content) == {"keys"} else None
    if not isinstance(entries, list):
        raise KeyFileError(f"{file} has no list of keys, or something besides", expected=expected, remedy=remedy)
    try:
        keys = [ApiKey.model_validate(entry) for entry in entries]
    except ValidationError as error:
        # Not the values: whoever pastes a key where its hash belongs must not find it in a log.
        problems = [f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors()]
        raise KeyFileError(f"{file}: {'; '.join(problems)}", expected=expected, remedy=remedy) from None
    for what, values in (("name", [key.name for key in keys]), ("hash", [key.hash for key in keys])):
        if len(set(values)) < len(values):
            raise KeyFileError(f"{file} has a {what} twice", expected=f"one entry per {what}", remedy="remove one")
    return keys


def _unauthorized(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})


class RequireKey:
    """ASGI middleware: every path but the open ones needs a key, whose :class:`Caller` is in the scope's state then.

    It reads no body, so a request without a key costs next to nothing, and a route that is added later is protected.
    Responses say what the key may still use.
    """

    def __init__(self, app: ASGIApp, keys: Keys, open_paths: Collection[str] = OPEN_PATHS) -> None:
        self._app, self._keys, self._open = app, keys, open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._keys.protected or scope["path"] in self._open:
            await self._app(scope, receive, send)
            return
        header = next((value for name, value in scope["headers"] if name == b"authorization"), None)
        try:
            key = self._keys.authenticate(header and header.decode("latin-1"))
        except ApiError as error:
            await JSONResponse(error.body, error.status, error.headers)(scope, receive, send)
            return
        scope.setdefault("state", {})[CALLER] = key.caller

        async def send_with_limits(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(self._keys.limits(key).headers())
            await send(message)

        await self._app(scope, receive, send_with_limits)


class Bucket:
    """A token bucket: holds one minute's worth at most, and fills at a constant rate."""

    def __init__(self, per_minute: int, now: float) -> None:
        self.size, self.level, self._at = per_minute, float(per_minute), now

    def fill(self, now: float) -> None:
        self.level = min(self.size, self.level + (now - self._at) * self.size / 60)
        self._at = now

    def wait(self, amount: float) -> float:
        """Seconds until it holds ``amount``."""
        return max(0.0, amount - self.level) * 60 / self.size


class KeyQuota:
    """A :class:`Quota` that this process alone counts."""

    def __init__(self, key: ApiKey, used: int = 0) -> None:
        self.used, self.reserved = used, 0  # tokens of the budget
        self.change(key)

    def change(self, key: ApiKey) -> None:
        """The buckets are full again."""
        now = time.monotonic()
        self.key = key
        self.requests = Bucket(key.requests_per_minute, now) if key.requests_per_minute else None
        self.tokens = Bucket(key.tokens_per_minute, now) if key.tokens_per_minute else None

    async def prepare(self, tokens: int) -> None:
        """Everything is here."""

    def admit(self, tokens: int) -> Grant:
        now, key = time.monotonic(), self.key
        for bucket in (self.requests, self.tokens):
            if bucket is not None:
                bucket.fill(now)
        if key.token_budget is not None and self.used + self.reserved + tokens > key.token_budget:
            raise budget_used_up(key, self.used, self.reserved, tokens)
        if self.tokens is not None and tokens > self.tokens.size:
            raise never_fits(key, tokens)
        asked = ((self.requests, 1, "requests"), (self.tokens, tokens, "tokens"))
        waits = [(bucket.wait(amount), bucket.size, unit) for bucket, amount, unit in asked if bucket is not None]
        seconds, size, unit = max(waits, default=(0.0, 0, ""))
        if seconds > 0:
            raise comes_too_soon(key, size, unit, seconds)
        if self.requests is not None:
            self.requests.level -= 1
        if self.tokens is not None:
            self.tokens.level -= tokens
        self.reserved += tokens
        return Grant(self, tokens)

    def settle(self, reserved: int, tokens: int) -> None:
        self.reserved -= reserved
        self.used += tokens
        if self.tokens is not None:
            self.tokens.level = min(self.tokens.size, self.tokens.level + reserved - tokens)

    def headers(self) -> dict[str, str]:
        now, found = time.monotonic(), dict[str, str]()
        for name, bucket in (("requests", self.requests), ("tokens", self.tokens)):
            if bucket is not None:
                bucket.fill(now)
                found |= limit_headers(name, bucket.size, bucket.level, bucket.wait(bucket.size))
        return found


class Grant:
    """One admitted request. Settle it when the request has ended, however it ended."""

    def __init__(self, quota: Quota, tokens: int) -> None:
        self._quota, self._reserved = quota, tokens

    def settle(self, tokens: int) -> None:
        """``tokens``: prompt and new tokens that were used. A second call has no effect."""
        if reserved := self._reserved:
            self._reserved = 0
            self._quota.settle(reserved, tokens)


def budget_used_up(key: ApiKey, used: int, reserved: int, tokens: int) -> ApiError:
    return ApiError(
        429,
        f"the API key {key.name} has used {used} of its budget of {key.token_budget} tokens, and "
        f"{reserved} are reserved; the request may need {tokens}",
        code="insufficient_quota",
        headers={"x-should-retry": "false"},
    )


def never_fits(key: ApiKey, tokens: int) -> ApiError:
    return ApiError(
        429,
        f"the request may need {tokens} tokens; the API key {key.name} has {key.tokens_per_minute} per minute",
        code="rate_limit_exceeded",
        headers={"x-should-retry": "false"},
    )


def comes_too_soon(key: ApiKey, size: int, unit: str, seconds: float) -> ApiError:
    return ApiError(
        429,
        f"the API key {key.name} may use {size} {unit} per minute; try again in {seconds:.3f} seconds",
        code="rate_limit_exceeded",
        headers=retry_after(seconds),
    )


def limit_headers(name: str, size: int, level: float, seconds: float) -> dict[str, str]:
    """``seconds``: until it is full."""
    return {
        f"x-ratelimit-limit-{name}": str(size),
        f"x-ratelimit-remaining-{name}": str(max(0, int(level))),
        f"x-ratelimit-reset-{name}": duration(seconds),
    }


def retry_after(seconds: float) -> dict[str, str]:
    """Headers that tell a client when to come again: whole seconds, and milliseconds as the OpenAI clients read them.

    >>> retry_after(0.25)
    {'retry-after': '1', 'retry-after-ms': '250'}
    """
    milliseconds = max(1, -int(-seconds * 1000 // 1))
    return {"retry-after": str(-(-milliseconds // 1000)), "retry-after-ms": str(milliseconds)}


def duration(seconds: float) -> str:
    """As in the headers of the OpenAI API.

    >>> duration(0.0205), duration(1.5), duration(360)
    ('21ms', '1.5s', '6m0s')
    """
    if seconds < 1:
        return f"{-int(-seconds * 1000 // 1)}ms"
    minutes, rest = divmod(seconds, 60)
    return f"{int(minutes)}m{rest:.3g}s" if minutes else f"{rest:.3g}s"
