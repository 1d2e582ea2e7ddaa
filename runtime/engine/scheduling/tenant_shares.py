"""Which tenants take much more of an engine than others. Pure arithmetic: no clock is read here."""

from __future__ import annotations

import math
from collections.abc import Collection

REMEMBERED_SECONDS = 10.0  # in which what a tenant was served counts for less, by a factor e
HEAVY = 4.0  # times what another tenant takes, which is much more
# Of what all tenants take: one that takes less is not heavy. Else all of them were while a new one waits, which has had
# nothing yet.
LEAST_SHARE = 0.1
LARGE_SHARE = 0.25  # of what all tenants take: for others, room is left beside one that takes more
MOST_TENANTS = 1024  # that are remembered


class TenantShares:
    """Tokens that were fed for each tenant lately, also of those without requests now.

    >>> shares = TenantShares()
    >>> shares.add("loud", 1000, 0.0)
    >>> shares.add("quiet", 100, 1.0)
    >>> shares.heavy({"loud", "quiet"}, 1.0), shares.heavy({"quiet"}, 1.0), shares.heavy({"loud", "new"}, 1.0)
    (frozenset({'loud'}), frozenset(), frozenset({'loud'}))
    >>> shares.large({"loud", "quiet", "new"})
    frozenset({'loud'})
    """

    def __init__(self) -> None:
        self._fed: dict[str, tuple[float, float]] = {}  # tokens, and until when they are counted
        self._all = 0.0, 0.0  # the same of all tenants, also of those that are forgotten

    def add(self, tenant: str, tokens: int, now: float) -> None:
        self._fed[tenant] = self._lately(tenant, now) + tokens, now
        self._all = _left(self._all, now) + tokens, now
        if len(self._fed) > MOST_TENANTS:
            del self._fed[min(self._fed, key=lambda one: self._lately(one, now))]

    def heavy(self, tenants: Collection[str], now: float) -> frozenset[str]:
        """Of these, which have requests now, those that take much more than one of them."""
        lately = {tenant: self._lately(tenant, now) for tenant in tenants}
        most = max(HEAVY * min(lately.values(), default=0.0), LEAST_SHARE * _left(self._all, now), 1.0)
        return frozenset(tenant for tenant, tokens in lately.items() if tokens > most)

    def large(self, tenants: Collection[str]) -> frozenset[str]:
        """Of these, those that took a large part of what all tenants took."""
        tokens, now = self._all
        most = max(LARGE_SHARE * tokens, 1.0)
        return frozenset(tenant for tenant in tenants if self._lately(tenant, now) > most)

    def _lately(self, tenant: str, now: float) -> float:
        return _left(self._fed.get(tenant, (0.0, now)), now)


def _left(fed: tuple[float, float], now: float) -> float:
    tokens, until = fed
    return tokens * math.exp((until - now) / REMEMBERED_SECONDS)
