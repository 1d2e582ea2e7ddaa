"""A stage becomes stale when code it can reach or a resolved parameter changes, and no other stage does."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import yaml

from engines.load import known_targets
from pipeline.recipe import Recipe
from pipeline.stages.code import DATA_SUFFIXES, LOADER, PACKAGES, RECIPE, REGISTRIES, UNCOUNTED, WIRING, code_hashes
from pipeline.stages.environment import LIBRARIES
from pipeline.stages.wiring import STAGES
from tapeout.recipe import BaseRecipe, Section

ROOT = Path(__file__).parents[2]
# The others run every time.
DVC = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]
STALE = {name for name, stage in DVC.items() if not stage.get("always_changed")}
WHOLE_RECIPE = {"report"}  # the stage of STALE that lists all parameters
Hashes = dict[str, dict[str, dict[str, object]]]  # by stage: "code" and "recipe"
# The recipe leaves out every default. Hashing all files takes a second: one whose bytes are those of the first run has
# the hash that it got then.
PROGRAM = """
import functools, hashlib, json, sys
from pathlib import Path
from pipeline.recipe import load_recipe
from pipeline.stages import code
from pipeline.stages.environment import listed, resolved
from pipeline.stages.wiring import STAGES
known_file, made, of_module = Path("known.json"), {}, code._files_of
known = json.loads(known_file.read_text()) if known_file.exists() else {}

@functools.cache
def remembered(module):
    path = code._source(module)
    read = [path, *(code._data(path.parent) if path.name == "__init__.py" else [])]
    key = hashlib.sha256(repr([module, [(str(file), file.read_bytes()) for file in read]]).encode()).hexdigest()
    if key not in made:
        made[key] = known.get(key) or of_module(module)
    return made[key]

code._files_of = remembered
recipe, code = load_recipe(Path("bare.yaml")), code.code_hashes(STAGES, sys.argv[1])
print(json.dumps({s: {"code": code[s], "recipe": resolved(recipe, listed("dvc.yaml", s))} for s in STAGES}))
known_file.write_text(json.dumps(known or made))
"""
ENGINES = {"build-baseline", "build-candidate", "benchmark", "evaluate", "shadow"}


# Libraries that no result depends on: of files, messages, memory and processes.
WITHOUT_RESULTS = {
    *("accelerate", "cryptography", "msgspec", "psutil", "pydantic", "rich", "threadpoolctl", "tqdm"),
}

COPIES = {"fetch", "report"}  # they reach code that uses such libraries, and compute no numbers


def hashes(folder: Path, target: str = "ort-cpu") -> Hashes:
    """Of the code in ``folder`` and of a recipe, in a process that imports it from there."""
    # Bytecode of an edit would be taken for that of the next one, if it has the same size and comes in the same second.
    options = ["-B"] if (folder / "known.json").exists() else []
    command = [sys.executable, *options, "-c", PROGRAM, target]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Hashes]:
    """A copy of the code, and its hashes."""
    folder = tmp_path_factory.mktemp("code")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "dvc.yaml", folder)
    (folder / "bare.yaml").write_text(yaml.safe_dump({"model": {"source": "file:/m"}, "data": {"source": "file:/d"}}))
    return folder, hashes(folder)


def stale(clean: tuple[Path, Hashes], path: str, *, old: str = "", new: str = "\nADDED = 1\n") -> set[str]:
    """The stages of ``STALE`` whose hash changes with an edit of a file: ``old`` becomes ``new``, or it is appended."""
    folder, before = clean
    file = folder / path
    text = file.read_text()
    assert not old or text.count(old) == 1
    try:
        file.write_text(text.replace(old, new) if old else text + new)
        after = hashes(folder)
    finally:
        file.write_text(text)
    return {name for name in STALE if after[name] != before[name]}


def test_the_same_code_gives_the_same_hashes_wherever_it_lies(clean: tuple[Path, Hashes]) -> None:
    here = code_hashes(STAGES, "ort-cpu")
    assert here == {name: stage["code"] for name, stage in clean[1].items()} and list(here) == list(STAGES)


def test_arithmetic_of_quantization(clean: tuple[Path, Hashes]) -> None:
    assert stale(clean, "quantization/methods/awq.py") == {"sensitivity", "plan", "quantize"}


def test_the_report_alone(clean: tuple[Path, Hashes]) -> None:
    assert stale(clean, "pipeline/report/write.py") == {"report"}
    assert stale(clean, "pipeline/report/report.html.j2", new="<p>") == {"report"}


def test_a_module_that_is_imported_inside_a_function(clean: tuple[Path, Hashes]) -> None:
    assert stale(clean, "pipeline/export/checkpoint.py") == {"export", "source"}
    assert stale(clean, "engines/kernels/cpu/source/block_linear.c", new="/* */") >= {
        "build-baseline",
        "build-candidate",
    }


def test_the_foundation(clean: tuple[Path, Hashes]) -> None:
    assert stale(clean, "tapeout/artifact.py") == STALE
    assert stale(clean, "tapeout/errors.py") == set()


def test_functions_that_stages_share_have_names_of_their_own() -> None:
    trees = [ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text()) for module in WIRING]
    body = [node for tree in trees for node in tree.body]
    names = [node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    names += [
        target.id
        for node in body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    ]
    assert len(names) == len(set(names))


def test_the_function_of_a_stage_and_one_that_several_share(clean: tuple[Path, Hashes]) -> None:
    wiring = "pipeline/stages/wiring.py"
    assert stale(clean, wiring, old="    fetch(recipe, ", new="    fetch(recipe,  # no change\n ") == set()
    assert stale(clean, wiring, old='ARTIFACTS / "source")\n\n\ndef _export', new="INCUMBENT)\n\n\ndef _export") == {
        "fetch"
    }
    inputs = "pipeline/stages/inputs.py"
    shared = stale(clean, inputs, old="def encode_texts(", new="def encode_texts(unused: int, ")
    assert shared == {"sensitivity", "plan", "evaluate", "parity", "serving", "source"}


def test_a_constant_that_functions_of_stages_use(clean: tuple[Path, Hashes]) -> None:
    wiring = "pipeline/stages/wiring.py"
    assert stale(clean, wiring, old='_PRECISION = "float32"', new='_PRECISION = "fp16"') == {"accept", "build-baseline"}
    assert stale(clean, wiring, old='"accepted.json"', new='"taken.json"') == {"accept"}


def test_comments_docstrings_and_types_only_change_nothing(clean: tuple[Path, Hashes]) -> None:
    assert stale(clean, "quantization/methods/awq.py", new="\n# a comment\n") == set()
    source = (ROOT / "quantization/methods/awq.py").read_text()
    docstring = re.match(r'"""(.+)', source)
    assert docstring is not None
    assert stale(clean, "quantization/methods/awq.py", old=docstring[0], new='"""Another docstring.') == set()
    for name in ("fetch", "export"):  # both name EngineBundle and Calibration for the type checker alone
        assert not [path for path in clean[1][name]["code"] if path.startswith(("engines/", "quantization/calibrat"))]


def test_the_target_of_the_recipe_and_no_other(clean: tuple[Path, Hashes]) -> None:
    assert stale(clean, "engines/targets/tensorrt/engine.py") == set()
    assert stale(clean, "engines/targets/ort_cpu/paged_engine.py") >= ENGINES
    other = hashes(clean[0], "tensorrt-rtx")
    for name in ENGINES:
        assert "engines/targets/tensorrt_rtx.py" in other[name]["code"]
        assert "engines/targets/tensorrt_rtx.py" not in clean[1][name]["code"]
    assert {"ort-cpu", "tensorrt-rtx"} <= set(known_targets())


def test_every_file_a_package_ships_counts_for_some_stage_or_is_known_not_to(clean: tuple[Path, Hashes]) -> None:
    """A new kind of file that code reads must be listed in ``DATA_SUFFIXES``."""
    files = {p for name in PACKAGES for p in (ROOT / name).rglob("*") if p.is_file() and "__pycache__" not in p.parts}
    shipped = {path for path in files if path.suffix not in (".py", ".pyi") and path.name != "py.typed"}
    counted = {path for stage in clean[1].values() for path in stage["code"]}
    not_python = {ROOT / path for path in counted if ":" not in path and not path.endswith(".py")}
    # The recipe is for another target than that of CUDA kernels.
    unused = {path for path in shipped if path.is_relative_to(ROOT / "engines/kernels/cuda")}
    assert not_python == {path for path in shipped - unused if path.suffix in DATA_SUFFIXES}
    # Recipes that ship, GPU engines, and the server's page.
    assert {path.suffix for path in shipped} - set(DATA_SUFFIXES) == {".yaml", ".html"}


def test_only_the_loader_imports_modules_of_ours_by_name() -> None:
    """What is imported by a name made at run time is not seen: such a module is listed in code.py."""
    found = {
        path.relative_to(ROOT).as_posix()
        for name in PACKAGES
        for path in (ROOT / name).rglob("*.py")
        if "import_module(" in path.read_text()
    }
    # A vendor's module, what users import, their own redactors, and an optional library: no stage goes through any.
    outside = {
        "engines/targets/tensorrt/compiler.py",
        "pipeline/registry/pull.py",
        "runtime/fleet/ray_cluster.py",
        "runtime/gateway/accounts/redaction.py",
        "tapeout/__init__.py",
    }
    finders = [module.replace(".", "/") for module in (LOADER, WIRING[0], *REGISTRIES)]
    known = {f"{path}/__init__.py" if (ROOT / path).is_dir() else f"{path}.py" for path in finders}
    assert found == known | outside
    assert all((ROOT / f"{name.replace('.', '/')}.py").is_file() for name in (LOADER, *WIRING, RECIPE, *UNCOUNTED))


def test_a_default_that_a_recipe_leaves_out(clean: tuple[Path, Hashes]) -> None:
    recipe = "tapeout/recipe.py"
    assert stale(clean, recipe, old="ge=8)] = 256", new="ge=8)] = 255") == {
        *{"calibrate", "sensitivity", "plan", "evaluate", "serving", "parity", "source", "gate"},
        *WHOLE_RECIPE,
    }
    assert stale(clean, recipe, old="layers_per_group: Count = 5", new="layers_per_group: Count = 6") == {
        *{"sensitivity", "plan", "gate"},
        *WHOLE_RECIPE,
    }
    changed = stale(clean, "evals/kinds/shadow/__init__.py", old='"trivia_qa")', new='"boolq")')
    assert changed >= {"fetch", "shadow"} and not changed & {"export", "calibrate", "plan", "quantize"}


def test_a_property_that_is_computed_otherwise(clean: tuple[Path, Hashes]) -> None:
    holdout = stale(clean, "tapeout/recipe.py", old="self.samples // 4", new="self.samples // 8")
    measured = {"evaluate", "serving", "parity", "source", "gate"}
    assert holdout == {"fetch", "calibrate", "sensitivity", "plan", *measured, *WHOLE_RECIPE}
    name = stale(clean, "tapeout/recipe.py", old="replace('_', ' ')", new="replace('_', '-')")
    assert name == {"sensitivity", "plan", "gate", *WHOLE_RECIPE}
    assert stale(clean, "pipeline/recipe.py", old="[self.calibrate.dataset, *", new="[*") == {
        *{"fetch", "gate"},
        *WHOLE_RECIPE,
    }


def test_a_constant_of_the_recipe_but_not_how_it_is_validated(clean: tuple[Path, Hashes]) -> None:
    recipe = "tapeout/recipe.py"
    assert stale(clean, recipe, old="STREAMS = 32", new="STREAMS = 64") >= {"sensitivity", "plan", "quantize"}
    assert stale(clean, recipe, old='"; ".join(problems)', new='", ".join(problems)') == set()


def test_a_section_gives_stages_only_fields_and_properties() -> None:
    """The resolved values hold nothing else of it. What reads the whole recipe is listed here, and only checks it."""
    checks = {"section", "too_long", "conflicts"}
    waiting, seen = [Section, Recipe], set[type[Section]]()
    while waiting:
        section = waiting.pop()
        seen.add(section)
        waiting += [kind for kind in section.__subclasses__() if kind not in seen]
        methods = {name for name, value in vars(section).items() if callable(value) and not name.startswith("_")}
        allowed = checks if issubclass(section, BaseRecipe) else set[str]()
        assert methods - {"model_post_init"} <= allowed, section
    assert len(seen) > 20


def test_every_library_that_a_stage_computes_with_makes_it_stale(clean: tuple[Path, Hashes]) -> None:
    """Planted: another scipy, which factors GPTQ's matrices and chooses plans, left all of them as they were, and the
    gate, whose intervals it computes: `tapeout gate` then said to run it, and DVC that nothing had changed.
    """
    listing = {name for name in STALE if "artifacts/environment/libraries.json" in DVC[name]["deps"]}
    known = {name.replace("-", "_") for name in LIBRARIES}
    distributions, missing, not_listing = packages_distributions(), dict[str, str](), dict[str, str]()
    for name in sorted(STALE):
        for file in sorted(file for file in clean[1][name]["code"] if file.endswith(".py") and ":" not in file):
            for package in _packages(file):
                owners = {owner.lower().replace("-", "_") for owner in distributions.get(package, [package])}
                if name not in listing | COPIES and owners & known:
                    not_listing[name] = f"{package} in {file}"
                elif name in listing and not owners & (known | WITHOUT_RESULTS):
                    missing[package] = file
    assert listing and not missing and not not_listing


def _packages(file: str) -> set[str]:
    """Of other distributions, that a file imports."""
    nodes = list(ast.walk(ast.parse((ROOT / file).read_text())))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in names} - {*sys.stdlib_module_names, *PACKAGES, ""}
