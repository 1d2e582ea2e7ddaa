"""The gated delta rule: a recurrence over a matrix for each head, of Qwen3.5, Qwen3-Next, Kimi Linear and others.

A token lets the matrix decay, as a whole or each row by a rate of its own (Kimi Delta Attention), corrects what it
answers to the token's key, and reads it with the token's query. A sequence keeps the matrices.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from tapeout.operators import DOMAIN
from tapeout.operators.operator import Operator
from tapeout.operators.recurrent import likely_scale, recurrent_state

if TYPE_CHECKING:
    import numpy as np
    import onnx_ir as ir
    from numpy.typing import NDArray

    from tapeout.operators.operator import StateBefore, StateKept, StateLeft, Tracer
    from tapeout.state import Recurrent

NAME = "GatedDelta"
STATE = "delta"
PAST_INPUT = 6
# Names of transformers' functions: in chunks of tokens, which models without a cache call, and token by token.
FORMS = {"chunk_gated_delta_rule": "fused_recurrent_gated_delta_rule", "chunk_kda": "fused_recurrent_kda"}


class GatedDelta(Operator):
    """See :class:`tapeout.operators.operator.Operator`."""

    name = NAME
    functions = frozenset({*FORMS, *FORMS.values()})
    before, after = "delta_in", "delta_out"
    rates, rate_inputs = "delta_rates", frozenset({3, 4})  # decay and beta

    def function(self) -> ir.Function:
        from tapeout.operators.gated_delta.function import gated_delta_function

        return gated_delta_function()

    def state(self, node: ir.Node, layer: int, dtype: str) -> Recurrent:
        return recurrent_state(node.inputs[PAST_INPUT], layer)

    def scale(self, node: ir.Node, name: str, seen: NDArray[np.float32], tokens: int) -> float:
        return likely_scale(seen)

    def traced(self, model: Any, tracer: Tracer) -> AbstractContextManager[None]:
        from tapeout.operators.gated_delta.in_torch import delta_traced

        return delta_traced(model, tracer)

    def resumed(self, model: Any, before: StateBefore) -> AbstractContextManager[None]:
        from tapeout.operators.gated_delta.in_torch import delta_resumed

        return delta_resumed(model, before)

    def leaving(self, model: Any, left: StateLeft) -> AbstractContextManager[None]:
        from tapeout.operators.gated_delta.in_torch import delta_leaving

        return delta_leaving(model, left)

    def by_token(self, model: Any, kept: StateKept | None) -> AbstractContextManager[None]:
        from tapeout.operators.gated_delta.in_torch import delta_by_token

        return delta_by_token(model, kept)


OPERATOR = GatedDelta()


def is_gated_delta(node: ir.Node | None) -> bool:
    return node is not None and (node.domain, node.op_type) == (DOMAIN, NAME)
