"""What operators need around the API, put together: metrics, health, keys, usage records and the live page.

operations = Operations(client, "smollm2", OperationsSettings(api_keys=("secret",)))
service = Service(client, …, hooks=operations.hooks)
app = create_app(service, routers=[operations.router], middleware=operations.middleware)
…                                   # on SIGTERM: operations.health.draining = True
operations.close()                  # when the last call has ended
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fastapi import APIRouter
from starlette.middleware import Middleware

from runtime.client import EngineClient
from runtime.server.calls import Hook
from runtime.server.health import Health
from runtime.server.keys import Keys, RequireKey
from runtime.server.metrics import HttpMetrics, Metrics
from runtime.server.page import Page
from runtime.server.usage import Usage


@dataclass(frozen=True)
class OperationsSettings:
    """``usage_database`` None: no usage records, so budgets start at 0 with the server.

    ``read_bandwidth``: bytes per second, if it was measured (:class:`runtime.server.metrics.Metrics`).
    """

    api_keys: tuple[str, ...] = ()
    keys_file: Path | None = None
    usage_database: str | None = None  # an SQLAlchemy URL
    usage_journal: Path = Path("usage.journal")
    read_bandwidth: float | None = None


class Operations:
    """``hooks``, ``router`` and ``middleware``: for the service and its application."""

    def __init__(self, client: EngineClient, model: str, settings: OperationsSettings) -> None:
        self.metrics = Metrics(client, model, read_bandwidth=settings.read_bandwidth)
        self.health = Health(client)
        self.usage = Usage(settings.usage_database, settings.usage_journal) if settings.usage_database else None
        used = self.usage.tokens_by_key() if self.usage else {}
        self.keys = Keys(settings.api_keys, settings.keys_file, used=used)
        # Metrics come first and count what the others refuse; usage records come last and count what was admitted.
        self.hooks: tuple[Hook, ...] = (self.metrics, self.keys, *([self.usage] if self.usage else []))
        page = Page(self.metrics, self.health)
        self.router = APIRouter(routes=[self.metrics.route(), *self.health.routes(), *page.routes()])
        self.middleware = (Middleware(HttpMetrics, metrics=self.metrics), Middleware(RequireKey, keys=self.keys))

    def close(self) -> None:
        """Write what is still in memory. No call may be running."""
        if self.usage is not None:
            self.usage.close()
