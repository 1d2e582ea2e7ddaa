"""An engine that runs in a process of the server's own."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from time import monotonic

from runtime.gateway.engines.connection import EngineConnection
from runtime.gateway.engines.reopening import CLOSE_SECONDS, ReopeningClient
from runtime.wire.limits import Limits
from runtime.wire.messages import Close
from runtime.wire.start import EngineSettings, Start
from tapeout.cores import usable

WORKER = "runtime.engine.worker"  # the module that the process runs


class ProcessClient(ReopeningClient["EngineProcess"]):
    """The process is started at once, so that it opens the bundle (a folder) while a server imports.

    ``worker``: a module that is run with a descriptor and a :class:`Start`, see :func:`runtime.engine.worker.main`.
    """

    def __init__(
        self,
        bundle: str,
        settings: EngineSettings | None = None,
        limits: Limits | None = None,
        *,
        worker: str = WORKER,
        quiet_seconds: float = 5.0,
        stuck_seconds: float = 30.0,
        open_seconds: float = 300.0,
    ) -> None:
        self._limits, self._cores, self._worker = limits or Limits(), usable(), worker
        self._settings, self._paused = settings or EngineSettings(), False
        super().__init__(
            self.start(bundle, None),
            quiet_seconds=quiet_seconds,
            stuck_seconds=stuck_seconds,
            open_seconds=open_seconds,
        )

    def start(self, bundle: str, settings: EngineSettings | None) -> EngineProcess:
        return EngineProcess(Start(bundle, settings or self._settings, self._limits, self._cores), self._worker)

    def replaced(self, old: EngineProcess) -> None:
        self._settings = self._current.settings
        if self._paused:
            self._current.pause()
            old.resume()  # its requests end

    def pause(self) -> None:
        """Stop the engine's process until :meth:`resume`; requests wait meanwhile. While it opens it is not stopped."""
        self._paused = True
        self._current.pause()

    def resume(self) -> None:
        self._paused = False
        self._current.resume()


class EngineProcess(EngineConnection):
    """One process and its requests. It is started by the constructor."""

    remedy = "retry in a few seconds: it is started again"

    def __init__(self, start: Start, worker: str) -> None:
        super().__init__("the engine's process", start.bundle)
        self.settings = start.settings
        self._paused = False
        self._socket, theirs = socket.socketpair()
        with theirs:
            descriptor = theirs.fileno()
            # Not by multiprocessing: its child would import the server's main module again.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", worker, str(descriptor), start.encode()],
                pass_fds=[descriptor],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )

    @property
    def silent_seconds(self) -> float:
        """0 while it is paused."""
        return 0.0 if self._paused else super().silent_seconds

    def pause(self) -> None:
        if self.serves and not self._paused:  # one that is being opened has a time limit
            self._paused = True
            self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        if self._paused:
            self._paused, self._reported_at = False, monotonic()
            self._process.send_signal(signal.SIGCONT)

    async def connect(self) -> None:
        await asyncio.get_running_loop().create_connection(lambda: self, sock=self._socket)

    async def files(self) -> Path:
        return Path(self.bundle)

    def fail(self, why: str) -> None:
        if not self.down:
            self._process.kill()
        super().fail(why)

    async def close(self) -> None:
        """End the process; its requests are lost."""
        self._closing = True
        self.resume()
        if self.serves:
            self.send(Close())
        else:
            self._process.kill()
        try:
            await asyncio.to_thread(self._process.wait, CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
        self.fail("was closed")
        self._socket.close()
