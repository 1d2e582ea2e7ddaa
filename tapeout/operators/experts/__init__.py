"""Experts of a mixture: each token goes through the few that the router chose, and their outputs are added by weight.

The router is no part of it: scores, choice and weights are standard operators of the graph. Experts keep nothing.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tapeout.operators import DOMAIN
from tapeout.operators.operator import Operator

if TYPE_CHECKING:
    import numpy as np
    import onnx_ir as ir
    from numpy.typing import NDArray

    from tapeout.operators.operator import Tracer

NAME = "Experts"
CHOICE_INPUT, UP_INPUT, DOWN_INPUT = 1, 3, 4
UNITS = {UP_INPUT: "experts_up", DOWN_INPUT: "experts_down"}  # of a plan
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu2")


@dataclass(frozen=True)
class ExpertGate:
    """What becomes of an expert's inner channels: ``activation(min(gate, limit)) * (clip(up, ±limit) + offset)``.

    ``activation``: one of ``ACTIVATIONS``, where silu is ``x * sigmoid(alpha * x)``. ``limit`` 0: none.
    ``interleaved``: a channel's gate is beside its up; else all gates come before all ups.
    """

    activation: str
    alpha: float = 1.0
    limit: float = 0.0
    offset: float = 0.0
    interleaved: bool = False

    @classmethod
    def of(cls, node: ir.Node) -> ExpertGate:
        alpha, limit, offset = (node.attributes[name].as_float() for name in ("alpha", "limit", "offset"))
        activation, interleaved = node.attributes["activation"].as_string(), node.attributes["interleaved"].as_int()
        return cls(activation, alpha, limit, offset, bool(interleaved))


class Experts(Operator):
    """See :class:`tapeout.operators.operator.Operator`."""

    name = NAME
    functions = frozenset[str]()  # experts have an interface of their own
    before, after = "", ""  # a router that is rounded chooses other experts; experts write to the residual stream

    def function(self) -> ir.Function:
        from tapeout.operators.experts.function import experts_function

        return experts_function()

    def state(self, node: ir.Node, layer: int, dtype: str) -> None:
        return None

    def scale(self, node: ir.Node, name: str, seen: NDArray[np.float32], tokens: int) -> float:
        raise NotImplementedError("experts keep no state")

    def traced(self, model: Any, tracer: Tracer) -> AbstractContextManager[None]:
        from tapeout.operators.experts.in_torch import experts_traced

        return experts_traced(model, tracer)


OPERATOR = Experts()


def share_read(tokens: int, chosen: int, experts: int) -> float:
    """Of the experts' weights, in a step whose tokens choose ``chosen`` of ``experts`` each, all with the same chance.

    >>> [round(128 * share_read(tokens, 8, 128)) for tokens in (1, 8, 32, 256)]
    [8, 52, 112, 128]
    """
    return 1 - (1 - chosen / experts) ** tokens


def is_experts(node: ir.Node | None) -> bool:
    return node is not None and (node.domain, node.op_type) == (DOMAIN, NAME)
