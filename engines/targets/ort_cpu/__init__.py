"""ONNX Runtime on CPU: GroupQueryAttention over in-place KV buffers, block-quantized products.

``LIBRARIES`` enter the fingerprint; ``PASSES`` lower the portable graph, ``KERNEL_PASSES`` among them its linears;
``open_engine`` runs a bundle.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engines.bundle import EngineBundle
    from engines.protocol import Engine
    from pipeline.artifact import Artifact

LIBRARIES = ("onnxruntime",)


def __getattr__(name: str) -> Any:
    if name not in ("PASSES", "KERNEL_PASSES"):
        raise AttributeError(name)
    from engines.passes import (
        embedding,
        grouped_query_attention,
        linear_kernels,
        linears,
        logit_rows,
        merge_linears,
        next_tokens,
        norms,
        prompt_attention,
        rotary_tables,
        silu,
        static_int8_linears,
    )

    kernels = (static_int8_linears, linear_kernels)
    if name == "KERNEL_PASSES":
        return kernels
    return (
        rotary_tables,
        linears,
        merge_linears,
        grouped_query_attention,
        prompt_attention,
        norms,
        silu,
        logit_rows,
        next_tokens,
        *kernels,
        embedding,
    )


def open_engine(bundle: Artifact[EngineBundle], *, threads: int, slots: int | None) -> Engine:
    from engines.targets.ort_cpu.engine import OrtCpuEngine

    return OrtCpuEngine(bundle, threads=threads, slots=slots)
