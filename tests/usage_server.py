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
from uuid import uuid4

from runtime.gateway.accounts import usage as module
from runtime.gateway.protocol.calls import Call, Caller
from runtime.gateway.protocol.errors import ApiError


def main(url: str, journal: str, notes: str, seed: str) -> None:
    module.PROGRESS_SECONDS, module.ROLL_BYTES, draw = 0.02, 20_000, random.Random(seed)
    usage = module.Usage(url, Path(journal))
    file = os.open(notes, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    running: list[Call] = []
    while True:
        prompt = draw.randint(1, 99)
        call = Call(uuid4().hex, "r", "chat", "m", "b", Caller("k", "t"), False, [[1] * prompt], 1, 99)
        usage.admit(call)
        os.write(file, f"A {call.id} {prompt}\n".encode())
        running.append(call)
        for other in running:
            usage.tokens(other, 0, 1, 0.0)
            other.completion_tokens += 1
        if len(running) > 8:
            call = running.pop(draw.randrange(len(running)))
            call.end, call.finish_reasons[0] = time.monotonic(), "stop"
            call.error = ApiError(429, "full") if draw.random() < 0.1 else None
            usage.ended(call)
            os.write(file, f"{'D' if call.error else 'E'} {call.id} {call.completion_tokens}\n".encode())
        time.sleep(0.001)


if __name__ == "__main__":
    main(*sys.argv[1:])
