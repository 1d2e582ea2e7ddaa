"""An artifact is whole or absent, and whatever changed afterwards is noticed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapeout.artifact import ArtifactRef, Parents, ParentTypes, Record, canonical_json, create, load, read_payload
from tapeout.errors import ArtifactError


class Thing(Record):
    artifact_type: ClassVar[str] = "Thing"
    remedy: ClassVar[str] = "make a thing"
    parent_types: ClassVar[ParentTypes] = {"source": ("Thing", "Other"), "other": ("Other",)}
    size: int = 1
    note: str = ""


class Other(Record):
    artifact_type: ClassVar[str] = "Other"


class NewThing(Thing):
    schema_version: ClassVar[int] = Thing.schema_version + 1


def other(digest: str) -> ArtifactRef:
    return ArtifactRef("Other", digest)


def write(folder: Path, text: str = "content", record: Thing | None = None, parents: Parents | None = None) -> str:
    with create(folder, Thing) as draft:
        (draft.folder / "sub").mkdir()
        (draft.folder / "sub" / "data.txt").write_text(text)
        draft.finish(record or Thing(), parents=parents or {})
    return load(folder, Thing).digest


def test_hashing_of_much_shows_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When it is written, opened again, also where hashes are remembered, and verified."""
    shown: list[tuple[str, int, int]] = []

    class Bar:
        def __init__(self, *, title: str, unit: str, total: int) -> None:
            self.title, self.total, self.done = title, total, 0
            assert unit == "B"

        def update(self, count: int) -> None:
            self.done += count

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *_: object) -> None:
            shown.append((self.title, self.done, self.total))

    size = 3 << 20
    monkeypatch.setattr("tapeout.progress.ProgressBar", Bar)
    monkeypatch.setenv("TAPEOUT_CACHE", str(tmp_path / "cache"))
    write(tmp_path / "small")
    assert not shown
    monkeypatch.setattr("tapeout.artifact.SHOWN_BYTES", size)
    write(tmp_path / "large", "x" * size)
    time.sleep(0.15)  # by then the file is settled
    load(tmp_path / "large", Thing).verify()
    load(tmp_path / "large", Thing)
    assert shown[0] == ("hashing Thing", size, size)
    assert shown[1:] == [("hashing large", size, size)] * 4


def test_what_was_written_is_what_loads(tmp_path: Path) -> None:
    digest = write(tmp_path / "a", record=Thing(size=7, note="x"), parents={"source": other("s" * 64)})
    found = load(tmp_path / "a", Thing)
    assert found.record == Thing(size=7, note="x")
    assert found.digest == digest and found.parents == {"source": other("s" * 64)}
    assert found.files["sub/data.txt"].size_bytes == len("content")
    found.verify()
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("error", [RuntimeError("stop"), KeyboardInterrupt(), SystemExit(1)])
@pytest.mark.parametrize("before", [False, True], ids=["absent", "present"])
def test_an_error_leaves_the_place_as_it_was(tmp_path: Path, error: BaseException, before: bool) -> None:
    digest = write(tmp_path / "a") if before else None
    with pytest.raises(type(error)), create(tmp_path / "a", Thing) as draft:
        (draft.folder / "half").write_text("x")
        raise error
    assert [entry.name for entry in tmp_path.iterdir()] == (["a"] if before else [])
    if before:
        assert load(tmp_path / "a", Thing).digest == digest


def test_a_draft_that_was_not_finished_is_no_artifact(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="was not finished"), create(tmp_path / "a", Thing):
        pass
    assert not list(tmp_path.iterdir())


def test_a_killed_writer_leaves_nothing_that_loads_and_the_next_one_succeeds(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from tapeout.artifact import create\n"
        "from tests.unit.test_artifact import Thing\n"
        "with create(Path(sys.argv[1]), Thing) as draft:\n"
        "    (draft.folder / 'half').write_text('x'); print('writing', flush=True); time.sleep(60)\n"
    )
    writer = subprocess.Popen([sys.executable, "-c", program, str(tmp_path / "a")], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None and writer.stdout.readline() == "writing\n"
    os.kill(writer.pid, signal.SIGKILL)
    writer.communicate()
    assert (tmp_path / ".a.partial").exists()
    with pytest.raises(ArtifactError, match=r"there is no folder"):
        load(tmp_path / "a", Thing)
    write(tmp_path / "a")
    assert sorted(p.name for p in (tmp_path / "a").rglob("*")) == ["data.txt", "record.json", "sub"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]


def test_rewriting_replaces_the_whole_folder_even_if_read_only(tmp_path: Path) -> None:
    """A DVC cache leaves read-only links in the place of an artifact's files."""
    write(tmp_path / "a")
    linked = tmp_path / "cache"
    os.link(tmp_path / "a/sub/data.txt", linked)
    linked.chmod(0o444)
    (tmp_path / "a/stale").write_text("x")
    write(tmp_path / "a", "new")
    assert linked.read_text() == "content"
    assert (tmp_path / "a/sub/data.txt").read_text() == "new"
    assert not (tmp_path / "a/stale").exists()


def test_a_place_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ArtifactError, match="cannot write Thing"), create(tmp_path / "file" / "a", Thing):
        pass


def edit(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        body = json.loads((folder / "record.json").read_text())
        change(body)
        (folder / "record.json").write_text(json.dumps(body))

    return apply


def truncate(folder: Path) -> None:
    (folder / "sub/data.txt").write_text("cont")


SPOILERS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "edited record": (edit(lambda b: b["record"].update(size=2)), "was edited"),
    "edited parents": (edit(lambda b: b["parents"].update(source="x")), "was edited"),
    "edited hash": (edit(lambda b: b["files"]["sub/data.txt"].update(sha256="0" * 64)), "was edited"),
    "lost key": (edit(lambda b: b.pop("parents")), "lacks parents"),
    "truncated file": (truncate, "is 4 bytes"),
    "lost file": (lambda f: (f / "sub/data.txt").unlink(), "is missing"),
    "lost record": (lambda f: (f / "record.json").unlink(), r"no record\.json"),
    "no mapping": (lambda f: (f / "record.json").write_text("[]"), "lacks artifact_type, digest, files"),
    "no text": (lambda f: (f / "record.json").write_bytes(b"\xff\xfe{"), "is not JSON"),
    "half a record": (lambda f: (f / "record.json").write_text((f / "record.json").read_text()[:90]), "is not JSON"),
}


@pytest.mark.parametrize("name", SPOILERS)
def test_what_changed_does_not_load(tmp_path: Path, name: str) -> None:
    spoil, message = SPOILERS[name]
    write(tmp_path / "a")
    spoil(tmp_path / "a")
    with pytest.raises(ArtifactError, match=message) as caught:
        load(tmp_path / "a", Thing)
    assert caught.value.remedy


def test_verify_finds_changed_content_of_the_same_size(tmp_path: Path) -> None:
    write(tmp_path / "a")
    (tmp_path / "a/sub/data.txt").write_text("CONTENT")
    with pytest.raises(ArtifactError, match=r"sub/data\.txt has sha256"):
        load(tmp_path / "a", Thing).verify()


def test_another_noun_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a")
    with pytest.raises(ArtifactError, match="holds a Thing"):
        load(tmp_path / "a", Other)


@pytest.mark.parametrize(("version", "age"), [(3, "a newer"), (1, "an older"), (None, "an older")])
def test_another_schema_is_refused_before_its_fields_are_looked_at(
    tmp_path: Path, version: int | None, age: str
) -> None:
    """What a field means may have changed even where its name and type have not."""
    write(tmp_path / "a")
    edit(lambda body: body.update(schema_version=version, record={"length": 3}))(tmp_path / "a")
    with pytest.raises(ArtifactError, match=f"a was written as Thing schema {version}, by {age} version") as caught:
        load(tmp_path / "a", Thing)
    assert caught.value.expected.startswith("schema 2")
    assert caught.value.remedy.startswith("update Tapeout" if age == "a newer" else "make a thing")


def test_a_type_that_moved_on_refuses_what_was_written_before(tmp_path: Path) -> None:
    write(tmp_path / "a")
    with pytest.raises(ArtifactError, match="schema 2, by an older version"):
        load(tmp_path / "a", NewThing)


def test_parents_are_given_as_artifacts_and_kept_by_name_type_and_digest(tmp_path: Path) -> None:
    first = write(tmp_path / "a")
    write(tmp_path / "b", parents={"source": load(tmp_path / "a", Thing)})
    assert load(tmp_path / "b", Thing).parents == {"source": ArtifactRef("Thing", first)}
    assert read_payload(tmp_path / "b")["parents"] == {"source": {"artifact_type": "Thing", "digest": first}}


@pytest.mark.parametrize(
    ("name", "artifact_type", "expected"),
    [("baseline", "Other", "a parent named source, other"), ("other", "Thing", "a Other")],
)
def test_a_parent_of_another_name_or_type_is_refused(
    tmp_path: Path, name: str, artifact_type: str, expected: str
) -> None:
    with pytest.raises(ArtifactError, match=f"names a {artifact_type} as {name} of a Thing") as caught:
        write(tmp_path / "a", parents={name: ArtifactRef(artifact_type, "0")})
    assert caught.value.expected == expected
    assert not (tmp_path / "a").exists()


def test_a_record_cannot_hold_nan(tmp_path: Path) -> None:
    class Measured(Record):
        artifact_type: ClassVar[str] = "Measured"
        loss: float

    with pytest.raises(ValueError, match="Out of range float"), create(tmp_path / "a", Measured) as draft:
        draft.finish(Measured(loss=float("nan")), parents={})
    assert not (tmp_path / "a").exists()


def test_digests_are_stable_over_time_place_and_order(tmp_path: Path) -> None:
    first = write(tmp_path / "a", parents={"source": other("1"), "other": other("2")})
    time.sleep(0.01)
    assert write(tmp_path / "elsewhere" / "b", parents={"other": other("2"), "source": other("1")}) == first
    # Written down, so that a change of the format is a decision and not an accident.
    assert first == "3cf06fd2754f170484163a996a4ace6d0dea63bd1b477905509dc225437e09d4"


@given(
    texts=st.lists(st.tuples(st.text(max_size=5), st.integers(0, 3), st.text(max_size=3)), min_size=2, max_size=2),
)
def test_digests_differ_exactly_when_anything_differs(
    tmp_path_factory: pytest.TempPathFactory, texts: list[tuple[str, int, str]]
) -> None:
    folder = tmp_path_factory.mktemp("artifacts")
    digests = [
        write(folder / str(i), text, Thing(size=size), {"source": other(parent)})
        for i, (text, size, parent) in enumerate(texts)
    ]
    assert (digests[0] == digests[1]) == (texts[0] == texts[1])


LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()


@given(st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=12))
def test_canonical_json_survives_a_round_trip(value: Any) -> None:
    once = canonical_json(value)
    assert canonical_json(json.loads(once)) == once


def test_the_raw_payload_names_its_parts(tmp_path: Path) -> None:
    write(tmp_path / "a")
    assert set(read_payload(tmp_path / "a")) == {
        "digest",
        "artifact_type",
        "schema_version",
        "record",
        "files",
        "parents",
    }
