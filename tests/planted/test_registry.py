"""Forged registry state, edited evidence and damaged bundles: each is refused, and nothing moves."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from engines import load as loader
from engines.bundle import EngineBundle
from evals.evidence import load_evidence
from evals.statement import statement
from evals.verdict import Verdict
from pipeline.cli.main import main
from pipeline.recipe import Recipe
from pipeline.registry import tracking
from pipeline.registry.bundle_store import keep
from pipeline.registry.judged import KEY, tags_of
from pipeline.registry.promotion import PENDING, promote, rollback
from pipeline.registry.register import champion, incumbent, register
from pipeline.registry.versions import model_id_of
from tapeout import file_hashes
from tapeout.artifact import Artifact, ArtifactRef, load
from tapeout.errors import ArtifactError, EvidenceError, RegistryError, SignatureError, TapeoutError
from tapeout.signing import Statement, generate_keys, require_signed_pass, sign, signature_path, verify_signature
from tests import judged
from tests.fake_engine import MACHINE
from tests.judged import edit_record
from tests.registries import empty_registry, restored

RECIPE = judged.recipe()
LOOSE = judged.recipe(gate={"max_kl": 0.8, "max_document_kl": 1.0})
NAME = judged.NAME
EARLY, SERVED, NEXT, FAILED = 1, 2, 3, 4  # versions of ``registry``
BAD = judged.good(0.345)  # a mean KL that fails


@dataclass(frozen=True)
class Registry:
    """Versions EARLY and SERVED passed when there was no champion, and SERVED became it. Judged against that, NEXT
    passed and FAILED failed.
    """

    folder: Path
    client: Any
    digests: dict[int, str]

    def aliases(self) -> dict[str, int]:
        return {name: int(number) for name, number in self.client.get_registered_model(NAME).aliases.items()}

    def point(self, alias: str, number: int) -> None:
        self.client.set_registered_model_alias(NAME, alias, str(number))

    def tag(self, number: int, **tags: str) -> None:
        for name, value in tags.items():
            self.client.set_model_version_tag(NAME, str(number), f"tapeout.{name}", value)

    def logged(self, number: int) -> Path:
        """The files of a version's run."""
        run = self.client.get_run(self.client.get_model_version(NAME, str(number)).run_id)
        return Path(run.info.artifact_uri.removeprefix("file://"))

    def artifacts(self, number: int) -> Path:
        return self.folder / f"run-{number}"

    def refuses(self, action: Callable[[], object], match: str) -> None:
        """``action`` is refused with a remedy, and no alias moves."""
        before = self.aliases()
        with pytest.raises(TapeoutError, match=match) as caught:
            action()
        assert caught.value.remedy
        assert self.aliases() == before


def submit(folder: Path, number: int, by: Recipe, **evidence: Any) -> str:
    verdict = judged.write_run(folder / f"run-{number}", f"weights {number}", judged_by=by, **evidence)
    bundle = keep(load(folder / f"run-{number}" / "candidate", EngineBundle))
    register(by, verdict, bundle, folder / f"run-{number}")
    return bundle.digest


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path, dict[int, str]]]:
    """Where the registry lies, a copy of it from before any test, and the digests of its versions."""
    folder = tmp_path_factory.mktemp("registry") / "project"
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("MLFLOW_TRACKING_URI", empty_registry(folder))
        digests = {EARLY: submit(folder, EARLY, RECIPE), SERVED: submit(folder, SERVED, RECIPE)}
        promote(RECIPE)
        digests[NEXT] = submit(folder, NEXT, RECIPE, against=digests[SERVED])
        digests[FAILED] = submit(folder, FAILED, RECIPE, against=digests[SERVED], evidence=BAD)
    shutil.copytree(folder, folder.with_name("pristine"))
    yield folder, folder.with_name("pristine"), digests


@pytest.fixture
def registry(
    world: tuple[Path, Path, dict[int, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Registry]:
    folder, pristine, digests = world
    monkeypatch.setenv("MLFLOW_TRACKING_URI", restored(pristine, folder, tmp_path))
    monkeypatch.chdir(folder)
    with tracking.connect(write=False) as client:
        yield Registry(folder, client, digests)


def edit_file(folder: Path, name: str, old: str, new: str) -> None:
    """Replace text in a file, and its hash in the record."""
    path = folder / name
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    content = path.read_bytes()
    entry = {"sha256": hashlib.sha256(content).hexdigest(), "size_bytes": len(content)}
    edit_record(folder, lambda body: body["files"].update({name: entry}))


def say_pass(body: dict[str, Any]) -> None:
    body["record"]["outcome"] = "PASS"
    for check in body["record"]["checks"]:
        check["outcome"] = "PASS"


def flip(path: Path) -> None:
    """Change one byte, and restore the time of the last change."""
    before, content = path.stat(), bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.chmod(0o644)
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


# the policy


def test_a_version_judged_by_looser_bounds(registry: Registry) -> None:
    submit(registry.folder, 5, LOOSE, against=registry.digests[SERVED], evidence=BAD)
    said = r"gate\.max_kl is 0\.8 there and 0\.03 in force \(looser than in force\)"
    registry.refuses(lambda: promote(RECIPE), said)
    assert promote(LOOSE).changed


def test_a_version_judged_on_less_evidence(registry: Registry) -> None:
    stricter = judged.recipe(evaluate={"items": 5000})
    registry.refuses(
        lambda: promote(stricter, version=NEXT), r"evaluate\.items is 600 there and 5000 in force \(looser"
    )


def test_a_rollback_to_looser_bounds(registry: Registry) -> None:
    promote(RECIPE, version=NEXT)
    registry.refuses(lambda: rollback(judged.recipe(gate={"max_kl": 0.02})), r"gate\.max_kl is 0\.03 there and 0\.02")


def test_evidence_measured_by_another_recipe(tmp_path: Path) -> None:
    judged.write_run(tmp_path)
    for section, change, said in (
        ("evaluate", {"tasks": ["arc", "piqa", "sciq"]}, "EvalReport is of tasks arc, piqa, not of arc, piqa, sciq"),
        ("evaluate", {"documents": 50}, "measured with 60 documents, not with 50"),
        ("shadow", {"max_new_tokens": 96}, "measured with 48 new tokens, not with 96"),
        ("benchmark", {"prompt_tokens": 128}, "measured with 1 prompt_tokens, not with 128"),
        ("serving", {"steps": 4}, r"measured with 8 serving\.steps, not with 4"),
        ("serving", {"answers": 100}, r"measured with 24 serving\.answers, not with 100"),
        ("serving", {"pressed": 90}, r"measured with 45 serving\.pressed, not with 90"),
    ):
        with pytest.raises(EvidenceError, match=said):
            judged.judge(tmp_path, judged.recipe(**{section: change}))


def test_a_recipe_that_was_changed_and_not_built(tmp_path: Path) -> None:
    judged.write_run(tmp_path)
    eight = [{"match": "*", "bits": 8, "group_size": 64, "symmetric": True}]
    for section, change, said in (
        ("plan", {"schemes": eight}, r"plan was made with plan\.schemes"),
        ("calibrate", {"tokens": 64}, r"calibration was made with calibrate\.tokens 256, not with 64"),
        ("build", {"slots": 8}, r"candidate was made with build\.slots 4, not with 8"),
    ):
        with pytest.raises(EvidenceError, match=said):
            judged.judge(tmp_path, judged.recipe(**{section: change}))


# tags and aliases


def plan(kind: str, before: tuple[int | None, int | None], after: tuple[int | None, int | None]) -> str:
    names = ("champion", "rollback")
    return json.dumps(
        {"kind": kind, "before": dict(zip(names, before, strict=True)), "after": dict(zip(names, after, strict=True))}
    )


FORGED_PLANS = {
    "to a version that failed": (plan("promote", (SERVED, None), (FAILED, SERVED)), "was judged FAIL"),
    "to a version that was compared with no champion": (
        plan("promote", (SERVED, None), (EARLY, SERVED)),
        "champion of",
    ),
    "from a champion that is not": (plan("promote", (EARLY, None), (NEXT, EARLY)), "moved since it began"),
    "that no promotion makes": (plan("promote", (SERVED, None), (NEXT, FAILED)), "moved since|names other versions"),
    "back to where nothing was": (plan("rollback", (SERVED, None), (NEXT, SERVED)), "no former champion|moved since"),
    "to a version that is not there": (plan("promote", (SERVED, None), (9, SERVED)), "has no version 9"),
    "of another kind": (plan("crown", (SERVED, None), (NEXT, SERVED)), "holds"),
    "that is no JSON": ("champion=4", "holds"),
}


@pytest.mark.parametrize("name", FORGED_PLANS)
def test_a_forged_pending_move(registry: Registry, name: str) -> None:
    tag, said = FORGED_PLANS[name]
    for command in (lambda: promote(RECIPE, version=NEXT), lambda: rollback(RECIPE)):
        registry.client.set_registered_model_tag(NAME, PENDING, tag)
        registry.refuses(command, rf"(?s)unfinished move .* was dropped: .*({said})")
    assert promote(RECIPE, version=NEXT).changed


def test_a_forged_pending_move_that_seems_done(registry: Registry) -> None:
    registry.client.set_registered_model_tag(NAME, PENDING, plan("promote", (SERVED, None), (FAILED, SERVED)))
    registry.point("rollback", SERVED)
    registry.point("champion", FAILED)
    registry.refuses(lambda: promote(RECIPE, version=FAILED), "was judged FAIL")


def test_an_edited_candidate_tag_of_the_champion(registry: Registry) -> None:
    """So that a challenger that was compared with another engine seems to fit."""
    other = submit(registry.folder, 5, RECIPE, against="f" * 64)
    registry.tag(SERVED, candidate="f" * 64)
    registry.refuses(lambda: promote(RECIPE), r"tag tapeout\.(release|candidate) of version 2|cannot be relied on")
    assert other


def test_tags_that_say_that_a_failed_version_passed(registry: Registry) -> None:
    registry.tag(FAILED, outcome="PASS")
    registry.refuses(lambda: promote(RECIPE, version=FAILED), r"tag tapeout\.outcome of version 4")


def test_the_champion_already_is_checked_too(registry: Registry) -> None:
    registry.point("champion", FAILED)
    registry.refuses(lambda: promote(RECIPE, version=FAILED), "was judged FAIL")
    registry.point("champion", SERVED)
    flip(registry.folder / "bundles" / registry.digests[SERVED] / "model.onnx")
    registry.refuses(lambda: promote(RECIPE, version=SERVED), r"model\.onnx has sha256")


def test_a_champion_set_by_hand_to_a_version_that_failed(registry: Registry) -> None:
    registry.point("champion", FAILED)
    registry.refuses(
        lambda: incumbent(NAME, registry.digests[NEXT]),
        "the champion of .* cannot be relied on: version 4 was judged FAIL",
    )
    registry.refuses(lambda: champion(NAME), "cannot be relied on")
    registry.refuses(lambda: promote(RECIPE, version=NEXT), "cannot be relied on")


def test_a_rollback_to_a_version_that_failed(registry: Registry) -> None:
    registry.point("rollback", FAILED)
    registry.refuses(lambda: rollback(RECIPE), "was judged FAIL")


def test_a_rollback_to_a_version_that_was_never_champion(registry: Registry) -> None:
    promote(RECIPE, version=NEXT)
    registry.point("rollback", EARLY)
    registry.refuses(lambda: rollback(RECIPE), "was never champion before or after")


def test_a_rollback_to_a_bundle_that_was_deleted_or_damaged(registry: Registry) -> None:
    promote(RECIPE, version=NEXT)
    kept = registry.folder / "bundles" / registry.digests[SERVED]
    flip(kept / "model.onnx")
    registry.refuses(lambda: rollback(RECIPE), r"model\.onnx has sha256")
    shutil.rmtree(kept)
    model = model_id_of(registry.client.get_model_version(NAME, str(SERVED)).source)
    stored = Path(registry.client.get_logged_model(model).artifact_location.removeprefix("file://")) / "model.onnx"
    flip(stored)
    registry.refuses(lambda: rollback(RECIPE), r"model\.onnx has sha256")
    flip(stored)
    assert rollback(RECIPE).changed, "it was not pulled again"


def test_a_damaged_bundle_of_the_champion(registry: Registry) -> None:
    """It would be what a rollback goes back to."""
    flip(registry.folder / "bundles" / registry.digests[SERVED] / "model.onnx")
    registry.refuses(lambda: promote(RECIPE, version=NEXT), r"cannot be relied on.*model\.onnx has sha256")


def test_a_location_that_leads_to_another_bundle(registry: Registry) -> None:
    registry.tag(NEXT, location=str(registry.folder / "bundles" / registry.digests[FAILED]))
    registry.refuses(lambda: promote(RECIPE, version=NEXT), r"not the one that was judged: record\.json says")


# what MLflow keeps


def test_a_version_copied_into_another_model(registry: Registry) -> None:
    other = judged.recipe(register={"model_name": "other"})
    copied = registry.client.get_model_version(NAME, str(NEXT))
    registry.client.create_registered_model("other")
    registry.client.create_model_version("other", copied.source, run_id=copied.run_id, tags=copied.tags)
    with pytest.raises(RegistryError, match=f"version 1 of other was judged for {NAME}"):
        promote(other, version=1)


@pytest.mark.parametrize("what", ["source", "run", "deleted run"])
def test_an_edited_version(registry: Registry, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import sqlite3

    database = os.environ["MLFLOW_TRACKING_URI"].removeprefix("sqlite:///")
    run = registry.client.get_model_version(NAME, str(SERVED)).run_id
    if what == "deleted run":
        registry.client.delete_run(registry.client.get_model_version(NAME, str(NEXT)).run_id)
    else:
        column, value = ("source", "file:///tmp/x") if what == "source" else ("run_id", run)
        with sqlite3.connect(database) as connection:
            connection.execute(f"UPDATE model_versions SET {column} = ? WHERE version = ?", (value, NEXT))
    registry.refuses(lambda: promote(RECIPE, version=NEXT), "has the source|registered something else|is deleted")


def retag(registry: Registry, number: int, verdict: Artifact[Verdict]) -> None:
    """Make every tag of a version and of its run say what an edited verdict says."""
    tags = tags_of(NAME, RECIPE, verdict.record, verdict.digest)
    registry.tag(number, **{name.removeprefix("tapeout."): value for name, value in tags.items()})
    run = registry.client.get_model_version(NAME, str(number)).run_id
    registry.client.set_tag(run, KEY, tags[KEY])


def test_a_logged_verdict_edited_with_its_digest_and_all_tags(registry: Registry) -> None:
    folder = registry.logged(FAILED) / "verdict"
    edit_record(folder, say_pass)
    retag(registry, FAILED, load(folder, Verdict))
    registry.refuses(lambda: promote(RECIPE, version=FAILED), "gives another verdict than the recorded PASS: FAIL")


def test_logged_evidence_that_was_edited_or_lost(registry: Registry) -> None:
    evidence = registry.logged(NEXT) / "evidence"
    edit_file(evidence / "parity", "parity_items.jsonl", '"agree": 200', '"agree": 199')
    registry.refuses(lambda: promote(RECIPE, version=NEXT), "not intact: the evidence gives another verdict")
    shutil.rmtree(evidence / "shadow")
    registry.refuses(lambda: promote(RECIPE, version=NEXT), "not intact: there is no folder")
    artifacts = registry.artifacts(NEXT)
    register(RECIPE, load(artifacts / "verdict", Verdict), keep(load(artifacts / "candidate", EngineBundle)), artifacts)
    assert promote(RECIPE, version=NEXT).changed  # what was lost has been logged again


# signatures


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    """A private and a public key."""
    generate_keys(tmp_path / "mine.key", tmp_path / "mine.pub")
    return tmp_path / "mine.key", tmp_path / "mine.pub"


def test_a_forged_run_whose_evidence_is_consistent(
    registry: Registry, keys: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made-up evidence of the right form about a bad engine: only a signature tells it from a measured one."""
    artifacts = registry.artifacts(FAILED)
    judged.write_evidence(artifacts, judged.good(), ArtifactRef("EngineBundle", registry.digests[SERVED]))
    bundle = keep(load(artifacts / "candidate", EngineBundle))
    signed = judged.recipe(register={"public_key": str(keys[1])})
    registered = lambda by: register(by, judged.judge(artifacts, by), bundle, artifacts)  # noqa: E731
    registered(signed)
    registry.refuses(lambda: promote(signed), "no signature at")
    generate_keys(tmp_path / "theirs.key", tmp_path / "theirs.pub")
    monkeypatch.setenv("TAPEOUT_PRIVATE_KEY", str(tmp_path / "theirs.key"))
    registered(signed)
    registry.refuses(lambda: promote(signed), r"not signed by .*mine\.pub")
    monkeypatch.setenv("TAPEOUT_PRIVATE_KEY", str(keys[0]))
    registered(signed)
    assert promote(signed).changed  # the holder of the key says so


def test_a_signature_about_something_else(
    registry: Registry, keys: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TAPEOUT_PUBLIC_KEY", str(keys[1]))
    verdicts = {number: load(registry.artifacts(number) / "verdict", Verdict) for number in (NEXT, FAILED)}
    bundles = {number: load(registry.artifacts(number) / "candidate", EngineBundle) for number in (NEXT, FAILED)}
    target = registry.logged(NEXT) / "evidence" / "verdict.sigstore.json"
    right = statement(RECIPE.register_.model_name, verdicts[NEXT], bundles[NEXT])
    others = {
        "is about bundle": statement(RECIPE.register_.model_name, verdicts[NEXT], bundles[FAILED]),
        "signs another verdict": statement(RECIPE.register_.model_name, verdicts[FAILED], bundles[NEXT]),
        "signs another model": statement("x", verdicts[NEXT], bundles[NEXT]),
    }
    for said, wrong in others.items():
        target.write_text(sign(wrong, keys[0]))
        registry.refuses(lambda: promote(RECIPE, version=NEXT), said)
    target.write_text(sign(right, keys[0]))
    assert promote(RECIPE, version=NEXT).changed


def test_a_signed_statement_that_was_edited(registry: Registry, keys: tuple[Path, Path], tmp_path: Path) -> None:
    artifacts = registry.artifacts(FAILED)
    verdict, bundle = load(artifacts / "verdict", Verdict), load(artifacts / "candidate", EngineBundle)
    path = tmp_path / "signed.json"
    path.write_text(sign(statement(RECIPE.register_.model_name, verdict, bundle), keys[0]))
    assert verify_signature(path, keys[1], Statement).predicate.result == "FAILED"
    whole = json.loads(path.read_text())
    payload = base64.b64decode(whole["dsseEnvelope"]["payload"]).replace(b'"FAILED"', b'"PASSED"')
    whole["dsseEnvelope"]["payload"] = base64.b64encode(payload).decode()
    path.write_text(json.dumps(whole))
    with pytest.raises(SignatureError, match="not signed by"):
        verify_signature(path, keys[1], Statement)
    for text in ("", "{}", '{"dsseEnvelope": {"payload": "?", "payloadType": "x", "signatures": []}}'):
        path.write_text(text)
        with pytest.raises(SignatureError, match="is not a signature"):
            verify_signature(path, keys[1], Statement)


def test_a_bundle_without_a_signed_pass(registry: Registry, keys: tuple[Path, Path]) -> None:
    for number in (NEXT, FAILED):
        artifacts = registry.artifacts(number)
        bundle, verdict = load(artifacts / "candidate", EngineBundle), load(artifacts / "verdict", Verdict)
        with pytest.raises(SignatureError, match="no signature at"):
            loader.load(bundle.folder, public_key=keys[1])
        signature_path(bundle.folder).write_text(sign(statement(RECIPE.register_.model_name, verdict, bundle), keys[0]))
    require_signed_pass(load(registry.artifacts(NEXT) / "candidate", EngineBundle), keys[1])
    with pytest.raises(SignatureError, match="was judged FAIL"):
        loader.load(registry.artifacts(FAILED) / "candidate", public_key=keys[1])


def test_the_gate_refuses_an_unsigned_verdict(
    registry: Registry, keys: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = registry.artifacts(NEXT)
    judged.write_params(Path("params.yaml"), RECIPE)
    monkeypatch.setenv("TAPEOUT_PUBLIC_KEY", str(keys[1]))
    assert main(["gate", "--artifacts", str(folder)]) == 2
    assert "no signature at" in capsys.readouterr().err
    assert main(["gate", "--artifacts", str(folder), "--key", str(keys[0])]) == 0
    assert main(["gate", "--artifacts", str(folder)]) == 0
    judged.write_params(Path("params.yaml"), LOOSE)
    judged.judge(folder, LOOSE)
    assert main(["gate", "--artifacts", str(folder)]) == 2
    assert "signs another verdict" in capsys.readouterr().err


# artifacts beside the verdict


def refused_by_gate(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    judged.write_params(folder / "params.yaml", RECIPE)
    assert main(["gate", "--artifacts", str(folder), "--params", str(folder / "params.yaml")]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("name", ["baseline/model.onnx", "candidate/model.onnx", "quantized/model.safetensors"])
def test_a_flipped_byte_in_what_was_judged(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    judged.write_run(tmp_path)
    flip(tmp_path / name)
    assert f"{name} has sha256" in refused_by_gate(tmp_path, capsys)


def test_a_verdict_edited_with_its_digest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    judged.write_run(tmp_path, evidence=BAD)
    edit_record(tmp_path / "verdict", say_pass)
    assert "gives another verdict than the recorded PASS: FAIL" in refused_by_gate(tmp_path, capsys)


def test_evidence_edited_with_its_digest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    judged.write_run(tmp_path, evidence=BAD)
    edit_file(tmp_path / "evaluation", "text_items.jsonl", '"kl_sum"', '"kl_sum" ')
    assert "the verdict" in refused_by_gate(tmp_path, capsys)


def test_evidence_copied_from_another_run(tmp_path: Path) -> None:
    judged.write_run(tmp_path / "good", "good")
    judged.write_run(tmp_path / "bad", "bad", evidence=BAD)
    for name in ("evaluation", "parity", "shadow", "benchmark"):
        shutil.rmtree(tmp_path / "bad" / name)
        shutil.copytree(tmp_path / "good" / name, tmp_path / "bad" / name)
    with pytest.raises(EvidenceError, match=r"evaluation was made from candidate .* which lies beside it"):
        judged.judge(tmp_path / "bad", RECIPE)


@pytest.mark.parametrize("name", ["baseline", "quantized", "candidate", "calibration", "graph"])
def test_an_artifact_of_another_model(tmp_path: Path, name: str) -> None:
    judged.write_run(tmp_path)
    other = ArtifactRef("Source" if name == "graph" else "PortableGraph", "e" * 64)
    role = "source" if name == "graph" else "graph"
    edit_record(
        tmp_path / name,
        lambda body: body["parents"].update({role: {"artifact_type": other.artifact_type, "digest": other.digest}}),
    )
    with pytest.raises(EvidenceError, match=f"{name} was made from {role} eeeeeeeeeeee"):
        load_evidence(tmp_path, RECIPE)
    edit_record(tmp_path / name, lambda body: body["parents"].pop(role))
    with pytest.raises(EvidenceError, match=f"{name} does not say from which {role} it was made"):
        load_evidence(tmp_path, RECIPE)


def test_a_replay_that_names_another_champion(tmp_path: Path) -> None:
    judged.write_run(tmp_path, against="d" * 64)
    edit_record(tmp_path / "shadow", lambda body: body["record"].update(champion="f" * 64))
    with pytest.raises(EvidenceError, match=r"shadow names champion f+…, but was made from d+…"):
        load_evidence(tmp_path, RECIPE)


def test_documents_that_calibration_saw(tmp_path: Path) -> None:
    evidence = judged.good()
    scored = evidence.reports["text"].items
    items = (scored[0].model_copy(update={"doc_hash": "a" * 64}), *scored[1:])
    with pytest.raises(EvidenceError, match="1 of 60 text items are documents that calibration saw"):
        judged.write_run(tmp_path, evidence=judged.with_items(evidence, "text", items))


# bundles


LARGE = 3 << 20


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Artifact[EngineBundle]:
    """Large enough that its hash is remembered."""
    monkeypatch.setenv("TAPEOUT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TAPEOUT_STORE", str(tmp_path / "bundles"))
    judged.write_bundle(tmp_path / "bundle", "x" * LARGE)
    settle(tmp_path / "bundle" / "model.onnx")
    return load(tmp_path / "bundle", EngineBundle)


def settle(path: Path) -> None:
    """Let the clock move on from the file's last change."""
    import time

    while time.time_ns() - path.stat().st_ctime_ns < 150_000_000:
        time.sleep(0.02)


def test_a_flipped_byte_in_a_bundle_that_was_opened_before(
    bundle: Artifact[EngineBundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its size and its mtime are as they were."""
    path = bundle.folder / "model.onnx"
    load(bundle.folder, EngineBundle)
    with monkeypatch.context() as patch:
        hashed: list[Path] = []
        original = file_hashes.sha256_file
        patch.setattr(file_hashes, "sha256_file", lambda path, read: hashed.append(path) or original(path, read))
        load(bundle.folder, EngineBundle)
        assert not hashed  # opened without being read
    flip(path)
    with pytest.raises(ArtifactError, match=r"model\.onnx has sha256"):
        loader.load(bundle.folder)


def test_a_file_that_is_exchanged_while_the_engine_opens(
    bundle: Artifact[EngineBundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Target:
        def require_machine(self) -> None:
            pass

        def fingerprint(self) -> Any:
            return MACHINE

        def open(self, bundle: Artifact[EngineBundle], **_: Any) -> Any:
            flip(bundle.folder / "model.onnx")
            return self

        def close(self) -> None:
            self.closed = True

    monkeypatch.setattr(loader, "find_target", lambda name: Target())
    with pytest.raises(ArtifactError, match=r"model\.onnx in .* changed while the engine was opened"):
        loader.load(bundle.folder)


def test_a_flipped_byte_in_the_artifact_of_a_kept_bundle(bundle: Artifact[EngineBundle]) -> None:
    kept = keep(bundle)
    flip(bundle.folder / "model.onnx")
    kept.verify()
    with pytest.raises(ArtifactError, match=r"model\.onnx has sha256"):
        bundle.verify()
    assert not (kept.folder / "model.onnx").stat().st_mode & 0o222


def test_a_file_that_the_record_does_not_list(bundle: Artifact[EngineBundle], tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name, plant in (
        ("kernels.so", lambda path: path.write_bytes(b"ELF")),
        ("data", lambda path: path.symlink_to(elsewhere, target_is_directory=True)),
    ):
        plant(bundle.folder / name)
        with pytest.raises(ArtifactError, match=f"{name} is not listed in record.json"):
            loader.load(bundle.folder)
        (bundle.folder / name).unlink()
    load(bundle.folder, EngineBundle)


@pytest.mark.parametrize("name", ["../model.onnx", "/etc/passwd", "a/../../model.onnx", "./model.onnx"])
def test_a_record_that_lists_files_elsewhere(bundle: Artifact[EngineBundle], name: str) -> None:
    edit_record(bundle.folder, lambda body: body["files"].update({name: body["files"]["model.onnx"]}))
    with pytest.raises(ArtifactError, match="lists '"):
        loader.load(bundle.folder)


# kills

KILLED_REWRITE = """
import os, signal, sys
from pathlib import Path
from tests.unit.test_artifact import Thing, write
from tapeout import durable
if sys.argv[2] == "no exchange":
    durable._exchange = lambda one, other: False
steps = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree", "ctypes.dlsym", "open"}
left, place = [0], os.path.abspath(sys.argv[1])
def die(event, arguments):
    if event in steps and os.path.dirname(place) in repr(arguments) or event == "ctypes.dlsym":
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
for line in sys.stdin:  # the step to be killed at
    if (child := os.fork()) == 0:
        left[0] = int(line)
        sys.addaudithook(die)
        write(Path(place), "new")
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.mark.parametrize("how", ["exchange", "no exchange"])
def test_a_kill_while_an_artifact_is_replaced(tmp_path: Path, how: str) -> None:
    """Killed before every step in turn: afterwards the old artifact or the new one is there, whole.

    Each writer is a fork of one process, which has imported all that it needs.
    """
    from tests.unit.test_artifact import Thing, write

    place, root = tmp_path / "store" / "a", Path(__file__).parents[2]
    contents: list[str] = []
    program = [sys.executable, "-c", KILLED_REWRITE, str(place), how]
    variables = {**os.environ, "PYTHONPATH": str(root)}
    with subprocess.Popen(program, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdin and writer.stdout
        for step in range(1, 200):
            write(place, "old")
            print(step, file=writer.stdin, flush=True)
            ended = int(writer.stdout.readline())
            found = load(place, Thing)
            found.verify()
            contents.append((place / "sub" / "data.txt").read_text())
            if ended == 0:
                break
            assert ended == -signal.SIGKILL
    assert contents[0] == "old" and contents[-1] == "new" and len(contents) > 8
    assert contents == sorted(contents, key=["old", "new"].index)  # never back to the old one
    write(place, "again")
    assert [path.name for path in place.parent.iterdir()] == ["a"]


def test_a_full_disk_while_a_bundle_is_kept(bundle: Artifact[EngineBundle], tmp_path: Path) -> None:
    """A process that may write no more than half of the file."""
    program = (
        "import resource, signal, sys; from pathlib import Path\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "from engines.bundle import EngineBundle; from pipeline.registry.bundle_store import keep\n"
        "from tapeout.artifact import load; from tapeout.errors import ArtifactError\n"
        "try: keep(load(Path(sys.argv[1]), EngineBundle))\n"
        "except ArtifactError as error: print(error)\n"
    )
    root = str(Path(__file__).parents[2])
    found = subprocess.run(
        [sys.executable, "-c", program, str(bundle.folder)],
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "cannot keep" in found.stdout and "free disk space" in found.stdout
    assert not list((tmp_path / "bundles").iterdir())
