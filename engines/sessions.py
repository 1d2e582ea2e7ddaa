"""How ONNX Runtime is started for bundles on CPU, wherever one of their graphs is run."""

from __future__ import annotations

from pathlib import Path

import onnxruntime as ort

from engines.native import LIBRARY
from engines.threads import physical_cores


def cpu_options(threads: int, folder: Path) -> ort.SessionOptions:
    """``threads``: 0 means every physical core. ``folder`` holds the library of kernels that the graph may name."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads or physical_cores()
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    if (folder / LIBRARY).is_file():
        options.register_custom_ops_library(str(folder / LIBRARY))
    return options
