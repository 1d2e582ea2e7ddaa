"""Make the folder that a machine with a GPU needs beside this checkout, on any machine that builds.

python -m benchmarks.gpu.prepare gpu-kernels --levels sm90 --python 3.12

The folder holds the host's library, machine code with all kernels for each level, and with ``--python`` the few
packages that engines and their tests need beside numpy and PyTorch, as that version of Python installs them.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from engines.kernels.cuda import ARCHITECTURES, HOST_FILE, compiler, cubin_file
from tapeout.errors import BuildError, ExitCode, TapeoutError

PACKAGES = ("pydantic", "psutil", "pytest")
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
SITE = "site"


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--levels", nargs="*", default=["sm90"], choices=ARCHITECTURES)
    parser.add_argument("--python", help="version of Python there, such as 3.12; without it no packages are added")
    return parser.parse_args(words)


def prepare(folder: Path, levels: Sequence[str], python: str | None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for level, path in compiler.cubins(levels).items():
        shutil.copyfile(path, folder / Path(cubin_file(level)).name)
    shutil.copyfile(compiler.host_library(), folder / Path(HOST_FILE).name)
    if python is None:
        return
    pins = [f"{name}=={metadata.version(name)}" for name in PACKAGES]
    platforms = [word for name in PLATFORMS for word in ("--platform", name)]
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--upgrade"]
    wheels = ["--only-binary=:all:", "--python-version", python, *platforms, "--target", str(folder / SITE)]
    done = subprocess.run([*install, *wheels, *pins], capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(
            f"pip cannot install {', '.join(pins)} for Python {python}: {done.stderr.strip()[-500:]}",
            expected="wheels for Linux on x86-64",
            remedy="name the version of Python on the machine with the GPU, such as 3.12",
        )


def main() -> int:
    options = arguments()
    try:
        prepare(options.folder, options.levels, options.python)
    except TapeoutError as error:
        print(error, file=sys.stderr)
        return ExitCode.BROKEN
    size = sum(path.stat().st_size for path in options.folder.rglob("*") if path.is_file())
    print(f"{options.folder}: {size / 1e6:.1f} MB; there: python -m benchmarks.gpu.run_all {options.folder}")
    return ExitCode.PASS


if __name__ == "__main__":
    sys.exit(main())
