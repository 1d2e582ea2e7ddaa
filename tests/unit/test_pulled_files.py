"""Small files of a bundle arrive beside the large ones; one that was changed stops the pull, whichever it is."""

from __future__ import annotations

import hashlib
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.registry import pull
from pipeline.registry.access import Version, VersionReference
from tapeout.errors import RegistryError

FILES = {"config.json": b"{}", "kernels/a.so": b"small", "one": b"1" * pull.SMALL_BYTES, "two": b"2" * pull.SMALL_BYTES}
VERSION = Version("model", 1, {}, "run", "bundle")


class Folder:
    """A registry whose files are those of a dictionary."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files

    def version(self, reference: VersionReference) -> Version:
        return VERSION

    def fetch(self, root: str, name: str, target: Path) -> str:
        target.write_bytes(self.files[name])
        return hashlib.sha256(self.files[name]).hexdigest()


def fetched(files: dict[str, bytes], folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    @contextmanager
    def another() -> Generator[Folder]:
        yield Folder(files)

    monkeypatch.setattr(pull, "open_registry", another)
    folder.mkdir()
    listed = {
        name: SimpleNamespace(size_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
        for name, content in FILES.items()
    }
    bundle: Any = SimpleNamespace(files=listed, folder=folder)
    return pull._files(Folder(files), VERSION, bundle)  # pyright: ignore[reportPrivateUsage]


def test_all_files_arrive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fetched(FILES, tmp_path / "bundle", monkeypatch) == sum(map(len, FILES.values()))
    assert {name: (tmp_path / "bundle" / name).read_bytes() for name in FILES} == FILES


@pytest.mark.parametrize("name", FILES)
def test_a_changed_file_is_refused_and_removed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RegistryError, match=f"{name} has sha256"):
        fetched(FILES | {name: FILES[name] + b"x"}, tmp_path / "bundle", monkeypatch)
    assert not (tmp_path / "bundle" / name).exists()
