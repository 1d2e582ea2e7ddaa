"""compressed-tensors, as both vLLM and transformers load it.

The QuantizedModel itself is such a checkpoint, and transformers loads it. vLLM loads no quantized embedding in that
form, transformers no packed zero points: these two are what this format leaves out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from quantization.checkpoint_formats.folder import SHARD_BYTES, write_config
from quantization.checkpoint_formats.source import FLOAT_STORED, ExportSource, Parameter, ParameterPlace, narrowed
from quantization.compressed_tensors import CheckpointWriter, quantization_config
from tapeout.integers import Integers
from tapeout.quantized import QuantizedWeight, format_of
from tapeout.schemes import FLOAT, Scheme

SIGNED_BYTES = "8-bit symmetric"


@dataclass(frozen=True)
class CompressedTensors:
    name: str = "compressed-tensors"
    recipe: str = "symmetric: true for every rule of plan.schemes, and plan.embeddings {bits: 32}"

    def places(self, source: ExportSource) -> list[ParameterPlace]:
        return [_place(parameter) for parameter in source.parameters]

    def write(
        self, source: ExportSource, places: Sequence[ParameterPlace], folder: Path, advance: Callable[[], None]
    ) -> None:
        writer = CheckpointWriter(folder, shard_bytes=SHARD_BYTES)
        schemes: dict[str, Scheme] = {}
        for place in places:
            parameter = place.parameter
            if place.stored == FLOAT_STORED:
                dtype, array = narrowed(source.floats(parameter))
                writer.add(parameter.name, array, dtype)
            else:
                linear = source.codes(parameter)
                stored = _signed(linear) if place.stored == SIGNED_BYTES else linear
                writer.add_linear(parameter.name, stored)
                schemes[parameter.name] = stored.scheme
            advance()
        writer.finish()
        floats = [place.parameter.name for place in places if place.parameter.unit and place.stored == FLOAT_STORED]
        ignored = [*floats, *(["lm_head.weight"] if source.tied else [])]
        write_config(source, folder, quantization_config(schemes, {}, ignored) | {"kv_cache_scheme": None})


def _place(parameter: Parameter) -> ParameterPlace:
    scheme = parameter.scheme
    if scheme == FLOAT:
        return ParameterPlace(parameter, FLOAT_STORED)
    if parameter.embedding:
        return ParameterPlace(
            parameter, FLOAT_STORED, "vLLM loads no quantized embedding or lm_head that transformers loads too"
        )
    if not isinstance(format_of(scheme), Integers):
        return ParameterPlace(
            parameter, FLOAT_STORED, f"transformers and vLLM are not known to load {scheme.format} alike"
        )
    if scheme.symmetric:
        return ParameterPlace(parameter, scheme.name)
    reason = "transformers loads no packed zero points"
    return ParameterPlace(parameter, SIGNED_BYTES if scheme.bits < 8 else FLOAT_STORED, reason)


def _signed(linear: QuantizedWeight) -> QuantizedWeight:
    """An asymmetric linear of at most 7 bits on a symmetric 8-bit grid: the same weights, codes less zero points."""
    assert linear.zero_points is not None
    scheme = linear.scheme.in_format("int8").model_copy(update={"symmetric": True})
    levels = linear.codes.astype(np.int16) - np.repeat(linear.zero_points, linear.group_size, axis=1)
    return replace(
        linear, codes=(levels + format_of(scheme).midpoint).astype(np.uint8), zero_points=None, scheme=scheme
    )
