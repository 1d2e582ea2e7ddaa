"""``tapeout serve``: a bundle, or the registry's champion, over the OpenAI API."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engines.bundle import EngineBundle
from evals.check import Outcome
from evals.kinds.speed import Benchmark
from evals.verdict import Verdict
from pipeline.registry import serving
from pipeline.registry.access import Reference
from pipeline.registry.pull import Requirements
from runtime.client import ProcessClient
from runtime.opening import OpenBundle
from runtime.scheduler import Limits
from runtime.server.listen import ServeError, listen
from tapeout import artifact
from tapeout.errors import TapeoutError

if TYPE_CHECKING:
    from pipeline.cli.shadow import ShadowOptions
    from runtime.server.service import Service

FULL_LOOK_SECONDS = 30.0  # shortest pause where a look at the registry starts MLflow
RETRY_SECONDS = 600.0  # longest pause before a version that could not be served is tried again
UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}

log = logging.getLogger("tapeout.server")


@dataclass(frozen=True)
class Options:
    """See the help of ``tapeout serve``. ``source``: a folder, ``models:/NAME@ALIAS`` or ``models:/NAME/VERSION``."""

    source: str
    host: str
    port: int
    names: tuple[str, ...]
    threads: int
    slots: int | None
    kv_bytes: int | None
    max_waiting: int
    draft_tokens: int
    queue_seconds: float | None
    request_seconds: float | None
    drain_seconds: float
    follow_seconds: float
    required: Requirements
    api_keys: tuple[str, ...] = ()
    keys_file: Path | None = None
    usage_database: str | None = None
    usage_journal: Path = Path("usage.journal")
    traffic_log: Path | None = None
    traffic_share: float = 0.01
    traffic_redactors: tuple[str, ...] = ()
    traces: bool = False
    shadow: ShadowOptions | None = None


def run(options: Options) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    listener = listen(options.host, options.port)
    required = options.required
    public_key = required.public_key
    reference = Reference.parse(options.source) if options.source.startswith("models:") else None
    if reference is not None:
        found = asyncio.run(serving.pulled(reference, required))
        folder, name = found.folder, reference.name
        log.info("%s is version %d: %s", reference, found.version, folder)
    elif required.judge_by is not None:
        raise ServeError(
            f"{options.source} is no version of a registry, so no evidence is logged with it",
            expected="models:/NAME@champion with --judge-by",
            remedy="judge the evidence of a run with `tapeout gate`",
        )
    else:
        folder = Path(options.source)
        name = folder.resolve().name
        require_judged(folder, signed=public_key is not None, unsafe=required.unsafe)
    mirrored = None
    if options.shadow is not None:
        from pipeline.cli.shadow import mirror

        challenger = find_challenger(options.shadow.source, required)
        mirrored = mirror(options.shadow, folder, challenger, public_key)
    opener = OpenBundle(options.threads, options.slots, options.kv_bytes, public_key)
    client = ProcessClient(folder, opener, Limits(max_waiting=options.max_waiting, most_drafted=options.draft_tokens))
    # Imported while the engine's process opens the bundle.
    from fastapi import APIRouter

    from pipeline.registry.verdict_routes import Verdicts
    from runtime.server.operations import Operations, OperationsSettings
    from runtime.server.requests import ServerLimits
    from runtime.server.run import ServeSettings, serve
    from runtime.server.traffic import TrafficSettings

    names = options.names or (name,)
    traffic = options.traffic_log and TrafficSettings(
        options.traffic_log, options.traffic_share, options.traffic_redactors
    )
    operations = Operations(
        client,
        names[0],
        OperationsSettings(
            api_keys=options.api_keys,
            keys_file=options.keys_file,
            usage_database=options.usage_database,
            usage_journal=options.usage_journal,
            traffic=traffic,
            read_bandwidth=measured_bandwidth(folder),
            traces=options.traces,
        ),
    )

    extensions = operations.extensions
    extensions = replace(extensions, routers=[*extensions.routers, APIRouter(routes=[*Verdicts().routes()])])
    if mirrored is not None:
        extensions = replace(extensions, hooks=[*extensions.hooks, mirrored.hook])
        operations.metrics.registry.register(mirrored)

    async def beside(service: Service) -> None:
        works: list[Awaitable[None]] = []
        if reference is not None and reference.alias and options.follow_seconds:
            works.append(follow_alias(service, reference, required, options.follow_seconds))
        await asyncio.gather(*works, *([mirrored.run()] if mirrored is not None else []))

    try:
        serve(
            client,
            folder,
            listener,
            ServeSettings(
                names=names,
                drain_seconds=options.drain_seconds,
                limits=ServerLimits(queue_timeout=options.queue_seconds, timeout=options.request_seconds),
            ),
            extensions=extensions,
            companion=beside,
        )
    finally:
        operations.close()
        if mirrored is not None:
            mirrored.hook.close()


def find_challenger(source: str, required: Requirements) -> Path:
    """The bundle's folder of ``--shadow``. What may not be served is not shadowed either."""
    if not source.startswith("models:"):
        require_judged(Path(source), signed=required.public_key is not None, unsafe=required.unsafe)
        return Path(source)
    reference = Reference.parse(source)
    found = asyncio.run(serving.pulled(reference, required))
    log.info("%s is version %d: %s", reference, found.version, found.folder)
    return found.folder


def measured_bandwidth(folder: Path) -> float | None:
    """Bytes per second that the machine reads at best, from the benchmark beside a bundle that was made of it."""
    place = folder.resolve().parent / "benchmark"
    try:
        found = artifact.load_record(place, Benchmark)
        bundle = artifact.load_record(folder, EngineBundle)
    except TapeoutError:
        return None
    return found.record.read_bandwidth_gb_s * 1e9 if found.record.candidate.digest == bundle.digest else None


async def follow_alias(service: Service, reference: Reference, required: Requirements, seconds: float) -> None:
    """Look at the registry every ``seconds``; when the alias is at another version, pull and serve that.

    Whatever goes wrong, the engine that is served stays, and the reason is logged once. The version is tried again
    when the registry has changed, and otherwise later each time.
    """
    done: Any = None  # the state of the registry that is served, or was tried last
    said, failures, retry_at = "", 0, 0.0
    while True:
        now = done
        try:
            now = await asyncio.to_thread(serving.state, reference)
            changed = now is None or now != done
            if changed or (failures and time.monotonic() >= retry_at):
                failures, done = 0 if changed else failures, now
                await _serve_alias(service, reference, required)
                failures, said = 0, ""
        except Exception as error:  # of any kind: a broken bundle must not end the watch
            failures += 1
            retry_at = time.monotonic() + min(seconds * 2**failures, RETRY_SECONDS)
            reason = str(error) if isinstance(error, TapeoutError) else f"{type(error).__name__}: {error}"
            if reason != said:
                log.error("the engine stays as it is: %s", reason)
            said = reason
        await asyncio.sleep(seconds if now is not None else max(seconds, FULL_LOOK_SECONDS))


async def _serve_alias(service: Service, reference: Reference, required: Requirements) -> None:
    found = await serving.pulled(reference, required)
    if found.digest == service.client.info.digest:
        return
    log.info("%s is version %d now: opening %s", reference, found.version, found.folder)
    await service.swap(found.folder)
    log.info("version %d is served; requests that were running end on the engine before it", found.version)


def parse_bytes(text: str) -> int:
    """
    >>> parse_bytes("512M"), parse_bytes("1.5GiB"), parse_bytes("4096")
    (536870912, 1610612736, 4096)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip())
    if not found:
        raise ServeError(f"{text!r} is no size", expected="bytes such as 2147483648, 512M or 2GiB")
    return int(float(found[1]) * (1 << UNITS[found[2]]))


def require_judged(folder: Path, *, signed: bool = False, unsafe: bool = False) -> None:
    """:class:`ServeError` unless the verdict beside the bundle, or a signed one, is a PASS about this very bundle.

    ``signed``: the engine's loader asks for a signed PASS. It also checks that the bundle was built for this hardware.
    """
    bundle = artifact.load_record(folder, EngineBundle)
    if unsafe:
        log.warning("--unsafe: %s is served without a verdict", folder)
        return
    if signed:
        return
    place = folder.resolve().parent / "verdict"
    remedy = "run `dvc repro gate`, serve the champion (models:/NAME@champion), or accept the risk with --unsafe"
    expected = f"a PASS about bundle {bundle.digest[:12]} in {place}"
    if not place.is_dir():
        raise ServeError(f"{folder} has no verdict", expected=expected, remedy=remedy)
    verdict = artifact.load(place, Verdict)
    verdict.verify()
    if verdict.record.candidate != bundle.digest:
        raise ServeError(
            f"the verdict beside {folder} is about bundle {verdict.record.candidate[:12]}",
            expected=expected,
            remedy=remedy,
        )
    if verdict.record.outcome is not Outcome.PASS:
        raise ServeError(f"{folder} was judged {verdict.record.outcome.value}", expected=expected, remedy=remedy)
