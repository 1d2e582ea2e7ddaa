"""GGUF, as llama.cpp reads it: one file with the weights, the tokenizer and the chat template."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantization import gguf_blocks
from quantization.checkpoint_formats import gguf_metadata
from quantization.checkpoint_formats.source import FLOAT_STORED, ExportSource, Parameter, ParameterPlace, narrowed
from tapeout.integers import Integers
from tapeout.quantized import format_of
from tapeout.schemes import FLOAT

FILE = "model.gguf"
ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True)
class Gguf:
    name: str = "gguf"
    recipe: str = (
        "symmetric: true, bits 4, 5 or 8 and group_size 32, 64, 128 or 256 for every rule of plan.schemes and for "
        "plan.embeddings"
    )

    def places(self, source: ExportSource) -> list[ParameterPlace]:
        gguf_metadata.require(source)
        return [_place(parameter) for parameter in source.parameters]

    def write(
        self, source: ExportSource, places: Sequence[ParameterPlace], folder: Path, advance: Callable[[], None]
    ) -> None:
        import gguf

        model = gguf_metadata.describe(source)
        writer = gguf.GGUFWriter(folder / FILE, model.architecture.gguf)
        model.add_to(writer)
        kinds = {place.parameter.name: _kind(source, place) for place in places}
        file_type = Counter(kind for kind in kinds.values() if kind != "F32").most_common(1)
        writer.add_file_type(gguf_metadata.FILE_TYPES[file_type[0][0] if file_type else "F32"])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        factors = model.rope_factors
        for place in places:
            parameter, kind = place.parameter, kinds[place.parameter.name]
            shape, size = _bytes_of(parameter.shape, kind)
            type_of = gguf.GGMLQuantizationType[kind]
            writer.add_tensor_info(model.name_of(parameter.name), shape, np.dtype(np.uint8), size, type_of)
        if factors is not None:
            writer.add_tensor_info(ROPE_FACTORS, factors.shape, factors.dtype, factors.nbytes)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for place in places:
            order = model.row_order(place.parameter.name, place.parameter.shape[0])
            writer.write_tensor_data(_data(source, place, kinds[place.parameter.name], order))
            advance()
        if factors is not None:
            writer.write_tensor_data(factors)
        writer.close()


def _place(parameter: Parameter) -> ParameterPlace:
    scheme = parameter.scheme
    if scheme == FLOAT:
        return ParameterPlace(parameter, FLOAT_STORED)
    if not isinstance(format_of(scheme), Integers):
        return ParameterPlace(parameter, FLOAT_STORED, f"no type that is written here has the codes of {scheme.format}")
    if scheme.activations == "int8":
        return ParameterPlace(parameter, FLOAT_STORED, "there is no place for the static grid of its inputs")
    if (scheme.group_size or 0) % gguf_blocks.BLOCK:
        return ParameterPlace(parameter, FLOAT_STORED, "32 input channels share a scale")
    if not parameter.half_scales:
        return ParameterPlace(parameter, FLOAT_STORED, "scales are float16, and some of its scales are not")
    match scheme.bits, scheme.symmetric:
        case 4, True:
            return ParameterPlace(parameter, "Q4_0")
        case 5, True:
            return ParameterPlace(parameter, "Q5_0")
        case 8, True:
            return ParameterPlace(parameter, "Q8_0")
        case 4, False:
            return ParameterPlace(parameter, "Q5_0", "Q4_1 would round its zero points, to float16 offsets")
        case 5, False:
            return ParameterPlace(parameter, "Q8_0", "Q5_1 would round its zero points, to float16 offsets")
        case 6, _:
            return ParameterPlace(parameter, "Q8_0", "Q6_K would round its scales")
        case _:
            return ParameterPlace(parameter, FLOAT_STORED, "no type has zero points of 8 bits")


def _kind(source: ExportSource, place: ParameterPlace) -> str:
    """The type of GGUF. llama.cpp wants vectors in float32; a float matrix is read here to see what it fits."""
    if place.stored != FLOAT_STORED:
        return place.stored
    return "F32" if len(place.parameter.shape) == 1 else narrowed(source.floats(place.parameter))[0]


def _bytes_of(shape: tuple[int, ...], kind: str) -> tuple[tuple[int, ...], int]:
    """The shape of a tensor's bytes, and how many they are."""
    columns = shape[-1]
    width = (
        columns // gguf_blocks.BLOCK * gguf_blocks.BLOCK_BYTES[kind]
        if kind in gguf_blocks.BLOCK_BYTES
        else columns * (4 if kind == "F32" else 2)
    )
    found = (*shape[:-1], width)
    return found, prod(found)


def _data(source: ExportSource, place: ParameterPlace, kind: str, order: NDArray[np.intp] | None) -> NDArray[Any]:
    """The bytes of a tensor, its rows in llama.cpp's order."""
    if place.stored != FLOAT_STORED:
        rows: NDArray[Any] = gguf_blocks.encode(source.codes(place.parameter), kind)
    else:
        weight = source.floats(place.parameter)
        rows = weight if kind == "F32" else narrowed(weight)[1]
    return rows if order is None else rows[order]
