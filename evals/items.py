"""Items of a report: one JSON object a line, beside the record. No clock value is among them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter

from tapeout.artifact import Frozen
from tapeout.errors import EvidenceError

T = TypeVar("T", bound=Frozen)


def write_items(path: Path, items: Iterable[Frozen]) -> None:
    with path.open("w") as stream:
        for item in items:
            stream.write(json.dumps(item.model_dump(mode="json"), allow_nan=False) + "\n")


def read_items(path: Path, kind: type[T] | TypeAdapter[T]) -> tuple[T, ...]:
    """All items of a report; a line that does not parse is an :class:`EvidenceError`, never skipped."""
    items: list[T] = []
    adapter = kind if isinstance(kind, TypeAdapter) else TypeAdapter(kind)
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            items.append(adapter.validate_json(line))
        except ValueError as error:
            raise EvidenceError(f"{path}:{number} is no item of its report: {error}") from error
    return tuple(items)


def write_metrics(folder: Path, metrics: Mapping[str, float]) -> None:
    """``metrics.json`` for ``dvc metrics``: flat numbers, all finite."""
    (folder / "metrics.json").write_text(json.dumps(metrics, indent=1, allow_nan=False) + "\n")
