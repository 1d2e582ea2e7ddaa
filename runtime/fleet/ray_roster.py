"""The roster of a fleet as an actor of Ray, found by its name: by replicas, gateways and ``tapeout fleet``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from time import monotonic
from typing import Any

from runtime.fleet.ray_cluster import NAMESPACE, FleetError, import_ray
from runtime.fleet.roster import LOST_SECONDS, Orders, Place, Roster
from runtime.gateway.fleet.scaling import EngineReport, PoolScaling
from runtime.wire.messages import Pool

MOST_WAITING = 3  # words to a roster that does not answer


class RosterAwayError(FleetError):
    """There is no roster, or none that answers."""


class RosterLink:
    """From a replica to the roster of its fleet, ``name``; ``find``: as :func:`find_roster`.

    Ray keeps what a roster that is dead was told until it is there again, however long that takes, and tells it all
    then. So few words wait, and nothing more is said until the roster has heard them.
    """

    def __init__(self, name: str, find: Callable[[str], Any | None] | None = None) -> None:
        self._name, self._find = name, find or find_roster
        self._roster: Any = None
        self._waiting: set[asyncio.Future[Any]] = set()

    async def tell(self, method: str, *arguments: Any) -> Any:
        """What a method of :class:`RosterActor` returns. Raises errors of Ray, :class:`TimeoutError`, and
        :class:`RosterAwayError`.
        """
        if len(self._waiting) >= MOST_WAITING:
            raise RosterAwayError("the roster has not answered to what it was told before")
        if self._roster is None:  # in a thread: Ray looks for it as long as its head is dead
            self._roster = await asyncio.to_thread(self._find, self._name)
        if self._roster is None:
            raise RosterAwayError("there is no roster")
        answer = asyncio.ensure_future(_answer(getattr(self._roster, method).remote(*arguments)))
        self._waiting.add(answer)
        answer.add_done_callback(self._heard)
        try:
            async with asyncio.timeout(LOST_SECONDS):
                return await asyncio.shield(answer)
        except Exception:
            self._roster = None  # it may be another one by then
            raise

    def _heard(self, answer: asyncio.Future[Any]) -> None:
        self._waiting.discard(answer)
        if not answer.cancelled():
            answer.exception()  # whoever waited for it has raised it, or had no more time


async def _answer(reference: Any) -> Any:
    return await reference


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
