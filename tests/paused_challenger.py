"""A server whose challenger is stopped: prints the challenger's process id, and waits to be killed."""

from __future__ import annotations

import asyncio

import psutil

from runtime.gateway.engines.local import ProcessClient
from runtime.wire.start import EngineSettings
from tests.faulty_engine import WORKER, Faulty


async def main() -> None:
    client = ProcessClient(str(Faulty()), EngineSettings(background=True), worker=WORKER)
    await client.open()
    client.pause()
    (challenger,) = psutil.Process().children()
    while challenger.status() != psutil.STATUS_STOPPED:
        await asyncio.sleep(0.01)
    print(challenger.pid, flush=True)
    await asyncio.sleep(600)


if __name__ == "__main__":
    asyncio.run(main())
