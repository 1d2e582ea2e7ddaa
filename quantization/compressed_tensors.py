"""The published checkpoint format, compressed-tensors: read lazily, written layer by layer.

Two of its encodings are used, each module's named in ``config.json`` (compressed-tensors 0.20, ``compressors/``):

- ``pack-quantized`` for linears: ``X.weight_packed`` (int32 words of unsigned codes), ``X.weight_scale`` (float16 or
  float32 ``[N, G]``), ``X.weight_shape`` (int64 ``[2]``) and, when asymmetric, ``X.weight_zero_point`` (int32, packed
  along the output channels).
- ``int-quantized`` for linears with static int8 activations: ``X.weight`` (int8), ``X.weight_scale`` ``[N, 1]`` and
  ``X.input_scale`` (float32 ``[1]``, the step of the symmetric grid of its inputs).
- ``int-quantized`` for the token embedding and the output head: ``X.weight`` (int8, codes less the midpoint, a byte
  each in 4 and 6 bits too) and ``X.weight_scale``; ``num_bits`` in ``config.json`` says how many bits there are.
  transformers 5.23 cannot load a packed embedding, and ties two modules only by a parameter that is called ``weight``.
  A tied table is stored once; its scales (3 % of it) once for each of the two modules.

transformers 5.23 with compressed-tensors 0.20 does not load *packed zero points* (on the meta device their shape is
taken for the unpacked one), so only symmetric formats load there; compressed-tensors itself and this reader take both.

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
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save_file

from quantization.rounding import Bits, FloatArray, Format, QuantizedLinear, pack, unpack
from tapeout.errors import QuantizationError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PARTS = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "input_scale")
KV_PARTS = ("k_scale", "v_scale")  # of attention modules, when the KV cache has one scale per tensor
_BITS: tuple[Bits, ...] = (4, 6, 8)

AnyArray = NDArray[Any]


class Checkpoint:
    """A checkpoint folder, float or quantized, opened lazily: a tensor is read from disk when it is asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = _locate(folder)
        self._open: dict[str, Any] = {}
        self._num_bits: list[tuple[str, int]] | None = None  # of int-quantized modules, by regular expression

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
        if name in self._files:
            stored = self._int_bits(module)
            codes = (self._read(name).astype(np.int16) + (1 << (stored - 1))).astype(np.uint8)
            scales = self._read(f"{module}.weight_scale").astype(np.float32)
            given = f"{module}.input_scale"
            input_scale = float(self._read(given).reshape(-1)[0]) if given in self._files else None
            return QuantizedLinear(codes, scales, None, stored, codes.shape[1] // scales.shape[1], input_scale)
        rows, columns = (int(n) for n in self._read(f"{module}.weight_shape"))
        words = self._read(f"{module}.weight_packed")
        scales = self._read(f"{module}.weight_scale").astype(np.float32)
        bits: Bits | None = next((b for b in _BITS if -(-columns * b // 32) == words.shape[1]), None)
        if bits is None or words.shape[0] != rows or columns % scales.shape[1]:
            raise QuantizationError(
                f"{name} {[rows, columns]} has {list(words.shape)} packed words and {list(scales.shape)} scales",
                expected=f"one of {_BITS} bits a weight in whole groups",
            )
        zero_points = None
        if f"{module}.weight_zero_point" in self._files:
            packed = self._read(f"{module}.weight_zero_point")
            zero_points = np.ascontiguousarray(unpack(np.ascontiguousarray(packed.T), bits, rows).T)
        return QuantizedLinear(unpack(words, bits, columns), scales, zero_points, bits, columns // scales.shape[1])

    def weight(self, name: str) -> FloatArray:
        """The same weight in float32, whichever way it is stored."""
        linear = self.linear(name)
        return linear.dequantize() if isinstance(linear, QuantizedLinear) else linear

    def tensor(self, name: str) -> FloatArray:
        """An unquantized tensor as float32, in its own shape."""
        return self._read(name).astype(np.float32, copy=False)

    def size(self, name: str) -> int:
        """Number of values in an unquantized tensor, from the header alone."""
        return math.prod(self._file_of(name).get_slice(name).get_shape())

    def stored_bytes(self, name: str) -> int:
        """Bytes of a parameter in the file, with its scales and zero points; read from the header alone."""
        parts = (name, *(f"{_module(name)}.{part}" for part in PARTS))
        return sum(self._stored_bytes_of(part) for part in parts if part in self._files)

    def _stored_bytes_of(self, name: str) -> int:
        entry = self._file_of(name).get_slice(name)
        return math.prod(entry.get_shape()) * int(re.sub(r"\D", "", entry.get_dtype())) // 8

    def _int_bits(self, module: str) -> Bits:
        """Of an int-quantized module: 8, unless ``config.json`` says otherwise."""
        if self._num_bits is None:
            self._num_bits = _num_bits_of(self.folder / "config.json")
        bits = next((bits for pattern, bits in self._num_bits if re.match(pattern, module)), 8)
        if bits not in _BITS:
            raise QuantizationError(f"{module} in {bits} bits", expected=f"one of {_BITS} bits a weight")
        return bits

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


class CheckpointWriter:
    """Writes tensors as they come, into shards of bounded size; holds at most one shard in memory.

    A checkpoint that fits one shard is a plain ``model.safetensors``, as every reader expects.
    """

    def __init__(self, folder: Path, *, shard_bytes: int = 2 << 30) -> None:
        self.folder, self.shard_bytes = folder, shard_bytes
        self._pending: dict[str, AnyArray] = {}
        self._pending_bytes = 0
        self._shards: list[tuple[Path, list[str]]] = []
        self._total_bytes = 0

    def add(self, name: str, array: AnyArray) -> None:
        if self._pending and self._pending_bytes + array.nbytes > self.shard_bytes:
            self._flush()
        self._pending[name] = np.ascontiguousarray(array)
        self._pending_bytes += array.nbytes
        self._total_bytes += array.nbytes

    def add_linear(self, name: str, linear: QuantizedLinear) -> None:
        encode = encode_packed if linear.input_scale is None else encode_static
        for part, array in encode(name, linear).items():
            self.add(part, array)

    def add_table(self, name: str, table: QuantizedLinear, *, tied_to: str | None = None) -> None:
        """A symmetric embedding or output head; ``tied_to`` is the parameter that is the same table."""
        for part, array in encode_table(name, table, tied_to=tied_to).items():
            self.add(part, array)

    def finish(self) -> None:
        self._flush()
        if len(self._shards) == 1:
            self._shards[0][0].rename(self.folder / SINGLE)
            return
        weight_map: dict[str, str] = {}
        for number, (path, names) in enumerate(self._shards, start=1):
            final = f"model-{number:05d}-of-{len(self._shards):05d}.safetensors"
            path.rename(self.folder / final)
            weight_map.update(dict.fromkeys(names, final))
        body = {"metadata": {"total_size": self._total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        (self.folder / INDEX).write_text(json.dumps(body, indent=1) + "\n")

    def _flush(self) -> None:
        if not self._pending:
            return
        path = self.folder / f"shard-{len(self._shards)}.safetensors"
        save_file(self._pending, path, metadata={"format": "pt"})
        self._shards.append((path, list(self._pending)))
        self._pending, self._pending_bytes = {}, 0


def encode_packed(name: str, linear: QuantizedLinear) -> dict[str, AnyArray]:
    """The stored tensors of one linear, ``pack-quantized``."""
    module = _module(name)
    parts: dict[str, AnyArray] = {
        f"{module}.weight_packed": pack(linear.codes, linear.bits),
        f"{module}.weight_scale": _stored_scales(linear.scales),
        f"{module}.weight_shape": np.array(linear.codes.shape, np.int64),
    }
    if linear.zero_points is not None:
        packed = pack(np.ascontiguousarray(linear.zero_points.T), linear.bits)
        parts[f"{module}.weight_zero_point"] = np.ascontiguousarray(packed.T)
    return parts


def encode_static(name: str, linear: QuantizedLinear) -> dict[str, AnyArray]:
    """The stored tensors of a linear with static int8 activations, ``int-quantized``."""
    module = _module(name)
    return {
        name: _signed(linear),
        f"{module}.weight_scale": _stored_scales(linear.scales),
        f"{module}.input_scale": np.array([linear.input_scale], np.float32),
    }


def _signed(linear: QuantizedLinear) -> AnyArray:
    return (linear.codes.astype(np.int16) - linear.format.midpoint).astype(np.int8)


def encode_table(name: str, table: QuantizedLinear, *, tied_to: str | None = None) -> dict[str, AnyArray]:
    """The stored tensors of an embedding or output head, ``int-quantized``."""
    if table.zero_points is not None:
        raise QuantizationError(
            f"{name} in {table.format}",
            expected="embeddings and output heads that are symmetric, or in float",
            remedy="set plan.embeddings.symmetric: true",
        )
    scales = _stored_scales(table.scales)
    parts: dict[str, AnyArray] = {
        name: _signed(table),
        f"{_module(name)}.weight_scale": scales,
    }
    if tied_to is not None:
        parts[f"{_module(tied_to)}.weight_scale"] = scales
    return parts


def _stored_scales(scales: FloatArray) -> AnyArray:
    half = scales.astype(np.float16)
    return half if np.array_equal(half.astype(np.float32), scales) else scales


def quantization_config(
    linears: Mapping[str, Format], tables: Mapping[str, Format], ignored: Iterable[str]
) -> dict[str, Any]:
    """``quantization_config`` of ``config.json``: one group per format, its modules named by regular expressions.

    ``linears`` and ``tables`` map parameter names to formats; ``ignored`` are the modules left in float.
    """
    by_format: dict[tuple[str, Format], list[str]] = {}
    for encoding, formats in (("pack-quantized", linears), ("int-quantized", tables)):
        for name, fmt in formats.items():
            stored = "int-quantized" if fmt.activations == "int8" else encoding
            by_format.setdefault((stored, fmt), []).append(_module(name))
    encodings = {encoding for encoding, _ in by_format}
    return {
        "quant_method": "compressed-tensors",
        "format": encodings.pop() if len(encodings) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "ignore": module_patterns(_module(name) for name in ignored),
        "config_groups": {
            f"group_{number}": {
                "targets": module_patterns(modules),
                "format": encoding,
                **_arguments(fmt),
            }
            for number, ((encoding, fmt), modules) in enumerate(
                sorted(by_format.items(), key=lambda item: (item[0][0], str(item[0][1])))
            )
        },
    }


def _arguments(fmt: Format) -> dict[str, Any]:
    weights: dict[str, Any] = {"num_bits": fmt.bits, "type": "int", "symmetric": fmt.symmetric}
    if fmt.activations == "float":
        return {"weights": {**weights, "strategy": "group", "group_size": fmt.group_size}}
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "tensor", "dynamic": False}
    return {"weights": {**weights, "strategy": "channel"}, "input_activations": inputs}


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
    """Of what is int-quantized, by regular expression. :class:`QuantizationError` for groups that do not say it."""
    if not config.is_file():
        return []
    groups = (json.loads(config.read_text()).get("quantization_config") or {}).get("config_groups") or {}
    try:
        return [
            (target.removeprefix("re:") if target.startswith("re:") else f"{re.escape(target)}$", bits)
            for group in groups.values()
            if group.get("format") == "int-quantized"
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
