"""TensorRT for RTX: the code path of :mod:`engines.targets.tensorrt` over wheels that compile with no GPU present.

Its compiler knows compute capabilities by name (``sm75`` … ``sm121``, without ``sm90``), and on the GPU the driver's
just-in-time step finishes the engine, kept in a runtime cache.
"""

from __future__ import annotations

from engines.targets.tensorrt import TensorRT
from engines.targets.tensorrt import __getattr__ as __getattr__  # PASSES, when they are asked for
from engines.targets.tensorrt import features as features

LIBRARIES = ("tensorrt-rtx-cu13-bindings", "tensorrt-rtx-cu13-libs")
_TARGET = TensorRT("tensorrt-rtx", "tensorrt_rtx_bindings", LIBRARIES)
require, compile_for, open_engine = _TARGET.require, _TARGET.compile_for, _TARGET.open_engine
