"""A causal convolution of each channel over the last few tokens: the short convolution of LFM2, Mamba and others.

A sequence keeps the inputs of its last K - 1 tokens.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tapeout.operators import DOMAIN
from tapeout.operators.operator import Operator
from tapeout.operators.recurrent import likely_scale, recurrent_state

if TYPE_CHECKING:
    import numpy as np
    import onnx_ir as ir
    from numpy.typing import NDArray

    from tapeout.operators.operator import StateBefore, StateLeft, Tracer
    from tapeout.state import Recurrent

NAME = "CausalConv"
STATE = "conv"
PAST_INPUT = 4


@dataclass(frozen=True)
class CausalConvNode:
    """What a node of a portable graph fixes. ``taps``: tokens that an output depends on, itself included."""

    channels: int
    taps: int

    @classmethod
    def of(cls, node: ir.Node) -> CausalConvNode:
        past = node.inputs[PAST_INPUT]
        assert past is not None and past.shape is not None
        _, kept, channels = past.shape
        assert isinstance(channels, int) and isinstance(kept, int)
        return cls(channels, kept + 1)


class CausalConv(Operator):
    """See :class:`tapeout.operators.operator.Operator`."""

    name = NAME
    functions = frozenset({"causal_conv1d_fn", "causal_conv1d_update"})
    before, after = "conv_in", "conv_out"

    def function(self) -> ir.Function:
        from tapeout.operators.causal_conv.function import causal_conv_function

        return causal_conv_function()

    def state(self, node: ir.Node, layer: int, dtype: str) -> Recurrent:
        return recurrent_state(node.inputs[PAST_INPUT], layer)

    def scale(self, node: ir.Node, name: str, seen: NDArray[np.float32], tokens: int) -> float:
        return likely_scale(seen)

    def traced(self, model: Any, tracer: Tracer) -> AbstractContextManager[None]:
        from tapeout.operators.causal_conv.in_torch import conv_traced

        return conv_traced(model, tracer)

    def resumed(self, model: Any, before: StateBefore) -> AbstractContextManager[None]:
        from tapeout.operators.causal_conv.in_torch import conv_resumed

        return conv_resumed(model, before)

    def leaving(self, model: Any, left: StateLeft) -> AbstractContextManager[None]:
        from tapeout.operators.causal_conv.in_torch import conv_leaving

        return conv_leaving(model, left)


OPERATOR = CausalConv()


def is_causal_conv(node: ir.Node | None) -> bool:
    return node is not None and (node.domain, node.op_type) == (DOMAIN, NAME)
