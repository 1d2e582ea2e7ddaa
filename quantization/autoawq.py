"""AutoAWQ's checkpoint layout for linears (``quant_method: awq``, ``version: gemm``), written and read without loss.

Of a linear with N output and K input channels in groups of g: ``qweight`` int32 ``[K, N/8]``, ``qzeros`` int32
``[K/g, N/8]`` and ``scales`` float16 ``[K/g, N]``. A weight is ``(code - zero) * scale``; codes and zeros are unsigned,
4 bits each. Eight output channels share a word, interleaved for AutoAWQ's kernels. One group size holds for the whole
checkpoint. The layout has no symmetric form: the zeros of a symmetric grid are its midpoint.

AutoAWQ is archived; vLLM, transformers and others read its checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tapeout.number_format import CodeArray
from tapeout.quantized import QuantizedWeight, format_of
from tapeout.schemes import Scheme

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the i-th code of a word, lowest bits first, is of output channel 8j + ORDER[i]
_SHIFTS = np.array([4 * ORDER.index(channel) for channel in range(8)], np.uint32)  # of channels, in their order


def words(codes: CodeArray) -> NDArray[np.int32]:
    """Codes ``[R, N]`` as words ``[R, N/8]``.

    >>> [hex(word) for word in words(np.arange(8, dtype=np.uint8)[None])[0]]
    ['0x75316420']
    """
    lanes = codes.reshape(len(codes), -1, 8).astype(np.uint32) << _SHIFTS
    return np.bitwise_or.reduce(lanes, axis=2).view(np.int32)


def codes_of(packed: NDArray[np.int32]) -> CodeArray:
    """The inverse of :func:`words`."""
    lanes = np.ascontiguousarray(packed).view(np.uint32)[:, :, None] >> _SHIFTS & np.uint32(15)
    return lanes.astype(np.uint8).reshape(len(packed), -1)


def encode(linear: QuantizedWeight, group_size: int) -> dict[str, NDArray[Any]]:
    """The stored tensors of a 4-bit linear. Groups may be smaller than its own: their scales are repeated."""
    repeat = linear.group_size // group_size
    midpoints = np.full(linear.scales.shape, format_of(linear.scheme).midpoint, np.uint8)
    zeros = midpoints if linear.zero_points is None else linear.zero_points
    return {
        "qweight": words(_input_first(linear.codes)),
        "qzeros": words(_input_first(zeros, repeat)),
        "scales": _input_first(linear.scales.astype(np.float16), repeat),
    }


def _input_first(values: NDArray[Any], repeat: int = 1) -> NDArray[Any]:
    """``[N, C]`` as ``[C * repeat, N]``, every column repeated."""
    return np.ascontiguousarray(np.repeat(values, repeat, axis=1).T)


def decode(tensors: Mapping[str, NDArray[Any]]) -> QuantizedWeight:
    """The inverse of :func:`encode`: an asymmetric linear."""
    codes, zeros, scales = codes_of(tensors["qweight"]), codes_of(tensors["qzeros"]), tensors["scales"]
    return QuantizedWeight(
        np.ascontiguousarray(codes.T),
        np.ascontiguousarray(scales.T.astype(np.float32)),
        np.ascontiguousarray(zeros.T),
        # Not validated: a source may have groups of a size that we do not write.
        Scheme.model_construct(bits=4, format="int4", group_size=len(codes) // len(scales), symmetric=False),
    )
