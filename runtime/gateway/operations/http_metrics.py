"""Counts and times HTTP requests."""

from __future__ import annotations

import time
from collections.abc import Sequence

from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.gateway.operations.metrics import Metrics


class HttpMetrics:
    """ASGI middleware: counts HTTP requests by route, method and class of status, and times them to their last byte.

    ``handler`` comes from the routes, so clients cannot make new series.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status = time.monotonic(), 500

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watch)
        finally:
            handler = handler_of(scope)
            method = scope["method"] if scope["method"] in METHODS else "other"
            self._metrics.http_requests.labels(handler, method, f"{status // 100}xx").inc()
            self._metrics.http_seconds.labels(handler, method).observe(time.monotonic() - started)


def handler_of(scope: Scope) -> str:
    """The path of the route that has matched, with its parameters' names; ``none`` where no route has.

    A request can name any path, so a label is made of none.
    """
    routes: Sequence[BaseRoute] = scope["app"].routes if "endpoint" in scope else ()
    found = (r.path_format for r in routes if isinstance(r, Route) and r.endpoint is scope["endpoint"])
    return next(found, "none")


METHODS = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"})
