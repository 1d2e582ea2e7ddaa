"""Where a gateway's engines are. A source of addresses is anything with :meth:`Discovery.read`.

The static file is YAML::

    engines:                       # addresses of `tapeout engine`
      - tcp:10.0.0.11:7000
      - unix:/run/tapeout/b.sock
    key: engine.key                # that gateway and engines share; beside this file unless absolute
    scaling: {least: 2, most: 8}   # if the gateway is to say how many engines there should be
    slo: {availability: 0.999}     # see :mod:`tapeout.slo`; read once, when the gateway starts

Instead of ``engines`` it may say what ``tapeout fleet up`` starts (``up``; the engines are then those that run), or
name a ``table`` (a database, :mod:`runtime.gateway.fleet.table_discovery`) or ``kubernetes``
(:mod:`runtime.gateway.fleet.kubernetes_discovery`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NamedTuple, Protocol

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from runtime.gateway.fleet.plan import FleetPlan
from runtime.gateway.fleet.scaling import ScalingSettings
from runtime.wire.address import Address, read_key
from tapeout.errors import TapeoutError, one_line
from tapeout.slo import ServiceLevelObjectives


class FleetFileError(TapeoutError):
    """The list of engines cannot be read."""


class DiscoveryError(TapeoutError):
    """A source of addresses does not answer."""


class Listing(NamedTuple):
    """``engines``: addresses, each once. ``key``: see :class:`runtime.wire.session.Session`."""

    engines: tuple[str, ...]
    key: bytes


class Discovery(Protocol):
    def read(self) -> Listing:
        """The engines that there should be now. May block; :class:`TapeoutError` if the source cannot say."""
        ...


class KubernetesService(BaseModel):
    """Endpoints of a service. ``port``: its name. ``namespace``: that of this pod by default."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    service: str
    port: str = "engine"
    namespace: str | None = None


class FleetFile(BaseModel):
    """``up``: what ``tapeout fleet`` starts. ``scaling``: what the number of engines depends on."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    engines: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    table: str | None = None
    kubernetes: KubernetesService | None = None
    up: FleetPlan | None = None
    key: Path | None = None
    scaling: ScalingSettings | None = None
    slo: ServiceLevelObjectives | None = None

    @model_validator(mode="after")
    def _require_one_source(self) -> FleetFile:
        if sum(source is not None for source in (self.engines, self.table, self.kubernetes, self.up)) != 1:
            raise ValueError("exactly one of `engines`, `table`, `kubernetes` and `up` is needed")
        return self

    @classmethod
    def read(cls, path: Path) -> FleetFile:
        """Its key with the folder of the file. :class:`FleetFileError` if it cannot be read."""
        try:
            found = cls.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
        except (OSError, UnicodeDecodeError, yaml.YAMLError, ValidationError) as error:
            raise FleetFileError(
                f"{path} is no list of engines: {one_line(error, 300)}",
                expected="YAML with `engines`, a list of tcp:HOST:PORT or unix:PATH, or where they are, and `key`",
                remedy="docs/fleet.md has examples",
            ) from error
        return found if found.key is None else found.model_copy(update={"key": path.parent.absolute() / found.key})


class StaticFile:
    """A :class:`Discovery`. The file and its key are read at every look: both are small."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> Listing:
        found = FleetFile.read(self._path)
        if found.engines is None:
            raise FleetFileError(f"{self._path} has no `engines` any more", expected="a list of addresses")
        key = read_key(found.key)
        engines = tuple(dict.fromkeys(str(Address.parse(text)) for text in found.engines))
        for address in engines:
            Address.parse(address).require_key(key)
        return Listing(engines, key)
