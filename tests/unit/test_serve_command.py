"""What ``tapeout serve`` agrees to serve: bundles with a PASS about them, and champions of a real registry."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from engines.bundle import EngineBundle
from evals.check import Outcome
from pipeline.cli import engine
from pipeline.cli.main import main
from pipeline.cli.serve import find_challenger, parse_bytes, parse_snapshots, require_judged
from pipeline.cli.serve_options import ApprovalOptions, EngineOptions
from pipeline.registry import serving
from pipeline.registry.access import VersionReference
from pipeline.registry.bundle_store import store_folder
from pipeline.registry.promotion import promote
from pipeline.registry.pull import Requirements, pull
from pipeline.registry.register import register
from runtime.gateway.http.listen import ServeError, listen
from runtime.wire.start import Start
from tapeout import artifact
from tapeout.errors import ArtifactError, ExitCode, RegistryError
from tests import judged
from tests.registries import empty_registry

KL = {Outcome.PASS: 0.01, Outcome.INCONCLUSIVE: 0.03, Outcome.FAIL: 0.345}


def test_a_bundle_with_a_pass_is_served(tmp_path: Path) -> None:
    judged.write_run(tmp_path / "artifacts")
    require_judged(tmp_path / "artifacts" / "candidate", unsafe=False)


@pytest.mark.parametrize("outcome", [Outcome.FAIL, Outcome.INCONCLUSIVE])
def test_any_other_outcome_is_refused(tmp_path: Path, outcome: Outcome) -> None:
    judged.write_run(tmp_path / "artifacts", evidence=judged.good(KL[outcome]))
    with pytest.raises(ServeError, match=outcome.value):
        require_judged(tmp_path / "artifacts" / "candidate", unsafe=False)
    require_judged(tmp_path / "artifacts" / "candidate", unsafe=True)


def test_an_unsafe_engine_asks_for_no_signature_as_an_unsafe_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged.write_run(tmp_path / "artifacts", evidence=judged.good(KL[Outcome.FAIL]))
    started: list[Start] = []
    monkeypatch.setattr("runtime.engine.worker.listen", lambda start, **_: started.append(start))
    approval = ApprovalOptions(unsafe=True, public_key=tmp_path / "key.pub")
    candidate, address = tmp_path / "artifacts" / "candidate", f"unix:{tmp_path / 'socket'}"
    engine.run(str(candidate), address, None, EngineOptions(), approval)
    assert started[0].settings.public_key is None


def test_a_pass_about_another_bundle_is_refused(tmp_path: Path) -> None:
    judged.write_run(tmp_path / "artifacts")
    judged.write_run(tmp_path / "other", "two")
    with pytest.raises(ServeError, match="is about bundle"):
        require_judged(tmp_path / "artifacts" / "baseline", unsafe=False)
    shutil.rmtree(tmp_path / "artifacts" / "candidate")
    shutil.copytree(tmp_path / "other" / "candidate", tmp_path / "artifacts" / "candidate")
    with pytest.raises(ServeError, match="is about bundle"):
        require_judged(tmp_path / "artifacts" / "candidate", unsafe=False)
    shutil.rmtree(tmp_path / "artifacts" / "verdict")
    with pytest.raises(ServeError, match="has no verdict"):
        require_judged(tmp_path / "artifacts" / "candidate", unsafe=False)


def test_a_verdict_that_was_edited_is_refused(tmp_path: Path) -> None:
    judged.write_run(tmp_path / "artifacts", evidence=judged.good(KL[Outcome.FAIL]))
    record = tmp_path / "artifacts" / "verdict" / "record.json"
    record.write_text(record.read_text().replace('"FAIL"', '"PASS"'))
    with pytest.raises(ArtifactError):
        require_judged(tmp_path / "artifacts" / "candidate", unsafe=False)


def test_the_champion_of_a_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", empty_registry(tmp_path))
    name, recipe = VersionReference(judged.NAME, "champion"), judged.recipe()
    before = serving.state(name)
    with pytest.raises(RegistryError, match="no model"):
        asyncio.run(serving.pulled(name, Requirements()))
    verdict = judged.write_run(tmp_path / "artifacts")
    bundle = artifact.load(tmp_path / "artifacts" / "candidate", EngineBundle)
    register(recipe, verdict, bundle, tmp_path / "artifacts")
    registered = serving.state(name)
    promote(recipe)
    assert before != registered != serving.state(name) == serving.state(name)
    found = asyncio.run(serving.pulled(name, Requirements()))
    assert (found.version, found.digest, found.fetched_bytes > 0) == (1, bundle.digest, True)
    assert pull(name, store_folder()).fetched_bytes == 0  # what that process does
    assert artifact.load(tmp_path / found.folder, EngineBundle).digest == bundle.digest


def test_the_challenger_of_a_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", empty_registry(tmp_path))
    source = f"models:/{judged.NAME}@challenger"
    with pytest.raises(RegistryError, match="no model"):
        find_challenger(source, Requirements())
    for weights, outcome in (("one", Outcome.PASS), ("two", Outcome.FAIL)):
        artifacts = tmp_path / weights
        verdict = judged.write_run(artifacts, weights, evidence=judged.good(KL[outcome]))
        bundle = artifact.load(artifacts / "candidate", EngineBundle)
        register(judged.recipe(), verdict, bundle, artifacts)
        if outcome is Outcome.PASS:
            assert artifact.load(find_challenger(source, Requirements())[0], EngineBundle).digest == bundle.digest
    with pytest.raises(RegistryError, match="judged FAIL"):
        find_challenger(source, Requirements())


@pytest.mark.parametrize("command", ["serve", "gateway", "engine"])
@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("--port", "99999"), ("--port", "-1"), ("--threads", "-1"), ("--slots", "0"), ("--max-waiting", "-1")),
        *(("--queue-seconds", "-1"), ("--request-seconds", "-0.5"), ("--drain-seconds", "-1")),
        *(("--follow-seconds", "-1"), ("--traffic-share", "1.5"), ("--share", "-0.1"), ("--shadow-threads", "0")),
        *(("--api-key", ""), ("--api-key", " "), ("--api-key", "key\n"), ("--served-model-name", "")),
    ],
)  # fmt: skip
def test_options_beyond_what_they_mean_are_refused(
    command: str,
    option: str,
    value: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Before anything is opened. An empty key is what a variable of a shell leaves that is not set."""
    monkeypatch.chdir(tmp_path)
    words = [command, "nowhere", option, value, *(["--listen", "unix:socket"] if command == "engine" else [])]
    assert main(words) == ExitCode.BROKEN
    said = capsys.readouterr().err
    assert option in said and ("Invalid value" in said or "No such option" in said)
    assert "Invalid value" in said or command != "serve"


def test_the_address_is_taken_at_once() -> None:
    with listen("127.0.0.1", 0) as first, pytest.raises(ServeError, match="in use"):
        listen("127.0.0.1", first.getsockname()[1])
    with pytest.raises(ServeError, match="cannot listen"):
        listen("no.such.host.invalid", 8000)


@pytest.mark.parametrize("text", ["", "x", "-1", "1.5", "100%", "-5%", "25 percent"])
def test_numbers_and_shares_of_snapshots_that_are_none(text: str) -> None:
    with pytest.raises(ServeError, match="a share below 100%"):
        parse_snapshots(text)


@pytest.mark.parametrize("text", ["", "x", "1X", "-1", "1e9"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(ServeError, match="no size"):
        parse_bytes(text)
