"""LoweredGraph: a graph lowered for a compiler, precision and all, before it is compiled for any one device.

Standard operators only, so it also runs on ONNX Runtime: evidence that needs none of the target's hardware.
The folder holds ``model.onnx`` and ``weights.bin``, and the text files of the portable graph.
"""

from __future__ import annotations

from typing import ClassVar

from engines.bundle import IOContract, PassReport, Product
from pipeline.artifact import Record


class LoweredGraph(Record):
    noun: ClassVar[str] = "LoweredGraph"
    remedy: ClassVar[str] = "run `tapeout build`"

    precision: str  # fp16, bf16, int4 or fp8
    model_name: str
    io: IOContract
    census: dict[str, int]  # operator -> nodes
    passes: tuple[PassReport, ...]
    weight_bytes: int
    bits_per_weight: float  # of the products, scales included
    step_bytes: int  # weights one decode step of one row reads
    plan: dict[str, str]  # linear group -> kernel
    products: tuple[Product, ...]
    stop_tokens: tuple[int, ...]
