"""What ``tapeout fleet`` does: bring a fleet up on Ray Serve, look at it, change it, and end it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from runtime.fleet.asked import ask
from runtime.fleet.deployed import DeployedFleet, connected, quiet_serve
from runtime.fleet.ray_cluster import FleetError, LocalRay, import_ray, join, require_reachable
from runtime.fleet.ray_roster import start_roster
from runtime.fleet.released import forget_release, with_plan_beside
from runtime.fleet.replicas import application, resolved
from runtime.gateway.fleet.discovery import FleetFile
from runtime.gateway.fleet.plan import LOCAL, FleetPlan
from runtime.wire.address import read_key
from runtime.wire.messages import Pool
from tapeout.errors import TapeoutError, one_line

END_SECONDS = 90.0  # that the processes of a fleet have to end beyond the time of its requests

log = logging.getLogger(__name__)


class _IsUpError(FleetError):
    """What is there stays."""


def read_plan(path: Path) -> tuple[FleetFile, FleetPlan]:
    """The file of a fleet and its section `up`, with absolute paths. :class:`FleetError` where there is none."""
    file = FleetFile.read(path)
    if file.up is None or file.key is None:
        raise FleetError(
            f"{path} says nothing of what to start",
            expected="a section `up`, and `key`",
            remedy="docs/fleet.md has an example; `engines` are for `tapeout gateway` alone",
        )
    plan = file.up
    if not plan.bundle.startswith("models:"):
        plan = plan.model_copy(update={"bundle": str(path.parent.absolute() / plan.bundle)})
    return file.model_copy(update={"up": plan}), plan


def require_startable(file: FleetFile, plan: FleetPlan, *, here: bool) -> None:
    """:class:`TapeoutError` for a key, or where engines run ``here`` a bundle's folder, that is not there.

    Ray would only say, after many tries, that a deployment has failed.
    """
    read_key(file.key)
    if here and not plan.bundle.startswith("models:") and not Path(plan.bundle).is_dir():
        raise FleetError(
            f"there is no folder {plan.bundle}",
            expected="a bundle, such as artifacts/candidate",
            remedy="correct `bundle` in the section `up`: a path counts from the folder of that file",
        )


def require_room(file: FleetFile, plan: FleetPlan, cpus: float) -> None:
    """:class:`FleetError` where ``cpus`` are too few for the gateways and the least engines: Ray would wait."""
    least: dict[Pool, int] = {pool: scaling.least for pool, scaling in file.started.items()}
    engines = sum(plan.engine(pool).cpus * count for pool, count in least.items())
    needed = engines + plan.gateways.cpus * plan.gateways.count
    if needed > cpus:
        raise FleetError(
            f"{sum(least.values())} engines and {plan.gateways.count} gateways need {needed:g} CPUs",
            expected=f"at most {cpus:g}, which Ray has on this machine",
            remedy="lower `cpus` in the section `up`, which reserves and does not limit, or the `least` engines",
        )


class RayFleet:
    """``path``: of its file."""

    def __init__(self, path: Path) -> None:
        self._file, self._plan = read_plan(path)
        self._local: LocalRay | None = None
        if self._plan.ray == LOCAL:
            self._local, self._file = LocalRay(self._plan.name), with_plan_beside(self._file, path)
        self._deployed = DeployedFleet(self._plan)

    def up(self, source: Callable[[str], str]) -> dict[str, Any]:
        """Its status, once the engines and gateways are open. :class:`FleetError` says why one is not.

        Whatever ends it before, nothing stays: also what raises an exception on a signal. ``source``: see
        :func:`runtime.fleet.released.forget_release`.
        """
        if self._local is not None:
            self._local.use()
        import_ray()
        require_startable(self._file, self._plan, here=self._local is not None)
        with self._held(), connected():
            address = self._plan.ray
            if self._local is None:
                require_reachable(address)
            else:
                self._require_down()
                self._local.make_folder()
            try:
                if self._local is not None:
                    log.info("starting Ray on this machine")
                    address = self._local.start()
                join(address)
                self._deploy(address, source)
                return self._deployed.status()
            except _IsUpError:
                raise
            except BaseException:
                self._remove_started()
                raise

    def status(self) -> dict[str, Any]:
        return ask(self._plan, "status")

    def scale(self, engines: int | None, pool: str | None = None) -> dict[str, Any]:
        """``engines`` None: as the reports say. ``pool``: of the engines, where the file has `pools`."""
        pools = self._file.started
        wanted = pool or ("mixed" if "mixed" in pools else "")
        settings = next((settings for name, settings in pools.items() if name == wanted), None)
        if settings is None:
            here = "engines of pools" if self._file.pools else "no pools"
            raise FleetError(
                f"the fleet {self._plan.name} has {here}, and --pool is {pool or 'not given'}",
                expected=f"one of {', '.join(f'--pool {name}' for name in pools)}" if self._file.pools else "no --pool",
            )
        if engines is not None and not 1 <= engines <= settings.most:
            where = f"`pools.{wanted}`" if self._file.pools else "`scaling`"
            raise FleetError(f"{engines} engines", expected=f"1 to {settings.most}, as {where} in the file says")
        return ask(self._plan, "scale", wanted, engines)

    def drain(self, address: str) -> dict[str, Any]:
        return ask(self._plan, "drain", address)

    def down(self) -> dict[str, Any]:
        """Requests have their time to end, where Ray still answers."""
        with self._held():
            log.info("ending %s: its requests have up to %g seconds", self._plan.name, self._plan.drain_seconds)
            seconds = self._plan.drain_seconds + END_SECONDS
            if self._local is None:
                ask(self._plan, "remove", seconds=seconds)
            else:
                if self._local.address is not None:
                    try:
                        ask(self._plan, "remove", seconds=seconds)
                    except TapeoutError as error:
                        log.warning("its processes are ended without Ray: %s", one_line(error))
                self._local.stop()
        return {"name": self._plan.name, "up": False}

    def _held(self) -> AbstractContextManager[None]:
        """Of two commands that start or end a fleet of this machine, one is refused. A cluster's roster tells the
        first of two starts.
        """
        return nullcontext() if self._local is None else self._local.held()

    def _remove_started(self) -> None:
        """What a start that has failed has left."""
        if self._local is not None:
            import_ray().shutdown()
            self._local.stop()
        elif import_ray().is_initialized():
            self._deployed.remove()

    def _require_down(self) -> None:
        """What a fleet of this machine has left that is dead, such as by a restart, is removed."""
        assert self._local is not None, "a cluster knows what is up"
        if (address := self._local.address) is not None:
            try:
                require_reachable(address)
            except FleetError:
                pass
            else:
                raise self._is_up(address)
        self._local.stop()

    def _is_up(self, address: str) -> _IsUpError:
        return _IsUpError(
            f"the fleet {self._plan.name} is up at {address}", remedy="`tapeout fleet status`, `scale` or `down`"
        )

    def _deploy(self, address: str, source: Callable[[str], str]) -> None:
        serve = quiet_serve()
        if self._deployed.is_there:
            raise self._is_up(address)
        if self._local is not None:
            require_room(self._file, self._plan, import_ray().cluster_resources().get("CPU", 0.0))
        forget_release(self._file, source)
        try:
            start_roster(self._plan.name, self._file.started)
        except FleetError as error:
            raise _IsUpError(error.found, expected=error.expected, remedy=error.remedy) from error
        serve.start(http_options={"location": "Disabled"})
        file = resolved(self._file, address)
        log.info("starting engines and gateways of %s", self._plan.name)
        try:
            serve.run(application(file), name=self._plan.name, route_prefix=None)
        except RuntimeError as error:
            why = self._deployed.ask("status")["problem"] or one_line(error, 4000)
            raise FleetError(f"the fleet {self._plan.name} does not start: {why}") from error
        self._deployed.wait_for_gateways()
