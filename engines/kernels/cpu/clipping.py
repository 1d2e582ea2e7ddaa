"""How many values an engine stored on static grids, and how many of them the grids clipped.

The scales are those of calibration. Other text may have larger keys, values and activations, which are then stored as
the largest code that there is. The kernels count where they quantize, at any level, in one count per process:
``source/cached_attention.c`` keys and values, ``source/quantize_activations.c`` the inputs of linears with a static
scale.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple


class ValueCounts(NamedTuple):
    """``clipped`` of the ``stored`` values lay beyond what their scale reaches."""

    stored: int = 0
    clipped: int = 0

    def since(self, before: ValueCounts) -> ValueCounts:
        return ValueCounts(self.stored - before.stored, self.clipped - before.clipped)


class Clipping(NamedTuple):
    """``kv``: of a KV cache in int8 or int4. ``activations``: of linears with static int8 inputs."""

    kv: ValueCounts = ValueCounts()
    activations: ValueCounts = ValueCounts()

    def since(self, before: Clipping) -> Clipping:
        return Clipping(self.kv.since(before.kv), self.activations.since(before.activations))


Clippings = Callable[[], Clipping]


def clippings(library: Path | None) -> Clippings:
    """What all sessions of this process that use ``library`` count from now on.

    ``library``: of a bundle, as :func:`engines.sessions.library_of` gives it. Counts stay 0 without one, in one of an
    older build, and for what the engine keeps in floats or on dynamic scales.
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
