"""``tapeout engine``: a judged bundle for servers on other machines, or in other processes of this one."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from pipeline.cli.serve import approved_bundle, engine_limits, engine_settings
from pipeline.cli.serve_options import ApprovalOptions, EngineOptions
from runtime.engine import worker
from runtime.wire.address import Address, read_key
from runtime.wire.messages import Reopen
from runtime.wire.start import Start
from tapeout.errors import TapeoutError, one_line

log = logging.getLogger("tapeout.engine")


def run(source: str, address: str, key_file: Path | None, opening: EngineOptions, approval: ApprovalOptions) -> None:
    """Serve a bundle, and whichever one a server asks for after it, until SIGTERM or SIGINT."""
    required = approval.required
    settings = engine_settings(opening, required.public_key)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    place, key = Address.parse(address), read_key(key_file)
    listener = place.listen(key)
    if not place.path:
        place = Address(*listener.getsockname()[:2])

    def start(source: str) -> Start:
        folder, approved = approved_bundle(source, required)
        limits = engine_limits(opening, approved, source, unsafe=required.unsafe)
        log.info("opening %s for servers that connect to %s", folder, place)
        return Start(str(folder), replace(settings, level=approved.level), limits)

    serve(start(source), start, partial(worker.listen, listener=listener, key=key))


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
            serving, before, notice = wanted, serving, ""
        except (TapeoutError, OSError) as error:
            notice = one_line(error, 300)
            log.error("%s stays: %s", serving.bundle, notice)
            asked = listen(serving, notice=notice)
