"""Policy: by which bounds a verdict is reached, and on evidence of which size and origin.

It is made from the recipe: section ``gate``, the sections that the kinds of evidence declare, the seed, the data,
and what held-out texts are drawn from. A verdict holds the policy that it was reached by, so a registry can compare
it with the policy in force. Parameters have dotted names, such as ``evaluate.items``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from pydantic import JsonValue

from evals.kind import Bounds
from evals.known import kinds
from tapeout.artifact import Frozen, canonical_json
from tapeout.recipe import BaseRecipe

Settings = dict[str, JsonValue]
_LARGER_IS_LOOSER = ("max_", "accuracy_margin", "task_margin")  # of bounds; of all others, and of sizes, less is looser


class Policy(Frozen):
    """``bounds``: section ``gate``. ``settings``: how evidence is to be measured."""

    bounds: dict[str, int | float]
    settings: Settings

    @property
    def digest(self) -> str:
        return hashlib.sha256(canonical_json(self.model_dump(mode="json"))).hexdigest()

    @property
    def _flat(self) -> Settings:
        return {**{f"gate.{name}": bound for name, bound in self.bounds.items()}, **self.settings}

    def differences(self, in_force: Policy) -> list[str]:
        """One line per parameter that differs, with both values, and whether this policy is the looser one."""
        mine, theirs = self._flat, in_force._flat
        return [
            f"{name} is {_shown(mine, name)} there and {_shown(theirs, name)} in force{_direction(name, mine, theirs)}"
            for name in sorted(mine.keys() | theirs.keys())
            if mine.get(name) != theirs.get(name) or (name in mine) != (name in theirs)
        ]


def policy_of(recipe: BaseRecipe) -> Policy:
    return Policy(bounds=recipe.section(Bounds).model_dump(mode="json"), settings=settings_of(recipe))


def settings_of(recipe: BaseRecipe) -> Settings:
    """How the recipe asks for evidence to be measured."""
    sections = {name: recipe.section(part) for kind in kinds() for name, part in kind.sections.items()}
    found: Settings = {"seed": recipe.seed}
    for name, section in {**sections, "data": recipe.data}.items():
        found |= {f"{name}.{key}": value for key, value in section.model_dump(mode="json").items()}
    held_out = recipe.calibrate  # held-out texts are those of this column that calibration leaves
    return found | {
        "calibrate.dataset": held_out.dataset,
        "calibrate.column": held_out.column,
        "calibrate.samples": held_out.samples,
    }


def _shown(values: Settings, name: str) -> str:
    return str(values[name]) if name in values else "absent"


def _direction(name: str, mine: Mapping[str, JsonValue], theirs: Mapping[str, JsonValue]) -> str:
    one, other = mine.get(name), theirs.get(name)
    if not isinstance(one, int | float) or not isinstance(other, int | float) or name == "seed":
        return ""
    larger_is_looser = name.removeprefix("gate.").startswith(_LARGER_IS_LOOSER)
    return f" ({'looser' if (one > other) is larger_is_looser else 'tighter'} than in force)"
