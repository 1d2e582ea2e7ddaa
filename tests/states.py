"""State of layers, as tests make and read it."""

from __future__ import annotations

from engines.bundle import IOContract
from tapeout.state import Paged, StateTensor


def attention(layer: int, heads: int, head_size: int, dtype: str, value_size: int = 0) -> Paged:
    """Keys and values of a layer of a dense decoder. ``value_size``: 0: as ``head_size``."""
    sizes = {"key": head_size, "value": value_size or head_size}
    tensors = (StateTensor(name=name, shape=(heads, size), dtype=dtype) for name, size in sizes.items())
    return Paged(layer=layer, tensors=tuple(tensors))


def attention_state(layers: int, heads: int, head_size: int) -> tuple[Paged, ...]:
    """Of a dense decoder, in float."""
    return tuple(attention(layer, heads, head_size, "float32") for layer in range(layers))


def kv_dtype(io: IOContract) -> str:
    """The one type of all keys and values."""
    (dtype,) = {tensor.dtype for state in io.state for tensor in state.tensors}
    return dtype
