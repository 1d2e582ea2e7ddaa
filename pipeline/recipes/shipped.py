"""Recipes that ship beside the default: each a small file of differences, laid over the user's own params.yaml."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.recipe import load_recipe
from tapeout.errors import RecipeError

FOLDER = Path(__file__).parent


def names() -> dict[str, str]:
    """Name to the sentence that explains it, which is the file's first line."""
    return {p.stem: p.read_text().splitlines()[0].removeprefix("# ") for p in sorted(FOLDER.glob("*.yaml"))}


def overlay(name: str, params: Path) -> str:
    """The text of ``params`` with a shipped recipe's differences laid over it; comments and order stay.

    :class:`RecipeError` when there is no such recipe, or the file under it does not validate.
    """
    from ruamel.yaml import YAML

    if name not in names():
        raise RecipeError(f"no recipe {name!r}", expected=f"one of {', '.join(names())}")
    load_recipe(params)
    yaml: Any = YAML()  # round-trip: what is not touched is written as it was read
    yaml.width = 120
    merged = yaml.load(params.read_text())
    _merge(merged, yaml.load((FOLDER / f"{name}.yaml").read_text()))
    stream = io.StringIO()
    yaml.dump(merged, stream)
    return stream.getvalue()


def _merge(base: Any, changes: Mapping[str, Any]) -> None:
    for key, value in changes.items():
        if isinstance(value, Mapping) and isinstance(base.get(key), Mapping):
            _merge(base[key], value)
        else:
            base[key] = value
