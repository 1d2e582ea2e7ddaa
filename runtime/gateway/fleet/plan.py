"""What ``tapeout fleet up`` starts: the section ``up`` of the file of a fleet (docs/fleet.md)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, field_validator

from runtime.wire.messages import Pool

LOCAL = "local"
# It is in paths of Unix sockets, which have at most 107 bytes.
Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,15}$")]


def _refuse(options: tuple[str, ...], taken: Mapping[str, str]) -> tuple[str, ...]:
    """``taken``: options that whoever starts the process gives it, and what says them instead."""
    for option in options:
        if (name := option.partition("=")[0]) in taken:
            raise ValueError(f"`{name}` is no option here: {taken[name]}")
    return options


class EnginePlan(BaseModel):
    """``cpus`` and other ``resources``: that Ray reserves for each. ``options``: of `tapeout engine`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cpus: Annotated[float, Field(ge=0)] = 1.0
    resources: Mapping[str, float] = {}
    options: tuple[str, ...] = ()

    @field_validator("options")
    @classmethod
    def _refuse_taken(cls, options: tuple[str, ...]) -> tuple[str, ...]:
        taken = {
            "--pool": "`pools` in the file says how many engines each pool has",
            "--listen": "each engine gets a free port of its machine",
            "--key-file": "`key` in the file is that of all",
        }
        return _refuse(options, taken)


class GatewayPlan(BaseModel):
    """``port``: of the first on a machine; a second one there takes the next. ``options``: of `tapeout gateway`;
    `{port}` in one is the port of each gateway, such as in the name of its own journal.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    count: Annotated[int, Field(ge=1)] = 1
    cpus: Annotated[float, Field(ge=0)] = 0.5
    resources: Mapping[str, float] = {}
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=1, lt=1 << 16)] = 8000
    options: tuple[str, ...] = ()

    @field_validator("options")
    @classmethod
    def _refuse_taken(cls, options: tuple[str, ...]) -> tuple[str, ...]:
        taken = {
            "--host": "`host` beside it says where gateways listen",
            "--port": "`port` beside it is that of the first gateway on a machine",
            "--drain-seconds": "`drain_seconds` of `up` is that of engines and gateways",
        }
        return _refuse(options, taken)


class FleetPlan(BaseModel):
    """``ray``: the address of a cluster, HOST:PORT, or ``local``: one of its own on this machine.

    ``bundle``: a folder on every machine, or models:/NAME@ALIAS. ``drain_seconds``: that requests have to end.
    ``prefill`` and ``decode``: engines of these pools, where they differ from ``engines``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    bundle: str
    name: Name = "tapeout"
    ray: str = LOCAL
    engines: EnginePlan = EnginePlan()
    prefill: EnginePlan | None = None
    decode: EnginePlan | None = None
    gateways: GatewayPlan = GatewayPlan()
    drain_seconds: Annotated[float, Field(ge=0)] = 30.0

    def engine(self, pool: Pool) -> EnginePlan:
        """Of an engine of this pool."""
        own = {"prefill": self.prefill, "decode": self.decode}
        return own.get(pool) or self.engines
