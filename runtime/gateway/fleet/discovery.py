"""Where a gateway's engines are. A source of addresses is anything with :meth:`Discovery.read`.

The static file is YAML::

    engines:                       # addresses of `tapeout engine`
      - tcp:10.0.0.11:7000
      - unix:/run/tapeout/b.sock
    key: engine.key                # that gateway and engines share; beside this file unless absolute
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NamedTuple, Protocol

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from runtime.wire.address import Address, read_key
from tapeout.errors import TapeoutError, one_line


class FleetFileError(TapeoutError):
    """The list of engines cannot be read."""


class Listing(NamedTuple):
    """``engines``: addresses, each once. ``key``: see :class:`runtime.wire.session.Session`."""

    engines: tuple[str, ...]
    key: bytes


class Discovery(Protocol):
    def read(self) -> Listing:
        """The engines that there should be now. May block; :class:`TapeoutError` if the source cannot say."""
        ...


class _FleetFile(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    engines: Annotated[tuple[str, ...], Field(min_length=1)]
    key: Path | None = None


class StaticFile:
    """A :class:`Discovery`. The file and its key are read at every look: both are small."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> Listing:
        try:
            found = _FleetFile.model_validate(yaml.safe_load(self._path.read_text(encoding="utf-8")))
        except (OSError, UnicodeDecodeError, yaml.YAMLError, ValidationError) as error:
            raise FleetFileError(
                f"{self._path} is no list of engines: {one_line(error, 300)}",
                expected="YAML with `engines`, a list of tcp:HOST:PORT or unix:PATH, and `key`, a file",
            ) from error
        key = read_key(None if found.key is None else self._path.parent / found.key)
        engines = tuple(dict.fromkeys(str(Address.parse(text)) for text in found.engines))
        for address in engines:
            Address.parse(address).require_key(key)
        return Listing(engines, key)
