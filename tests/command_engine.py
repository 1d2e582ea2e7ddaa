"""``python -m tests.command_engine engine …``: `tapeout engine` with an engine for tests, and the same options.

A bundle called ``broken`` cannot be opened.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from runtime.engine import worker
from runtime.wire.address import Address, read_key
from runtime.wire.limits import Limits
from runtime.wire.start import Start
from tests.faulty_engine import Faulty, open_faulty

OPENING_SECONDS = 1.0  # of another bundle


def main() -> None:
    _, bundle, _, address, _, key_file, *_ = sys.argv[1:]
    key = read_key(Path(key_file))
    listener = Address.parse(address).listen(key)
    if bundle == "broken":
        sys.exit("error: it cannot be opened")
    start = Start(str(Faulty()), limits=Limits())
    while worker.listen(start, listener, key, open_faulty) is not None:  # it was told to open another bundle
        time.sleep(OPENING_SECONDS)


if __name__ == "__main__":
    main()
