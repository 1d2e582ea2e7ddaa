"""A fleet on a Ray that this process is connected to: how it is, and what changes it.

Some of Ray's calls have no limit of time: they never end where its head stands still, or where the controller of Serve
is dead and no head is there to start it again. :mod:`runtime.fleet.asked` has a process make them that can be killed.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Generator
from contextlib import contextmanager, redirect_stdout
from time import monotonic, sleep
from typing import Any

from runtime.fleet.ray_cluster import FleetError, LocalRay, import_ray, import_serve
from runtime.fleet.ray_roster import find_roster
from runtime.gateway.fleet.plan import LOCAL, FleetPlan
from runtime.wire.messages import Pool
from tapeout.errors import one_line

ASK_SECONDS = 20.0  # that the roster has to answer
LOOK_SECONDS = 0.2  # between two looks whether Serve has ended what it was told to end


class DeployedFleet:
    def __init__(self, plan: FleetPlan) -> None:
        self._plan = plan

    @property
    def is_there(self) -> bool:
        """Serve knows of it, whatever its state."""
        return self._plan.name in quiet_serve().status().applications

    def status(self) -> dict[str, Any]:
        name = self._plan.name
        applications = quiet_serve().status().applications
        if name not in applications:
            raise FleetError(f"the fleet {name} is not up", remedy="`tapeout fleet up FILE`")
        application = applications[name]
        messages = [application.message, *(deployment.message for deployment in application.deployments.values())]
        message = " ".join(filter(None, messages))
        return {
            "name": name,
            "ray": LocalRay(name).address if self._plan.ray == LOCAL else self._plan.ray,
            "state": application.status.value,
            "message": one_line(FleetError(message), 2000) if message else "",
            **self.ask("status"),
        }

    def scale(self, pool: Pool, engines: int | None) -> dict[str, Any]:
        """``engines`` None: as the reports say."""
        self.ask("fix", pool, engines)
        return self.status()

    def drain(self, address: str) -> dict[str, Any]:
        if not self.ask("drain", address):
            here = ", ".join(engine["address"] for engine in self.ask("status")["engines"])
            raise FleetError(f"no engine at {address}", expected=f"one of {here}")
        return self.status()

    def remove(self) -> None:
        """From the cluster, once its requests have ended, or had their time."""
        if self.is_there:
            # Serve itself waits for 60 seconds and no longer, and requests may have more.
            quiet_serve().delete(self._plan.name, _blocking=False)
            while self.is_there:
                sleep(LOOK_SECONDS)
        if (roster := find_roster(self._plan.name)) is not None:
            import_ray().kill(roster)

    def wait_for_gateways(self) -> None:
        """Until each has told the roster where it is."""
        end = monotonic() + ASK_SECONDS
        while len(self.ask("status")["gateways"]) < self._plan.gateways.count and monotonic() < end:
            sleep(0.1)

    def ask(self, question: str, *arguments: Any) -> Any:
        """The roster."""
        ray, name = import_ray(), self._plan.name
        roster = find_roster(name)
        if roster is None:
            raise FleetError(f"the fleet {name} has no roster", remedy="`tapeout fleet down`, then `up`")
        try:
            return ray.get(getattr(roster, question).remote(*arguments), timeout=ASK_SECONDS)
        except ray.exceptions.RayError as error:
            raise FleetError(f"the roster of {name} does not answer: {one_line(error)}") from error


def quiet_serve() -> Any:
    """Ray Serve, without its own lines between ours."""
    serve = import_serve()
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    return serve


@contextmanager
def connected() -> Generator[None]:
    """Ray prints on the standard output what goes wrong in the cluster, at any time: it goes to the standard error, and
    Ray is left before a result is printed.
    """
    with redirect_stdout(sys.stderr):
        try:
            yield
        finally:
            if (ray := sys.modules.get("ray")) is not None and ray.is_initialized():
                ray.shutdown()
