"""LoweredGraph: a graph lowered for a compiler, precision and all, before it is compiled for any one device.

Standard operators only, so it also runs on ONNX Runtime: evidence that needs none of the target's hardware.
The folder holds ``model.onnx`` and ``weights.bin``, and the text files of the portable graph.
"""

from __future__ import annotations

from typing import ClassVar

from engines.bundle import LoweredRecord


class LoweredGraph(LoweredRecord):
    noun: ClassVar[str] = "LoweredGraph"
    remedy: ClassVar[str] = "run `tapeout build`"

    bits_per_weight: float  # of the products, scales included
