"""Runs the server of one engine: opens it, answers until it is told to stop, and drains."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from types import FrameType

import uvicorn
import uvloop
from fastapi import APIRouter
from starlette.middleware import Middleware

from runtime.gateway.engines.client import EngineClient
from runtime.gateway.http.app import create_app
from runtime.gateway.http.http_connection import FEW_CONNECTIONS, ConnectionLimits, http_config, most_connections
from runtime.gateway.http.requests import ServerLimits
from runtime.gateway.http.service import Service
from runtime.gateway.protocol.calls import Hook
from tapeout.cores import keep_to

FLUSH_SECONDS = 5  # that responses have to reach slow clients once the engine is done

log = logging.getLogger("tapeout.server")


@dataclass(frozen=True)
class Extensions:
    """What is mounted around the API, see :func:`runtime.gateway.http.app.create_app`. ``attach``: gets the service.

    ``malformed``: see :func:`runtime.gateway.http.http_connection.http_config`.
    """

    routers: Sequence[APIRouter] = ()
    middleware: Sequence[Middleware] = ()
    hooks: Sequence[Hook] = ()
    attach: Callable[[Service], None] | None = None
    malformed: Callable[[], None] | None = None


Companion = Callable[[Service], Awaitable[None]]


@dataclass(frozen=True)
class ServeSettings:
    """``names``: that requests may call the model by. ``drain_seconds``: that running requests have to end."""

    names: tuple[str, ...]
    drain_seconds: float = 30.0
    limits: ServerLimits = field(default_factory=ServerLimits)


def serve(
    client: EngineClient,
    listener: socket.socket,
    settings: ServeSettings,
    *,
    extensions: Extensions | None = None,
    companion: Companion | None = None,
) -> None:
    """Serve the engine that ``client`` opens, until SIGTERM or SIGINT.

    Then new requests are refused with 503, and running ones have ``drain_seconds``; a second signal ends them at once.
    ``companion`` runs beside the server.
    """
    uvloop.run(_serve(client, listener, settings, extensions or Extensions(), companion))


async def _serve(
    client: EngineClient,
    listener: socket.socket,
    settings: ServeSettings,
    extensions: Extensions,
    companion: Companion | None,
) -> None:
    try:
        service = Service(client, {}, settings.names, settings.limits, extensions.hooks)
        if extensions.attach is not None:
            extensions.attach(service)
        app = create_app(service, routers=extensions.routers, middleware=extensions.middleware)
        connections = most_connections()
        if connections < FEW_CONNECTIONS:
            log.warning(
                "the limit of open files leaves room for %d connections; expected: at least %d; raise it with "
                "`ulimit -n 65536`, or LimitNOFILE of a systemd unit",
                connections,
                FEW_CONNECTIONS,
            )
        config = http_config(
            app,
            ConnectionLimits(connections=connections),
            extensions.malformed,
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=FLUSH_SECONDS,
        )
        await client.open(service.opened)
        gc.freeze()  # what was imported stays: the collector need not look at it again
        keep_to(client.info.server_cores)
        host, port = listener.getsockname()[:2]
        if client.info.threads:
            log.info("the engine computes on %d thread%s", client.info.threads, "s"[: client.info.threads > 1])
        if mapped := client.info.mapped_bytes:
            log.warning(
                "%.1f GB of weights of experts are left in their file: what memory has no room for is read from the "
                "disk again (tapeout:resident_share, tapeout:page_faults_total)",
                mapped / 1e9,
            )
        log.info("serving %s at http://%s:%d/v1", settings.names[0], host, port)
        beside = asyncio.ensure_future(companion(service)) if companion else None
        await _DrainingServer(config, service, settings.drain_seconds).serve(sockets=[listener])
        if beside is not None:
            beside.cancel()
            await asyncio.gather(beside, return_exceptions=True)
    finally:
        await client.close()


class _DrainingServer(uvicorn.Server):
    """The first signal drains: the server listens on, to say 503. The second one ends it."""

    def __init__(self, config: uvicorn.Config, service: Service, seconds: float) -> None:
        super().__init__(config)
        self._service, self._seconds = service, seconds
        self._signals = 0
        self._draining: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._signals += 1
        self._service.draining = True

    async def on_tick(self, counter: int) -> bool:
        if self._signals and self._draining is None:
            self._draining = asyncio.create_task(self._drain())
        if self._signals > 1:
            self.should_exit = self.force_exit = True
        return await super().on_tick(counter)

    async def _drain(self) -> None:
        log.info("shutting down: running requests have %g seconds", self._seconds)
        await self._service.client.drain(self._seconds)
        self.should_exit = True
