"""What an operator says of itself, and what it is told while a model is traced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import onnx_ir as ir
    import torch

    from tapeout.state import LayerState


@dataclass(frozen=True)
class TracedState:
    """A tensor that a node keeps between calls: it takes what was there, and gives what is there now.

    ``shape``: before any token, without the batch. ``grows``: the axis of it, counted with the batch, that is longer by
    each token; None for a state of one size.
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

    def node(
        self,
        operator: Operator,
        inputs: Sequence[torch.Tensor],
        attributes: Mapping[str, Any],
        state: Sequence[TracedState],
        tokens: int,
    ) -> torch.Tensor:
        """The output, shaped like the first input, of a node over so many ``tokens``. Its state is added as inputs."""
        ...


class Operator(Protocol):
    name: str  # the type of its nodes

    def function(self) -> ir.Function:
        """Its meaning in standard operators of the ONNX opset."""
        ...

    def state(self, node: ir.Node, layer: int, dtype: str) -> LayerState | None:
        """What a node keeps between calls. ``dtype``: of a cache of keys and values; other state has its own."""
        ...

    def traced(self, model: Any, tracer: Tracer) -> AbstractContextManager[None]:
        """Let a stock transformers model emit nodes of this operator where it would compute it itself.

        :class:`tapeout.errors.ExportError` where the model computes something else.
        """
        ...
