"""What is exported: the parameters of a QuantizedModel, read one at a time; and the files of a checkpoint folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from quantization.checkpoint import KV_SCALES, LinearReport, QuantizedModel
from quantization.checkpoint_formats import FLOAT_STORED, Parameter, ParameterPlace
from quantization.checkpoint_formats.experts import ExpertPart, names_of
from quantization.compressed_tensors import Checkpoint, open_checkpoint
from tapeout.artifact import RECORD, Artifact
from tapeout.number_format import FloatArray, Tensors
from tapeout.quantized import QuantizedWeight
from tapeout.schemes import FLOAT
from tapeout.tensor_writer import ShardWriter

SHARD_BYTES = 5_000_000_000
_WEIGHTS = (".safetensors", ".safetensors.index.json")


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
            parameter
            for name in self._checkpoint.names()
            for parameter in self._parameters(name, reports.get(name), name in embeddings)
        )
        self._kept: tuple[str, QuantizedWeight] | None = None

    def _parameters(self, name: str, report: LinearReport | None, embedding: bool) -> Iterator[Parameter]:
        """As checkpoints have them: quantized experts are linears, one for each part of each expert."""
        if report is None:
            yield Parameter(name, self._checkpoint.shape(name))
            return
        half = self._checkpoint.half_scales(name)
        if not report.experts or report.scheme == FLOAT:
            shape = (report.out_features, report.in_features)
            stored = (report.experts, *shape) if report.experts else shape
            yield Parameter(name, stored, report.scheme, report.group, embedding, half)
            return
        parts = names_of(self.config["model_type"], name)
        rows = report.out_features // len(parts)
        for expert in range(report.experts):
            for number, part in enumerate(parts):
                place = ExpertPart(name, expert, slice(number * rows, (number + 1) * rows))
                shape = rows, report.in_features
                yield Parameter(
                    part.replace("*", str(expert)),
                    shape,
                    report.scheme.of_expert(expert),
                    report.group,
                    half_scales=half,
                    of=place,
                    shared=report.scheme.widest if report.scheme.expert_bits else None,
                )

    @property
    def has_kv_scales(self) -> bool:
        return (self.folder / KV_SCALES).is_file()

    def codes(self, parameter: Parameter) -> QuantizedWeight:
        if parameter.of is None:
            linear = self._checkpoint.linear(parameter.name)
            assert isinstance(linear, QuantizedWeight)
            return linear
        return self._stacked(parameter.of.stacked).part(parameter.of.expert).rows(parameter.of.rows)

    def floats(self, parameter: Parameter) -> FloatArray:
        """In float32, dequantized if it is quantized."""
        return self._checkpoint.weight(parameter.name) if parameter.of is None else self.codes(parameter).dequantize()

    def _stacked(self, name: str) -> QuantizedWeight:
        """Experts are asked for one after the other: the last weight is kept."""
        if self._kept is None or self._kept[0] != name:
            linear = self._checkpoint.linear(name)
            assert isinstance(linear, QuantizedWeight)
            self._kept = name, linear
        return self._kept[1]

    def in_float(self, places: Sequence[ParameterPlace]) -> list[str]:
        """The modules of linears, the embedding and lm_head that are not quantized where they are placed."""
        kept = [place.parameter.module for place in places if place.parameter.unit and place.stored == FLOAT_STORED]
        tied = not any(parameter.name == "lm_head.weight" for parameter in self.parameters)
        return [*kept, *(["lm_head"] if tied else [])]

    def write_weights(
        self,
        places: Sequence[ParameterPlace],
        folder: Path,
        encoded: Callable[[ParameterPlace], Tensors],
        advance: Callable[[], None],
    ) -> None:
        """Safetensors files. ``encoded``: the tensors of a weight that is quantized, by what follows its module."""
        writer = ShardWriter(folder, shard_bytes=SHARD_BYTES)
        for place in places:
            if place.stored == FLOAT_STORED:
                dtype, array = narrowed(self.floats(place.parameter))
                writer.add(place.parameter.name, array, dtype)
            else:
                for part, array in encoded(place).items():
                    writer.add(f"{place.parameter.module}.{part}", array)
            advance()
        writer.finish()

    def write_config(self, folder: Path, quantization: Mapping[str, Any], **more: str) -> None:
        """``config.json`` as it was but for how weights are stored; the tokenizer and its companions byte for byte."""
        config = self.config | {"quantization_config": dict(quantization)} | more
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        for path in self.folder.iterdir():
            weights = path.name.endswith(_WEIGHTS)
            if path.is_file() and path.name not in (RECORD, "config.json") and not weights:
                shutil.copyfile(path, folder / path.name)


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
