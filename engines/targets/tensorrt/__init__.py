"""TensorRT: strongly typed, native attention, rotary and KV-cache-update layers, an engine per compute capability.

One code path over two modules with the same API: ``tensorrt`` where it is installed, and ``tensorrt_rtx_bindings``
(:mod:`engines.targets.tensorrt_rtx`), which compiles for a GPU that is not present.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engines.target import Capabilities, Compilation, HardwareTarget, Passes, Precision
from tapeout.schemes import FLOAT, FP8, Scheme
from tapeout.throughput import Throughput

if TYPE_CHECKING:
    from pathlib import Path

    from engines.bundle import EngineBundle, LoweredGraph
    from engines.protocol import Engine
    from tapeout.artifact import Artifact

# Groups as the compiler's own kernels have them, smaller where a linear's width asks for it. Its documentation allows
# positive scales only.
INT4 = Scheme(bits=4, group_size=64, symmetric=True, positive_scales=True)
PRECISIONS = {
    "fp16": Precision(),
    "bf16": Precision(float_type="bf16"),
    "int4": Precision(weights=INT4),
    # So portable evidence of the default model, on other text, stays within 0.015 and 0.06 (docs/benchmarks/plans.md).
    "fp8": Precision(choices=(FP8, FLOAT), max_kl=0.012),
    "auto": Precision(choices=(INT4, FP8, FLOAT), max_kl=0.06),
}
# Of an RTX 4090, whose compute capability is sm89, by its data sheet: GDDR6X, and dense matmuls with sums in float32.
THROUGHPUT = Throughput(1.008e12, {"float": 165e12, "fp8": 330e12})


class TensorRT(HardwareTarget):
    """A target over one of the modules."""

    def __init__(self, name: str, module: str, libraries: tuple[str, ...]) -> None:
        self.name, self.module = name, module
        self.capabilities = Capabilities(
            libraries,
            kv_dtypes=("float16", "bfloat16"),
            activations=("float", "int8", "fp8"),
            precisions=PRECISIONS,
            operators=("Attention",),
            throughput=THROUGHPUT,
        )

    def passes(self) -> Passes:
        from engines.passes.graph import half_precision, linears, logit_positions, rotary_tables
        from engines.passes.tensorrt import fixed_kv_cache, float_linears, fp8_linears, int4_linears

        # The compiler merges Q/K/V and gate/up: merged here, the engine of a 3-profile build was 25 % larger.
        return Passes(
            (
                rotary_tables,
                linears,
                fixed_kv_cache,
                logit_positions,
                int4_linears,
                fp8_linears,
                float_linears,
                half_precision,
            )
        )

    def features(self) -> tuple[str, ...]:
        """The compute capability of the first GPU, or nothing where there is none."""
        from engines.targets.tensorrt.hardware import capability

        found = capability()
        return () if found is None else (found,)

    def require(self, hardware: str) -> None:
        from engines.targets.tensorrt.compiler import load_module, require_capability

        require_capability(load_module(self.module), hardware)

    def compile(self, lowered: Artifact[LoweredGraph], folder: Path, wanted: Compilation) -> Artifact[EngineBundle]:
        from engines.targets.tensorrt.compiler import compile_bundle

        return compile_bundle(self, lowered, folder, wanted)

    def open(
        self,
        bundle: Artifact[EngineBundle],
        *,
        threads: int,
        slots: int | None,
        snapshots: int | None = None,
        map_experts: bool = False,
    ) -> Engine:
        """``threads`` has no meaning on a GPU and is ignored."""
        from engines.targets.tensorrt.engine import TensorRTEngine

        return TensorRTEngine(self.module, bundle, slots=slots)


TARGET = TensorRT("tensorrt", "tensorrt", ("tensorrt",))
