"""``tapeout engine``: a judged bundle for servers on other machines, or in other processes of this one."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from pipeline.cli.serve import approved_bundle
from pipeline.cli.serve_limits import limits_within
from pipeline.registry.pull import Requirements
from runtime.engine import worker
from runtime.wire.address import Address, read_key
from runtime.wire.start import EngineSettings, Start

log = logging.getLogger("tapeout.engine")


def run(
    source: str,
    address: str,
    key_file: Path | None,
    settings: EngineSettings,
    wanted: Mapping[str, int | None],
    max_waiting: int,
    required: Requirements,
) -> None:
    """``wanted``: by field of the limits; None: the default, or as much of it as was measured."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    place, key = Address.parse(address), read_key(key_file)
    listener = place.listen(key)
    folder, approved = approved_bundle(source, required)
    limits = replace(limits_within(wanted, approved.facts, source, unsafe=required.unsafe), max_waiting=max_waiting)
    start = Start(str(folder), replace(settings, level=approved.level), limits)
    if not place.path:
        place = Address(*listener.getsockname()[:2])
    log.info("opening %s for servers that connect to %s", folder, place)
    worker.listen(start, listener, key)
