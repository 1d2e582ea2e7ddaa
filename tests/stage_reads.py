"""The parameters of the recipe that a stage reads, recorded while it runs."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pipeline.recipe import Recipe, load_recipe
from pipeline.stages import wiring
from tapeout.recipe import Section


@contextmanager
def recording() -> Generator[set[str]]:
    """Record what ``wiring.run`` reads inside this context: ``section.name``, and top-level values."""
    read: set[str] = set()
    sections: dict[int, tuple[str, Section]] = {}

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
                read.update(prefix + leaf for leaf in leaves(type(self)))
            elif name in type(self).model_fields and not is_section(type(self).model_fields[name].annotation, prefix):
                read.add(prefix + name)
        return object.__getattribute__(self, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wiring, "load_recipe", watched)
        patch.setattr(Section, "__getattribute__", attribute, raising=False)
        yield read


def is_section(annotation: Any, prefix: str) -> bool:
    """Whether a field of the recipe itself is a section; what is inside a section counts as one parameter."""
    return not prefix and isinstance(annotation, type) and issubclass(annotation, Section)


def leaves(model: type[Section] = Recipe) -> set[str]:
    """The parameters of a section, or of the recipe, as :func:`recording` names them."""
    found: set[str] = set()
    for name, info in model.model_fields.items():
        key, kind = info.alias or name, info.annotation
        if model is Recipe and isinstance(kind, type) and issubclass(kind, Section):
            found.update(f"{key}.{below}" for below in leaves(kind))
        else:
            found.add(key)
    return found
