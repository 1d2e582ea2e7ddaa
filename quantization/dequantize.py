"""Checkpoints that others quantized, as float tensors: the reference of a run is then what these codes stand for.

Read are AutoAWQ (``gemm``), compressed-tensors (``pack-quantized``, ``int-quantized``, ``float-quantized``,
``naive-quantized``) and block-scaled FP8 (``weight_scale_inv``). Scales of activations and of the KV cache are left
out: this run finds its own.

Shapes: N output channels, K input channels, G groups of input channels.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from quantization import autoawq
from quantization.formats import Packed, formats
from tapeout.errors import QuantizationError

LAYOUTS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision")
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
# Of activations and of the KV cache, and how a packed weight was sorted; none of them is a weight.
LEFT_OUT = re.compile(r"\.(input|output|[kqv])_(scale|zero_point)$")
PARTS = ("weight_packed", "weight_scale", "weight_scale_inv", "weight_shape", "weight_zero_point", "weight_g_idx")
REMEDY = "take the float checkpoint that it was made from"


class Stored(Protocol):
    """A tensor in a file; ``dtype`` as safetensors names it."""

    @property
    def dtype(self) -> str: ...

    def read(self) -> torch.Tensor: ...


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

    So one tensor at a time is in memory. :class:`QuantizationError` for what is read in no way; where parts do not fit
    together, when that tensor is read. ``tied``: lm_head shares the embedding, and may repeat its scales.
    """
    method = _method(config)
    if method is None:
        raise QuantizationError(
            f"the checkpoint is quantized by {_shown(config)}",
            expected="float weights, AutoAWQ (gemm), compressed-tensors or block-scaled FP8",
            remedy=f"{REMEDY}, or dequantize it with the library that wrote it",
        )
    left = dict(stored)
    found = method(left, config)
    if tied:
        _drop_repeated_scales(left, stored)
    left = {name: tensor for name, tensor in left.items() if not LEFT_OUT.search(name)}
    codes = [f"{name} ({tensor.dtype})" for name, tensor in left.items() if tensor.dtype not in FLOATS]
    codes += [name for name in left if name.rpartition(".")[2] in (*PARTS, "qweight", "qzeros", "scales", "g_idx")]
    if codes:
        raise QuantizationError(
            f"{len(codes)} tensors belong to no quantized weight: {', '.join(codes[:3])}",
            expected="the codes and the scales of every quantized weight",
            remedy="complete the checkpoint",
        )
    return found | {name: tensor.read for name, tensor in left.items()}


Left = dict[str, Stored]  # tensors that no parameter is made of yet
Parts = Mapping[str, Stored]  # of one weight


def _method(config: Any) -> Callable[[Left, Mapping[str, Any]], dict[str, Read]] | None:
    if not isinstance(config, Mapping):
        return None
    name = config.get("quant_method")
    if name == "awq" and config.get("bits") == 4 and str(config.get("version", "gemm")).lower() == "gemm":
        return _awq
    if name == "fp8" and config.get("fmt", "e4m3") == "e4m3":
        return _fp8
    sparse = (config.get("sparsity_config") or {}).get("format", "dense") != "dense"
    plain = config.get("format") in LAYOUTS and not config.get("transform_config") and not sparse
    return _compressed if name in ("compressed-tensors", None) and plain else None


def _shown(config: Any) -> str:
    if not isinstance(config, Mapping):
        return repr(config)
    names = ("quant_method", "bits", "version", "format", "fmt", "transform_config", "sparsity_config")
    return ", ".join(f"{name} {config[name]}" for name in names if config.get(name)) or "an unknown method"


def _awq(left: Left, config: Mapping[str, Any]) -> dict[str, Read]:
    """Every linear of AutoAWQ's layout (quantization/autoawq.py); its scales may be of any float type."""

    def read(module: str, parts: Parts) -> torch.Tensor:
        tensors = {name: part.read() for name, part in parts.items()}
        tensors["scales"] = tensors["scales"].float()
        linear = autoawq.decode({name: tensor.numpy() for name, tensor in tensors.items()}, module)
        return torch.from_numpy(linear.dequantize())

    modules = [name.removesuffix(".qweight") for name in left if name.endswith(".qweight")]
    return {f"{module}.weight": partial(read, module, _parts(left, module, autoawq.PARTS)) for module in modules}


def _fp8(left: Left, config: Mapping[str, Any]) -> dict[str, Read]:
    """``weight`` float8 [N, K] and ``weight_scale_inv`` for blocks of it; blocks at the ends may be smaller."""

    def read(module: str, parts: Parts) -> torch.Tensor:
        weight, scale = (parts[name].read().float() for name in ("weight", "weight_scale_inv"))
        return weight.mul_(_spread(scale, weight, config.get("weight_block_size"), module))

    names = ("weight", "weight_scale_inv")
    modules = [name.removesuffix(".weight_scale_inv") for name in left if name.endswith(".weight_scale_inv")]
    return {f"{module}.weight": partial(read, module, _parts(left, module, names)) for module in modules}


def _compressed(left: Left, config: Mapping[str, Any]) -> dict[str, Read]:
    found: dict[str, Read] = {}
    for name in [name for name in left if name.endswith(".weight_scale")]:
        module = name.removesuffix(".weight_scale")
        if f"{module}.weight_packed" not in left and f"{module}.weight" not in left:
            continue  # of a tied lm_head
        codes = ("weight_packed", "weight_shape") if f"{module}.weight_packed" in left else ("weight",)
        optional = [part for part in ("weight_zero_point", "weight_g_idx") if f"{module}.{part}" in left]
        parts = _parts(left, module, ("weight_scale", *codes, *optional))
        found[f"{module}.weight"] = partial(_read_compressed, module, parts, _weights_of(module, config))
    return found


def _read_compressed(module: str, parts: Parts, weights: Mapping[str, Any]) -> torch.Tensor:
    """``weights``: the arguments that the codes were made with."""
    scale = parts["weight_scale"].read().float()
    zeros = parts["weight_zero_point"].read() if "weight_zero_point" in parts else None
    if "weight_packed" in parts:
        words, shape = parts["weight_packed"].read(), parts["weight_shape"].read()
        bits, (rows, columns) = int(weights["num_bits"]), (int(n) for n in shape)
        packing = next((f for f in formats().values() if isinstance(f, Packed) and f.bits == bits), None)
        if packing is None or tuple(words.shape) != (rows, packing.words_of(columns)):
            raise _unfit(f"{module} in {bits} bits", words, shape)
        codes = _tensor(packing.codes(words.numpy(), columns))
        if zeros is not None:
            zeros = _tensor(packing.codes(np.ascontiguousarray(zeros.numpy().T), rows).T)
        offset = torch.tensor(float(1 << (bits - 1))) if zeros is None else zeros
    else:
        codes = parts["weight"].read().float()
        offset = torch.zeros(()) if zeros is None else zeros.float()
    order = parts["weight_g_idx"].read() if "weight_g_idx" in parts else None
    block = weights.get("block_structure")
    codes.sub_(_spread(offset, codes, block, module, order))
    return codes.mul_(_spread(scale, codes, block, module, order))


def _tensor(codes: Any) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(codes).astype(np.float32))


def _spread(
    scale: torch.Tensor,
    weight: torch.Tensor,
    block: Sequence[int] | None,
    module: str,
    order: torch.Tensor | None = None,
) -> torch.Tensor:
    """A scale for every weight, from one per tensor, output channel, group of input channels, or block.

    ``order``: the group of every input channel, where they are no neighbours.
    """
    rows, columns = weight.shape
    if scale.numel() == 1:
        return scale.reshape(1, 1)
    if scale.dim() == 1:
        scale = scale[:, None]
    if block is not None:
        scale = scale.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    elif order is not None:
        scale = scale[:, order.long()]
    elif columns % scale.shape[1] == 0:
        scale = scale.repeat_interleave(columns // scale.shape[1], 1)
    if tuple(scale.shape) != (rows, columns):
        raise _unfit(module, weight, scale)
    return scale


def _weights_of(module: str, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """How ``config_groups`` say that the weight of a module is stored."""
    for group in (config.get("config_groups") or {}).values():
        for target in group.get("targets", ()):
            pattern = target.removeprefix("re:")
            named = re.match(pattern, module) if target != pattern else module.endswith(target)
            if (named or target == "Linear") and group.get("weights"):
                return group["weights"]
    raise QuantizationError(
        f"quantization_config does not say how the weight of {module} is stored",
        expected="a group of config_groups whose targets match it",
        remedy="complete config.json",
    )


def _parts(left: Left, module: str, names: Iterable[str]) -> Parts:
    """Taken out of ``left``."""
    if absent := next((name for name in names if f"{module}.{name}" not in left), None):
        raise QuantizationError(
            f"no {module}.{absent}, which its other tensors need",
            expected="the codes and the scales of every quantized weight",
            remedy="complete the checkpoint",
        )
    return {name: left.pop(f"{module}.{name}") for name in names}


def _drop_repeated_scales(left: Left, stored: Mapping[str, Stored]) -> None:
    """A tied lm_head has no weight of its own, and repeats the scales of the embedding."""
    for name in [name for name in left if name.endswith(".weight_scale")]:
        scales = left[name].read()
        twins = [other for other in stored if other.endswith(".weight_scale") and other != name]
        if any(torch.equal(scales, stored[other].read()) for other in twins if "embed" in other or "wte" in other):
            del left[name]


def _unfit(what: str, *tensors: torch.Tensor) -> QuantizationError:
    shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors)
    return QuantizationError(
        f"the tensors of {what} do not fit together: {shapes}",
        expected="codes and scales of one weight",
        remedy="complete the checkpoint, or restore its quantization_config",
    )
