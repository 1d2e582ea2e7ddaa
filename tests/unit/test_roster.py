"""Which engines of a fleet get requests, and what is said of them, as they come, fall silent, leave and are renewed."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from runtime.fleet import ray_roster
from runtime.fleet.ray_roster import MOST_WAITING, RosterAwayError, RosterLink
from runtime.fleet.roster import LOST_SECONDS, SETTLE_SECONDS, Orders, Place, Roster
from runtime.gateway.fleet.scaling import DecodeScalingSettings, EngineReport, ScalingSettings
from runtime.wire.messages import EngineLoad, EngineStats


def place(name: str) -> Place:
    return Place(f"tcp:{name}:1", name, 1, 2)


def report(running: int = 0) -> EngineReport:
    return EngineReport(EngineLoad(running=running, most_running=4), EngineStats(running=running), 2.5)


def states(roster: Roster, now: float) -> list[str]:
    return [engine["state"] for engine in roster.status(now)["engines"]]


def test_nothing_is_said_of_engines_until_all_had_time_to_speak() -> None:
    """Else a gateway would leave those that had no time to speak yet, when the roster is started again."""
    roster = Roster({"mixed": ScalingSettings()}, begun=100.0)
    roster.engine("1", "mixed", place("a"), report(), 100.5)
    assert roster.addresses(100.5) is None
    assert roster.addresses(100.0 + SETTLE_SECONDS) == ("tcp:a:1",)


def test_an_engine_that_does_not_answer_stays_listed_and_one_that_is_silent_does_not() -> None:
    roster = Roster({"mixed": ScalingSettings(least=2, most=2)}, begun=-SETTLE_SECONDS)
    roster.engine("1", "mixed", place("a"), report(), 0.0)
    roster.engine("2", "mixed", place("b"), None, 0.0)
    assert roster.addresses(0.0) == ("tcp:a:1", "tcp:b:1") and states(roster, 0.0) == ["serving", "starting"]
    roster.engine("1", "mixed", place("a"), report(), LOST_SECONDS)
    assert roster.addresses(LOST_SECONDS) == ("tcp:a:1", "tcp:b:1")
    assert roster.addresses(LOST_SECONDS + 0.1) == ("tcp:a:1",)


def test_one_that_leaves_gets_nothing_and_one_that_is_drained_is_told_until_it_has_started_anew() -> None:
    roster = Roster({"mixed": ScalingSettings(least=2, most=2)}, begun=-SETTLE_SECONDS)
    for id, name in (("1", "a"), ("2", "b")):
        assert roster.engine(id, "mixed", place(name), report(), 0.0) == Orders(2, False)
    roster.leave("1")
    assert roster.drain("tcp:b:1") and not roster.drain("tcp:c:1")
    assert roster.addresses(1.0) == () and states(roster, 1.0) == ["leaving", "leaving"]
    assert roster.engine("2", "mixed", place("b"), report(), 1.0).drain
    roster.started("2")
    assert roster.engine("2", "mixed", place("b"), report(), 1.0) == Orders(2, False)
    assert roster.addresses(1.0) == ("tcp:b:1",)


def test_reports_say_how_many_engines_are_wanted_unless_somebody_has_said_so() -> None:
    roster = Roster({"mixed": ScalingSettings(least=1, most=4)}, begun=0.0)
    assert roster.engine("1", "mixed", place("a"), report(running=4), 0.0).wanted == 2
    roster.fix("mixed", 3)
    assert roster.engine("1", "mixed", place("a"), report(running=4), 2.0).wanted == 3
    assert roster.status(2.0)["pools"] == {"mixed": {"wanted": 3, "fixed": 3}}
    roster.fix("mixed", None)
    assert roster.engine("1", "mixed", place("a"), report(), 4.0).wanted == 2


def test_one_on_standby_gets_requests_as_soon_as_it_is_needed() -> None:
    roster = Roster({"mixed": ScalingSettings(least=2, most=4, standby=1)}, begun=-SETTLE_SECONDS)
    roster.engine("1", "mixed", place("a"), report(), 0.0)
    roster.engine("2", "mixed", place("b"), report(), 0.0)
    assert roster.addresses(0.0) == ("tcp:a:1",) and states(roster, 0.0) == ["serving", "standby"]
    assert roster.engine("1", "mixed", place("a"), report(running=4), 2.0).wanted == 3
    assert roster.addresses(2.0) == ("tcp:a:1", "tcp:b:1")


def test_one_on_standby_steps_in_for_one_that_does_not_answer() -> None:
    roster = Roster({"mixed": ScalingSettings(least=2, most=2, standby=1)}, begun=-SETTLE_SECONDS)
    roster.engine("1", "mixed", place("a"), None, 0.0)
    roster.engine("2", "mixed", place("b"), report(), 0.0)
    assert roster.addresses(0.0) == ("tcp:b:1",)


def test_a_gateway_that_does_not_answer_is_shown() -> None:
    roster = Roster({"mixed": ScalingSettings()}, begun=0.0)
    roster.gateway("1", place("a"), True, 0.0)
    roster.gateway("2", place("b"), False, 0.0)
    assert [one["state"] for one in roster.status(0.0)["gateways"]] == ["serving", "starting"]
    assert roster.status(LOST_SECONDS + 1)["gateways"] == []


def test_what_could_not_be_opened_last_is_shown() -> None:
    roster = Roster({"mixed": ScalingSettings()}, begun=0.0)
    roster.problem = "no such bundle"
    assert roster.status(0.0)["problem"] == "no such bundle"


def test_each_pool_has_as_many_engines_as_its_own_reports_say() -> None:
    """Planted: one pool's load that counts for the other, and a decision by hand that counts for both."""
    settings = {"prefill": ScalingSettings(most=4), "decode": DecodeScalingSettings(least=2, most=4, standby=1)}
    roster = Roster(settings, begun=-SETTLE_SECONDS)  # type: ignore[arg-type]
    slow = EngineReport(EngineLoad(running=1, most_running=4, decodes=1, decode_seconds=0.12), EngineStats(running=1))
    assert roster.engine("1", "prefill", place("a"), report(running=4), 0.0).wanted == 2
    assert roster.engine("2", "decode", place("b"), slow, 0.0).wanted == 3 + 1
    roster.engine("3", "decode", place("c"), report(), 0.0)
    roster.engine("4", "decode", place("d"), report(), 0.0)
    roster.engine("5", "decode", place("e"), report(), 0.0)
    assert roster.addresses(0.0) == ("tcp:a:1", "tcp:b:1", "tcp:c:1", "tcp:d:1")
    assert [(one["pool"], one["state"]) for one in roster.status(0.0)["engines"]] == [
        ("prefill", "serving"),
        *[("decode", "serving")] * 3,
        ("decode", "standby"),
    ]
    roster.fix("prefill", 3)
    assert roster.status(0.0)["pools"] == {"prefill": {"wanted": 3, "fixed": 3}, "decode": {"wanted": 4, "fixed": None}}


class Far:
    """In place of a handle of Ray: what was told, and when it is heard."""

    def __init__(self) -> None:
        self.told, self.heard = list[tuple[Any, ...]](), asyncio.Event()

    def __getattr__(self, method: str) -> Any:
        def remote(*arguments: Any) -> Any:
            self.told.append((method, *arguments))
            return self._answer(method)

        return SimpleNamespace(remote=remote)

    async def _answer(self, method: str) -> str:
        await self.heard.wait()
        return method


def test_few_words_wait_for_a_roster_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: one more every ten seconds of each replica, for as long as the roster is dead."""
    monkeypatch.setattr(ray_roster, "LOST_SECONDS", 0.01)

    async def run() -> None:
        far = Far()
        link = RosterLink("one", lambda _: far)
        for _ in range(MOST_WAITING):
            with pytest.raises(TimeoutError):
                await link.tell("engine", "1")
        for _ in range(9):
            with pytest.raises(RosterAwayError, match="has not answered"):
                await link.tell("engine", "1")
        assert len(far.told) == MOST_WAITING
        far.heard.set()
        await asyncio.sleep(0.01)
        assert await link.tell("started", "1") == "started" and far.told[-1] == ("started", "1")
        with pytest.raises(RosterAwayError, match="no roster"):
            await RosterLink("one", lambda _: None).tell("engine", "1")

    asyncio.run(run())
