"""``tapeout fleet``: engines and gateways that are started, placed, started again and scaled together."""

from __future__ import annotations

import asyncio
import logging
import signal
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import TYPE_CHECKING, Any

from runtime.fleet.control import RayFleet, read_plan, require_startable
from runtime.fleet.local import LocalFleet
from runtime.fleet.released import forget_release, with_plan_beside

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["RayFleet", "bring_up", "run_here", "show_progress", "shown"]


def show_progress() -> None:
    """On the standard error, while a command takes long."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")


def bring_up(path: Path) -> dict[str, Any]:
    """Its status. SIGTERM before that, such as at a timeout of systemd or CI, takes down what was started."""

    def end(number: int, _: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)  # what was started is taken down once, to its end
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)
    return RayFleet(path).up(source_of)


def run_here(path: Path) -> None:
    """Without Ray, until SIGTERM or SIGINT."""
    file, plan = read_plan(path)
    require_startable(file, plan, here=True)
    show_progress()
    file = with_plan_beside(file, path)
    forget_release(file, source_of)

    async def run(folder: Path) -> None:
        ending = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, ending.set)
        await LocalFleet(file, folder).run(ending)

    with TemporaryDirectory(prefix="tapeout-fleet-") as folder:
        asyncio.run(run(Path(folder)))


def source_of(bundle: str) -> str:
    """Of a bundle that a file of a fleet names, as an engine reports it: with the version that an alias is of now."""
    if not bundle.startswith("models:"):
        return bundle
    from pipeline.registry.access import VersionReference, version_of

    return str(version_of(bundle).reference) if VersionReference.parse(bundle).alias else bundle


def shown(status: dict[str, Any]) -> RenderableType:
    """For a reader: one line for each engine and gateway."""
    from rich.console import Group
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("", "address", "machine", "pool", "state", "running", "waiting", "opened in"):
        table.add_column(column)
    for kind in ("gateways", "engines"):
        for one in status[kind]:
            cold = one.get("cold_seconds")
            table.add_row(
                kind[:-1],
                one["address"],
                one["node"],
                one.get("pool", ""),
                one["state"],
                str(one.get("running", "")),
                str(one.get("waiting", "")),
                "" if cold is None else f"{cold:.1f} s",
            )
    wanted = [_wanted(pool, **counts) for pool, counts in status["pools"].items()]
    head = f"{status['name']} on Ray at {status['ray']}: {status['state']}, {'; '.join(wanted)}"
    return Group(head, *filter(None, [status["message"], status["problem"]]), table)


def _wanted(pool: str, wanted: int, fixed: int | None) -> str:
    of_pool = "" if pool == "mixed" else f" for {pool}"
    return f"{wanted} engines{of_pool} wanted, as {'the reports say' if fixed is None else 'asked for by hand'}"
