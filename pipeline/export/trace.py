"""Trace: a stock transformers decoder to an ONNX graph, with no code per architecture.

The model runs unchanged except for what an operator of ours computes (``tapeout/operators``): that emits a single node,
with what it keeps between calls as inputs and outputs of the graph.

Everything else is what ``torch.onnx.export(dynamo=True)`` makes of the module at opset 23; the exporter's own rules
recognize RMSNormalization and RotaryEmbedding. Parameters are hidden from constant folding, so each
keeps its checkpoint name and a build can bind other tensors in its place.
"""

from __future__ import annotations

import contextlib
import inspect
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir
import torch

from pipeline.export.complex_products import WrittenOut
from pipeline.export.decompose import decomposed_where_needed
from tapeout.errors import ExportError, one_line
from tapeout.mapped_model import decoder_layers
from tapeout.mapped_weights import weightless
from tapeout.operators import DOMAIN, PAST, PRESENT, operator_of, operators
from tapeout.operators.hub_functions import functions_replaced, hub_functions
from tapeout.operators.operator import Operator, TracedState

OPSET = 23
POSITIONS = "position_ids"
ENDLESS = (1 << 31) - 1  # positions are int32 in engines; of models whose configuration names no longest sequence


@dataclass
class _Tracer:
    """See :class:`tapeout.operators.operator.Tracer`."""

    positions: int
    kept: list[tuple[int, TracedState]] = field(default_factory=list[tuple[int, TracedState]])  # with its layer
    calls: int = 0
    layer: int = 0  # that is running
    called: set[int] = field(default_factory=set[int])  # layers with a node that keeps state
    emits: bool = False
    _names: Counter[tuple[int, str]] = field(default_factory=Counter[tuple[int, str]])
    _mask: torch.Tensor | None = None
    _past: Sequence[torch.Tensor] = ()  # of all nodes
    presents: list[torch.Tensor] = field(default_factory=list[torch.Tensor])

    def start(self, mask: torch.Tensor | None = None, past: Sequence[torch.Tensor] = ()) -> None:
        """Before each run of the model; without ``mask`` it is the first one."""
        self.calls, self.emits, self.presents, self._mask, self._past = 0, mask is not None, [], mask, past
        self._names.clear()
        if not self.emits:
            self.kept = []

    @property
    def mask(self) -> torch.Tensor:
        assert self._mask is not None, "no node is emitted in the first run"
        return self._mask

    def names(self) -> list[str]:
        """``LAYER.TENSOR`` of all state, in the order of inputs and outputs."""
        return [f"{layer}.{state.name}" for layer, state in self.kept]

    def states(self) -> list[TracedState]:
        return [state for _, state in self.kept]

    def unique(self, name: str) -> str:
        count = self._names[self.layer, name]
        self._names[self.layer, name] += 1
        return f"{name}{count}" if count else name

    def node(
        self,
        operator: Operator,
        inputs: Sequence[torch.Tensor | None],
        attributes: Mapping[str, Any],
        state: Sequence[TracedState],
        tokens: int,
        columns: int | None = None,
    ) -> torch.Tensor:
        self.calls += 1
        data = inputs[0]
        assert data is not None
        shape = data.shape if columns is None else torch.Size((*data.shape[:-1], columns))
        if state:
            self.called.add(self.layer)
        if not self.emits:
            self.kept += ((self.layer, each) for each in state)
            return data.new_zeros(shape)
        first = len(self.presents)
        past = self._past[first : first + len(state)]
        # What grows holds the same tokens, so its length is read once.
        held = next((before.shape[one.grows] for one, before in zip(state, past, strict=True) if one.grows), 0)
        total = held + tokens
        shapes = [_shape(one, data.shape[0], total) for one in state]
        output, *presents = torch.onnx.ops.symbolic_multi_out(
            f"{DOMAIN}::{operator.name}",
            [*inputs, *past],
            attrs=dict(attributes),
            dtypes=[data.dtype] * (1 + len(state)),
            shapes=[shape, *shapes],
            version=1,
        )
        self.presents += presents
        return output


def _shape(state: TracedState, batch: int, tokens: int) -> list[int]:
    """Of a state after so many tokens."""
    return [tokens if axis == state.grows else length for axis, length in enumerate((batch, *state.shape))]


class _Wrapper(torch.nn.Module):
    """The flat signature of the portable graph around a causal language model."""

    def __init__(self, model: torch.nn.Module, tracer: _Tracer) -> None:
        super().__init__()
        self.model, self.tracer, self.takes_positions = model, tracer, takes(model, POSITIONS)

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor,
        *past: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        self.tracer.start(attention_mask, past)
        inputs = {POSITIONS: position_ids} if self.takes_positions else {}
        logits = self.model(input_ids=input_ids, use_cache=False, **inputs).logits
        return (logits, *self.tracer.presents)


def trace(model: Any, progress: Callable[[str], None] = lambda _: None) -> ir.Model:
    """Trace ``model`` (eval mode) to an ONNX IR model whose parameters keep their checkpoint names.

    Inputs ``input_ids [B, S]``, ``attention_mask [B, P+S]`` (0 marks left padding), ``position_ids [B, S]`` (all
    int64), and the state of each layer N: ``past_key_values.N.key|value [B, kv_heads, P, channels]`` of attention,
    ``past_key_values.N.conv [B, K-1, C]`` of a convolution, ``past_key_values.N.delta|scan [B, heads, Dk, Dv]`` of a
    recurrence; outputs ``logits [B, S, V]`` and the same state after the tokens,
    ``present.N.key|value [B, kv_heads, P+S, channels]`` and so on.
    """
    tracer = _Tracer(longest(model))
    with contextlib.ExitStack() as stack:
        for each in (weightless(model), _unknown_functions_refused(model), _layers_followed(model, tracer)):
            stack.enter_context(each)
        for operator in operators().values():
            stack.enter_context(operator.traced(model, tracer))
        progress("tracing")
        program = _export_program(model, tracer)
    graph_model = program.model
    progress("simplifying the graph")
    _simplify(graph_model, {name for name, _ in model.named_parameters(remove_duplicate=False)})
    for operator in {id(found): found for node in graph_model.graph if (found := operator_of(node))}.values():
        graph_model.functions[(DOMAIN, operator.name, "")] = operator.function()
    graph_model.opset_imports[DOMAIN] = 1
    return graph_model


def takes(model: Any, argument: str) -> bool:
    """Whether a model has an argument of this name."""
    return argument in inspect.signature(model.forward).parameters


def longest(model: Any) -> int:
    """The longest sequence that the model's configuration allows; positions after it are never computed.

    A model that is given no positions may name none: recurrences alone have no longest sequence.
    """
    found = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if found is None and not takes(model, POSITIONS):
        return ENDLESS
    if not isinstance(found, int) or found < 2:
        raise ExportError(
            f"max_position_embeddings of {found} in the configuration of {type(model).__name__}",
            expected="the length of the longest sequence, at least 2",
            remedy="add max_position_embeddings to config.json, as the model's authors state it",
        )
    return found


@contextlib.contextmanager
def _unknown_functions_refused(model: Any) -> Generator[None]:
    """Functions that keep a state, and that no operator computes, stop the trace by name."""
    known = {name for operator in operators().values() for name in operator.functions}

    def refusal(name: str) -> Callable[..., Any]:
        def refuse(*_: Any, **__: Any) -> Any:
            raise ExportError(
                f"{type(model).__name__} computes {name}, which keeps a state that no graph of ours has",
                expected="a decoder whose tokens meet in operators that an export keeps (docs/models.md)",
                remedy="choose another model",
            )

        return refuse

    with functions_replaced(model, {name: refusal(name) for name in hub_functions(model).keys() - known}):
        yield


@contextlib.contextmanager
def _layers_followed(model: Any, tracer: _Tracer) -> Generator[None]:
    """Tell the tracer which decoder layer runs."""
    handles = [
        layer.register_forward_pre_hook(lambda *_, number=number: setattr(tracer, "layer", number))
        for number, layer in enumerate(decoder_layers(model))
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _see_state(model: Any, tracer: _Tracer) -> None:
    """The first run, over three tokens: what each operator keeps, in call order."""
    tracer.start()
    inputs = {POSITIONS: torch.arange(3)[None]} if takes(model, POSITIONS) else {}
    model(input_ids=torch.zeros(1, 3, dtype=torch.int64), use_cache=False, **inputs)
    layers = model.config.get_text_config().num_hidden_layers
    if missing := sorted({*range(layers)} - tracer.called):
        raise ExportError(
            f"layers {', '.join(map(str, missing[:8]))} of {type(model).__name__} call neither transformers' attention "
            "interface nor another operator that an export keeps",
            expected=f"a call in each of its {layers} layers",
            remedy="encoder-decoder models, and attention outside transformers' attention interface, are not supported",
        )
    if not inputs and any(state.grows for state in tracer.states()):
        raise ExportError(
            f"{type(model).__name__} takes no {POSITIONS}",
            expected="a decoder with attention that gets the position of each token",
            remedy="choose another decoder; position biases (ALiBi) are not supported",
        )


def _export_program(model: Any, tracer: _Tracer) -> Any:
    # Without gradients, modules that turn them off leave no mark in the program.
    with _module_stack(model) as modules, torch.no_grad(), decomposed_where_needed(), WrittenOut():
        try:
            _see_state(model, tracer)
            states = tracer.states()
            past = [torch.randn(_shape(state, 2, 5)) for state in states]
            dynamic, row = torch.export.Dim.DYNAMIC, {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
            return torch.onnx.export(
                _Wrapper(model, tracer).eval(),
                (
                    torch.ones(2, 3, dtype=torch.int64),
                    torch.ones(2, 8, dtype=torch.int64),
                    torch.arange(5, 8)[None].repeat(2, 1),
                    *past,
                ),
                input_names=[
                    "input_ids",
                    "attention_mask",
                    POSITIONS,
                    *(f"{PAST}.{name}" for name in tracer.names()),
                ],
                output_names=["logits", *(f"{PRESENT}.{name}" for name in tracer.names())],
                dynamic_shapes=(
                    row,
                    row,
                    row,
                    tuple({0: dynamic} | ({s.grows: dynamic} if s.grows else {}) for s in states),
                ),
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
