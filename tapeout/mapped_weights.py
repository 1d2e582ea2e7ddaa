"""Weights that stay in their files: mapped, in the type they are stored in, and in float32 only while they are used.

transformers reads a checkpoint into memory and converts it: that takes twice the memory of its file before anything is
computed. Here a parameter is a view of the mapped file, which the system reads when it is used and drops when memory is
short. A module computes with float32 copies, which live as long as its call. Embeddings and linears convert the rows or
outputs that they need, some at a time: lm_head alone may be 2 GB. Codes are decoded where others are converted
(tapeout/coded_parameters.py).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from tapeout.coded_parameters import StoredCodes

HALF = (torch.float16, torch.bfloat16)
SLICED = (nn.Embedding, nn.Linear)
OUTPUTS_AT_ONCE = 16384  # of a linear, converted to float32 together
PIECE = 1 << 22  # elements that are looked at in one go
_CONTEXT = "float32_context"  # of a module, during its call


class CodedParameter(nn.Parameter):
    """A parameter that is stored as codes. It has a shape and no memory; what does not decode it reads NaN."""

    stored: StoredCodes

    @classmethod
    def of(cls, stored: StoredCodes) -> CodedParameter:
        made = cls(torch.full((), torch.nan, dtype=torch.bfloat16).expand(stored.shape), requires_grad=False)
        made.stored = stored
        _ = stored.mapped  # as other parameters are: files in a scratch folder are removed
        return made


def compute_in_float32(model: nn.Module) -> None:
    """Let modules over 16-bit parameters compute in float32."""

    def begin(module: nn.Module, _: Any) -> None:
        parameters = list(_read_by(module))
        if any(parameter.dtype in HALF for parameter in parameters):
            context: AbstractContextManager[Any] = _Sliced() if isinstance(module, SLICED) else widened(parameters)
            context.__enter__()
            module.__dict__[_CONTEXT] = context

    def end(module: nn.Module, *_: Any) -> None:
        if context := module.__dict__.pop(_CONTEXT, None):
            context.__exit__(None, None, None)

    for module in model.modules():
        if any(parameter.dtype in HALF for parameter in _read_by(module)):
            module.register_forward_pre_hook(begin)
            module.register_forward_hook(end, always_call=True)


def _read_by(module: nn.Module) -> Iterator[nn.Parameter]:
    """What a call of a module may read: its own, and those of parts whose call it may leave out, as LFM2 its Conv1d."""
    yield from module.parameters(recurse=False)
    for part in module.children():
        if isinstance(part, nn.ModuleList | nn.ModuleDict):
            yield from _read_by(part)
        elif not isinstance(part, SLICED) and next(part.children(), None) is None:
            yield from part.parameters(recurse=False)


def widened(parameters: Iterable[nn.Parameter]) -> AbstractContextManager[None]:
    """A context in which 16-bit parameters are float32 copies."""
    return _exchanged((parameter for parameter in parameters if parameter.dtype in HALF), _float32)


def _float32(parameter: nn.Parameter) -> Tensor:
    return parameter.stored.read_float32() if isinstance(parameter, CodedParameter) else parameter.data.float()


def weight_at_call(
    module: nn.Module, weight: Callable[[], Tensor], parameter: str = "weight"
) -> tuple[RemovableHandle, RemovableHandle]:
    """Let ``module`` compute with ``weight()``, which is held during its calls only. Returns the hooks that do it."""
    held: list[Tensor] = []

    def begin(module: Any, _: Any) -> None:
        held.append(getattr(module, parameter).data)
        getattr(module, parameter).data = weight()

    def end(module: Any, *_: Any) -> None:
        getattr(module, parameter).data = held.pop()

    # Before the hooks of `compute_in_float32`, which then have nothing to convert.
    return (
        module.register_forward_pre_hook(begin, prepend=True),
        module.register_forward_hook(end, always_call=True),
    )


def weightless(model: nn.Module) -> AbstractContextManager[None]:
    """A context in which parameters are float32 and take no memory: for tracing, which needs shapes alone."""
    return _exchanged(model.parameters(), lambda parameter: torch.zeros(()).expand(parameter.shape))


@contextmanager
def _exchanged(parameters: Iterable[nn.Parameter], change: Callable[[nn.Parameter], Tensor]) -> Generator[None]:
    held = [(parameter, parameter.data) for parameter in parameters]
    for parameter, _ in held:
        parameter.data = change(parameter)
    try:
        yield
    finally:
        for parameter, data in held:
            parameter.data = data


class _Sliced(TorchFunctionMode):
    """The call of an embedding or a linear: rows that are looked up, or some outputs at a time, in float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.embedding:
            return args[1][args[0]].float()
        if func is functional.linear:
            bias = args[2] if len(args) > 2 else kwargs.get("bias")
            weights = args[1].split(OUTPUTS_AT_ONCE)
            biases = [None] * len(weights) if bias is None else bias.split(OUTPUTS_AT_ONCE)
            parts = [
                functional.linear(args[0], weight.float(), None if added is None else added.float())
                for weight, added in zip(weights, biases, strict=True)
            ]
            return parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        if func.__name__ != "__get__":  # what a module of its own kind does with its weight
            args, kwargs = tuple(map(_wide, args)), {name: _wide(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, nn.Parameter) and value.dtype in HALF else value


def is_finite(tensor: Tensor) -> bool:
    """Without NaN and infinity. Read piece by piece, so that little memory is taken."""
    return all(bool(torch.isfinite(piece).all()) for piece in tensor.detach().flatten().split(PIECE))
