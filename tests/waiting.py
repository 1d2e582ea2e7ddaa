"""Waits for what other threads and processes do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

LONGEST_PAUSE = 0.03  # seconds; a look that asks a server takes processor time from what is waited for


def wait_for(holds: Callable[[], bool], seconds: float = 120) -> None:
    begun = time.monotonic()
    while not holds():
        waited = time.monotonic() - begun
        assert waited < seconds, "it did not happen"
        time.sleep(min(0.005 + waited / 10, LONGEST_PAUSE))


async def until(holds: Callable[[], bool], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not happen"
        await asyncio.sleep(0.01)
