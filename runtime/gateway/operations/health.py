"""``/health``: is the server to be restarted? ``/ready``: is it to get requests?"""

from __future__ import annotations

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from runtime.gateway.engines.client import EngineClient


class Health:
    """``draining``: the server was told to stop. ``limited``: limits that others know, too, can be looked up.
    ``uncounted``: why usage cannot be recorded, so that requests are refused; empty where it can. ``away``: why no
    request is taken while no engine is ready.
    """

    def __init__(
        self,
        client: EngineClient,
        draining: Callable[[], bool],
        limited: Callable[[], bool] = lambda: True,
        uncounted: Callable[[], str] = lambda: "",
        away: Callable[[], str] = lambda: "the engine is being started again",
    ) -> None:
        self._client, self._draining, self._limited, self._away = client, draining, limited, away
        self._uncounted = uncounted

    def unhealthy(self) -> str | None:
        """Why the server should be restarted, unless the engine is healthy again soon."""
        if self._client.healthy:
            return None
        stats, seconds = self._client.stats, self._client.silent_seconds
        silent = "yet" if seconds is None else f"for {seconds:.0f} seconds"
        return f"the engine has not reported {silent}; {stats.running} requests run, {stats.waiting} wait"

    def not_ready(self) -> str | None:
        """Why a load balancer should send requests elsewhere."""
        if self._draining():
            return "the server is draining"
        if unhealthy := self.unhealthy():
            return unhealthy
        if not self._client.ready:
            return self._away()
        if uncounted := self._uncounted():
            return f"usage records cannot be written: {uncounted}"
        return None if self._limited() else "the database of the limits has not answered since this server started"

    def routes(self) -> list[Route]:
        """``GET /health`` and ``GET /ready``: 200, or 503 with the reason."""

        async def health(_: Request) -> Response:
            return _answer(self.unhealthy())

        async def ready(_: Request) -> Response:
            return _answer(self.not_ready())

        return [Route("/health", health), Route("/ready", ready)]


def _answer(reason: str | None) -> Response:
    if reason is None:
        return JSONResponse({"status": "ok"})
    return JSONResponse({"status": "unavailable", "reason": reason}, 503, {"Retry-After": "1"})
