"""The gated delta rule: a recurrence over a matrix for each head, of Qwen3.5, Qwen3-Next and others.

A token lets the matrix decay, corrects what it answers to the token's key, and reads it with the token's query. A
sequence keeps the matrices.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tapeout.operators import DOMAIN
from tapeout.state import Recurrent, StateTensor

if TYPE_CHECKING:
    import onnx_ir as ir
    from numpy.typing import NDArray

    from tapeout.operators.operator import StateBefore, StateChange, Tracer

NAME = "GatedDelta"
STATE = "delta"
QUERY_INPUT, PAST_INPUT = 1, 6


@dataclass(frozen=True)
class GatedDeltaNode:
    """What a node of a portable graph fixes. Each head of queries and keys serves ``heads / key_heads`` of values."""

    key_heads: int
    heads: int
    key_size: int
    value_size: int

    @classmethod
    def of(cls, node: ir.Node) -> GatedDeltaNode:
        query, past = node.inputs[QUERY_INPUT], node.inputs[PAST_INPUT]
        assert query is not None and query.shape is not None and past is not None and past.shape is not None
        key_heads, (_, heads, key_size, value_size) = query.shape[2], past.shape
        assert isinstance(key_heads, int) and isinstance(heads, int)
        assert isinstance(key_size, int) and isinstance(value_size, int)
        return cls(key_heads, heads, key_size, value_size)


class GatedDelta:
    """See :class:`tapeout.operators.operator.Operator`."""

    name = NAME
    functions = frozenset({"chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"})
    before, after = "delta_in", "delta_out"

    def function(self) -> ir.Function:
        from tapeout.operators.gated_delta.function import gated_delta_function

        return gated_delta_function()

    def state(self, node: ir.Node, layer: int, dtype: str) -> Recurrent:
        past = node.inputs[PAST_INPUT]
        assert past is not None and past.name is not None
        found = GatedDeltaNode.of(node)
        shape = found.heads, found.key_size, found.value_size
        return Recurrent(
            layer=layer, tensors=(StateTensor(name=past.name.rpartition(".")[2], shape=shape, dtype="float32"),)
        )

    def scale(self, node: ir.Node, name: str, seen: NDArray[np.float32], tokens: int) -> float:
        return float(np.sqrt((seen**2).mean()))

    def traced(self, model: Any, tracer: Tracer) -> AbstractContextManager[None]:
        from tapeout.operators.gated_delta.in_torch import delta_traced

        return delta_traced(model, tracer)

    def changed(self, model: Any, change: StateChange) -> AbstractContextManager[None]:
        return nullcontext()

    def resumed(self, model: Any, before: StateBefore) -> AbstractContextManager[None]:
        from tapeout.operators.gated_delta.in_torch import delta_resumed

        return delta_resumed(model, before)

    def by_token(self, model: Any) -> AbstractContextManager[None]:
        from tapeout.operators.gated_delta.in_torch import delta_by_token

        return delta_by_token(model)


OPERATOR = GatedDelta()


def is_gated_delta(node: ir.Node | None) -> bool:
    return node is not None and (node.domain, node.op_type) == (DOMAIN, NAME)
