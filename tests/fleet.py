"""A fleet for tests: listening engines in processes of their own, and a client of all of them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from runtime.gateway.fleet.client import FleetClient
from runtime.gateway.fleet.discovery import FromFile
from runtime.gateway.fleet.replica import Patience
from runtime.gateway.routing.choice import EngineOption, ranked
from tests.forked_engines import ForkedEngine
from tests.listening_engine import ListeningEngine

# A machine that also does other things may let a sound engine be silent for a while.
PATIENCE = Patience(suspect=1.0, stuck=5.0, open=20.0, wait=20.0)


def write_list(folder: Path, addresses: Sequence[str]) -> Path:
    """The file of a fleet; the key is that of :class:`ListeningEngine`."""
    path = folder / "fleet.yaml"
    text = "engines:\n" + "".join(f"  - {address}\n" for address in addresses) + "key: key\n"
    path.with_suffix(".part").write_text(text)
    path.with_suffix(".part").replace(path)
    return path


def session_at(address: str, addresses: Sequence[str]) -> str:
    """A session whose requests go to this engine, while all are equally good."""
    options = [EngineOption(engine, 0.0, 1) for engine in addresses]
    return next(name for name in map(str, range(1000)) if ranked(options, name.encode())[0].engine == address)


@asynccontextmanager
async def connected(
    folder: Path, engines: Sequence[ListeningEngine | ForkedEngine], patience: Patience = PATIENCE
) -> AsyncGenerator[FleetClient]:
    listed = write_list(folder, [engine.address for engine in engines])
    client = FleetClient(FromFile(listed), folder / "cache", patience=patience)
    try:
        await client.open()
        yield client
    finally:
        await client.close()
