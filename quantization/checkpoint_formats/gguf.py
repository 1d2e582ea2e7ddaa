"""GGUF, as llama.cpp reads it: one file with the weights, the tokenizer and the chat template.

A quantized weight is blocks of 32 input channels with one float16 scale. Our weights are ``scale * level``, where a
level is a code less its zero point. Three types are that too: Q4_0 (levels -8 to 7), Q5_0 (-16 to 15) and Q8_0 (-128 to
127). Groups larger than 32 repeat their scale in each of their blocks. Not used: Q4_1, whose offset
``scale * zero point`` is rounded to float16, and the K types, whose scales are products of two rounded numbers.
Layouts: ggml-common.h of llama.cpp (``block_q4_0``, ``block_q5_0``, ``block_q8_0``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantization.checkpoint_formats import FLOAT_STORED, Parameter, ParameterPlace, gguf_metadata
from quantization.checkpoint_formats.source import ExportSource, narrowed
from quantization.stored import GGUF_TYPES
from tapeout.integers import Integers
from tapeout.quantized import QuantizedWeight, format_of
from tapeout.schemes import FLOAT

FILE = "model.gguf"
ROPE_FACTORS = "rope_freqs.weight"
BLOCK = 32  # input channels
LEVELS = {"Q4_0": 8, "Q5_0": 16, "Q8_0": 128}  # levels lie in [-n, n)
PLACES = {  # by bits, and whether symmetric: the smallest type that holds the same weights, and why no smaller one does
    (4, True): ("Q4_0", ""),
    (5, True): ("Q5_0", ""),
    (8, True): ("Q8_0", ""),
    (4, False): ("Q5_0", "Q4_1 would round its zero points, to float16 offsets"),
    (5, False): ("Q8_0", "Q5_1 would round its zero points, to float16 offsets"),
    (6, True): ("Q8_0", "Q6_K would round its scales"),
    (6, False): ("Q8_0", "Q6_K would round its scales"),
    (8, False): (FLOAT_STORED, "no type has zero points of 8 bits"),
}


@dataclass(frozen=True)
class Gguf:
    name: str = "gguf"
    recipe: str = (
        "symmetric: true, bits 4, 5 or 8 and group_size 32, 64, 128 or 256 for every rule of plan.schemes and for "
        "plan.embeddings"
    )

    def places(self, source: ExportSource) -> list[ParameterPlace]:
        gguf_metadata.require(source)
        return [ParameterPlace(parameter, *_place(parameter)) for parameter in source.parameters]

    def write(
        self, source: ExportSource, places: Sequence[ParameterPlace], folder: Path, advance: Callable[[], None]
    ) -> None:
        import gguf

        model = gguf_metadata.describe(source)
        writer = gguf.GGUFWriter(folder / FILE, model.architecture.gguf)
        model.add_to(writer)
        kinds = {place.parameter.name: _kind(source, place) for place in places}
        main = Counter(f"MOSTLY_{kind}" for kind in kinds.values() if kind != "F32").most_common(1)
        writer.add_file_type(gguf.LlamaFileType[main[0][0] if main else "ALL_F32"])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        factors = model.rope_factors
        for place in places:
            parameter, kind = place.parameter, kinds[place.parameter.name]
            values, size = GGUF_TYPES[kind]
            shape = (*parameter.shape[:-1], parameter.shape[-1] // values * size)  # of the bytes
            type_of = gguf.GGMLQuantizationType[kind]
            writer.add_tensor_info(model.name_of(parameter.name), shape, np.dtype(np.uint8), prod(shape), type_of)
        if factors is not None:
            writer.add_tensor_info(ROPE_FACTORS, factors.shape, factors.dtype, factors.nbytes)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for place in places:
            order = model.row_order(place.parameter.name, place.parameter.shape[0])
            rows = _rows(source, place, kinds[place.parameter.name])
            writer.write_tensor_data(rows if order is None else rows[order])
            advance()
        if factors is not None:
            writer.write_tensor_data(factors)
        writer.close()


def _place(parameter: Parameter) -> tuple[str, str]:
    """How it is stored, and the reason, as :class:`ParameterPlace` has them."""
    scheme = parameter.scheme
    if scheme == FLOAT:
        return FLOAT_STORED, ""
    if not isinstance(format_of(scheme), Integers):
        return FLOAT_STORED, f"no type that is written here has the codes of {scheme.format}"
    if scheme.activations == "int8":
        return FLOAT_STORED, "there is no place for the static grid of its inputs"
    if (scheme.group_size or 0) % BLOCK:
        return FLOAT_STORED, "32 input channels share a scale"
    if not parameter.half_scales:
        return FLOAT_STORED, "scales are float16, and some of its scales are not"
    return PLACES.get((scheme.bits, scheme.symmetric), (FLOAT_STORED, f"no type has codes of {scheme.bits} bits"))


def _kind(source: ExportSource, place: ParameterPlace) -> str:
    """The type of GGUF. llama.cpp wants vectors in float32; a float matrix is read here to see what it fits."""
    if place.stored != FLOAT_STORED:
        return place.stored
    return "F32" if len(place.parameter.shape) == 1 else narrowed(source.floats(place.parameter))[0]


def _rows(source: ExportSource, place: ParameterPlace, kind: str) -> NDArray[Any]:
    """What is written of a tensor, row by row."""
    if place.stored != FLOAT_STORED:
        return encode(source.codes(place.parameter), kind)
    weight = source.floats(place.parameter)
    return weight if kind == "F32" else narrowed(weight)[1]


def encode(linear: QuantizedWeight, kind: str) -> NDArray[np.uint8]:
    """The bytes ``[N, K / 32 * block bytes]`` of a linear ``[N, K]`` in groups of a multiple of 32 with float16 scales.

    >>> from tapeout.quantized import round_to_nearest
    >>> from tapeout.schemes import Scheme
    >>> weight = np.arange(-8, 24, dtype=np.float32)[None] / 8
    >>> encode(round_to_nearest(weight, Scheme(bits=8, symmetric=True)), "Q8_0").shape
    (1, 34)
    """
    rows, columns = linear.codes.shape
    blocks, repeat = columns // BLOCK, linear.group_size // BLOCK
    zeros = np.int16(format_of(linear.scheme).midpoint)
    if linear.zero_points is not None:
        zeros = np.repeat(linear.zero_points, repeat, axis=1)[:, :, None].astype(np.int16)
    levels = linear.codes.reshape(rows, blocks, BLOCK).astype(np.int16) - zeros
    if levels.min() < -LEVELS[kind] or levels.max() >= LEVELS[kind]:
        raise ValueError(f"levels {levels.min()} to {levels.max()} do not fit {kind}")
    scales = np.repeat(linear.scales, repeat, axis=1).astype("<f2")[:, :, None].view(np.uint8)
    if kind == "Q8_0":
        parts = [scales, levels.astype(np.int8).view(np.uint8)]
    else:
        codes = (levels + LEVELS[kind]).astype(np.uint8)
        fifth_bits = [np.packbits(codes >> 4, axis=2, bitorder="little")] if kind == "Q5_0" else []
        parts = [scales, *fifth_bits, _halves(codes)]
    return np.concatenate(parts, axis=2).reshape(rows, -1)


def _halves(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The low 4 bits: channel i of a block shares a byte with channel i + 16."""
    low, high = codes[:, :, :16] & np.uint8(15), codes[:, :, 16:] & np.uint8(15)
    return low | (high << np.uint8(4))
