"""``GET /verdict/NAME/VERSION`` for Argo Rollouts and dashboards, and ``POST`` for webhooks of Flagger.

Argo reads the outcome from the body, and takes any status but 2xx for an error of the measurement. Flagger reads the
status alone. So ``GET`` answers 200 whatever the outcome, and ``POST …?outcome=FAIL`` answers 200 if that is the
outcome and 409 if it is another. VERSION is a number or an alias.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from evals.check import Outcome
from pipeline.registry import serving
from pipeline.registry.versions import UnknownVersionError
from runtime.gateway.protocol.errors import ApiError
from tapeout.errors import RegistryError, one_line

KEPT_SECONDS = 30.0  # looking up takes a process of its own and seconds; controllers ask again and again
KEPT = 64

Key = tuple[str, str]


class Verdicts:
    """Looks up one verdict at a time, and keeps each answer for ``KEPT_SECONDS``."""

    def __init__(self) -> None:
        self._kept: dict[Key, tuple[float, dict[str, Any]]] = {}
        self._lock = asyncio.Lock()

    def routes(self) -> list[Route]:
        path = "/verdict/{name}/{version}"
        return [Route(path, self._get, methods=["GET"]), Route(path, self._post, methods=["POST"])]

    async def _get(self, request: Request) -> Response:
        return JSONResponse(await self._find(request))

    async def _post(self, request: Request) -> Response:
        asked = request.query_params.get("outcome", Outcome.PASS.value)
        if asked not in Outcome.__members__:
            raise ApiError(400, f"outcome is {asked!r}; expected: {', '.join(Outcome)}", param="outcome")
        found = await self._find(request)
        return JSONResponse(found, 200 if found["outcome"] == asked else 409)

    async def _find(self, request: Request) -> dict[str, Any]:
        key = (request.path_params["name"], request.path_params["version"])
        async with self._lock:
            now = time.monotonic()
            self._kept = {kept: entry for kept, entry in self._kept.items() if entry[0] > now}
            if key in self._kept:
                return self._kept[key][1]
            try:
                found = await serving.ask("pipeline.registry.verdicts", *key)
            except UnknownVersionError as error:
                raise ApiError(404, one_line(error), code="version_not_found") from error
            except RegistryError as error:
                raise ApiError(503, one_line(error), code="registry_unavailable") from error
            if len(self._kept) < KEPT:
                self._kept[key] = (time.monotonic() + KEPT_SECONDS, found)
            return found
