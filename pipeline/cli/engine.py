"""``tapeout engine``: a judged bundle for servers on other machines, or in other processes of this one."""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import monotonic

from pipeline.cli.serve import approved_bundle, engine_limits, engine_settings
from pipeline.cli.serve_options import ApprovalOptions, EngineOptions
from runtime.engine import worker
from runtime.engine.opening import Opened, open_bundle
from runtime.wire.address import Address, read_key
from runtime.wire.engine_table import Announcement
from runtime.wire.messages import Pool, Reopen
from runtime.wire.start import EngineSettings, Start
from tapeout.errors import TapeoutError, one_line

STARTED = 19  # of the numbers behind the name in /proc/PID/stat: when the process was started, see proc(5)
EVERY_ADDRESS = ("0.0.0.0", "::")

log = logging.getLogger("tapeout.engine")


def run(
    source: str,
    address: str,
    key_file: Path | None,
    opening: EngineOptions,
    approval: ApprovalOptions,
    register: str | None = None,
    advertise: str | None = None,
    pool: Pool = "mixed",
) -> None:
    """Serve a bundle, and whichever one a server asks for after it, until SIGTERM or SIGINT.

    ``register``: the database with the table of engines. ``advertise``: what is written there, else ``address``.
    ``pool``: see :class:`EngineInfo`.
    """
    required = approval.required
    settings = replace(engine_settings(opening, required.public_key), pool=pool)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    place, key = Address.parse(address), read_key(key_file)
    reached = None if advertise is None else Address.parse(advertise)
    if register is not None and reached is None and place.host in EVERY_ADDRESS:
        raise TapeoutError(
            f"{place} is every address of this machine, and --register takes one that gateways reach",
            expected="--advertise tcp:HOST:PORT",
        )
    listener = place.listen(key)
    if not place.path:
        place = Address(*listener.getsockname()[:2])

    starting = seconds_of_process()
    checking = 0.0

    def start(source: str) -> Start:
        nonlocal checking
        begun = monotonic()
        folder, approved = approved_bundle(source, required)
        known = str(folder.absolute()) if approved.version is None else approved.version
        limits = engine_limits(opening, approved, source, unsafe=required.unsafe)
        checking = monotonic() - begun
        log.info("opening %s for servers that connect to %s", folder, place)
        return Start(str(folder), replace(settings, level=approved.level, source=known), limits)

    with nullcontext() if register is None else Announcement(register, str(reached or place)) as announcement:

        def opener(bundle: Path, settings: EngineSettings) -> Opened:
            begun = monotonic()
            opened = open_bundle(bundle, settings)
            seconds = starting + checking + monotonic() - begun
            opened = opened._replace(info=replace(opened.info, cold_seconds=seconds))
            if announcement is not None:
                announcement.begin()
            log.info("the engine is open at %s; a new process takes %.1f seconds", place, seconds)
            return opened

        serve(start(source), start, partial(worker.listen, listener=listener, key=key, opener=opener))


def seconds_of_process() -> float:
    """Since this process was started; 0 where the system does not say."""
    found = Path("/proc/self/stat")
    if not found.exists():
        return 0.0
    ticks = int(found.read_text().rpartition(")")[2].split()[STARTED])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def serve(first: Start, start: Callable[[str], Start], listen: Callable[..., Reopen | None]) -> None:
    """``start``: of a source; it raises where that may not be served here. ``listen``: until another one is asked for.

    Where that cannot be served, the bundle before is opened again.
    """
    serving, before, notice = first, first, ""
    asked = listen(serving)
    while asked is not None:
        gc.collect()
        try:
            wanted = start(asked.source) if asked.source else before
            asked = listen(wanted)
            if wanted.bundle != serving.bundle:  # else it was told so again, by a command that goes on
                before = serving
            serving, notice = wanted, ""
        except (TapeoutError, OSError) as error:
            notice = one_line(error, 300)
            log.error("%s stays: %s", serving.bundle, notice)
            asked = listen(serving, notice=notice)
