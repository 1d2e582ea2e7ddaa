"""Registering and promoting against real SQLite registries."""

from __future__ import annotations

import hashlib
import json
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from engines.bundle import EngineBundle
from evals.check import Outcome
from evals.kinds.online import Online, frozen_plan
from evals.kinds.online.measure import conclude, load_judged
from evals.policy import policy_of
from pipeline.registry import promotion, tracking
from pipeline.registry.access import ClientRegistry, VersionReference, version_of
from pipeline.registry.bundle_store import store_folder
from pipeline.registry.judged import CANDIDATE
from pipeline.registry.promotion import promote, rollback
from pipeline.registry.register import champion, incumbent, register
from pipeline.registry.release import Release
from pipeline.registry.versions import get_version, model_id_of
from tapeout.artifact import Artifact, canonical_json, load
from tapeout.errors import ArtifactError, EvidenceError, RegistryError, TapeoutError
from tapeout.observations import Observation, ObservationLog
from tapeout.signing import generate_keys
from tests import judged
from tests.registries import empty_registry, restored

RECIPE = judged.recipe()
NAME = judged.NAME


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", empty_registry(tmp_path))
    with tracking.connect(write=False) as connected:
        yield connected


KL = {Outcome.PASS: 0.01, Outcome.INCONCLUSIVE: 0.03, Outcome.FAIL: 0.345}


def submit_in(
    folder: Path, weights: str, *, against: str | None = None, outcome: Outcome = Outcome.PASS
) -> Artifact[Release]:
    """Register a bundle with the given weights, judged against ``against`` (None: no champion, the float engine)."""
    artifacts = folder / f"run-{weights}"
    verdict = judged.write_run(artifacts, weights, against=against, evidence=judged.good(KL[outcome]))
    return register(RECIPE, verdict, load(artifacts / "candidate", EngineBundle), artifacts)


@pytest.fixture
def submit(client: Any, tmp_path: Path) -> Callable[..., Artifact[Release]]:
    return partial(submit_in, tmp_path)


@dataclass(frozen=True)
class Begun:
    """A registry in which version 1 was promoted, and version 2 passed when judged against it."""

    folder: Path
    client: Any
    champion: str

    def submit(self, weights: str) -> None:
        """Judged against the champion, too."""
        submit_in(self.folder, weights, against=self.champion)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    """Where the registry of ``begun`` lies, a copy of it, and the digest of its champion."""
    folder = tmp_path_factory.mktemp("begun") / "project"
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("MLFLOW_TRACKING_URI", empty_registry(folder))
        one = submit_in(folder, "one").record.candidate
        promote(RECIPE)
        submit_in(folder, "two", against=one)
    return folder, shutil.copytree(folder, folder.with_name("pristine")), one


@pytest.fixture
def begun(pristine: tuple[Path, Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Begun]:
    folder, copied, champion = pristine
    monkeypatch.setenv("MLFLOW_TRACKING_URI", restored(copied, folder, tmp_path))
    monkeypatch.chdir(folder)
    with tracking.connect(write=False) as connected:
        yield Begun(folder, connected, champion)


def state(client: Any) -> dict[str, Any]:
    """Everything a change could show in: aliases, model tags, versions, runs and their metric points."""
    model = client.get_registered_model(NAME)
    runs = client.search_runs([e.experiment_id for e in client.search_experiments()])
    return {
        "aliases": {k: int(v) for k, v in model.aliases.items()},
        "tags": dict(model.tags),
        "versions": sorted(
            (int(v.version), v.run_id, tuple(sorted(v.tags.items()))) for v in client.search_model_versions()
        ),
        "runs": sorted((run.info.run_id, run.info.status, run.info.end_time, len(run.data.metrics)) for run in runs),
        "points": [len(client.get_metric_history(run.info.run_id, "verdict.kl")) for run in runs],
    }


def test_registers_run_version_tags_and_alias(client: Any, submit: Callable[..., Artifact[Release]]) -> None:
    release = submit("one")
    version = client.get_model_version(NAME, "1")
    run = client.get_run(release.record.run_id)
    assert state(client)["aliases"] == {"challenger": 1}
    assert version.tags["tapeout.outcome"] == "PASS"
    assert version.tags["tapeout.candidate"] == release.parents["bundle"].digest == release.record.candidate
    holder = client.get_logged_model(model_id_of(version.source))
    assert holder.name == f"sha256-{release.record.candidate}"
    assert version.tags["tapeout.policy"] == release.record.policy == policy_of(RECIPE).digest
    assert run.data.params["gate.max_kl"] == "0.03"
    assert run.data.metrics["verdict.kl.upper"] == pytest.approx(0.0185 * 1.1)
    assert run.data.metrics["decode.batch_16.candidate_tokens_s"] == 731.9
    logged = {f.path for f in client.list_artifacts(run.info.run_id)}
    assert {"report.html", "plots", "verdict", "evidence", "metrics.json"} <= logged
    uploaded = load(Path(holder.artifact_location), EngineBundle)
    assert uploaded.digest == release.record.candidate and [*uploaded.files] == ["model.onnx"]


def test_registering_and_promoting_again_changes_nothing(client: Any, submit: Callable[..., Artifact[Release]]) -> None:
    first = submit("one")
    registered = state(client)
    assert submit("one").digest == first.digest
    assert state(client) == registered
    assert promote(RECIPE).changed
    promoted = state(client)
    again = promote(RECIPE)
    assert not again.changed and "nothing changed" in again.message
    assert submit("one").digest == first.digest
    assert state(client) == promoted


def test_the_chain_of_champions(client: Any, submit: Callable[..., Artifact[Release]], tmp_path: Path) -> None:
    assert champion(NAME) is None
    one = submit("one").record.candidate
    assert champion(NAME) is None
    assert promote(RECIPE).rollback is None
    found = champion(NAME)
    assert found is not None and (found.version, found.digest) == (1, one)
    assert found.location == (tmp_path / "run-one" / "candidate").resolve()
    submit("two", against=one)
    assert promote(RECIPE, expect_champion=one).rollback == 1
    assert state(client)["aliases"] == {"challenger": 2, "champion": 2, "rollback": 1}
    assert rollback(RECIPE).champion == 1
    assert state(client)["aliases"] == {"challenger": 2, "champion": 1, "rollback": 2}
    assert rollback(RECIPE).champion == 2
    assert promotion.PENDING not in state(client)["tags"]


def observe(folder: Path, champion: str, challenger: str, agree: int = 31, count: int = 150, **bounds: Any) -> Path:
    """An online verdict about so many conversations with answers of 32 tokens."""
    log = ObservationLog(folder / "log", frozen_plan(Online(**bounds), champion, challenger))
    for number in range(count):
        log.pick(f"{number:016x}")
        log.add(Observation(conversation=f"{number:016x}", prompt_tokens=8, tokens=32, agree=agree))
    log.close()
    return conclude(folder / "log", folder / "online").folder


def test_a_recipe_can_require_a_pass_on_live_traffic(
    client: Any, submit: Callable[..., Artifact[Release]], tmp_path: Path
) -> None:
    strict = judged.recipe(online={"required": True})
    one = submit("one").record.candidate
    assert promote(strict).champion == 1  # there is no champion that could serve
    two = submit("two", against=one).record.candidate
    before = state(client)
    refused = {
        "none is given": None,
        "is about champion cccccccccccc": observe(tmp_path / "other", "c" * 64, two),
        "is about challenger dddddddddddd": observe(tmp_path / "another", one, "d" * 64),
        "judged FAIL on live traffic": observe(tmp_path / "fail", one, two, agree=24, count=300),
        "judged INCONCLUSIVE on live traffic": observe(tmp_path / "few", one, two, count=50),
        "looser bounds than the recipe's: max_disagreement": observe(
            tmp_path / "loose", one, two, max_disagreement=0.2
        ),
        "looser bounds than the recipe's: min_conversations": observe(
            tmp_path / "early", one, two, min_conversations=10
        ),
    }
    for words, folder in refused.items():
        with pytest.raises(RegistryError, match=words):
            promote(strict, online=folder)
    with pytest.raises(RegistryError, match="judged FAIL on live traffic"):  # given although nobody requires it
        promote(RECIPE, online=tmp_path / "fail" / "online")
    assert state(client) == before
    passed = observe(tmp_path / "pass", one, two)
    assert promote(strict, online=passed).champion == 2
    run = client.get_model_version(NAME, "2").run_id
    logged = Path(client.download_artifacts(run, "online", str(tmp_path)))
    assert load_judged(logged).digest == load_judged(passed).digest
    assert not promote(strict).changed  # it is champion already
    assert rollback(strict).champion == 1  # it has served before


def test_an_edited_online_verdict_is_refused(begun: Begun, tmp_path: Path) -> None:
    challenger = begun.client.get_model_version(NAME, "2").tags["tapeout.candidate"]
    folder = observe(tmp_path / "fail", begun.champion, challenger, agree=24, count=300)
    record = folder / "record.json"
    record.write_text(record.read_text().replace('"FAIL"', '"PASS"'))
    with pytest.raises(ArtifactError):
        promote(RECIPE, online=folder)
    body = json.loads(record.read_text())
    del body["digest"]
    digest = hashlib.sha256(canonical_json(body)).hexdigest()
    record.write_text(json.dumps({"digest": digest, **body}))  # an editor who knows how digests are made
    with pytest.raises(EvidenceError, match="give FAIL, not the recorded PASS"):
        promote(RECIPE, online=folder)


def test_promoting_a_candidate_does_not_change_whom_it_is_compared_with(
    submit: Callable[..., Artifact[Release]],
) -> None:
    one = submit("one").record.candidate
    assert incumbent(NAME, one) is None
    promote(RECIPE)
    assert incumbent(NAME, one) is None
    two = submit("two", against=one).record.candidate
    for move in (lambda: None, lambda: promote(RECIPE), lambda: rollback(RECIPE)):
        move()
        found = incumbent(NAME, two)
        assert found is not None and found.digest == one


def test_the_champion_judged_again_by_tighter_bounds(
    client: Any, submit: Callable[..., Artifact[Release]], tmp_path: Path
) -> None:
    one = submit("one").record.candidate
    promote(RECIPE)
    tight = judged.recipe(gate={"max_kl": 0.02})
    with pytest.raises(RegistryError, match=r"another policy .* \(looser than in force\)"):
        promote(tight)
    artifacts = tmp_path / "run-one"
    verdict = judged.judge(artifacts, tight)
    assert register(tight, verdict, load(artifacts / "candidate", EngineBundle), artifacts).record.candidate == one
    assert promote(tight).champion == 2
    assert state(client)["aliases"] == {"challenger": 2, "champion": 2}


@pytest.mark.parametrize("outcome", [Outcome.FAIL, Outcome.INCONCLUSIVE])
def test_a_refusal_is_kept_but_never_promoted(
    client: Any, submit: Callable[..., Artifact[Release]], outcome: Outcome
) -> None:
    submit("bad", outcome=outcome)
    assert client.get_model_version(NAME, "1").tags["tapeout.outcome"] == outcome.value
    before = state(client)
    with pytest.raises(RegistryError, match=rf"judged {outcome.value}: {outcome.value} mean KL on held-out text"):
        promote(RECIPE)
    assert state(client) == before


def test_promotion_needs_the_champion_the_gate_compared_with(submit: Callable[..., Artifact[Release]]) -> None:
    one = submit("one").record.candidate
    promote(RECIPE)
    submit("late")  # judged while there was no champion
    with pytest.raises(RegistryError, match=f"champion of {NAME} is bundle {one[:12]}"):
        promote(RECIPE)
    submit("foreign", against="f" * 64)
    with pytest.raises(RegistryError, match="bundle ffffffffffff, which the gate"):
        promote(RECIPE)
    submit("two", against=one)
    with pytest.raises(RegistryError, match="none yet, which you expect"):
        promote(RECIPE, expect_champion="none")
    assert promote(RECIPE).champion == 4


@pytest.mark.parametrize("tag", ["verdict", "outcome", "candidate", "evidence", "compared_with"])
def test_an_edited_tag_is_refused(client: Any, submit: Callable[..., Artifact[Release]], tag: str) -> None:
    submit("one")
    client.set_model_version_tag(NAME, "1", f"tapeout.{tag}", "0" * 64)
    with pytest.raises(RegistryError, match=f"tag tapeout.{tag} of version 1"):
        promote(RECIPE)


def test_a_verdict_edited_in_the_run_is_refused(client: Any, submit: Callable[..., Artifact[Release]]) -> None:
    run_id = submit("bad", outcome=Outcome.FAIL).record.run_id
    path = Path(client.get_run(run_id).info.artifact_uri) / "verdict" / "record.json"
    path.write_text(path.read_text().replace('"outcome": "FAIL"', '"outcome": "PASS"'))
    with pytest.raises(RegistryError, match=r"not intact.*was edited"):
        promote(RECIPE)


def test_a_changed_bundle_is_refused(submit: Callable[..., Artifact[Release]], tmp_path: Path) -> None:
    submit("one")
    elsewhere = tmp_path / "elsewhere"
    shutil.move(tmp_path / "run-one" / "candidate", elsewhere)
    with pytest.raises(RegistryError, match=r"no record\.json in .*nowhere"):
        promote(RECIPE, bundle=tmp_path / "nowhere")
    (elsewhere / "model.onnx").write_text("eno")
    with pytest.raises(RegistryError, match=r"not the one that was judged: .*model\.onnx has sha256"):
        promote(RECIPE, bundle=elsewhere)
    with pytest.raises(RegistryError, match=r"record\.json says"):
        promote(RECIPE, bundle=judged.write_bundle(tmp_path / "other", "other").folder)
    (elsewhere / "model.onnx").write_text("one")
    assert promote(RECIPE, bundle=elsewhere).changed


def test_a_bundle_of_another_machine_is_pulled(
    client: Any, submit: Callable[..., Artifact[Release]], tmp_path: Path
) -> None:
    """What is promoted is what a server would pull, so a registry that lost it has nothing to promote."""
    digest = submit("one").record.candidate
    shutil.rmtree(tmp_path / "run-one")
    model = model_id_of(client.get_model_version(NAME, "1").source)
    stored = Path(client.get_logged_model(model).artifact_location.removeprefix("file://")) / "model.onnx"
    content = stored.read_bytes()
    stored.write_text("eno")
    with pytest.raises(RegistryError, match=r"model\.onnx has sha256"):
        promote(RECIPE)
    stored.write_bytes(content)
    assert promote(RECIPE).changed
    load(store_folder() / digest, EngineBundle).verify()


def test_mistakes_are_named(client: Any, submit: Callable[..., Artifact[Release]], tmp_path: Path) -> None:
    with pytest.raises(RegistryError, match="no model 'nobody'"):
        promote(judged.recipe(register={"model_name": "nobody"}))
    with pytest.raises(RegistryError, match=r"(?s)no model 'nobody'.*dvc repro register"):
        get_version(client, "nobody", 7)
    client.create_registered_model("empty")
    with pytest.raises(RegistryError, match=r"(?s)empty has no version 7.*there is none"):
        get_version(client, "empty", 7)
    submit("one")
    with pytest.raises(RegistryError, match="no version 7"):
        promote(RECIPE, version=7)
    with pytest.raises(RegistryError, match="no former champion"):
        rollback(RECIPE)
    artifacts = tmp_path / "run-two"
    verdict = judged.write_run(artifacts, "two")
    with pytest.raises(RegistryError, match=f"judged bundle {verdict.record.candidate[:12]}, not"):
        register(RECIPE, verdict, judged.write_bundle(tmp_path / "b", "b"), artifacts)
    shutil.rmtree(artifacts / "report")
    with pytest.raises(RegistryError, match=r"lacks report\.html and metrics\.json"):
        register(RECIPE, verdict, load(artifacts / "candidate", EngineBundle), artifacts)


def test_the_version_that_an_alias_is_of_says_which_bundle_it_is(begun: Begun) -> None:
    """So a fleet that follows the alias knows what it has."""
    found = version_of(f"models:/{NAME}@champion")
    assert str(found.reference) == f"models:/{NAME}/1" and found.tags[CANDIDATE] == begun.champion


def test_an_alias_of_a_deleted_version_is_named(begun: Begun) -> None:
    """Neither `tapeout promote` nor `tapeout rollback` helps there, so they are not the remedy."""
    database = tracking.sqlite_path(tracking.tracking_uri())
    assert database is not None
    with sqlite3.connect(database) as raw:  # MLflow's own call removes the aliases as well
        raw.execute("UPDATE model_versions SET current_stage = 'Deleted_Internal' WHERE version = 1")
    served = partial(ClientRegistry(begun.client).version, VersionReference(NAME, "champion"))
    asked: list[Callable[[], object]] = [partial(champion, NAME), partial(promote, RECIPE), served]
    for ask in asked:
        with pytest.raises(RegistryError, match=r"champion of .* a version that was deleted") as caught:
            ask()
        assert "delete_registered_model_alias" in caught.value.remedy and "rollback`" not in caught.value.remedy


def test_a_locked_database_is_named(begun: Begun) -> None:
    """Another program holds it for longer than SQLite waits."""
    database = tracking.sqlite_path(tracking.tracking_uri())
    assert database is not None
    with closing(sqlite3.connect(database, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(RegistryError, match="another process holds") as caught:
            promote(RECIPE)
    assert "mlflow ui" in caught.value.remedy
    assert promote(RECIPE).champion == 2


def test_an_absent_server_is_named_without_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:secret@127.0.0.1:9")
    with pytest.raises(RegistryError, match=r"no MLflow server answers at http://127\.0\.0\.1:9 ") as caught:
        champion(NAME)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("uri", "words"),
    [
        ("sqlite:////nowhere/mlflow.db", "cannot write /nowhere/mlflow.db.lock"),
        ("file:///nowhere/mlruns", "refused: The filesystem tracking backend"),
        ("oracle://me:secret@host/db", "oracle://host/db refused: "),
        ("postgresql+psycopg2://me:secret@host/db", "//host/db needs the package 'psycopg2'"),
    ],
)
def test_a_registry_that_cannot_be_used_is_named(monkeypatch: pytest.MonkeyPatch, uri: str, words: str) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    with pytest.raises(RegistryError) as caught:
        rollback(RECIPE)
    assert words in str(caught.value) and "secret" not in str(caught.value)


class Killed(BaseException):
    """The process dies here."""


@contextmanager
def dying_at_call(number: int) -> Iterator[None]:
    """Die just before the ``number``-th call that would change the registry."""
    from mlflow import MlflowClient

    calls = 0
    with pytest.MonkeyPatch.context() as patch:
        for name in dir(MlflowClient):
            if not name.startswith(("create_", "set_", "log_", "delete_")):
                continue
            original = getattr(MlflowClient, name)

            def counted(*args: Any, original: Any = original, **kwargs: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls == number:
                    raise Killed
                return original(*args, **kwargs)

            patch.setattr(MlflowClient, name, counted)
        yield


def run_until_it_survives(action: Callable[[], object]) -> int:
    """Kill ``action`` before its first, second, ... change, running on in the state it left; how often it died."""
    for number in range(1, 40):
        try:
            with dying_at_call(number):
                action()
            return number - 1
        except Killed:
            continue
    raise AssertionError("never finished")


def test_a_crash_anywhere_while_registering_is_made_good(client: Any, submit: Callable[..., Artifact[Release]]) -> None:
    assert run_until_it_survives(lambda: submit("one")) >= 4
    after = state(client)
    assert after["aliases"] == {"challenger": 1}
    assert len(after["versions"]) == len(after["runs"]) == 1 and after["points"] == [1]
    assert promote(RECIPE).champion == 1


def test_a_crash_anywhere_while_signing_is_made_good(
    client: Any, submit: Callable[..., Artifact[Release]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a version that was registered without a key. Planted: what is registered is not signed later."""
    submit("one")
    generate_keys(tmp_path / "mine.key", tmp_path / "mine.pub")
    monkeypatch.setenv("TAPEOUT_PUBLIC_KEY", str(tmp_path / "mine.pub"))
    with pytest.raises(TapeoutError, match="no signature at"):
        promote(RECIPE)
    monkeypatch.setenv("TAPEOUT_PRIVATE_KEY", str(tmp_path / "mine.key"))
    assert run_until_it_survives(lambda: submit("one")) >= 2
    assert len(state(client)["versions"]) == 1 and promote(RECIPE).champion == 1


@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_a_crash_anywhere_while_promoting_is_made_good(begun: Begun, at: int) -> None:
    with pytest.raises(Killed), dying_at_call(at):
        promote(RECIPE)
    move = promote(RECIPE)
    assert (move.champion, move.rollback, move.changed) == (2, 1, True)
    assert state(begun.client)["aliases"] == {"challenger": 2, "champion": 2, "rollback": 1}
    assert promotion.PENDING not in state(begun.client)["tags"]


@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_a_crash_anywhere_while_rolling_back_is_made_good(begun: Begun, at: int) -> None:
    promote(RECIPE)
    with pytest.raises(Killed), dying_at_call(at):
        rollback(RECIPE)
    assert rollback(RECIPE).champion == 1
    assert state(begun.client)["aliases"] == {"challenger": 2, "champion": 1, "rollback": 2}


def test_rollback_after_an_interrupted_promotion_returns_to_the_former(begun: Begun) -> None:
    with pytest.raises(Killed), dying_at_call(3):
        promote(RECIPE)
    assert rollback(RECIPE).champion == 1


def test_a_plan_overtaken_by_hand_is_dropped_aloud(begun: Begun) -> None:
    begun.submit("three")
    with pytest.raises(Killed), dying_at_call(2):
        promote(RECIPE, version=2)
    begun.client.set_registered_model_alias(NAME, "champion", "3")
    with pytest.raises(RegistryError, match=r"unfinished move .* was dropped"):
        promote(RECIPE, version=2)
    assert state(begun.client)["aliases"]["champion"] == 3
    with pytest.raises(RegistryError, match="which the gate of version 2 compared with"):
        promote(RECIPE, version=2)


def test_a_promoter_that_was_overtaken_says_so(begun: Begun, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a server, where no lock holds the other back: it moves the champion after we checked it."""
    begun.submit("three")
    original = promotion.require_bundle

    def overtaken(*args: Any) -> None:
        original(*args)
        begun.client.set_registered_model_alias(NAME, "champion", "3")

    monkeypatch.setattr(promotion, "require_bundle", overtaken)
    with pytest.raises(RegistryError, match=r"another promotion .* champion is version 3"):
        promote(RECIPE, version=2)
    assert state(begun.client)["aliases"]["champion"] == 3


def test_a_second_process_waits_for_the_lock(client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"import fcntl; f=open({str(tmp_path / 'mlflow.db.lock')!r},'a'); fcntl.flock(f, fcntl.LOCK_EX);"
            "print(flush=True); input()",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    holder.stdout.readline()
    monkeypatch.setattr(tracking, "LOCK_SECONDS", 0.2)
    with pytest.raises(RegistryError, match="another process has held"):
        rollback(RECIPE)
    holder.communicate("\n")
    with pytest.raises(RegistryError, match="no model"):
        rollback(RECIPE)


def test_nothing_but_our_lines_is_printed(
    submit: Callable[..., Artifact[Release]], capfd: pytest.CaptureFixture[str]
) -> None:
    submit("one")
    promote(RECIPE)
    assert capfd.readouterr() == ("", "")


def test_a_database_that_was_left_half_made_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by an interrupt while MLflow makes its tables, which takes seconds."""
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as database:
        database.execute("CREATE TABLE _alembic_tmp_experiments (name TEXT)")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    with pytest.raises(RegistryError, match=r"(?s)is half made.*delete it if it is a new one"):
        champion("nobody")
