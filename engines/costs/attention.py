"""What attention costs on this machine: measured seconds of a layer by dtype of the KV cache (engines/costs/timing.py).

What is timed is what the target's own passes make of one layer's attention as it is exported, rotary embedding
included, behind one linear for queries, keys and values that is not timed. Layers that keep other heads or channels
are timed by themselves, each with the query heads of the first one. It attends to the whole cache. What a
graph's record does not tell is left out: a window, a soft cap, partial rotary. Copies have caches of their own.

B  sequences      S  tokens of each      T  tokens in the cache      H, G  heads, of queries and of keys
D, E  channels of a key, and of a value
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from engines.bundle import BLOCK_TABLE, BLOCK_TOKENS, OFFSETS, STARTS
from engines.compile import CACHE_TYPES
from engines.costs.timing import CasesByTokens, TimedCase
from engines.passes.base import INTERNAL, Lowering, constant, sizes
from engines.passes.graph.linears import OP
from engines.target import Target
from tapeout.errors import BuildError
from tapeout.operators import DOMAIN, attention
from tapeout.portable_graph import PortableGraph

# More copies take longer to load than to time. A prompt of S tokens has S times fewer: it is compute-bound, so it does
# not matter whether its cache comes from memory.
MOST_COPIES = 512


@dataclass(frozen=True)
class Step:
    """``tokens`` of each of ``sequences``. The cache holds ``context`` tokens of each, the new ones included."""

    sequences: int
    tokens: int
    context: int

    @classmethod
    def of(cls, tokens: int, slots: int, context: int) -> Step:
        """Up to ``slots`` tokens are of as many sequences that decode; more are of one prompt, or of its last part."""
        return cls(tokens, 1, context) if tokens <= slots else cls(1, tokens, max(context, tokens))


@dataclass(frozen=True)
class TimedAttention:
    """One layer's attention; alternatives are dtypes of its KV cache. ``slots``, ``context``: see :meth:`Step.of`."""

    graph: PortableGraph
    names: Sequence[str]  # of dtypes
    slots: int
    context: int

    def described(self, tokens: int) -> Mapping[str, Any]:
        graph, step = self.graph, Step.of(tokens, self.slots, self.context)
        return {
            "attention": [graph.heads, graph.kv_heads, graph.head_size, graph.value_size, graph.rotary],
            "step": [step.sequences, step.tokens, step.context],
            "dtypes": list(self.names),
        }

    def cases(self, target: Target[Any], tokens: Collection[int]) -> CasesByTokens:
        for count in tokens:
            step = Step.of(count, self.slots, self.context)
            yield [count], {dtype: self._case(target, dtype, step) for dtype in self.names}

    def _case(self, target: Target[Any], dtype: str, step: Step) -> TimedCase:
        graph, element = self.graph, CACHE_TYPES[dtype].numpy()
        sizes_of = {"key": graph.head_size, "value": graph.value_size}
        columns = {part: size // 2 if dtype == "int4" else size for part, size in sizes_of.items()}
        blocks = -(-step.context // BLOCK_TOKENS)

        def model(copies: int) -> ir.Model:
            return attention_model(target, graph, dtype, copies, step.context)

        def arrays(copies: int, tokens: int) -> dict[str, NDArray[Any]]:
            rng = np.random.default_rng(0)
            width = graph.heads * graph.head_size + graph.kv_heads * sum(sizes_of.values())
            found: dict[str, NDArray[Any]] = {
                "qkv": rng.standard_normal((step.sequences, step.tokens, width)).astype(np.float32),
                OFFSETS: np.arange(step.sequences + 1, dtype=np.int32) * step.tokens,
                STARTS: np.full(step.sequences, step.context - step.tokens, np.int32),
                BLOCK_TABLE: np.arange(step.sequences * blocks, dtype=np.int32).reshape(-1, blocks),
            }
            output = np.empty((step.sequences, step.tokens, graph.heads * graph.value_size), np.float32)
            for copy in range(copies):
                for part, width in columns.items():
                    shape = (step.sequences * blocks, graph.kv_heads, BLOCK_TOKENS, width)
                    # Written, not only allocated: unwritten pages of zeros are one page of memory.
                    found[f"past_key_values.{copy}.{part}"] = rng.integers(0, 8, shape).astype(element)
                found[f"y{copy}"] = output
            return found

        cache_bytes = step.sequences * graph.kv_heads * step.context * sum(columns.values()) * element.itemsize
        return TimedCase(cache_bytes, model, arrays, max(1, MOST_COPIES // step.tokens))


def attention_model(target: Target[Any], graph: PortableGraph, dtype: str, copies: int, context: int) -> ir.Model:
    """``copies`` attentions of one input ``qkv [B, S, H·D + G·(D+E)]`` to ``y0 [B, S, H·E]`` and on, lowered.

    :class:`BuildError` if no pass takes it, or they make another cache than ``dtype``.
    """
    kv_scales = (
        {}
        if dtype == "float32"
        else {
            f"layers.{copy}.{part}": np.full((graph.kv_heads, size), 1 / 32, np.float32)
            for copy in range(copies)
            for part, size in (("k_scale", graph.head_size), ("v_scale", graph.value_size))
        }
    )
    model = _exported(graph, copies, context)
    bare = graph.model_copy(update={"groups": ()})
    lowering = Lowering(model, bare, _NoWeights(), context, target.kernels, kv_scales, dtype)
    for step in target.passes().attention:
        step.run(lowering)
        model.graph.sort()
    linear = next(node for node in model.graph if node.domain == INTERNAL)
    qkv = _value("qkv", linear.outputs[0].shape)
    ir.convenience.replace_all_uses_with(linear.outputs[0], qkv)
    model.graph.inputs.append(qkv)
    model.graph.remove(linear, safe=True)
    for value in list(model.graph.inputs):
        if not value.uses():
            model.graph.inputs.remove(value)
    for node in [node for node in model.graph if node.op_type == "Identity"]:
        attended, y = node.inputs[0], node.outputs[0]
        assert attended is not None
        model.graph.outputs[model.graph.outputs.index(y)] = attended
        attended.name, y.name = y.name, f"{y.name}.copied"
        model.graph.remove(node, safe=True)
    found = {value.dtype for value in model.graph.inputs if (value.name or "").startswith("past_")}
    if found != {CACHE_TYPES[dtype]} or any(node.domain == INTERNAL for node in model.graph):
        raise BuildError(
            f"the passes of {target.name} make caches of {', '.join(map(str, found)) or 'nothing'} for {dtype}",
            expected=f"attention over {CACHE_TYPES[dtype]}",
            remedy="set plan.kv_cache to a dtype that the target supports",
        )
    return model


class _NoWeights:
    """Attention has none."""

    def linear(self, name: str) -> Any:
        raise BuildError(f"attention asks for {name}", expected="a graph without weights")

    weight = tensor = linear


def _exported(graph: PortableGraph, copies: int, context: int) -> ir.Model:
    """Attention as ``pipeline.export.export`` writes it, after Q, K and V were merged: all copies read one linear."""
    heads, kv_heads, size, value_size = graph.heads, graph.kv_heads, graph.head_size, graph.value_size
    x, mask, positions = (
        _value("x", ["batch", "tokens", 1]),
        _value("attention_mask", ["batch", "total"], ir.DataType.INT64),
        _value("position_ids", ["batch", "tokens"], ir.DataType.INT64),
    )
    empty = ir.Graph(
        [x, mask, positions],
        [],
        nodes=[],
        opset_imports={"": 23, DOMAIN: 1},
        name="attention",
    )
    model = ir.Model(empty, ir_version=10, functions=[attention.OPERATOR.function()])

    def add(
        op_type: str, inputs: Sequence[ir.Value], *shapes: Sequence[int | str], **attributes: Any
    ) -> list[ir.Value]:
        domain = attributes.pop("domain", "")
        node = ir.node(op_type, inputs, attributes=attributes, domain=domain, num_outputs=len(shapes))
        for output, shape in zip(node.outputs, shapes, strict=True):
            output.shape, output.type = ir.Shape(shape), ir.TensorType(ir.DataType.FLOAT)
        model.graph.append(node)
        return list(node.outputs)

    parts_of = [(heads, size), (kv_heads, size), (kv_heads, value_size)]  # heads, and channels of each
    widths = [count * channels for count, channels in parts_of]
    (merged,) = add(OP, [x], ["batch", "tokens", sum(widths)], domain=INTERNAL)
    angles = np.arange(context)[:, None] * 10_000.0 ** -np.linspace(0, 1, size // 2, endpoint=False)
    tables = [constant(model, f"rotary.{f.__name__}", f(angles).astype(np.float32)) for f in (np.cos, np.sin)]
    for copy in range(copies):
        parts = add("Split", [merged, constant(model, "parts", np.array(widths, np.int64))],
                    *(["batch", "tokens", width] for width in widths), axis=2)  # fmt: skip
        states: list[ir.Value] = []
        for number, (part, (count, channels)) in enumerate(zip(parts, parts_of, strict=True)):
            rows = ["batch", "tokens", count, channels]
            (heads_last,) = add("Reshape", [part, sizes(model, 0, 0, count, channels)], rows)
            (rotated,) = add("Transpose", [heads_last], ["batch", count, "tokens", channels], perm=[0, 2, 1, 3])
            if graph.rotary != "none" and number < 2:
                interleaved = int(graph.rotary == "interleaved")
                inputs = [rotated, *tables, positions]
                (rotated,) = add("RotaryEmbedding", inputs, ["batch", count, "tokens", size], interleaved=interleaved)
            states.append(rotated)
        buffers = {part: ["batch", kv_heads, "past", each] for part, each in (("key", size), ("value", value_size))}
        past = [_value(f"past_key_values.{copy}.{part}", buffer) for part, buffer in buffers.items()]
        output, *present = add(
            "Attention", [*states, mask, *past], ["batch", heads, "tokens", value_size], *buffers.values(),
            domain=DOMAIN, scale=size**-0.5, softcap=0.0, window=0,
        )  # fmt: skip
        for part, value in zip(("key", "value"), present, strict=True):
            value.name = f"present.{copy}.{part}"
        joined_width = heads * value_size
        (attended,) = add("Transpose", [output], ["batch", "tokens", heads, value_size], perm=[0, 2, 1, 3])
        (joined,) = add("Reshape", [attended, sizes(model, 0, 0, joined_width)], ["batch", "tokens", joined_width])
        (y,) = add("Identity", [joined], ["batch", "tokens", joined_width])
        y.name = f"y{copy}"
        model.graph.inputs.extend(past)
        model.graph.outputs.extend([y, *present])
    return model


def _value(name: str, shape: Any, dtype: ir.DataType = ir.DataType.FLOAT) -> ir.Value:
    return ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))
