"""The live page at ``/``, and the numbers that it asks for at ``/live``.

The page is one file without external resources. Its content security policy lets only its own script and styles run,
so nothing that a model says can become code.
"""

from __future__ import annotations

import base64
import hashlib
import re
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from runtime.gateway.http.sse import JsonResponse
from runtime.gateway.operations.engine_metrics import bandwidth_share, kv_usage, resident_share
from runtime.gateway.operations.health import Health
from runtime.gateway.operations.metrics import Metrics

PERCENTS = (50, 90, 99)
SPEED_SECONDS = 10.0  # tokens per second: over the last so many
FORGET_SECONDS = 60.0  # if nobody has looked for so long, the speed is not known
SHOWN_CALLS = 20


class _Look(NamedTuple):
    at: float
    generated_tokens: int


class Page:
    """Mount :meth:`routes`. The numbers are those of all calls: no text, and no key.

    ``replicas``, ``release``: of several engines, see :class:`runtime.gateway.operations.fleet.FleetView`.
    ``budgets``: of objectives, as :meth:`runtime.gateway.operations.objectives.ObjectiveEvents.budgets`.
    """

    def __init__(
        self,
        metrics: Metrics,
        health: Health,
        replicas: Callable[[], list[dict[str, Any]]] = list,
        release: Callable[[], str] = str,
        budgets: Callable[[], list[dict[str, Any]]] = list,
    ) -> None:
        self._metrics, self._health = metrics, health
        self._replicas, self._release, self._budgets = replicas, release, budgets
        self._html = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
        self._looks: deque[_Look] = deque()

    def routes(self) -> list[Route]:
        """``GET /`` and ``GET /live``."""
        headers = {
            "Content-Security-Policy": policy(self._html),
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-cache",
        }

        async def page(_: Request) -> Response:
            return HTMLResponse(self._html, headers=headers)

        async def live(_: Request) -> Response:
            return JsonResponse(self.live(), headers={"Cache-Control": "no-store"})

        return [Route("/", page), Route("/live", live)]

    def live(self) -> dict[str, Any]:
        """Times are seconds, shares 0 to 1; None for what is not known yet."""
        metrics, now = self._metrics, time.monotonic()
        client = metrics.client
        stats, info, counted = client.stats, client.info, metrics.engine_counters()
        bandwidth = metrics.read_bandwidth
        return {
            "model": metrics.model,
            "bundle": info.digest,
            "target": info.name,
            "max_tokens": info.max_tokens,
            "reason": self._health.not_ready(),
            "ttft": dict(zip(map(str, PERCENTS), metrics.ttft_window.percentiles(PERCENTS, now), strict=True)),
            "inter_token": dict(
                zip(map(str, PERCENTS), metrics.inter_token_window.percentiles(PERCENTS, now), strict=True)
            ),
            "tokens_per_second": self._speed(now),
            "running": stats.running,
            "waiting": stats.waiting,
            "step_requests": stats.step_requests if stats.running else 0,
            "step_tokens": stats.step_tokens,
            "step_seconds": stats.step_seconds,
            "bandwidth_share": bandwidth_share(stats, info, bandwidth) if bandwidth else None,
            "kv_usage": kv_usage(stats),
            "blocks": stats.blocks,
            "blocks_held": stats.blocks_held,
            "blocks_cached": stats.blocks_cached,
            "slots": stats.slots,
            "slots_held": stats.slots_held,
            "slots_cached": stats.slots_cached,
            "slot_bytes": info.slot_bytes,
            "mapped_bytes": info.mapped_bytes,
            "resident_share": resident_share(stats),
            "page_faults": counted["page_faults"],
            "prefix_queries": counted["prefix_queries"],
            "prefix_hits": counted["prefix_hits"],
            "drafted_tokens": counted["drafted_tokens"],
            "accepted_tokens": counted["accepted_tokens"],
            "replicas": self._replicas(),
            "release": self._release(),
            "slo": self._budgets(),
            "recent": [call._asdict() for call in list(metrics.recent)[: -SHOWN_CALLS - 1 : -1]],
        }

    def _speed(self, now: float) -> float | None:
        """Output tokens per second, from what was counted when somebody last looked."""
        looks, generated = self._looks, self._metrics.generated_tokens
        while looks and looks[0].at < now - FORGET_SECONDS:
            looks.popleft()
        while len(looks) > 1 and looks[1].at < now - SPEED_SECONDS:
            looks.popleft()
        first = looks[0] if looks else None
        if not looks or looks[-1].at < now - 0.5:
            looks.append(_Look(now, generated))
        if first is None or now - first.at < 0.1:
            return None
        return (generated - first.generated_tokens) / (now - first.at)


def policy(html: str) -> str:
    """A content security policy that allows the page's own script and styles by their sha256."""

    def allowed(tag: str) -> str:
        found = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(t.encode()).digest()).decode()}'" for t in found)

    return (
        f"default-src 'none'; script-src {allowed('script')}; style-src {allowed('style')}; img-src data:; "
        "connect-src 'self'; form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
    )
