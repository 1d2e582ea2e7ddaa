"""Waiting for what several tasks look at, without a lock."""

from __future__ import annotations

import asyncio
from contextlib import suppress


class Change:
    """Wakes all that wait for it whenever something may be otherwise; they look again then."""

    def __init__(self) -> None:
        self._event = asyncio.Event()  # replaced by another one each time

    def notify(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, seconds: float | None = None) -> None:
        """Until the next change, and no longer than so many seconds. Whoever waits has looked just before."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._event.wait(), seconds)
