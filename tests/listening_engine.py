"""An engine that listens at an address, and crashes or fails where a test asks for it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from pipeline.cli.engine import serve
from runtime.engine import worker
from runtime.engine.opening import open_bundle
from runtime.wire.address import Address, read_key
from runtime.wire.limits import Limits
from runtime.wire.messages import Pool
from runtime.wire.start import EngineSettings, Start
from tapeout.errors import ArtifactError
from tests.faulty_engine import Faulty, open_faulty

ROOT = Path(__file__).parents[1]
KEY = b"0123456789abcdef0123456789abcdef"
UNJUDGED = "unjudged"  # a source that may not be served


class ListeningEngine:
    """Its process. ``address``: where it listens, which stays when it is started again. ``bundle``: also a folder.

    ``within``: words before its command, see :class:`tests.network.Network`.
    """

    def __init__(
        self,
        folder: Path,
        bundle: Faulty | Path | None = None,
        limits: Limits | None = None,
        address: str = "tcp:127.0.0.1:0",
        pool: Pool = "mixed",
        within: Sequence[str] = (),
    ) -> None:
        self.address, self.key, self._within = address, folder / "key", within
        self.key.write_bytes(KEY + b"\n")
        self._start = Start(str(bundle or Faulty()), EngineSettings(threads=1, pool=pool), limits or Limits())
        self.process = self._started()

    def again(self) -> None:
        """As whoever runs it would."""
        self.close()
        self.process = self._started()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()

    def _started(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tests.listening_engine", self.address, str(self.key), self._start.encode()]
        process = subprocess.Popen([*self._within, *command], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        self.address = process.stdout.readline().strip()
        assert self.address, "it has not started"
        return process


def main() -> None:
    address, key = Address.parse(sys.argv[1]), read_key(Path(sys.argv[2]))
    listener = address.listen(key)
    if not address.path:
        address = Address(*listener.getsockname()[:2])
    print(address, flush=True)
    first = Start.decode(sys.argv[3])

    def start(source: str) -> Start:
        """What may not be served here raises, as ``tapeout engine`` does."""
        if source == UNJUDGED:
            raise ArtifactError("it has no evidence for this level", expected="a PASS")
        return replace(first, bundle=source)

    opener = open_faulty if first.bundle.startswith("{") else open_bundle
    serve(first, start, partial(worker.listen, listener=listener, key=key, opener=opener))


if __name__ == "__main__":
    main()
