"""Complex products in real numbers: DeepSeek-V2 turns queries and keys by them, and ONNX has no complex operators.

A complex tensor is a pair of real ones while a model is traced. It may be multiplied and shaped as rotary embeddings
are; whatever else a model does with it stops the trace.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class WrittenOut(TorchFunctionMode):
    """A context in which ``torch.polar`` and ``torch.view_as_complex`` give pairs of real tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.polar:
            magnitude, angle = args
            return _Pairs(magnitude * torch.cos(angle), magnitude * torch.sin(angle))
        if func is torch.view_as_complex:
            return _Pairs(*args[0].unbind(-1))
        if func is torch.view_as_real and isinstance(args[0], _Pairs):
            return torch.stack((args[0].real, args[0].imaginary), -1)
        return func(*args, **kwargs)


class _Pairs:
    """The real and the imaginary part of a complex tensor, each of its shape."""

    def __init__(self, real: Tensor, imaginary: Tensor) -> None:
        self.real, self.imaginary = real, imaginary
        self.device = real.device

    def __mul__(self, other: _Pairs | float) -> _Pairs:
        if isinstance(other, _Pairs):
            a, b, c, d = self.real, self.imaginary, other.real, other.imaginary
            return _Pairs(a * c - b * d, b * c + a * d)
        return _Pairs(self.real * other, self.imaginary * other)

    def unsqueeze(self, dim: int) -> _Pairs:
        return _Pairs(self.real.unsqueeze(dim), self.imaginary.unsqueeze(dim))

    def to(self, device: torch.device) -> _Pairs:
        return _Pairs(self.real.to(device), self.imaginary.to(device))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return NotImplemented  # by which torch hands a pair to the mode, and refuses it elsewhere
