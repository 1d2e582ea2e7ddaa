"""Who may call the server, how much, and with which models.

Keys come from the command line, from ``TAPEOUT_API_KEYS`` (separated by commas) or from a file
(:mod:`runtime.gateway.accounts.key_file`), which is read again when it changes. One that is invalid then changes
nothing, and says so in the log.
"""

from __future__ import annotations

import hmac
import logging
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from starlette.datastructures import MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.gateway.accounts.key_file import ApiKey, KeyFileError, hash_of, read_keys
from runtime.gateway.accounts.quotas import Grant, KeyQuota, Quota
from runtime.gateway.protocol.calls import CALLER, Call, Hook
from runtime.gateway.protocol.errors import ApiError
from tapeout.errors import one_line

ENVIRONMENT = "TAPEOUT_API_KEYS"
CHECK_SECONDS = 1.0  # between two looks at the file
OPEN_PATHS = frozenset({"/", "/health", "/ready", "/metrics", "/version"})

log = logging.getLogger(__name__)


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
