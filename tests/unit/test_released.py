"""What an engine of `tapeout fleet` is started with, before, in and after a release."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline.cli import gateway
from pipeline.cli.fleet import source_of
from pipeline.cli.fleet_members import reopen
from runtime.fleet import runner as module
from runtime.fleet.control import read_plan
from runtime.fleet.released import forget_release, released, with_plan_beside
from runtime.fleet.runner import EngineRunner
from runtime.gateway.fleet.discovery import FleetFile, Listing
from runtime.gateway.fleet.plan_places import find_plans
from runtime.gateway.fleet.release import Phase, PlanFile, PlanStore, ReleasePlan, ReleasePlanError, plan_path
from tapeout import artifact
from tapeout.artifact import RECORD, load_header
from tests.command import ROOT
from tests.waiting import until

OLD, NEW = "a" * 8, "b" * 8


@pytest.fixture(params=["beside", "file:plans/one.json", "sqlite:///{folder}/plans.db"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    (tmp_path / "key").write_text("c" * 64)
    found = tmp_path / "fleet.yaml"
    place = "" if request.param == "beside" else f"releases: {request.param.format(folder=tmp_path)}\n"
    found.write_text(f"key: key\nup: {{bundle: first, name: one}}\n{place}")
    return found


def started(path: Path) -> FleetFile:
    file, _ = read_plan(path)
    return with_plan_beside(file, path)


def plans_of(path: Path) -> PlanStore:
    """As `tapeout fleet release` finds them."""
    return find_plans(path, FleetFile.read(path))


def release_of(path: Path, phase: Phase, stable: str, candidate: str = "") -> ReleasePlan:
    plans, sources = plans_of(path), {OLD: str(path.parent / "first"), NEW: "models:/name/7"}
    plan = ReleasePlan(stable=stable, candidate=candidate, phase=phase, sources=sources, started_with=sources[OLD])
    plans.write(plan, plans.read())
    return plan


def test_an_engine_gets_the_stable_bundle_of_the_release(path: Path) -> None:
    bundle, first = released(started(path)), str(path.parent / "first")
    assert bundle() == first
    release_of(path, "canary", OLD, NEW)
    assert bundle() == first
    release_of(path, "done", NEW)
    assert bundle() == "models:/name/7"
    release_of(path, "rolled back", OLD)
    assert bundle() == first


def test_a_fleet_that_is_started_again_goes_on_with_it_until_its_file_names_another(path: Path) -> None:
    """Planted: the plan is forgotten at each start; it stays though the file has changed."""
    plan = release_of(path, "done", NEW)
    forget_release(started(path), source_of)
    assert plans_of(path).read() == plan
    path.write_text(path.read_text().replace("bundle: first", "bundle: second"))
    file = started(path)
    forget_release(file, source_of)
    assert plans_of(path).read() is None and released(file)() == str(path.parent / "second")


def test_an_engine_gets_what_the_last_one_got_where_the_plan_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text("key: key\nup: {bundle: first}\n")
    (tmp_path / "key").write_text("c" * 64)
    release_of(path, "done", NEW)
    bundle = released(started(path))
    assert bundle() == "models:/name/7"
    plan_path(path).write_text("nonsense")
    assert bundle() == "models:/name/7"


def test_a_cluster_without_a_place_for_plans_has_what_its_file_says(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text("key: key\nup: {bundle: first, ray: '10.0.0.1:6379'}\n")
    file, _ = read_plan(path)
    forget_release(file, source_of)
    assert released(file)() == str(tmp_path / "first")


@pytest.mark.parametrize("released_from", ["first", "second"])
def test_a_bundle_that_was_built_anew_in_its_folder_counts(tmp_path: Path, released_from: str) -> None:
    """Else no engine of the fleet would get requests. Planted: only the names of folders are compared."""
    (tmp_path / "key").write_text("c" * 64)
    path = tmp_path / "fleet.yaml"
    path.write_text("key: key\nup: {bundle: first, name: one}\n")
    for folder in ("first", "second"):
        body = {"artifact_type": "t", "schema_version": 1, "record": {}, "files": {}, "parents": {}}
        (tmp_path / folder).mkdir()
        (tmp_path / folder / RECORD).write_text(json.dumps({"digest": artifact._digest(body), **body}))
    digest = load_header(tmp_path / released_from).digest
    sources = {digest: str(tmp_path / released_from)}
    plan = ReleasePlan(stable=digest, phase="done", sources=sources, started_with=str(tmp_path / "first"))
    plans = plans_of(path)
    plans.write(plan, None)
    forget_release(started(path), source_of)
    assert plans.read() == plan
    plans.write(plan := plan.model_copy(update={"stable": OLD, "sources": {OLD: sources[digest]}}), plans.read())
    if released_from == "first":
        forget_release(started(path), source_of)
        assert plans.read() is None
    else:
        with pytest.raises(ReleasePlanError, match=r"(?s)second has bundle .*remove .*fleet\.release\.json"):
            forget_release(started(path), source_of)
        assert plans.read() == plan


def test_fleets_of_one_machine_keep_plans_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gateways that Ray starts read files of one name. Planted: a gateway starts with the plan of another fleet."""
    source = SimpleNamespace(read=lambda: Listing((), b""))
    monkeypatch.setattr(gateway, "find_source", lambda fleet: source)
    (tmp_path / "key").write_text("c" * 64)
    files = {"one": OLD, "two": NEW}
    for name, stable in files.items():
        path = tmp_path / name / "fleet.yaml"
        path.parent.mkdir()
        releases = f"sqlite:///{tmp_path}/plans.db"
        path.write_text(f"key: ../key\nup: {{bundle: first, name: {name}}}\nreleases: {releases}\n")
        plans_of(path).write(ReleasePlan(stable=stable, phase="done"), None)
        gateway.find_engines(path, FleetFile.read(path), kept=tmp_path / "kept").read()
    kept = [PlanFile(path).read() for path in (tmp_path / "kept").iterdir()]
    assert sorted(plan.stable for plan in kept if plan) == [OLD, NEW]


def test_an_engine_that_opens_another_bundle_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the same process. Planted: one that has closed its connection is killed and started again."""
    monkeypatch.setattr(module, "COMMAND", (sys.executable, "-m", "tests.command_engine"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    key = b"c" * 64
    (tmp_path / "key").write_bytes(key)

    async def run() -> None:
        engine = EngineRunner(lambda: "sound", "mixed", "127.0.0.1", tmp_path / "key", key, (), drain_seconds=5)
        await engine.start()
        try:
            before = engine.pid
            told = asyncio.create_task(reopen(engine.address, key, "other", 5.0, 60.0))
            await until(lambda: not engine.answers)
            await until(lambda: engine.answers)
            await told
            assert engine.pid == before
            engine.require_healthy()
        finally:
            await engine.stop()

    asyncio.run(run())
