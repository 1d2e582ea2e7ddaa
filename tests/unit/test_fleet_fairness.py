"""Tenants that share a fleet through several gateways, in virtual time: real scheduler and router, modelled steps."""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import count
from random import Random

from benchmarks.fleet.bundles import BUNDLES
from runtime.gateway.routing.router import FleetRouter
from runtime.simulation.engine import BLOCK_TOKENS, SimulatedEngine
from runtime.simulation.fleet import percentile
from runtime.wire.messages import GenerateRequest

ENGINES, CACHE_TOKENS, WARM_SECONDS = 4, 60_000, 20.0


def first_tokens(rates: dict[str, float], seconds: float, seed: int = 0, gateways: int = 2) -> dict[str, list[float]]:
    """TTFT in ms of each tenant, ascending. ``rates``: requests per second, each through a gateway that is drawn."""
    engines = [SimulatedEngine(BUNDLES["default"], CACHE_TOKENS // BLOCK_TOKENS) for _ in range(ENGINES)]
    names, routers = [f"engine-{number}" for number in range(ENGINES)], [FleetRouter() for _ in range(gateways)]
    for name, engine in zip(names, engines, strict=True):
        (turn,) = {router.join(name, BLOCK_TOKENS) for router in routers}
        engine.watcher.begin(turn)
        report = engine.report()
        assert all(router.heard(name, report) is None for router in routers)
    draw, numbers = Random(seed), count()
    events: list[tuple[float, int, str, GenerateRequest | int]] = []
    for tenant, rate in rates.items():
        own, at = Random(f"{seed} {tenant}"), 0.0
        while (at := at + own.expovariate(rate)) < seconds:
            number = next(numbers)
            prompt = range(number * 4096, number * 4096 + own.randint(64, 512))
            heappush(
                events, (at, number, tenant, GenerateRequest(f"r{number}", prompt, own.randint(16, 128), tenant=tenant))
            )
    arrived, found = dict[str, tuple[str, float]](), {tenant: list[float]() for tenant in rates}
    while events and events[0][0] < 1.5 * seconds:
        now, _, tenant, what = heappop(events)
        if isinstance(what, GenerateRequest):
            router = draw.choice(routers)
            option = router.choose(what, names, "")[0]
            router.sent(option)
            place = names.index(option.engine)
            first = what.prompt[0]
            engines[place].add(what, range(first + 2048, first + 2048 + what.max_new_tokens), now)
            arrived[what.id] = tenant, now
            if engines[place].stepping:
                continue
        else:
            place, ended = what, engines[what].end(now)
            for id in ended.first:
                owner, at = arrived[id]
                if WARM_SECONDS < at < seconds:
                    found[owner].append(1000 * (now - at))
            assert all(router.heard(names[place], ended.report) is None for router in routers)
        if (end := engines[place].begin(now)) is not None:
            heappush(events, (end, next(numbers), "", place))
    return {tenant: sorted(times) for tenant, times in found.items()}


def test_a_tenant_that_sends_too_much_waits_by_itself() -> None:
    """docs/fleet.md has the figures of 240 seconds. Planted: the answers of the other tenant never rest."""
    found = first_tokens({"quiet": 4, "loud": 40}, 60)
    quiet, loud = (percentile(found[tenant], 0.99) for tenant in ("quiet", "loud"))
    assert len(found["quiet"]) > 100 and quiet < loud / 2
    alone = first_tokens({"quiet": 4}, 60)["quiet"]
    assert percentile(found["quiet"], 0.9) < 2 * percentile(alone, 0.9)
