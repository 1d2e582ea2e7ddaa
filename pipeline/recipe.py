"""The whole recipe: the foundation's sections, those that the kinds of evidence declare, and the registry's.

Every user of params.yaml loads it with :func:`load_recipe`. docs/recipes.md documents every parameter, and a test
compares that page with this type.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, create_model, field_validator, model_validator

from engines.load import graph_target
from evals.kind import Bounds
from evals.kinds.drift import DriftSettings
from evals.kinds.online import Online
from evals.known import kinds
from tapeout import recipe
from tapeout.errors import BuildError
from tapeout.recipe import Section
from tapeout.recipe_file import read_recipe

KINDS = kinds()


class Register(Section):
    model_name: Annotated[str, Field(max_length=256)] = "tapeout-default"
    experiment: Annotated[str, Field(max_length=500)] = "tapeout"
    private_key: str | None = None  # a PEM file; with it, verdict and bundle are signed
    public_key: str | None = None  # a PEM file; with it, what is not signed by its private key is refused

    @field_validator("model_name", "experiment")
    @classmethod
    def _a_name_for_mlflow(cls, name: str) -> str:
        """MLflow takes no other names for models; an experiment of such a name works everywhere too."""
        if re.fullmatch(r"\w[\w .@+-]*", name) is None or name != name.strip():
            raise ValueError(f"{name!r} is no name; expected letters, digits, '_', '-', '.', '+', '@' and inner spaces")
        return name


def _with_evidence() -> type[recipe.BaseRecipe]:
    """The foundation's recipe and one section per name that a kind declares; kinds that share a name share it."""
    parts: dict[str, list[type[Section]]] = {}
    for kind in KINDS:
        for name, part in kind.sections.items():
            parts.setdefault(name, []).append(part)
    parts = {**dict(sorted(parts.items())), "gate": [kind.bounds for kind in KINDS if kind.bounds is not Bounds]}
    # Fields of the last base come first.
    composed = {name: create_model(name.capitalize(), __base__=tuple(reversed(found))) for name, found in parts.items()}
    fields: dict[str, Any] = {name: (part, part()) for name, part in composed.items()}
    return create_model("EvidenceRecipe", __base__=recipe.BaseRecipe, **fields)


class Recipe(_with_evidence()):
    online: Online = Online()
    drift: DriftSettings = DriftSettings()
    register_: Register = Field(default=Register(), alias="register")

    @model_validator(mode="after")
    def _lists_name_nothing_twice(self) -> Self:
        """Repeated tasks, data sets or batches would count twice."""
        for name, section in self:
            for field, value in section if isinstance(section, Section) else ():
                if isinstance(value, tuple) and len(set(map(str, value))) < len(value):
                    raise ValueError(f"{name.rstrip('_')}.{field}: contains duplicates: {', '.join(map(str, value))}")
        return self

    def conflicts(self) -> list[str]:
        problems = [*super().conflicts(), *(problem for kind in KINDS for problem in kind.conflicts(self))]
        try:
            graph_target(self.build.target)
        except BuildError as error:
            problems.append(
                "; ".join(filter(None, (f"build.target: {error.found}", f"expected {error.expected}", error.remedy)))
            )
        return problems

    @property
    def datasets(self) -> list[str]:
        """What calibration and evidence read below ``data.source``."""
        return [self.calibrate.dataset, *(name for kind in KINDS for name in kind.datasets(self))]


def load_recipe(path: Path = Path("params.yaml")) -> Recipe:
    """Read and validate; :class:`tapeout.errors.RecipeError` lists every problem at once."""
    return read_recipe(path, Recipe)
