"""How ONNX Runtime is started for bundles on CPU, wherever one of their graphs is run."""

from __future__ import annotations

from pathlib import Path

import onnxruntime as ort

from engines.bundle import EngineBundle
from engines.native import LIBRARY, level_of, unsupported
from engines.threads import physical_cores
from tapeout.artifact import Artifact, verify_files
from tapeout.errors import BuildError
from tapeout.fingerprint import cpu_features


def library_of(bundle: Artifact[EngineBundle]) -> Path | None:
    """The bundle's own kernels, if it has any. They are code, so no other file of their name will do."""
    if LIBRARY not in bundle.files:
        return None
    verify_files(bundle.folder, {LIBRARY: bundle.files[LIBRARY]})
    path, level = bundle.folder / LIBRARY, level_of(bundle.record.fingerprint.features)
    missing = [feature for feature in level.needed if feature not in cpu_features()] if level else []
    if missing:
        raise _cannot_run(path, f"it needs {', '.join(missing)}, which this processor lacks")
    return path


def cpu_options(threads: int, library: Path | None) -> ort.SessionOptions:
    """``threads``: 0 means every physical core. ``library``: of the kernels of our own that the graph names."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads or physical_cores()
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    if library is not None:
        reason = unsupported()
        if reason:
            raise _cannot_run(library, reason)
        options.register_custom_ops_library(str(library.resolve()))
    return options


def _cannot_run(library: Path, reason: str) -> BuildError:
    """Instead of an illegal instruction."""
    return BuildError(
        f"{library} cannot run here: {reason}", expected="the processor it was built for", remedy="build it here"
    )
