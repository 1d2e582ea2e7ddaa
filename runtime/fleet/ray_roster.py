"""The roster of a fleet as an actor of Ray, found by its name: by replicas, gateways and ``tapeout fleet``."""

from __future__ import annotations

from collections.abc import Mapping
from time import monotonic
from typing import Any

from runtime.fleet.ray_cluster import NAMESPACE, FleetError, import_ray
from runtime.fleet.roster import Orders, Place, Roster
from runtime.gateway.fleet.scaling import EngineReport, PoolScaling
from runtime.wire.messages import Pool


class RosterActor:
    """Its methods are those of :class:`Roster`, at the time of the actor's own clock."""

    def __init__(self, settings: Mapping[Pool, PoolScaling]) -> None:
        self._roster = Roster(settings, monotonic())

    def engine(self, id: str, pool: Pool, place: Place, report: EngineReport | None) -> Orders:
        return self._roster.engine(id, pool, place, report, monotonic())

    def gateway(self, id: str, place: Place, answers: bool) -> None:
        self._roster.gateway(id, place, answers, monotonic())

    def leave(self, id: str) -> None:
        self._roster.leave(id)

    def started(self, id: str) -> None:
        self._roster.started(id)

    def failed(self, why: str) -> None:
        self._roster.problem = why

    def drain(self, address: str) -> bool:
        return self._roster.drain(address)

    def fix(self, pool: Pool, engines: int | None) -> None:
        self._roster.fix(pool, engines)

    def addresses(self) -> tuple[str, ...] | None:
        return self._roster.addresses(monotonic())

    def status(self) -> dict[str, Any]:
        return self._roster.status(monotonic())


def start_roster(name: str, settings: Mapping[Pool, PoolScaling]) -> Any:
    """It outlives the command that starts it, and is started again where its machine dies.

    :class:`FleetError` where there is one: of two commands that start a fleet at the same time, one gets on.
    """
    ray = import_ray()
    options = {"name": _name(name), "namespace": NAMESPACE, "lifetime": "detached", "num_cpus": 0}
    actor = ray.remote(RosterActor).options(**options, max_restarts=-1, max_task_retries=-1)
    try:
        return actor.remote(settings)
    except ValueError as error:
        raise FleetError(
            f"another command starts the fleet {name}, or was ended while it did",
            expected="one command at a time",
            remedy="wait for it; or `tapeout fleet down FILE` removes what it has left",
        ) from error


def find_roster(name: str) -> Any | None:
    ray = import_ray()
    try:
        return ray.get_actor(_name(name), namespace=NAMESPACE)
    except ValueError:
        return None


def _name(fleet: str) -> str:
    return f"roster-{fleet}"
