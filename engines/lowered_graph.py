"""LoweredGraph: a graph lowered for a compiler, precision and all, before it is compiled for any one device.

It has standard operators only, so ONNX Runtime can run it: that is evidence without the target's hardware.
The folder holds ``model.onnx``, ``weights.bin`` and the text files of the portable graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from engines.bundle import LoweredRecord

if TYPE_CHECKING:
    import onnx_ir as ir


class LoweredGraph(LoweredRecord):
    artifact_type: ClassVar[str] = "LoweredGraph"
    schema_version: ClassVar[int] = 3  # 3: kinds of state of a layer, instead of KV heads
    remedy: ClassVar[str] = "run `tapeout build`"

    bits_per_weight: float  # of the linears, scales included


def bits_per_weight(model: ir.Model) -> float:
    """Mean bits of a linear's weight, scales included, as the graph stores them."""
    size_bytes = values = 0
    for node in model.graph:
        if node.op_type != "MatMul":
            continue
        parts = [node.inputs[1]]
        while (producer := parts[0].producer() if parts[0] is not None else None) is not None:
            parts = list(producer.inputs)  # through a Transpose and a DequantizeLinear
        tensors = [v.const_value for v in parts if v is not None and v.const_value is not None]
        if tensors:
            size_bytes += sum(tensor.nbytes for tensor in tensors)
            values += tensors[0].size
    return 8 * size_bytes / max(values, 1)
