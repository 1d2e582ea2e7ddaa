"""Runs one part in this process: ``python -m benchmarks.gpu.part PART KERNELS OUT LEVEL``. See :mod:`run_all`.

Figures go to OUT/PART.jsonl, one a line, as they are found. Exit code 3: the part is left out; its reason is recorded.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
from pathlib import Path

from benchmarks.gpu.place import LeftOutError, Place, recorder
from tapeout.errors import ExitCode


def main(words: list[str]) -> int:
    part, kernels, out, level = words
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    record = recorder(folder / f"{part}.jsonl")
    with tempfile.TemporaryDirectory(prefix="tapeout-gpu-") as scratch:
        try:
            importlib.import_module(f"benchmarks.gpu.parts.{part}").run(
                Place(Path(kernels), Path(scratch), level), record
            )
        except LeftOutError as reason:
            record("left out", reason=str(reason))
            return ExitCode.INCONCLUSIVE
    return ExitCode.PASS


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
