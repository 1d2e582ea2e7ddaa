"""OpenVINO GenAI's continuous batching behind a thin HTTP server, which only does what the client asks for.

It runs inside the peer's environment, so it imports only the standard library, numpy and OpenVINO. One thread steps the
pipeline; the event loop reads requests and writes events. JSON and text are made with as little work as possible, so
that the figures are those of the engine.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import asyncio
import json
import threading
from pathlib import Path
from queue import SimpleQueue
from typing import Any

CACHE_GB = 2
Add = tuple[dict[str, Any], "asyncio.Queue[tuple[str, int] | None]"]


class Engine:
    """Runs the pipeline in a thread. Each request gets (text, tokens so far) for new tokens, and None at its end."""

    def __init__(self, folder: Path, threads: int, loop: asyncio.AbstractEventLoop) -> None:
        import numpy as np
        import openvino as ov
        import openvino_genai as genai

        self._np, self._ov, self._genai, self._loop = np, ov, genai, loop
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = CACHE_GB
        scheduler.enable_prefix_caching = True
        self._pipeline: Any = genai.ContinuousBatchingPipeline(
            str(folder), scheduler, "CPU", {"INFERENCE_NUM_THREADS": threads}
        )
        self._tokenizer: Any = self._pipeline.get_tokenizer()
        self._added: SimpleQueue[Add] = SimpleQueue()
        self._number = 0
        threading.Thread(target=self._run, daemon=True).start()

    def add(self, body: dict[str, Any]) -> asyncio.Queue[tuple[str, int] | None]:
        queue: asyncio.Queue[tuple[str, int] | None] = asyncio.Queue()
        self._added.put((body, queue))
        return queue

    def _run(self) -> None:
        running: list[list[Any]] = []  # handle, queue, tokens so far
        while True:
            while not running or not self._added.empty():
                body, queue = self._added.get()
                running.append([self._start(body), queue, 0])
            self._pipeline.step()
            told: list[tuple[asyncio.Queue[tuple[str, int] | None], tuple[str, int] | None]] = []
            for entry in running:
                handle, queue, _ = entry
                if handle.can_read():
                    for output in handle.read().values():
                        entry[2] += len(output.generated_ids)
                        told.append((queue, (self._tokenizer.decode(list(output.generated_ids)) or " ", entry[2])))
                if handle.get_status() != self._genai.GenerationStatus.RUNNING:
                    told.append((queue, None))
                    entry[0] = None
            running = [entry for entry in running if entry[0] is not None]
            if told:
                self._loop.call_soon_threadsafe(self._tell, told)

    def _start(self, body: dict[str, Any]) -> Any:
        config = self._genai.GenerationConfig()
        config.max_new_tokens = body["max_tokens"]
        config.do_sample = False
        config.ignore_eos = bool(body.get("ignore_eos"))
        self._number += 1
        ids = self._ov.Tensor(self._np.asarray([body["prompt"]], self._np.int64))
        return self._pipeline.add_request(self._number, ids, config)

    @staticmethod
    def _tell(told: list[tuple[asyncio.Queue[tuple[str, int] | None], tuple[str, int] | None]]) -> None:
        for queue, message in told:
            queue.put_nowait(message)


async def answer(engine: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Requests of one connection, one after the other, until the client closes it or asks to. Only POST /v1/completions
    with "stream" is understood.
    """
    try:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            size = next(int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"content-length:"))
            queue = engine.add(json.loads(await reader.readexactly(size)))
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
            count = 0
            while (message := await queue.get()) is not None:
                text, count = message
                _event(writer, {"choices": [{"index": 0, "text": text}]})
            _event(writer, {"choices": [], "usage": {"completion_tokens": count}})
            data = b"data: [DONE]\n\n"
            writer.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data))
            await writer.drain()
            if b"\r\nconnection: close\r\n" in head:
                return
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


def _event(writer: asyncio.StreamWriter, event: dict[str, Any]) -> None:
    data = b"data: " + json.dumps(event).encode() + b"\n\n"
    writer.write(b"%x\r\n%b\r\n" % (len(data), data))


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()
    engine = Engine(options.folder, options.threads, asyncio.get_running_loop())
    server = await asyncio.start_server(lambda r, w: answer(engine, r, w), "127.0.0.1", options.port, limit=1 << 20)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
