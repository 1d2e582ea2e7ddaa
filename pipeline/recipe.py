"""The whole recipe: the foundation's sections, those that the kinds of evidence declare, and the registry's.

Every user of params.yaml loads it with :func:`load_recipe`. docs/recipes.md documents every parameter, and a test
compares that page with this type.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field, create_model

from evals.kind import Bounds
from evals.known import kinds
from tapeout import recipe
from tapeout.recipe import Section, read_recipe

KINDS = kinds()


class Register(Section):
    model_name: str = "tapeout-default"
    experiment: str = "tapeout"
    public_key: str | None = None  # a PEM file; with it, what is not signed by its private key is refused


def _with_evidence() -> type[recipe.Recipe]:
    """The foundation's recipe and one section per name that a kind declares; kinds that share a name share it."""
    parts: dict[str, list[type[Section]]] = {}
    for kind in KINDS:
        for name, part in kind.sections.items():
            parts.setdefault(name, []).append(part)
    parts = {**dict(sorted(parts.items())), "gate": [kind.bounds for kind in KINDS if kind.bounds is not Bounds]}
    # Fields of the last base come first.
    composed = {name: create_model(name.capitalize(), __base__=tuple(reversed(found))) for name, found in parts.items()}
    fields: dict[str, Any] = {name: (part, part()) for name, part in composed.items()}
    return create_model("EvidenceRecipe", __base__=recipe.Recipe, **fields)


class Recipe(_with_evidence()):
    register_: Register = Field(default=Register(), alias="register")

    def conflicts(self) -> list[str]:
        return [*super().conflicts(), *(problem for kind in KINDS for problem in kind.conflicts(self))]

    @property
    def datasets(self) -> list[str]:
        """What calibration and evidence read below ``data.source``."""
        return [self.calibrate.dataset, *(name for kind in KINDS for name in kind.datasets(self))]


def load_recipe(path: Path = Path("params.yaml")) -> Recipe:
    """Read and validate; :class:`tapeout.errors.RecipeError` lists every problem at once."""
    return read_recipe(path, Recipe)
