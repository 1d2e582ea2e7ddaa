"""The selective scan of Mamba2: a recurrence over a matrix for each head, which decays and takes in each token.

Time steps, their bounds and what bypasses the recurrence (``D``) stay standard operators around the node. A sequence
keeps the matrices.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
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

NAME = "SelectiveScan"
STATE = "scan"
PAST_INPUT = 5


class SelectiveScan(Operator):
    """See :class:`tapeout.operators.operator.Operator`."""

    name = NAME
    functions = frozenset({"mamba_chunk_scan_combined", "selective_state_update"})
    before, after = "scan_in", "scan_out"
    rates, rate_inputs = "scan_rates", frozenset({3})  # the decay; values are multiplied by the time step, too

    def function(self) -> ir.Function:
        from tapeout.operators.selective_scan.function import selective_scan_function

        return selective_scan_function()

    def state(self, node: ir.Node, layer: int, dtype: str) -> Recurrent:
        return recurrent_state(node.inputs[PAST_INPUT], layer)

    def scale(self, node: ir.Node, name: str, seen: NDArray[np.float32], tokens: int) -> float:
        return likely_scale(seen)

    def traced(self, model: Any, tracer: Tracer) -> AbstractContextManager[None]:
        from tapeout.operators.selective_scan.in_torch import scan_traced

        return scan_traced(model, tracer)

    def resumed(self, model: Any, before: StateBefore) -> AbstractContextManager[None]:
        from tapeout.operators.selective_scan.in_torch import scan_resumed

        return scan_resumed(model, before)

    def leaving(self, model: Any, left: StateLeft) -> AbstractContextManager[None]:
        from tapeout.operators.selective_scan.in_torch import scan_leaving

        return scan_leaving(model, left)

    def by_token(self, model: Any, kept: StateKept | None) -> AbstractContextManager[None]:
        """transformers' chunks differ from each other by rounding only: unless states are, nothing is replaced."""
        from tapeout.operators.selective_scan.in_torch import scan_by_token

        return nullcontext() if kept is None else scan_by_token(model, kept)


OPERATOR = SelectiveScan()


def is_selective_scan(node: ir.Node | None) -> bool:
    return node is not None and (node.domain, node.op_type) == (DOMAIN, NAME)
