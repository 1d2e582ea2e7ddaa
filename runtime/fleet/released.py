"""Which bundle an engine is started with: that of the last release of the fleet, else the one that its file names."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from time import monotonic

from runtime.fleet.runner import EngineRunner
from runtime.gateway.fleet.discovery import FILE_PLACE, FleetFile
from runtime.gateway.fleet.plan_places import find_plans
from runtime.gateway.fleet.release import PlanStore, ReleasePlanError, plan_path
from tapeout.artifact import load_header
from tapeout.errors import TapeoutError, one_line

RENEW_SECONDS = 2.0  # between two looks whether an engine was left out by a release

log = logging.getLogger(__name__)


class ReleasedBundle:
    """``bundle``: of the file. ``plans``: None where the file does not say where they lie; then it is always that.

    Where the plan cannot be read, an engine gets what the last one got.
    """

    def __init__(self, bundle: str, plans: PlanStore | None) -> None:
        self._bundle, self._plans, self._last = bundle, plans, bundle
        self._taken: tuple[tuple[str, ...], float] = (), 0.0  # digests of the plan, and since when

    def __call__(self) -> str:
        try:
            plan = None if self._plans is None else self._plans.read()
        except ReleasePlanError as error:
            log.error("an engine is started with %s: %s", self._last, one_line(error))
        else:
            self._last = self._bundle if plan is None else plan.sources.get(plan.stable, self._bundle)
        return self._last

    def left_out(self, engine: EngineRunner) -> bool:
        """A release has changed the bundles that get requests, and this engine, which was open before, has none of
        them: it was on standby meanwhile, or away. May block.
        """
        digest, opened_at = engine.digest, engine.opened_at
        try:
            plan = None if self._plans is None else self._plans.read()
        except ReleasePlanError:
            return False
        if plan is None:
            return False
        if plan.digests != self._taken[0]:
            self._taken = plan.digests, monotonic()
        return (
            bool(digest)
            and digest not in plan.digests
            and engine.address != plan.moving
            and (opened_at < self._taken[1])
        )


def with_plan_beside(file: FleetFile, path: Path) -> FleetFile:
    """The file of a fleet on one machine, all of whose processes find the release plan beside ``path``."""
    if file.releases is not None:
        return file
    return file.model_copy(update={"releases": f"{FILE_PLACE}{plan_path(path).absolute()}"})


def released(file: FleetFile) -> ReleasedBundle:
    assert file.up is not None, "only such a file is started"
    return ReleasedBundle(file.up.bundle, None if file.releases is None else find_plans(Path(), file))


def forget_release(file: FleetFile, source: Callable[[str], str]) -> None:
    """Where the file names another bundle than when the engines of the last release were started, that one counts.
    So does one that was built anew in the same folder.

    ``source``: of a bundle that a file names, as engines report it. :class:`ReleasePlanError` where the folder of a
    bundle that was released holds another one by now: no engine would get requests.
    """
    assert file.up is not None, "only such a file is started"
    if file.releases is None:
        return
    plans = find_plans(Path(), file)
    plan = plans.read()
    if plan is None:
        return
    there = _digest_in(plan.sources.get(plan.stable, ""))
    if plan.started_with != source(file.up.bundle):
        log.info("the file names another bundle than before the last release, whose plan is removed")
        plans.write(None, plan)
    elif there and there != plan.stable and plan.sources[plan.stable] == plan.started_with:
        log.info(
            "the folder that the file names has another bundle than before the last release, whose plan is removed"
        )
        plans.write(None, plan)
    elif there and there != plan.stable:
        raise ReleasePlanError(
            f"{plan.sources[plan.stable]} has bundle {there[:12]}",
            expected=f"{plan.stable[:12]}, which was released from there",
            remedy=f"put that back, or remove {plans} to start with the bundle of the file",
        )


def _digest_in(source: str) -> str:
    """Of the bundle in a folder; empty for another source, and for a folder that is not on this machine."""
    if not source or source.startswith("models:"):
        return ""
    try:
        return load_header(Path(source)).digest
    except (TapeoutError, OSError):
        return ""
