"""How a server talks to an engine that runs in a process of its own."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Protocol

from runtime.messages import Delta, EngineInfo, EngineStats, GenerateRequest
from tapeout.errors import TapeoutError


class EngineDownError(TapeoutError):
    """The engine's process has ended or does not answer; it is started again, and a later request may succeed."""


class EngineClient(Protocol):
    @property
    def info(self) -> EngineInfo: ...

    @property
    def stats(self) -> EngineStats:
        """Of the last report."""
        ...

    @property
    def ready(self) -> bool:
        """The engine takes requests: it is open, and neither draining nor being started again."""
        ...

    @property
    def healthy(self) -> bool:
        """The engine's process lives, and has made progress within the last seconds or has nothing to do."""
        ...

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta]:
        """The deltas of a request, up to the one with a finish reason. Closing the iterator cancels the request.

        :class:`RequestError` for a request that can never run, :class:`runtime.scheduler.QueueFullError` without room
        in the queue, :class:`EngineDownError` if the engine ends meanwhile.
        """
        ...

    async def swap(self, folder: Path) -> None:
        """Open another bundle, give it all new requests, and close the old engine once its requests have ended."""
        ...

    async def drain(self, timeout: float) -> None:
        """Take no more requests, and wait until the running ones have ended; after ``timeout`` seconds cancel them."""
        ...

    async def close(self) -> None: ...
