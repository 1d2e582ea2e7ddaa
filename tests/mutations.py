"""Ways to damage one tensor of a quantized checkpoint, or what its config says of it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st

from quantization.stored import FOREIGN, LAYOUTS
from tests.checkpoints import Tensors
from tests.stored_formats import E4M3, E8M0

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64, E8M0)
BYTES = (torch.uint8, torch.int8, E4M3, torch.float8_e5m2, E8M0)
NAMES = sorted({part.name for layout in LAYOUTS.values() for part in layout.parts} | set(FOREIGN))
Mutation = Callable[[st.DrawFn, Tensors, str, dict[str, Any]], None]


def is_scale(name: str) -> bool:
    return re.search(r"\.(weight_scale|weight_scale_inv|scales)$", name) is not None


def another_type(draw: st.DrawFn, tensors: Tensors, name: str, config: dict[str, Any]) -> None:
    """The same numbers in another type; of exponents as bytes, the scales that they stand for."""
    tensor = tensors[name]
    values = tensor.view(E8M0) if is_scale(name) and tensor.dtype == torch.uint8 else tensor
    kinds = [*FLOATS, torch.float8_e5m2, torch.int8, torch.int16, torch.int32, torch.int64]
    if config.get("scale_fmt") != "ue8m0":  # whose bytes are exponents, whatever they were made from
        kinds.append(torch.uint8)
    values = values.float() if values.is_floating_point() else values
    tensors[name] = values.to(draw(st.sampled_from(kinds)))


def another_type_of_bytes(draw: st.DrawFn, tensors: Tensors, name: str, config: dict[str, Any]) -> None:
    """The same bytes under another type. Of floats of 16 bits nothing but the type says which they are."""
    tensor = tensors[name].reshape(tensors[name].shape or (1,))
    kinds = BYTES if tensor.itemsize == 1 else (torch.int16, torch.uint8, torch.int32)
    kind = draw(st.sampled_from([kind for kind in kinds if kind.itemsize <= tensor.itemsize]))
    tensors[name] = tensor.clone(memory_format=torch.contiguous_format).view(kind)


def cropped(draw: st.DrawFn, tensors: Tensors, name: str, config: dict[str, Any]) -> None:
    tensor = tensors[name]
    if not tensor.dim():
        tensors[name] = tensor.reshape(1)[:0]
        return
    axis = draw(st.integers(0, tensor.dim() - 1))
    tensors[name] = tensor.narrow(axis, 0, draw(st.integers(0, tensor.shape[axis] - 1))).contiguous()


def repeated(draw: st.DrawFn, tensors: Tensors, name: str, config: dict[str, Any]) -> None:
    tensor = tensors[name].reshape(tensors[name].shape or (1,))
    axis, times = draw(st.integers(0, tensor.dim() - 1)), draw(st.integers(2, 3))
    bits = tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor
    tensors[name] = torch.cat([bits] * times, axis).view(tensor.dtype)


def transposed(draw: st.DrawFn, tensors: Tensors, name: str, config: dict[str, Any]) -> None:
    tensor = tensors[name]
    tensors[name] = tensor.T.contiguous() if tensor.dim() == 2 else tensor.reshape(1, -1)


def another_shape(draw: st.DrawFn, tensors: Tensors, name: str, config: dict[str, Any]) -> None:
    tensor = tensors[name]
    shapes = [(tensor.numel(),), (1, tensor.numel()), (tensor.numel(), 1), (*tensor.shape, 1)]
    if tensor.dim() == 2 and tensor.shape[1] % 2 == 0:
        shapes.append((tensor.shape[0] * 2, tensor.shape[1] // 2))
    tensors[name] = tensor.reshape(draw(st.sampled_from(shapes)))


def renamed(draw: st.DrawFn, tensors: Tensors, name: str, config: dict[str, Any]) -> None:
    module, _, part = name.rpartition(".")
    others = [*NAMES, f"{part}s", "input_scale", "k_scale", "bias", f"extra.{part}"]
    tensors[f"{module}.{draw(st.sampled_from([other for other in others if other != part]))}"] = tensors.pop(name)


def missing(draw: st.DrawFn, tensors: Tensors, name: str, config: dict[str, Any]) -> None:
    del tensors[name]


def left_over(draw: st.DrawFn, tensors: Tensors, name: str, config: dict[str, Any]) -> None:
    """A copy of a part, under a name that is free."""
    modules = sorted({name.rpartition(".")[0] for name in tensors} | {"model.layers.1", "model.layers.7.mlp.up_proj"})
    names = [f"{module}.{part}" for module in modules for part in (*NAMES, "input_scale", "weight_zero_points")]
    tensors[draw(st.sampled_from([other for other in names if other not in tensors]))] = tensors[name].clone()


def arguments_of(draw: st.DrawFn, config: dict[str, Any]) -> dict[str, Any]:
    """Of the weights of one group, in formats that have groups."""
    groups = config.get("config_groups")
    return groups[draw(st.sampled_from(sorted(groups)))]["weights"] if groups else config


def another_block(draw: st.DrawFn, tensors: Tensors, name: str, config: dict[str, Any]) -> None:
    """Of blocks that end early only a multiple is tried: 40 and 42 channels cut 64 into as many blocks."""
    arguments = arguments_of(draw, config)
    names = [key for key in ("weight_block_size", "block_structure", "group_size") if arguments.get(key) is not None]
    if not names:
        arguments["group_size" if "config_groups" in config else "weight_block_size"] = draw(
            st.sampled_from([16, 32, -1, [32, 32], [128, 128]])
        )
        return
    old = arguments[names[0]]
    factor = draw(st.sampled_from([0, 0.5, 2, 4, 64, -1]))
    if isinstance(old, list):
        at = draw(st.integers(0, 1))
        new: Any = [int(size * factor) if axis == at else size for axis, size in enumerate(old)]
    else:
        new = int(old * factor)
    arguments[names[0]] = draw(st.sampled_from([new, None, str(new)]))


def another_argument(draw: st.DrawFn, tensors: Tensors, name: str, config: dict[str, Any]) -> None:
    arguments = arguments_of(draw, config)
    key = draw(st.sampled_from(sorted({*arguments, "actorder", "format"} - {"scale_fmt"})))
    values = [None, True, False, 4, 8, "int", "float", "group", "channel", "tensor", "block", *LAYOUTS]
    arguments[key] = draw(st.sampled_from(values))


def another_structure(draw: st.DrawFn, tensors: Tensors, name: str, config: dict[str, Any]) -> None:
    """A value of the config, however deep, is of another kind."""
    places: list[tuple[Any, Any]] = []

    def look(node: Any) -> None:
        for key in list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
            places.append((node, key))
            look(node[key])

    config.setdefault("sparsity_config", None)
    look(config)
    node, key = draw(st.sampled_from(places))
    node[key] = draw(
        st.sampled_from([None, 3, "x", "re:[", [], ["re:["], [3], [["group"]], {}, {"a": 1}, {"a": {"b": []}}])
    )


MUTATIONS: list[Mutation] = [
    another_type,
    another_type_of_bytes,
    cropped,
    repeated,
    transposed,
    another_shape,
    renamed,
    missing,
    left_over,
    another_block,
    another_argument,
    another_structure,
]
