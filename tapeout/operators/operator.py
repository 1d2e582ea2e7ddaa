"""What an operator says of itself, and what it is told while a model is traced."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    import onnx_ir as ir
    import torch
    from numpy.typing import NDArray

    from tapeout.state import LayerState

# (layer, name of the state's tensor, values that are about to be kept) -> what is kept in their place
StateChange: TypeAlias = "Callable[[int, str, torch.Tensor], torch.Tensor]"
# (name of the state's tensor) -> what the tokens before left in the layer that is computed, as the graph has it
StateBefore: TypeAlias = "Callable[[str], torch.Tensor]"
# (name of the state's tensor, without a number, what a call leaves in it [B, ...], as the graph has it)
StateLeft: TypeAlias = "Callable[[str, torch.Tensor], None]"
# (what a token leaves in a recurrence [B, ...]) -> what is kept of it, for the next token
StateKept: TypeAlias = "Callable[[torch.Tensor], torch.Tensor]"


@dataclass(frozen=True)
class TracedState:
    """A tensor that a node keeps between calls: it takes what was there, and gives what is there now.

    ``name``: unique in its layer. ``shape``: before any token, without the batch. ``grows``: the axis of it, counted
    with the batch, that is longer by each token; None for a state of one size.
    """

    name: str
    shape: tuple[int, ...]
    grows: int | None = None


class Tracer(Protocol):
    """One trace of a model. The model runs twice: first over a few tokens, to see what its operators keep."""

    positions: int  # the longest sequence of the model

    @property
    def emits(self) -> bool:
        """False in the first run, in which nodes need only give outputs of their shape."""
        ...

    @property
    def mask(self) -> torch.Tensor:
        """The input ``attention_mask [B, P+S]`` of the graph, once nodes are emitted."""
        ...

    @property
    def calls(self) -> int:
        """Nodes of this run so far."""
        ...

    def unique(self, name: str) -> str:
        """``name`` for the first state of that name in a layer, ``name1`` for the second, and so on."""
        ...

    def node(
        self,
        operator: Operator,
        inputs: Sequence[torch.Tensor | None],
        attributes: Mapping[str, Any],
        state: Sequence[TracedState],
        tokens: int,
        columns: int | None = None,
    ) -> torch.Tensor:
        """The output, shaped like the first input, of a node over so many ``tokens``. Its state is added as inputs.

        ``columns``: of the output's last axis, where the first input has others.
        """
        ...


class Operator(Protocol):
    """``name``: the type of its nodes. ``functions``: names of transformers' replaceable functions that it computes.

    ``before``, ``after``: what groups of linears are called that it reads from, and that read from it. Empty
    ``before``: these stay in float. Empty ``after``: its output joins the residual stream.

    ``rates``: what those before it are called that only say how fast its state decays and how much of a token it takes
    in, by ``rate_inputs``. They are small, and their errors add up over all tokens, so they stay in float unless a
    recipe names them. Empty: it has none.

    What most operators have no part in has a default here: it changes nothing.
    """

    name: str
    functions: frozenset[str]
    before: str
    after: str
    rates: str = ""
    rate_inputs: frozenset[int] = frozenset()

    def function(self) -> ir.Function:
        """Its meaning in standard operators of the ONNX opset."""
        ...

    def state(self, node: ir.Node, layer: int, dtype: str) -> LayerState | None:
        """What a node keeps between calls. ``dtype``: of a cache of keys and values; other state has its own."""
        ...

    def scale(self, node: ir.Node, name: str, seen: NDArray[np.float32], tokens: int) -> float:
        """What normally distributed numbers are multiplied by, to be a state that so many ``tokens`` may leave.

        ``seen``: the tensor ``name`` of the node's state, as a few real tokens leave it.
        """
        ...

    def traced(self, model: Any, tracer: Tracer) -> AbstractContextManager[None]:
        """Let a stock transformers model emit nodes of this operator where it would compute it itself.

        :class:`tapeout.errors.ExportError` where the model computes something else.
        """
        ...

    def changed(self, model: Any, change: StateChange) -> AbstractContextManager[None]:
        """Run a stock transformers model with what each call keeps passed through ``change``.

        That is how a state of fewer bits is measured. Where state is always kept in float32, nothing is passed.
        """
        return nullcontext()

    def resumed(self, model: Any, before: StateBefore) -> AbstractContextManager[None]:
        """Run one layer of a stock transformers model, without a cache of its own, as if tokens came ``before``."""
        return nullcontext()

    def leaving(self, model: Any, left: StateLeft) -> AbstractContextManager[None]:
        """Run a stock transformers model, and hand over the recurrent state that each call leaves, in their order.

        Where nothing is kept, or a value for each token, nothing is handed over.
        """
        return nullcontext()

    def by_token(self, model: Any, kept: StateKept | None) -> AbstractContextManager[None]:
        """Run a stock transformers model with what it computes in chunks of tokens computed token by token.

        Sums over chunks are of another order, so two cuts of a text differ by more than rounding. ``kept``: what each
        token leaves in a recurrence passes through it; that is how a state of fewer bits is measured.
        """
        return nullcontext()
