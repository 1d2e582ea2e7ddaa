"""``tapeout serve``: a bundle, or the registry's champion, over the OpenAI API."""

from __future__ import annotations

import asyncio
import logging
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from engines.bundle import EngineBundle
from evals.check import Outcome
from evals.kinds.speed import Benchmark
from evals.verdict import Verdict
from pipeline.registry import serving
from runtime.client import ProcessClient
from runtime.opening import OpenBundle
from runtime.scheduler import Limits
from runtime.server.listen import ServeError, listen
from tapeout import artifact
from tapeout.errors import TapeoutError
from tapeout.signing import PUBLIC_KEY, key_from_environment

if TYPE_CHECKING:
    from runtime.server.service import Service

REGISTERED = re.compile(r"models:/(?P<name>[^/@]+)@champion")
UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}

log = logging.getLogger("tapeout.server")


@dataclass(frozen=True)
class Options:
    """See the help of ``tapeout serve``. ``source``: a bundle's folder, or ``models:/NAME@champion``."""

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
    unsafe: bool
    api_keys: tuple[str, ...] = ()
    keys_file: Path | None = None
    usage_database: str | None = None
    usage_journal: Path = Path("usage.journal")
    traffic_log: Path | None = None
    traffic_share: float = 0.01
    traffic_redactors: tuple[str, ...] = ()
    traces: bool = False


def run(options: Options) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    listener = listen(options.host, options.port)
    registered = REGISTERED.fullmatch(options.source)
    if registered:
        champion = asyncio.run(serving.find_champion(registered["name"]))
        folder, name = champion.folder, registered["name"]
        _require_digest(folder, champion.digest)
        log.info("version %d of %s is champion: %s", champion.version, name, folder)
    elif options.source.startswith("models:"):
        raise ServeError(f"{options.source} names no model", expected="models:/NAME@champion, or a bundle's folder")
    else:
        folder = Path(options.source)
        name = folder.resolve().name
        require_judged(folder, unsafe=options.unsafe)
    public_key = None if options.unsafe else key_from_environment(PUBLIC_KEY)
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
    verdicts = APIRouter(routes=[*Verdicts().routes()])

    async def follow(service: Service) -> None:
        await follow_champion(service, name, options.follow_seconds)

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
            extensions=replace(extensions, routers=[*extensions.routers, verdicts]),
            companion=follow if registered and options.follow_seconds else None,
        )
    finally:
        operations.close()


def measured_bandwidth(folder: Path) -> float | None:
    """Bytes per second that the machine reads at best, from the benchmark beside a bundle that was made of it."""
    place = folder.resolve().parent / "benchmark"
    try:
        found = artifact.load_record(place, Benchmark)
        bundle = artifact.load_record(folder, EngineBundle)
    except TapeoutError:
        return None
    return found.record.read_bandwidth_gb_s * 1e9 if found.record.candidate.digest == bundle.digest else None


async def follow_champion(service: Service, name: str, seconds: float) -> None:
    """Look at the registry every ``seconds``; when another version is champion, serve it. Errors are only logged."""
    before = None
    while True:
        try:
            now = await asyncio.to_thread(serving.state, name)
            if now is None or now != before:
                await _serve_champion(service, name)
            before = now
        except TapeoutError as error:
            log.error("the engine stays as it is: %s", error)
        await asyncio.sleep(seconds)


async def _serve_champion(service: Service, name: str) -> None:
    champion = await serving.find_champion(name)
    if champion.digest == service.client.info.digest:
        return
    log.info("version %d of %s is champion now: opening %s", champion.version, name, champion.folder)
    _require_digest(champion.folder, champion.digest)
    await service.swap(champion.folder)
    log.info(
        "version %d of %s is served; requests that were running end on the engine before it", champion.version, name
    )


def parse_bytes(text: str) -> int:
    """
    >>> parse_bytes("512M"), parse_bytes("1.5GiB"), parse_bytes("4096")
    (536870912, 1610612736, 4096)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip())
    if not found:
        raise ServeError(f"{text!r} is no size", expected="bytes such as 2147483648, 512M or 2GiB")
    return int(float(found[1]) * (1 << UNITS[found[2]]))


def _require_digest(folder: Path, digest: str) -> None:
    bundle = artifact.load_record(folder, EngineBundle)
    if bundle.digest != digest:
        raise ServeError(
            f"{folder} holds bundle {bundle.digest[:12]}",
            expected=f"bundle {digest[:12]}, the champion",
            remedy="put the champion's bundle back, or promote another version",
        )


def require_judged(folder: Path, *, unsafe: bool) -> None:
    """:class:`ServeError` unless the verdict beside the bundle, or a signed one, is a PASS about this very bundle.

    That the bundle was judged on this hardware is checked when the engine is opened.
    """
    bundle = artifact.load_record(folder, EngineBundle)
    if unsafe:
        log.warning("--unsafe: %s is served without a verdict", folder)
        return
    if key_from_environment(PUBLIC_KEY) is not None:
        return  # the engine's loader asks for a signed PASS
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
