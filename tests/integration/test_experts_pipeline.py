"""A mixture of experts through the stages of a recipe, from its checkpoint to parity, with a plan that is chosen."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

from engines.bundle import EngineBundle
from evals.items import read_items
from evals.kinds.parity import KIND, ParityItem
from pipeline.stages import wiring
from quantization.calibration import Calibration
from quantization.checkpoint import QuantizedModel
from quantization.plan import PrecisionPlan
from tapeout import artifact
from tests.native import own_cache
from tests.quantized import float_checkpoint
from tests.tiny import tiny_texts
from tests.tiny_project import params, write_data

STAGES = ("environment", "fetch", "export", "calibrate", "sensitivity", "plan", "quantize", "build-candidate", "parity")
EXPERTS, CHOSEN = 8, 2


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a model with random weights: nothing here asks whether its text is any good."""
    folder = tmp_path_factory.mktemp("experts")
    settings = {"num_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "moe_intermediate_size": 64}
    checkpoint = float_checkpoint(folder / "model", "qwen3_moe", tie_word_embeddings=True, **settings)
    write_data(folder / "data", tiny_texts(64, 3))
    recipe = params(checkpoint, folder / "data")
    recipe |= {
        "export": {"max_positions": 256},
        "calibrate": {"samples": 16, "tokens": 96, "min_visits": 290},
        "evaluate": {"tasks": ["piqa"], "items": 40, "documents": 8, "document_tokens": 64, "parity_documents": 4},
    }
    (folder / "params.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        own_cache(patch, folder / "cache")
        for name in STAGES:
            wiring.run(name, Path("params.yaml"))
    return folder / "artifacts"


def test_the_plan_has_units_of_experts_and_the_checkpoint_is_quantized(artifacts: Path) -> None:
    plan = artifact.load(artifacts / "plan", PrecisionPlan).record
    units = {unit.name: unit for unit in plan.units}
    assert {"layers.0-1.experts_up", "layers.0-1.experts_down"} <= units.keys()
    assert all(unit.seconds and unit.bytes for unit in units.values())
    model = artifact.load(artifacts / "quantized", QuantizedModel).record
    reports = [report for report in model.linears if report.experts]
    assert len(reports) == 4 and {report.experts for report in reports} == {EXPERTS}
    assert all(report.scheme == plan.schemes[report.group].fitted(report.in_features) for report in reports)
    assert model.proof.passed and model.proof.size_ratio < 0.6


def test_visits_are_counted_and_starved_experts_are_named(artifacts: Path) -> None:
    record = artifact.load(artifacts / "calibration", Calibration).record
    assert len(record.visits) == 2
    for layer in record.visits:
        assert sum(layer.fit) + sum(layer.holdout) == CHOSEN * record.tokens
    notes = artifact.load(artifacts / "quantized", QuantizedModel).record.notes
    wanted = [layer.note(290) for layer in record.visits if layer.starved(290)]
    assert wanted and [note for note in notes if "were chosen by fewer" in note] == wanted


def test_the_engine_computes_what_the_checkpoint_says(artifacts: Path) -> None:
    """The outputs of experts are compared like those of linears."""
    items = read_items(artifacts / "parity" / KIND.items_file, ParityItem)
    down = {f"model.layers.{layer}.mlp.experts.down_proj" for layer in range(2)}
    assert len(items) == 5 and all(down <= item.errors.keys() for item in items)
    assert max(error for item in items for error in item.errors.values()) < 0.01
    assert sum(item.kl_sum for item in items) / sum(item.tokens for item in items) < 1e-5


def test_a_plan_by_expert_goes_through_the_stages(
    artifacts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From costs that were timed to an engine that parity compares."""
    shutil.copytree(artifacts, tmp_path / "artifacts")
    recipe = yaml.safe_load((artifacts.parent / "params.yaml").read_text())
    recipe["plan"] |= {"experts": "per_expert", "goal": "memory", "max_kl": 0.00025}
    recipe["plan"] |= {"embeddings": {"bits": 32}, "kv_cache": {"dtype": "float32"}}
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    monkeypatch.chdir(tmp_path)
    own_cache(monkeypatch, artifacts.parent / "cache")
    for name in ("sensitivity", "plan", "quantize", "build-candidate", "parity"):
        wiring.run(name, Path("params.yaml"))
    plan = artifact.load(tmp_path / "artifacts/plan", PrecisionPlan).record
    units = {unit.name: unit for unit in plan.units if ".experts_" in unit.name}
    assert units.keys() == {f"layers.{layer}.experts_{part}" for layer in range(2) for part in ("up", "down")}
    assert any(unit.scheme.expert_bits for unit in units.values())
    bundle = artifact.load(tmp_path / "artifacts/candidate", EngineBundle).record
    assert {name: "mean" in bundle.plan[name] for name in units} == {
        name: bool(unit.scheme.expert_bits) for name, unit in units.items()
    }
    items = read_items(tmp_path / "artifacts/parity" / KIND.items_file, ParityItem)
    assert sum(item.kl_sum for item in items) / sum(item.tokens for item in items) < 1e-5
