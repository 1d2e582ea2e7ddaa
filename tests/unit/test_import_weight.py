"""What starts quickly and serves without torch stays so: heavy libraries import late."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
HEAVY = {"torch", "transformers", "tensorrt", "mlflow", "datasets", "lm_eval", "scipy", "matplotlib", "pandas", "dvc"}
BACKENDS = {"onnxruntime", "onnx"}
RUNTIME = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in (ROOT / "runtime").rglob("*.py")
    if path.stem != "__init__"
)


LIGHT = (
    *("engines", "engines.load", "engines.bundle", "engines.protocol", "pipeline", "pipeline.cli.main"),
    *("tapeout", "tapeout.adapters", "tapeout.artifact", "tapeout.recipe", "tapeout.portable_graph"),
    *("evals.known", "evals.verdict", "pipeline.recipe", "quantization", *RUNTIME),
)
IN_TURN = """
import importlib, json, sys
found, before = {}, set()
for name in sys.argv[1:]:
    importlib.import_module(name)
    found[name] = sorted({loaded.partition(".")[0] for loaded in sys.modules} - before)
    before.update(found[name])
print(json.dumps(found))
"""


def run(*words: str) -> str:
    """What a fresh interpreter writes."""
    return subprocess.run([sys.executable, "-c", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def heavy_of_each(names: Sequence[str]) -> dict[str, set[str]]:
    """By module: the heavy libraries that it is the first to import, where all are imported in turn."""
    found = {name: {*new} & (HEAVY | BACKENDS) for name, new in json.loads(run(IN_TURN, *names)).items()}
    return {name: heavy for name, heavy in found.items() if heavy}


def modules(statement: str) -> set[str]:
    """What a fresh interpreter has imported after running ``statement``."""
    return set(run(f"{statement}\nimport sys\nprint(*sys.modules, sep='\\n')").split())


def heavy_imports(statement: str, forbidden: set[str]) -> set[str]:
    """Which of the ``forbidden`` top-level modules it then holds."""
    return {name.partition(".")[0] for name in modules(statement)} & forbidden


def test_this_test_notices_a_heavy_import() -> None:
    assert heavy_imports("import torch", HEAVY) >= {"torch"}
    assert heavy_of_each(["json", "onnxruntime.capi", "tapeout"]) == {"onnxruntime.capi": {"onnxruntime"}}


def test_light_modules_import_no_heavy_library() -> None:
    assert heavy_of_each(LIGHT) == {}


def test_help_and_the_gate_need_no_heavy_library(tmp_path: Path) -> None:
    calls = f"from pipeline.cli.main import main; import os; os.chdir({str(tmp_path)!r}); import contextlib, io\n"
    for words in (["--help"], ["gate"], ["inspect", "x"], ["report"]):
        quiet = "with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):"
        calls += f"{quiet} main({words!r})\n"
    assert heavy_imports(calls, HEAVY | BACKENDS) == set()


def test_a_pull_imports_little() -> None:
    """No statistics, no recipe, no keys, and no terminal library where standard error is not a terminal."""
    statement = "import requests, pipeline.cli.main, pipeline.registry.pull; from pipeline.sources import download\n"
    found = modules(f"{statement}with download.progress_bar('x'): ...")
    libraries = {name.partition(".")[0] for name in found}
    assert libraries & {*HEAVY, *BACKENDS, "numpy", "yaml", "rich", "cryptography"} == set()
    assert found & {"evals", "pipeline.recipe", "pipeline.registry.judged", "tapeout.signing"} == set()


def test_the_gateway_and_the_wire_import_neither_numpy_nor_an_engine() -> None:
    """They may run where there is no engine. Planted: any of the imports that are forbidden here."""
    light = [
        name for name in RUNTIME if name.startswith(("runtime.gateway", "runtime.wire", "runtime.constraints.check"))
    ]
    found = modules("\n".join(f"import {name}" for name in light))
    assert len(light) > 30 and {*light} <= found
    assert {
        name for name in found if name.split(".")[0] in {"numpy", "engines"} or name.startswith("runtime.engine")
    } == set()


def test_serving_a_bundle_needs_no_torch_and_no_registry() -> None:
    statement = "import pipeline.cli.serve, runtime.gateway.http.run, runtime.engine.worker, engines.targets.ort_cpu"
    assert heavy_imports(statement, HEAVY) == set()


def test_searching_a_plan_needs_no_torch() -> None:
    """A recipe that writes the plan out simulates no rounding, which is what takes torch."""
    assert heavy_imports("import quantization.plan_search, quantization.sensitivity_sweep", {"torch"}) == set()


def test_opening_an_engine_and_generating_needs_no_torch() -> None:
    statement = "import pipeline.cli.generate, engines.targets.ort_cpu, tapeout; tapeout.generate"
    assert heavy_imports(statement, HEAVY) == set()
