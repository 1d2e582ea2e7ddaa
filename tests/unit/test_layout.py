"""The six packages are this checkout's, though distributions with all of their names exist on the package index."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
import subprocess
import sys
import tokenize
import tomllib
from copy import deepcopy
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from grimp import ImportGraph, build_graph

ROOT = Path(__file__).parents[2]
INSTALLED = "$(INSTALLED)"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = ["tapeout", "pipeline", "quantization", "engines", "evals", "runtime"]
TOP_LEVEL = [
    *PACKAGES, "tests", "docs", "pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "dvc.yaml",
    "params.yaml", "Makefile", "requirements.lock", ".ci", ".github",
]  # fmt: skip


@pytest.mark.parametrize("name", PACKAGES)
def test_packages_resolve_to_this_checkout(name: str) -> None:
    package = importlib.import_module(name)
    assert package.__file__ is not None
    assert Path(package.__file__).resolve() == (ROOT / name / "__init__.py").resolve()
    assert package.__doc__


def test_the_packages_are_those_of_the_project_file() -> None:
    assert PROJECT["tool"]["setuptools"]["packages"]["find"]["include"] == [f"{name}*" for name in PACKAGES]
    assert set(PROJECT["tool"]["importlinter"]["root_packages"]) == set(PACKAGES)
    checked = [*PACKAGES, "benchmarks"]
    assert PROJECT["tool"]["pyright"]["include"] == checked
    assert PROJECT["tool"]["pytest"]["ini_options"]["testpaths"] == ["tests", *checked]
    assert "--doctest-modules" in PROJECT["tool"]["pytest"]["ini_options"]["addopts"]


@pytest.mark.parametrize("name", TOP_LEVEL)
def test_the_top_level_is_complete(name: str) -> None:
    assert (ROOT / name).exists()


def test_the_top_level_holds_no_other_package() -> None:
    assert {path.parent.name for path in ROOT.glob("*/__init__.py")} == {*PACKAGES, "benchmarks", "tests"}


def test_every_folder_of_code_is_a_package() -> None:
    """A folder without ``__init__.py`` would silently be left out of the installed project."""
    folders = {path.parent for name in PACKAGES for path in (ROOT / name).rglob("*.py")}
    assert not [str(folder.relative_to(ROOT)) for folder in folders if not (folder / "__init__.py").is_file()]


def test_the_lock_holds_exactly_the_versions_the_project_names() -> None:
    project = PROJECT["project"]
    extras = project["optional-dependencies"]
    locked_extras = [extra for name, extra in extras.items() if name != "ort-cuda"]  # it would replace onnxruntime
    pins = [*project["dependencies"], *(pin for extra in locked_extras for pin in extra)]
    named = {pin.partition("==")[0].split("[")[0]: pin.partition("==")[2] for pin in pins}
    lines = [line for line in (ROOT / "requirements.lock").read_text().splitlines() if not line.startswith("#")]
    locked = {name: version for name, _, version in (line.partition("==") for line in lines)}
    assert all(locked.values()), "every line is an exact pin"
    assert {name: locked.get(name) for name in named} == named


def inside(package: str) -> set[str]:
    """Folders and modules of a package, by their dotted names."""
    folder = ROOT / package.replace(".", "/")
    names = [path.parent.name for path in folder.glob("*/__init__.py")] + [path.stem for path in folder.glob("*.py")]
    return {f"{package}.{name}" for name in names if name != "__init__"}


def test_every_package_and_every_folder_that_has_layers_has_all_of_them() -> None:
    """So the contracts cover all code: a new package or folder without a layer fails here."""
    whole, *parts = PROJECT["tool"]["importlinter"]["contracts"]
    assert {contract["type"] for contract in (whole, *parts)} == {"layers"}
    layers = [
        {name.strip() for layer in contract["layers"] for name in layer.split("|")} for contract in (whole, *parts)
    ]
    assert layers[0] == {*PACKAGES, *inside("pipeline"), *inside("runtime")} - {"pipeline", "runtime"}
    for names in layers[1:]:
        (package,) = {name.rpartition(".")[0] for name in names}
        assert names == inside(package)


@cache
def imports() -> ImportGraph:
    """Of all packages. Without grimp's cache: it takes one file's imports from before an edit, if another graph, of
    other packages, was made in between.
    """
    return build_graph(*PACKAGES, include_external_packages=True, cache_dir=None)


def look_for_circles(graph: ImportGraph) -> None:
    """CycleError names a circle of the folders and modules of a package, or of a folder in it."""
    for package in sorted(
        name for name in graph.modules if not graph.is_module_squashed(name) and graph.find_children(name)
    ):
        children = graph.find_children(package)
        owner = {module: child for child in children for module in (child, *graph.find_descendants(child))}
        needs: dict[str, set[str]] = {child: set() for child in children}
        for module, child in owner.items():
            found = (owner.get(imported, child) for imported in graph.find_modules_directly_imported_by(module))
            needs[child] |= {other for other in found if other != child}
        tuple(TopologicalSorter(needs).static_order())


def test_imports_inside_packages_make_no_circle() -> None:
    """Of the folders and modules of each package and of each folder in it; imports for types count, too."""
    look_for_circles(imports())


@pytest.mark.parametrize(
    ("importer", "imported"),
    [
        ("runtime.engine.scheduling.sequence", "runtime.engine.scheduling.requests"),
        ("runtime.engine.cache.blocks", "runtime.engine.scheduling.work"),
        ("engines.kernels.operators", "engines.kernels.cpu.declarations"),
        ("tapeout.number_format", "tapeout.formats.int4"),
    ],
)
def test_a_circle_inside_a_package_is_found(importer: str, imported: str) -> None:
    """Planted: an import of a module, or of one in another folder, that needs this one."""
    graph = deepcopy(imports())
    graph.add_import(importer=importer, imported=imported)
    with pytest.raises(CycleError):
        look_for_circles(graph)


def test_the_scheduler_and_the_cache_are_pure() -> None:
    """They import neither an engine nor a library, and read no clock. Planted: a clock in the scheduler's costs."""
    pure = ("runtime.engine.scheduling", "runtime.engine.cache")
    below = (*pure, "runtime.wire", "tapeout.errors", "tapeout.state")
    graph = imports()
    modules = {module for name in pure for module in graph.find_descendants(name)}
    found = {imported for module in modules for imported in graph.find_modules_directly_imported_by(module)}
    ours = {name for name in found if name.startswith(below)}
    assert found - ours <= sys.stdlib_module_names - {"time", "datetime", "random", "os", "threading"}


def test_the_runtime_and_evidence_name_no_set_of_kernels() -> None:
    """They ask the target, so a second set needs no edit there. Planted: an import of the CPU's inside a function."""
    graph = imports()
    sets = [name for name in graph.find_children("engines.kernels") if graph.find_children(name)]
    assert "engines.kernels.cpu" in sets
    inner = {module for name in sets for module in (name, *graph.find_descendants(name))}
    callers = {module for name in ("runtime", "evals") for module in graph.find_descendants(name)}
    found = {module: graph.find_modules_directly_imported_by(module) & inner for module in callers}
    assert not {module: names for module, names in found.items() if names}


def test_no_two_classes_have_one_name() -> None:
    places: dict[str, list[str]] = {}
    for path in (path for name in PACKAGES for path in sorted((ROOT / name).rglob("*.py"))):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not {name: found for name, found in places.items() if len(found) > 1}


# Words for which the field has a standard term (docs/architecture.md, "Words").
REPLACED = {
    "noun": "artifact_type", "nouns": "artifact_types", "verb": "measure_module", "said": "a word for what it is",
    "menu": "candidate_schemes", "band": "layers_per_group", "census": "operator_counts", "sink": "fold_target",
    "say": "progress", "says": "a noun for it", "noted": "notes", "roles": "parent_types",
}  # fmt: skip


def test_identifiers_use_standard_terms() -> None:
    found: list[str] = []
    for path in (path for name in PACKAGES for path in sorted((ROOT / name).rglob("*.py"))):
        with path.open("rb") as stream:
            names = {token.string for token in tokenize.tokenize(stream.readline) if token.type == tokenize.NAME}
        for name in names:
            words = re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower().split("_")
            found += [f"{path.relative_to(ROOT)}: {name}; say {REPLACED[w]}" for w in words if w in REPLACED]
    assert not found


def commands_of(target: str) -> list[list[str]]:
    """The command lines of a target of the Makefile and of the targets it needs or makes, as words."""
    rules = re.findall(r"^([\w$()-]+):[ ]?(.*)\n((?:\t.*\n)*)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    known = {name: (needs.split(), recipe) for name, needs, recipe in rules}
    needs, recipe = known[target]
    words = [shlex.split(line, comments=True) for line in recipe.splitlines()]
    needs = needs + [name for line in words if "@$(MAKE)" in line for name in (w.strip(";") for w in line)]
    return [command for need in needs if need in known and need != INSTALLED for command in commands_of(need)] + words


def test_ci_runs_what_developers_run() -> None:
    script = [shlex.split(line, comments=True) for line in (ROOT / ".ci/run").read_text().splitlines()]
    assert ["make", "test"] in script
    commands = [[word for word in command if "=" not in word] for command in commands_of("test")]
    for expected in (["ruff", "format", "--check"], ["ruff", "check"], ["pyright"], ["lint-imports"], ["pytest"]):
        assert any(command[: len(expected)] == expected for command in commands), expected


@pytest.mark.parametrize("module", ["runtime.api", "pipeline.cli.generate", "pipeline.cli.capacity"])
def test_what_needs_no_extra_imports_none(module: str) -> None:
    """Planted: the library for checksums beside the keys of blocks."""
    served = PROJECT["project"]["optional-dependencies"]["serve"]
    names = [re.split("[=;[]", line)[0].replace("-", "_") for line in served]
    code = f"import sys; sys.modules |= dict.fromkeys({names}); import {module}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
