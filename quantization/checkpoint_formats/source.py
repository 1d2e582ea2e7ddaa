"""What is exported: the parameters of a QuantizedModel, read one at a time; and where a format puts each."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from quantization.checkpoint import KV_SCALES, QuantizedModel
from quantization.compressed_tensors import Checkpoint, open_checkpoint
from tapeout.artifact import RECORD, Artifact
from tapeout.number_format import FloatArray
from tapeout.quantized import QuantizedWeight
from tapeout.schemes import FLOAT, Scheme

FLOAT_STORED = "float"  # as Place.stored
_WEIGHTS = (".safetensors", ".safetensors.index.json")


@dataclass(frozen=True)
class Parameter:
    """``unit``: what a recipe's rules call the linears that are quantized together; empty for other parameters.

    ``half_scales``: every scale is a float16 number.
    """

    name: str
    shape: tuple[int, ...]
    scheme: Scheme = FLOAT
    unit: str = ""
    embedding: bool = False  # or lm_head
    half_scales: bool = True

    @property
    def module(self) -> str:
        return self.name.removesuffix(".weight")


@dataclass(frozen=True)
class ParameterPlace:
    """``stored``: how, in the format's own words. ``reason``: why it takes more bits than in the plan; empty: it does
    not.
    """

    parameter: Parameter
    stored: str
    reason: str = ""


class ExportSource:
    """A QuantizedModel; a weight is read when it is asked for."""

    def __init__(self, artifact: Artifact[QuantizedModel]) -> None:
        self.artifact = artifact
        self.folder = artifact.folder
        self.config: dict[str, Any] = json.loads((self.folder / "config.json").read_text())
        self._checkpoint: Checkpoint = open_checkpoint(self.folder)
        reports = {report.name: report for report in artifact.record.linears}
        embeddings = {report.name for report in artifact.record.linears if report.group in ("embedding", "lm_head")}
        self.parameters = tuple(
            Parameter(
                name,
                (reports[name].out_features, reports[name].in_features),
                reports[name].scheme,
                reports[name].group,
                name in embeddings,
                self._checkpoint.half_scales(name),
            )
            if name in reports
            else Parameter(name, self._checkpoint.shape(name))
            for name in self._checkpoint.names()
        )

    @property
    def tied(self) -> bool:
        return not any(parameter.name == "lm_head.weight" for parameter in self.parameters)

    @property
    def has_kv_scales(self) -> bool:
        return (self.folder / KV_SCALES).is_file()

    def companions(self) -> list[Path]:
        """Tokenizer, chat template, generation config: what is carried byte for byte."""
        written = (RECORD, "config.json")
        return [
            path
            for path in sorted(self.folder.iterdir())
            if path.is_file() and path.name not in written and not path.name.endswith(_WEIGHTS)
        ]

    def codes(self, parameter: Parameter) -> QuantizedWeight:
        linear = self._checkpoint.linear(parameter.name)
        assert isinstance(linear, QuantizedWeight)
        return linear

    def floats(self, parameter: Parameter) -> FloatArray:
        """In float32, dequantized if it is quantized."""
        return self._checkpoint.weight(parameter.name)


class ExportFormat(Protocol):
    """``recipe``: what a remedy says of plans that fit."""

    @property
    def name(self) -> str: ...

    @property
    def recipe(self) -> str: ...

    def places(self, source: ExportSource) -> list[ParameterPlace]:
        """One for every parameter. :class:`TapeoutError` for a model that the format has no place for at all."""
        ...

    def write(
        self, source: ExportSource, places: Sequence[ParameterPlace], folder: Path, advance: Callable[[], None]
    ) -> None:
        """``advance`` is called after every parameter."""
        ...


def narrowed(weight: FloatArray) -> tuple[str, NDArray[Any]]:
    """A float32 tensor in the smallest of F16, BF16 (``uint16`` words) and F32 that holds it exactly.

    >>> [narrowed(np.array([value], np.float32))[0] for value in (1.5, 1e30, 1.001)]
    ['F16', 'F32', 'F32']
    >>> narrowed(np.array([2.0**100], np.float32))
    ('BF16', array([29056], dtype=uint16))
    """
    with np.errstate(over="ignore"):
        half = weight.astype(np.float16)
    if np.array_equal(half.astype(np.float32), weight):
        return "F16", half
    bits = np.ascontiguousarray(weight).view(np.uint32)
    if not np.any(bits & np.uint32(0xFFFF)):
        return "BF16", (bits >> 16).astype(np.uint16)
    return "F32", weight
