"""What operators with recurrent state have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tapeout.state import Recurrent, StateTensor

if TYPE_CHECKING:
    import onnx_ir as ir
    from numpy.typing import NDArray


def recurrent_state(past: ir.Value | None, layer: int) -> Recurrent:
    """The state that an input ``[B, ...]`` of a portable graph holds, in float32."""
    assert past is not None and past.name is not None and past.shape is not None
    shape = tuple(size for size in list(past.shape)[1:] if isinstance(size, int))
    assert len(shape) == len(past.shape) - 1, f"{past.name} is {past.shape}"
    return Recurrent(
        layer=layer, tensors=(StateTensor(name=past.name.rpartition(".")[2], shape=shape, dtype="float32"),)
    )


def likely_scale(seen: NDArray[np.float32]) -> float:
    """The root mean square of a state that real tokens left: it grows little with their number."""
    return float(np.sqrt((seen**2).mean()))
