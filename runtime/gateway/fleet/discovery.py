"""Where a gateway's engines are. A source of addresses is anything with :meth:`Discovery.read`.

The static file is YAML::

    engines:                       # addresses of `tapeout engine`
      - tcp:10.0.0.11:7000
      - unix:/run/tapeout/b.sock
    key: engine.key                # that gateway and engines share; beside this file unless absolute
    external:                      # servers of another kind, see runtime/gateway/fleet/external.py
      - {url: "http://10.0.0.21:8000/v1", model: llama, text: exported/llama, key: vllm.key}
    scaling: {least: 2, most: 8}   # if the gateway is to say how many engines there should be
    pools:                         # the same of each pool, instead of scaling
      prefill: {least: 1, most: 4}
      decode: {least: 1, most: 4}
    slo: {availability: 0.999}     # see :mod:`tapeout.slo`; read once, when the gateway starts
    releases: postgresql://db      # where the release plan lies, instead of beside this file; or file:PATH

Instead of ``engines`` it may say what ``tapeout fleet up`` starts (``up``; the engines are then those that run), or
name a ``table`` (a database, :mod:`runtime.gateway.fleet.table_discovery`) or ``kubernetes``
(:mod:`runtime.gateway.fleet.kubernetes_discovery`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, NamedTuple, Protocol

import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator

from runtime.gateway.fleet.external import ExternalServer
from runtime.gateway.fleet.plan import FleetPlan
from runtime.gateway.fleet.release import (
    PlanAwayError,
    PlanFile,
    PlanRefusedError,
    PlanStore,
    ReleasePlan,
    ReleasePlanError,
    plan_path,
)
from runtime.gateway.fleet.scaling import PoolScaling, PoolsSettings, ScalingSettings
from runtime.wire.address import Address, read_key
from runtime.wire.messages import Pool
from tapeout.errors import TapeoutError, one_line
from tapeout.file_errors import file_problem
from tapeout.slo import ServiceLevelObjectives

FILE_PLACE = "file:"  # before a path, in `releases`

log = logging.getLogger(__name__)


class FleetFileError(TapeoutError):
    """The list of engines cannot be read."""


class DiscoveryError(TapeoutError):
    """A source of addresses does not answer."""


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


class KubernetesService(BaseModel):
    """Endpoints of a service. ``port``: its name. ``namespace``: that of this pod by default."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    service: str
    port: str = "engine"
    namespace: str | None = None


class _External(BaseModel):
    """See :class:`ExternalServer`. ``key``: a file with the server's own."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: Annotated[str, Field(pattern="^https?://")]
    model: str
    text: Path
    key: Path | None = None
    most_running: Annotated[int, Field(ge=1)] = 64

    def beside(self, folder: Path) -> _External:
        return self.model_copy(update={"text": folder / self.text, "key": self.key and folder / self.key})


class FleetFile(BaseModel):
    """``up``: what ``tapeout fleet`` starts. ``releases``: the database with the release plan, or :data:`FILE_PLACE`
    and the path of a file.

    ``scaling``: what the number of engines depends on; ``pools``: the same where there are engines for prompts and
    others for what follows.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    engines: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    table: str | None = None
    kubernetes: KubernetesService | None = None
    up: FleetPlan | None = None
    external: tuple[_External, ...] = ()
    key: Path | None = None
    scaling: ScalingSettings | None = None
    pools: PoolsSettings | None = None
    slo: ServiceLevelObjectives | None = None
    releases: str | None = None

    @model_validator(mode="after")
    def _require_one_source(self) -> FleetFile:
        sources = sum(source is not None for source in (self.engines, self.table, self.kubernetes, self.up))
        if sources > 1 or not (sources or self.external):
            raise ValueError("one of `engines`, `table`, `kubernetes` and `up` is needed, or `external`")
        if sources and self.external:
            raise ValueError(
                "`external` beside engines of our own: they are different bundles, and a gateway answers with one; "
                "write a file for each of them, and start a gateway with each"
            )
        return self

    @model_validator(mode="after")
    def _require_one_scaling(self) -> FleetFile:
        if self.pools is not None and self.scaling is not None:
            raise ValueError("`scaling` is of a fleet without `pools`: each pool has its own `least`, `most` and so on")
        if self.pools is None and self.up is not None and (self.up.prefill or self.up.decode):
            raise ValueError("`up.prefill` and `up.decode` are of engines in `pools`, which the file does not have")
        return self

    @property
    def scalings(self) -> Mapping[Pool, PoolScaling]:
        """By pool; none where the file does not say what the number of engines depends on."""
        if self.pools is not None:
            return self.pools.by_pool
        return {} if self.scaling is None else {"mixed": self.scaling}

    @property
    def started(self) -> Mapping[Pool, PoolScaling]:
        """The same of engines that are started by this file: one, where it does not say how many."""
        return self.scalings or {"mixed": ScalingSettings()}

    @classmethod
    def read(cls, path: Path) -> FleetFile:
        """Its key and the files of external servers with the folder of the file. :class:`FleetFileError` if it cannot
        be read.
        """
        try:
            text = yaml.safe_load(path.read_text(encoding="utf-8"))
            if not isinstance(text, dict):
                raise ValueError("it is empty" if text is None else "it has no keys")
            found = cls.model_validate(text)
        except (OSError, ValueError, yaml.YAMLError) as error:  # pydantic's, and of bytes that are no text, are values
            raise FleetFileError(
                f"{path} cannot be used: {file_problem(error, cls)}",
                expected="YAML with one of `engines`, `table`, `kubernetes`, `up` and `external`, and `key`",
                remedy="docs/fleet.md has examples",
            ) from error
        folder = path.parent.absolute()
        external = tuple(server.beside(folder) for server in found.external)
        releases = found.releases
        if releases is not None and releases.startswith(FILE_PLACE):
            releases = f"{FILE_PLACE}{folder / releases.removeprefix(FILE_PLACE)}"
        changed = {"key": found.key and folder / found.key, "external": external, "releases": releases}
        return found.model_copy(update=changed)


class FromFile:
    """A :class:`Discovery`: of the engines in the file, or of those of another ``source``. ``plans``: of releases,
    by default in a file beside it. ``kept``: a copy of the plan, for a start while the place of the plan is away.

    The file, its key, its external servers and its release plan are read at every look: all are small. A plan that is
    away stays as it was known last.
    """

    def __init__(
        self,
        path: Path,
        source: Discovery | None = None,
        plans: PlanStore | None = None,
        kept: PlanFile | None = None,
    ) -> None:
        self._path, self._source, self._plans = path, source, plans or PlanFile(plan_path(path))
        self._kept, self._plan, self._read, self._away = kept, None, False, False
        self._copied = False  # the copy is of this plan

    def read(self) -> Listing:
        found = FleetFile.read(self._path)
        listing = self._source.read() if self._source else self._listed(found)
        return listing._replace(external=_servers(found), plan=self._read_plan())

    def _read_plan(self) -> ReleasePlan | None:
        """:class:`PlanRefusedError` only at first: whose password changes later goes on with what it knows."""
        try:
            plan = self._plans.read()
        except PlanAwayError as error:
            if isinstance(error, PlanRefusedError) and not self._read:
                raise
            if not self._read and self._kept is not None:
                with suppress(ReleasePlanError):
                    self._plan = self._kept.read()
            if not self._away:
                known = "none is known" if self._plan is None else f"stable bundle {self._plan.stable[:12]}"
                log.error("the release plan stays as it was (%s): %s", known, one_line(error))
            self._read = self._away = True
            return self._plan
        changed = plan != self._plan or not self._read
        self._plan, self._read, self._away = plan, True, False
        self._copied &= not changed
        if self._kept is not None and not self._copied:  # one that could not be written is tried again at each look
            try:
                self._kept.put(plan)
                self._copied = True
            except OSError as error:
                if changed:
                    log.warning("no copy of the release plan is kept: %s", one_line(error))
        return plan

    def _listed(self, found: FleetFile) -> Listing:
        if found.engines is None and not found.external:
            raise FleetFileError(f"{self._path} has no `engines` any more", expected="a list of addresses")
        key = read_key(found.key)
        engines = tuple(dict.fromkeys(str(Address.parse(text)) for text in found.engines or ()))
        for address in engines:
            Address.parse(address).require_key(key)
        return Listing(engines, key)


def _servers(found: FleetFile) -> tuple[ExternalServer, ...]:
    """:class:`FleetFileError` for files that are missing: a server that is away may come, they do not."""
    for one in found.external:
        if not (one.text / "tokenizer.json").is_file():
            raise FleetFileError(
                f"there is no {one.text / 'tokenizer.json'}",
                expected="`text` of an external server: a folder with the model's tokenizer",
                remedy="copy tokenizer.json, generation_config.json and the chat template of its model there",
            )
    servers = {
        one.url: ExternalServer(one.url, one.model, one.text, _server_key(one.key), one.most_running)
        for one in found.external
    }
    return tuple(servers.values())


def _server_key(path: Path | None) -> str:
    """Any text: it is the other server's. None without a file."""
    try:
        return "" if path is None else path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise FleetFileError(f"the key {path} cannot be read: {one_line(error)}", expected="a file") from error
