"""What it costs to admit a request of a key with limits: counted by the gateway alone, or shared through a database.

Requests come at an even pace, and each reserves, is admitted, and gives back what it has not used, as over HTTP. So the
transactions of shared limits, one a second and more where a lease runs out, are in their processor time.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from statistics import mean, median
from tempfile import TemporaryDirectory
from time import monotonic, perf_counter, process_time
from typing import Any, NamedTuple

import uvloop

from runtime.gateway.accounts.key_file import ApiKey
from runtime.gateway.accounts.quotas import KeyQuota, Quota
from runtime.gateway.accounts.shared_quotas import SharedQuotas
from runtime.simulation.fleet import percentile

PER_SECOND = 200
RESERVED, USED = 300, 120  # tokens of a request
BAR_US = 50.0
ALONE, SQLITE, POSTGRES = "one gateway alone", "shared, SQLite", "shared, PostgreSQL"


class AdmissionCost(NamedTuple):
    """Microseconds a request: of time until it is admitted, and of all processor time of the process meanwhile."""

    mean: float
    p50: float
    p99: float
    processor: float


def admission_costs(seconds: float, rounds: int, postgres: str = "") -> dict[str, Any]:
    """Medians of rounds of so many seconds each. ``postgres``: the URL of a database, if there is one."""
    with TemporaryDirectory() as folder:
        urls = {SQLITE: f"sqlite:///{folder}/limits.db"} | ({POSTGRES: postgres} if postgres else {})
        shared = {name: SharedQuotas(url) for name, url in urls.items()}
        try:
            costs = uvloop.run(_alternated(shared, seconds, rounds))
        finally:
            for one in shared.values():
                one.close()
    return {"per_second": PER_SECOND, "rounds": rounds, "ways": {name: _medians(of) for name, of in costs.items()}}


async def _alternated(
    shared: Mapping[str, SharedQuotas], seconds: float, rounds: int
) -> dict[str, list[AdmissionCost]]:
    key = ApiKey(
        name=f"benchmark-{uuid.uuid4().hex[:8]}",
        hash="0" * 64,
        requests_per_minute=1_000_000,
        tokens_per_minute=1_000_000_000,
        token_budget=1_000_000_000,
    )
    quotas: Mapping[str, Quota] = {ALONE: KeyQuota(key)} | {name: one.quota(key, 0) for name, one in shared.items()}
    costs = {name: list[AdmissionCost]() for name in quotas}
    for number in range(rounds):
        for name in list(quotas) if number % 2 else list(quotas)[::-1]:
            await _cost(quotas[name], seconds / 2)  # until leases fit the pace
            costs[name].append(await _cost(quotas[name], seconds))
    return costs


async def _cost(quota: Quota, seconds: float) -> AdmissionCost:
    times, requests = list[float](), int(PER_SECOND * seconds)
    processor, due = process_time(), monotonic()
    for _ in range(requests):
        due += 1 / PER_SECOND
        await asyncio.sleep(max(0.0, due - monotonic()))
        began = perf_counter()
        await quota.prepare(RESERVED)
        grant = quota.admit(RESERVED)
        times.append((perf_counter() - began) * 1e6)
        grant.settle(USED)
    used = (process_time() - processor) / requests * 1e6
    ordered = sorted(times)
    return AdmissionCost(mean(ordered), percentile(ordered, 0.5), percentile(ordered, 0.99), used)


def _medians(costs: Sequence[AdmissionCost]) -> dict[str, float]:
    return {name: round(median(getattr(cost, name) for cost in costs), 1) for name in AdmissionCost._fields}
