"""Recipes that ship beside the default: each a small file of differences, laid over the user's own params.yaml."""

from __future__ import annotations

from pathlib import Path

import yaml

from pipeline.recipe import load_recipe
from pipeline.yaml_edit import edited
from tapeout.errors import RecipeError

FOLDER = Path(__file__).parent


def names() -> dict[str, str]:
    """Name to the sentence that explains it, which is the file's first line."""
    return {p.stem: p.read_text().splitlines()[0].removeprefix("# ") for p in sorted(FOLDER.glob("*.yaml"))}


def overlay(name: str, params: Path) -> str:
    """The text of ``params`` with a shipped recipe's differences laid over it; all other text stays as it is.

    :class:`RecipeError` when there is no such recipe, or the file under it does not validate or cannot be changed.
    """
    if name not in names():
        raise RecipeError(f"no recipe {name!r}", expected=f"one of {', '.join(names())}")
    load_recipe(params)
    return edited(params.read_bytes().decode(), yaml.safe_load((FOLDER / f"{name}.yaml").read_text()))
