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

Other formats bring a third, as ``mxfp4`` does. ``tapeout/formats`` says how the codes of each lie in these tensors, and
``tapeout/expert_codes.py`` how those of experts that differ in bits do.

Experts of a mixture are one parameter ``X`` of three dimensions, stored as ``X.weight_packed`` and so on with the
experts in front and ``X.weight_shape`` ``[3]``. transformers loads such experts in float only.

transformers 5.23 with compressed-tensors 0.20 does not load *packed zero points* (on the meta device their shape is
taken for the unpacked one), so only symmetric schemes load there; compressed-tensors itself and this reader take both.

The reader needs numpy alone, so that a compiler or a serving machine can open a checkpoint without torch.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError
from safetensors import safe_open

from quantization.stored import Declared, Parts, check, experts_of, quantized_modules, whole
from tapeout import expert_codes
from tapeout.coded_parameters import BLOCKS, SCALES, as_weight, coded_names, decoded, parameter_shape
from tapeout.errors import QuantizationError
from tapeout.float_types import as_float32
from tapeout.formats import formats
from tapeout.number_format import AnyArray, FloatArray, NumberFormat, ScaleType
from tapeout.packed_codes import BYTES
from tapeout.quantized import QuantizedWeight, format_of
from tapeout.schemes import Scheme, find_format
from tapeout.tensor_files import FLOATS, INDEX, SINGLE
from tapeout.tensor_writer import ShardWriter, write_tensors
from tapeout.work_folder import is_kept, keep

PARTS = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "input_scale", expert_codes.BITS)
KV_PARTS = ("k_scale", "v_scale")  # of attention modules, when the KV cache has one scale per tensor


class Tensor:
    """A tensor in a file; its type and shape are those of the header."""

    def __init__(self, file: Any, name: str) -> None:
        header = file.get_slice(name)
        self.dtype, self.shape = str(header.get_dtype()), tuple(header.get_shape())
        self._file, self._name = file, name

    def read(self) -> AnyArray:
        return self._file.get_tensor(self._name)

    def read_part(self, index: int) -> AnyArray:
        """At an index of the first dimension."""
        return self._file.get_slice(self._name)[index]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * int(re.sub(r"\D", "", self.dtype)) // 8


class Checkpoint:
    """A checkpoint folder, float or quantized: checked when it is opened; a tensor is read when it is asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._tensors = _tensors(folder)
        self._coded = {
            name: (self._tensors.pop(f"{name}{BLOCKS}"), self._tensors.pop(f"{name}{SCALES}"))
            for name in coded_names({name: tensor.dtype for name, tensor in self._tensors.items()})
        }
        self._modules = _quantized(self._tensors)
        groups = _groups_of(folder / "config.json") if self._modules else []
        self._schemes = {module: _scheme(module, parts, groups) for module, parts in self._modules.items()}

    def names(self) -> tuple[str, ...]:
        """Parameter names, ``X.weight`` for quantized linears too and ``X`` for quantized experts, sorted."""
        packed = {f"{module}.weight_packed": module for module in self._modules}
        experts = {module for module, parts in self._modules.items() if experts_of(parts)}
        found = (packed.get(name, name) for name in self._tensors if not _is_side_part(name))
        named = {f"{name}.weight" if name in self._modules and name not in experts else name for name in found}
        return tuple(sorted(named.union(self._coded)))

    def is_quantized(self, name: str) -> bool:
        return _module(name) in self._modules

    def linear(self, name: str) -> QuantizedWeight | FloatArray:
        """A weight of a linear, an embedding or experts: codes ``[..., N, K]`` when it is quantized, else float32."""
        if not self.is_quantized(name):
            return self.tensor(name)
        module = _module(name)
        tensors = {part: stored.read() for part, stored in self._modules[module].items()}
        scheme = self._schemes[module]
        if scheme.expert_bits:
            return QuantizedWeight.of(expert_codes.decode(tensors), scheme)
        found = format_of(scheme)
        embedding = "weight" in tensors and "input_scale" not in tensors
        return QuantizedWeight.of(found.decode_bytes(tensors) if embedding else found.decode(tensors), scheme)

    def weight(self, name: str) -> FloatArray:
        """The same weight in float32, whichever way it is stored."""
        linear = self.linear(name)
        return linear.dequantize() if isinstance(linear, QuantizedWeight) else linear

    def tensor(self, name: str) -> FloatArray:
        """An unquantized tensor as float32, in its own shape."""
        if name in self._coded:
            blocks, scales = (stored.read() for stored in self._coded[name])
            return decoded(blocks, scales)
        return as_float32(self._tensor(name).read())

    def part(self, name: str, index: int) -> FloatArray:
        """One expert of an unquantized parameter, as float32."""
        if name in self._coded:
            blocks, scales = (stored.read_part(index) for stored in self._coded[name])
            return as_weight(blocks, scales).dequantize().T
        return as_float32(self._tensor(name).read_part(index))

    def codes(self, name: str) -> QuantizedWeight | None:
        """Of an unquantized parameter that its source stores as codes, these, ``[E, N, K]``; None for any other."""
        if name not in self._coded:
            return None
        blocks, scales = (stored.read() for stored in self._coded[name])
        return as_weight(blocks, scales)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of an unquantized tensor, from the header alone."""
        return parameter_shape(self._coded[name][0].shape) if name in self._coded else self._tensor(name).shape

    def stored_bytes(self, name: str) -> int:
        """Bytes of a parameter in the file, with its scales and zero points; read from the header alone."""
        if name in self._coded:
            return sum(tensor.bytes for tensor in self._coded[name])
        parts = (name, *(f"{_module(name)}.{part}" for part in PARTS))
        return sum(self._tensors[part].bytes for part in parts if part in self._tensors)

    def half_scales(self, name: str) -> bool:
        """Whether every scale of a parameter is a float16 number; read from the header alone."""
        scales = f"{_module(name)}.weight_scale"
        return scales not in self._tensors or self._tensors[scales].dtype == "F16"

    def _tensor(self, name: str) -> Tensor:
        if name not in self._tensors:
            raise QuantizationError(
                f"no tensor {name!r} in {self.folder}", expected="one of its names()", remedy="run `dvc repro quantize`"
            )
        return self._tensors[name]


def open_checkpoint(folder: Path) -> Checkpoint:
    """Open a folder with ``model.safetensors``, or with shards and their index."""
    return Checkpoint(folder)


class CheckpointWriter(ShardWriter):
    """Writes weights, quantized or not, in this layout."""

    def add_linear(self, name: str, linear: QuantizedWeight | FloatArray) -> None:
        if isinstance(linear, QuantizedWeight):
            of_experts = linear.scheme.expert_bits
            parts = expert_codes.encode(linear) if of_experts else format_of(linear.scheme).encode(linear.coded)
            self._add_parts(name, parts)
        else:
            self.add(name, linear)

    def add_embedding(self, name: str, embedding: QuantizedWeight | FloatArray, *, tied_to: str | None = None) -> None:
        """A symmetric or float embedding or lm_head; ``tied_to`` is the parameter that shares its weight."""
        if not isinstance(embedding, QuantizedWeight):
            self.add(name, embedding)
            return
        if embedding.zero_points is not None:
            raise QuantizationError(
                f"{name} in {embedding.scheme.name}",
                expected="embeddings and output heads that are symmetric, or in float",
                remedy="set plan.embeddings.symmetric: true",
            )
        parts = format_of(embedding.scheme).encode_bytes(embedding.coded)
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


def _tensors(folder: Path) -> dict[str, Tensor]:
    listed = _locate(folder)
    files = {file: safe_open(folder / file, framework="numpy") for file in sorted(set(listed.values()))}
    held = {(file, name) for file, opened in files.items() for name in opened.keys()}  # noqa: SIM118
    if wrong := sorted(held ^ {(file, name) for name, file in listed.items()}):
        file, name = wrong[0]
        raise QuantizationError(
            f"{INDEX} of {folder} and {file} do not agree on {name}",
            expected="an index that lists every tensor, with its file",
            remedy="run the stage that writes it",
        )
    return {name: Tensor(files[file], name) for name, file in listed.items()}


def _quantized(tensors: Mapping[str, Tensor]) -> Mapping[str, Parts]:
    """The parts of every quantized module. :class:`QuantizationError` for codes that are of none."""
    kept = {name: tensor for name, tensor in tensors.items() if name.rpartition(".")[2] not in KV_PARTS}
    modules = quantized_modules(kept)
    embeddings = [parts["weight_scale"] for parts in modules.values() if set(parts) == {"weight", "weight_scale"}]
    # Of a module that is tied to an embedding: it has no weight of its own.
    twins = [(scales.dtype, scales.shape) for scales in embeddings]
    tied = [
        module
        for module, parts in modules.items()
        if set(parts) == {"weight_scale"} and (parts["weight_scale"].dtype, parts["weight_scale"].shape) in twins
    ]
    stray = [
        name for name, tensor in kept.items() if tensor.dtype not in FLOATS and name.rpartition(".")[0] not in modules
    ]
    if stray:
        raise QuantizationError(
            f"{stray[0]} ({tensors[stray[0]].dtype}) belongs to no quantized weight",
            expected="floats, and the parts of quantized weights",
            remedy="run the stage that writes it",
        )
    return {module: parts for module, parts in modules.items() if module not in tied}


def _scheme(module: str, parts: Parts, groups: Sequence[tuple[re.Pattern[str], Mapping[str, Any]]]) -> Scheme:
    """:class:`QuantizationError` for parts that do not fit together, or not ``config.json``."""
    declared = _declared(module, parts, groups)
    _, columns = check(module, parts, declared)
    size = declared.block[1] or columns
    static = "fp8" if declared.number_type == "float" else "int8"
    activations = static if declared.static else "float"
    scale_type: ScaleType = "e8m0" if declared.ue8m0 else "float"
    found = find_format(declared.bits, activations, declared.number_type, scale_type)
    named = found.name if found else "none"
    fields: dict[str, Any] = {"bits": declared.bits, "activations": activations, "format": named}
    if expert_codes.BITS in parts:
        if named != f"int{declared.bits}":
            raise QuantizationError(
                f"experts of {module} differ in bits, and config.json says {named}",
                expected="integers",
                remedy="run `dvc repro quantize`",
            )
        fields["expert_bits"] = tuple(parts[expert_codes.BITS].read().tolist())
    elif isinstance(found, NumberFormat) and not found.integer_bits and declared.layout != f"our {found.layout}":
        raise QuantizationError(
            f"config.json says {declared.layout.removeprefix('our ')} of {module}, and codes of {named}",
            expected=f"{found.layout} for floats that no integers hold",
            remedy="run `dvc repro quantize`",
        )
    try:
        return Scheme.model_validate(fields | {"group_size": size, "symmetric": declared.symmetric})
    except ValidationError as error:
        raise QuantizationError(
            f"{module} in {declared.bits} bits with {columns // size} scales for {columns} input channels",
            expected="a scheme of tapeout/schemes.py",
        ) from error


def _declared(module: str, parts: Parts, groups: Sequence[tuple[re.Pattern[str], Mapping[str, Any]]]) -> Declared:
    """By ``config.json``."""
    group = next((group for pattern, group in groups if pattern.match(module)), None)
    if group is None:
        raise QuantizationError(
            f"config.json does not say how {module} is stored ({', '.join(parts)})",
            expected="a group of quantization_config whose targets match it",
            remedy="run `dvc repro quantize`",
        )
    weights = group["weights"]
    layout = group.get("format")
    coded = {one.layout for one in formats().values() if isinstance(one, NumberFormat)}
    known = sorted(coded | {BYTES, expert_codes.LAYOUT})
    if layout not in known:
        raise QuantizationError(
            f"config.json says that {module} is stored in {layout}",
            expected=f"one of {', '.join(known)}",
            remedy="run `dvc repro quantize`",
        )
    size, exponents = weights.get("group_size"), weights.get("scale_dtype") == "torch.uint8"
    return Declared(
        f"our {layout} e8m0" if exponents and layout == BYTES else f"our {layout}",
        "group",
        (1, None if size is None and weights.get("strategy") == "channel" else whole("group_size", size)),
        bits=whole("num_bits", weights.get("num_bits")),
        number_type=str(weights.get("type", "int")),
        symmetric=bool(weights.get("symmetric", True)),
        static=group.get("input_activations") is not None,
        ue8m0=exponents,
    )


def _groups_of(config: Path) -> list[tuple[re.Pattern[str], Mapping[str, Any]]]:
    """``config_groups`` by regular expression of modules. :class:`QuantizationError` for groups that lack something."""
    if not config.is_file():
        return []
    groups = (json.loads(config.read_text()).get("quantization_config") or {}).get("config_groups") or {}
    try:
        return [
            (re.compile(target[3:] if target.startswith("re:") else f"{re.escape(target)}$"), group)
            for group in groups.values()
            for _ in [int(group["weights"]["num_bits"])]
            for target in group["targets"]
        ]
    except (KeyError, TypeError, AttributeError, ValueError, re.error) as error:
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
