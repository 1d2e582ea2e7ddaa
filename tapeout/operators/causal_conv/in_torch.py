"""The convolutions of stock transformers models: emitted as nodes, or with tokens before, no code per architecture.

B  batch      C  channels      S  new tokens      K  taps: tokens that an output depends on
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import count
from typing import Any

import torch
from torch import Tensor

from tapeout.errors import ExportError
from tapeout.operators import causal_conv
from tapeout.operators.hub_functions import functions_replaced, hub_functions
from tapeout.operators.operator import StateBefore, StateLeft, TracedState, Tracer

FUNCTION = "causal_conv1d_fn"  # the one that models without a cache call


def conv_traced(model: Any, tracer: Tracer) -> AbstractContextManager[None]:
    """See :meth:`tapeout.operators.operator.Operator.traced`."""

    def convolve(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        channels, taps = weight.shape
        if taps < 2:
            raise ExportError(f"a convolution over {taps} token", expected="over at least 2", remedy="report the model")
        kept = TracedState(tracer.unique(causal_conv.STATE), (int(taps) - 1, int(channels)))
        inputs = [x.transpose(1, 2), weight, bias, *([tracer.mask] if tracer.emits else [])]
        y = tracer.node(causal_conv.OPERATOR, inputs, {"channels": int(channels)}, [kept], x.shape[2])
        return y.transpose(1, 2)

    return functions_replaced(model, {FUNCTION: _as_called(convolve)})


def conv_resumed(model: Any, before: StateBefore) -> AbstractContextManager[None]:
    """See :meth:`tapeout.operators.operator.Operator.resumed`."""
    calls = count()

    def convolve(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        number = next(calls)
        past = before(f"{causal_conv.STATE}{number or ''}").transpose(1, 2)
        inputs = torch.cat([past.expand(x.shape[0], -1, -1), x], 2)
        return torch.nn.functional.conv1d(inputs, weight.unsqueeze(1), bias, groups=weight.shape[0])

    return functions_replaced(model, {FUNCTION: _as_called(convolve)})


def conv_leaving(model: Any, left: StateLeft) -> AbstractContextManager[None]:
    """See :meth:`tapeout.operators.operator.Operator.leaving`."""
    convolutions = [vars(module)[name] for module, name in hub_functions(model).get(FUNCTION, [])]

    def convolve(x: Tensor, weight: Tensor, *arguments: Any, **options: Any) -> Tensor:
        kept = int(weight.shape[1]) - 1
        left(causal_conv.STATE, torch.nn.functional.pad(x, (kept, 0))[..., -kept:].transpose(1, 2))
        return convolutions[0](x, weight, *arguments, **options)

    return functions_replaced(model, {FUNCTION: convolve})


def _as_called(convolve: Callable[[Tensor, Tensor, Tensor | None], Tensor]) -> Callable[..., Tensor]:
    """A function of ``x [B, C, S]``, ``weight [C, K]`` and ``bias [C]``, called as models call transformers' own."""

    def called(
        x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **options: Any
    ) -> Tensor:
        from transformers.activations import ACT2FN

        given = {name: value for name, value in options.items() if value is not None and name in CHANGING}
        if given:
            raise ExportError(
                f"a convolution with {', '.join(given)}",
                expected="a causal convolution of one sequence, with an activation or without",
                remedy="report the model; its graph was not kept",
            )
        y = convolve(x, weight, bias)
        return y if activation is None else ACT2FN[activation](y)

    return called


# Options of the packages' functions that change what they compute: several sequences in a row, or states at hand.
CHANGING = frozenset({"seq_idx", "cu_seqlens", "initial_states", "conv_states", "cache_indices"})
