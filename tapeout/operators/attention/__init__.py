"""Causal attention over a cache of keys and values, with a scale, a soft cap and a sliding window."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tapeout.operators import DOMAIN
from tapeout.operators.operator import Operator
from tapeout.state import Paged, StateTensor

if TYPE_CHECKING:
    import onnx_ir as ir
    from numpy.typing import NDArray

    from tapeout.operators.operator import StateBefore, StateChange, Tracer

NAME = "Attention"
NAME_WITH_SINKS = "AttentionWithSinks"  # a function of ONNX cannot leave an input out, so the two have a name each


@dataclass(frozen=True)
class AttentionNode:
    """What a node of a portable graph fixes. ``softcap`` 0: none. ``window``: positions a query sees; 0: all.

    ``head_size``: channels of a query and a key; a value has ``value_size``.

    The caches of keys and of values are its last two inputs.
    """

    heads: int
    kv_heads: int
    head_size: int
    value_size: int
    scale: float
    softcap: float
    window: int

    @classmethod
    def of(cls, node: ir.Node) -> AttentionNode:
        shapes = [node.inputs[number] for number in (0, -1)]  # queries, and the cache of values
        (_, heads, _, size), (_, kv_heads, _, values) = (list(v.shape or ()) for v in shapes if v is not None)
        assert (
            isinstance(heads, int) and isinstance(size, int) and isinstance(kv_heads, int) and isinstance(values, int)
        )
        scale, softcap = (node.attributes[name].as_float() for name in ("scale", "softcap"))
        return cls(heads, kv_heads, size, values, scale, softcap, node.attributes["window"].as_int())

    @classmethod
    def all(cls, nodes: Iterable[ir.Node]) -> list[AttentionNode]:
        """Of a graph, in its order."""
        return [cls.of(node) for node in nodes if is_attention(node)]


class Attention(Operator):
    """See :class:`tapeout.operators.operator.Operator`."""

    name = NAME
    functions = frozenset[str]()  # attention has an interface of its own
    before, after = "qkv", "o"

    def function(self) -> ir.Function:
        from tapeout.operators.attention.function import attention_function

        return attention_function()

    def state(self, node: ir.Node, layer: int, dtype: str) -> Paged:
        found = AttentionNode.of(node)
        sizes = {"key": found.head_size, "value": found.value_size}
        tensors = (StateTensor(name=name, shape=(found.kv_heads, size), dtype=dtype) for name, size in sizes.items())
        return Paged(layer=layer, tensors=tuple(tensors), window=found.window)

    def scale(self, node: ir.Node, name: str, seen: NDArray[np.float32], tokens: int) -> float:
        """Scores of about one, and values as large as the model's own after so many are averaged.

        Where scores have a soft cap, the largest ones come near it.
        """
        found = AttentionNode.of(node)
        if name == "key":
            norm = float(np.sqrt((seen**2).sum(-1).mean()))
            return max(1.0, found.softcap / 8) / max(found.scale * norm, 1e-6)
        visible = min(tokens, found.window or tokens)
        return float(np.sqrt((seen**2).mean())) * math.sqrt(visible / 2)

    def changed(self, model: Any, change: StateChange) -> AbstractContextManager[None]:
        from tapeout.operators.attention.in_torch import kv_function

        return kv_function(model, lambda layer, key, value: (change(layer, "key", key), change(layer, "value", value)))

    def resumed(self, model: Any, before: StateBefore) -> AbstractContextManager[None]:
        from tapeout.operators.attention.in_torch import after_tokens

        return after_tokens(model, before)

    def traced(self, model: Any, tracer: Tracer) -> AbstractContextManager[None]:
        from tapeout.operators.attention.tracing import attention_traced

        return attention_traced(model, tracer)


class AttentionWithSinks(Attention):
    """Attention with a score a head that has no value. What replaces attention in a model is the operator without."""

    name = NAME_WITH_SINKS

    def function(self) -> ir.Function:
        from tapeout.operators.attention.function import function_with_sinks

        return function_with_sinks()

    def changed(self, model: Any, change: StateChange) -> AbstractContextManager[None]:
        return nullcontext()

    def resumed(self, model: Any, before: StateBefore) -> AbstractContextManager[None]:
        return nullcontext()

    def traced(self, model: Any, tracer: Tracer) -> AbstractContextManager[None]:
        return nullcontext()


OPERATOR, WITH_SINKS = Attention(), AttentionWithSinks()


def is_attention(node: ir.Node | None) -> bool:
    """With sinks or without."""
    return node is not None and node.domain == DOMAIN and node.op_type in (NAME, NAME_WITH_SINKS)
