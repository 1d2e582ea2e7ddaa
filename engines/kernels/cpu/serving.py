"""Of the native library of a bundle: where it lies, and what a server takes from it beside the engine."""

from __future__ import annotations

import platform
from pathlib import Path

from engines.bundle import EngineBundle
from engines.kernels.cpu import library_file
from engines.kernels.cpu.clipping import clippings
from engines.kernels.cpu.sampling import sampling_kernel
from engines.kernels.sampling import Sampler
from engines.kernels.serving import Clippings
from tapeout.artifact import Artifact, verify_files
from tapeout.errors import BuildError
from tapeout.fingerprint import cpu_features


class CpuServing:
    """See :class:`engines.kernels.serving.ServingKernels`."""

    def library(self, bundle: Artifact[EngineBundle]) -> Path | None:
        return library_of(bundle)

    def sampler(self, library: Path | None, vocab_size: int, threads: int) -> Sampler | None:
        return sampling_kernel(library, vocab_size, threads)

    def clippings(self, library: Path | None) -> Clippings:
        return clippings(library)


def library_of(bundle: Artifact[EngineBundle]) -> Path | None:
    """The native kernels of a bundle as :func:`engines.load.at_level` gives it; None where its graph uses none.

    They are code, so their hash is verified, and the processor is asked before they are loaded.
    """
    hardware = bundle.record.hardware[0]
    if not hardware.level:
        return None
    file = library_file(hardware.level)
    path = bundle.folder / file
    if file not in bundle.files:
        raise cannot_run(path, "the bundle does not carry it")
    if hardware.machine != platform.machine():
        raise cannot_run(path, f"it is for {hardware.machine}")
    if missing := [feature for feature in hardware.features if feature not in cpu_features()]:
        raise cannot_run(path, f"it needs {', '.join(missing)}, which this processor lacks")
    verify_files(bundle.folder, {file: bundle.files[file]})
    return path


def cannot_run(library: Path, reason: str) -> BuildError:
    """Raised before the library is loaded, which would end in an illegal instruction."""
    return BuildError(
        f"{library} cannot run here: {reason}", expected="the processor it was built for", remedy="build it here"
    )
