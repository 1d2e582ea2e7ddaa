"""Defects of routers in an engine: tokens choose other experts than in the quantized model, or weigh them otherwise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from engines.passes.base import Lowering, PassResult
from engines.passes.onnxruntime import routers
from evals.check import Outcome
from tests.compared import checks_of, compared
from tests.family_engines import make, words

FAMILY, DOCUMENTS, TOKENS = "qwen3_moe", 4, 64


def failing(folder: Path) -> set[str]:
    """Checks of parity that fail."""
    documents = words(FAMILY, DOCUMENTS, TOKENS, 2)
    made = make(FAMILY, folder, num_local_experts=16, num_experts_per_tok=4, norm_topk_prob=True)
    report = compared(made, folder, documents, TOKENS)
    return {name for name, check in checks_of(report, DOCUMENTS).items() if check.outcome is Outcome.FAIL}


def choices_changed(monkeypatch: pytest.MonkeyPatch, **wrong: Callable[[int], int]) -> None:
    """Attributes of every choice of experts, after the pass that makes them."""
    sound = routers.run

    def run(lowering: Lowering) -> PassResult:
        outcome = sound(lowering)
        nodes = [node for node in lowering.model.graph if node.op_type == routers.CHOICE]
        assert len(nodes) == 2
        for node in nodes:
            for name, change in wrong.items():
                node.attributes[name] = ir.AttrInt64(name, change(node.attributes[name].as_int()))
        return outcome

    monkeypatch.setattr(routers, "run", run)


def test_one_expert_too_few_is_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    choices_changed(monkeypatch, chosen=lambda chosen: chosen - 1)
    assert {"parity_routing", "parity_error"} <= failing(tmp_path)


def test_weights_are_not_normalized(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    choices_changed(monkeypatch, normalized=lambda _: 0)
    found = failing(tmp_path)
    assert "parity_error" in found and "parity_routing" not in found


def test_a_router_in_int8(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sound = routers.tiles_of

    def rounded(weight: np.ndarray) -> np.ndarray:
        step = np.abs(weight).max() / 127
        return sound((np.rint(weight / step) * step).astype(np.float32))

    monkeypatch.setattr(routers, "tiles_of", rounded)
    assert "parity_routing" in failing(tmp_path)


def test_sound_routers(tmp_path: Path) -> None:
    assert not failing(tmp_path)
