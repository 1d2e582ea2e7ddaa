"""How many values an engine stored on static grids, and how many of them the grids clipped.

The kernels count where they quantize, at any level, in one count per process:
``source/cached_attention.c`` keys and values, ``source/quantize_activations.c`` the inputs of linears with a static
scale.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from engines.kernels.serving import Clipping, Clippings, ValueCounts


def clippings(library: Path | None) -> Clippings:
    """What all sessions of this process that use ``library`` count from now on.

    ``library``: of a bundle, as :func:`engines.kernels.cpu.serving.library_of` gives it. Counts stay 0 without one, in
    one of an older build, and for what the engine keeps in floats or on dynamic scales.
    """
    loaded = ctypes.CDLL(str(library)) if library is not None else None
    kv, activations = (getattr(loaded, name, None) for name in ("tapeout_kv_values", "tapeout_activation_values"))

    def read() -> Clipping:
        return Clipping(_counts(kv), _counts(activations))

    before = read()
    return lambda: read().since(before)


def _counts(counter: Any) -> ValueCounts:
    if counter is None:
        return ValueCounts()
    stored, clipped = ctypes.c_uint64(), ctypes.c_uint64()
    counter(ctypes.byref(stored), ctypes.byref(clipped))
    return ValueCounts(stored.value, clipped.value)
