"""Stages on the tiny llama, in a process of the copy: ``python -m tests.drills.stages FOLDER PARAMETERS [STAGE ...]``.

Without names every stage, in a new project; else those of the project that is there.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import yaml

from engines.bundle import EngineBundle
from evals.verdict import Verdict
from pipeline.stages import wiring
from tapeout import artifact
from tests.registries import empty_registry
from tests.tiny import tiny_checkpoint, tiny_texts
from tests.tiny_project import params, write_data

# Enough to see that evidence is taken; not to decide.
SMALL: dict[str, dict[str, Any]] = {
    "evaluate": {"items": 40, "documents": 40, "document_tokens": 64},
    "shadow": {"prompts": 20, "max_new_tokens": 8},
    "benchmark": {"repeats": 1, "batches": [1]},
    "gate": {"min_items": 40, "min_text_documents": 40, "min_shadow_prompts": 20},
}
# Drills are not about which plan is chosen, and to choose one takes longer than all other stages.
PLAN: dict[str, Any] = {
    "schemes": [{"match": "*", "bits": 8, "group_size": 64, "symmetric": True}],
    "embeddings": {"bits": 8, "group_size": 32, "symmetric": True},
    "kv_cache": {"dtype": "int8"},
}


def write_project(folder: Path, given: dict[str, dict[str, Any]], architecture: str = "llama") -> None:
    """A new folder with parameters and data. ``given``: changes to the parameters of the tiny project."""
    folder.mkdir()
    write_data(folder / "data", tiny_texts(64, 3))
    recipe: dict[str, Any] = params(tiny_checkpoint(architecture), folder / "data")
    for changes in (SMALL, given):
        for section, values in changes.items():
            recipe[section] = {**recipe.get(section, {}), **values}
    (folder / "params.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))


def main(folder: Path, given: dict[str, dict[str, Any]], only: list[str]) -> None:
    if not only:
        write_project(folder, {**given, "plan": {**PLAN, **given.get("plan", {})}})
        empty_registry(folder)
    os.chdir(folder)
    os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{folder / 'mlflow.db'}"
    for name in only or wiring.STAGES:
        wiring.run(name, Path("params.yaml"))
    verdict = artifact.load(folder / "artifacts" / "verdict", Verdict).record
    bundle = artifact.load(folder / "artifacts" / "candidate", EngineBundle).record
    found = {
        "plan": bundle.plan,
        "outcome": verdict.outcome.value,
        "checks": {check.name: check.outcome.value for check in verdict.checks},
        "items": {each.task: each.items for each in verdict.slices},
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3:])
