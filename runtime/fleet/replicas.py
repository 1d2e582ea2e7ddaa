"""The deployments of Ray Serve: each replica owns one process, an engine or a gateway, and tells the roster of it.

Ray places replicas, starts them again elsewhere when they or their machines die, and changes how many engines there
are. Requests do not pass through them.
"""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import yaml

from runtime.fleet.ray_cluster import LOOPBACK, import_ray, import_serve
from runtime.fleet.ray_roster import RosterLink
from runtime.fleet.released import RENEW_SECONDS, released
from runtime.fleet.roster import Orders, Place
from runtime.fleet.runner import EngineRunner, GatewayRunner, Runner
from runtime.gateway.fleet.discovery import FleetFile
from runtime.gateway.fleet.plan import EnginePlan, FleetPlan, GatewayPlan
from runtime.wire.address import read_key
from runtime.wire.messages import Pool
from tapeout.errors import TapeoutError, one_line

REPORT_SECONDS = 0.5
UNLIST_SECONDS = 3.0  # until all gateways have read that an engine is listed no more
CONSTRUCTOR_TRIES = 2  # while none has been open yet: then `up` gives up, and says why
WANTED = "wanted"  # the name of what replicas report to Serve
ENGINE, GATEWAY = "Engine", "Gateway"

log = logging.getLogger(__name__)


class _Replica:
    """``file``: of the fleet, as YAML; ``ray`` in it is an address by now, and paths are absolute."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._fleet = FleetFile.model_validate(yaml.safe_load(file))
        assert self._fleet.up is not None, "only such a file is started"
        self._plan: FleetPlan = self._fleet.up
        context = import_serve().get_replica_context()
        self._id: str = context.replica_tag
        self._node = _node(self._plan.ray)
        self._roster = RosterLink(self._plan.name)
        self._reporting: asyncio.Task[None] | None = None

    async def _begin(self, runner: Runner) -> None:
        """Where it does not open, the roster is told why: Serve itself only says that it does not."""
        self._runner = runner
        try:
            await runner.start()
        except TapeoutError as error:
            with suppress(Exception):  # of any kind: Ray has many
                await self._roster.tell("failed", str(error))
            raise
        self._reporting = asyncio.create_task(self._report_forever())

    async def check_health(self) -> None:
        self._runner.require_healthy()

    async def __del__(self) -> None:
        """Serve awaits it: what ends a replica in an orderly way."""
        if self._reporting is not None:
            self._reporting.cancel()
            await asyncio.gather(self._reporting, return_exceptions=True)
            await self._leave()
            await self._runner.stop()

    @property
    def _place(self) -> Place:
        return Place(
            self._runner.address.replace("//0.0.0.0", f"//{self._node}"), self._node, os.getpid(), self._runner.pid
        )

    async def _report_forever(self) -> None:
        """The roster may be away: it is told when it is back."""
        why = ""
        while True:
            try:
                await self._report()
                why = ""
            except Exception as error:  # as above; the process goes on without the roster
                if why != (why := one_line(error)):
                    log.warning("the roster of the fleet does not answer: %s", why)
            await asyncio.sleep(REPORT_SECONDS)

    async def _report(self) -> None:
        raise NotImplementedError

    async def _leave(self) -> None:
        with suppress(Exception):  # as above
            await self._roster.tell("leave", self._id)


class EngineReplica(_Replica):
    async def __init__(self, file: str, pool: Pool) -> None:  # type: ignore[misc] # Serve awaits it
        super().__init__(file)
        fleet, plan = self._fleet, self._plan
        assert fleet.key is not None, "only such a file is started"
        self._bundle = released(fleet)
        self._engine = EngineRunner(
            self._bundle, pool, self._node, fleet.key, read_key(fleet.key), plan.engine(pool).options,
            drain_seconds=plan.drain_seconds,
        )  # fmt: skip
        self._wanted: float | None = None
        self._renewing: asyncio.Task[None] | None = None
        self._left_out = False  # by a release
        self._renewed = False  # and the roster does not know yet
        await self._begin(self._engine)
        self._looking = asyncio.create_task(self._look_forever())

    async def record_autoscaling_stats(self) -> dict[str, float]:
        return {} if self._wanted is None else {WANTED: self._wanted}

    async def _report(self) -> None:
        engine = self._engine
        if self._renewed:
            await self._roster.tell("started", self._id)
            self._renewed = False
        orders: Orders = await self._roster.tell("engine", self._id, engine.pool, self._place, engine.report)
        self._wanted = float(orders.wanted)
        told = orders.drain and not self._renewed  # the roster did not know yet
        if (told or self._left_out) and (self._renewing is None or self._renewing.done()):
            self._renewing = asyncio.create_task(self._renew())

    async def _renew(self) -> None:
        await self._engine.idle(UNLIST_SECONDS)
        await self._engine.again()
        self._left_out, self._renewed = False, True

    async def _look_forever(self) -> None:
        """Apart from reports: the plan may lie in a database that is away."""
        while True:
            await asyncio.sleep(RENEW_SECONDS)
            if await asyncio.to_thread(self._bundle.left_out, self._engine):
                self._left_out = True

    async def _leave(self) -> None:
        await super()._leave()
        for task in (self._looking, self._renewing):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        await self._engine.idle(UNLIST_SECONDS)


class GatewayReplica(_Replica):
    """``engines``: Serve's handles of them, with which all are one application; they are not used."""

    async def __init__(self, file: str, *engines: object) -> None:  # type: ignore[misc] # Serve awaits it
        super().__init__(file)
        gateways = self._plan.gateways
        self._folder = TemporaryDirectory(prefix="tapeout-gateway-")
        path = Path(self._folder.name) / "fleet.yaml"
        path.write_text(file)
        runner = GatewayRunner(
            path, gateways.host, gateways.port, gateways.count, gateways.options, drain_seconds=self._plan.drain_seconds
        )
        await self._begin(runner)

    async def _report(self) -> None:
        await self._roster.tell("gateway", self._id, self._place, self._runner.answers)

    async def __del__(self) -> None:
        """Serve ends the process before Python would remove the folder."""
        await super().__del__()
        self._folder.cleanup()


class ScalingContext(Protocol):
    """What is used here of ``ray.serve.config.AutoscalingContext``."""

    target_num_replicas: int
    raw_metrics: Any


def carry_out(context: ScalingContext) -> tuple[int, dict[str, Any]]:
    """A custom autoscaling policy of Ray Serve: as many engines of a pool as the roster has decided.

    The newest word counts, of whichever replica.
    """
    told = [value for series in ((context.raw_metrics or {}).get(WANTED) or {}).values() for value in series]
    if not told:
        return context.target_num_replicas, {}
    return int(max(told, key=lambda value: value.timestamp).value), {}


def application(file: str) -> Any:
    """Of Ray Serve, from the file of a fleet (see :class:`_Replica`)."""
    serve = import_serve()
    fleet = FleetFile.model_validate(yaml.safe_load(file))
    plan = fleet.up
    assert plan is not None, "only such a file is started"
    common = {
        "health_check_period_s": 1.0,
        "health_check_timeout_s": 10.0,
        "max_constructor_retry_count": CONSTRUCTOR_TRIES,
        "graceful_shutdown_wait_loop_s": 0.1,
        "graceful_shutdown_timeout_s": plan.drain_seconds + 30.0,
    }
    engines = [
        serve.deployment(EngineReplica)
        .options(
            name=ENGINE if pool == "mixed" else f"{ENGINE}-{pool}",
            ray_actor_options=_reserved(plan.engine(pool)),
            autoscaling_config={
                "min_replicas": 1,
                "initial_replicas": scaling.least,
                "max_replicas": scaling.most,
                "upscale_delay_s": 0,
                "downscale_delay_s": 0,
                "metrics_interval_s": REPORT_SECONDS,
                "look_back_period_s": 2.0,
                "policy": {"policy_function": carry_out},
            },
            **common,
        )
        .bind(file, pool)
        for pool, scaling in fleet.started.items()
    ]
    gateways = serve.deployment(GatewayReplica).options(
        name=GATEWAY, num_replicas=plan.gateways.count, ray_actor_options=_reserved(plan.gateways), **common
    )
    return gateways.bind(file, *engines)


def _reserved(plan: EnginePlan | GatewayPlan) -> dict[str, Any]:
    return {"num_cpus": plan.cpus, "resources": dict(plan.resources)}


def _node(cluster: str) -> str:
    """The address of this machine. A Ray of a fleet's own listens on this machine alone, and so do its engines."""
    return LOOPBACK if cluster.startswith(f"{LOOPBACK}:") else import_ray().util.get_node_ip_address()


def resolved(fleet: FleetFile, address: str) -> str:
    """The file as the replicas get it, of the cluster at ``address``. Its paths must be absolute."""
    assert fleet.up is not None, "only such a file is started"
    plan = fleet.up.model_copy(update={"ray": address})
    return yaml.safe_dump(fleet.model_copy(update={"up": plan}).model_dump(mode="json", exclude_none=True))
