"""Functions of transformers' models that another package may compute: convolutions, recurrences.

transformers marks them (``use_kernel_func_from_hub_with_fallback``), so they are found by what they are, in the modules
that a model's classes come from, with no code per architecture. A model calls them as globals of such a module.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

NAMED = "func_name"  # the variable of the mark's closure that holds the function's name


def hub_functions(model: Any) -> dict[str, list[tuple[ModuleType, str]]]:
    """By the name that packages know them by: where each is a global of a module.

    >>> from types import SimpleNamespace
    >>> hub_functions(SimpleNamespace(modules=lambda: []))
    {}
    """
    found: dict[str, list[tuple[ModuleType, str]]] = {}
    for module in {type(part).__module__: sys.modules[type(part).__module__] for part in model.modules()}.values():
        for attribute, value in vars(module).items():
            if name := _marked(value):
                found.setdefault(name, []).append((module, attribute))
    return found


@contextmanager
def functions_replaced(model: Any, functions: Mapping[str, Callable[..., Any]]) -> Generator[None]:
    """Run ``model`` with these functions, by name, in place of those that it has; names it lacks are left out.

    Within, they are found as those were, so that they can be replaced again.
    """
    places = [(place, functions[name]) for name, found in hub_functions(model).items() for place in found
              if name in functions]  # fmt: skip
    before = [vars(module)[attribute] for (module, attribute), _ in places]
    try:
        for ((module, attribute), function), own in zip(places, before, strict=True):
            setattr(module, attribute, _in_place_of(own, function))
        yield
    finally:
        for ((module, attribute), _), function in zip(places, before, strict=True):
            setattr(module, attribute, function)


def _in_place_of(own: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    def replaced(*arguments: Any, **options: Any) -> Any:
        return function(*arguments, **options)

    vars(replaced)[NAMED] = _marked(own)
    return replaced


def _marked(value: Any) -> str:
    """The name of a marked function; empty for anything else."""
    if not isinstance(value, FunctionType):
        return ""
    if NAMED in vars(value):
        return str(vars(value)[NAMED])
    if NAMED not in value.__code__.co_freevars:
        return ""
    cells = dict(zip(value.__code__.co_freevars, value.__closure__ or (), strict=True))
    return str(cells[NAMED].cell_contents)
