"""What a key may still use at this gateway and all others together: leased ahead, so that admission asks nobody.

Once a second, and at once where a request waits, one transaction says what was used and fetches what is wanted next
(:mod:`runtime.gateway.accounts.leases`): enough for a minute at the present pace, and no more than a fair share of what
is left. So the database may be away for about a minute. Requests that need more are refused with 503 then.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from contextlib import suppress

from runtime.gateway.accounts.key_file import ApiKey
from runtime.gateway.accounts.leases import STALE_SECONDS, LeaseDatabase, LimitAnswer, LimitAsk
from runtime.gateway.accounts.quotas import (
    Grant,
    budget_used_up,
    comes_too_soon,
    limit_headers,
    never_fits,
    retry_after,
)
from runtime.gateway.protocol.errors import ApiError
from tapeout.database import DatabaseRefusedError
from tapeout.errors import one_line

SYNC_SECONDS = 1.0  # between two transactions, unless a request waits
LEAST_SECONDS = 0.02  # between two in any case
ANSWER_SECONDS = 2.0  # that a request waits for the database
AHEAD_SECONDS = 60.0  # that a lease lasts at the present pace
PACE_SECONDS = 10.0  # over which the pace is averaged
MOST_ATTEMPTS = 3  # of a request, where others take what was fetched for it
REQUESTS, TOKENS, BUDGET = "requests", "tokens", "budget"

log = logging.getLogger(__name__)


class LeasedLimit:
    """One limit of one key. ``before``: used before anybody has leased of it."""

    def __init__(self, kind: str, before: float = 0.0) -> None:
        self.kind, self.before = kind, before
        self.size: int | None = None
        self.used = self.need = 0.0
        self.granted = 0.0
        self.most = 0.0  # may be used; less than was granted while the rest is given back
        self.free, self.free_at = 0.0, -math.inf  # of the last answer
        self.fair = math.inf
        self._keep = self._asked = self._pace = 0.0
        self._asked_at: float | None = None
        self._known: tuple[float, float] | None = None  # used and granted, if the database has these

    @property
    def per_second(self) -> float:
        return 0.0 if self.kind == BUDGET or self.size is None else self.size / 60

    @property
    def scarce(self) -> bool:
        """Less than a quarter of what should be at hand."""
        return self.size is not None and self.most - self.used < self._keep / 4

    def fits(self, amount: float, now: float) -> bool:
        """Of a rate nothing does where the lease is old: others may use it by now. The next transaction may be late,
        such as where this process was stopped.
        """
        return self.size is None or (self.used + amount <= self.most and not self._stale(now))

    def _stale(self, now: float) -> bool:
        return bool(self.per_second) and now - self.free_at > STALE_SECONDS

    @property
    def counts(self) -> bool:
        return self.size is not None or self.kind == BUDGET

    def resize(self, size: int | None) -> None:
        if not self.counts:  # nothing was counted
            self.granted = self.most = self.used
        if size != self.size:
            self.free_at = -math.inf
        self.size = size

    def take(self, amount: float) -> None:
        if self.counts:
            self.used += amount
            self._asked += amount

    def give_back(self, amount: float) -> None:
        if self.counts:
            self.used -= amount

    def level(self, now: float) -> float:
        """What there is here and, as far as is known, free elsewhere."""
        assert self.size is not None
        free = 0.0 if self.free_at == -math.inf else self.free + (now - self.free_at) * self.per_second
        return min(self.size, self.most - self.used + free)

    def ask(self, key: str, now: float, hold: bool) -> LimitAsk | None:
        """None where the database knows it all. ``hold``: give nothing back."""
        if self._asked_at is not None and now > self._asked_at:
            seconds = now - self._asked_at
            self._pace += (self._asked / seconds - self._pace) * (1 - math.exp(-seconds / PACE_SECONDS))
            self._asked = 0.0
        self._asked_at = now
        if self._pace * AHEAD_SECONDS < 1:
            self._pace = 0.0
        if not self.counts:
            return None
        self._keep = min(math.ceil(self._pace * AHEAD_SECONDS), self.fair)
        if self._stale(now):
            self.most = min(self.most, self.used)
        if hold:
            self._keep = max(self._keep, self.most - self.used)
        if not self.need and not self._keep and self._known == (self.used, self.used):
            return None
        self._known = None
        found = LimitAsk(
            key, self.kind, self.size, self.per_second, self.used, self.need, self._keep, self.granted, self.before
        )
        self.most = min(self.most, found.target)
        return found

    def answered(self, ask: LimitAsk, answer: LimitAnswer, asked_at: float) -> None:
        """``asked_at``: the answer is as old as the question."""
        self.granted = self.most = answer.granted
        self.free, self.free_at, self.fair = answer.free, asked_at, answer.fair
        self._known = (ask.used, answer.granted)


class LeasedQuota:
    """A :class:`Quota` that all gateways of one database share."""

    def __init__(self, shared: SharedQuotas, key: ApiKey, used: int) -> None:
        self._shared = shared
        self.reserved = 0
        self.requests, self.tokens, self.budget = LeasedLimit(REQUESTS), LeasedLimit(TOKENS), LeasedLimit(BUDGET, used)
        self.change(key)

    def change(self, key: ApiKey) -> None:
        self.key = key
        sizes = (key.requests_per_minute, key.tokens_per_minute, key.token_budget)
        for limit, size in zip(self.limits, sizes, strict=True):
            limit.resize(size)

    @property
    def limits(self) -> tuple[LeasedLimit, LeasedLimit, LeasedLimit]:
        return self.requests, self.tokens, self.budget

    async def prepare(self, tokens: int) -> None:
        amounts = (1, tokens, tokens)
        for _ in range(MOST_ATTEMPTS):
            if self._fits(tokens) or self._shared.away or self._too_much(tokens):
                return
            for limit, amount in zip(self.limits, amounts, strict=True):
                limit.need += amount
            try:
                await self._shared.synced()
            finally:
                for limit, amount in zip(self.limits, amounts, strict=True):
                    limit.need -= amount

    def admit(self, tokens: int) -> Grant:
        if not self._fits(tokens):
            raise self._refusal(tokens)
        self.requests.take(1)
        self.tokens.take(tokens)
        self.budget.take(tokens)
        self.reserved += tokens
        self._shared.changed(any(limit.scarce for limit in self.limits))
        return Grant(self, tokens)

    def settle(self, reserved: int, tokens: int) -> None:
        self.reserved -= reserved
        self.tokens.give_back(reserved - tokens)
        self.budget.give_back(reserved - tokens)

    def headers(self) -> dict[str, str]:
        now, found = time.monotonic(), dict[str, str]()
        for limit in (self.requests, self.tokens):
            if limit.size is not None:
                level = limit.level(now)
                found |= limit_headers(limit.kind, limit.size, level, (limit.size - level) / limit.per_second)
        return found

    def _fits(self, tokens: int) -> bool:
        now = time.monotonic()
        return self.requests.fits(1, now) and self.tokens.fits(tokens, now) and self.budget.fits(tokens, now)

    def _too_much(self, tokens: int) -> bool:
        """As far as is known there is not so much, here or elsewhere."""
        now = time.monotonic()
        return any(
            limit.size is not None
            and (amount > limit.size or (limit.free_at > -math.inf and amount > limit.level(now)))
            for limit, amount in zip(self.limits, (1, tokens, tokens), strict=True)
        )

    def _refusal(self, tokens: int) -> ApiError:
        key, now = self.key, time.monotonic()
        sized = [(limit, amount) for limit, amount in zip(self.limits, (1, tokens, tokens), strict=True) if limit.size]
        known = not self._shared.away and all(limit.free_at > -math.inf for limit, _ in sized)
        if key.token_budget is not None:
            left = self.budget.level(now) if known else key.token_budget - self.budget.used
            if tokens > (left if known else key.token_budget):
                return budget_used_up(key, int(key.token_budget - left) - self.reserved, self.reserved, tokens)
        if key.tokens_per_minute is not None and tokens > key.tokens_per_minute:
            return never_fits(key, tokens)
        short = [
            ((amount - limit.level(now)) / limit.per_second, limit.size or 0, limit.kind)
            for limit, amount in sized
            if known and limit.per_second and limit.level(now) < amount
        ]
        if short:
            seconds, size, unit = max(short)
            return comes_too_soon(key, size, unit, seconds)
        return ApiError(
            503,
            "the limits of the API key cannot be looked up now, and too little is left of what was leased before",
            code="limits_unavailable",
            headers=retry_after(SYNC_SECONDS),
        )


class SharedQuotas:
    """``url``: see :class:`runtime.gateway.accounts.leases.LeaseDatabase`. It begins with :meth:`begin`, or with the
    first request.

    ``reached``: the database has answered once.
    """

    def __init__(self, url: str) -> None:
        self._database, self._holder = LeaseDatabase(url), uuid.uuid4().hex
        self._quotas: list[LeasedQuota] = []
        self._waiting: list[asyncio.Future[None]] = []
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._failed = ""
        self.reached = False
        self._begun: float | None = None  # a transaction, when it runs

    def quota(self, key: ApiKey, used: int) -> LeasedQuota:
        self._quotas.append(LeasedQuota(self, key, used))
        return self._quotas[-1]

    @property
    def away(self) -> bool:
        """The database does not answer."""
        return bool(self._failed) or (self._begun is not None and time.monotonic() - self._begun > ANSWER_SECONDS)

    def require_access(self) -> None:
        """:class:`DatabaseRefusedError` where the database answers, but not to this user. One that is away may come."""
        try:
            self._database.sync(self._holder, [])
        except DatabaseRefusedError:
            raise
        except Exception as error:  # SQLAlchemy's, and its drivers'
            log.debug("the database of the limits does not answer yet: %s", one_line(error))

    def begin(self) -> None:
        """See whether the database answers; the log says where it does not. Called in the event loop."""
        self._wake.set()
        self._start()

    def changed(self, scarce: bool) -> None:
        """``scarce``: the next transaction should not wait."""
        self._start()
        if scarce:
            self._wake.set()

    async def synced(self) -> None:
        """Until a transaction has ended that knows of what is needed now, or the database is away."""
        self._start()
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        self._wake.set()
        with suppress(TimeoutError):
            await asyncio.wait_for(waiter, ANSWER_SECONDS)

    def close(self) -> None:
        """Give back what is left. The event loop has ended, and no call runs."""
        for quota in self._quotas:
            for limit in quota.limits:
                limit.fair = 0.0
        try:
            self._sync()
            self._database.leave(self._holder)
        except Exception as error:
            log.error("what was leased of limits is not given back: %s", one_line(error))
        self._database.close()

    def _start(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), SYNC_SECONDS)
            self._wake.clear()
            asked = self._asks(hold=bool(self._failed))
            if not asked and self.reached and not self._failed:
                continue
            waiting, self._waiting = self._waiting, []
            self._begun = begun = time.monotonic()
            try:
                answers = await asyncio.to_thread(self._database.sync, self._holder, [ask for _, ask in asked])
            except Exception as error:  # of any kind: requests go on with what there is
                self._log(one_line(error))
            else:
                self._log("")
                self.reached = True
                self._take(asked, answers, begun)
            self._begun = None
            for waiter in waiting:
                if not waiter.done():
                    waiter.set_result(None)
            await asyncio.sleep(SYNC_SECONDS / 2 if self._failed else LEAST_SECONDS)

    def _sync(self) -> None:
        asked, begun = self._asks(hold=False), time.monotonic()
        self._take(asked, self._database.sync(self._holder, [ask for _, ask in asked]), begun)

    def _asks(self, *, hold: bool) -> list[tuple[LeasedLimit, LimitAsk]]:
        now = time.monotonic()
        found = [(limit, limit.ask(quota.key.name, now, hold)) for quota in self._quotas for limit in quota.limits]
        return [(limit, ask) for limit, ask in found if ask is not None]

    def _take(
        self, asked: list[tuple[LeasedLimit, LimitAsk]], answers: dict[tuple[str, str], LimitAnswer], asked_at: float
    ) -> None:
        for limit, ask in asked:
            limit.answered(ask, answers[ask.key, ask.kind], asked_at)

    def _log(self, failed: str) -> None:
        if failed and not self._failed and not self.reached:
            log.error("requests of keys with limits are refused until the database of the limits answers: %s", failed)
        elif failed and not self._failed:
            log.error("limits are those that were leased until the database answers again: %s", failed)
        elif self._failed and not failed:
            log.warning("the database of the limits answers")
        self._failed = failed
