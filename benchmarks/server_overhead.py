"""What the HTTP side of the server costs for each token: processor time of its process, with an engine that costs none.

    python -m benchmarks.server_overhead BUNDLE

The server runs in a process of its own. Every ``1 / steps`` seconds its engine client has one token for each stream,
as a step of an engine would; a second process reads all streams. Only the tokenizer of the bundle is used.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import socket
import sys
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import psutil

STREAMS, STEPS, SECONDS = 16, 75, 10
TOKENS = STEPS * SECONDS


class FreeEngine:
    """A :class:`runtime.gateway.engines.client.EngineClient` whose steps cost nothing: it repeats a text's tokens."""

    def __init__(self, digest: str, vocab_size: int) -> None:
        from runtime.gateway.engines.unread import Unread
        from runtime.wire.messages import EngineInfo, EngineStats

        self.unread = Unread()
        self.info = EngineInfo(digest, "free", 1 << 20, vocab_size, 64, 1 << 20, 1, 1, frozenset())
        self.stats, self.ready, self.healthy, self.silent_seconds = EngineStats(), True, True, 0.0
        self.tokens: list[int] = []
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self._clock: asyncio.Task[None] | None = None

    async def open(self, opened: Any = None) -> None: ...

    def level_of(self, id: str) -> str:
        return ""

    def info_for(self, opening: bytes) -> Any:
        return self.info

    @property
    def bundles(self) -> dict[str, Any]:
        return {self.info.digest: self.info}

    async def generate(
        self, request: Any, age: float = 0.0, session: str = "", digest: str = ""
    ) -> AsyncGenerator[Any]:
        from runtime.wire.messages import Delta

        if self._clock is None:
            self._clock = asyncio.create_task(self._run())
        loop = asyncio.get_running_loop()
        for number in range(1, request.max_new_tokens + 1):
            self._waiting[request.id] = loop.create_future()
            await self._waiting[request.id]
            token = self.tokens[number % len(self.tokens)]
            yield Delta(request.id, (token,), finish_reason="length" if number == request.max_new_tokens else None)

    async def _run(self) -> None:
        due = time.monotonic()
        while True:
            due += 1 / STEPS
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            waiting, self._waiting = self._waiting, {}
            for future in waiting.values():
                if not future.done():
                    future.set_result(None)

    async def files(self) -> Path:
        return Path()

    async def swap(self, bundle: str, settings: Any = None) -> None: ...

    async def drain(self, timeout: float) -> None: ...

    async def close(self) -> None: ...


def server(folder: Path, listener: socket.socket) -> None:
    import uvicorn

    from engines.bundle import EngineBundle
    from runtime.gateway.http.app import create_app
    from runtime.gateway.http.service import Service
    from runtime.gateway.text.model import TextModel
    from tapeout import artifact

    bundle = artifact.load_record(folder, EngineBundle)
    client = FreeEngine(bundle.digest, bundle.record.io.vocab_size)
    text = TextModel.load(folder, client.info)
    client.tokens = text.tokenizer.encode("The quick brown fox jumps over the lazy dog, and then some. " * 4).ids
    app = create_app(Service(client, {text.digest: text}, ("m",)))
    config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", http="httptools", loop="uvloop")
    uvicorn.Server(config).run(sockets=[listener])


async def read(port: int, path: str, body: dict[str, Any]) -> int:
    """Number of events of one stream."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    content = json.dumps(body).encode()
    writer.write(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content)
    events = 0
    while (line := await reader.readline()) and line != b"data: [DONE]\n":
        events += line.startswith(b"data: ")
    writer.close()
    return events


async def measure(port: int, process: psutil.Process, path: str, body: dict[str, Any]) -> float:
    """Microseconds of processor time for each token of each stream."""
    before = process.cpu_times()
    ask = body | {"max_tokens": TOKENS, "stream": True, "temperature": 0}
    events = await asyncio.gather(*[read(port, path, ask) for _ in range(STREAMS)])
    after = process.cpu_times()
    assert min(events) >= TOKENS
    return (after.user + after.system - before.user - before.system) / (STREAMS * TOKENS) * 1e6


def main() -> None:
    context = multiprocessing.get_context("spawn")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        running = context.Process(target=server, args=[Path(sys.argv[1]), listener], daemon=True)
        running.start()
    process = psutil.Process(running.pid)
    talk = [{"role": "user", "content": "Hi"}]
    cases: dict[str, tuple[str, dict[str, Any]]] = {
        "completions": ("/v1/completions", {"prompt": "Hi"}),
        "chat": ("/v1/chat/completions", {"messages": talk}),
        "chat, usage in every chunk": (
            "/v1/chat/completions",
            {"messages": talk, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        ),
        "chat, four stop strings": (
            "/v1/chat/completions",
            {"messages": talk, "stop": ["abc", "xyz", "\n\n\n", "###"]},
        ),
    }
    print(f"{STREAMS} streams at {STEPS} steps/s; microseconds of processor time per token")
    asyncio.run(measure(port, process, "/v1/completions", {"prompt": "warm up"}))
    for name, (path, body) in cases.items():
        print(f"{name:28} {asyncio.run(measure(port, process, path, body)):6.1f}", flush=True)
    running.terminate()


if __name__ == "__main__":
    main()
