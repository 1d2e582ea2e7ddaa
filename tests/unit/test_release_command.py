"""``tapeout fleet release``: what gateways say together, and the course of a release over a fleet that is made up."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import orjson
import pytest

from evals.check import Outcome
from evals.kinds.online import Online, frozen_plan
from evals.kinds.online.canary import Figures
from pipeline.cli import release
from pipeline.cli.fleet_members import Gateways, ReleaseError
from pipeline.cli.release import FleetRelease, ReleaseOptions
from pipeline.registry.access import Version
from runtime.gateway.fleet.release import PlanFile, ReleasePlan, ReleasePlanError, plan_path
from runtime.wire.messages import EngineInfo
from tapeout.errors import RegistryError
from tapeout.observations import Observation, ObservationLog

OLD, NEW, OTHER = "a" * 64, "b" * 64, "c" * 64


def engine(address: str, digest: str, state: str = "ready") -> dict[str, str]:
    return {"address": address, "digest": digest, "state": state}


@pytest.fixture
def gateway() -> Iterator[Callable[[Any], str]]:
    """The address of one that answers so; it wants a key."""
    servers: list[ThreadingHTTPServer] = []

    def made(answer: Any) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                known = self.path == "/fleet" and self.headers["Authorization"] == "Bearer secret"
                self.send_response(200 if known else 401)
                self.end_headers()
                self.wfile.write(orjson.dumps(answer))

            def log_message(self, format: str, *args: Any) -> None: ...

        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_address[1]}/"

    yield made
    for server in servers:
        server.shutdown()
        server.server_close()


def test_an_engine_is_ready_where_all_gateways_see_it_with_one_bundle(gateway: Callable[[Any], str]) -> None:
    """Planted: the first gateway alone, or engines that are suspected."""
    one = [engine("a", OLD), engine("b", OLD), engine("c", NEW), engine("d", OLD, "draining")]
    other = [engine("a", OLD), engine("b", OLD, "suspect"), engine("c", OLD), engine("d", OLD), engine("e", OLD)]
    found = Gateways([gateway({"replicas": engines, "bundles": {}}) for engines in (one, other)], "secret")
    assert found.ready() == {"a": OLD}


def test_calls_of_all_gateways_count(gateway: Callable[[Any], str]) -> None:
    bundles = [{NEW: {"calls": n, "failed": 1, "first_tokens": [n, 1]}} for n in (3, 4)]
    found = Gateways([gateway({"replicas": [], "bundles": one}) for one in bundles], "secret")
    assert found.figures(NEW) == Figures(calls=7, failed=2, first_tokens=(7, 2)) and found.figures(OLD) == Figures()


@pytest.mark.parametrize("key", ["", "other"])
def test_a_gateway_that_does_not_answer_stops_everything(gateway: Callable[[Any], str], key: str) -> None:
    good = gateway({"replicas": [engine("a", OLD)], "bundles": {}})
    with pytest.raises(ReleaseError, match="does not say how its engines are: 401"):
        Gateways([good], key).ready()
    with pytest.raises(ReleaseError, match="does not say how its engines are"):
        Gateways([good, "http://127.0.0.1:9"], "secret").ready()


@pytest.mark.parametrize(
    ("url", "why"), [("localhost:9", "no such address"), ("http://127.0.0.1:9", "nothing answers")]
)
def test_an_address_that_is_wrong_is_told_from_a_gateway_that_is_away(url: str, why: str) -> None:
    with pytest.raises(ReleaseError, match=f"does not say how its engines are: {why}.*\n.*begins with http://"):
        Gateways([url], "").ready()


STABLE, CANDIDATE = Figures(calls=4000, first_tokens=(3950, 50)), Figures(calls=400, first_tokens=(400,))
ENGINES = tuple(f"unix:/{n}" for n in range(4))


class Fleet:
    """Engines that open what they are told, and gateways that see it. ``log``: what happened, in order."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.bundles, self.before = dict.fromkeys(ENGINES, OLD), dict.fromkeys(ENGINES, OLD)
        self.away: set[str] = set()
        self.opens: dict[str, str] = {}  # digests, by source
        self.keeps: set[str] = set()  # engines that may not serve the candidate
        self.counted = {OLD: STABLE, NEW: CANDIDATE}
        self.log: list[tuple[Any, ...]] = []
        self.least = len(ENGINES)  # that were ready
        self.list = folder / "fleet.yaml"
        self.list.write_text(json.dumps({"engines": ENGINES}))
        self.waited: Callable[[], object] = lambda: pytest.fail("it waits for ever")
        patch.setattr(release, "Gateways", lambda urls, key: self)
        patch.setattr(release, "reopen", self.reopen)
        patch.setattr(release.time, "sleep", lambda _: self.waited())

    def ready(self) -> dict[str, str]:
        return {address: digest for address, digest in self.bundles.items() if address not in self.away}

    def addresses(self) -> tuple[str, ...]:
        return tuple(self.bundles)

    def source(self, digest: str) -> str:
        assert digest == OLD
        return "models:/name/6"

    def figures(self, digest: str) -> Figures:
        return self.counted[digest]

    async def reopen(self, address: str, key: bytes, source: str, drain: float, opening: float) -> EngineInfo:
        plan = self.plan
        assert plan.moving == address, "gateways know which engine is away"
        self.least = min(self.least, len(self.ready().keys() - {address}))
        self.log.append((plan.phase, plan.share, address, source))
        wanted = self.opens.get(source) or (NEW if Path(source).name == "new" else self.before[address])
        notice = "no evidence for its level" if address in self.keeps and wanted == NEW else ""
        if not notice:
            self.before[address], self.bundles[address] = self.bundles[address], wanted
        return EngineInfo(self.bundles[address], "n", 1, 1, 1, 1, 1, 1, frozenset(), notice=notice)

    @property
    def plan(self) -> ReleasePlan:
        plan = PlanFile(plan_path(self.list)).read()
        assert plan is not None
        return plan

    def change(self, **options: Any) -> FleetRelease:
        return FleetRelease(self.list, ["url"], ReleaseOptions(share=0.1, **options))


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fleet:
    return Fleet(tmp_path, monkeypatch)


def test_one_engine_after_the_other_gets_the_bundle_once_the_canary_has_shown_enough(fleet: Fleet) -> None:
    """Planted: all engines at once, or the share of the canary for the whole way."""
    assert fleet.change().release("new").outcome is Outcome.PASS
    assert set(fleet.bundles.values()) == {NEW} and fleet.least == 3
    assert [step[:2] for step in fleet.log] == [("done", 0.0), ("rolling", 0.1), ("rolling", 0.5), ("rolling", 0.75)]
    assert [step[2] for step in fleet.log] == [ENGINES[3], *ENGINES[:3]]
    plan = fleet.plan
    assert (plan.stable, plan.candidate, plan.previous, plan.moving) == (NEW, "", OLD, "")
    fleet.log.clear()
    fleet.change().rollback()
    assert set(fleet.bundles.values()) == {OLD} and fleet.least == 3
    assert {step[:2] for step in fleet.log} == {("rolling back", 0.0)} and not any(step[3] for step in fleet.log)
    assert (fleet.plan.stable, fleet.plan.candidate, fleet.plan.phase) == (OLD, "", "rolled back")
    with pytest.raises(ReleaseError, match="no release to reverse"):
        fleet.change().rollback()


def test_a_canary_that_fails_is_reversed(fleet: Fleet) -> None:
    """Planted: the other engines follow all the same."""
    fleet.counted[NEW] = Figures(calls=400, failed=200, first_tokens=(200,))
    assert fleet.change().release("new").outcome is Outcome.FAIL
    assert set(fleet.bundles.values()) == {OLD} and [step[2] for step in fleet.log] == [ENGINES[3]] * 2
    assert (fleet.plan.stable, fleet.plan.candidate) == (OLD, "")


def test_an_undecided_canary_stays_and_the_next_command_goes_on(fleet: Fleet) -> None:
    fleet.counted[NEW] = Figures(calls=20, first_tokens=(20,))
    assert fleet.change(canary_seconds=0).release("new").outcome is Outcome.INCONCLUSIVE
    assert list(fleet.bundles.values()) == [OLD] * 3 + [NEW]
    assert (fleet.plan.phase, fleet.plan.share, fleet.plan.candidate) == ("canary", 0.1, NEW)
    fleet.counted[NEW] = CANDIDATE
    assert fleet.change().release("new").outcome is Outcome.PASS
    assert set(fleet.bundles.values()) == {NEW} and len(fleet.log) == 4


def test_no_engine_leaves_before_enough_others_are_ready(fleet: Fleet) -> None:
    """Planted: a bound that nobody waits for."""
    fleet.away = {ENGINES[0]}
    waits: list[int] = []

    def waited() -> None:
        waits.append(len(fleet.log))
        fleet.away.clear()

    fleet.waited = waited
    fleet.change().release("new")
    assert waits == [0] and fleet.least == 3
    fleet.away = {ENGINES[0]}
    with pytest.raises(ReleaseError, match="2 engines besides"):
        fleet.change(open_seconds=-1).rollback()
    fleet.log.clear()
    fleet.away = {ENGINES[0]}
    fleet.change(least_ready=2).rollback()
    assert len(fleet.log) == 3, "it may go on with fewer where that is allowed"


@pytest.mark.parametrize(("keeps", "moved"), [(ENGINES[3], 0), (ENGINES[1], 2)])
def test_an_engine_that_may_not_serve_the_bundle_stops_the_release(fleet: Fleet, keeps: str, moved: int) -> None:
    """Such as one whose processor has another level. Its users notice nothing, and it can be reversed or go on."""
    fleet.keeps = {keeps}
    with pytest.raises(ReleaseError, match="no evidence for its level"):
        fleet.change().release("new")
    assert list(fleet.bundles.values()).count(NEW) == moved and fleet.bundles[keeps] == OLD and not fleet.plan.moving
    if moved:
        fleet.keeps.clear()
        fleet.change().release("new")
        assert set(fleet.bundles.values()) == {NEW}


def test_a_shadow_test_of_both_bundles_decides_too(fleet: Fleet, tmp_path: Path) -> None:
    """Planted: it is not looked at, or one of other bundles is."""
    log = ObservationLog(tmp_path / "shadow", frozen_plan(Online(min_conversations=10), OLD, NEW))
    for number in range(60):
        log.pick(f"{number:016x}")
        log.add(Observation(conversation=f"{number:016x}", prompt_tokens=8, tokens=32, agree=0))
    log.close()
    assert fleet.change(shadow=tmp_path / "shadow").release("new").outcome is Outcome.FAIL
    assert set(fleet.bundles.values()) == {OLD}
    ObservationLog(tmp_path / "other", frozen_plan(Online(), OLD, "c" * 64)).close()
    with pytest.raises(ReleaseError, match="has a test of cccccccccccc"):
        fleet.change(shadow=tmp_path / "other").release("new")


def test_a_fleet_that_cannot_spare_an_engine_is_refused(fleet: Fleet) -> None:
    with pytest.raises(ReleaseError, match="4 of 4 engines are to stay ready"):
        fleet.change(least_ready=4)
    fleet.bundles[ENGINES[0]] = NEW
    with pytest.raises(ReleaseError, match="2 bundles are ready"):
        fleet.change().release("new")


@pytest.fixture
def started(fleet: Fleet) -> Fleet:
    """By its file: `tapeout fleet up` or `run`."""
    fleet.list.with_name("k").write_text("c" * 64)
    fleet.list.write_text("key: k\nup: {bundle: b}")
    return fleet


def test_the_plan_of_a_fleet_that_is_started_by_its_file_says_where_bundles_are(started: Fleet) -> None:
    """Else an engine that is started anew has the one of the file. Planted: a plan without sources."""
    assert started.change().release("new").outcome is Outcome.PASS
    source = str(Path("new").absolute())
    assert started.plan.sources == {NEW: source, OLD: "models:/name/6"} and started.least == 3
    assert started.plan.started_with == "models:/name/6" and {step[3] for step in started.log} == {source}
    started.log.clear()
    started.change().rollback()
    assert set(started.bundles.values()) == {OLD} and {step[3] for step in started.log} == {"models:/name/6"}
    assert started.plan.sources[started.plan.stable] == "models:/name/6"
    assert started.change().release("new").outcome is Outcome.PASS
    assert started.plan.started_with == "models:/name/6"


def test_an_engine_that_came_during_the_release_gets_the_bundle_too(started: Fleet) -> None:
    """It is started with the stable one. Planted: the engines of the beginning."""

    async def reopen(*arguments: Any) -> EngineInfo:
        started.bundles.setdefault("unix:/late", OLD)
        started.before.setdefault("unix:/late", OLD)
        return await started.reopen(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(release, "reopen", reopen)
        assert started.change().release("new").outcome is Outcome.PASS
    assert started.bundles["unix:/late"] == NEW and set(started.bundles.values()) == {NEW}


class Alias:
    """What a registry says of `models:/new@champion`. ``moves``: what happens at each look, then the command ends."""

    def __init__(self, fleet: Fleet, patch: pytest.MonkeyPatch, *moves: Callable[[], object]) -> None:
        self.fleet, self.number, self.digest, self._moves = fleet, 7, NEW, list(moves)
        patch.setattr(release, "version_of", self.version)
        fleet.waited = self.waited
        fleet.opens = {"models:/new/7": NEW, "models:/new/8": OTHER, "models:/new/6": OLD}

    def version(self, source: str) -> Version:
        assert source == "models:/new@champion"
        return Version("new", self.number, {"tapeout.candidate": self.digest}, "", "")

    def move(self, number: int, digest: str) -> None:
        self.number, self.digest = number, digest

    def waited(self) -> None:
        if not self._moves:
            raise EndedError
        self._moves.pop(0)()

    def follow(self, **options: Any) -> None:
        found = ReleaseOptions(share=0.1, canary_seconds=0, **options)
        with pytest.raises(EndedError):
            release.follow(self.fleet.list, "models:/new@champion", ["url"], found, 5)


class EndedError(Exception):
    pass


def test_an_alias_means_the_version_that_it_is_of_when_a_release_begins(
    started: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may move while engines open it one after the other. Planted: each engine finds out by itself."""
    Alias(started, monkeypatch)
    assert started.change().release("models:/new@champion").outcome is Outcome.PASS
    assert {step[3] for step in started.log} == {"models:/new/7"} and started.plan.sources[NEW] == "models:/new/7"


def test_a_fleet_follows_an_alias(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a version is released again and again; one of a release that is under way is not given up."""
    fleet.counted[OTHER] = CANDIDATE
    undecided = Figures(calls=20, first_tokens=(20,))
    fleet.counted[NEW] = undecided
    seen: list[tuple[str, str, int]] = []

    def look() -> None:
        seen.append((fleet.plan.phase, fleet.plan.candidate, len(fleet.log)))

    def decided() -> None:
        look()
        fleet.counted[NEW] = CANDIDATE

    def next_one() -> None:
        look()
        fleet.counted[OTHER] = undecided
        alias.move(8, OTHER)

    def back() -> None:
        look()
        alias.move(7, NEW)

    alias = Alias(fleet, monkeypatch, look, decided, look, next_one, back, look)
    alias.follow()
    look()
    assert seen == [
        *[("canary", NEW, 1)] * 2,
        *[("done", "", 4)] * 2,
        ("canary", OTHER, 5),
        *[("rolled back", "", 6)] * 2,
    ]
    assert set(fleet.bundles.values()) == {NEW}


def test_a_version_that_failed_is_not_tried_until_the_alias_has_moved(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet.counted[NEW] = Figures(calls=400, failed=200, first_tokens=(200,))
    looks: list[int] = []
    alias = Alias(
        fleet,
        monkeypatch,
        *[lambda: looks.append(len(fleet.log))] * 3,
        lambda: alias.move(6, OLD),
        lambda: alias.move(7, NEW),
        lambda: looks.append(len(fleet.log)),
    )
    alias.follow()
    assert looks == [2, 2, 2, 4] and set(fleet.bundles.values()) == {OLD}


def test_a_registry_that_is_away_ends_nothing(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    alias = Alias(fleet, monkeypatch, lambda: None, lambda: monkeypatch.setattr(release, "version_of", alias.version))

    def away(_: str) -> Version:
        raise RegistryError("no registry answers")

    monkeypatch.setattr(release, "version_of", away)
    alias.follow()
    assert set(fleet.bundles.values()) == {NEW} and caplog.text.count("no registry answers") == 1
    with pytest.raises(ReleaseError, match="models:/new/7 does not move"):
        release.follow(fleet.list, "models:/new/7", ["url"], ReleaseOptions(), 5)


def test_a_cluster_that_does_not_find_the_plan_is_refused(started: Fleet) -> None:
    started.list.write_text("key: k\nup: {bundle: b, ray: '10.0.0.1:6379'}")
    with pytest.raises(ReleaseError, match=r"(?s)engines of a cluster find the plan.*releases: postgresql"):
        started.change()
    assert not started.log and PlanFile(plan_path(started.list)).read() is None


def test_another_engine_is_the_canary_where_the_first_was_started_anew(fleet: Fleet) -> None:
    """With its old bundle. Planted: the command waits for calls of a bundle that nobody has."""
    fleet.counted[NEW] = Figures(calls=20, first_tokens=(20,))
    assert fleet.change(canary_seconds=0).release("new").outcome is Outcome.INCONCLUSIVE
    fleet.bundles[ENGINES[3]] = OLD
    assert fleet.change(canary_seconds=0).release("new").outcome is Outcome.INCONCLUSIVE
    assert [*fleet.bundles.values()].count(NEW) == 1 and fleet.plan.phase == "canary"


def test_a_second_command_ends_the_first_one_rather_than_being_overruled(fleet: Fleet) -> None:
    """A rollback while a release runs. Planted: the release writes its own plan again, and goes on."""

    async def reopen(*arguments: Any) -> EngineInfo:
        plans = PlanFile(plan_path(fleet.list))
        plans.write(fleet.plan.model_copy(update={"phase": "rolling back", "share": 0.0}), plans.read())
        return await fleet.reopen(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(release, "reopen", reopen)
        with pytest.raises(ReleasePlanError, match=r"another command has written .*fleet\.release\.json"):
            fleet.change().release("new")
        assert len(fleet.log) == 1
    assert fleet.plan.phase == "rolling back"


def test_an_engine_that_was_away_gets_the_bundle_before_a_release_is_done(fleet: Fleet) -> None:
    """Else it has one that gets no requests. Planted: only those that are ready when the others begin."""
    fleet.away = {ENGINES[1]}
    fleet.waited = fleet.away.clear
    assert fleet.change(least_ready=1).release("new").outcome is Outcome.PASS
    assert set(fleet.bundles.values()) == {NEW} and fleet.plan.phase == "done"


def test_a_release_is_not_done_while_an_engine_is_away(fleet: Fleet) -> None:
    fleet.away, fleet.waited = {ENGINES[1]}, lambda: None
    with pytest.raises(ReleaseError, match=r"not ready with bundle b{12}: unix:/1"):
        fleet.change(least_ready=1, open_seconds=0).release("new")
    assert fleet.plan.phase == "rolling" and fleet.plan.candidate == NEW
    fleet.away.clear()
    assert fleet.change(least_ready=1).release("new").outcome is Outcome.PASS
    assert set(fleet.bundles.values()) == {NEW} and fleet.plan.phase == "done"


def interrupted(fleet: Fleet, at: str) -> Callable[..., Any]:
    """As by Ctrl-C, while this engine opens a bundle; gateways see it ready once somebody waits."""

    async def reopen(address: str, *arguments: Any) -> EngineInfo:
        info = await fleet.reopen(address, *arguments)
        if address == at:
            fleet.away.add(address)
            raise KeyboardInterrupt
        return info

    return reopen


def test_a_release_that_was_interrupted_while_its_canary_opened_goes_on_with_that_engine(fleet: Fleet) -> None:
    """Gateways give it nothing: no plan names its bundle yet. Planted: another one is told, and too few are ready."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(release, "reopen", interrupted(fleet, ENGINES[3]))
        with pytest.raises(KeyboardInterrupt):
            fleet.change().release("new")
    assert fleet.plan.moving == ENGINES[3] and not fleet.plan.candidate
    fleet.waited = fleet.away.clear
    assert fleet.change().release("new").outcome is Outcome.PASS
    assert [step[2] for step in fleet.log] == [ENGINES[3], ENGINES[3], *ENGINES[:3]] and fleet.least == 3
    assert set(fleet.bundles.values()) == {NEW} and fleet.plan.phase == "done" and not fleet.plan.moving


@pytest.mark.parametrize("last", [False, True])
def test_a_release_that_was_interrupted_among_others_leaves_no_engine_behind(fleet: Fleet, last: bool) -> None:
    """Neither where it goes on, nor where it is reversed: the engine is ready with the other bundle later.

    Planted: only those that are ready when the rollback begins; the plan of a release that is done says for ever that
    an engine is away.
    """
    at = ENGINES[2 if last else 0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(release, "reopen", interrupted(fleet, at))
        with pytest.raises(KeyboardInterrupt):
            fleet.change().release("new")
    assert fleet.plan.moving == at and fleet.plan.phase == "rolling"
    fleet.waited = fleet.away.clear
    if last:
        assert fleet.change().release("new").outcome is Outcome.PASS
    else:
        fleet.change().rollback()
    assert set(fleet.bundles.values()) == {NEW if last else OLD} and not fleet.plan.moving
    assert fleet.plan.phase == ("done" if last else "rolled back")


def test_a_release_waits_for_an_engine_that_can_be_its_canary(fleet: Fleet) -> None:
    """Planted: a traceback."""
    fleet.change(canary_seconds=0).release("new")
    fleet.change().rollback()
    fleet.away, fleet.waited = {*ENGINES}, lambda: None
    with pytest.raises(ReleaseError, match=r"no engine is ready with bundle a{12}"):
        fleet.change(open_seconds=0).release("new")
    fleet.waited = fleet.away.clear
    assert fleet.change().release("new").outcome is Outcome.PASS


def test_an_engine_that_alone_opens_a_bundle_is_waited_for_by_a_rollback(fleet: Fleet) -> None:
    """No other one has it, so nothing else waits for it."""
    fleet.counted[NEW] = Figures(calls=20, first_tokens=(20,))
    assert fleet.change(canary_seconds=0).release("new").outcome is Outcome.INCONCLUSIVE
    plans = PlanFile(plan_path(fleet.list))
    plans.write(fleet.plan.model_copy(update={"moving": ENGINES[3]}), plans.read())
    fleet.away, fleet.waited = {ENGINES[3]}, lambda: None
    with pytest.raises(ReleaseError, match="unix:/3 opens a bundle"):
        fleet.change(open_seconds=0).rollback()
    fleet.waited = fleet.away.clear
    fleet.change().rollback()
    assert set(fleet.bundles.values()) == {OLD} and fleet.plan.phase == "rolled back"
