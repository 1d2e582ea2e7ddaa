"""``tapeout gateway``: the OpenAI API in front of many engines, each started by ``tapeout engine``."""

from __future__ import annotations

import logging
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

from pipeline.cli.serve_http import answer, engine_files
from pipeline.cli.serve_options import HttpOptions
from runtime.gateway.fleet.client import FleetClient
from runtime.gateway.fleet.discovery import Discovery, FleetFile, FromFile
from runtime.gateway.fleet.plan_places import find_plans, plan_name
from runtime.gateway.fleet.release import PlanFile
from runtime.gateway.fleet.replica import Patience
from runtime.gateway.fleet.scaling import FleetScaler
from runtime.gateway.http.listen import listen
from runtime.wire.messages import Pool


def run(engines: Path, wait_seconds: float, options: HttpOptions) -> None:
    fleet = FleetFile.read(engines)
    discovery = find_engines(engines, fleet, kept=engine_files().with_name("plans"))
    if fleet.up is None:  # those that are started together may not be there yet
        discovery.read()  # what is wrong with it is said before anything is taken
    if options.slo is None and fleet.slo is not None:
        options = replace(options, slo=engines)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    listener = listen(options.host, options.port)
    scalers: dict[Pool, FleetScaler] = {pool: FleetScaler(settings) for pool, settings in fleet.scalings.items()}
    client = FleetClient(discovery, engine_files(), patience=Patience(wait=wait_seconds), scalers=scalers)
    answer(listener, options, client, "engine", fleet=client)


def find_engines(path: Path, fleet: FleetFile, *, kept: Path | None = None) -> Discovery:
    """``kept``: a folder for copies of release plans that lie in a database."""
    copy = None
    if kept is not None and fleet.releases is not None:
        name = sha256(f"{fleet.releases} {plan_name(path, fleet)}".encode()).hexdigest()
        copy = PlanFile(kept / f"{name}.json")
    return FromFile(path, find_source(fleet), find_plans(path, fleet), copy)


def find_source(fleet: FleetFile) -> Discovery | None:
    """Of engines that the file does not list."""
    if fleet.table is not None:
        from runtime.gateway.fleet.table_discovery import TableDiscovery

        return TableDiscovery(fleet.table, fleet.key)
    if fleet.kubernetes is not None:
        from runtime.gateway.fleet.kubernetes_discovery import KubernetesDiscovery

        return KubernetesDiscovery(fleet.kubernetes, fleet.key)
    if fleet.up is not None:
        from runtime.fleet.ray_discovery import RayDiscovery

        return RayDiscovery(fleet.up, fleet.key)
    return None
