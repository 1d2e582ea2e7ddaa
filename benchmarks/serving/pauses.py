"""How long the machine holds up a program that needs nothing but a core.

A process on each core reads the clock in a loop. The longest time between two readings is a pause: of the hypervisor,
of the kernel, or of another process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from time import monotonic, sleep

from benchmarks.peers.process import ROOT
from tapeout.errors import EvidenceError

START_SECONDS = 1.0  # until all loops begin: else one that starts would hold up another
MORE_SECONDS = 60.0  # that a loop may take to end


def longest_pause_ms(seconds: float) -> float:
    """The longest pause on any core that this process may use, while a loop runs on each for ``seconds``."""
    begin = monotonic() + START_SECONDS
    words = [sys.executable, "-m", __name__, str(begin), str(seconds)]
    loops = [
        subprocess.Popen([*words, str(core)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for core in sorted(os.sched_getaffinity(0))
    ]
    try:
        said = [loop.communicate(timeout=START_SECONDS + seconds + MORE_SECONDS)[0] for loop in loops]
    except subprocess.TimeoutExpired as error:
        raise EvidenceError("a loop that reads the clock does not end") from error
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
    if codes := [loop.returncode for loop in loops if loop.returncode]:
        raise EvidenceError(f"a loop that reads the clock ended with exit code {codes[0]}")
    return max(map(float, said))


def main(words: Sequence[str] | None = None) -> None:
    """Print the longest pause on one core, in milliseconds. Arguments: when to begin, for how many seconds, core."""
    begin, seconds, core = words or sys.argv[1:]
    os.sched_setaffinity(0, {int(core)})
    sleep(max(0.0, float(begin) - monotonic()))
    before = monotonic()
    end, longest = before + float(seconds), 0.0
    while before < end:
        now = monotonic()
        if now - before > longest:
            longest = now - before
        before = now
    print(1000 * longest)


if __name__ == "__main__":
    main()
