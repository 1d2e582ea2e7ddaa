"""TensorRT for RTX: the code path of :mod:`engines.targets.tensorrt` over wheels that compile with no GPU present.

Its compiler knows compute capabilities by name (``sm75`` … ``sm121``, without ``sm90``), and on the GPU the driver's
just-in-time step finishes the engine, kept in a runtime cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engines.targets.tensorrt import features as features

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from engines.bundle import EngineBundle
    from engines.lowered import LoweredGraph
    from engines.protocol import Engine
    from engines.targets.tensorrt.compiler import Progress
    from pipeline.artifact import Artifact

NAME = "tensorrt-rtx"
MODULE = "tensorrt_rtx_bindings"
LIBRARIES = ("tensorrt-rtx-cu13-bindings", "tensorrt-rtx-cu13-libs")


def __getattr__(name: str) -> Any:
    if name != "PASSES":
        raise AttributeError(name)
    from engines.targets.tensorrt import PASSES

    return PASSES


def compile_for(
    lowered: Artifact[LoweredGraph],
    folder: Path,
    *,
    capability: str,
    batches: Sequence[int],
    timing_cache: Path | None,
    progress: Progress,
) -> Artifact[EngineBundle]:
    from engines.targets.tensorrt.compiler import compile_bundle

    return compile_bundle(
        MODULE,
        lowered,
        folder,
        target=NAME,
        libraries=LIBRARIES,
        capability=capability,
        batches=batches,
        timing_cache=timing_cache,
        progress=progress,
    )


def open_engine(bundle: Artifact[EngineBundle], *, threads: int, slots: int | None) -> Engine:
    """``threads`` has no meaning on a GPU and is ignored."""
    from engines.targets.tensorrt.engine import TensorRTEngine

    return TensorRTEngine(MODULE, bundle, slots=slots)
