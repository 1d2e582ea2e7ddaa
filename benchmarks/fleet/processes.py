"""Engines in processes of their own, and a gateway's client of them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from time import monotonic

from runtime.gateway.engines.client import EngineDownError
from runtime.gateway.engines.remote import RemoteEngine
from runtime.gateway.fleet.client import FleetClient
from runtime.gateway.fleet.discovery import FromFile
from runtime.gateway.fleet.replica import Patience

KEY = b"k" * 32
OPEN_SECONDS = 60.0


class EngineProcess:
    """``tapeout engine`` with one thread, at ``address``. It is started at once, and opens while others do."""

    def __init__(self, bundle: Path, address: str) -> None:
        options = ["--unsafe", "--threads", "1", "--draft-tokens", "0", "--listen", address]
        self._command = [sys.executable, "-m", "pipeline.cli", "engine", str(bundle), *options]
        self.address = address
        self.process = subprocess.Popen(self._command)

    def again(self) -> None:
        self.process.wait()
        self.process = subprocess.Popen(self._command)


@contextmanager
def engine_processes(bundle: Path, folder: Path, engines: int) -> Generator[list[EngineProcess]]:
    """At Unix sockets in ``folder``, while they are needed."""
    found = [EngineProcess(bundle, f"unix:{folder}/engine{number}") for number in range(engines)]
    try:
        yield found
    finally:
        for engine in found:
            engine.process.kill()  # also one that stands still
        for engine in found:
            engine.process.wait()


def write_list(path: Path, addresses: Sequence[str], key: bytes = b"") -> None:
    """The file of a fleet."""
    text = "engines:\n" + "".join(f"  - {address}\n" for address in addresses)
    if key:
        path.with_suffix(".key").write_bytes(key)
        text += f"key: {path.stem}.key\n"
    path.write_text(text)


@asynccontextmanager
async def fleet_client(
    folder: Path, addresses: Sequence[str], key: bytes = b"", patience: Patience | None = None
) -> AsyncGenerator[FleetClient]:
    """Once all of these engines are ready."""
    path = folder / "fleet.yaml"
    write_list(path, addresses, key)
    client = FleetClient(FromFile(path), folder / "cache", patience=patience)
    try:
        await client.open()
        while len(ready(client)) < len(addresses):
            await asyncio.sleep(0.01)
        yield client
    finally:
        await client.close()


def ready(client: FleetClient) -> list[str]:
    """Addresses of engines that take requests."""
    return [status.address for status in client.statuses() if status.state.value == "ready"]


@asynccontextmanager
async def connection(address: str, folder: Path, key: bytes = b"") -> AsyncGenerator[RemoteEngine]:
    """To one engine, as soon as it is open."""
    until = monotonic() + OPEN_SECONDS
    while True:
        found = RemoteEngine(address, key, folder / "cache")
        try:
            await found.open(OPEN_SECONDS)
            break
        except EngineDownError:
            await found.close()
            if monotonic() > until:
                raise
            await asyncio.sleep(0.1)
    try:
        yield found
    finally:
        await found.close()


def processor_seconds(pid: int) -> float:
    """That a process has used so far, to the nanosecond: its clock, by the number that Linux gives it."""
    return time.clock_gettime_ns((~pid << 3) | 2) / 1e9
