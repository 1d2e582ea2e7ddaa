"""Where the release plan of a fleet lies: beside its file, or where `releases` in that says."""

from __future__ import annotations

from pathlib import Path

from runtime.gateway.fleet.discovery import FILE_PLACE, FleetFile
from runtime.gateway.fleet.release import PlanFile, PlanStore, plan_path


def find_plans(path: Path, fleet: FleetFile) -> PlanStore:
    """``path``: of the file."""
    if fleet.releases is None:
        return PlanFile(plan_path(path))
    if fleet.releases.startswith(FILE_PLACE):
        return PlanFile(Path(fleet.releases.removeprefix(FILE_PLACE)))
    from runtime.gateway.fleet.release_table import PlanTable

    return PlanTable(fleet.releases, plan_name(path, fleet))


def plan_name(path: Path, fleet: FleetFile) -> str:
    """Of the plan in a database: as the file is called, or the fleet that is started by it."""
    return path.stem if fleet.up is None else fleet.up.name
