"""What a stage reads while it runs, besides artifacts: parameters of the recipe, and modules of ours.

Parameters are recorded where they are read. Modules are those whose import a function executes, and what these import
in turn at their top; an import that is written but not reached does not count, nor does one for types only.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import sys
from collections.abc import Collection, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pipeline.recipe import Recipe, load_recipe
from pipeline.stages import wiring
from tapeout.artifact import Record
from tapeout.recipe import Section

ROOT = Path(__file__).parents[1]
PACKAGES = ("tapeout", "pipeline", "quantization", "engines", "evals", "runtime")
# What every stage stands on. A change there that matters shows in params.yaml or in what artifacts hold.
SHARED = {
    *("tapeout.errors", "tapeout.artifact", "tapeout.recipe", "pipeline.recipe", "pipeline.stages.wiring"),
    "engines.protocol",
}


@dataclass
class Reads:
    parameters: set[str] = field(default_factory=set[str])  # ``section.name``, and top-level values
    modules: set[str] = field(default_factory=set[str])  # imported by functions that ran


@contextmanager
def recording() -> Generator[Reads]:
    """Record what ``wiring.run`` reads inside this context."""
    reads, sections = Reads(), dict[int, tuple[str, Section]]()

    def watched(path: Path) -> Recipe:
        recipe = load_recipe(path)
        for name, info in Recipe.model_fields.items():
            if isinstance(value := getattr(recipe, name), Section):
                sections[id(value)] = (f"{info.alias or name}.", value)
        sections[id(recipe)] = ("", recipe)
        return recipe

    def attribute(self: Section, name: str) -> Any:
        prefix, known = sections.get(id(self), ("", None))
        if known is self:
            if name == "__dict__":  # written down as a whole
                reads.parameters.update(prefix + leaf for leaf in leaves(type(self)))
            elif name in type(self).model_fields and not is_section(type(self).model_fields[name].annotation, prefix):
                reads.parameters.add(prefix + name)
        return object.__getattribute__(self, name)

    do_import, do_import_module = builtins.__import__, importlib.import_module

    def imported(
        name: str,
        globals: Mapping[str, Any] | None = None,
        locals: Mapping[str, Any] | None = None,
        fromlist: Collection[str] = (),
        level: int = 0,
    ) -> Any:
        module = do_import(name, globals, locals, fromlist, level)  # pyright: ignore[reportArgumentType]
        if not level and sys._getframe(1).f_code.co_name != "<module>":
            reads.modules.update(named(name, fromlist or ()))
        return module

    def imported_module(name: str, package: str | None = None) -> Any:
        module = do_import_module(name, package)
        if package is None:
            reads.modules.update(named(name, ()))
        return module

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wiring, "load_recipe", watched)
        patch.setattr(Section, "__getattribute__", attribute, raising=False)
        patch.setattr(builtins, "__import__", imported)
        patch.setattr(importlib, "import_module", imported_module)
        yield reads


def is_section(annotation: Any, prefix: str) -> bool:
    """Whether a field of the recipe itself is a section; what is inside a section counts as one parameter."""
    return not prefix and isinstance(annotation, type) and issubclass(annotation, Section)


def leaves(model: type[Section] = Recipe) -> set[str]:
    """The parameters of a section, or of the recipe, as :class:`Reads` names them."""
    found: set[str] = set()
    for name, info in model.model_fields.items():
        key, kind = info.alias or name, info.annotation
        if model is Recipe and isinstance(kind, type) and issubclass(kind, Section):
            found.update(f"{key}.{below}" for below in leaves(kind))
        else:
            found.add(key)
    return found


def named(module: str, names: Collection[str]) -> set[str]:
    """Our modules that ``from module import names`` (none: ``import module``) brings in."""
    if module.partition(".")[0] not in PACKAGES:
        return set()
    inner = {f"{module}.{name}" for name in names if source_of(f"{module}.{name}")}
    return inner if names and len(inner) == len(names) else {module, *inner}


@functools.cache
def source_of(module: str) -> Path | None:
    path = ROOT.joinpath(*module.split("."))
    candidates = (path / "__init__.py", path.with_suffix(".py"))
    return next((candidate for candidate in candidates if candidate.is_file()), None)


@functools.cache
def imports_of(module: str) -> frozenset[str]:
    """Our modules that this one imports at its top, but for those it only names in annotations."""
    path = source_of(module)
    assert path is not None, module
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            found.update(*(named(alias.name, ()) for alias in node.names))
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.update(named(node.module, [alias.name for alias in node.names]))
    return frozenset(found)


def types_of_artifacts() -> dict[str, str]:
    """Noun to the module that defines it, of all that have been imported."""

    def below(kind: type[Record]) -> Iterator[type[Record]]:
        for sub in kind.__subclasses__():
            yield sub
            yield from below(sub)

    # Those of tests, which may be imported too, are nobody's.
    ours = (kind for kind in below(Record) if kind.__module__.partition(".")[0] in PACKAGES)
    return {kind.noun: kind.__module__ for kind in ours if hasattr(kind, "noun")}


def code(modules: Collection[str], written: str | None) -> set[str]:
    """Modules a stage depends on: ``modules`` and what they import. ``written``: the noun of its artifact.

    A module that defines a noun belongs to the stage that writes it: who reads the artifact runs again because it
    changed.
    """
    nouns = types_of_artifacts()
    # Of evals/kinds, a stage that iterates over the kinds runs the checks and blocks too.
    iterated = {module for module in modules if module.startswith("evals.kinds.")}
    others = set(nouns.values()) - {nouns.get(written or "")} - iterated
    found: set[str] = set()
    waiting = [*modules, *([nouns[written]] if written else [])]
    while waiting:
        module = waiting.pop()
        if module not in found | SHARED | others and source_of(module):
            found.add(module)
            waiting.extend(imports_of(module))
    return {module for module in found if not is_empty(module)}


def is_empty(module: str) -> bool:
    """A package that holds a docstring only."""
    path = source_of(module)
    return path is not None and len(ast.parse(path.read_text()).body) <= 1


def modules_at(dependency: str) -> set[str]:
    """Modules of a file or folder that dvc.yaml lists; none for one that is not Python."""
    path = ROOT / dependency
    files = [path] if path.suffix == ".py" else sorted(path.rglob("*.py"))
    names = {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for file in files}
    return {name for name in names if not is_empty(name)}
