"""``tapeout engine``: a judged bundle for servers on other machines, or in other processes of this one."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from pipeline.cli.serve import approved_bundle, engine_limits, engine_settings
from pipeline.cli.serve_options import ApprovalOptions, EngineOptions
from runtime.engine import worker
from runtime.engine.opening import Opened, open_bundle
from runtime.wire.address import Address, read_key
from runtime.wire.engine_table import Announcement
from runtime.wire.start import EngineSettings, Start
from tapeout.errors import TapeoutError

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
) -> None:
    """``register``: the database with the table of engines. ``advertise``: what is written there, else ``address``."""
    required = approval.required
    settings = engine_settings(opening, required.public_key)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    place, key = Address.parse(address), read_key(key_file)
    reached = None if advertise is None else Address.parse(advertise)
    if register is not None and reached is None and place.host in EVERY_ADDRESS:
        raise TapeoutError(
            f"{place} is every address of this machine, and --register takes one that gateways reach",
            expected="--advertise tcp:HOST:PORT",
        )
    listener = place.listen(key)
    folder, approved = approved_bundle(source, required)
    limits = engine_limits(opening, approved, source, unsafe=required.unsafe)
    start = Start(str(folder), replace(settings, level=approved.level), limits)
    if not place.path:
        place = Address(*listener.getsockname()[:2])
    log.info("opening %s for servers that connect to %s", folder, place)
    if register is None:
        worker.listen(start, listener, key)
        return
    with Announcement(register, str(reached or place)) as announcement:

        def opener(bundle: Path, settings: EngineSettings) -> Opened:
            opened = open_bundle(bundle, settings)
            announcement.publish(opened.info.digest, opened.info.level)
            return opened

        worker.listen(start, listener, key, opener)
