"""Sound checkpoints of every quantized format that is read, with the weights that they stand for.

All scales are powers of two, which every type of scales holds exactly. So a scale in another type is the same scale.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from quantization.checkpoint_formats import autoawq
from tapeout.formats import formats
from tapeout.formats.mxfp4 import VALUES
from tapeout.integers import Integers
from tests import checkpoints
from tests.checkpoints import CONFIG, WEIGHTS, Tensors, change_json

Linear = tuple[dict[str, torch.Tensor], torch.Tensor]  # the parts of a module, and its weight
E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu


@dataclass(frozen=True)
class Example:
    """``store``: a weight of a shape with random codes; ``stored``: what the names of such weights end with."""

    config: Mapping[str, Any]
    store: Callable[..., Linear]
    family: str = "llama"
    stored: tuple[str, ...] = ("proj.weight",)

    def write(self, folder: Path) -> tuple[Tensors, Tensors]:
        """What a checkpoint of the family stores, and the weights by name."""
        return self.store_in(checkpoints.checkpoint(folder, self.family))

    def store_in(self, folder: Path) -> tuple[Tensors, Tensors]:
        """The same of a float checkpoint, which is changed."""
        generator, weights = np.random.default_rng(0), load_file(folder / WEIGHTS)
        stored = dict(weights)
        for name in [name for name in weights if name.endswith(self.stored)]:
            parts, weights[name] = self.store(generator, *stored.pop(name).shape)
            stored |= {f"{name.removesuffix('weight')}{part}": tensor.contiguous() for part, tensor in parts.items()}
        save_file(stored, folder / WEIGHTS)
        change_json(folder / CONFIG, quantization_config=dict(self.config))
        return stored, weights


def exponents(generator: np.random.Generator, *shape: int) -> torch.Tensor:
    """Codes of F8_E8M0: scales of 2^-6 to 2^6."""
    return torch.from_numpy(generator.integers(121, 134, shape, np.uint8))


def scales(generator: np.random.Generator, *shape: int) -> torch.Tensor:
    return exponents(generator, *shape).view(E8M0).float()


def spread(values: torch.Tensor, rows: int, columns: int, block: tuple[int, int]) -> torch.Tensor:
    return values.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]


def float8(generator: np.random.Generator, rows: int, columns: int) -> torch.Tensor:
    return torch.from_numpy(generator.standard_normal((rows, columns), np.float32)).to(E4M3)


def fp8(*, block: tuple[int, int] | None, kind: torch.dtype, scale_fmt: str | None = None) -> Example:
    def store(generator: np.random.Generator, rows: int, columns: int) -> Linear:
        weight = float8(generator, rows, columns)
        down, across = block or (rows, columns)
        codes = exponents(generator, -(-rows // down), -(-columns // across))
        scale = codes.view(E8M0).float()
        stored = codes if kind == torch.uint8 else codes.view(E8M0) if kind == E8M0 else scale.to(kind)
        parts = {"weight": weight, "weight_scale_inv": stored if block else stored.reshape(())}
        return parts, weight.float() * spread(scale, rows, columns, (down, across))

    config = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(block) if block else None}
    return Example(config | ({"scale_fmt": scale_fmt} if scale_fmt else {}), store)


def awq(group: int) -> Example:
    def store(generator: np.random.Generator, rows: int, columns: int) -> Linear:
        codes = generator.integers(0, 16, (columns, rows), np.uint8)
        zeros = generator.integers(0, 16, (columns // group, rows), np.uint8)
        scale = scales(generator, columns // group, rows)
        levels = torch.from_numpy(codes.astype(np.float32) - zeros.repeat(group, 0))
        qweight, qzeros = (torch.from_numpy(autoawq.words(values)) for values in (codes, zeros))
        parts = {"qweight": qweight, "qzeros": qzeros, "scales": scale.half()}
        return parts, (levels * scale.repeat_interleave(group, 0)).T.contiguous()

    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return Example(config, store)


def compressed(layout: str, weights: Mapping[str, Any]) -> Example:
    """``weights``: the arguments in config_groups."""
    bits, symmetric = weights["num_bits"], weights["symmetric"]

    def store(generator: np.random.Generator, rows: int, columns: int) -> Linear:
        down, across = {
            "tensor": (rows, columns),
            "channel": (1, columns),
            "group": (1, weights.get("group_size")),
            "block": tuple(weights.get("block_structure", ())),
        }[weights["strategy"]]
        grid = (-(-rows // down), -(-columns // across))
        scale, order = scales(generator, *grid), np.arange(columns) // across
        parts = {"weight_scale": scale.reshape(1) if weights["strategy"] == "tensor" else scale.bfloat16()}
        if weights.get("actorder") == "group":
            order = generator.permutation(order)
            parts["weight_g_idx"] = torch.from_numpy(order.astype(np.int32))

        def each(values: Any) -> torch.Tensor:
            return torch.as_tensor(values).repeat_interleave(down, 0)[:rows][:, torch.from_numpy(order)]

        if weights["type"] == "float":
            parts["weight"] = float8(generator, rows, columns)
            return parts, parts["weight"].float() * each(scale)
        middle = 1 << (bits - 1)
        codes = generator.integers(0, 2 * middle, (rows, columns), np.uint8)
        zeros = generator.integers(0, 2 * middle, grid, np.uint8)
        if layout == "pack-quantized":
            packing = formats()[f"int{bits}"]
            assert isinstance(packing, Integers)
            parts["weight_packed"] = torch.from_numpy(packing.words(codes))
            parts["weight_shape"] = torch.tensor([rows, columns])
            packed_zeros = torch.from_numpy(packing.words(np.ascontiguousarray(zeros.T)).T)
        else:
            parts["weight"] = (torch.from_numpy(codes).int() - middle).to(torch.int8)
            packed_zeros = (torch.from_numpy(zeros).int() - middle).to(torch.int8)
        if not symmetric:
            parts["weight_zero_point"] = packed_zeros
        levels = torch.from_numpy(codes).float() - (middle if symmetric else each(zeros).float())
        return parts, levels * each(scale)

    group = {"targets": ["Linear"], "weights": dict(weights)}
    return Example(
        {
            "quant_method": "compressed-tensors",
            "format": layout,
            "config_groups": {"group_0": group},
            "ignore": ["lm_head"],
        },
        store,
    )


def mxfp4(generator: np.random.Generator, experts: int, columns: int, rows: int) -> Linear:
    """Of experts, whose weights the model has as ``[experts, K, N]``."""
    codes = generator.integers(0, 16, (experts, rows, columns // 32, 32), np.uint8)
    exponent = torch.from_numpy(generator.integers(118, 124, (experts, rows, columns // 32), np.uint8))
    elements = torch.from_numpy(VALUES)[torch.from_numpy(codes.astype(np.int64))]
    weight = (elements * exponent.view(E8M0).float()[..., None]).reshape(experts, rows, columns)
    parts = {"_blocks": torch.from_numpy(codes[..., ::2] | codes[..., 1::2] << 4), "_scales": exponent}
    return parts, weight.transpose(1, 2).contiguous()


def integers(bits: int, strategy: str, *, symmetric: bool = True, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy, **more}


def floats(strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, **more}


EXAMPLES: Mapping[str, Example] = {
    "fp8": fp8(block=(32, 32), kind=torch.float32),
    "fp8, blocks that end early": fp8(block=(40, 40), kind=torch.bfloat16),
    "fp8, one scale": fp8(block=None, kind=torch.float32),
    "fp8, exponents": fp8(block=(32, 32), kind=E8M0),
    "fp8, exponents as bytes": fp8(block=(32, 32), kind=torch.uint8, scale_fmt="ue8m0"),
    "awq": awq(32),
    "mxfp4 of gpt-oss": Example(
        {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
        mxfp4,
        "gpt_oss",
        ("experts.gate_up_proj", "experts.down_proj"),
    ),
    "packed, asymmetric groups": compressed("pack-quantized", integers(4, "group", symmetric=False, group_size=32)),
    "packed, asymmetric channels": compressed("pack-quantized", integers(5, "channel", symmetric=False)),
    "packed, sorted": compressed("pack-quantized", integers(8, "group", group_size=16, actorder="group")),
    "bytes, channels": compressed("int-quantized", integers(8, "channel")),
    "bytes, asymmetric groups": compressed("int-quantized", integers(8, "group", symmetric=False, group_size=16)),
    "float8, one scale": compressed("float-quantized", floats("tensor")),
    "float8, channels": compressed("naive-quantized", floats("channel")),
    "float8, blocks": compressed("float-quantized", floats("block", block_structure=[32, 32])),
}
