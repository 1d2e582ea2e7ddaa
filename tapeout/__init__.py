"""Tapeout: from a trained checkpoint to a compiled, quantized and judged inference engine.

The modules of this package are the foundation that all others share. The package itself is also the public Python API:

    import tapeout

    print(tapeout.generate("artifacts/candidate", "Why is the sky blue?"))

    with tapeout.load("artifacts/candidate") as engine:
        for piece in engine.stream(engine.encode("Why is the sky blue?"), max_new_tokens=64):
            print(piece.text, end="", flush=True)

Its names are resolved when they are first used, so that importing the foundation stays light and imports nothing above
it. ``__init__.pyi`` tells type checkers what they are.
"""

from __future__ import annotations

import importlib
from typing import Any

_MODULES = {
    "TapeoutError": "tapeout.errors",
    "SamplingSettings": "runtime.wire.messages",
    "TextEngine": "runtime.api",
    "generate": "runtime.api",
    "load": "runtime.api",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version  # late: it takes as long as the rest of a short command's imports

        return version("tapeout")
    if name not in _MODULES:
        raise AttributeError(f"module 'tapeout' has no attribute {name!r}; it offers {', '.join(_MODULES)}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES, "__version__"])
