"""The code of every stage as hashes, so that a stage runs again exactly when code it can reach has changed.

A stage reaches what its function in ``wiring.py`` imports, what that imports in turn, and the files of these packages
that are not Python (C sources, page templates). Imports inside functions count, imports for types only do not.
Comments and docstrings are no part of a hash.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[2]
PACKAGES = ("tapeout", "pipeline", "quantization", "engines", "evals", "runtime")
WIRING = "pipeline.stages.wiring"
LOADER = "engines.load"  # imports the recipe's target by its name
DATA_SUFFIXES = (".c", ".h", ".j2")
# Messages do not change what is computed, and parameters are dependencies themselves (`params` in dvc.yaml).
UNCOUNTED = frozenset({"tapeout.errors", "tapeout.recipe"})


def code_hashes(functions: Mapping[str, str], target: str) -> dict[str, dict[str, str]]:
    """By stage: its function and every file that it can reach, with the sha256 of each.

    ``functions``: the name of each stage's function. ``target``: the one whose engines the recipe builds.
    """
    graph = grimp.build_graph(*PACKAGES, exclude_type_checking_imports=True, cache_dir=None)
    dynamic = {LOADER: f"engines.targets.{target.replace('-', '_')}"}
    wiring = ast.parse(_source(WIRING).read_text())
    return {
        stage: {
            f"{WIRING}:{function}": _sha256(_statements(_reached_functions(wiring, function))),
            **_files(_closure(graph, _imports(graph, wiring, function), dynamic)),
        }
        for stage, function in functions.items()
    }


def _reached_functions(wiring: ast.Module, function: str) -> list[ast.FunctionDef]:
    """A function of the module, and those of the same module that it uses, directly or not."""
    known = {node.name: node for node in wiring.body if isinstance(node, ast.FunctionDef)}
    found: dict[str, ast.FunctionDef] = {}
    waiting = [function]
    while waiting:
        name = waiting.pop()
        if name in known and name not in found:
            found[name] = known[name]
            waiting += sorted({node.id for node in ast.walk(known[name]) if isinstance(node, ast.Name)})
    return list(found.values())


def _imports(graph: grimp.ImportGraph, wiring: ast.Module, function: str) -> set[str]:
    """Modules of ours that are imported at the top of the module or in the functions that ``function`` reaches."""
    top = [node for node in wiring.body if isinstance(node, ast.ImportFrom)]
    inner = [
        node
        for reached in _reached_functions(wiring, function)
        for node in ast.walk(reached)
        if isinstance(node, ast.ImportFrom)
    ]
    names = {(node.module or "", alias.name) for node in (*top, *inner) for alias in node.names}
    return {
        name
        for module, inside in names
        for name in [f"{module}.{inside}" if f"{module}.{inside}" in graph.modules else module]
        if name in graph.modules
    }


def _closure(graph: grimp.ImportGraph, roots: Iterable[str], dynamic: Mapping[str, str]) -> set[str]:
    """The modules and all they import. Importing a module runs the packages it lies in, so they count too."""
    found: set[str] = set()
    waiting = list(roots)
    while waiting:
        module = waiting.pop()
        if module and module not in found | UNCOUNTED:
            found.add(module)
            waiting += [*graph.find_modules_directly_imported_by(module), module.rpartition(".")[0]]
            waiting += [dynamic[module]] if module in dynamic else []
    return found


def _files(modules: Iterable[str]) -> dict[str, str]:
    hashes: dict[str, str] = {}
    for path in (_source(module) for module in sorted(modules)):
        hashes[str(path.relative_to(ROOT))] = _python_hash(path)
        if path.name == "__init__.py":
            hashes |= {str(data.relative_to(ROOT)): _sha256(data.read_bytes()) for data in _data(path.parent)}
    return hashes


def _data(package: Path) -> list[Path]:
    """The package's own files that are not Python, also in folders that are no packages."""
    found = sorted(path for path in package.rglob("*") if path.suffix in DATA_SUFFIXES)
    return [path for path in found if _package(path) == package]


def _package(path: Path) -> Path:
    return next(folder for folder in path.parents if (folder / "__init__.py").is_file())


@cache
def _python_hash(path: Path) -> str:
    return _sha256(_statements(ast.parse(path.read_text()).body))


def _statements(body: Iterable[ast.stmt]) -> bytes:
    """Source text without comments and docstrings."""
    tree = ast.Module(list(body), [])
    for node in ast.walk(tree):
        match node:
            case ast.Module(body=inner) | ast.FunctionDef(body=inner) | ast.ClassDef(body=inner):
                if inner and isinstance(inner[0], ast.Expr) and isinstance(inner[0].value, ast.Constant):
                    inner[0] = ast.Pass()
            case _:
                pass
    return ast.unparse(tree).encode()


def _source(module: str) -> Path:
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
