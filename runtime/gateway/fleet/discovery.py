"""Where a gateway's engines are. A source of addresses is anything with :meth:`Discovery.read`.

The static file is YAML::

    engines:                       # addresses of `tapeout engine`
      - tcp:10.0.0.11:7000
      - unix:/run/tapeout/b.sock
    key: engine.key                # that gateway and engines share; beside this file unless absolute
    external:                      # servers of another kind, see runtime/gateway/fleet/external.py
      - {url: "http://10.0.0.21:8000/v1", model: llama, text: exported/llama, key: vllm.key}
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NamedTuple, Protocol

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from runtime.gateway.fleet.external import ExternalServer
from runtime.gateway.fleet.release import ReleasePlan, plan_path, read_plan
from runtime.wire.address import Address, read_key
from tapeout.errors import TapeoutError, one_line


class FleetFileError(TapeoutError):
    """The list of engines cannot be read."""


class Listing(NamedTuple):
    """``engines``: addresses, each once. ``key``: see :class:`runtime.wire.session.Session`.

    ``external``: servers of another kind, each once. ``plan``: which bundles get requests; without one, the bundle of
    the engine that opens first.
    """

    engines: tuple[str, ...]
    key: bytes
    external: tuple[ExternalServer, ...] = ()
    plan: ReleasePlan | None = None


class Discovery(Protocol):
    def read(self) -> Listing:
        """The engines that there should be now. May block; :class:`TapeoutError` if the source cannot say."""
        ...


class _External(BaseModel):
    """See :class:`ExternalServer`. ``key``: a file with the server's own."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: Annotated[str, Field(pattern="^https?://")]
    model: str
    text: Path
    key: Path | None = None
    most_running: Annotated[int, Field(ge=1)] = 64


class _FleetFile(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    engines: tuple[str, ...] = ()
    external: tuple[_External, ...] = ()
    key: Path | None = None

    @model_validator(mode="after")
    def _require_one(self) -> _FleetFile:
        if not (self.engines or self.external):
            raise ValueError("there is no engine")
        return self


class StaticFile:
    """A :class:`Discovery`. The file, its key and its release plan are read at every look: all are small."""

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
        folder = self._path.parent
        key = read_key(None if found.key is None else folder / found.key)
        engines = tuple(dict.fromkeys(str(Address.parse(text)) for text in found.engines))
        for address in engines:
            Address.parse(address).require_key(key)
        external = {
            one.url: ExternalServer(
                one.url, one.model, folder / one.text, _server_key(one.key and folder / one.key), one.most_running
            )
            for one in found.external
        }
        return Listing(engines, key, tuple(external.values()), read_plan(plan_path(self._path)))


def _server_key(path: Path | None) -> str:
    """Any text: it is the other server's. None without a file."""
    try:
        return "" if path is None else path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise FleetFileError(f"the key {path} cannot be read: {one_line(error)}", expected="a file") from error
