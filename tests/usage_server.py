"""A process that admits and ends requests as fast as it can until it is killed, and notes what it has promised.

    python -m tests.usage_server DATABASE JOURNAL NOTES SEED

A note is written after the call it is about: ``A ID PROMPT`` for an admitted request, ``E ID TOKENS`` for an ended one.
"""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path

from runtime.server import usage as module


def main(url: str, journal: str, notes: str, seed: str) -> None:
    module.PROGRESS_SECONDS, module.ROLL_BYTES, draw = 0.02, 20_000, random.Random(seed)
    usage = module.Usage(url, Path(journal))
    file = os.open(notes, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    running: list[module.OpenRequest] = []
    while True:
        prompt = draw.randint(1, 99)
        request = usage.begin("r", key="k", tenant="t", model="m", bundle="b", endpoint="chat", prompt_tokens=prompt)
        os.write(file, f"A {request.record.id} {prompt}\n".encode())
        running.append(request)
        for other in running:
            other.completion_tokens += 1
        if len(running) > 8:
            request = running.pop(draw.randrange(len(running)))
            if draw.random() < 0.1:
                request.discard()
                os.write(file, f"D {request.record.id} 0\n".encode())
            else:
                request.end("stop", cached_tokens=0, completion_tokens=request.completion_tokens)
                os.write(file, f"E {request.record.id} {request.completion_tokens}\n".encode())
        time.sleep(0.001)


if __name__ == "__main__":
    main(*sys.argv[1:])
