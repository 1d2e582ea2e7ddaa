"""Place the tensors of a checkpoint in a model of transformers as views of their files (tapeout/mapped_weights.py).

transformers gets stand-ins, which have shapes and no memory, and reports what is missing, unknown or misshapen. Then
mapped tensors take their place.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tapeout.coded_parameters import StoredCodes
from tapeout.mapped_weights import HALF, PIECE, CodedParameter
from tapeout.tensor_files import FLOATS, StoredTensor

Stored = Mapping[str, StoredTensor | StoredCodes]


def stand_ins(stored: Stored, vocabulary: int) -> dict[str, torch.Tensor]:
    """By name, a float32 tensor to place in the model of which the storage says whose place it is.

    A matrix takes no memory. transformers unties an embedding and a head that were stored with different values, so
    their stand-ins differ in value, too. What is no float, or small, is read: it may be a buffer.
    """
    made: dict[str, torch.Tensor] = {}
    heads: list[tuple[str, torch.Tensor]] = []
    for name, tensor in stored.items():
        if len(tensor.shape) < 2 or tensor.dtype not in FLOATS:
            value = tensor.read()
            made[name] = value.float().clone() if value.is_floating_point() else value
            continue
        value = torch.zeros(())
        if tensor.shape[0] == vocabulary:
            values = tensor.read()
            same = next((other for other, seen in heads if _equal(seen, values)), None)
            value += len(heads) if same is None else made[same][0, 0]
            heads.append((name, values))
        made[name] = value.expand(tensor.shape)
    return made


def place_stored(model: torch.nn.Module, placed: Mapping[str, torch.Tensor], stored: Stored) -> bool:
    """Give every parameter its mapped tensor; False where one is not stored as it is, but computed from others."""
    names = {tensor.untyped_storage().data_ptr(): name for name, tensor in placed.items()}
    parameters, buffers = (
        [(value, names.get(value.untyped_storage().data_ptr())) for value in values]
        for values in (model.parameters(), model.buffers())
    )
    if any(name is None for _, name in parameters):
        return False
    for module in model.modules():
        for at, parameter in list(module.named_parameters(recurse=False)):
            coded = stored[names[parameter.untyped_storage().data_ptr()]]
            if isinstance(coded, StoredCodes):
                setattr(module, at, CodedParameter.of(coded))
    for value, name in [*parameters, *buffers]:
        if name is not None and isinstance(stored[name], StoredTensor):
            read = stored[name].read()
            keep = read.dtype in HALF and isinstance(value, torch.nn.Parameter)
            value.data = read if keep else read.to(value.dtype)
    return True


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape:
        return False
    pieces = zip(one.flatten().split(PIECE), other.flatten().split(PIECE), strict=True)
    return all(torch.equal(a.float(), b.float()) for a, b in pieces)
