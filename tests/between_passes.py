"""Graphs as they are between two passes, made to run on ONNX Runtime as they stand, and driven like an engine.

What is internal to lowering is written out by its definition, in a copy: ``tapeout::Linear`` as a float product with
the decoded weights (``tapeout::Attention`` brings its own definition with the graph). Nothing else is lowered further,
and ONNX Runtime optimizes nothing, so that what runs is what the last pass left.

B  rows of a step     S  tokens a row     P  positions before it     V  vocabulary     H, D  KV heads and head size
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from numpy.typing import NDArray

from engines.bundle import BLOCK_TABLE, GREEDY, NEXT_TOKENS, OFFSETS, STARTS
from engines.kernels.cpu.kernel_set import CpuKernels
from engines.passes.base import CONTRIB, Lowering, initializer, replace
from engines.passes.graph.linears import biases_of, is_head, is_linear, weights_of
from engines.passes.tensorrt.fixed_kv_cache import WRITE_POSITIONS
from engines.sessions import cpu_options, open_session
from engines.targets.ort_cpu import library
from tapeout.operators.attention import is_attention
from tests.attention_graph import unpacked

FloatArray = NDArray[np.float32]
DTYPES: Mapping[str, Any] = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(int8)": np.int8,
    "tensor(uint8)": np.uint8,  # two codes of 4 bits
}
TINY = 1e-30  # instead of the step of a block of zeros


def written_out(lowering: Lowering, coming: str = "") -> ir.Model:
    """A copy of the graph that runs as it is, with all parameters in it.

    ``coming``: the pass that is next. Where it will round the inputs of linears, or keys and values, they are rounded
    here to the same grid.
    """
    model = lowering.model.clone()
    _bind(model, lowering)
    model.opset_imports[CONTRIB] = 1
    if coming == "cached_attention" and lowering.kv_scales:
        _round_cache(model, lowering.kv_scales, lowering.kv_dtype)
    for node in [n for n in model.graph if is_linear(n)]:
        _write_linear(model, lowering, node, coming)
    model.graph.sort()
    return model


def _bind(model: ir.Model, lowering: Lowering) -> None:
    """Parameters that still lie in the float checkpoint, as the weights of this build decode them."""
    transposed = {name for group in lowering.graph.groups if group.transposed for name in group.members}
    for name, value in model.graph.initializers.items():
        if isinstance(value.const_value, ir.ExternalTensor):
            found = lowering.weights.weight(name)
            value.const_value = ir.tensor(np.ascontiguousarray(found.T if name in transposed else found), name=name)


class _Nodes(list[ir.Node]):
    """Nodes in order, each made by a call that returns its output."""

    def __call__(self, op_type: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
        self.append(ir.node(op_type, inputs, attributes=attributes))
        return self[-1].outputs[0]


def _write_linear(model: ir.Model, lowering: Lowering, node: ir.Node, coming: str) -> None:
    names, biases, add = weights_of(node), biases_of(node), _Nodes()

    def plain(name: str, array: NDArray[Any]) -> ir.Value:
        return initializer(model, f"{names[0]}.plain.{name}", np.ascontiguousarray(array))

    x, stored = node.inputs[0], lowering.weights.linear(names[0])
    step = getattr(stored, "input_scale", None)
    if coming == "static_int8_linears" and step is not None:
        grid = plain("step", np.array(step, np.float32)), plain("zero", np.array(0, np.int8))
        x = add("DequantizeLinear", add("QuantizeLinear", x, *grid), *grid)
    elif coming == "fp8_linears" and step is not None and not is_head(lowering, node):
        grid = (
            plain("step", np.array(step, np.float32)),
            plain("zero", np.array(0, ml_dtypes.float8_e4m3fn)),
        )
        x = add("DequantizeLinear", add("QuantizeLinear", x, *grid), *grid)
    elif coming == _rounding_inputs() and hasattr(stored, "codes"):
        # Either kernel of block-quantized products: int8 for every row and block, the largest value on 127.
        width = stored.codes.shape[1]
        blocks = add("Reshape", x, plain("blocks", np.array([-1, width // stored.group_size, stored.group_size])))
        last = plain("last", np.array([2]))
        largest = add("Max", add("ReduceMax", add("Abs", blocks), last), plain("tiny", np.array(TINY, np.float32)))
        codes = add("Round", add("Mul", blocks, add("Div", plain("limit", np.array(127, np.float32)), largest)))
        steps = add("Div", largest, plain("codes", np.array(127, np.float32)))
        x = add("Reshape", add("Mul", codes, steps), add("Shape", x))
    product = add("MatMul", x, plain("weight", np.concatenate([lowering.weights.weight(n) for n in names]).T))
    if any(biases):
        product = add("Add", product, plain("bias", np.concatenate([lowering.weights.tensor(n) for n in biases])))
    replace(model, [node], add, {node.outputs[0]: product})


def _rounding_inputs() -> str:
    """The pass that takes linears over codes."""
    return "linear_kernels" if CpuKernels().unsupported("BlockLinear") else "block_linears"


def _round_cache(model: ir.Model, scales: Mapping[str, FloatArray], dtype: str) -> None:
    """Keys and values ``[B, H, S, D]`` on their way into attention, to multiples of ``[H, D]`` by codes of integers."""
    half = 8 if dtype == "int4" else 128
    limits = [initializer(model, f"plain.{n}", np.array(n, np.float32)) for n in (-half, half - 1)]
    for layer, node in enumerate([n for n in model.graph if is_attention(n)]):
        for place, part in ((1, "k_scale"), (2, "v_scale")):
            name = f"layers.{layer}.{part}"
            step = initializer(model, f"{name}.plain", scales[name][None, :, None, :])
            value: ir.Value | None = node.inputs[place]
            for op_type, others in (("Div", [step]), ("Round", []), ("Clip", limits), ("Mul", [step])):
                created = ir.node(op_type, [value, *others])
                model.graph.insert_before(node, created)
                value = created.outputs[0]
            node.replace_input_with(place, value)


class GraphRunner:
    """Feeds a graph with caches that grow, or with fixed ones of either kind, whichever its inputs ask for.

    The caches of all slots are kept in fixed buffers ``[slots, H, max_tokens, D]`` either way, in the graph's type.
    """

    def __init__(self, lowering: Lowering, model: bytes, *, slots: int) -> None:
        options = cpu_options(1, library())
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.add_session_config_entry("session.disable_quant_qdq", "1")
        self._session = open_session(model, options)
        self._known = {put.name for put in self._session.get_inputs()}
        self._outputs = [put.name for put in self._session.get_outputs()]
        self._scales = lowering.kv_scales
        self._cache = {
            put.name.removeprefix("past_key_values."): np.zeros(
                (slots, put.shape[1], lowering.max_tokens, put.shape[3]), DTYPES[put.type]
            )
            for put in self._session.get_inputs()
            if put.name.startswith("past_")
        }

    def step(self, first: int, ids: Sequence[Sequence[int]], starts: Sequence[int], rows: Sequence[int]) -> FloatArray:
        """Float32 logits ``[len(rows), V]`` of tokens ``ids [B, S]`` of slots from ``first`` on, at ``starts [B]``."""
        tokens, begin = np.array(ids, np.int64), np.array(starts, np.int64)
        grows = "attention_mask" in self._known
        small = {
            "input_ids": tokens,
            "position_ids": begin[:, None] + np.arange(tokens.shape[1]),
            "attention_mask": self._mask(tokens, begin),
            OFFSETS: np.arange(len(tokens) + 1, dtype=np.int32) * tokens.shape[1],
            STARTS: begin.astype(np.int32),
            BLOCK_TABLE: np.arange(len(tokens), dtype=np.int32)[:, None],
            WRITE_POSITIONS: begin,
            "logit_positions": np.array(rows, np.int64),
            GREEDY: np.array(False),
        }
        feeds = {name: array for name, array in small.items() if name in self._known}
        for name, buffer in self._cache.items():
            window = buffer[first : first + len(tokens)]
            feeds[f"past_key_values.{name}"] = self._aligned(window, begin) if grows else window
        results = dict(zip(self._outputs, map(np.asarray, self._session.run(None, feeds)), strict=True))
        for name, buffer in self._cache.items():
            # Native attention has no such output: it has written its input, which ONNX Runtime does not copy.
            written = results.get(f"present.{name}", feeds[f"past_key_values.{name}"])
            for row, (start, present) in enumerate(zip(starts, written, strict=True)):
                at = int(begin.max()) if grows else start
                fresh = slice(start, start + tokens.shape[1])
                buffer[first + row, :, fresh] = present[:, at : at + tokens.shape[1]]
        logits = results["logits"]
        if "logit_positions" not in self._known:
            logits = logits.reshape(-1, logits.shape[-1])[list(rows)]
        if GREEDY in self._known:  # logits or tokens, not both
            chosen = self._session.run([NEXT_TOKENS], feeds | {GREEDY: np.array(True)})[0]
            np.testing.assert_array_equal(chosen, logits.argmax(axis=1))
        return logits

    def cached(self, slot: int, length: int) -> dict[str, FloatArray]:
        """The first ``length`` positions of a slot ``[length, H·D]``, decoded, by layer and part."""
        found: dict[str, FloatArray] = {}
        for name, buffer in self._cache.items():
            stored = buffer[slot, :, :length]
            states = (unpacked(stored) if buffer.dtype == np.uint8 else stored).astype(np.float32)
            if buffer.dtype in (np.int8, np.uint8):
                layer, _, part = name.partition(".")
                states = states * self._scales[f"layers.{layer}.{part[0]}_scale"][:, None]
            found[name] = states.transpose(1, 0, 2).reshape(length, -1)
        return found

    def _mask(self, tokens: NDArray[np.int64], starts: NDArray[np.int64]) -> NDArray[np.int64]:
        """``[B, P + S]``: rows with less behind them than others are padded on the left, so that windows fit."""
        longest = starts.max()
        return (np.arange(longest + tokens.shape[1]) >= longest - starts[:, None]).astype(np.int64)

    def _aligned(self, window: NDArray[Any], starts: NDArray[np.int64]) -> NDArray[Any]:
        """``[B, H, P, D]``: what each row holds, at the right end."""
        past = np.zeros((*window.shape[:2], starts.max(), window.shape[3]), window.dtype)
        for row, start in enumerate(starts):
            past[row, :, starts.max() - start :] = window[row, :, :start]
        return past
