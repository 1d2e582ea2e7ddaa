"""How formats store a quantized weight: one table of tensors, types and shapes, and the check before any is read.

A type that is read as another, or a scale that is spread over other weights, gives a model that is wrong and that both
sides of every later comparison share. So a checkpoint is refused where a tensor is missing, left over, or does not fit.

Shapes: N output channels and K input channels of a weight. What else a dimension may be is in ``DIMENSIONS``. Codes in
words or bytes, and their scales, may have the experts of a mixture in front.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from tapeout import expert_codes
from tapeout.errors import QuantizationError
from tapeout.tensor_files import FLOATS

REMEDY = "fetch the checkpoint again, restore its quantization_config, or take the float checkpoint it was made from"


class Stored(Protocol):
    """A tensor in a file; ``dtype`` as safetensors names it."""

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self) -> Any: ...


Parts = Mapping[str, Stored]  # of one weight, by what follows the module's name and a point, or the name itself
Dims = tuple[str, ...]
Strategy = Literal["tensor", "channel", "group", "block"]  # what shares a scale

DIMENSIONS = {
    "N/8": "words of eight 4-bit codes",
    "K/2": "bytes of two 4-bit codes",
    "K words": "32-bit words that K codes fill",
    "N words": "32-bit words that N codes fill",
    "K/g": "groups of g input channels; g divides K",
    "N/r": "blocks of r output channels; the last may be smaller",
    "K/c": "blocks of c input channels; the last may be smaller",
    "experts words": "32-bit words that the codes of all experts fill, each in its own bits",
}
FIXED = {"1": 1, "2": 2, "3": 3, "16": 16}
ATTACHED = ("_blocks", "_scales")  # parts of experts that follow the parameter's own name, without a point
FLOAT_NAMES = ("weight", *ATTACHED)  # names, or ends of them, that parameters in float have, too
EXPERTS = "experts"  # of a mixture: the first dimension of all parts but the shape, and codes of their own bits
SCALED: Mapping[Strategy, tuple[Dims, ...]] = {
    "tensor": ((), ("1",), ("1", "1")),
    "channel": (("N", "1"), ("N",)),
    "group": (("N", "K/g"),),
    "block": (("N/r", "K/c"),),
}
SCALES = ("F32", "BF16", "F16", "F8_E8M0")


@dataclass(frozen=True)
class StoredPart:
    """A tensor of a layout. Without ``shape`` it has one of ``SCALED``.

    ``needed``: always, or where quantization_config says that the codes have zero points, that the input channels were
    sorted, or that activations are on a static grid; it is left over elsewhere.
    """

    name: str
    types: tuple[str, ...]
    shape: Dims | None = None
    needed: Literal["always", "asymmetric", "sorted", "static"] = "always"


@dataclass(frozen=True)
class Layout:
    """``size``: N and K, from tensors whose types and numbers of dimensions were checked."""

    parts: tuple[StoredPart, ...]
    size: Callable[[Parts], tuple[int, int]]


def _weight_size(parts: Parts) -> tuple[int, int]:
    rows, columns = parts["weight"].shape
    return rows, columns


def _awq_size(parts: Parts) -> tuple[int, int]:
    columns, words = parts["qweight"].shape
    return 8 * words, columns


def _halves_size(parts: Parts) -> tuple[int, int]:
    rows, octets = parts["weight_packed"].shape[-2:]
    return rows, 2 * octets


def _blocks_size(parts: Parts) -> tuple[int, int]:
    rows, blocks, octets = parts["_blocks"].shape[-3:]
    return rows, blocks * 2 * octets


def _packed_size(parts: Parts) -> tuple[int, int]:
    rows, columns = (int(size) for size in parts["weight_shape"].read()[-2:])
    return rows, columns


LAYOUTS: Mapping[str, Layout] = {
    "fp8": Layout(
        (StoredPart("weight", ("F8_E4M3",), ("N", "K")), StoredPart("weight_scale_inv", SCALES)), _weight_size
    ),
    "awq": Layout(
        (
            StoredPart("qweight", ("I32",), ("K", "N/8")),
            StoredPart("qzeros", ("I32",), ("K/g", "N/8")),
            StoredPart("scales", ("F16", "BF16", "F32"), ("K/g", "N")),
        ),
        _awq_size,
    ),
    "pack-quantized": Layout(
        (
            StoredPart("weight_packed", ("I32",), ("N", "K words")),
            StoredPart("weight_scale", SCALES),
            StoredPart("weight_shape", ("I64",), ("2",)),
            StoredPart("weight_zero_point", ("I32",), ("N words", "K/g"), needed="asymmetric"),
            StoredPart("weight_g_idx", ("I32",), ("K",), needed="sorted"),
        ),
        _packed_size,
    ),
    "int-quantized": Layout(
        (
            StoredPart("weight", ("I8",), ("N", "K")),
            StoredPart("weight_scale", SCALES),
            StoredPart("weight_zero_point", ("I8",), needed="asymmetric"),
            StoredPart("weight_g_idx", ("I32",), ("K",), needed="sorted"),
        ),
        _weight_size,
    ),
    "float-quantized": Layout(
        (StoredPart("weight", ("F8_E4M3",), ("N", "K")), StoredPart("weight_scale", SCALES)), _weight_size
    ),
    "mxfp4": Layout(
        (StoredPart("_blocks", ("U8",), ("N", "K/g", "16")), StoredPart("_scales", ("U8",), ("N", "K/g"))),
        _blocks_size,
    ),
    "our pack-quantized": Layout(
        (
            StoredPart("weight_packed", ("I32",), ("N", "K words")),
            StoredPart("weight_scale", ("F16", "F32"), ("N", "K/g")),
            StoredPart("weight_shape", ("I64",), ("2",)),
            StoredPart("weight_zero_point", ("I32",), ("N words", "K/g"), needed="asymmetric"),
        ),
        _packed_size,
    ),
    f"our {expert_codes.LAYOUT}": Layout(
        (
            StoredPart("weight_packed", ("I32",), ("experts words",)),
            StoredPart("weight_scale", ("F16", "F32"), (EXPERTS, "N", "K/g")),
            StoredPart("weight_shape", ("I64",), ("3",)),
            StoredPart(expert_codes.BITS, ("U8",), (EXPERTS,)),
            StoredPart("weight_zero_point", ("I32",), (EXPERTS, "N words", "K/g"), needed="asymmetric"),
        ),
        _packed_size,
    ),
    "our int-quantized": Layout(
        (
            StoredPart("weight", ("I8",), ("N", "K")),
            StoredPart("weight_scale", ("F16", "F32"), ("N", "K/g")),
            StoredPart("input_scale", ("F32",), ("1",), needed="static"),
        ),
        _weight_size,
    ),
    "our mxfp4-pack-quantized": Layout(
        (StoredPart("weight_packed", ("U8",), ("N", "K/2")), StoredPart("weight_scale", ("U8",), ("N", "K/g"))),
        _halves_size,
    ),
    "our fp8-quantized": Layout(
        (
            StoredPart("weight", ("U8",), ("N", "K")),
            StoredPart("weight_scale", ("F16", "F32"), ("N", "K/g")),
            StoredPart("input_scale", ("F32",), ("1",), needed="static"),
        ),
        _weight_size,
    ),
    "our int-quantized e8m0": Layout(
        (StoredPart("weight", ("I8",), ("N", "K")), StoredPart("weight_scale", ("U8",), ("N", "K/g"))), _weight_size
    ),
}
# Types of GGUF that are read: values of a block, and its bytes (gguf.GGML_QUANT_SIZES). A row is whole blocks.
GGUF_TYPES: Mapping[str, tuple[int, int]] = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "IQ1_S": (256, 50),
    "IQ1_M": (256, 56),
    "IQ2_XXS": (256, 66),
    "IQ2_XS": (256, 74),
    "IQ2_S": (256, 82),
    "IQ3_XXS": (256, 98),
    "IQ3_S": (256, 110),
    "IQ4_NL": (32, 18),
    "IQ4_XS": (256, 136),
    "TQ1_0": (256, 54),
    "TQ2_0": (256, 66),
    "MXFP4": (32, 17),
    "NVFP4": (64, 36),
}
# Of no layout above: GPTQ's order of input channels, and the second scale of nvfp4.
FOREIGN = ("g_idx", "weight_global_scale")
NAMES = tuple(dict.fromkeys([*(part.name for layout in LAYOUTS.values() for part in layout.parts), *FOREIGN]))


@dataclass(frozen=True)
class Declared:
    """What quantization_config says of a weight.

    ``block``: output and input channels that share a scale; None: all of them. ``ue8m0``: bytes of scales are
    exponents, 2^(code - 127), as in F8_E8M0.
    """

    layout: str
    strategy: Strategy
    block: tuple[int | None, int | None] = (None, None)
    bits: int = 8
    number_type: str = "int"
    symmetric: bool = True
    sorted: bool = False
    static: bool = False
    ue8m0: bool = False

    def needs(self, part: StoredPart) -> bool:
        asked = {"asymmetric": not self.symmetric, "sorted": self.sorted, "static": self.static}
        return asked.get(part.needed, True)

    def types(self, part: StoredPart) -> tuple[str, ...]:
        return (*part.types, "U8") if self.ue8m0 and "F8_E8M0" in part.types else part.types


def quantized_modules(stored: Mapping[str, Stored]) -> Mapping[str, Parts]:
    """The parts of every module that stores codes or a part of a quantized weight."""
    split = {name: _split(name) for name in stored}
    modules = {
        module
        for name, (module, part) in split.items()
        if part in NAMES and (part not in FLOAT_NAMES or stored[name].dtype not in FLOATS)
    }
    found: dict[str, dict[str, Stored]] = {module: {} for module in sorted(modules)}
    for name, (module, part) in split.items():
        if module in found and part in NAMES:
            found[module][part] = stored[name]
    return found


def _split(name: str) -> tuple[str, str]:
    attached = next((part for part in ATTACHED if name.endswith(part)), "")
    module, _, part = name.rpartition(".")
    return (name.removesuffix(attached), attached) if attached else (module, part)


def stored_name(module: str, part: str) -> str:
    """Of a part of a weight, in the file.

    >>> stored_name("layers.0.q_proj", "weight_scale"), stored_name("experts.down_proj", "_scales")
    ('layers.0.q_proj.weight_scale', 'experts.down_proj_scales')
    """
    return f"{module}{part}" if part in ATTACHED else f"{module}.{part}"


def experts_of(parts: Parts) -> int:
    """How many experts a stored weight holds, ``[experts, N, K]``; 0 for a linear ``[N, K]``."""
    if expert_codes.BITS in parts:
        return math.prod(parts[expert_codes.BITS].shape)
    for name, dimensions in (("weight_packed", 3), ("_blocks", 4)):
        if name in parts and len(parts[name].shape) == dimensions:
            return parts[name].shape[0]
    return 0


def check(module: str, parts: Parts, declared: Declared) -> tuple[int, int]:
    """N and K. :class:`QuantizationError` for parts of a weight that are missing, left over, or do not fit."""
    layout = LAYOUTS[declared.layout]
    needed = [part for part in layout.parts if declared.needs(part)]
    experts = experts_of(parts)
    if experts and not any(EXPERTS in (part.shape or ()) for part in layout.parts):
        needed = [_of_experts(part, declared) for part in needed]
    known = {**FIXED, EXPERTS: experts}
    names = [part.name for part in needed]
    for name in names:
        if name not in parts:
            raise QuantizationError(
                f"no {stored_name(module, name)}, which {_shown(module, parts)} needs in {declared.layout}",
                expected=", ".join(names),
                remedy=REMEDY,
            )
    for name in parts:
        if name not in names:
            raise QuantizationError(
                f"{_shown(module, {name: parts[name]})} belongs to no weight in {declared.layout}",
                expected=f"{', '.join(names)} of every quantized weight, and nothing else",
                remedy=REMEDY,
            )
    for part in needed:
        if parts[part.name].dtype not in declared.types(part):
            raise _misfit(module, parts, part, declared, known)
    _require_shapes(module, parts, needed, declared, known)
    rows, columns = layout.size(parts)
    sizes = _sizes(module, rows, columns, declared) | known
    if expert_codes.BITS in parts:
        bits = parts[expert_codes.BITS].read().tolist()
        if max(bits) != declared.bits:
            raise QuantizationError(
                f"config.json says {declared.bits} bits of {module}, whose experts have up to {max(bits)}",
                expected="the bits of the widest expert",
                remedy=REMEDY,
            )
        sizes["experts words"] = expert_codes.words_of_experts(bits, rows, columns)
    _require_shapes(module, parts, needed, declared, sizes)
    return rows, columns


def _of_experts(part: StoredPart, declared: Declared) -> StoredPart:
    if part.name == "weight_shape":
        return replace(part, shape=("3",))
    if part.shape is None:  # experts have the form of a scale with most dimensions
        return replace(part, shape=(EXPERTS, *max(SCALED[declared.strategy], key=len)))
    return replace(part, shape=(EXPERTS, *part.shape))


def _require_shapes(
    module: str, parts: Parts, needed: Sequence[StoredPart], declared: Declared, sizes: Mapping[str, int]
) -> None:
    """``sizes``: of the dimensions that are known."""
    for part in needed:
        shape = parts[part.name].shape
        forms = [tuple(map(sizes.get, dims, shape)) for dims in _shapes(part, declared) if len(dims) == len(shape)]
        if tuple(shape) not in forms or 0 in shape:
            raise _misfit(module, parts, part, declared, sizes)


def _shapes(part: StoredPart, declared: Declared) -> Sequence[Dims]:
    return SCALED[declared.strategy] if part.shape is None else (part.shape,)


def _sizes(module: str, rows: int, columns: int, declared: Declared) -> dict[str, int]:
    """Of every dimension that a part may have."""
    down, across = declared.block[0] or max(rows, 1), declared.block[1] or max(columns, 1)
    if declared.strategy == "group" and columns % across:
        raise QuantizationError(
            f"{module} has {columns} input channels, and quantization_config says groups of {across}",
            expected="groups that divide the input channels",
            remedy=REMEDY,
        )
    groups, words = -(-columns // across), -(-columns * declared.bits // 32)
    return {
        **FIXED,
        "N": rows,
        "K": columns,
        "N/8": rows // 8,
        "K/2": columns // 2,
        "K words": words,
        "N words": -(-rows * declared.bits // 32),
        "K/g": groups,
        "N/r": -(-rows // down),
        "K/c": groups,
    }


def _misfit(
    module: str, parts: Parts, part: StoredPart, declared: Declared, sizes: Mapping[str, int]
) -> QuantizationError:
    shapes = [f"[{', '.join(str(sizes.get(dim, dim)) for dim in dims)}]" for dims in _shapes(part, declared)]
    stored_as = f"{' or '.join(declared.types(part))} {' or '.join(shapes)}"
    return QuantizationError(
        f"{_shown(module, {part.name: parts[part.name]})} does not fit {_shown(module, parts)}",
        expected=f"{stored_as} in {declared.layout}, with one scale per {declared.strategy}",
        remedy=REMEDY,
    )


def _shown(module: str, parts: Parts) -> str:
    return ", ".join(f"{stored_name(module, name)} ({part.dtype} {list(part.shape)})" for name, part in parts.items())


def whole(name: str, value: Any) -> int:
    """``value`` of quantization_config, a number of bits or channels."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise QuantizationError(
            f"quantization_config says {name} {value!r}", expected="a whole number of at least 1", remedy=REMEDY
        )
    return value


def mapping(name: str, value: Any) -> Mapping[str, Any]:
    """``value`` of quantization_config; what is null or missing is empty."""
    if value is not None and not isinstance(value, Mapping):
        raise QuantizationError(f"quantization_config says {name} {value!r}", expected="a JSON object", remedy=REMEDY)
    return value or {}


def channels_of_block(name: str, value: Any) -> tuple[int, int]:
    """``value`` of quantization_config, the output and input channels that share a scale."""
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise QuantizationError(
            f"quantization_config says {name} {value!r}", expected="[output channels, input channels]", remedy=REMEDY
        )
    return whole(name, value[0]), whole(name, value[1])
