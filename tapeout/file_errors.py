"""What is wrong with a file that somebody has written, in the words of the file and not of a library."""

from __future__ import annotations

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from tapeout.errors import one_line

MOST_PROBLEMS = 5


def file_problem(error: Exception) -> str:
    """One line of an error that reading a YAML or JSON file has raised: where the problem is, and which.

    >>> file_problem(FileNotFoundError(2, "No such file or directory", "fleet.yaml"))
    'No such file or directory'
    >>> file_problem(KeyError("hash_ids"))
    "there is no 'hash_ids'"
    """
    match error:
        case ValidationError():
            problems = [_problem(problem) for problem in error.errors(include_url=False)]
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


def _problem(problem: ErrorDetails) -> str:
    where = ".".join(str(part) for part in problem["loc"])
    match problem["type"]:
        case "extra_forbidden":
            return f"unknown key `{where}`"
        case "missing":
            return f"`{where}` is missing"
        case "value_error":  # raised by a check of ours, which says itself what was found
            text = problem["msg"].removeprefix("Value error, ")
        case _:
            text = f"{problem['msg']}, not {one_line(ValueError(repr(problem['input'])), 60)}"
            text = text[:1].lower() + text[1:]
    return f"`{where}`: {text}" if where else text
