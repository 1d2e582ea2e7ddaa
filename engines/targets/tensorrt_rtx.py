"""TensorRT for RTX: the code path of :mod:`engines.targets.tensorrt` over wheels that compile with no GPU present.

Its compiler knows compute capabilities by name (``sm75`` … ``sm121``, without ``sm90``). On the GPU the driver's
just-in-time step finishes the engine and keeps the kernels in a runtime cache.
"""

from __future__ import annotations

from engines.targets.tensorrt import TensorRT

TARGET = TensorRT("tensorrt-rtx", "tensorrt_rtx_bindings", ("tensorrt-rtx-cu13-bindings", "tensorrt-rtx-cu13-libs"))
