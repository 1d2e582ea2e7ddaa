"""Whether the engines were made as the recipe in force asks: a plan that was changed and not built is found here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from quantization.plan import decisive
from tapeout.artifact import Header
from tapeout.recipe import BaseRecipe, Section
from tapeout.urls import redact

Record = Mapping[str, Any]  # the fields of an artifact's record
Compared = tuple[str, Any, Any]  # a parameter, what an artifact was made with, and what the recipe asks for
BUNDLES = ("baseline", "candidate")


def not_as_asked(headers: Mapping[str, Header], recipe: BaseRecipe) -> Iterator[str]:
    """A line for each parameter that an artifact was made with and that the recipe now has otherwise.

    ``headers``: of the artifacts that the engines were made from, by their folders' names.
    """
    records = {name: header.record for name, header in headers.items()}
    sections: dict[str, tuple[str, Section]] = {
        "calibration": ("calibrate", recipe.calibrate),
        "plan": ("plan", decisive(recipe.plan)),
        "quantized": ("quantize", recipe.quantize),
    }
    compared: dict[str, Iterator[Compared]] = {
        "source": _source(records["source"], recipe),
        "graph": _graph(records["graph"], recipe),
        **{
            name: _section(records[name], part, section.model_dump(mode="json"))
            for name, (part, section) in sections.items()
        },
        **{name: _bundle(records[name], recipe) for name in BUNDLES},
    }
    for name, parameters in compared.items():
        for parameter, made, asked in parameters:
            if made != asked:
                yield f"{name} was made with {parameter} {_short(made, asked)}, not with {_short(asked, made)}"


def _source(record: Record, recipe: BaseRecipe) -> Iterator[Compared]:
    def fetched(name: str, asked: str | None, pin: str | None) -> Iterator[Compared]:
        yield "source", record.get(f"{name}_source"), redact(asked) if asked and asked.startswith("http") else asked
        if pin is not None:  # without one, whatever lies there is what was asked for
            yield "sha256", record.get(f"{name}_sha256"), pin

    model, data = recipe.model, recipe.data
    parts = {
        "model": (model.source, model.sha256),
        "adapter": (model.adapter, model.adapter_sha256),
        "data": (data.source, data.sha256),
        "traffic": (data.traffic, data.traffic_sha256),
    }
    for name, (asked, pin) in parts.items():
        for field, made, wanted in fetched(name, asked, pin):
            yield f"the {name}'s {field}", made, wanted


def _graph(record: Record, recipe: BaseRecipe) -> Iterator[Compared]:
    positions, error = record.get("model_positions"), record.get("max_relative_error")
    wanted = recipe.export
    longest = None if positions is None else min(wanted.max_positions, positions)
    yield "export.max_positions", record.get("max_positions"), longest
    if error is None or error > wanted.tolerance:
        yield "a relative error of", error, f"at most {wanted.tolerance:g}"


def _section(record: Record, part: str, asked: Record) -> Iterator[Compared]:
    """Of a record that keeps its section of the recipe."""
    made = record.get("asked") or {}
    for key in sorted(asked.keys() | made.keys()):
        yield f"{part}.{key}", made.get(key), asked.get(key)


def _bundle(record: Record, recipe: BaseRecipe) -> Iterator[Compared]:
    target, _, level = recipe.build.target.partition(":")
    yield "build.target", record.get("target"), target
    yield "build.slots", record.get("io", {}).get("slots"), recipe.build.slots
    hardware = record.get("hardware", [])
    levels = [machine["level"] for machine in hardware if machine.get("level")]
    if level and levels:
        yield "kernels for", ", ".join(levels), level
    elif len(levels) == 1 and hardware[0].get("more_features"):  # of the levels that there are, one was asked for
        yield "kernels for", levels[0], "every processor level"


def _short(value: Any, other: Any) -> str:
    """Of two lists, what the other one lacks."""
    if isinstance(value, list) and isinstance(other, list):
        value = [entry for entry in value if entry not in other] or value
    text = str(value)
    return text if len(text) <= 160 else f"{text[:159]}…"
