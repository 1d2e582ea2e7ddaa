"""Checkpoints that others quantized, as float tensors: the reference of a run is then what these codes stand for.

Read are AutoAWQ (``gemm``), compressed-tensors (``pack-quantized``, ``int-quantized``, ``float-quantized``,
``naive-quantized``) and block-scaled FP8 (``weight_scale_inv``). Scales of activations and of the KV cache are left
out: this run finds its own. What each stores is in :mod:`quantization.stored`, which checks it before it is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from quantization import autoawq
from quantization.stored import FLOATS, REMEDY, Declared, Parts, Stored, check, quantized_modules, whole
from tapeout.errors import QuantizationError
from tapeout.formats import formats
from tapeout.integers import Integers

LAYOUTS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
MIXED = "mixed-precision"  # every group of config_groups names its own
SCALE_FORMATS = (None, "float", "ue8m0")  # of block-scaled FP8
# Of activations and of the KV cache; none of them is a weight.
LEFT_OUT = re.compile(r"\.(input|output|[kqv])_(scale|zero_point)$")


def describe(config: Mapping[str, Any]) -> str:
    """A line for the record.

    >>> describe({"quant_method": "awq", "bits": 4, "group_size": 128})
    'awq, 4 bits, groups of 128'
    """
    parts = [str(config.get("quant_method", "compressed-tensors"))]
    if "format" in config:
        parts.append(str(config["format"]))
    if "bits" in config:
        parts.append(f"{config['bits']} bits")
    if "group_size" in config:
        parts.append(f"groups of {config['group_size']}")
    return ", ".join(parts)


Read = Callable[[], torch.Tensor]


def dequantized(stored: Mapping[str, Stored], config: Any, *, tied: bool) -> dict[str, Read]:
    """By name of the parameter, what reads it: quantized ones in float32, others as they are stored.

    So one tensor at a time is in memory. :class:`QuantizationError` for what is read in no way, and for tensors that
    are missing, left over or do not fit. ``tied``: lm_head shares the embedding, and may repeat its scales.
    """
    method = _method(config)
    if method is None:
        raise QuantizationError(
            f"the checkpoint is quantized by {_shown(config)}",
            expected="float weights, AutoAWQ (gemm), compressed-tensors or block-scaled FP8",
            remedy="take the float checkpoint that it was made from, or dequantize it with the library that wrote it",
        )
    declare, read = method
    weights = {name: tensor for name, tensor in stored.items() if not LEFT_OUT.search(name)}
    if tied:
        _drop_repeated_scales(weights)
    found: dict[str, Read] = {}
    for module, parts in quantized_modules(weights).items():
        declared = declare(module, config)
        shape = check(module, parts, declared)
        found[f"{module}.weight"] = partial(read, module, parts, declared, shape)
        for part in parts:
            del weights[f"{module}.{part}"]
    if codes := [f"{name} ({tensor.dtype})" for name, tensor in weights.items() if tensor.dtype not in FLOATS]:
        raise QuantizationError(
            f"{len(codes)} tensors belong to no quantized weight: {', '.join(codes[:3])}",
            expected="the codes and the scales of every quantized weight",
            remedy=REMEDY,
        )
    return found | {name: tensor.read for name, tensor in weights.items()}


Shape = tuple[int, int]
Method = tuple[
    Callable[[str, Mapping[str, Any]], Declared],  # of a module, by quantization_config
    Callable[[str, Parts, Declared, Shape], torch.Tensor],  # reads its weight
]


def _method(config: Any) -> Method | None:
    if not isinstance(config, Mapping):
        return None
    name = config.get("quant_method")
    if name == "awq" and config.get("bits") == 4 and str(config.get("version", "gemm")).lower() == "gemm":
        return _awq_declared, _read_awq
    if name == "fp8" and config.get("fmt", "e4m3") == "e4m3" and config.get("scale_fmt") in SCALE_FORMATS:
        return _fp8_declared, _read_fp8
    sparse = (config.get("sparsity_config") or {}).get("format", "dense") != "dense"
    plain = config.get("format") in (*LAYOUTS, MIXED) and not config.get("transform_config") and not sparse
    return (_compressed_declared, _read_compressed) if name in ("compressed-tensors", None) and plain else None


def _shown(config: Any) -> str:
    if not isinstance(config, Mapping):
        return repr(config)
    names = ("quant_method", "bits", "version", "format", "fmt", "scale_fmt", "transform_config", "sparsity_config")
    return ", ".join(f"{name} {config[name]}" for name in names if config.get(name)) or "an unknown method"


def _awq_declared(module: str, config: Mapping[str, Any]) -> Declared:
    """AutoAWQ's default is groups of 128."""
    size = config.get("group_size", 128)
    group = None if size == -1 else whole("group_size", size)
    return Declared("awq", "group", (1, group), bits=4)


def _read_awq(module: str, parts: Parts, declared: Declared, shape: Shape) -> torch.Tensor:
    tensors = {name: part.read() for name, part in parts.items()}
    tensors["scales"] = _scales(module, "scales", parts)
    linear = autoawq.decode({name: tensor.numpy() for name, tensor in tensors.items()})
    return torch.from_numpy(linear.dequantize())


def _fp8_declared(module: str, config: Mapping[str, Any]) -> Declared:
    ue8m0 = config.get("scale_fmt") == "ue8m0"
    if config.get("weight_block_size") is None:
        return Declared("fp8", "tensor", ue8m0=ue8m0)
    return Declared("fp8", "block", _block("weight_block_size", config["weight_block_size"]), ue8m0=ue8m0)


def _read_fp8(module: str, parts: Parts, declared: Declared, shape: Shape) -> torch.Tensor:
    scales = _scales(module, "weight_scale_inv", parts)
    return parts["weight"].read().float().mul_(_spread(scales, declared, shape))


def _compressed_declared(module: str, config: Mapping[str, Any]) -> Declared:
    """What is not said has the defaults of compressed-tensors."""
    group, weights = _group_of(module, config)
    layout, kind = group.get("format") or config["format"], weights.get("type", "int")
    if layout not in LAYOUTS:
        raise QuantizationError(
            f"quantization_config says that the weight of {module} is stored in {layout}",
            expected=f"one of {', '.join(LAYOUTS)}",
            remedy=REMEDY,
        )
    if layout == "naive-quantized":
        layout = f"{kind}-quantized"
    if kind not in ("int", "float") or (kind == "float") != (layout == "float-quantized"):
        raise QuantizationError(
            f"quantization_config says that the weight of {module} has codes of type {kind} in {layout}",
            expected="type float in float-quantized, type int elsewhere",
            remedy=REMEDY,
        )
    size = weights.get("group_size")
    strategy = weights.get("strategy") or ("tensor" if size is None else "channel" if size == -1 else "group")
    blocks = {
        "tensor": lambda: (None, None),
        "channel": lambda: (1, None),
        "group": lambda: (1, whole("group_size", size)),
        "block": lambda: _block("block_structure", weights.get("block_structure")),
    }
    if strategy not in blocks:
        raise QuantizationError(
            f"quantization_config says one scale per {strategy} for the weight of {module}",
            expected=f"one of {', '.join(blocks)}",
            remedy=REMEDY,
        )
    return Declared(
        layout,
        strategy,
        blocks[strategy](),
        bits=whole("num_bits", weights.get("num_bits", 8)),
        symmetric=bool(weights.get("symmetric", True)),
        sorted=weights.get("actorder") in ("group", "dynamic", True),
    )


def _read_compressed(module: str, parts: Parts, declared: Declared, shape: Shape) -> torch.Tensor:
    rows, columns = shape
    scales = _scales(module, "weight_scale", parts)
    zeros = parts["weight_zero_point"].read() if "weight_zero_point" in parts else None
    if "weight_packed" in parts:
        packing = next(
            (f for f in formats().values() if isinstance(f, Integers) and f.grouped and f.bits == declared.bits), None
        )
        if packing is None:
            raise QuantizationError(
                f"{module} is packed in {declared.bits} bits",
                expected="4, 5, 6 or 8 bits",
                remedy="take the float checkpoint that it was made from",
            )
        codes = _tensor(packing.codes(parts["weight_packed"].read().numpy(), columns))
        if zeros is not None:
            zeros = _tensor(packing.codes(np.ascontiguousarray(zeros.numpy().T), rows).T)
        offset = torch.tensor([[float(1 << (declared.bits - 1))]]) if zeros is None else zeros
    else:
        codes = parts["weight"].read().float()
        offset = torch.zeros(1, 1) if zeros is None else zeros.float()
    order = _order(module, parts["weight_g_idx"].read(), scales) if "weight_g_idx" in parts else None
    codes.sub_(_spread(offset, declared, shape, order))
    return codes.mul_(_spread(scales, declared, shape, order))


def _tensor(codes: Any) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(codes).astype(np.float32))


def _scales(module: str, part: str, parts: Parts) -> torch.Tensor:
    """In float32, which holds every scale that the table allows exactly."""
    stored: torch.Tensor = parts[part].read()
    exponents = stored.dtype == torch.uint8
    scales = (stored.view(torch.float8_e8m0fnu) if exponents else stored).float()
    if not bool(torch.isfinite(scales).all()):
        raise QuantizationError(
            f"{module}.{part} ({parts[part].dtype} {list(parts[part].shape)}) holds scales that are not finite",
            expected="finite scales; code 255 of F8_E8M0 is NaN",
            remedy="choose another checkpoint: this one is damaged",
        )
    return scales


def _order(module: str, groups: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The group of every input channel."""
    if int(groups.min()) < 0 or int(groups.max()) >= scales.shape[1]:
        raise QuantizationError(
            f"{module}.weight_g_idx names groups {int(groups.min())} to {int(groups.max())}",
            expected=f"groups 0 to {scales.shape[1] - 1}, as {module}.weight_scale has",
            remedy=REMEDY,
        )
    return groups.long()


def _spread(values: torch.Tensor, declared: Declared, shape: Shape, order: torch.Tensor | None = None) -> torch.Tensor:
    """A value for every weight, or for every row, from one per tensor, output channel, group or block.

    ``order``: the group of every input channel, where the channels of a group are not neighbours.
    """
    values = values.reshape(-1, 1) if values.dim() < 2 else values
    if order is not None and values.shape[1] > 1:
        values = values[:, order]
    for axis, (size, block) in enumerate(zip(shape, declared.block, strict=True)):
        if block is not None and values.shape[axis] not in (1, size):
            values = values.repeat_interleave(block, axis).narrow(axis, 0, size)
    return values


def _block(name: str, value: Any) -> Shape:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise QuantizationError(
            f"quantization_config says {name} {value!r}", expected="[output channels, input channels]", remedy=REMEDY
        )
    return whole(name, value[0]), whole(name, value[1])


def _group_of(module: str, config: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The one of ``config_groups`` that says how the weight of a module is stored, and its arguments of weights."""
    for group in (config.get("config_groups") or {}).values():
        for target in group.get("targets", ()):
            pattern = target.removeprefix("re:")
            named = re.match(pattern, module) if target != pattern else module.endswith(target)
            if (named or target == "Linear") and group.get("weights"):
                return group, group["weights"]
    raise QuantizationError(
        f"quantization_config does not say how the weight of {module} is stored",
        expected="a group of config_groups whose targets match it",
        remedy="complete config.json",
    )


def _drop_repeated_scales(weights: dict[str, Stored]) -> None:
    """A tied lm_head has no weight of its own, and repeats the scales of the embedding."""
    modules = quantized_modules(weights)
    scales = {module: parts["weight_scale"] for module, parts in modules.items() if "weight_scale" in parts}
    for module in [module for module in scales if list(modules[module]) == ["weight_scale"]]:
        if any(_same(scales[module], scales[other]) for other in scales if "embed" in other or "wte" in other):
            del weights[f"{module}.weight_scale"]


def _same(one: Stored, other: Stored) -> bool:
    alike = one is not other and (one.dtype, tuple(one.shape)) == (other.dtype, tuple(other.shape))
    return alike and torch.equal(one.read().view(torch.uint8), other.read().view(torch.uint8))
