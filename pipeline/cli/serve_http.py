"""Answers clients over HTTP, for whatever engine or engines."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.cli.serve_options import HttpOptions
from runtime.gateway.engines.client import EngineClient
from tapeout.slo import read_objectives

if TYPE_CHECKING:
    from pipeline.cli.shadow import Mirrored
    from runtime.gateway.http.run import Companion
    from runtime.gateway.operations.fleet import Fleet


def answer(
    listener: socket.socket,
    options: HttpOptions,
    client: EngineClient,
    name: str,
    *,
    bandwidth: float | None = None,
    mirrored: Mirrored | None = None,
    beside: Companion | None = None,
    fleet: Fleet | None = None,
) -> None:
    """Until SIGTERM or SIGINT. ``name``: of the model, unless ``options`` have others. ``bandwidth``: as measured."""
    # Imported while the engine's process opens the bundle.
    from fastapi import APIRouter

    from pipeline.registry.verdict_routes import Verdicts
    from runtime.gateway.accounts.traffic import TrafficSettings
    from runtime.gateway.http.requests import ServerLimits
    from runtime.gateway.http.run import ServeSettings, serve
    from runtime.gateway.operations.operations import Operations, OperationsSettings

    slo = None if options.slo is None else read_objectives(options.slo)
    names = tuple(options.served_model_name or [name])
    traffic = options.traffic_log and TrafficSettings(
        options.traffic_log, options.traffic_share, tuple(options.traffic_redactor or ())
    )
    operations = Operations(
        client,
        names[0],
        OperationsSettings(
            api_keys=tuple(options.api_key or ()),
            keys_file=options.keys_file,
            usage_database=options.usage_database,
            usage_journal=options.usage_journal,
            limits_database=options.limits_database,
            traffic=traffic,
            read_bandwidth=bandwidth,
            traces=options.traces,
            cors_origins=tuple(options.cors_origin or ()),
            slo=slo,
        ),
        fleet,
    )
    extensions = operations.extensions
    extensions = replace(extensions, routers=[*extensions.routers, APIRouter(routes=[*Verdicts().routes()])])
    if mirrored is not None:
        extensions = replace(extensions, hooks=[*extensions.hooks, mirrored.hook])
        operations.metrics.registry.register(mirrored)
    try:
        serve(
            client,
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


def engine_files() -> Path:
    """The folder for text files of bundles that engines elsewhere serve, by digest."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tapeout" / "engines"
