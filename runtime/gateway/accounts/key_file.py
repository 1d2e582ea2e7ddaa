"""API keys as they are kept: each with its hash, and what its holder may use.

A key is random (256 bits), so its sha256 without salt is safe to keep: nobody can try that many. Only hashes are kept,
in a YAML file::

    keys:
      - name: search-team
        hash: 5d41402abc4b…        # of `tapeout keys new`
        tenant: search             # by default the name; tenants share neither KV blocks nor their share of steps
        priority: 0                # lower runs first; requests cannot rank above it
        requests_per_minute: 600   # without: no limit, as all that follow
        tokens_per_minute: 100000  # of prompts and answers
        token_budget: 50000000     # in total; the usage records say what is used
        models: [smollm2]
"""

from __future__ import annotations

import hashlib
import secrets
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from runtime.gateway.protocol.calls import Caller
from runtime.gateway.protocol.errors import ApiError
from tapeout.errors import TapeoutError, one_line

PREFIX = "tk-"
Positive = Annotated[int, Field(gt=0)]


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
