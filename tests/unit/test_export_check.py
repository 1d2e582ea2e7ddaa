"""The comparison of a graph with transformers sees small errors, and lets nothing pass that is not a number."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from pipeline.export.check.difference import largest_difference
from tests.exported import family_graph
from tests.families import MAX_POSITIONS, random_model


@pytest.fixture(scope="module")
def graph() -> Path:
    return family_graph("llama").folder / "model.onnx"


def test_the_same_weights_agree(graph: Path, tmp_path: Path) -> None:
    assert largest_difference(random_model("llama"), graph, tmp_path, positions=MAX_POSITIONS).error < 1e-4


def test_few_positions_are_enough(graph: Path, tmp_path: Path) -> None:
    """An engine of two positions has no room for late pieces."""
    for positions in (2, 3, 8, 9):
        work = tmp_path / str(positions)
        work.mkdir()
        assert largest_difference(random_model("llama"), graph, work, positions=positions).error < 1e-4


def test_one_weight_slightly_off_is_seen(graph: Path, tmp_path: Path) -> None:
    model = random_model("llama")
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight.mul_(1.02)
    assert 1e-4 < largest_difference(model, graph, tmp_path, positions=MAX_POSITIONS).error < 1


def test_a_reference_that_is_not_a_number_does_not_pass(graph: Path, tmp_path: Path) -> None:
    model = random_model("llama")
    with torch.no_grad():
        model.model.norm.weight[0] = math.nan
    assert largest_difference(model, graph, tmp_path, positions=MAX_POSITIONS).error == math.inf
