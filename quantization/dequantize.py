"""Checkpoints that others quantized, as float tensors: the reference of a run is then what these codes stand for.

Read are AutoAWQ (``gemm``), compressed-tensors (``pack-quantized``, ``int-quantized``, ``float-quantized``,
``naive-quantized``), block-scaled FP8 (``weight_scale_inv``) and the experts of gpt-oss in MXFP4. Scales of activations
and of the KV cache are left out: this run finds its own. What each stores is in :mod:`quantization.stored`, which
checks it before it is read; how AutoAWQ and compressed-tensors say it is in their modules of
:mod:`quantization.checkpoint_formats`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import numpy as np
import torch

from quantization.checkpoint_formats import autoawq, compressed
from quantization.stored import (
    REMEDY,
    Declared,
    Parts,
    Stored,
    channels_of_block,
    check,
    mapping,
    quantized_modules,
    stored_name,
)
from tapeout.coded_parameters import decoded
from tapeout.errors import QuantizationError
from tapeout.formats.mxfp4 import BLOCK, FORMAT
from tapeout.number_format import AnyArray, Coded, FloatArray, Tensors
from tapeout.tensor_files import FLOATS

MXFP4 = FORMAT.name
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


def keeps_codes(config: Any) -> bool:
    """Whether all that is quantized are parameters that need not be dequantized (tapeout/coded_parameters.py)."""
    return isinstance(config, Mapping) and cast("Mapping[str, Any]", config).get("quant_method") == MXFP4


def dequantized(stored: Mapping[str, Stored], config: Any, *, tied: bool) -> dict[str, Read]:
    """By name of the parameter, what reads it: quantized ones in float32, those of MXFP4 in bfloat16, which holds them
    exactly, others as they are stored.

    So one tensor at a time is in memory. :class:`QuantizationError` for what is read in no way, and for tensors that
    are missing, left over or do not fit. ``tied``: lm_head shares the embedding, and may repeat its scales.
    """
    declare = _method(config)
    if declare is None:
        raise QuantizationError(
            f"the checkpoint is quantized by {_shown(config)}",
            expected="float weights, AutoAWQ (gemm), compressed-tensors, block-scaled FP8 or MXFP4 of gpt-oss",
            remedy="take the float checkpoint that it was made from, or dequantize it with the library that wrote it",
        )
    weights = {name: tensor for name, tensor in stored.items() if not LEFT_OUT.search(name)}
    if tied:
        _drop_repeated_scales(weights)
    found: dict[str, Read] = {}
    for module, parts in quantized_modules(weights).items():
        declared = declare(module, config)
        shape = check(module, parts, declared)
        if declared.layout == MXFP4:
            _array(module, "_scales", parts["_scales"])  # refused here: where codes stay, nobody may read them again
            found[module] = partial(_read_mxfp4, parts)
        else:
            found[f"{module}.weight"] = partial(_read, module, parts, declared, shape)
        for part in parts:
            del weights[stored_name(module, part)]
    if codes := [f"{name} ({tensor.dtype})" for name, tensor in weights.items() if tensor.dtype not in FLOATS]:
        raise QuantizationError(
            f"{len(codes)} tensors belong to no quantized weight: {', '.join(codes[:3])}",
            expected="the codes and the scales of every quantized weight",
            remedy=REMEDY,
        )
    return found | {name: tensor.read for name, tensor in weights.items()}


Shape = tuple[int, int]


def _method(config: Any) -> Callable[[str, Mapping[str, Any]], Declared] | None:
    """What tells from quantization_config how a module is stored; None for a checkpoint that is read in no way."""
    if not isinstance(config, Mapping):
        return None
    name = config.get("quant_method")
    if name == "awq" and config.get("bits") == 4 and str(config.get("version", "gemm")).lower() == "gemm":
        return autoawq.declared
    if name == "fp8" and config.get("fmt", "e4m3") == "e4m3" and config.get("scale_fmt") in SCALE_FORMATS:
        return _fp8_declared
    if name == MXFP4:
        return lambda module, config: Declared(MXFP4, "group", (None, BLOCK))
    sparse = mapping("sparsity_config", config.get("sparsity_config")).get("format", "dense") != "dense"
    plain = config.get("format") in (*compressed.LAYOUTS, MIXED) and not config.get("transform_config") and not sparse
    return compressed.declared if name in ("compressed-tensors", None) and plain else None


def _shown(config: Any) -> str:
    if not isinstance(config, Mapping):
        return repr(config)
    names = ("quant_method", "bits", "version", "format", "fmt", "scale_fmt", "transform_config", "sparsity_config")
    return ", ".join(f"{name} {config[name]}" for name in names if config.get(name)) or "an unknown method"


def _fp8_declared(module: str, config: Mapping[str, Any]) -> Declared:
    ue8m0 = config.get("scale_fmt") == "ue8m0"
    if config.get("weight_block_size") is None:
        return Declared("fp8", "tensor", ue8m0=ue8m0)
    block = channels_of_block("weight_block_size", config["weight_block_size"])
    return Declared("fp8", "block", block, ue8m0=ue8m0)


def _read(module: str, parts: Parts, declared: Declared, shape: Shape) -> torch.Tensor:
    """A weight in float32: its codes, less their zero points, times their scales."""
    tensors = {part: _array(module, part, stored) for part, stored in parts.items()}
    coded = _coded(module, tensors, declared)
    order = _order(module, tensors["weight_g_idx"], coded.scales) if "weight_g_idx" in tensors else None
    weight = coded.codes.astype(np.float32, order="C", copy=False)  # 8-bit floats are float32 already
    if coded.zero_points is not None:
        weight -= _spread(coded.zero_points, declared, shape, order)
    weight *= _spread(coded.scales, declared, shape, order)
    return torch.from_numpy(weight)


def _read_mxfp4(parts: Parts) -> torch.Tensor:
    """``[experts, K, N]`` in bfloat16, as the model has the weights that are stored ``[experts, N, K]``."""
    blocks, scales = (parts[name].read().numpy() for name in ("_blocks", "_scales"))
    return torch.from_numpy(decoded(blocks, scales)).to(torch.bfloat16)


def _array(module: str, part: str, stored: Stored) -> AnyArray:
    """Scales and 8-bit floats in float32, which holds them exactly; other tensors as they are."""
    tensor: torch.Tensor = stored.read()
    if "scale" not in part:
        return (tensor.float() if tensor.is_floating_point() else tensor).numpy()
    scales = (tensor.view(torch.float8_e8m0fnu) if tensor.dtype == torch.uint8 else tensor).float()
    if not bool(torch.isfinite(scales).all()):
        raise QuantizationError(
            f"{stored_name(module, part)} ({stored.dtype} {list(stored.shape)}) holds scales that are not finite",
            expected="finite scales; code 255 of F8_E8M0 is NaN",
            remedy="choose another checkpoint: this one is damaged",
        )
    return scales.numpy()


def _coded(module: str, tensors: Tensors, declared: Declared) -> Coded:
    """Codes without zero points are the levels themselves."""
    match declared.layout:
        case "awq":
            return autoawq.decode(tensors)
        case "pack-quantized":
            return compressed.unpacked(module, tensors, declared)
        case "fp8":
            return Coded(tensors["weight"], tensors["weight_scale_inv"], None)
        case _:
            return Coded(tensors["weight"], tensors["weight_scale"], tensors.get("weight_zero_point"))


def _order(module: str, groups: AnyArray, scales: FloatArray) -> AnyArray:
    """The group of every input channel."""
    if int(groups.min()) < 0 or int(groups.max()) >= scales.shape[1]:
        raise QuantizationError(
            f"{module}.weight_g_idx names groups {int(groups.min())} to {int(groups.max())}",
            expected=f"groups 0 to {scales.shape[1] - 1}, as {module}.weight_scale has",
            remedy=REMEDY,
        )
    return groups


def _spread(values: AnyArray, declared: Declared, shape: Shape, order: AnyArray | None) -> AnyArray:
    """A value for every weight, or for every row, from one per tensor, output channel, group or block.

    ``order``: the group of every input channel, where the channels of a group are not neighbours.
    """
    values = values.reshape(-1, 1) if values.ndim < 2 else values
    if order is not None and values.shape[1] > 1:
        values = values[:, order]
    for axis, (size, block) in enumerate(zip(shape, declared.block, strict=True)):
        if block is not None and values.shape[axis] not in (1, size):
            values = np.repeat(values, block, axis)[: shape[0], : shape[1]]
    return values


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
