"""Engines that listen, each in a process that is forked when the one before it has died: to die again and again.

Python starts once. The socket is that of the parent, so an address listens while nobody answers there.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from runtime.engine import worker
from runtime.wire.address import Address, read_key
from runtime.wire.limits import Limits
from runtime.wire.start import Start
from tests.faulty_engine import Faulty, open_faulty
from tests.listening_engine import KEY, ROOT


class ForkedEngine:
    """``address``: where it listens."""

    def __init__(self, folder: Path, name: str, bundle: Faulty) -> None:
        self.address, key = f"unix:{folder}/{name}", folder / "key"
        key.write_bytes(KEY + b"\n")
        start = Start(str(bundle), limits=Limits()).encode()
        command = [sys.executable, "-m", "tests.forked_engines", self.address, str(key), start]
        pipe = subprocess.PIPE
        self._parent = subprocess.Popen(command, cwd=ROOT, stdout=pipe, stdin=pipe, text=True, start_new_session=True)
        self.process = self._next()

    def kill(self) -> None:
        """With SIGKILL; another one takes its place."""
        os.kill(self.process, signal.SIGKILL)
        self.process = self._next()

    def close(self) -> None:
        """Both at once: between two kills, the parent could fork one that lives on and keeps the pipe open."""
        os.killpg(self._parent.pid, signal.SIGKILL)
        self._parent.communicate()

    def _next(self) -> int:
        assert self._parent.stdout is not None
        return int(self._parent.stdout.readline())


def main() -> None:
    key = read_key(Path(sys.argv[2]))
    listener, start = Address.parse(sys.argv[1]).listen(key), Start.decode(sys.argv[3])
    while True:
        child = os.fork()
        if not child:
            try:
                worker.listen(start, listener, key, open_faulty)
            finally:
                os._exit(1)
        print(child, flush=True)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
