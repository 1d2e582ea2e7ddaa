"""The code of every stage as hashes, so that a stage runs again exactly when code it can reach has changed.

A stage reaches what its function in ``wiring.py`` imports, what that imports in turn, and the files of these packages
that are not Python (C and CUDA sources, page templates). Of the modules of ``WIRING``, which serve many stages, only
the functions and constants that it uses count. Imports inside functions count, imports for types only do not.
Comments and docstrings are no part of a hash. The recipe's modules count by what they give a stage: its resolved
parameters (``environment.py``) and the constants of ``tapeout.recipe``.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import grimp

ROOT = Path(__file__).parents[2]
PACKAGES = ("tapeout", "pipeline", "quantization", "engines", "evals", "runtime")
# The functions of stages, and what these share. Names are unique over all three.
WIRING = ("pipeline.stages.wiring", "pipeline.stages.inputs", "pipeline.stages.measurement")
LOADER = "engines.load"  # imports the recipe's target by its name
DATA_SUFFIXES = (".c", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".j2")
# Messages do not change what is computed.
UNCOUNTED = frozenset({"tapeout.errors", "pipeline.recipe"})
RECIPE = "tapeout.recipe"  # its assignments count; its classes and functions do not, nor what it imports
# Modules that find others by listing a package: whoever imports them reaches all of it.
REGISTRIES = {
    "evals.known": "evals.kinds",
    "evals.kinds.tasks.generative": "evals.kinds.tasks.generative",
    "tapeout.formats": "tapeout.formats",
    "tapeout.operators": "tapeout.operators",
    "quantization.methods": "quantization.methods",
}

BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")  # where a statement holds others

Stage = Callable[..., object]  # a function of ``wiring.py``, or its ``_measure`` bound to a kind of evidence


def code_hashes(stages: Mapping[str, Stage], target: str) -> dict[str, dict[str, str]]:
    """By stage: its functions and constants of ``WIRING`` and every file that it can reach, with the sha256 of each.

    ``target``: the one whose engines the recipe builds.
    """
    graph = _graph()
    dynamic = _found_by_listing(graph, target)
    wiring = ast.Module([node for module in WIRING for node in ast.parse(_source(module).read_text()).body], [])
    hashes: dict[str, dict[str, str]] = {}
    for stage, function in stages.items():
        names, modules = _entry(function)
        reached = _reached(wiring, names)
        roots = modules | _imports(graph, wiring, reached.values())
        hashes[stage] = {
            f"{WIRING[0]}:{names[0]}": _sha256(_statements(reached.values())),
            **_files(_closure(graph, roots, dynamic)),
        }
    return hashes


def module_hashes(module: str, target: str) -> dict[str, str]:
    """Every file that a module can reach, with the sha256 of each: for a command that is no stage."""
    graph = _graph()
    return _files(_closure(graph, {module}, _found_by_listing(graph, target)))


@cache
def _graph() -> grimp.ImportGraph:
    return grimp.build_graph(*PACKAGES, exclude_type_checking_imports=True, cache_dir=None)


def _found_by_listing(graph: grimp.ImportGraph, target: str) -> dict[str, list[str]]:
    """What modules import by name: the loader one target, a registry a whole package."""
    return {
        LOADER: [f"engines.targets.{target.partition(':')[0].replace('-', '_')}"],
        **{module: sorted(graph.find_children(package)) for module, package in REGISTRIES.items()},
    }


def _entry(function: Stage) -> tuple[list[str], set[str]]:
    """Where a stage begins: functions of ``wiring.py``, and modules.

    A kind of evidence begins in the modules that measure it, and reaches the methods of ``Measurement`` that are named
    there.
    """
    if not isinstance(function, partial):
        return [function.__name__], set()
    kind = function.args[0]
    modules = {module for module in (kind.measure_module, kind.emulated_module) if module}
    methods = set[str]().union(*(_methods_of("context", ast.parse(_source(module).read_text())) for module in modules))
    return [function.func.__name__, *sorted(methods)], modules


def _methods_of(name: str, tree: ast.AST) -> set[str]:
    """The methods of ``Measurement`` that are used on a variable of this name."""
    found = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name))
    return {f"Measurement.{node.attr}" for node in found if isinstance(node.value, ast.Name) and node.value.id == name}


def _reached(wiring: ast.Module, names: Iterable[str]) -> dict[str, ast.FunctionDef | ast.Assign]:
    """These functions of ``WIRING``, and the functions and constants of it that they use, directly or not."""
    known: dict[str, ast.FunctionDef | ast.Assign] = {
        target.id: node
        for node in wiring.body
        if isinstance(node, ast.Assign)  # not STAGES, which has a type and names every stage
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    known |= {node.name: node for node in wiring.body if isinstance(node, ast.FunctionDef)}
    for node in wiring.body:
        if isinstance(node, ast.ClassDef):
            known |= {f"{node.name}.{inner.name}": inner for inner in node.body if isinstance(inner, ast.FunctionDef)}
    found: dict[str, ast.FunctionDef | ast.Assign] = {}
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name in known and name not in found:
            found[name] = node = known[name]
            used = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
            waiting += sorted(used | _methods_of("self", node))
    return dict(sorted(found.items()))


def _imports(graph: grimp.ImportGraph, wiring: ast.Module, reached: Iterable[ast.AST]) -> set[str]:
    """Other modules of ours that are imported at the top of those of ``WIRING`` or in these functions of it."""
    top = [node for node in wiring.body if isinstance(node, ast.ImportFrom)]
    inner = [node for part in reached for node in ast.walk(part) if isinstance(node, ast.ImportFrom)]
    names = {(node.module or "", alias.name) for node in (*top, *inner) for alias in node.names}
    return {
        name
        for module, inside in names
        for name in [f"{module}.{inside}" if f"{module}.{inside}" in graph.modules else module]
        if name in graph.modules and name not in WIRING
    }


def _closure(graph: grimp.ImportGraph, roots: Iterable[str], dynamic: Mapping[str, Sequence[str]]) -> set[str]:
    """The modules and all they import. Importing a module runs the packages it lies in, so they count too."""
    found: set[str] = set()
    imported: set[str] = set()  # by name, and not only because a module in it is
    waiting = list(roots)
    while waiting:
        module = waiting.pop()
        if module in imported | UNCOUNTED:
            continue
        imported.add(module)
        parents = [module.rsplit(".", level)[0] for level in range(1, module.count(".") + 1)]
        for part in {module, *parents} - found - UNCOUNTED:
            found.add(part)
            waiting += graph.find_modules_directly_imported_by(part) if part != RECIPE else ()
        waiting += dynamic.get(module, ())
    return found


def _files(modules: Iterable[str]) -> dict[str, str]:
    return {path: digest for module in sorted(modules) for path, digest in _files_of(module).items()}


@cache
def _files_of(module: str) -> dict[str, str]:
    """The module and, of a package, its files that are not Python."""
    path = _source(module)
    body = ast.parse(path.read_text()).body
    counted = [node for node in body if isinstance(node, ast.Assign | ast.AnnAssign) or module != RECIPE]
    data = _data(path.parent) if path.name == "__init__.py" else []
    hashes = {path: _sha256(_statements(counted)), **{file: _sha256(file.read_bytes()) for file in data}}
    return {str(file.relative_to(ROOT)): digest for file, digest in hashes.items()}


def _data(package: Path) -> list[Path]:
    """The package's own files that are not Python, also in folders that are no packages."""
    found = sorted(path for path in package.rglob("*") if path.suffix in DATA_SUFFIXES)
    return [path for path in found if _package(path) == package]


def _package(path: Path) -> Path:
    return next(folder for folder in path.parents if (folder / "__init__.py").is_file())


def _statements(body: Iterable[ast.stmt]) -> bytes:
    """Source text without comments and docstrings."""
    tree = ast.Module(list(body), [])
    waiting: list[Any] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            match node.body:
                case [ast.Expr(value=ast.Constant()), *_]:
                    node.body[0] = ast.Pass()
                case _:
                    pass
        waiting += [inner for part in BLOCKS for inner in getattr(node, part, ())]
    return ast.unparse(tree).encode()


def _source(module: str) -> Path:
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
