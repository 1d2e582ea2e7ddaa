"""Let a stock transformers model emit ``tapeout::Experts``, or show and change what its experts read, with no code per
architecture.

Modules of experts call what transformers' experts interface holds, and their flags say how weights are laid out. What
they do between their two projections is measured: gates are called with numbers, and one that does not what
:class:`tapeout.operators.experts.ExpertGate` can say is refused.

E  experts      H  hidden size      I  inner channels of an expert      T  tokens of all sequences      k  of a token
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tapeout.errors import ExportError
from tapeout.operators import experts
from tapeout.operators.experts import ExpertGate
from tapeout.operators.operator import Tracer

FLAGS = ("is_concatenated", "is_transposed", "has_bias", "has_gate", "has_post_expert_norm")  # of the interface
WITHIN_LIMITS, BEYOND_LIMITS = 0.25, 1e4  # smaller and larger than any limit of a gate
DIGITS = 5  # to which the numbers of a gate are measured
TOLERANCE = 1e-6  # relative, of a gate against what was measured; modules may compute in float32

InputChange = Callable[[torch.nn.Module, int, int, Tensor, Tensor], Tensor]  # see experts_changed
TokensSeen = Callable[[torch.nn.Module, Tensor, Tensor], None]  # see experts_changed
_numbers = itertools.count()


def require_interface(model: Any) -> None:
    """:class:`ExportError` for experts that do not call transformers' experts interface."""
    for name, module in model.named_modules():
        named = name.rpartition(".")[2] == "experts" or type(module).__name__.endswith("Experts")
        if named and not calls_interface(module):
            raise ExportError(
                f"{type(model).__name__} is a mixture of experts outside transformers' experts interface ({name})",
                expected="experts that call the interface (transformers.integrations.moe), or none",
                remedy="choose another model",
            )


@contextmanager
def experts_traced(model: Any, tracer: Tracer) -> Generator[None]:
    """See :meth:`tapeout.operators.operator.Operator.traced`."""
    require_interface(model)
    found = {module: gate_of(module, name) for name, module in model.named_modules() if calls_interface(module)}
    if not found:
        yield
        return

    def emitted(module: torch.nn.Module, x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        attributes = asdict(found[module]) | {"interleaved": int(found[module].interleaved)}
        return tracer.node(experts.OPERATOR, [x, index, weight, *_weights(module)], attributes, [], 0)

    with _computed_by(model, emitted):
        yield


@contextmanager
def experts_changed(model: Any, change: InputChange, seen: TokensSeen | None = None) -> Generator[None]:
    """Let experts compute, one by one, with what ``change`` makes of the inputs of their projections.

    ``change(module, number, expert, inputs, weight)``: ``inputs [n, K]`` of the tokens that chose the expert, with
    their routing weights ``[n]``; ``number`` is that of the projection among the operator's inputs.
    ``seen(module, x, index)``, called after the experts: all tokens ``[T, H]`` and what each chose ``[T, k]``.
    """

    def computed(module: Any, x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        _, down, _, down_bias = _weights(module)
        output = torch.zeros_like(x)
        for expert in index.unique().tolist():
            tokens, place = torch.where(index == expert)
            share = weight[tokens, place]
            inputs = change(module, experts.UP_INPUT, expert, x[tokens], share)
            inner = change(module, experts.DOWN_INPUT, expert, inner_channels(module, expert, inputs), share)
            answer = functional.linear(inner, down[expert]) + down_bias[min(expert, len(down_bias) - 1)]
            output.index_add_(0, tokens, (answer * share[:, None]).to(output.dtype))
        if seen is not None:
            seen(module, x, index)
        return output

    with _computed_by(model, computed):
        yield


def inner_channels(module: Any, expert: int, x: Tensor) -> Tensor:
    """What the second projection of an expert reads ``[n, I]`` of tokens ``[n, H]``."""
    up, _, bias, _ = _weights(module)
    projected = functional.linear(x, up[expert]) + bias[min(expert, len(bias) - 1)]
    return module._apply_gate(projected) if module.has_gate else module.act_fn(projected)


@contextmanager
def _computed_by(model: Any, function: Callable[[Any, Tensor, Tensor, Tensor], Tensor]) -> Generator[None]:
    from transformers.integrations import moe

    interface: Any = moe.ALL_EXPERTS_FUNCTIONS
    # A name of its own, so that models in one process never call each other's functions.
    name, previous = f"tapeout_{next(_numbers)}", model.config._experts_implementation
    interface.register(name, function)
    try:
        model.set_experts_implementation(name)
        yield
    finally:
        model.set_experts_implementation(previous)
        del interface._global_mapping[name]


def calls_interface(module: torch.nn.Module) -> bool:
    """Whether a module holds the experts of a layer, and computes them by transformers' interface."""
    return all(hasattr(module, flag) for flag in FLAGS)


def _weights(module: Any) -> list[Tensor]:
    """Up ``[E, 2I or I, H]``, down ``[E, H, I]`` and their biases, as the operator has them."""
    part = "gate_up_proj" if module.has_gate else "up_proj"
    weights = [getattr(module, part), module.down_proj]
    if module.is_transposed:
        weights = [weight.transpose(1, 2) for weight in weights]
    none = weights[0].new_zeros(1, 1)
    biases = (getattr(module, f"{name}_bias") if module.has_bias else none for name in (part, "down_proj"))
    return [*weights, *biases]


def gate_of(module: Any, name: str) -> ExpertGate:
    """What a module does between its projections. :class:`ExportError` where no :class:`ExpertGate` says it."""
    kind = f"{name} ({type(module).__name__})"
    if module.has_post_expert_norm:
        raise ExportError(
            f"{kind} normalizes the output of each expert",
            expected="experts of two projections, with a gate or without",
            remedy="choose another model",
        )
    inner = int(module.down_proj.shape[1 if module.is_transposed else 2])
    interleaved = bool(module.has_gate and not module.is_concatenated)
    for gate in _candidates(module, inner, interleaved):
        if _is_gate(module, gate, inner):
            return gate
    raise ExportError(
        f"{kind} computes something else between its projections than any known gate",
        expected="silu, gelu or squared relu of a gate, which may be limited, times a channel that may be limited and "
        "shifted; or such a function alone",
        remedy="report the model",
    )


def _candidates(module: Any, inner: int, interleaved: bool) -> list[ExpertGate]:
    """Gates with the limit, the offset and the sharpness that a few numbers show.

    ``activation(g) * (clip(u) + offset)`` is linear in small u, where its zero is the offset, and constant in large u,
    where it is the limit.
    """
    gates = torch.full((3,), WITHIN_LIMITS)
    if not module.has_gate:
        value = _computed(module, gates, None, inner, False)[0].item()
        return [ExpertGate(activation, _sharpness(value, activation)) for activation in experts.ACTIVATIONS]
    ups = torch.tensor([0.0, WITHIN_LIMITS, BEYOND_LIMITS])
    at_zero, near, far = _computed(module, gates, ups, inner, interleaved).tolist()
    slope = (near - at_zero) / WITHIN_LIMITS
    if not (math.isfinite(far) and slope):
        return []
    offset, limit = round(at_zero / slope, DIGITS), round((far - at_zero) / slope, DIGITS)
    limit = 0.0 if limit > BEYOND_LIMITS / 2 else limit
    return [
        ExpertGate(activation, _sharpness(slope, activation), limit, offset, interleaved)
        for activation in experts.ACTIVATIONS
    ]


def _sharpness(value: float, activation: str) -> float:
    """The alpha of a silu that has this value at ``WITHIN_LIMITS``; 1 of other functions, and where there is none."""
    sigmoid = value / WITHIN_LIMITS
    if activation != "silu" or not 0 < sigmoid < 1:
        return 1.0
    return round(math.log(sigmoid / (1 - sigmoid)) / WITHIN_LIMITS, DIGITS)


def _is_gate(module: Any, gate: ExpertGate, inner: int) -> bool:
    """Whether a module computes that gate, on a grid of values on both sides of every limit."""
    around = [0.0, 0.3, 1.0, 2.5, 6.0, 20.0, *([gate.limit * share for share in (0.9, 1.1, 3.0)] if gate.limit else [])]
    values = torch.tensor([sign * value for value in around for sign in (1, -1)])
    gates, ups = values.repeat_interleave(len(values)), values.repeat(len(values))
    actual = _computed(module, gates, ups if module.has_gate else None, inner, gate.interleaved)
    expected = gated(gate, gates.double(), ups.double() if module.has_gate else None)
    return bool(torch.isfinite(actual).all()) and torch.allclose(actual, expected, rtol=TOLERANCE, atol=TOLERANCE)


def gated(gate: ExpertGate, gates: Tensor, ups: Tensor | None) -> Tensor:
    """What :class:`ExpertGate` says, of any shape. Without ``ups`` there is no gate, and ``gates`` are all."""
    bound = gate.limit or math.inf
    gates = gates.clamp(max=bound)
    active = {
        "silu": lambda: gates * torch.sigmoid(gate.alpha * gates),
        "gelu": lambda: torch.nn.functional.gelu(gates),
        "gelu_tanh": lambda: torch.nn.functional.gelu(gates, approximate="tanh"),
        "relu2": lambda: torch.relu(gates) ** 2,
    }[gate.activation]()
    return active if ups is None else active * (ups.clamp(-bound, bound) + gate.offset)


def _computed(module: Any, gates: Tensor, ups: Tensor | None, inner: int, interleaved: bool) -> Tensor:
    """What a module makes of these values of one channel, in float64; all channels have the same."""
    gates = gates.double()[:, None].expand(-1, inner)
    with torch.no_grad():
        if ups is None:
            found = module.act_fn(gates)
        else:
            parts = [gates, ups.double()[:, None].expand(-1, inner)]
            found = module._apply_gate(torch.stack(parts, -1).flatten(1) if interleaved else torch.cat(parts, 1))
    if not torch.allclose(found, found[:, :1], rtol=TOLERANCE, atol=TOLERANCE):
        return torch.full_like(found[:, 0], math.nan)  # channels are no equals: no gate that we know
    return found[:, 0]
