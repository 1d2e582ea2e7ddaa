"""Buffers of state as ONNX Runtime binds them. numpy has no bfloat16: arrays of uint16 hold it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from tapeout.operators import PAST

BFLOAT16 = 16  # of onnx.TensorProto


def numpy_element(element: str) -> str:
    """That holds the elements of a :class:`tapeout.state.StateBuffer`."""
    return "uint16" if element == "bfloat16" else element


def bind_state(binding: ort.IOBinding, buffers: Mapping[str, NDArray[Any]]) -> None:
    """Bind state by name, ``LAYER.TENSOR``. Operators update it in place, so it is an input only."""
    for name, buffer in buffers.items():
        element = BFLOAT16 if buffer.dtype == np.uint16 else buffer.dtype.type
        binding.bind_input(f"{PAST}.{name}", "cpu", 0, element, buffer.shape, buffer.ctypes.data)


def as_floats(state: NDArray[Any]) -> NDArray[np.float32]:
    """A state in float32, or in bfloat16."""
    return (state.astype(np.uint32) << 16).view(np.float32) if state.dtype == np.uint16 else state
