"""AutoAWQ's layout (``quant_method: awq``, ``version: gemm``): 4-bit linears in one group size, all else in float.

Of a linear with N output and K input channels in groups of g: ``qweight`` int32 ``[K, N/8]``, ``qzeros`` int32
``[K/g, N/8]`` and ``scales`` float16 ``[K/g, N]``. A weight is ``(code - zero) * scale``; codes and zeros are unsigned,
4 bits each. Eight output channels share a word, interleaved for AutoAWQ's kernels. One group size holds for the whole
checkpoint. The layout has no symmetric form: the zeros of a symmetric grid are its midpoint.

AutoAWQ is archived; vLLM, transformers and others read its checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quantization.checkpoint_formats import FLOAT_STORED, Parameter, ParameterPlace
from quantization.stored import REMEDY, Declared, whole
from tapeout.errors import QuantizationError
from tapeout.number_format import CodeArray, Coded, Tensors
from tapeout.quantized import QuantizedWeight, format_of
from tapeout.schemes import FLOAT

if TYPE_CHECKING:  # an export reads this layout, and depends on no QuantizedModel
    from quantization.checkpoint_formats.source import ExportSource

GROUPS = (32, 64, 128)  # that the kernels of vLLM take
CODES = "4-bit"
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the i-th code of a word, lowest bits first, is of output channel 8j + ORDER[i]
_SHIFTS = np.array([4 * ORDER.index(channel) for channel in range(8)], np.uint32)  # of channels, in their order


@dataclass(frozen=True)
class AutoAWQ:
    name: str = "autoawq"
    recipe: str = "4 bits in groups of 32, 64 or 128, and plan.embeddings {bits: 32}, as `tapeout recipe w4-awq` has"

    def places(self, source: ExportSource) -> list[ParameterPlace]:
        reasons = {parameter.name: _reason(parameter) for parameter in source.parameters}
        # vLLM computes the linears of a unit, such as Q, K and V, as one: all of them are 4-bit, or none.
        blocked = {p.unit: reasons[p.name] for p in source.parameters if p.unit and reasons[p.name]}
        found: list[ParameterPlace] = []
        for parameter in source.parameters:
            reason = reasons[parameter.name] or blocked.get(parameter.unit, "")
            in_float = parameter.scheme == FLOAT or reason
            found.append(ParameterPlace(parameter, FLOAT_STORED if in_float else CODES, reason))
        if not any(place.stored == CODES for place in found):
            raise QuantizationError(
                f"{source.folder} has no linear that AutoAWQ's layout can hold",
                expected="4-bit linears in groups of 32, 64 or 128",
                remedy=f"quantize with {self.recipe}",
            )
        return found

    def write(
        self, source: ExportSource, places: Sequence[ParameterPlace], folder: Path, advance: Callable[[], None]
    ) -> None:
        sizes = [place.parameter.scheme.group_size or 0 for place in places if place.stored == CODES]
        group_size = min(GROUPS[-1], *sizes)
        source.write_weights(places, folder, lambda p: encode(source.codes(p.parameter), group_size), advance)
        quantization: dict[str, Any] = {
            "quant_method": "awq",
            "bits": 4,
            "group_size": group_size,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": source.in_float(places),
        }
        # AutoAWQ's kernels compute in float16.
        source.write_config(folder, quantization, dtype="float16")


def _reason(parameter: Parameter) -> str:
    """Why a quantized parameter cannot have 4-bit codes here; empty where it can, or is float."""
    scheme = parameter.scheme
    if scheme == FLOAT:
        return ""
    if parameter.embedding:
        return "the layout holds no quantized embedding or lm_head"
    if scheme.format != "int4":
        return "the layout holds 4-bit codes only"
    if (scheme.group_size or 0) < GROUPS[0]:
        return f"kernels take groups of {', '.join(map(str, GROUPS))}"
    if parameter.shape[0] % 8:
        return "eight output channels share a word"
    return "" if parameter.half_scales else "scales are float16, and some of its scales are not"


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


def decode(tensors: Tensors) -> Coded:
    """The inverse of :func:`encode`: an asymmetric linear."""
    scales = tensors["scales"].astype(np.float32)
    return Coded(codes_of(tensors["qweight"]).T, scales.T, codes_of(tensors["qzeros"]).T)


def declared(module: str, config: Mapping[str, Any]) -> Declared:
    """By quantization_config; AutoAWQ's default is groups of 128.

    Readers disagree on what zero points mean beside ``zero_point: false``, and AutoAWQ writes no such checkpoint.
    """
    if config.get("zero_point", True) is not True:
        raise QuantizationError(
            f"quantization_config says zero_point {config['zero_point']}, and {module} has zero points",
            expected="zero_point: true",
            remedy=REMEDY,
        )
    size = config.get("group_size", 128)
    return Declared("awq", "group", (1, None if size == -1 else whole("group_size", size)), bits=4)


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


def _input_first(values: NDArray[Any], repeat: int = 1) -> NDArray[Any]:
    """``[N, C]`` as ``[C * repeat, N]``, every column repeated."""
    return np.ascontiguousarray(np.repeat(values, repeat, axis=1).T)
