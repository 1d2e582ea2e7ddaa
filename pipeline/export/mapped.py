"""Parameters that stay in their files: mapped, in the type they are stored in, and in float32 only while they are used.

transformers reads a checkpoint into memory and converts it. A model of several gigabytes then needs twice the memory of
its file before anything is computed. Here transformers places stand-ins, which have shapes and no memory, and reports
what is missing, unknown or misshapen. The tensors that take their place are views of the mapped files, which the system
reads when they are used and drops when memory is short.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from tapeout.tensor_files import StoredTensor

FLOATS = ("F64", "F32", "F16", "BF16")
HALF = (torch.float16, torch.bfloat16)
Stored = Mapping[str, StoredTensor]
PIECE = 1 << 22  # elements that are looked at in one go


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
    for value, name in [*parameters, *buffers]:
        if name is not None:
            read = stored[name].read()
            keep = read.dtype in HALF and isinstance(value, torch.nn.Parameter)
            value.data = read if keep else read.to(value.dtype)
    return True


def compute_in_float32(model: torch.nn.Module) -> None:
    """Let modules over 16-bit parameters compute in float32: each holds a float32 copy while it runs."""

    def widen(module: torch.nn.Module, _: Any) -> None:
        module.__dict__["narrow"] = [(p, p.data) for p in module.parameters(recurse=False) if p.dtype in HALF]
        for parameter, data in module.__dict__["narrow"]:
            parameter.data = data.float()

    def restore(module: torch.nn.Module, *_: Any) -> None:
        for parameter, data in module.__dict__.pop("narrow", ()):
            parameter.data = data

    for module in model.modules():
        if any(parameter.dtype in HALF for parameter in module.parameters(recurse=False)):
            module.register_forward_pre_hook(widen)
            module.register_forward_hook(restore, always_call=True)


@contextmanager
def weightless(model: torch.nn.Module) -> Generator[None]:
    """While it holds, parameters are float32 and take no memory: for tracing, which needs shapes alone."""
    held = [(parameter, parameter.data) for parameter in model.parameters()]
    for parameter, data in held:
        parameter.data = torch.zeros(()).expand(data.shape)
    try:
        yield
    finally:
        for parameter, data in held:
            parameter.data = data


def is_finite(tensor: torch.Tensor) -> bool:
    """Without NaN and infinity. Read piece by piece, so that little memory is taken."""
    return all(bool(torch.isfinite(piece).all()) for piece in tensor.detach().flatten().split(PIECE))


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape:
        return False
    pieces = zip(one.flatten().split(PIECE), other.flatten().split(PIECE), strict=True)
    return all(torch.equal(a.float(), b.float()) for a, b in pieces)
