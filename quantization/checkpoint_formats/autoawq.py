"""AutoAWQ's ``gemm`` layout, as vLLM and transformers read it: 4-bit linears in one group size, all else in float."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantization import autoawq
from quantization.checkpoint_formats.folder import SHARD_BYTES, write_config
from quantization.checkpoint_formats.source import FLOAT_STORED, ExportSource, Parameter, ParameterPlace, narrowed
from tapeout.errors import QuantizationError
from tapeout.schemes import FLOAT
from tapeout.tensor_writer import ShardWriter

GROUPS = (32, 64, 128)  # that the kernels of vLLM take
CODES = "4-bit"


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
        writer = ShardWriter(folder, shard_bytes=SHARD_BYTES)
        for place in places:
            if place.stored == CODES:
                for part, array in autoawq.encode(source.codes(place.parameter), group_size).items():
                    writer.add(f"{place.parameter.module}.{part}", array)
            else:
                dtype, array = narrowed(source.floats(place.parameter))
                writer.add(place.parameter.name, array, dtype)
            advance()
        writer.finish()
        kept = [place.parameter.module for place in places if place.parameter.unit and place.stored == FLOAT_STORED]
        quantization: dict[str, Any] = {
            "quant_method": "awq",
            "bits": 4,
            "group_size": group_size,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": [*kept, *(["lm_head"] if source.tied else [])],
        }
        # AutoAWQ's kernels compute in float16.
        write_config(source, folder, quantization, dtype="float16")


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
