"""What a server takes from a ``cuda`` bundle beside the engine: nothing. What the device does not draw, numpy draws."""

from __future__ import annotations

from pathlib import Path

from engines.bundle import EngineBundle
from engines.kernels.cuda import HOST_FILE
from engines.kernels.sampling import Sampler
from engines.kernels.serving import Clipping, Clippings
from tapeout.artifact import Artifact, verify_files


class CudaServing:
    """See :class:`engines.kernels.serving.ServingKernels`."""

    def library(self, bundle: Artifact[EngineBundle]) -> Path | None:
        verify_files(bundle.folder, {HOST_FILE: bundle.files[HOST_FILE]})
        return bundle.folder / HOST_FILE

    def sampler(self, library: Path | None, vocab_size: int, threads: int) -> Sampler | None:
        return None

    def clippings(self, library: Path | None) -> Clippings:
        return Clipping
