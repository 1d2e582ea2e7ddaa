"""What artifacts depend on besides files and parameters: library versions and what the machine can execute."""

from __future__ import annotations

import contextlib
import platform
from importlib import metadata

from engines.native.compiler import COMPILER
from tapeout.fingerprint import cpu_features

LIBRARIES = (
    *("torch", "transformers", "onnx", "onnx-ir", "onnxscript", "onnxruntime", "numpy", "gguf", "datasets"),
    *("lm-eval", "tokenizers", "compressed-tensors", "safetensors"),
)


def libraries() -> dict[str, str]:
    found = {"python": platform.python_version(), **{name: metadata.version(name) for name in LIBRARIES}}
    with contextlib.suppress(metadata.PackageNotFoundError):  # nor is it needed where native kernels do not run
        found[COMPILER] = metadata.version(COMPILER)
    return found


def machine() -> dict[str, object]:
    """Only what selects kernels: not the load, not the memory that happens to be free."""
    from engines.threads import physical_cores

    return {"machine": platform.machine(), "cpu_features": list(cpu_features()), "cores": physical_cores()}
