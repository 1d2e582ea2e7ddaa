"""Which bundle an engine is started with: that of the last release of the fleet, else the one that its file names."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from runtime.gateway.fleet.discovery import FILE_PLACE, FleetFile
from runtime.gateway.fleet.plan_places import find_plans
from runtime.gateway.fleet.release import PlanStore, ReleasePlanError, plan_path
from tapeout.errors import one_line

log = logging.getLogger(__name__)


class ReleasedBundle:
    """``bundle``: of the file. Where the plan cannot be read, an engine gets what the last one got."""

    def __init__(self, bundle: str, plans: PlanStore) -> None:
        self._bundle, self._plans, self._last = bundle, plans, bundle

    def __call__(self) -> str:
        try:
            plan = self._plans.read()
        except ReleasePlanError as error:
            log.error("an engine is started with %s: %s", self._last, one_line(error))
        else:
            self._last = self._bundle if plan is None else plan.sources.get(plan.stable, self._bundle)
        return self._last


def with_plan_beside(file: FleetFile, path: Path) -> FleetFile:
    """The file of a fleet on one machine, all of whose processes find the release plan beside ``path``."""
    if file.releases is not None:
        return file
    return file.model_copy(update={"releases": f"{FILE_PLACE}{plan_path(path).absolute()}"})


def released(file: FleetFile) -> Callable[[], str]:
    """See :class:`ReleasedBundle`; always that of the file where it does not say where plans lie."""
    assert file.up is not None, "only such a file is started"
    bundle = file.up.bundle
    if file.releases is None:
        return lambda: bundle
    return ReleasedBundle(bundle, find_plans(Path(), file))


def forget_release(file: FleetFile, source: Callable[[str], str]) -> None:
    """Where the file names another bundle than when the engines of the last release were started, that one counts.

    ``source``: of a bundle that a file names, as engines report it.
    """
    assert file.up is not None, "only such a file is started"
    if file.releases is None:
        return
    plans = find_plans(Path(), file)
    plan = plans.read()
    if plan is not None and plan.started_with != source(file.up.bundle):
        log.info("the file names another bundle than before the last release, whose plan is removed")
        plans.write(None, plan)
