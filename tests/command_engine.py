"""``python -m tests.command_engine engine …``: `tapeout engine` with an engine for tests, and the same options.

A bundle called ``broken`` cannot be opened.
"""

from __future__ import annotations

import sys
from pathlib import Path

from runtime.engine import worker
from runtime.wire.address import Address, read_key
from runtime.wire.limits import Limits
from runtime.wire.start import Start
from tests.faulty_engine import Faulty, open_faulty


def main() -> None:
    _, bundle, _, address, _, key_file, *_ = sys.argv[1:]
    key = read_key(Path(key_file))
    listener = Address.parse(address).listen(key)
    if bundle == "broken":
        sys.exit("error: it cannot be opened")
    worker.listen(Start(str(Faulty()), limits=Limits()), listener, key, open_faulty)


if __name__ == "__main__":
    main()
