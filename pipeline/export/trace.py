"""Trace: a stock transformers decoder to an ONNX graph, with no code per architecture.

The model runs unchanged except for its attention, which emits a single operator, ``tapeout::Attention``, with explicit
scale, soft cap, window and KV cache. The operator is an ONNX function with a standard-opset body, so the graph runs on
any ONNX runtime, and each target lowers that one node in its own way.

Nothing that changes attention is dropped. Options of the attention interface are an allow-list, and a model with
another one (attention sinks, a position bias) is refused. Windows are read from the mask that transformers makes, which
is what its own attention applies, and a mask that is not causal with at most a window is refused.

Everything else is what ``torch.onnx.export(dynamo=True)`` makes of the module at opset 23; the exporter's own rules
recognize RMSNormalization and RotaryEmbedding. Parameters are hidden from constant folding, so each
keeps its checkpoint name and a build can bind other tensors in its place.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir
import torch

from pipeline.export.decompose import decomposed_where_needed
from tapeout.attention_function import ATTENTION_DOMAIN, attention_function
from tapeout.attention_interface import attention_replaced
from tapeout.errors import ExportError, one_line
from tapeout.mapped_weights import weightless

OPSET = 23
# Options of transformers' attention interface that do not change what attention computes outside training.
HARMLESS = frozenset(
    {
        "cache_position",
        "dropout",  # modules pass 0 in eval mode
        "logits_to_keep",
        "output_attentions",
        "output_hidden_states",
        "position_ids",  # rotary embeddings are applied before the interface is called
        "return_dict",
        "sliding_window",  # of flash attention; the mask says the same
        "use_cache",
    }
)
MASK_QUERIES = 9  # query positions at which a mask is read, from the first to the last


@dataclass(frozen=True)
class KVShape:
    """One layer's cache: ``[batch, kv_heads, tokens, head_size]`` for keys and for values."""

    query_heads: int
    kv_heads: int
    head_size: int


@dataclass
class _Trace:
    """One trace: what the attention and mask functions and the wrapper share while the model runs."""

    positions: int  # the longest sequence of the model
    past: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    mask: torch.Tensor | None = None
    presents: list[torch.Tensor] = field(default_factory=list)
    shapes: list[KVShape] = field(default_factory=list)
    windows: list[int] = field(default_factory=list)  # of each attention; 0: none
    masks: list[tuple[torch.Tensor, int]] = field(default_factory=list)  # made in this run, with their windows

    def start(self, mask: torch.Tensor | None, past: Sequence[torch.Tensor]) -> None:
        """Before each run of the model. Without ``past`` the run only collects shapes and windows."""
        self.past = list(zip(past[::2], past[1::2], strict=True))
        self.mask, self.presents, self.shapes, self.masks = mask, [], [], []
        if not self.past:
            self.windows = []

    def make_mask(
        self, batch_size: int, q_length: int, kv_length: int, *, mask_function: Callable[..., Any], **_: Any
    ) -> torch.Tensor | None:
        """transformers' mask interface. In the first run each mask stands for its window; later ones need no mask."""
        if self.past:
            return None
        made = torch.ones(batch_size, 1, q_length, kv_length, dtype=torch.bool)
        self.masks.append((made, _window(mask_function, self.positions)))
        return made

    def attention(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        softcap: float | None = None,
        is_causal: bool | None = None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        """transformers' attention interface: ``query [B, heads, S, head]`` in, ``[B, S, heads, head]`` out."""
        layer = len(self.shapes)
        heads, kv_heads, head_size = query.shape[1], key.shape[1], query.shape[3]
        _refuse_unknown(f"attention {layer} ({type(module).__name__})", options)
        if value.shape[3] != head_size:
            raise ExportError(
                f"attention {layer} has keys of size {head_size} and values of size {value.shape[3]}",
                expected="keys and values of one size",
                remedy="choose a dense decoder with standard or grouped-query attention",
            )
        self.shapes.append(KVShape(int(heads), int(kv_heads), int(head_size)))
        if not self.past:
            causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
            self.windows.append(self._window_of(attention_mask, f"attention {layer} ({type(module).__name__})", causal))
            return torch.zeros_like(query).transpose(1, 2), None
        past_key, past_value = self.past[layer]
        assert self.mask is not None
        total = past_key.shape[2] + query.shape[2]
        cache = (query.shape[0], kv_heads, total, head_size)
        output, present_key, present_value = torch.onnx.ops.symbolic_multi_out(
            f"{ATTENTION_DOMAIN}::Attention",
            [query, key, value, self.mask, past_key, past_value],
            attrs={
                "scale": float(scaling if scaling is not None else head_size**-0.5),
                "softcap": float(softcap or 0.0),
                "window": self.windows[layer],
            },
            dtypes=[query.dtype] * 3,
            shapes=[query.shape, cache, cache],
            version=1,
        )
        self.presents += [present_key, present_value]
        return output.transpose(1, 2), None

    def _window_of(self, mask: torch.Tensor | None, name: str, causal: bool) -> int:
        """The window of the mask that an attention gets. Without a mask, transformers' attention is plainly causal."""
        known = next((window for made, window in self.masks if mask is not None and _is_whole(mask, made)), None)
        if known is not None:
            return known
        if mask is None and causal:
            return 0
        raise ExportError(
            f"{name} {'is not causal' if mask is None else 'gets a mask that transformers did not make'}",
            expected="causal attention, with a sliding window or without",
            remedy="choose a causal decoder; bidirectional attention and position biases (ALiBi) are not supported",
        )


def _is_whole(mask: torch.Tensor, made: torch.Tensor) -> bool:
    """Whether a mask is one that was made, or a slice of all of it."""
    return mask.data_ptr() == made.data_ptr() and mask.shape == made.shape and mask.dtype == made.dtype


def _refuse_unknown(name: str, options: dict[str, Any]) -> None:
    unknown = sorted(key for key, given in options.items() if given is not None and given is not False)
    unknown = [key for key in unknown if key not in HARMLESS]
    if unknown or options.get("dropout"):
        raise ExportError(
            f"{name} passes {', '.join(unknown or ['dropout'])} to transformers' attention interface",
            expected="attention with a scale, a soft cap and a sliding window, and nothing else",
            remedy="choose another decoder; attention sinks and position biases are not supported",
        )


def _window(allowed: Callable[..., Any], positions: int) -> int:
    """The sliding window of a mask function of transformers, 0 if it lets a query see all positions before it.

    A query sees itself and ``window - 1`` positions before it. The function is read at queries from the first to the
    last position, over all keys.
    """
    keys = torch.arange(positions)
    # of one entry and one head; keys after the query are read, too
    queries = sorted({round(i * (positions - 1) / (MASK_QUERIES - 1)) for i in range(MASK_QUERIES)} | {1 % positions})
    zero = torch.tensor(0)
    try:
        seen = [
            torch.as_tensor(allowed(zero, zero, torch.tensor(query), keys)).broadcast_to(keys.shape)
            for query in queries
        ]
    except (IndexError, RuntimeError) as error:
        raise _unsupported_mask("depends on more than positions") from error
    window = int(seen[-1].sum())
    windowed = [(keys <= query) & (keys > query - window) for query in queries]
    if not all(torch.equal(mask, expected) for mask, expected in zip(seen, windowed, strict=True)):
        raise _unsupported_mask("is not a causal band")
    return 0 if window == positions else window


def _unsupported_mask(reason: str) -> ExportError:
    return ExportError(
        f"the attention mask {reason}",
        expected="causal attention, with a sliding window or without",
        remedy="choose a causal decoder; chunked, bidirectional and prefix attention are not supported",
    )


class _Wrapper(torch.nn.Module):
    """The flat signature of the portable graph around a causal language model."""

    def __init__(self, model: torch.nn.Module, state: _Trace) -> None:
        super().__init__()
        self.model, self.state = model, state

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor,
        *past: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        self.state.start(attention_mask, past)
        logits = self.model(input_ids=input_ids, position_ids=position_ids, use_cache=False).logits
        return (logits, *self.state.presents)


def trace(model: Any, progress: Callable[[str], None] = lambda _: None) -> ir.Model:
    """Trace ``model`` (eval mode) to an ONNX IR model whose parameters keep their checkpoint names.

    Inputs ``input_ids [B, S]``, ``attention_mask [B, P+S]`` (0 marks left padding), ``position_ids [B, S]`` (all
    int64), ``past_key_values.N.key|value [B, kv_heads, P, head_size]``; outputs ``logits [B, S, V]`` and
    ``present.N.key|value [B, kv_heads, P+S, head_size]``.
    """
    _refuse_unsupported(model)
    state = _Trace(longest(model))
    with weightless(model), attention_replaced(model, state.attention, state.make_mask):
        progress("tracing")
        program = _export_program(model, state)
    graph_model = program.model
    progress("simplifying the graph")
    _simplify(graph_model, {name for name, _ in model.named_parameters(remove_duplicate=False)})
    graph_model.functions[("tapeout", "Attention", "")] = attention_function()
    graph_model.opset_imports[ATTENTION_DOMAIN] = 1
    return graph_model


def longest(model: Any) -> int:
    """The longest sequence that the model's configuration allows; positions after it are never computed."""
    found = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise ExportError(
            f"{type(model).__name__} takes no position_ids",
            expected="a decoder that gets the position of each token",
            remedy="choose another decoder; recurrent models and position biases (ALiBi) are not supported",
        )
    if not isinstance(found, int) or found < 2:
        raise ExportError(
            f"max_position_embeddings of {found} in the configuration of {type(model).__name__}",
            expected="the length of the longest sequence, at least 2",
            remedy="add max_position_embeddings to config.json, as the model's authors state it",
        )
    return found


def _refuse_unsupported(model: Any) -> None:
    """Refuse what a graph of linears and attention cannot hold: routers of experts, and state beside the KV cache."""
    for name, module in model.named_modules():
        kind = ""
        if name.rpartition(".")[2] == "experts" or type(module).__name__.endswith("Experts"):
            kind = "is a mixture of experts"
        elif isinstance(module, torch.nn.Conv1d):
            kind = "keeps a state beside its KV cache: it mixes tokens by a convolution"
        if kind:
            raise ExportError(
                f"{type(model).__name__} {kind} ({name})",
                expected="a dense decoder whose tokens meet in attention only",
                remedy="choose a dense model; mixtures of experts, recurrent and hybrid models are not supported",
            )


def _probe_shapes(model: Any, state: _Trace) -> list[KVShape]:
    """The KV shape of each attention call, in call order, from one run over three tokens."""
    state.start(None, ())
    model(input_ids=torch.zeros(1, 3, dtype=torch.int64), position_ids=torch.arange(3)[None], use_cache=False)
    shapes = state.shapes
    if len(shapes) != model.config.get_text_config().num_hidden_layers:
        raise ExportError(
            f"{type(model).__name__} called the attention interface {len(shapes)} times",
            expected=f"once for each of its {model.config.get_text_config().num_hidden_layers} layers",
            remedy="recurrent, hybrid and encoder-decoder models, and attention outside transformers' attention "
            "interface, are not supported",
        )
    return shapes


def _export_program(model: Any, state: _Trace) -> Any:
    # Without gradients, modules that turn them off leave no mark in the program.
    with _module_stack(model) as modules, torch.no_grad(), decomposed_where_needed():
        try:
            shapes = _probe_shapes(model, state)
            past = [torch.randn(2, s.kv_heads, 5, s.head_size) for s in shapes for _ in range(2)]
            cache_names = [f"{i}.{part}" for i in range(len(shapes)) for part in ("key", "value")]
            dynamic, row = torch.export.Dim.DYNAMIC, {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
            return torch.onnx.export(
                _Wrapper(model, state).eval(),
                (
                    torch.ones(2, 3, dtype=torch.int64),
                    torch.ones(2, 8, dtype=torch.int64),
                    torch.arange(5, 8)[None].repeat(2, 1),
                    *past,
                ),
                input_names=[
                    "input_ids",
                    "attention_mask",
                    "position_ids",
                    *(f"past_key_values.{name}" for name in cache_names),
                ],
                output_names=["logits", *(f"present.{name}" for name in cache_names)],
                dynamic_shapes=(row, row, row, tuple({0: dynamic, 2: dynamic} for _ in past)),
                opset_version=OPSET,
                dynamo=True,
                optimize=False,
                verbose=False,
            )
        except ExportError:
            raise
        except Exception as error:
            where = modules[-1] if modules else "its top level"
            raise ExportError(
                f"{type(model).__name__} cannot be exported: module {where} stopped it ({_reason(error)})",
                expected="a dense decoder whose forward torch.export can trace",
                remedy="report the module above; the model itself is untouched",
            ) from error


def _reason(error: Exception) -> str:
    """The first cause of an exception, as one line: torch wraps it in its own, with colors and advice."""
    while isinstance(error.__cause__, Exception):
        error = error.__cause__
    return f"{type(error).__name__}: {one_line(error)}"


@contextlib.contextmanager
def _module_stack(model: torch.nn.Module) -> Generator[list[str]]:
    """The names of the modules being run; after an exception the innermost is still on the stack."""
    stack: list[str] = []
    handles: list[Any] = []

    def pop(*_: Any) -> None:
        stack.pop()

    for name, module in model.named_modules():
        label = f"{name or 'model'} ({type(module).__name__})"
        handles.append(module.register_forward_pre_hook(lambda *_, label=label: stack.append(label)))
        handles.append(module.register_forward_hook(pop))
    try:
        yield stack
    finally:
        for handle in handles:
            handle.remove()


def _simplify(model: ir.Model, parameters: set[str]) -> None:
    """Fold constants and fuse norms and rotary embeddings, with parameters hidden from folding."""
    from onnxscript import optimizer
    from onnxscript.rewriter import onnx_fusions

    graph = model.graph
    hidden: list[ir.Value] = []
    for name in list(graph.initializers):
        value = graph.initializers[name]
        short = name.removeprefix("model.")  # the wrapper's own attribute
        if short in parameters:
            del graph.initializers[name]
            value.name = short
            value.const_value, tensor = None, value.const_value
            assert tensor is not None
            value.shape, value.type = ir.Shape(tensor.shape.numpy()), ir.TensorType(tensor.dtype)
            hidden.append(value)
    graph.inputs.extend(hidden)
    _split_gemm(graph, hidden)
    with _first_output_looked_at_first():
        optimizer.optimize_ir(model)
        onnx_fusions.fuse(model)
        optimizer.optimize_ir(model)
    # The fold may have left parameters without a consumer (an unused head, say); those are dropped here.
    del graph.inputs[len(graph.inputs) - len(hidden) :]
    for value in hidden:
        if value.uses():
            graph.initializers[value.name or ""] = value


@contextlib.contextmanager
def _first_output_looked_at_first() -> Generator[None]:
    """Let a pattern of several outputs fail at once at nodes that are not its first output.

    onnxscript walks the whole graph for it at every node, which took a third of an export of 30 layers.
    """
    from onnxscript.rewriter.pattern import MatchResult, SimplePatternMatcher

    match = SimplePatternMatcher.match

    def quick(self: Any, model: Any, graph_or_function: Any, node: ir.Node, **options: Any) -> MatchResult:
        first = self.pattern.output_nodes[0].op_identifier()
        if self.pattern.has_single_output_node or first in (None, node.op_identifier()):
            return match(self, model, graph_or_function, node, **options)
        return MatchResult().fail("another operator")

    SimplePatternMatcher.match = quick  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        SimplePatternMatcher.match = match


def _split_gemm(graph: ir.Graph, parameters: list[ir.Value]) -> None:
    """Write ``Gemm(x, weight, bias)`` over a parameter as the MatMul and Add of all other linears.

    The weight of a linear is ``[out, in]`` and is transposed; that of gpt2's ``Conv1D`` is ``[in, out]``, and its input
    was flattened.
    """
    for node in list(graph):
        if node.op_type != "Gemm" or node.inputs[1] not in parameters:
            continue
        x, weight, *bias = node.inputs
        output, nodes = node.outputs[0], list[ir.Node]()
        if "transB" in node.attributes and node.attributes["transB"].as_int():
            nodes.append(ir.node("Transpose", [weight], attributes={"perm": [1, 0]}))
            weight = nodes[-1].outputs[0]
        else:
            x, output = _unflattened(x, output)
        nodes.append(ir.node("MatMul", [x, weight]))
        if bias and bias[0] is not None:
            nodes.append(ir.node("Add", [nodes[-1].outputs[0], bias[0]]))
        for made in nodes[-2:] if nodes[-1].op_type == "Add" else nodes[-1:]:
            made.outputs[0].shape, made.outputs[0].type = output.shape, output.type
        graph.insert_before(node, nodes)
        ir.convenience.replace_all_uses_with(output, nodes[-1].outputs[0])
        if output is not node.outputs[0]:
            last = output.producer()
            assert last is not None
            graph.remove(last, safe=True)
        graph.remove(node, safe=True)


def _unflattened(x: ir.Value | None, output: ir.Value) -> tuple[ir.Value | None, ir.Value]:
    """The value that ``x`` was reshaped from and the value that ``output`` is reshaped to, if their shapes agree."""
    before, uses = x.producer() if x is not None else None, list(output.uses())
    after = uses[0].node if len(uses) == 1 else None
    if before is None or after is None or before.op_type != "Reshape" or after.op_type != "Reshape":
        return x, output
    rows, whole = before.inputs[0], after.outputs[0]
    if rows is None or rows.shape is None or whole.shape is None or list(rows.shape)[:-1] != list(whole.shape)[:-1]:
        return x, output
    return rows, whole
