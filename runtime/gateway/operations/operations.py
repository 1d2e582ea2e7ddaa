"""What operators need around the API, put together: metrics, health, keys, usage records, traffic log and live page.

operations = Operations(client, "smollm2", OperationsSettings(api_keys=("secret",)))
serve(client, …, extensions=operations.extensions)
operations.close()
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fastapi import APIRouter
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from runtime.gateway.accounts.key_file import KeyFileError
from runtime.gateway.accounts.keys import Keys, RequireKey
from runtime.gateway.accounts.shared_quotas import SharedQuotas
from runtime.gateway.accounts.traffic import TrafficLog, TrafficSettings
from runtime.gateway.accounts.usage import Usage
from runtime.gateway.engines.client import EngineClient
from runtime.gateway.http.run import Extensions
from runtime.gateway.http.service import LEVEL, Service
from runtime.gateway.operations.fleet import Fleet, FleetView
from runtime.gateway.operations.health import Health
from runtime.gateway.operations.http_metrics import HttpMetrics
from runtime.gateway.operations.metrics import Metrics
from runtime.gateway.operations.objectives import ObjectiveEvents
from runtime.gateway.operations.page import Page
from runtime.gateway.operations.tracing import TraceContext, Tracing, otlp_provider
from runtime.gateway.protocol.calls import REQUEST_ID, Hook
from tapeout.errors import TapeoutError
from tapeout.slo import ServiceLevelObjectives

_ORIGIN = re.compile(r"https?://[^/\s?#@*]+")
# Headers that a script may read besides the ones that browsers always show.
SHOWN_HEADERS = (
    *(REQUEST_ID, "x-ignored-parameters", LEVEL, "retry-after", "retry-after-ms", "x-should-retry"),
    *(f"x-ratelimit-{what}-{of}" for what in ("limit", "remaining", "reset") for of in ("requests", "tokens")),
)


@dataclass(frozen=True)
class OperationsSettings:
    """``usage_database``: an SQLAlchemy URL; None keeps no usage records. ``traffic`` None: no traffic log.

    ``limits_database``: of the limits that all servers with this URL share; None counts them here.
    ``cors_origins``: of web pages whose scripts may call the server; ``*`` is every page.
    ``read_bandwidth``: bytes per second, if it was measured (:class:`runtime.gateway.operations.metrics.Metrics`).
    """

    api_keys: tuple[str, ...] = ()
    keys_file: Path | None = None
    usage_database: str | None = None
    usage_journal: Path = Path("usage.journal")
    limits_database: str | None = None
    traffic: TrafficSettings | None = None
    read_bandwidth: float | None = None
    traces: bool = False  # send spans by OTLP
    cors_origins: tuple[str, ...] = ()
    slo: ServiceLevelObjectives | None = None

    def __post_init__(self) -> None:
        for origin in self.cors_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise TapeoutError(
                    f"{origin!r} is no origin of a web page",
                    expected="scheme, host and port, as in https://chat.example.org or http://localhost:3000; or *",
                )


class Operations:
    """Made before the engine is open. ``extensions``: for :func:`runtime.gateway.http.run.serve`.

    ``fleet``: where the client has several engines.
    """

    def __init__(
        self, client: EngineClient, model: str, settings: OperationsSettings, fleet: Fleet | None = None
    ) -> None:
        self._service: Service | None = None
        view = None if fleet is None else FleetView(fleet)
        self.metrics = Metrics(
            client, model, read_bandwidth=settings.read_bandwidth, engine_series=None if view is None else view.series
        )
        if view is not None:
            self.metrics.registry.register(view)
        self.shared = shared = SharedQuotas(settings.limits_database) if settings.limits_database else None
        if shared is not None:
            shared.require_access()
        self.health = Health(
            client,
            lambda: self._service is not None and self._service.draining,
            lambda: shared is None or shared.reached,
            lambda: "" if self.usage is None else self.usage.failed,
            **({} if fleet is None else {"away": fleet.away}),
        )
        self.keys = Keys(settings.api_keys, settings.keys_file, self.shared and self.shared.quota)
        self.usage = Usage(settings.usage_database, settings.usage_journal) if settings.usage_database else None
        if self.usage is not None:
            self.metrics.registry.register(self.usage)
            self.keys.used = self.usage.tokens_by_key()
        elif self.keys.have_budgets and self.shared is None:
            raise KeyFileError(
                "a key has a token budget, but there are no usage records to count it with",
                expected="a database of usage records, or one of limits",
                remedy="name one with --usage-database or --limits-database, or remove token_budget",
            )
        self.traffic = TrafficLog(settings.traffic, self._decode) if settings.traffic else None
        if self.traffic is not None:
            self.metrics.registry.register(self.traffic)
        self.objectives = ObjectiveEvents(settings.slo) if settings.slo else None
        if self.objectives is not None:
            self.metrics.registry.register(self.objectives)
        self.tracing = Tracing(otlp_provider()) if settings.traces else None
        # Metrics and spans come first and see what the limits refuse; the last ones see what was admitted.
        hooks: list[Hook | None] = [
            *(self.metrics, self.objectives, self.tracing, self.keys),
            *(view, self.usage, self.traffic),
        ]
        page = Page(
            self.metrics,
            self.health,
            list if view is None else view.replicas,
            str if view is None else view.release,
            list if self.objectives is None else self.objectives.budgets,
        )
        own = [] if view is None else view.routes()
        self.extensions = Extensions(
            routers=[APIRouter(routes=[self.metrics.route(), *self.health.routes(), *page.routes(), *own])],
            middleware=[
                Middleware(HttpMetrics, metrics=self.metrics),
                *([_cors(settings.cors_origins)] if settings.cors_origins else []),
                *([Middleware(TraceContext)] if self.tracing else []),
                Middleware(RequireKey, keys=self.keys),
            ],
            hooks=[hook for hook in hooks if hook is not None],
            attach=self._attach,
            malformed=self.metrics.malformed,
        )

    def close(self) -> None:
        """Write what is still in memory, and give back what was leased. No call may be running."""
        for writer in (self.shared, self.usage, self.traffic, self.tracing):
            if writer is not None:
                writer.close()

    def _attach(self, service: Service) -> None:
        self._service = service
        if self.shared is not None:
            self.shared.begin()

    def _decode(self, tokens: Sequence[int]) -> str:
        assert self._service is not None, "no call can end before there is a service"
        return self._service.text.decode(tokens)


def _cors(origins: Sequence[str]) -> Middleware:
    """Answers preflights, which have no key, and names the origins in every other response."""
    return Middleware(
        CORSMiddleware,
        allow_origins=origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=SHOWN_HEADERS,
    )
