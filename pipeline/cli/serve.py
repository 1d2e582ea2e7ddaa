"""``tapeout serve``: a bundle, or the registry's champion, over the OpenAI API."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from engines.bundle import EngineBundle
from evals.check import Outcome
from evals.kinds.speed import Benchmark
from evals.verdict import Verdict
from pipeline.cli.serve_http import answer, engine_files
from pipeline.cli.serve_limits import limits_within, require_covered
from pipeline.cli.serve_options import EngineOptions, ServeOptions
from pipeline.registry import serving
from pipeline.registry.access import VersionReference
from pipeline.registry.levels import covered, level_to_serve, require_hardware
from pipeline.registry.pull import Requirements
from runtime.gateway.engines.local import ProcessClient
from runtime.gateway.engines.remote import RemoteClient
from runtime.gateway.http.listen import ServeError, listen
from runtime.wire.address import read_key
from runtime.wire.limits import Limits
from runtime.wire.start import EngineSettings
from tapeout import artifact
from tapeout.errors import TapeoutError
from tapeout.fingerprint import judged_level
from tapeout.signing import require_signed_pass

if TYPE_CHECKING:
    from pipeline.cli.shadow import Mirrored
    from pipeline.recipe import Recipe
    from runtime.gateway.http.service import Service

FULL_LOOK_SECONDS = 30.0  # shortest pause where a look at the registry starts MLflow
RETRY_SECONDS = 600.0  # longest pause before a version that could not be served is tried again
UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}

log = logging.getLogger("tapeout.server")


class Approved(NamedTuple):
    """How a bundle may be served.

    ``level``: of native kernels; empty: the best that this machine has. ``facts``: by name, of the very verdict that
    approved it; none with ``--unsafe``. ``version``: of the registry, models:/NAME/VERSION; None for a folder.
    """

    level: str
    facts: Mapping[str, float]
    version: str | None = None


class _Served(NamedTuple):
    """What a server is about to serve. ``follow``: runs beside it."""

    client: ProcessClient | RemoteClient
    name: str
    bandwidth: float | None = None
    mirrored: Mirrored | None = None
    follow: Callable[[Service], Awaitable[None]] | None = None


def run(options: ServeOptions) -> None:
    recipe = None
    if options.engine is None and (options.source is None or options.shadow is not None):
        from pipeline.recipe import load_recipe

        recipe = load_recipe(options.params)
    settings = engine_settings(options.opening, options.approval.required.public_key)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    listener = listen(options.http.host, options.http.port)
    found = (
        _here(options, settings, recipe) if options.engine is None else _elsewhere(options.engine, options.engine_key)
    )
    follow, mirrored = found.follow, found.mirrored

    async def beside(service: Service) -> None:
        works = [follow(service)] if follow else []
        await asyncio.gather(*works, *([mirrored.run()] if mirrored is not None else []))

    answer(
        listener, options.http, found.client, found.name, bandwidth=found.bandwidth, mirrored=mirrored, beside=beside
    )


def _here(options: ServeOptions, settings: EngineSettings, recipe: Recipe | None) -> _Served:
    """An engine of the server's own, whose process is started."""
    required = options.approval.required
    source = options.source or (f"models:/{recipe.register_.model_name}@champion" if recipe else "")
    reference = VersionReference.parse(source) if source.startswith("models:") else None
    folder, approved = approved_bundle(source, required)
    limits = engine_limits(options.opening, approved, source, unsafe=required.unsafe)
    mirrored = None
    if options.shadow is not None and recipe is not None:
        from pipeline.cli.shadow import mirror

        challenger = find_challenger(options.shadow, required)
        mirrored = mirror(options, recipe.online, folder, *challenger, required.public_key)
    engine = replace(settings, level=approved.level)
    client = ProcessClient(str(folder), engine, limits)
    name = folder.resolve().name if reference is None else reference.name
    follow = None
    if reference is not None and reference.alias and options.follow_seconds:
        follow = partial(
            follow_alias,
            reference=reference,
            required=required,
            engine=engine,
            limits=limits,
            seconds=options.follow_seconds,
        )
    return _Served(client, name, measured_bandwidth(folder), mirrored, follow)


def _elsewhere(address: str, key: Path | None) -> _Served:
    """An engine that listens at an address, and was judged by whoever started it."""
    return _Served(RemoteClient(address, read_key(key), engine_files()), "engine")


def engine_settings(options: EngineOptions, public_key: Path | None) -> EngineSettings:
    """:class:`ServeError` for a size that is none."""
    free = options.kv_bytes == "free"
    memory = None if options.kv_bytes is None or free else parse_bytes(options.kv_bytes)
    key = public_key and str(public_key)
    snapshots, share = (None, None) if options.snapshots is None else parse_snapshots(options.snapshots)
    return EngineSettings(
        options.threads,
        options.slots,
        memory,
        key,
        snapshots=snapshots,
        snapshot_share=share,
        map_experts=options.map_experts,
        kv_free=free,
    )


def engine_limits(options: EngineOptions, approved: Approved, source: str, *, unsafe: bool) -> Limits:
    """Those that were asked for, or the defaults as far as they were measured: see :func:`limits_within`."""
    wanted = {"max_running": options.max_running, "max_draft_tokens": options.draft_tokens}
    return replace(limits_within(wanted, approved.facts, source, unsafe=unsafe), max_waiting=options.max_waiting)


def require_elsewhere(given: Sequence[str]) -> None:
    """:class:`ServeError` for options (by parameter) that an engine elsewhere was started with or without."""
    if given:
        name = given[0] if given[0] == "source" else f"--{given[0].replace('_', '-')}"
        raise ServeError(
            f"{name} together with --engine",
            expected="options of the server alone: the engine runs elsewhere, and was judged there",
            remedy="give it to `tapeout engine` where that runs",
        )


def approved_bundle(source: str, required: Requirements) -> tuple[Path, Approved]:
    """The folder of a bundle, or of a version of the registry, and how it may be served."""
    if source.startswith("models:"):
        return asyncio.run(_pulled(VersionReference.parse(source), required))
    if required.judge_by is not None:
        raise ServeError(
            f"{source} is no version of a registry, so no evidence is logged with it",
            expected="models:/NAME@champion with --judge-by",
            remedy="judge the evidence of a run with `tapeout gate`",
        )
    return Path(source), require_judged(Path(source), public_key=required.public_key, unsafe=required.unsafe)


def find_challenger(source: str, required: Requirements) -> tuple[Path, str]:
    """The bundle's folder of ``--shadow``, and its level. What may not be served is not shadowed either."""
    if not source.startswith("models:"):
        required = replace(required, judge_by=None)  # which is about the champion
    folder, approved = approved_bundle(source, required)
    return folder, approved.level


async def _pulled(reference: VersionReference, required: Requirements) -> tuple[Path, Approved]:
    """A registered bundle's folder, and how it may be served."""
    found = await serving.pulled(reference, required)
    bundle = artifact.load_record(found.folder, EngineBundle)
    level = "" if required.unsafe else level_to_serve(bundle, found.levels, str(reference))
    if required.unsafe:
        require_hardware(bundle, str(reference))
    log.info("%s is version %d: %s %s", reference, found.version, found.folder, level)
    version = str(VersionReference(reference.name, number=found.version))
    return found.folder, Approved(level, found.facts, version)


def measured_bandwidth(folder: Path) -> float | None:
    """Bytes per second that the machine reads at best, from the benchmark beside a bundle that was made of it."""
    place = folder.resolve().parent / "benchmark"
    try:
        found = artifact.load_record(place, Benchmark)
        bundle = artifact.load_record(folder, EngineBundle)
    except TapeoutError:
        return None
    return found.record.read_bandwidth_gb_s * 1e9 if found.record.candidate.digest == bundle.digest else None


async def follow_alias(
    service: Service,
    reference: VersionReference,
    required: Requirements,
    engine: EngineSettings,
    limits: Limits,
    seconds: float,
) -> None:
    """Look at the registry every ``seconds``; when the alias is at another version, pull and serve that.

    Whatever goes wrong, the engine that is served stays, and the reason is logged once. The version is tried again
    when the registry has changed, and otherwise later each time.
    """
    done: Any = None  # the state of the registry that is served, or was tried last
    last_reason, failures, retry_at = "", 0, 0.0
    while True:
        now = done
        try:
            now = await asyncio.to_thread(serving.state, reference)
            changed = now is None or now != done
            if changed or (failures and time.monotonic() >= retry_at):
                failures, done = 0 if changed else failures, now
                engine = await _serve_alias(service, reference, required, engine, limits)
                failures, last_reason = 0, ""
        except Exception as error:  # of any kind: a broken bundle must not end the watch
            failures += 1
            retry_at = time.monotonic() + min(seconds * 2**failures, RETRY_SECONDS)
            reason = str(error) if isinstance(error, TapeoutError) else f"{type(error).__name__}: {error}"
            if reason != last_reason:
                log.error("the engine stays as it is: %s", reason)
            last_reason = reason
        await asyncio.sleep(seconds if now is not None else max(seconds, FULL_LOOK_SECONDS))


async def _serve_alias(
    service: Service, reference: VersionReference, required: Requirements, engine: EngineSettings, limits: Limits
) -> EngineSettings:
    """Serve what the alias names, unless it is served: the same bundle may have evidence for another level now."""
    folder, approved = await _pulled(reference, required)
    if not required.unsafe:
        require_covered(limits, approved.facts, str(reference))
    bundle = artifact.load_record(folder, EngineBundle)
    if (bundle.digest, approved.level) != (service.client.info.digest, engine.level):
        engine = replace(engine, level=approved.level)
        await service.swap(str(folder), engine)
        log.info("%s is served; requests that were running end on the engine before it", folder)
    return engine


def parse_snapshots(text: str) -> tuple[int | None, float | None]:
    """A number of snapshots, or their share of all memory of state.

    >>> parse_snapshots("12"), parse_snapshots("12.5%")
    ((12, None), (None, 0.125))
    """
    found = re.fullmatch(r"(\d+)|(\d+(?:\.\d+)?) ?%", text.strip())
    if found is None or (found[2] and float(found[2]) >= 100):
        raise ServeError(f"--snapshots {text}", expected="a number such as 12, or a share below 100% such as 25%")
    return (int(found[1]), None) if found[1] else (None, float(found[2]) / 100)


def parse_bytes(text: str) -> int:
    """
    >>> parse_bytes("512M"), parse_bytes("1.5GiB"), parse_bytes("4096")
    (536870912, 1610612736, 4096)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip())
    if not found:
        raise ServeError(f"{text!r} is no size", expected="bytes such as 2147483648, 512M or 2GiB")
    return int(float(found[1]) * (1 << UNITS[found[2]]))


def require_judged(folder: Path, *, public_key: Path | None = None, unsafe: bool = False) -> Approved:
    """How a bundle may be served, by the verdict beside it, or by a signed statement where the verdict is not there.

    :class:`ServeError` unless the verdict beside the bundle is a PASS about this very bundle; :class:`SignatureError`
    unless a signed one is, with a ``public_key``. :class:`FingerprintError` where no level of this machine has
    evidence.
    """
    bundle = artifact.load_record(folder, EngineBundle)
    if unsafe:
        require_hardware(bundle, str(folder))
        log.warning("--unsafe: %s is served without a verdict", folder)
        return Approved("", {})
    place = folder.resolve().parent / "verdict"
    if public_key is not None:
        signed = require_signed_pass(bundle, public_key).predicate
        verdict = artifact.load(place, Verdict) if place.is_dir() else None
        if verdict is None or verdict.digest != signed.verdict:
            level = judged_level(bundle.record.target, signed.executed_on)
            chosen = level_to_serve(bundle, () if level is None else (level,), str(folder))
            return Approved(chosen, signed.facts)
        chosen = level_to_serve(bundle, covered(bundle, verdict, public_key), str(folder))
        return Approved(chosen, verdict.record.numbers)
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
    return Approved(level_to_serve(bundle, covered(bundle, verdict), str(folder)), verdict.record.numbers)
