"""Every stage on a machine without the target's hardware: the verdict says what has to run, and where."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
import yaml

from engines.bundle import EngineBundle
from engines.kernels.cuda import device
from evals.check import Outcome
from evals.evidence import load_evidence, measured
from evals.kinds.emulated import EmulatedReport, measure
from evals.not_executed import NotExecuted, write_not_executed
from evals.verdict import Verdict
from pipeline.cli import gate
from pipeline.recipe import load_recipe
from pipeline.stages import wiring
from tapeout import artifact
from tapeout.artifact import load_header
from tapeout.errors import BuildError, EvidenceError, ExitCode
from tests.cuda_bundles import without_machine_code
from tests.native import own_cache
from tests.registries import empty_registry
from tests.tiny_project import params, write_data

LEVELS = "sm120 or sm100 or sm90 or sm89 or sm80"
FP8 = {
    "schemes": [{"match": "*", "format": "fp8-dynamic"}],
    "embeddings": {"bits": 8, "group_size": 32, "symmetric": True},
    "kv_cache": {"dtype": "fp8"},
}


@pytest.fixture(scope="module")
def wide_heads(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny llama's tokenizer, and random weights with heads of 64 channels."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("checkpoint")
    shutil.copytree(tiny_checkpoint, folder, dirs_exist_ok=True)
    (folder / "model.safetensors").unlink()
    config = AutoConfig.from_pretrained(tiny_checkpoint, num_attention_heads=2, num_key_value_heads=1, head_dim=64)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def project(
    wide_heads: Path, tiny_texts: Callable[[int, int], list[str]], tmp_path_factory: pytest.TempPathFactory
) -> Generator[Path]:
    """A folder in which all stages ran once for the target `cuda`, in FP8."""
    folder = tmp_path_factory.mktemp("cuda") / "project"
    folder.mkdir()
    write_data(folder / "data", tiny_texts(64, 3))
    recipe: dict[str, Any] = params(wide_heads, folder / "data")
    recipe |= {"plan": FP8, "build": {"target": "cuda", "slots": 4, "threads": 1}}
    recipe["quantize"] = {"candidates": ["rtn"]}
    (folder / "params.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        own_cache(patch, folder.with_name("cache"))
        without_machine_code(patch)
        patch.setenv("MLFLOW_TRACKING_URI", empty_registry(folder))
        for name in wiring.STAGES:
            wiring.run(name, Path("params.yaml"))
        yield folder


@pytest.fixture
def copied(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "project"
    shutil.copytree(project, folder, copy_function=shutil.copy2)
    monkeypatch.chdir(folder)
    return folder


def test_the_verdict_says_what_has_to_run_where(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    verdict = artifact.load(project / "artifacts/verdict", Verdict).record
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert verdict.check("quantized").outcome is Outcome.PASS
    reason = verdict.check("executed").reason
    assert reason == (
        f"not executed on cuda; this machine has no {LEVELS}; "
        "run `dvc repro` with these artifacts on a machine that has it"
    )
    assert reason in verdict.headline and verdict.executed_on is None
    options: Any = {"key": None, "formats": (), "out": project / "ci", "plots_url": "", "as_json": False}
    assert gate.run(project / "artifacts", project / "params.yaml", **options) is ExitCode.INCONCLUSIVE
    assert "not executed on cuda" in " ".join(capsys.readouterr().out.split())


def test_emulated_kernels_are_compared_on_some_text(project: Path) -> None:
    found = artifact.load(project / "artifacts/evaluation", EmulatedReport).record
    assert found.documents == 4 and found.tokens == 4 * 63  # the last token of each predicts nothing
    assert 0 < found.kl < 0.1 and found.top_token > 0.5
    numbers = artifact.load(project / "artifacts/verdict", Verdict).record.numbers
    assert numbers["emulated_kl"] == found.kl
    page = (project / "artifacts/report/report.html").read_text()
    assert "Emulated, not executed" in page and "INCONCLUSIVE" in page
    assert json.loads((project / "artifacts/evaluation/metrics.json").read_text())["documents"] == 4


def test_all_other_evidence_says_that_it_was_not_taken(project: Path) -> None:
    types = {name: load_header(project / "artifacts" / name).artifact_type for name in measured()}
    assert types.pop("quantized", "QuantizedModel") == "QuantizedModel"
    assert types.pop("evaluation") == "EmulatedReport"
    assert len(types) >= 5 and set(types.values()) == {"NotExecuted"}
    for name in types:
        assert artifact.load(project / "artifacts" / name, NotExecuted).record.reason == f"this machine has no {LEVELS}"


def test_a_model_that_is_too_large_to_emulate_has_no_report(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "MOST_WORK", 1)
    for name in ("evaluate", "gate", "report"):
        wiring.run(name, Path("params.yaml"))
    reason = artifact.load(copied / "artifacts/evaluation", NotExecuted).record.reason
    assert reason == f"this machine has no {LEVELS}, and the model is too large to emulate its kernels"
    assert artifact.load(copied / "artifacts/verdict", Verdict).record.outcome is Outcome.INCONCLUSIVE


def test_what_says_so_of_another_engine_is_refused(copied: Path) -> None:
    other = artifact.load(copied / "artifacts/baseline", EngineBundle)
    shutil.rmtree(copied / "artifacts/parity")
    write_not_executed(copied / "artifacts/parity", other, "it was late")
    with pytest.raises(EvidenceError, match="parity was made from candidate"):
        load_evidence(copied / "artifacts", load_recipe(copied / "params.yaml"))


def test_evidence_is_taken_again_where_there_is_a_gpu(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its stages are stale there, and no others."""
    folder = copied / "artifacts/environment/code"
    before = {path.stem: json.loads(path.read_text()) for path in folder.iterdir()}
    monkeypatch.setattr(device, "find_gpu", lambda: device.Gpu("H200", (9, 0), 13000))
    wiring.run("environment", Path("params.yaml"))
    after = {path.stem: json.loads(path.read_text()) for path in folder.iterdir()}
    stale = {name for name in before if after[name] != before[name]}
    assert stale == {kind.stage for kind in wiring.KINDS if kind.stage} and "evaluate" in stale
    assert after["evaluate"]["hardware"] == ["sm90"] and before["evaluate"]["hardware"] == []


def test_heads_that_no_kernel_takes_are_refused_before_anything_takes_long(tiny_checkpoint: Path, copied: Path) -> None:
    """By the stage that follows the export, and one line."""
    recipe = yaml.safe_load((copied / "params.yaml").read_text())
    recipe["model"]["source"] = f"file:{tiny_checkpoint}"
    (copied / "params.yaml").write_text(yaml.safe_dump(recipe))
    assert list(wiring.STAGES).index("accept") == list(wiring.STAGES).index("export") + 1
    for name in ("environment", "fetch", "export"):
        wiring.run(name, Path("params.yaml"))
    (copied / "artifacts/accepted.json").unlink()
    with pytest.raises(BuildError) as refused:
        wiring.run("accept", Path("params.yaml"))
    assert refused.value.found == "no attention for layer 0: heads of 32 channels, where kernels take 64, 128, 256"
    assert not (copied / "artifacts/accepted.json").exists()
