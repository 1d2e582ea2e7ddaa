"""Defects of experts and their routers in an engine, which parity with the quantized model must find."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from engines.passes.base import Lowering, PassResult
from engines.passes.onnxruntime import native_experts, routers
from evals.check import Outcome
from tapeout.quantized import QuantizedWeight
from tests.compared import checks_of, compared
from tests.family_engines import make, words

DOCUMENTS, TOKENS = 4, 64


def failing(folder: Path, family: str = "qwen3_moe") -> set[str]:
    """Checks of parity that fail."""
    made = make(family, folder, num_local_experts=16, num_experts_per_tok=4, norm_topk_prob=True)
    report = compared(made, folder, words(family, DOCUMENTS, TOKENS, 2), TOKENS)
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


def weights_changed(monkeypatch: pytest.MonkeyPatch, change: Callable[[QuantizedWeight], QuantizedWeight]) -> None:
    """Weights of all experts, as the pass reads them."""
    sound = native_experts.Projection.read

    def read(self: native_experts.Projection, lowering: Lowering) -> QuantizedWeight:
        found = sound(self, lowering)
        assert isinstance(found, QuantizedWeight)
        return change(found)

    monkeypatch.setattr(native_experts.Projection, "read", read)


def test_two_experts_are_swapped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    order = [1, 0, *range(2, 16)]
    swapped = {"codes": lambda weight: weight.codes[order], "scales": lambda weight: weight.scales[order]}
    weights_changed(monkeypatch, lambda weight: replace(weight, **{name: of(weight) for name, of in swapped.items()}))
    assert "parity_error" in failing(tmp_path)


def test_an_expert_has_the_scales_of_its_neighbour(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    order = [1, *range(1, 16)]
    weights_changed(monkeypatch, lambda weight: replace(weight, scales=weight.scales[order]))
    assert "parity_error" in failing(tmp_path)


def test_an_expert_is_zero(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def change(weight: QuantizedWeight) -> QuantizedWeight:
        scales = weight.scales.copy()
        scales[3] = 0
        return replace(weight, scales=scales)

    weights_changed(monkeypatch, change)
    assert "parity_error" in failing(tmp_path)


def test_gates_and_ups_that_alternate_are_taken_for_halves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def halves(self: native_experts.Projection, rows: np.ndarray) -> list[np.ndarray]:
        return np.split(rows, self.parts, axis=1)

    monkeypatch.setattr(native_experts.Projection, "separated", halves)
    assert "parity_error" in failing(tmp_path, "gpt_oss")


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_sound_experts(family: str, tmp_path: Path) -> None:
    assert not failing(tmp_path, family)
