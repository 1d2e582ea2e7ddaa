"""What a key may still use: requests and tokens of a minute, and tokens in total."""

from __future__ import annotations

import time
from typing import Protocol

from runtime.gateway.accounts.key_file import ApiKey
from runtime.gateway.protocol.errors import ApiError


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
