"""Weights of a GGUF file of a mixture of experts, in the form that transformers has them.

A file has gates and ups of all experts apart, ``[E, I, H]`` each. A model has both in one parameter, one behind the
other or between one another, in some families transposed. One expert at a time is read. Floats keep their type. MXFP4
stays codes where the model's form is that of tapeout/coded_parameters.py, and becomes bfloat16 elsewhere, which holds
it exactly. All other types become float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from pipeline.export.gguf import REMEDY, GgufHeader
from pipeline.export.gguf_mixtures import EXPERTS, MixtureFile, mixture_of, place_of
from quantization.stored import GGUF_TYPES
from tapeout.coded_parameters import BLOCKS, SCALES, as_weight
from tapeout.errors import ExportError, one_line
from tapeout.formats.mxfp4 import BLOCK
from tapeout.number_format import AnyArray, CodeArray
from tapeout.operators.experts.in_torch import calls_interface

MXFP4 = "MXFP4"
HELD = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, MXFP4: torch.bfloat16}

Index = tuple[int, ...]
Read = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Part:
    """A tensor of the file that is all of a parameter, or some of the output channels of each of its experts.

    ``rows``: these channels. ``alone``: how many of its first dimensions are read one by one: that of experts.
    """

    tensor: Any  # gguf.ReaderTensor
    rows: slice
    alone: int

    @property
    def kind(self) -> str:
        return self.tensor.tensor_type.name

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape.tolist()[::-1])

    def indices(self) -> Sequence[Index]:
        return list(np.ndindex(self.shape[: self.alone]))


def reads(file: MixtureFile, model: Any) -> dict[str, Read]:
    """By name, what reads each parameter of ``model``, or the two parts of one that stays codes.

    ``model`` may be on the meta device.
    """
    from gguf import GGUFReader

    stored = {tensor.name: tensor for tensor in GGUFReader(file.path).tensors}
    found: dict[str, Read] = {}
    for parameter, names in file.tensors.items():
        module = model.get_submodule(parameter.rpartition(".")[0])
        experts = calls_interface(module)
        parts = parts_of([stored[name] for name in names], file.shape(names[0]), experts and not module.is_concatenated)
        transposed = experts and module.is_transposed and len(parts[0].shape) == 3
        if file.mixture.keeps_codes and transposed and {part.kind for part in parts} == {MXFP4}:
            found[f"{parameter}{BLOCKS}"] = partial(_blocks, parts)
            found[f"{parameter}{SCALES}"] = partial(_scales, parts)
        else:
            shape = tuple(model.get_parameter(parameter).shape)
            heads = _paired_heads(file, parameter)
            found[parameter] = partial(_weight, file, parts, shape, transposed=transposed, heads=heads)
    return found


def parts_of(tensors: Sequence[Any], shape: str, interleaved: bool) -> list[Part]:
    """``shape``: in letters. ``interleaved``: channels of several tensors lie between one another."""
    alone = int(shape.startswith(EXPERTS) and len(shape) > 1)
    rows = int(tensors[0].shape.tolist()[::-1][alone])
    count = len(tensors)
    return [
        Part(tensor, slice(n, None, count) if interleaved else slice(n * rows, (n + 1) * rows), alone)
        for n, tensor in enumerate(tensors)
    ]


def _paired_heads(file: MixtureFile, parameter: str) -> int:
    """Of a weight whose rows llama.cpp has in another order; 0 for one whose rows stay."""
    part = parameter.rpartition(".")[0].rpartition(".")[2]
    heads = {"q_proj": file.config.num_attention_heads, "k_proj": file.config.num_key_value_heads}
    return heads.get(part, 0) if file.mixture.paired_rows else 0


def _weight(
    file: MixtureFile, parts: Sequence[Part], shape: tuple[int, ...], *, transposed: bool, heads: int
) -> torch.Tensor:
    types = {HELD.get(part.kind, torch.float32) for part in parts}
    found = torch.empty(shape, dtype=types.pop() if len(types) == 1 else torch.float32)
    rows = found.mT if transposed else found
    for part in parts:
        for index in part.indices():
            try:
                values = _values(part.tensor.data[index], part.tensor.tensor_type)
            except MemoryError:
                raise
            except Exception as error:  # the gguf package's own words
                raise ExportError(
                    f"{part.tensor.name} of {file.path.name} ({part.kind}, {list(part.shape)}) cannot be read: "
                    f"{one_line(error)}",
                    expected="a type that the gguf package reads",
                    remedy=REMEDY,
                ) from error
            place = rows[index][part.rows]
            place.copy_(values.reshape(place.shape))
    if heads:  # a half of a head's channels after the other, as transformers turns them
        found = found.reshape(heads, -1, 2, *shape[1:]).transpose(1, 2).reshape(shape)
    return found


def _values(data: AnyArray, kind: Any) -> torch.Tensor:
    from gguf import dequantize

    if kind.name == MXFP4:
        return torch.from_numpy(as_weight(mxfp4_blocks(data), _mxfp4_scales(data)).dequantize()).to(torch.bfloat16)
    if kind.name == "BF16":
        return torch.from_numpy(np.array(data)).view(torch.bfloat16)
    return torch.from_numpy(np.array(data) if kind.name in HELD else dequantize(data, kind))


def mxfp4_blocks(data: AnyArray) -> CodeArray:
    """``[N, K/32, 16]`` of rows ``[N, K/32 * 17]`` of a file.

    A block there is its scale, and 16 bytes of which the low bits are its first 16 codes, the high bits the others.
    Here two codes that follow one another share a byte.
    """
    octets = _by_block(data)[..., 1:]
    even, odd = octets[..., ::2], octets[..., 1::2]
    first = (even & np.uint8(0x0F)) | (odd << np.uint8(4))
    second = (even >> np.uint8(4)) | (odd & np.uint8(0xF0))
    return np.concatenate([first, second], axis=-1)


def _mxfp4_scales(data: AnyArray) -> CodeArray:
    """``[N, K/32]`` of such rows."""
    return _by_block(data)[..., 0]


def _by_block(data: AnyArray) -> CodeArray:
    return np.asarray(data).reshape(*data.shape[:-1], -1, GGUF_TYPES[MXFP4][1])


def _blocks(parts: Sequence[Part]) -> torch.Tensor:
    """``[E, N, K/32, 16]`` of a parameter that stays codes."""
    return _codes(parts, mxfp4_blocks, (BLOCK // 2,))


def _scales(parts: Sequence[Part]) -> torch.Tensor:
    """``[E, N, K/32]``."""
    return _codes(parts, _mxfp4_scales, ())


def _codes(parts: Sequence[Part], read: Callable[[AnyArray], CodeArray], last: tuple[int, ...]) -> torch.Tensor:
    experts, rows, columns = parts[0].shape
    found = np.empty((experts, len(parts) * rows, columns // BLOCK, *last), np.uint8)
    for part in parts:
        for index in part.indices():
            found[index][part.rows] = read(part.tensor.data[index])
    return torch.from_numpy(found)


@dataclass(frozen=True)
class ParameterSize:
    """``piece``: elements that are read together. ``stored_bytes``: as it is written."""

    elements: int
    piece: int
    stored_bytes: int


def parameter_sizes(header: GgufHeader) -> list[ParameterSize]:
    """Of what :func:`reads` gives, from the header alone; a tensor that has no place counts by itself."""
    mixture = mixture_of(header.metadata)
    grouped: dict[str, list[str]] = {}
    for name in header.tensors:
        place = place_of(mixture, name) if mixture else None
        grouped.setdefault(place.parameter if place else name, []).append(name)
    coded = mixture is not None and mixture.keeps_codes
    return [_size(header, names, coded) for names in grouped.values()]


def _size(header: GgufHeader, names: Sequence[str], coded: bool) -> ParameterSize:
    shapes, kinds = [header.shapes[name] for name in names], {header.tensors[name] for name in names}
    elements = sum(map(math.prod, shapes))
    piece = max(math.prod(shape[-2:]) for shape in shapes)
    if coded and kinds == {MXFP4} and len(shapes[0]) == 3:
        block, octets = GGUF_TYPES[MXFP4]
        return ParameterSize(elements, piece, elements // block * octets)
    types = {HELD.get(kind, torch.float32) for kind in kinds}
    each = types.pop().itemsize if len(types) == 1 else torch.float32.itemsize
    return ParameterSize(elements, piece, each * elements)
