"""Parameters of a float checkpoint that stay codes: experts in MXFP4, as gpt-oss is published.

A parameter ``X`` of a model, ``[E, K, N]``, is stored as ``X_blocks`` ``[E, N, K/32, 16]`` and ``X_scales``
``[E, N, K/32]``, bytes both: transformers' layout of what the format of that name calls codes and scales. A portable
graph shares these tensors with its source. They are decoded where floats are needed, one expert after the other; what
keeps the format reads the codes.

E  experts      N  output channels      K  input channels
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from tapeout.formats.mxfp4 import BIAS, LARGEST_EXPONENT
from tapeout.number_format import CodeArray, FloatArray
from tapeout.quantized import QuantizedWeight, format_of
from tapeout.schemes import Scheme
from tapeout.tensor_files import StoredTensor

BLOCKS, SCALES = "_blocks", "_scales"  # after the parameter's name
FORMAT = "mxfp4"
DTYPE = "BF16"  # which holds all values of the format


def scheme() -> Scheme:
    return Scheme.model_validate({"format": FORMAT})


def coded_names(types: Mapping[str, str]) -> tuple[str, ...]:
    """Parameters that are stored as codes, of tensors whose types are given by name, as safetensors names types."""
    return tuple(
        name.removesuffix(BLOCKS)
        for name, dtype in types.items()
        if name.endswith(BLOCKS) and dtype == "U8" == types.get(f"{name.removesuffix(BLOCKS)}{SCALES}")
    )


def parameter_shape(blocks: tuple[int, ...]) -> tuple[int, int, int]:
    """Of the parameter whose blocks have this shape."""
    experts, outputs, groups, octets = blocks
    return experts, groups * 2 * octets, outputs


def as_weight(blocks: CodeArray, scales: CodeArray) -> QuantizedWeight:
    """``[.., N, K]``, of all experts or of one."""
    packed = blocks.reshape(*blocks.shape[:-2], -1)
    found = format_of(scheme())
    return QuantizedWeight.of(found.decode({"weight_packed": packed, "weight_scale": scales}), scheme())


def decoded(blocks: CodeArray, scales: CodeArray) -> FloatArray:
    """``[E, K, N]``."""
    found = np.empty(parameter_shape(blocks.shape), np.float32)
    for expert, (codes, of_blocks) in enumerate(zip(blocks, scales, strict=True)):
        found[expert] = as_weight(codes, of_blocks).dequantize().T
    return found


@dataclass(frozen=True)
class StoredCodes:
    """Such a parameter in a file, as if it were stored in bfloat16 (:class:`tapeout.tensor_files.StoredTensor`)."""

    name: str
    blocks: StoredTensor
    scales: StoredTensor

    @property
    def dtype(self) -> str:
        return DTYPE

    @cached_property
    def shape(self) -> tuple[int, int, int]:
        return parameter_shape(self.blocks.shape)

    @property
    def parts(self) -> tuple[StoredTensor, StoredTensor]:
        return self.blocks, self.scales

    @cached_property
    def mapped(self) -> tuple[CodeArray, CodeArray]:
        """Blocks and scales, as views of their file, which may be removed from then on."""
        return self.blocks.read().numpy(), self.scales.read().numpy()

    def is_finite(self) -> bool:
        largest = int(self.mapped[1].max(initial=0))
        return largest <= BIAS + LARGEST_EXPONENT or bool(np.isfinite(decoded(*self.mapped)).all())

    def read_float32(self) -> Any:
        """As a torch tensor."""
        import torch

        return torch.from_numpy(decoded(*self.mapped))

    def read(self) -> Any:
        """As a torch tensor in bfloat16."""
        import torch

        return self.read_float32().to(torch.bfloat16)


def with_codes(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor | StoredCodes]:
    """The parameters of a checkpoint by name, those that are stored as codes in place of their parts."""
    found: dict[str, StoredTensor | StoredCodes] = dict(stored)
    for name in coded_names({name: tensor.dtype for name, tensor in stored.items()}):
        blocks, scales = (found.pop(f"{name}{part}") for part in (BLOCKS, SCALES))
        assert isinstance(blocks, StoredTensor) and isinstance(scales, StoredTensor)
        found[name] = StoredCodes(name, blocks, scales)
    return found
