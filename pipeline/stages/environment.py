"""What artifacts depend on besides files: library versions, what the machine can execute, and resolved parameters."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from engines.load import find_target
from engines.target import Target
from pipeline.recipe import Recipe
from tapeout.errors import FingerprintError
from tapeout.fingerprint import cpu_features
from tapeout.recipe import Section

ROOT = Path(__file__).parents[2]

LIBRARIES = (
    *("torch", "transformers", "onnx", "onnx-ir", "onnxscript", "onnxruntime", "numpy", "gguf", "datasets"),
    *("lm-eval", "tokenizers", "compressed-tensors", "safetensors", "scipy", "ml-dtypes", "jinja2", "llguidance"),
    "sentencepiece",
)


def libraries(target: str) -> dict[str, str]:
    """Distribution -> version, with the compilers of a target."""
    found = {"python": platform.python_version()}
    for name in (*LIBRARIES, *find_target(target).capabilities.compilers):
        with contextlib.suppress(metadata.PackageNotFoundError):  # a stage that needs it says so
            found[name] = metadata.version(name)
    return found


def machine() -> dict[str, object]:
    """Only what selects kernels: not the load, not the memory that happens to be free."""
    from tapeout.cores import physical_cores

    return {"machine": platform.machine(), "cpu_features": list(cpu_features()), "cores": physical_cores()}


def accelerators(target: Target[Any]) -> list[str]:
    """What bundles of the target run on here beside the processor; nothing where they do not run."""
    try:
        return sorted({*target.fingerprint().features} - {*cpu_features()})
    except FingerprintError:
        return []


def listed(pipeline: str, stage: str) -> list[str]:
    """The parameters that a ``dvc.yaml`` lists for a stage; those of the whole recipe where it lists the file."""
    names: list[Any] = _stages(ROOT / pipeline)[stage].get("params", [])
    whole = [info.alias or name for name, info in Recipe.model_fields.items()]
    return [part for name in names for part in (whole if isinstance(name, dict) else [name])]


@cache
def _stages(pipeline: Path) -> dict[str, Any]:
    return yaml.safe_load(pipeline.read_text())["stages"]


def resolved(recipe: Recipe, names: Sequence[str]) -> dict[str, object]:
    """Parameters as stages get them, with defaults filled in, and the properties of sections that read them.

    DVC compares what params.yaml says. A default that it does not say, and a property that is computed otherwise than
    before, change only what this returns.
    """
    fields = {info.alias or name: name for name, info in Recipe.model_fields.items()}
    found: dict[str, object] = {}
    for name in names:
        key, _, part = name.partition(".")
        section = getattr(recipe, fields[key])
        if isinstance(section, Section):
            values = {**_fields(section, part), **_properties(section, part)}
            found |= {f"{key}.{value}": values[value] for value in values}
        else:
            found[name] = section
        if key == "data":  # what lies there is fetched for all sections
            found |= _properties(recipe)
    return found


def _fields(section: BaseModel, only: str = "") -> dict[str, object]:
    return {name: _plain(getattr(section, name)) for name in type(section).model_fields if only in ("", name)}


def _properties(section: Section, only: str = "") -> dict[str, object]:
    """The properties of our classes, not of pydantic's; only those that read one field, if it is given."""
    read = set[str]()

    class Recorder:
        def __getattr__(self, name: str) -> Any:
            read.add(name)
            return getattr(section, name)

    found: dict[str, object] = {}
    ours = [kind for kind in type(section).__mro__ if issubclass(kind, Section)]
    for name in sorted({name for kind in ours for name, value in vars(kind).items() if isinstance(value, property)}):
        read.clear()
        value = _plain(getattr(type(section), name).fget(Recorder()))
        if only in ("", *read):
            found[name] = value
    return found


def _plain(value: Any) -> object:
    match value:
        case Section():
            return {**_fields(value), **_properties(value)}
        case BaseModel():
            return _fields(value)
        case Mapping():
            return {str(key): _plain(inner) for key, inner in value.items()}
        case tuple() | list():
            return [_plain(inner) for inner in value]
        case _:
            return value
