"""Checkpoints in the published layout of compressed-tensors: read lazily, written layer by layer.

Two of its encodings are used, each module's named in ``config.json`` (compressed-tensors 0.20, ``compressors/``):

- ``pack-quantized`` for linears: ``X.weight_packed`` (int32 words of unsigned codes), ``X.weight_scale`` (float16 or
  float32 ``[N, G]``), ``X.weight_shape`` (int64 ``[2]``) and, when asymmetric, ``X.weight_zero_point`` (int32, packed
  along the output channels).
- ``int-quantized`` for linears with static int8 activations: ``X.weight`` (int8), ``X.weight_scale`` ``[N, 1]`` and
  ``X.input_scale`` (float32 ``[1]``, the step of the symmetric grid of its inputs).
- ``int-quantized`` for the token embedding and lm_head: ``X.weight`` (int8, codes less the midpoint, a byte each in
  fewer bits too) and ``X.weight_scale``; ``num_bits`` in ``config.json`` says how many bits there are.
  transformers 5.23 cannot load a packed embedding, and ties two modules only by a parameter that is called ``weight``.
  A tied embedding is stored once; its scales (3 % of it) once for each of the two modules.

``quantization/formats`` says how the codes of each kind of scheme lie in these tensors.

transformers 5.23 with compressed-tensors 0.20 does not load *packed zero points* (on the meta device their shape is
taken for the unpacked one), so only symmetric schemes load there; compressed-tensors itself and this reader take both.

The reader needs numpy alone, so that a compiler or a serving machine can open a checkpoint without torch.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError
from safetensors import safe_open

from quantization.formats import BYTES, AnyArray, decode_bytes, encode_bytes, format_of, inferred_bits, integers
from quantization.rounding import FloatArray, QuantizedLinear
from tapeout.errors import QuantizationError
from tapeout.float_types import as_float32
from tapeout.schemes import Scheme
from tapeout.tensor_writer import INDEX, SINGLE, ShardWriter, write_tensors
from tapeout.work_folder import is_kept, keep

PARTS = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "input_scale")
KV_PARTS = ("k_scale", "v_scale")  # of attention modules, when the KV cache has one scale per tensor


class Checkpoint:
    """A checkpoint folder, float or quantized, opened lazily: a tensor is read from disk when it is asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = _locate(folder)
        self._open: dict[str, Any] = {}
        self._num_bits: list[tuple[str, int]] | None = None  # of quantized modules, by regular expression

    def names(self) -> tuple[str, ...]:
        """Parameter names, ``X.weight`` for quantized ones too, sorted."""
        return tuple(sorted({re.sub(r"weight_packed$", "weight", n) for n in self._files if not _is_side_part(n)}))

    def is_quantized(self, name: str) -> bool:
        module = _module(name)
        return f"{module}.weight_packed" in self._files or (
            name in self._files and f"{module}.weight_scale" in self._files
        )

    def linear(self, name: str) -> QuantizedLinear | FloatArray:
        """A linear's or embedding's weight: codes when it is quantized, else float32 ``[N, K]``."""
        if not self.is_quantized(name):
            return self.tensor(name)
        module = _module(name)
        parts = {part: f"{module}.{part}" for part in ("weight", *PARTS)}
        tensors = {part: self._read(stored) for part, stored in parts.items() if stored in self._files}
        bits, scales = self._bits(module), tensors["weight_scale"]
        if "weight" in tensors:
            columns = tensors["weight"].shape[1]
            bits = bits or 8
        else:
            rows, columns = (int(n) for n in tensors["weight_shape"])
            words = tensors["weight_packed"].shape
            bits = bits or inferred_bits(columns, words[1])
            if bits is None or words != (rows, -(-columns * bits // 32)) or columns % scales.shape[1]:
                raise QuantizationError(
                    f"{name} {[rows, columns]} has {list(words)} packed words and {list(scales.shape)} scales",
                    expected="bits that a format of quantization/formats has, in whole groups",
                )
        try:
            scheme = Scheme.model_validate(
                {
                    "bits": bits,
                    "group_size": columns // scales.shape[1],
                    "symmetric": "weight_zero_point" not in tensors,
                    "activations": "int8" if "input_scale" in tensors else "float",
                }
            )
        except ValidationError as error:
            raise QuantizationError(
                f"{module} in {bits} bits with {scales.shape[1]} scales for {columns} input channels",
                expected="a scheme of tapeout/schemes.py",
            ) from error
        embedding = "weight" in tensors and "input_scale" not in tensors
        return decode_bytes(tensors, scheme) if embedding else format_of(scheme).decode(tensors, scheme)

    def weight(self, name: str) -> FloatArray:
        """The same weight in float32, whichever way it is stored."""
        linear = self.linear(name)
        return linear.dequantize() if isinstance(linear, QuantizedLinear) else linear

    def tensor(self, name: str) -> FloatArray:
        """An unquantized tensor as float32, in its own shape."""
        return as_float32(self._read(name))

    def shape(self, name: str) -> tuple[int, ...]:
        """Of an unquantized tensor, from the header alone."""
        return tuple(self._file_of(name).get_slice(name).get_shape())

    def stored_bytes(self, name: str) -> int:
        """Bytes of a parameter in the file, with its scales and zero points; read from the header alone."""
        parts = (name, *(f"{_module(name)}.{part}" for part in PARTS))
        return sum(self._stored_bytes_of(part) for part in parts if part in self._files)

    def half_scales(self, name: str) -> bool:
        """Whether every scale of a parameter is a float16 number; read from the header alone."""
        scales = f"{_module(name)}.weight_scale"
        return scales not in self._files or self._file_of(scales).get_slice(scales).get_dtype() == "F16"

    def _stored_bytes_of(self, name: str) -> int:
        entry = self._file_of(name).get_slice(name)
        return math.prod(entry.get_shape()) * int(re.sub(r"\D", "", entry.get_dtype())) // 8

    def _bits(self, module: str) -> int | None:
        """What ``config.json`` says; None where it says nothing of the module."""
        if self._num_bits is None:
            self._num_bits = _num_bits_of(self.folder / "config.json")
        return next((bits for pattern, bits in self._num_bits if re.match(pattern, module)), None)

    def _read(self, name: str) -> AnyArray:
        return self._file_of(name).get_tensor(name)

    def _file_of(self, name: str) -> Any:
        try:
            file = self._files[name]
        except KeyError:
            raise QuantizationError(
                f"no tensor {name!r} in {self.folder}", expected="one of its names()", remedy="run `dvc repro quantize`"
            ) from None
        if file not in self._open:
            self._open[file] = safe_open(self.folder / file, framework="numpy")
        return self._open[file]


def open_checkpoint(folder: Path) -> Checkpoint:
    """Open a folder with ``model.safetensors``, or with shards and their index."""
    return Checkpoint(folder)


class CheckpointWriter(ShardWriter):
    """Writes weights, quantized or not, in this layout."""

    def __init__(self, folder: Path, *, shard_bytes: int = 2 << 30) -> None:
        super().__init__(folder, shard_bytes=shard_bytes)

    def add_linear(self, name: str, linear: QuantizedLinear | FloatArray) -> None:
        if isinstance(linear, QuantizedLinear):
            self._add_parts(name, format_of(linear.scheme).encode(linear))
        else:
            self.add(name, linear)

    def add_embedding(self, name: str, embedding: QuantizedLinear | FloatArray, *, tied_to: str | None = None) -> None:
        """A symmetric or float embedding or lm_head; ``tied_to`` is the parameter that shares its weight."""
        if not isinstance(embedding, QuantizedLinear):
            self.add(name, embedding)
            return
        if embedding.zero_points is not None:
            raise QuantizationError(
                f"{name} in {embedding.scheme.name}",
                expected="embeddings and output heads that are symmetric, or in float",
                remedy="set plan.embeddings.symmetric: true",
            )
        parts = encode_bytes(embedding)
        self._add_parts(name, parts)
        if tied_to is not None:
            self._add_parts(tied_to, {"weight_scale": parts["weight_scale"]})

    def _add_parts(self, name: str, parts: Mapping[str, AnyArray]) -> None:
        for part, array in parts.items():
            self.add(f"{_module(name)}.{part}", array)


class ResumableWriter(CheckpointWriter):
    """Keeps finished parts, so that an interrupted run goes on after the last one. Each part is a shard in the end.

    Holds at most the tensors of one part in memory. ``parts``: the folder of the finished parts, which may hold some,
    on the same file system as ``folder``.
    """

    def __init__(self, folder: Path, parts: Path) -> None:
        super().__init__(folder)
        self._parts = parts
        self._pending: dict[str, AnyArray] = {}

    def add(self, name: str, array: AnyArray, dtype: str | None = None) -> None:
        assert dtype is None, "parts are written by numpy's types"
        self._pending[name] = np.ascontiguousarray(array)

    def has_part(self, number: int) -> bool:
        return is_kept(self._part(number)) and is_kept(self._notes(number))

    def end_part(self, number: int, notes: str = "") -> None:
        """Keep what was added since the last part; parts are written in the order of their numbers."""
        partial = self._parts / "partial"
        partial.write_text(notes)
        keep(partial, self._notes(number))
        write_tensors(partial, self._pending, {"format": "pt"})
        keep(partial, self._part(number))
        self._pending = {}

    def notes(self, number: int) -> str:
        """What was noted of a finished part."""
        return self._notes(number).read_text()

    def finish(self) -> None:
        """Every part becomes a shard, by a hard link: the checkpoint is on the disk once."""
        for path in sorted(self._parts.glob("part-?????")):
            with safe_open(path, framework="numpy") as part:
                self.add_shard(path, list(part.keys()))
        super().finish()

    def _part(self, number: int) -> Path:
        return self._parts / f"part-{number:05d}"

    def _notes(self, number: int) -> Path:
        return self._parts / f"part-{number:05d}.notes"


def quantization_config(
    linears: Mapping[str, Scheme], embeddings: Mapping[str, Scheme], ignored: Iterable[str]
) -> dict[str, Any]:
    """``quantization_config`` of ``config.json``: one group per way to store, its modules as regular expressions.

    ``linears`` and ``embeddings`` map parameter names to schemes; ``ignored`` are the modules left in float.
    """
    groups: dict[str, tuple[dict[str, Any], list[str]]] = {}
    for name, scheme in linears.items():
        stored = {"format": format_of(scheme).layout, **format_of(scheme).arguments(scheme)}
        groups.setdefault(json.dumps(stored), (stored, []))[1].append(_module(name))
    for name, scheme in embeddings.items():
        stored = {"format": BYTES, "weights": integers(scheme) | {"strategy": "group", "group_size": scheme.group_size}}
        groups.setdefault(json.dumps(stored), (stored, []))[1].append(_module(name))
    encodings = {stored["format"] for stored, _ in groups.values()}
    return {
        "quant_method": "compressed-tensors",
        "format": encodings.pop() if len(encodings) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "ignore": module_patterns(_module(name) for name in ignored),
        "config_groups": {
            f"group_{number}": {"targets": module_patterns(modules), **stored}
            for number, (_, (stored, modules)) in enumerate(sorted(groups.items()))
        },
    }


def module_patterns(modules: Iterable[str]) -> list[str]:
    r"""Module names as anchored regular expressions, the names that differ in one layer number merged.

    >>> module_patterns(["m.0.o", "m.2.o", "head"])
    ['re:^head$', 're:^m\\.(0|2)\\.o$']
    """
    merged: dict[tuple[str, str], set[int]] = {}
    for module in modules:
        match = re.search(r"(?<=\.)\d+(?=\.)", module)
        before, number, after = (
            (module[: match.start()], int(match.group()), module[match.end() :]) if match else (module, -1, "")
        )
        merged.setdefault((before, after), set()).add(number)
    patterns: list[str] = []
    for (before, after), numbers in sorted(merged.items()):
        middle = "" if numbers == {-1} else f"({'|'.join(str(n) for n in sorted(numbers))})"
        patterns.append(f"re:^{re.escape(before)}{middle}{re.escape(after)}$")
    return patterns


def _num_bits_of(config: Path) -> list[tuple[str, int]]:
    """Of quantized modules, by regular expression. :class:`QuantizationError` for groups that do not say it."""
    if not config.is_file():
        return []
    groups = (json.loads(config.read_text()).get("quantization_config") or {}).get("config_groups") or {}
    try:
        return [
            (target.removeprefix("re:") if target.startswith("re:") else f"{re.escape(target)}$", bits)
            for group in groups.values()
            for bits in [int(group["weights"]["num_bits"])]
            for target in group["targets"]
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise QuantizationError(
            f"a group of quantization_config in {config} does not say what it is for ({error})",
            expected="targets, and weights with num_bits",
            remedy="write the checkpoint again",
        ) from error


def _locate(folder: Path) -> dict[str, str]:
    index = folder / INDEX
    if index.is_file():
        weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
        return weight_map
    if not (folder / SINGLE).is_file():
        raise QuantizationError(
            f"neither {SINGLE} nor {INDEX} in {folder}", expected="a checkpoint", remedy="run the stage that writes it"
        )
    with safe_open(folder / SINGLE, framework="numpy") as file:
        return dict.fromkeys(file.keys(), SINGLE)


def _module(name: str) -> str:
    return name.removesuffix(".weight")


def _is_side_part(name: str) -> bool:
    return name.endswith(tuple(f".{part}" for part in (*PARTS[1:], *KV_PARTS)))
