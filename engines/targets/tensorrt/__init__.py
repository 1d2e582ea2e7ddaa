"""TensorRT: strongly typed, native attention, rotary and KV-cache-update layers, an engine per compute capability.

One code path over two modules with the same API: ``tensorrt`` where it is installed, and ``tensorrt_rtx_bindings``
(:mod:`engines.targets.tensorrt_rtx`), which compiles for a GPU that is not there. ``LIBRARIES`` and ``features`` enter
the fingerprint; ``PASSES`` lower the portable graph; ``compile_for`` makes bundles; ``open_engine`` runs one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from engines.bundle import EngineBundle, PortableEvidence
    from engines.lowered import LoweredGraph
    from engines.protocol import Engine
    from engines.targets.tensorrt.compiler import Progress
    from tapeout.artifact import Artifact


@dataclass(frozen=True)
class TensorRT:
    """A target over one of the modules."""

    name: str  # of the target
    module: str  # to import
    libraries: tuple[str, ...]  # distributions

    def require(self, capability: str) -> None:
        """:class:`BuildError` if this module cannot compile for it, before anything else is done."""
        from engines.targets.tensorrt.compiler import load_module, require_capability

        require_capability(load_module(self.module), capability)

    def compile_for(
        self,
        lowered: Artifact[LoweredGraph],
        folder: Path,
        *,
        capability: str,
        batches: Sequence[int],
        evidence: PortableEvidence | None,
        timing_cache: Path | None,
        progress: Progress,
    ) -> Artifact[EngineBundle]:
        from engines.targets.tensorrt.compiler import compile_bundle

        return compile_bundle(
            self.module,
            lowered,
            folder,
            target=self.name,
            libraries=self.libraries,
            capability=capability,
            batches=batches,
            evidence=evidence,
            timing_cache=timing_cache,
            progress=progress,
        )

    def open_engine(self, bundle: Artifact[EngineBundle], *, threads: int, slots: int | None) -> Engine:
        """``threads`` has no meaning on a GPU and is ignored."""
        from engines.targets.tensorrt.engine import TensorRTEngine

        return TensorRTEngine(self.module, bundle, slots=slots)


LIBRARIES = ("tensorrt",)
_TARGET = TensorRT("tensorrt", "tensorrt", LIBRARIES)
require, compile_for, open_engine = _TARGET.require, _TARGET.compile_for, _TARGET.open_engine


def __getattr__(name: str) -> Any:
    if name != "PASSES":
        raise AttributeError(name)
    from engines.passes import (
        fixed_kv_cache,
        float_linears,
        fp8_linears,
        half_precision,
        int4_linears,
        linears,
        logit_positions,
        rotary_tables,
    )

    # Q/K/V and gate/up are left to the compiler to merge: merged here, the engine of a 3-profile build was 25 % larger.
    return (
        rotary_tables,
        linears,
        fixed_kv_cache,
        logit_positions,
        int4_linears,
        fp8_linears,
        float_linears,
        half_precision,
    )


def features() -> tuple[str, ...]:
    """What selects kernels here: the compute capability of the first GPU, or nothing where there is none."""
    from engines.targets.tensorrt.hardware import capability

    found = capability()
    return () if found is None else (found,)
