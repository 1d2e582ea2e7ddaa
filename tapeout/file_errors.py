"""What is wrong with a file that somebody has written, in the words of the file and not of a library."""

from __future__ import annotations

import difflib
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from tapeout.errors import one_line

MOST_PROBLEMS = 5


def file_problem(error: Exception, model: type[BaseModel] | None = None) -> str:
    """One line of an error that reading a YAML or JSON file has raised: where the problem is, and which.

    ``model``: what the file was to be; then an unknown key comes with the known one that is most like it.

    >>> file_problem(FileNotFoundError(2, "No such file or directory", "fleet.yaml"))
    'No such file or directory'
    >>> file_problem(KeyError("hash_ids"))
    "there is no 'hash_ids'"
    """
    match error:
        case ValidationError():
            problems = [_problem(problem, model) for problem in error.errors(include_url=False)]
            more = [f"and {len(problems) - MOST_PROBLEMS} more"] if len(problems) > MOST_PROBLEMS else []
            return "; ".join(problems[:MOST_PROBLEMS] + more)
        case yaml.MarkedYAMLError() if error.problem_mark is not None:
            return f"no YAML on line {error.problem_mark.line + 1}: {error.problem}"
        case OSError() if error.strerror:
            return error.strerror
        case KeyError():
            return f"there is no {error}"
        case _:
            return one_line(error, 300)


def _problem(problem: ErrorDetails, model: type[BaseModel] | None) -> str:
    where = ".".join(str(part) for part in problem["loc"])
    match problem["type"]:
        case "extra_forbidden":
            *outer, key = problem["loc"]
            known = [] if model is None else sorted(_keys(model, outer))
            near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.5)
            others = f" (known: {', '.join(known)})" if known else ""
            return f"unknown key `{where}`" + (f": did you mean `{near[0]}`?" if near else others)
        case "missing":
            return f"`{where}` is missing"
        case "value_error":  # raised by a check of ours, which says itself what was found
            text = problem["msg"].removeprefix("Value error, ")
        case _:
            text = f"{problem['msg']}, not {one_line(ValueError(repr(problem['input'])), 60)}"
            text = text[:1].lower() + text[1:]
    return f"`{where}`: {text}" if where else text


def _keys(model: type[BaseModel], outer: list[int | str]) -> set[str]:
    """Names of the fields of what ``outer`` leads to. What is no field, such as a place in a list, is passed over."""
    found = [model]
    for name in outer:
        fields = [one.model_fields[str(name)] for one in found if str(name) in one.model_fields]
        found = [inner for field in fields for inner in _models(field.annotation)] or found
    return {key for one in found for key in one.model_fields}


def _models(annotation: Any) -> list[type[BaseModel]]:
    """The models in a type such as ``tuple[Model, ...] | None``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for inner in get_args(annotation) for model in _models(inner)]
