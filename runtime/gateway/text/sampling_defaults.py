"""What a model's ``generation_config.json`` says of sampling: settings of requests that do not name their own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runtime.wire.messages import SamplingSettings
from tapeout.errors import ArtifactError, RequestError

GENERATION_CONFIG = "generation_config.json"
DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # that a model may bring


def read_defaults(folder: Path) -> dict[str, float]:
    """Of the file in ``folder``; empty where there is none. :class:`ArtifactError` for values that no request may have.

    ``do_sample`` is not looked at: a request that wants the likeliest tokens says so by its temperature.
    """
    path = folder / GENERATION_CONFIG
    if not path.is_file():
        return {}
    try:
        config: Any = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise _refusal(f"{path} is not JSON: {error}", "a JSON object") from error
    if not isinstance(config, Mapping):
        raise _refusal(f"{path} holds no JSON object", "a JSON object")
    return checked_defaults(config, str(path))  # pyright: ignore[reportUnknownArgumentType]


def checked_defaults(values: Mapping[str, Any], where: str) -> dict[str, float]:
    """Those of ``values`` that a request may set, by name. :class:`ArtifactError` for what no request may have."""
    found: dict[str, float] = {}
    for name in DEFAULTS:
        value = values.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int if name == "top_k" else int | float):
            raise _refusal(f"{name} is {value!r} in {where}", "a whole number" if name == "top_k" else "a number")
        found[name] = 0 if name == "top_k" and value == -1 else value
        try:
            given: dict[str, Any] = {name: found[name]}
            SamplingSettings(**given)
        except RequestError as error:
            raise _refusal(f"{error.found} in {where}", error.expected) from error
    return found


def _refusal(found: str, expected: str) -> ArtifactError:
    return ArtifactError(
        found,
        expected=expected,
        remedy="correct the file of the checkpoint, or remove the value, and run `dvc repro export`",
    )
