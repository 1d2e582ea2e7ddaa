"""What a device does at best, as a target declares it: how long linears take where none is at hand to time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tapeout.number_format import Activations


@dataclass(frozen=True)
class Throughput:
    """``operations``: a second, by what inputs are rounded to; a multiplication and an addition are two.

    Inputs that are not in it are computed in float.
    """

    bytes_per_second: float
    operations: Mapping[Activations, float]

    def seconds(self, size_bytes: int, operations: float, activations: Activations = "float") -> float:
        """The longer of reading and computing.

        >>> device = Throughput(1e12, {"float": 1e14, "fp8": 2e14})
        >>> device.seconds(10**9, 1e10), device.seconds(10**6, 1e12, "fp8")
        (0.001, 0.005)
        """
        rate = self.operations.get(activations, self.operations["float"])
        return max(size_bytes / self.bytes_per_second, operations / rate)


# What an H100 was measured to copy, and to compute in bfloat16 and in FP8.
H100 = Throughput(3.0e12, {"float": 790e12, "fp8": 1300e12})
