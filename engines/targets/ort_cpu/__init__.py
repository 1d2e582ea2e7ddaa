"""ONNX Runtime on CPU: GroupQueryAttention over in-place KV buffers, block-quantized products.

``LIBRARIES`` enter the fingerprint; ``PASSES`` lower the portable graph, ``KERNEL_PASSES`` among them its linears and
``ATTENTION_PASSES`` attention; ``complete`` adds the kernels of our own that a graph names; ``open_engine`` runs a
bundle.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import onnx_ir as ir

    from engines.bundle import EngineBundle
    from engines.protocol import Engine
    from tapeout.artifact import Artifact

LIBRARIES = ("onnxruntime",)


def __getattr__(name: str) -> Any:
    if name not in ("PASSES", "ATTENTION_PASSES", "KERNEL_PASSES"):
        raise AttributeError(name)
    from engines.passes import (
        block_linears,
        cached_attention,
        embedding,
        greedy_head,
        grouped_query_attention,
        linear_inputs,
        linear_kernels,
        linears,
        logit_positions,
        merge_linears,
        norms,
        prompt_attention,
        rotary_tables,
        silu,
        static_int8_linears,
    )

    attention = (grouped_query_attention, cached_attention, prompt_attention)
    kernels = (static_int8_linears, block_linears, linear_kernels)
    if name != "PASSES":
        return kernels if name == "KERNEL_PASSES" else attention
    return (
        rotary_tables,
        linears,
        merge_linears,
        *attention,
        norms,
        silu,
        logit_positions,
        *kernels,
        greedy_head,
        linear_inputs,
        embedding,
    )


def library() -> Path | None:
    """The kernels of our own, compiled; None where they would not run."""
    from engines.native import compiler, level

    here = level()
    return compiler.library(here) if here else None


def complete(model: ir.Model, folder: Path) -> None:
    """Put into a bundle's folder what its graph needs beside itself."""
    from engines import native

    if native.DOMAIN in {node.domain for node in model.graph.all_nodes()}:
        compiled = library()
        assert compiled is not None  # or no pass would have named its operators
        shutil.copyfile(compiled, folder / native.LIBRARY)


def open_engine(bundle: Artifact[EngineBundle], *, threads: int, slots: int | None) -> Engine:
    from engines.targets.ort_cpu.engine import OrtCpuEngine

    return OrtCpuEngine(bundle, threads=threads, slots=slots)
