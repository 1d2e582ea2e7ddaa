"""Write a quantized model in formats that others load: AutoAWQ, compressed-tensors, GGUF (docs/formats.md).

Nothing is rounded again: every weight in the file has the value that it has in the QuantizedModel, bit for bit. What a
format cannot hold is refused, or, where asked, stored in more bits.

A module is all that is known of one format: its layout, where it puts a parameter, and how weights are written and read
back. GGUF files are read by the gguf package (``pipeline/export/gguf.py``).
"""

from __future__ import annotations

from dataclasses import dataclass

from quantization.checkpoint_formats.experts import ExpertPart
from tapeout.schemes import FLOAT, Scheme

FLOAT_STORED = "float"  # as ParameterPlace.stored


@dataclass(frozen=True)
class Parameter:
    """``unit``: what a recipe's rules call the linears that are quantized together; empty for other parameters.

    ``half_scales``: every scale is a float16 number. ``of``: where a linear of one expert lies. ``shared``: what all
    experts of its layer can be stored in, where they differ in bits.
    """

    name: str
    shape: tuple[int, ...]
    scheme: Scheme = FLOAT
    unit: str = ""
    embedding: bool = False  # or lm_head
    half_scales: bool = True
    of: ExpertPart | None = None
    shared: Scheme | None = None

    @property
    def module(self) -> str:
        return self.name.removesuffix(".weight")


@dataclass(frozen=True)
class ParameterPlace:
    """``stored``: how, in the format's own words. ``reason``: why it takes more bits than in the plan; empty: it does
    not.
    """

    parameter: Parameter
    stored: str
    reason: str = ""
