"""ONNX Runtime's CUDA provider: PagedAttention, MatMulNBits and norms of its own, float16 beside them.

The lowered graph is what runs, so a bundle is built on any machine. It opens where the pinned ``onnxruntime-gpu`` and a
GPU that it has kernels for are.
"""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING

from engines.target import Capabilities, GraphTarget, Passes
from engines.targets.ort_cuda.hardware import PACKAGE, VERSION, capability, require_gpu
from tapeout.fingerprint import Fingerprint
from tapeout.schemes import FLOAT, Scheme
from tapeout.throughput import H100

if TYPE_CHECKING:
    from pathlib import Path

    import onnx_ir as ir

    from engines.bundle import EngineBundle, LoweredRecord
    from engines.protocol import Engine
    from engines.targets.ort_cuda.kernel_set import ProviderOperators
    from tapeout.artifact import Artifact


# Blocks that the provider's fused kernel takes for any number of tokens.
SCHEMES = (FLOAT, *(Scheme(bits=bits, group_size=32, symmetric=True) for bits in (8, 4)))


class OrtCuda(GraphTarget):
    name = "ort-cuda"
    capabilities = Capabilities(
        libraries=(PACKAGE,),
        kv_dtypes=("float16", "int8"),
        float_type="fp16",
        operators=("Attention",),
        ahead_of_time=True,
        schemes=SCHEMES,
        throughput=H100,
    )

    @property
    def kernels(self) -> ProviderOperators:
        from engines.targets.ort_cuda.kernel_set import ProviderOperators

        return ProviderOperators()

    def passes(self) -> Passes:
        from engines.passes.graph import folded, half_precision, linears, logit_positions, merge_linears, rotary_tables
        from engines.passes.onnxruntime import cached_attention, embedding, norms, silu
        from engines.passes.onnxruntime_cuda import nbits_linears, paged_attention

        return Passes(
            (
                rotary_tables,
                folded,
                linears,
                merge_linears,
                cached_attention,
                paged_attention,
                norms,
                silu,
                logit_positions,
                nbits_linears,
                embedding,
                half_precision,
            )
        )

    def features(self) -> tuple[str, ...]:
        """The compute capability of the first GPU, or nothing where there is none."""
        found = capability()
        return () if found is None else (found,)

    def fingerprint(self) -> Fingerprint:
        """:class:`FingerprintError` on a machine that runs no bundle at all: it says more than a comparison would."""
        require_gpu()
        return super().fingerprint()

    def complete(self, lowered: LoweredRecord, model: ir.Model, folder: Path) -> EngineBundle:
        """The provider has kernels for each GPU that it runs on, so a bundle names none."""
        from engines.bundle import EngineBundle

        here = Fingerprint(machine=platform.machine(), features=(), libraries={PACKAGE: VERSION}, more_features=True)
        return EngineBundle(**lowered.fields(), target=self.name, hardware=(here,))

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
        from engines.targets.ort_cuda.engine import CudaPagedEngine

        return CudaPagedEngine(bundle, sequences=slots or bundle.record.io.slots)


TARGET = OrtCuda()
