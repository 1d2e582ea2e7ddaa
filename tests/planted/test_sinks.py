"""Sinks of attention that are not those of the model, in an exported graph and in an engine."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch

from engines.passes.base import Lowering, PassResult
from engines.passes.onnxruntime import cached_attention
from pipeline.export.check.difference import largest_difference
from pipeline.export.export import MODEL_FILE
from pipeline.export.trace import trace
from tapeout.errors import ExportError
from tapeout.graph_analysis.linears import is_parameter
from tapeout.number_format import FloatArray
from tapeout.operators.attention import NAME_WITH_SINKS
from tests.exported import family_graph
from tests.families import MAX_POSITIONS, random_model
from tests.family_engines import difference_from_checkpoint, make
from tests.lowering import parameter

FAMILIES = ("gpt_oss", "granite_swa")
TOLERANCE = 1e-3  # the default of export.tolerance
WRONG = ("another head", "another layer", "none")


def sinks_of(model: ir.Model) -> list[tuple[ir.Node, int]]:
    """The nodes that have sinks, and the number of that input."""
    found = [
        (node, number)
        for node in model.graph
        for number, value in enumerate(node.inputs)
        if value is not None and (value.name or "").endswith("sinks")
    ]
    assert len(found) == 2
    return found


def wrong_sinks(stored: list[FloatArray], wrong: str) -> list[FloatArray]:
    if wrong == "another head":
        return [np.roll(stored[0], 1), *stored[1:]]
    if wrong == "another layer":
        return stored[::-1]
    return [np.full_like(stored[0], -1e30), *stored[1:]]


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("family", FAMILIES)
def test_sinks_in_the_graph(family: str, wrong: str, tmp_path: Path) -> None:
    exported = shutil.copytree(family_graph(family).folder, tmp_path / "graph")
    model, graph_model = random_model(family), ir.load(exported / MODEL_FILE)
    nodes = sinks_of(graph_model)
    assert {node.op_type for node, _ in nodes} == {NAME_WITH_SINKS}
    stored = [model.get_parameter(str(node.inputs[number].name)).detach().numpy() for node, number in nodes]  # pyright: ignore[reportOptionalMemberAccess]
    for (node, number), values in zip(nodes, wrong_sinks(stored, wrong), strict=True):
        planted = parameter(f"planted.{number}.{node.name}", values)
        graph_model.graph.register_initializer(planted)
        node.replace_input_with(number, planted)
    ir.save(graph_model, exported / "edited.onnx")
    (work := tmp_path / "work").mkdir()
    assert largest_difference(model, exported / "edited.onnx", work, positions=MAX_POSITIONS).error > TOLERANCE


@pytest.mark.parametrize("wrong", WRONG)
def test_sinks_in_an_engine(wrong: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Over texts of the longest length that is served."""
    lower = cached_attention.run

    def planted(lowering: Lowering) -> PassResult:
        result = lower(lowering)
        values = [node.inputs[number] for node, number in sinks_of(lowering.model)]
        names = [value.name or "" for value in values if value is not None and is_parameter(value)]
        tensors = wrong_sinks([lowering.weights.tensor(name) for name in names], wrong)
        for (node, number), name, tensor in zip(sinks_of(lowering.model), names, tensors, strict=True):
            value = parameter(f"planted.{name}", tensor)
            lowering.model.graph.register_initializer(value)
            node.replace_input_with(number, value)
        return result

    monkeypatch.setattr(cached_attention, "run", planted)
    assert difference_from_checkpoint(make("gpt_oss", tmp_path), 2, MAX_POSITIONS) != ""


def test_sinks_beside_a_soft_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.gemma2.modeling_gemma2 import Gemma2Attention

    forward = Gemma2Attention.forward

    def with_sinks(self: Gemma2Attention, *args: object, **kwargs: object) -> object:
        return forward(self, *args, **{**kwargs, "s_aux": torch.zeros(self.config.num_attention_heads)})  # pyright: ignore

    monkeypatch.setattr(Gemma2Attention, "forward", with_sinks)
    with pytest.raises(ExportError, match="has sinks and a soft cap"):
        trace(random_model("gemma2"))
