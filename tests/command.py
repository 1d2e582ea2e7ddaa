"""The ``tapeout`` command of this checkout as a process, and a server that it runs."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[1]
COMMAND = [sys.executable, "-m", "pipeline.cli"]  # with PYTHONPATH=ROOT


@dataclass
class Running:
    """``log``: lines of standard error so far."""

    process: subprocess.Popen[str]
    url: str
    log: list[str]

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


@contextmanager
def served(
    *options: str,
    variables: Mapping[str, str] | None = None,
    folder: Path = ROOT,
    open_files: int = 0,
    command: str = "serve",
    within: Sequence[str] = (),
) -> Iterator[Running]:
    """``tapeout serve`` on a free port, once it listens. ``variables``: its environment; ``open_files``: its limit.

    ``command``: ``gateway`` instead. ``within``: words before it, see :class:`tests.network.Network`.
    """
    limit = partial(resource.setrlimit, resource.RLIMIT_NOFILE, (open_files, open_files)) if open_files else None
    own_engine = command == "serve" and "--engine" not in options
    process = subprocess.Popen(
        [*within, *COMMAND, command, *options, "--port", "0", *(["--threads", "1"] if own_engine else [])],
        cwd=folder,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=limit,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} if variables is None else variables,
    )
    assert process.stderr is not None
    log: list[str] = []
    found: list[str] = []
    begun = threading.Event()

    def read(lines: Iterator[str]) -> None:
        for line in lines:
            log.append(line)
            if match := re.search(r"http://\S+?(?=/v1)", line):
                found.append(match[0])
                begun.set()
        begun.set()

    reader = threading.Thread(target=read, args=(process.stderr,), daemon=True)
    reader.start()
    try:
        assert begun.wait(240) and found, "".join(log)
        yield Running(process, found[0], log)
    finally:
        process.kill()
        process.wait()
        reader.join(10)
        process.stderr.close()
