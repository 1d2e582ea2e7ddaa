"""Tenants that share a fleet through several gateways, in virtual time: real scheduler and router, modelled steps."""

from __future__ import annotations

import pytest

from benchmarks.fleet.bundles import BUNDLES
from benchmarks.fleet.fairness import BAR, PROMPT_TOKENS, RATE, TIMES, served
from runtime.simulation.fleet import percentile


@pytest.mark.parametrize("gateways", [1, 2])
def test_a_tenant_that_sends_ten_times_as_much_waits_by_itself(gateways: int) -> None:
    """docs/benchmarks/fleet.md has the figures of 240 seconds. Planted: answers of the other tenant never rest, long
    steps are not split, all places may be taken, or the router does not know when steps end.
    """
    seconds = 120.0  # in 60 the P99 is that of two requests
    found = served({"one": RATE, "other": TIMES * RATE}, seconds, gateways=gateways)
    longest = 1000 * BUNDLES["default"].seconds(0, PROMPT_TOKENS[1])  # on an idle engine
    alone = served({"one": RATE}, seconds, gateways=gateways)
    # With one gateway prompts hardly ever meet; with two they do, also where the other tenant sends nothing.
    bar = BAR * (longest if gateways == 1 else percentile(alone.ttft["one"], 0.99))
    assert percentile(found.ttft["one"], 0.99) <= bar
    assert percentile(found.ttft["other"], 0.5) > 4 * longest, "the engines are not full"
    assert found.gaps["other"][-1] < 300, "its answers rest too long"
