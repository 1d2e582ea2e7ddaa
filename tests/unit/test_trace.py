"""What cannot be traced is refused by name, and the model is left as it was."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from typing import Any

import onnx_ir as ir
import pytest

from pipeline.export import decompose
from pipeline.export.trace import _first_output_looked_at_first, _reason, trace
from tapeout.errors import ExportError
from tapeout.operators import operators as all_operators
from tapeout.operators.attention import is_attention
from tests.families import random_model


def test_a_module_that_cannot_be_traced_is_named() -> None:
    import torch

    class Gated(torch.nn.Module):
        """Takes another branch for other data, as early-exit and sparse blocks do."""

        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) if x.abs().mean() > 0.5 else x

    model = random_model("llama")
    model.model.layers[1].mlp = Gated(model.model.layers[1].mlp)
    previous = model.config._attn_implementation
    with pytest.raises(ExportError) as caught:
        trace(model)
    assert "model.layers.1.mlp (Gated)" in caught.value.found
    assert caught.value.expected and caught.value.remedy
    assert model.config._attn_implementation == previous
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("gptj", "layers 0, 1 of GPTJForCausalLM call neither"),
        ("bloom", "layers 0, 1 of BloomForCausalLM call neither"),
    ],
)
def test_what_a_graph_cannot_hold_is_refused(name: str, found: str) -> None:
    with pytest.raises(ExportError, match=found):
        trace(random_model(name))


def test_attention_without_positions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recurrences need none; attention would have the wrong ones in every step but the first."""
    monkeypatch.setattr("pipeline.export.trace.takes", lambda *_: False)
    with pytest.raises(ExportError, match="LlamaForCausalLM takes no position_ids"):
        trace(random_model("llama"))


def test_a_state_that_no_operator_keeps_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {name: operator for name, operator in all_operators().items() if name != "SelectiveScan"}
    monkeypatch.setattr("pipeline.export.trace.operators", lambda: known)
    with pytest.raises(ExportError, match="computes mamba_chunk_scan_combined, which keeps a state"):
        trace(random_model("falcon_h1"))


def test_a_message_has_the_first_cause_and_no_colors() -> None:
    outer = RuntimeError("\x1b[96mFailed to export\x1b[0m\nadvice")
    outer.__cause__ = ValueError("\n\x1b[31mthe cause\x1b[0m\nmore")
    assert _reason(outer) == "ValueError: the cause more"


def test_windows_are_those_of_the_masks() -> None:
    """The option ``sliding_window`` is for flash attention: transformers' own attention applies the mask alone."""
    model = random_model("gemma3")
    for layer in model.model.layers:
        layer.self_attn.sliding_window = None
    windows = [node.attributes["window"].as_int() for node in trace(model).graph if is_attention(node)]
    expected = [8 if kind == "sliding_attention" else 0 for kind in model.config.layer_types]
    assert windows == expected and 8 in windows


def operators(graph: ir.Model) -> list[tuple[object, ...]]:
    """Operators in order, with their attributes and how many inputs are given. ``allowzero`` is about empty tensors."""

    def attributes(node: ir.Node) -> dict[str, str]:
        return {name: str(value.value) for name, value in node.attributes.items() if name != "allowzero"}

    return [(node.op_type, attributes(node), [value is not None for value in node.inputs]) for node in graph.graph]


def one_layer(name: str) -> Any:
    return random_model(name, **{"n_layer" if name == "gpt2" else "num_hidden_layers": 1})


@cache
def operators_of_family(name: str) -> tuple[list[tuple[object, ...]], int]:
    """Of the graph of one of its layers, and how often torch decomposed the program for it."""
    from torch.export import ExportedProgram

    calls: list[ExportedProgram] = []
    decompositions = ExportedProgram.run_decompositions

    def counted(self: ExportedProgram, *options: object) -> ExportedProgram:
        calls.append(self)
        return decompositions(self, *options)  # pyright: ignore[reportArgumentType]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ExportedProgram, "run_decompositions", counted)
        return operators(trace(one_layer(name))), len(calls)


@pytest.mark.parametrize("name", ["gemma2", "gpt2"])
def test_a_program_that_onnx_has_is_not_decomposed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    quick, decomposed = operators_of_family(name)
    monkeypatch.setattr(decompose, "_made_translatable", lambda *_: False)
    assert not decomposed and quick == operators(trace(one_layer(name)))


@pytest.mark.parametrize("operators_in_order", [("Neg", "Abs"), ("Abs", "Neg")])
def test_patterns_of_two_outputs_are_found_as_without_our_shortcut(operators_in_order: tuple[str, str]) -> None:
    from onnxscript.rewriter import pattern

    def two(op: Any, x: Any) -> Any:
        return op.Neg(x), op.Abs(x)

    def other(op: Any, x: Any) -> Any:
        return op.Relu(x), op.Sigmoid(x)

    rule = pattern.RewriteRuleSet([pattern.RewriteRule(two, other)])
    for context in (nullcontext, _first_output_looked_at_first):
        x = ir.Value(name="x", shape=ir.Shape([2]), type=ir.TensorType(ir.DataType.FLOAT))
        nodes = [ir.node(name, [x]) for name in ("Exp", *operators_in_order)]
        graph = ir.Graph([x], [node.outputs[0] for node in nodes], nodes=nodes, opset_imports={"": 20})
        with context():
            assert rule.apply_to_model(ir.Model(graph, ir_version=10)) == 1
        assert sorted(node.op_type for node in graph) == ["Exp", "Relu", "Sigmoid"]


def test_an_output_that_is_a_cast_is_exported() -> None:
    import torch

    class Casts(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return (x + 1).float(), (x + 2).to(torch.float16)

    with decompose.decomposed_where_needed():
        program = torch.onnx.export(Casts().eval(), (torch.ones(2),), dynamo=True, verbose=False)
    assert program is not None and [value.dtype for value in program.model.graph.outputs] == [
        ir.DataType.FLOAT,
        ir.DataType.FLOAT16,
    ]


@pytest.mark.parametrize("name", ["cohere2", "arcee"])
def test_a_program_that_onnx_lacks_is_decomposed(name: str) -> None:
    """cohere2 flattens, which is one operator of torch and four of ONNX; arcee squares, which ONNX cannot translate."""
    assert operators_of_family(name)[1] == 1


def test_a_trace_inside_another_leaves_it_alone() -> None:
    """Of two families, so that a mixture would be another graph."""
    inner: list[ir.Model] = []

    def once(step: str) -> None:
        if not inner:
            inner.append(trace(one_layer("gemma2")))

    outer = trace(one_layer("llama"), once)
    assert operators(outer) == operators_of_family("llama")[0]
    assert operators(inner[0]) == operators_of_family("gemma2")[0] != operators(outer)
