"""``tapeout engine``: a judged bundle for servers on other machines, or in other processes of this one."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from pipeline.cli.serve import approved_bundle, engine_limits, engine_settings
from pipeline.cli.serve_options import ApprovalOptions, EngineOptions
from runtime.engine import worker
from runtime.wire.address import Address, read_key
from runtime.wire.start import Start

log = logging.getLogger("tapeout.engine")


def run(source: str, address: str, key_file: Path | None, opening: EngineOptions, approval: ApprovalOptions) -> None:
    required = approval.required
    settings = engine_settings(opening, required.public_key)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    place, key = Address.parse(address), read_key(key_file)
    listener = place.listen(key)
    folder, approved = approved_bundle(source, required)
    limits = engine_limits(opening, approved, source, unsafe=required.unsafe)
    start = Start(str(folder), replace(settings, level=approved.level), limits)
    if not place.path:
        place = Address(*listener.getsockname()[:2])
    log.info("opening %s for servers that connect to %s", folder, place)
    worker.listen(start, listener, key)
