"""How long the machine holds up a program that needs nothing but a core: what no server on it can be better than.

A process on each core reads the clock in a loop. The longest time between two readings is a pause: of the hypervisor,
of the kernel, or of another process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from time import monotonic

from tapeout.errors import EvidenceError

MORE_SECONDS = 60.0  # that a loop may take to start and to end


def longest_pause_ms(seconds: float) -> float:
    """The longest pause on any core that this process may use, while a loop runs on each for ``seconds``."""
    words = [sys.executable, "-c", f"from {__name__} import main; main()", str(seconds)]
    loops = [
        subprocess.Popen([*words, str(core)], stdout=subprocess.PIPE, text=True)
        for core in sorted(os.sched_getaffinity(0))
    ]
    found: list[float] = []
    for loop in loops:
        said, _ = loop.communicate(timeout=seconds + MORE_SECONDS)
        if loop.returncode:
            raise EvidenceError(f"a loop that reads the clock ended with exit code {loop.returncode}")
        found.append(float(said))
    return max(found)


def main(words: Sequence[str] | None = None) -> None:
    """Print the longest pause on one core, in milliseconds. Arguments: seconds, core."""
    seconds, core = words or sys.argv[1:]
    os.sched_setaffinity(0, {int(core)})
    before = monotonic()
    end, longest = before + float(seconds), 0.0
    while before < end:
        now = monotonic()
        if now - before > longest:
            longest = now - before
        before = now
    print(1000 * longest)
