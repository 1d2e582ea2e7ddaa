"""What a tenant that sends ten times as much does to another one's first tokens: engines that several gateways share.

In virtual time, with the real scheduler and router. Reports take no time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from heapq import heappop, heappush
from itertools import count
from random import Random
from typing import Any

from benchmarks.fleet.bundles import BUNDLES
from runtime.gateway.routing.router import FleetRouter
from runtime.simulation.engine import BLOCK_TOKENS, SimulatedEngine
from runtime.simulation.fleet import percentile
from runtime.wire.messages import GenerateRequest

ENGINES, CACHE_TOKENS, WARM_SECONDS = 4, 60_000, 20.0
PROMPT_TOKENS, ANSWER_TOKENS = (64, 512), (16, 128)  # the least and the most
RATE, TIMES = (
    4.0,
    10.0,
)  # requests per second of the tenant that is looked at, and how many times as many the other sends
BAR, BAR_THROUGHPUT = 1.2, 0.98
GATEWAYS = 1, 2
SECONDS = 240.0


@dataclass(frozen=True)
class Served:
    """``ttft`` and ``gaps``: ms, ascending, by tenant. ``tokens_per_second``: that were fed while requests came."""

    ttft: dict[str, list[float]]
    gaps: dict[str, list[float]]
    tokens_per_second: float


@dataclass(frozen=True)
class Fairness:
    """Times in ms. P99 TTFT of a tenant that is ``alone``, beside one that sends as much (``equal``), and ``beside``
    one that sends ten times as much. ``other_gap``: between two tokens of an answer of that one.

    ``throughput``: tokens that are fed beside the other tenant, as a share of what is fed where both are one tenant.
    """

    gateways: int
    alone: float
    equal: float
    beside: float
    beside_p50: float
    other_p50: float
    other_p99: float
    other_gap_p99: float
    other_gap_most: float
    throughput: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def served(
    rates: Mapping[str, float], seconds: float, seed: int = 0, gateways: int = 1, *, one_tenant: bool = False
) -> Served:
    """``rates``: requests per second by tenant, each request through a gateway that is drawn. ``one_tenant``: the
    engines take all of them for one.
    """
    now = 0.0
    engines = [SimulatedEngine(BUNDLES["default"], CACHE_TOKENS // BLOCK_TOKENS) for _ in range(ENGINES)]
    names, routers = (
        [f"engine-{number}" for number in range(ENGINES)],
        [FleetRouter(lambda: now) for _ in range(gateways)],
    )
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
            prompt = range(number * 4096, number * 4096 + own.randint(*PROMPT_TOKENS))
            known_as = "" if one_tenant else tenant
            asked = GenerateRequest(f"r{number}", prompt, own.randint(*ANSWER_TOKENS), tenant=known_as)
            heappush(events, (at, number, tenant, asked))
    owners, last, fed = dict[str, str](), dict[str, float](), 0
    ttft, gaps = ({tenant: list[float]() for tenant in rates} for _ in range(2))
    while events and events[0][0] < 1.5 * seconds:
        now, _, tenant, what = heappop(events)
        if isinstance(what, GenerateRequest):
            router = draw.choice(routers)
            option = router.choose(what, names, "")[0]
            router.sent(option)
            place = names.index(option.engine)
            first = what.prompt[0]
            engines[place].add(what, range(first + 2048, first + 2048 + what.max_new_tokens), now)
            owners[what.id], last[what.id] = tenant, now
            if engines[place].stepping:
                continue
        else:
            place, ended = what, engines[what].end(now)
            for id in ended.sampled:
                times = ttft if id in ended.first else gaps
                if WARM_SECONDS < last[id] < seconds:
                    times[owners[id]].append(1000 * (now - last[id]))
                last[id] = now
            assert all(router.heard(names[place], ended.report) is None for router in routers)
        if (end := engines[place].begin(now)) is not None:
            heappush(events, (end, next(numbers), "", place))
            fed += sum(len(work.tokens) for work in engines[place].planned) if now < seconds else 0
    return Served(_ascending(ttft), _ascending(gaps), fed / seconds)


def _ascending(times: Mapping[str, list[float]]) -> dict[str, list[float]]:
    return {tenant: sorted(found) for tenant, found in times.items()}


def fairness(gateways: int, seconds: float = SECONDS, seed: int = 0) -> Fairness:
    one = {"one": RATE}

    def run(*, times: float = 0.0, one_tenant: bool = False) -> Served:
        rates = {**one, "other": times * RATE} if times else one
        return served(rates, seconds, seed, gateways, one_tenant=one_tenant)

    alone, equal, beside, together = run(), run(times=1), run(times=TIMES), run(times=TIMES, one_tenant=True)

    def at(found: Mapping[str, list[float]], tenant: str, share: float) -> float:
        return round(percentile(found[tenant], share), 1)

    return Fairness(
        gateways,
        alone=at(alone.ttft, "one", 0.99),
        equal=at(equal.ttft, "one", 0.99),
        beside=at(beside.ttft, "one", 0.99),
        beside_p50=at(beside.ttft, "one", 0.5),
        other_p50=at(beside.ttft, "other", 0.5),
        other_p99=at(beside.ttft, "other", 0.99),
        other_gap_p99=at(beside.gaps, "other", 0.99),
        other_gap_most=at(beside.gaps, "other", 1.0),
        throughput=round(beside.tokens_per_second / together.tokens_per_second, 4),
    )
