"""Every stage on the tiny llama, from local sources to the registry, and what the shipped recipes are judged to be.

While they run, the parameters each reads are recorded and compared with those that dvc.yaml lists.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from engines.bundle import EngineBundle
from evals.check import Outcome
from evals.verdict import Verdict
from pipeline.cli import doctor
from pipeline.recipe import load_recipe
from pipeline.recipes import shipped
from pipeline.stages import wiring
from quantization.plan import PrecisionPlan
from tapeout import artifact
from tapeout.lineage import explain
from tests.native import own_cache
from tests.registries import empty_registry
from tests.stage_reads import leaves, recording
from tests.states import kv_dtype
from tests.tiny_project import params, write_data

ROOT = Path(__file__).parents[2]
DVC: dict[str, Any] = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]
AFTER_CALIBRATE = (
    *("sensitivity", "plan", "quantize", "build-candidate"),
    *("parity", "benchmark", "evaluate", "incumbent", "shadow", "serving", "source", "gate"),
)
FEWER_ITEMS = tuple(name for name in AFTER_CALIBRATE if "evaluate.items" in DVC[name]["params"] or name == "gate")


@pytest.fixture(scope="module")
def reads() -> dict[str, set[str]]:
    """The parameters each stage read when ``project`` was made."""
    return {}


@pytest.fixture(scope="module")
def project(
    tiny_checkpoint: Path,
    tiny_texts: Callable[[int, int], list[str]],
    tmp_path_factory: pytest.TempPathFactory,
    reads: dict[str, set[str]],
) -> Path:
    """A folder in which all stages ran once."""
    folder = tmp_path_factory.mktemp("project")
    write_data(folder / "data", tiny_texts(64, 3))
    (folder / "params.yaml").write_text(yaml.safe_dump(params(tiny_checkpoint, folder / "data"), sort_keys=False))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        own_cache(patch, folder.with_name("cache"))
        patch.setenv("MLFLOW_TRACKING_URI", empty_registry(folder))
        for name in wiring.STAGES:
            with recording() as reads[name]:
                wiring.run(name, Path("params.yaml"))
    return folder


def judged(project: Path, recipe: str, stages: Sequence[str], folder: Path, patch: pytest.MonkeyPatch) -> Verdict:
    """The verdict on a copy of the project with a shipped recipe laid over its parameters. ``stages``: to run again."""
    shutil.copytree(project, folder, copy_function=shutil.copy2)
    patch.chdir(folder)
    own_cache(patch, project.with_name("cache"))
    patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder / 'mlflow.db'}")
    (folder / "params.yaml").write_text(shipped.overlay(recipe, folder / "params.yaml"))
    for name in stages:
        wiring.run(name, Path("params.yaml"))
    return artifact.load(folder / "artifacts" / "verdict", Verdict).record


def test_the_chosen_plan_is_what_the_engine_computes(project: Path) -> None:
    plan = artifact.load(project / "artifacts" / "plan", PrecisionPlan)
    bundle = artifact.load(project / "artifacts" / "candidate", EngineBundle)
    assert plan.record.search is not None and plan.record.search.joint_kl <= 0.0003
    for group, kernel in plan.record.schemes.items():
        built = bundle.record.plan[group]
        assert ("static int8" in built) == (kernel.activations == "int8")
        assert kernel.activations == "int8" or f"{kernel.bits}-bit" in built or "fp32" in built
    tables = plan.record.embeddings.scheme
    for group in ("embedding", "lm_head"):
        assert (f"{tables.bits}-bit" if tables.bits < 32 else "fp32") in bundle.record.plan[group]
    assert kv_dtype(bundle.record.io) == plan.record.kv_cache.settings.dtype
    lineage = explain(project / "artifacts" / "candidate").parents
    quantized = next(parent for parent in lineage if parent.artifact_type == "QuantizedModel")
    assert plan.digest in {parent.digest for parent in quantized.parents}


def test_a_chosen_plan_passes_and_can_be_promoted(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = artifact.load(project / "artifacts" / "verdict", Verdict)
    assert verdict.record.outcome is Outcome.PASS, verdict.record.headline
    monkeypatch.chdir(project)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{project / 'mlflow.db'}")

    from pipeline.registry.promotion import promote
    from pipeline.registry.register import champion, incumbent

    recipe = load_recipe()
    assert promote(recipe).changed
    assert not promote(recipe).changed
    found = champion("tiny")
    assert found is not None and found.digest == verdict.record.candidate
    # Promoting a candidate does not make it its own rival.
    assert incumbent("tiny", verdict.record.candidate) is None
    report = (project / "artifacts" / "report" / "report.html").read_text()
    assert "PASS" in report and "http" not in re.sub(r"http://www\.w3\.org/\S+", "", report)


def test_doctor_says_what_a_token_takes_of_the_kv_cache(project: Path) -> None:
    """4 layers of 2 heads of 32 channels, keys and values in 4 bytes; 8 sequences of 512 tokens."""
    found = doctor.bundle(project / "artifacts" / "baseline")
    assert "; 2.0 KiB of KV cache a token (8.0 MiB for 8 sequences of 512 tokens)" in found.found


@pytest.mark.parametrize("name", wiring.STAGES)
def test_dvc_knows_the_parameters_a_stage_reads(name: str, project: Path, reads: dict[str, set[str]]) -> None:
    listed: set[str] = set()
    for key in DVC[name].get("params", []):
        every = key == {"params.yaml": None}
        listed.update(leaf for leaf in leaves() if every or leaf == key or leaf.startswith(f"{key}."))
    assert reads[name] == listed


def test_four_bits_by_rounding_fail_by_merit(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = judged(project, "w4-rtn", AFTER_CALIBRATE, tmp_path / "project", monkeypatch)
    assert verdict.outcome is Outcome.FAIL
    assert verdict.check("kl").outcome is Outcome.FAIL
    assert verdict.check("quantized").outcome is Outcome.PASS  # it is a quantized model, and computed right: just worse
    assert verdict.check("parity_kl").outcome is Outcome.PASS


def test_too_few_items_are_inconclusive(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = judged(project, "starved", FEWER_ITEMS, tmp_path / "project", monkeypatch)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert verdict.check("accuracy").outcome is Outcome.INCONCLUSIVE
    assert not [check for check in verdict.checks if check.outcome is Outcome.FAIL]
