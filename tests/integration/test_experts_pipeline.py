"""A trained mixture of experts, from its checkpoint to a verdict with a plan that is chosen, and served over HTTP.

Nothing made its routers choose evenly: half of the experts are chosen by few tokens, and some by none.
"""

from __future__ import annotations

import shutil
from contextlib import closing
from pathlib import Path

import pytest
import yaml
from tokenizers import Tokenizer

from engines.bundle import EngineBundle
from engines.load import load
from engines.sequences import Sequences
from evals.check import Outcome
from evals.items import read_items
from evals.kinds.parity import KIND, ParityItem
from evals.verdict import Verdict
from pipeline.stages import wiring
from quantization.calibration import Calibration
from quantization.checkpoint import QuantizedModel
from quantization.plan import PrecisionPlan
from tapeout import artifact
from tests import command, web
from tests.drills.stages import write_project
from tests.native import own_cache
from tests.registries import empty_registry

LAYERS, EXPERTS, CHOSEN = 4, 16, 2
ITEMS = 600  # fewer do not decide on the accuracy
MIN_VISITS = 256
NEW_TOKENS = 24
PROMPT = "The list is a sequence of objects. " * 12  # more than one block
GIVEN = {
    "calibrate": {"tokens": 192, "min_visits": MIN_VISITS},
    "evaluate": {"items": ITEMS, "parity_documents": 32},
    "benchmark": {"repeats": 5},  # fewer do not decide on the speed
    "shadow": {"prompts": 120},
    # Routers choose some experts for no text at all: 10 of 16 were reached in one layer.
    "gate": {"min_items": ITEMS, "max_kl": 0.03, "min_parity_experts": 0.5},
}

# The first test waits for all stages, which took 210 s beside much other work.
pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts") / "project"
    write_project(folder, GIVEN, "qwen3_moe")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        own_cache(patch, folder / "cache")
        patch.setenv("MLFLOW_TRACKING_URI", empty_registry(folder))
        for name in wiring.STAGES:
            wiring.run(name, Path("params.yaml"))
    return folder / "artifacts"


def test_the_verdict_of_a_sound_candidate_is_a_pass(artifacts: Path) -> None:
    """Its mean KL is at most 0.03 nats, and engine and quantized model choose the same experts."""
    verdict = artifact.load(artifacts / "verdict", Verdict).record
    assert verdict.outcome is Outcome.PASS, verdict.headline
    checks = {check.name: check for check in verdict.checks}
    assert checks["kl"].bound == 0.03 and checks["parity_routing"].bound == 0.99
    assert artifact.load(artifacts / "candidate", EngineBundle).record.operator_counts["BlockExperts"] == LAYERS


def test_answers_are_those_of_the_engine_alone(artifacts: Path) -> None:
    """Served by the verdict. Prompts of other lengths share steps, and so experts."""
    folder = artifacts / "candidate"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompts = [tokenizer.encode(PROMPT[cut:]).ids for cut in (0, 20, 40)]
    body = {"prompt": prompts, "max_tokens": NEW_TOKENS, "temperature": 0, "return_token_ids": True, "ignore_eos": True}
    with command.served(str(folder)) as server:
        answer = web.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
        assert server.stop() == 0
    with closing(Sequences(load(folder, threads=1))) as alone:
        for prompt, choice in zip(prompts, answer["choices"], strict=True):
            tokens = [int(alone.prefill(0, prompt)[0].argmax())]
            while len(tokens) < NEW_TOKENS:
                tokens.append(int(alone.decode_greedy([tokens[-1]], [len(prompt) + len(tokens) - 1])[0]))
            assert choice["token_ids"] == tokens


def test_the_plan_has_units_of_experts_and_the_checkpoint_is_quantized(artifacts: Path) -> None:
    plan = artifact.load(artifacts / "plan", PrecisionPlan).record
    units = {unit.name: unit for unit in plan.units}
    assert {f"layers.{layers}.experts_{part}" for layers in ("0-1", "2-3") for part in ("up", "down")} <= units.keys()
    assert all(unit.seconds and unit.bytes for unit in units.values())
    model = artifact.load(artifacts / "quantized", QuantizedModel).record
    reports = [report for report in model.linears if report.experts]
    assert len(reports) == 2 * LAYERS and {report.experts for report in reports} == {EXPERTS}
    assert all(report.scheme == plan.schemes[report.group].fitted(report.in_features) for report in reports)
    assert model.proof.passed and model.proof.size_ratio < 0.6


def test_visits_are_counted_and_starved_experts_are_named(artifacts: Path) -> None:
    record = artifact.load(artifacts / "calibration", Calibration).record
    assert len(record.visits) == LAYERS
    for layer in record.visits:
        assert sum(layer.fit) + sum(layer.holdout) == CHOSEN * record.tokens
    notes = artifact.load(artifacts / "quantized", QuantizedModel).record.notes
    starved = [layer for layer in record.visits if layer.starved(MIN_VISITS)]
    assert [note for note in notes if "were chosen by fewer" in note] == [layer.note(MIN_VISITS) for layer in starved]
    assert max(len(layer.starved(MIN_VISITS)) for layer in starved) >= EXPERTS // 4  # routing is skewed


def test_the_engine_computes_what_the_checkpoint_says(artifacts: Path) -> None:
    """The outputs of experts are compared like those of linears."""
    items = read_items(artifacts / "parity" / KIND.items_file, ParityItem)
    down = {f"model.layers.{layer}.mlp.experts.down_proj" for layer in range(LAYERS)}
    assert len(items) >= 32 and all(down <= item.errors.keys() for item in items)
    assert max(error for item in items for error in item.errors.values()) < 0.01
    assert sum(item.kl_sum for item in items) / sum(item.tokens for item in items) < 1e-5


def test_a_plan_by_expert_goes_through_the_stages(
    artifacts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From costs that were timed to an engine that parity compares."""
    shutil.copytree(artifacts, tmp_path / "artifacts")
    recipe = yaml.safe_load((artifacts.parent / "params.yaml").read_text())
    recipe["plan"] |= {"experts": "per_expert", "goal": "memory", "max_kl": 0.00004}
    recipe["plan"] |= {"embeddings": {"bits": 32}, "kv_cache": {"dtype": "float32"}}
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    monkeypatch.chdir(tmp_path)
    own_cache(monkeypatch, artifacts.parent / "cache")
    for name in ("sensitivity", "plan", "quantize", "build-candidate", "parity"):
        wiring.run(name, Path("params.yaml"))
    plan = artifact.load(tmp_path / "artifacts/plan", PrecisionPlan).record
    units = {unit.name: unit for unit in plan.units if ".experts_" in unit.name}
    assert units.keys() == {f"layers.{layer}.experts_{part}" for layer in range(LAYERS) for part in ("up", "down")}
    assert any(unit.scheme.expert_bits for unit in units.values())
    bundle = artifact.load(tmp_path / "artifacts/candidate", EngineBundle).record
    assert {name: "mean" in bundle.plan[name] for name in units} == {
        name: bool(unit.scheme.expert_bits) for name, unit in units.items()
    }
    items = read_items(tmp_path / "artifacts/parity" / KIND.items_file, ParityItem)
    assert sum(item.kl_sum for item in items) / sum(item.tokens for item in items) < 1e-5
