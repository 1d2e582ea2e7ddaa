"""A recipe as a file: YAML, every problem of which is said at once, with the nearest valid key."""

from __future__ import annotations

import difflib
import re
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError

from tapeout.errors import RecipeError
from tapeout.recipe import AUTO, WRITTEN, BaseRecipe

R = TypeVar("R", bound=BaseRecipe)


def read_recipe(path: Path, kind: type[R]) -> R:
    """Read and validate; :class:`RecipeError` lists every problem at once.

    Values have the types that they are written in: ``true`` is no number, and ``"8"`` is text.
    """
    try:
        raw = _with_tuples(yaml.load(path.read_bytes().decode("utf-8"), _Loader))
    except FileNotFoundError as error:
        raise RecipeError(
            f"no {path}", expected="a recipe", remedy="run in the project's folder, or pass --params"
        ) from error
    except OSError as error:
        found = "is a folder" if path.is_dir() else f"cannot be read: {error.strerror or error}"
        raise RecipeError(f"{path} {found}", expected="a recipe, as a file", remedy="pass --params FILE") from error
    except UnicodeDecodeError as error:
        raise RecipeError(
            f"{path} is not UTF-8: byte {error.object[error.start]:#04x} at offset {error.start}",
            expected="a recipe, as text",
            remedy="save it as UTF-8, or pass --params FILE",
        ) from error
    except _RepeatedKeyError as error:
        raise RecipeError(
            f"{path} {error}", expected="every key once", remedy="keep one of the two: the other would be ignored"
        ) from error
    except (yaml.YAMLError, RecursionError) as error:
        raise RecipeError(
            f"{path} is not YAML: {error}", expected="a recipe", remedy="correct it there; docs/recipes.md has examples"
        ) from error
    if raw is None:
        raise RecipeError(
            f"{path} is empty",
            expected="at least model.source and data.source (docs/recipes.md)",
            remedy="write those two, or bring the default recipe back with `git checkout params.yaml`",
        )
    if not isinstance(raw, dict):
        raise RecipeError(
            f"{path} holds {'list' if isinstance(raw, tuple) else type(raw).__name__}",
            expected="a mapping of parameter sections",
            remedy="write `section: {parameter: value}`, as in docs/recipes.md",
        )
    try:
        return kind.model_validate(raw, strict=True)
    except ValidationError as error:
        lines = [_explain(problem, kind) for problem in error.errors()]
        raise RecipeError(
            f"{path}: " + "; ".join(lines),
            expected="the keys and values in docs/recipes.md",
            remedy=f"correct {path}",
        ) from error


class _RepeatedKeyError(Exception): ...


class _Loader(yaml.SafeLoader):
    """YAML with two differences: repeated keys are errors, and ``1e-3`` is a number, as in YAML 1.2."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[Any, int] = {}
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key, line = self.construct_object(key_node, deep=True), key_node.start_mark.line + 1
            if not isinstance(key, Hashable):
                continue  # refused below
            if key in lines:
                raise _RepeatedKeyError(f"has {key!r} twice, on line {lines[key]} and on line {line}")
            lines[key] = line
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def _with_tuples(value: Any) -> Any:
    """YAML has lists where a recipe has tuples, which do not change."""
    if isinstance(value, dict):
        return {key: _with_tuples(item) for key, item in value.items()}
    return tuple(_with_tuples(item) for item in value) if isinstance(value, list) else value


def _explain(problem: Any, recipe: type[BaseModel]) -> str:
    loc = [part for part in problem["loc"] if part not in (WRITTEN, AUTO)]
    where = ".".join(str(part) for part in loc if part != "scheme")
    if problem["type"] == "extra_forbidden":
        valid = sorted(_valid_keys(loc[:-1], recipe) + (["match"] if "scheme" in loc else []))
        near = difflib.get_close_matches(str(loc[-1]), valid, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"valid keys: {', '.join(valid)}"
        return f"unknown key {where!r} ({hint})"
    if problem["type"] == "value_error":  # raised above, and says itself what was found
        return f"{where}: {problem['ctx']['error']}" if where else str(problem["ctx"]["error"])
    return f"{where}: {problem['msg']} (found {problem.get('input')!r})"


def _valid_keys(loc: Sequence[Any], model: type[BaseModel]) -> list[str]:
    for part in loc:
        if not isinstance(part, int):
            fields = {f.alias or name: f for name, f in model.model_fields.items()}
            model = next(_models_in(fields[str(part)].annotation))
    return [f.alias or name for name, f in model.model_fields.items()]


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models_in(part)
