"""A registered bundle stays whole in its place, whatever interrupted the first attempt to keep it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from engines.bundle import EngineBundle, IOContract
from pipeline.registry import bundle_store
from pipeline.registry.bundle_store import keep
from tapeout.artifact import Artifact, create, load
from tapeout.errors import ArtifactError
from tapeout.fingerprint import Fingerprint

WEIGHTS = b"weights" * 1000


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Artifact[EngineBundle]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TAPEOUT_STORE", raising=False)
    return write(tmp_path / "artifacts" / "candidate", WEIGHTS)


def write(folder: Path, weights: bytes) -> Artifact[EngineBundle]:
    with create(folder, EngineBundle) as draft:
        (draft.folder / "text").mkdir()
        (draft.folder / "text" / "tokenizer.json").write_text("{}")
        (draft.folder / "weights.bin").write_bytes(weights)
        record = EngineBundle(
            target="ort-cpu",
            precision="float32",
            io=IOContract(inputs=(), state=(), max_tokens=64, slots=4, vocab_size=256),
            hardware=(Fingerprint(machine="none", features=(), libraries={}),),
            operator_counts={},
            passes=(),
            weight_bytes=1,
            step_bytes=1,
            plan={},
            linear_outputs=(),
            stop_tokens=(1,),
        )
        draft.finish(record, parents={})
    return load(folder, EngineBundle)


def test_what_is_kept_outlives_the_artifact(bundle: Artifact[EngineBundle], tmp_path: Path) -> None:
    kept = keep(bundle)
    assert kept.folder == Path("bundles") / bundle.digest
    write(bundle.folder, b"another build")
    shutil.rmtree(tmp_path / "artifacts")
    assert kept.digest == bundle.digest
    load(kept.folder, EngineBundle).verify()
    assert (kept.folder / "weights.bin").read_bytes() == WEIGHTS
    assert [path.name for path in Path("bundles").iterdir()] == [bundle.digest]


def test_keeping_twice_writes_nothing(bundle: Artifact[EngineBundle], monkeypatch: pytest.MonkeyPatch) -> None:
    keep(bundle)
    monkeypatch.setattr(bundle_store, "_copy", None)
    assert keep(bundle).digest == bundle.digest


def test_another_place(bundle: Artifact[EngineBundle], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAPEOUT_STORE", str(tmp_path / "elsewhere"))
    kept = keep(bundle)
    assert kept.folder == tmp_path / "elsewhere" / bundle.digest
    kept.verify()


def test_a_copy_cut_short_by_a_kill_is_not_taken_for_a_kept_bundle(bundle: Artifact[EngineBundle]) -> None:
    program = (
        "import os, shutil, signal; from pathlib import Path\n"
        "from engines.bundle import EngineBundle; from tapeout import artifact\n"
        "from pipeline.registry import bundle_store\n"
        "def half(source, target):\n"
        "    target.parent.mkdir(parents=True, exist_ok=True); target.write_bytes(source.read_bytes()[:99])\n"
        "    if source.name == 'record.json': os.kill(os.getpid(), signal.SIGKILL)\n"
        "bundle_store._copy = half\n"
        "bundle_store.keep(artifact.load(Path('artifacts/candidate'), EngineBundle))\n"
    )
    root = str(Path(__file__).parents[2])
    killed = subprocess.run([sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": root}, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert [path.name for path in Path("bundles").iterdir()] == [f".{bundle.digest}.partial"]
    keep(bundle).verify()
    assert [path.name for path in Path("bundles").iterdir()] == [bundle.digest]


@pytest.mark.parametrize("damage", ["lost", "short", "flipped", "linked", "no record", "another bundle"])
def test_what_was_damaged_in_its_place_is_kept_anew(bundle: Artifact[EngineBundle], damage: str) -> None:
    folder = keep(bundle).folder
    weights = folder / "weights.bin"
    match damage:
        case "lost":
            weights.unlink()
        case "short":
            weights.chmod(0o644)
            weights.write_bytes(WEIGHTS[:99])
        case "flipped":
            weights.chmod(0o644)
            weights.write_bytes(WEIGHTS[::-1])
        case "linked":
            weights.unlink()
            os.link(bundle.folder / "weights.bin", weights)
        case "no record":
            (folder / "record.json").unlink()
        case _:
            write(folder, b"other")
    keep(bundle).verify()
    assert weights.read_bytes() == WEIGHTS


def test_a_bundle_that_changed_since_it_was_built_is_not_kept(bundle: Artifact[EngineBundle]) -> None:
    (bundle.folder / "weights.bin").write_bytes(WEIGHTS[::-1])  # after it was opened
    with pytest.raises(ArtifactError, match=r"weights\.bin has sha256") as caught:
        keep(bundle)
    assert caught.value.remedy
    assert not list(Path("bundles").iterdir())


def test_a_place_that_cannot_be_written_is_a_clear_error(
    bundle: Artifact[EngineBundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("file").write_text("x")
    monkeypatch.setenv("TAPEOUT_STORE", "file/below")
    with pytest.raises(ArtifactError, match="cannot keep") as caught:
        keep(bundle)
    assert "TAPEOUT_STORE" in caught.value.remedy


def test_a_bundle_of_an_older_schema_is_refused_with_the_command_that_rebuilds_it(
    bundle: Artifact[EngineBundle],
) -> None:
    path = bundle.folder / "record.json"
    body = json.loads(path.read_text())
    path.chmod(0o644)
    path.write_text(json.dumps(body | {"schema_version": EngineBundle.schema_version - 1}))
    with pytest.raises(ArtifactError, match="EngineBundle schema 4, by an older version") as caught:
        load(bundle.folder, EngineBundle)
    assert "dvc repro build-baseline build-candidate" in caught.value.remedy
