"""ONNX Runtime on CPU: attention over KV buffers that are updated in place, linears over block-quantized weights.

Native kernels run where the processor allows, ONNX Runtime's own operators elsewhere.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from engines.target import Capabilities, GraphTarget, Passes

if TYPE_CHECKING:
    import onnx_ir as ir

    from engines.bundle import EngineBundle, LoweredRecord
    from engines.passes.base import Pass
    from engines.protocol import Engine
    from engines.target import Probe, Timer
    from tapeout.artifact import Artifact


def library() -> Path | None:
    """The native kernels, compiled; None where they cannot run."""
    from engines.native import compiler, level

    here = level()
    return compiler.library(here) if here else None


class OrtCpu(GraphTarget):
    name = "ort-cpu"
    capabilities = Capabilities(
        libraries=("onnxruntime",),
        kv_dtypes=("float32", "int8", "int4"),
        parity_probe=True,
        int8_activations=True,
        timed=True,
    )

    def passes(self) -> Passes:
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

        attention: tuple[Pass, ...] = (grouped_query_attention, cached_attention, prompt_attention)
        kernels: tuple[Pass, ...] = (static_int8_linears, block_linears, linear_kernels)
        return Passes(
            (
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
            ),
            attention=attention,
            linears=kernels,
        )

    def complete(self, lowered: LoweredRecord, model: ir.Model, folder: Path) -> EngineBundle:
        """Adds the library of native kernels where the graph uses one."""
        from engines import native

        if native.DOMAIN in {node.domain for node in model.graph.all_nodes()}:
            compiled = library()
            assert compiled is not None  # or no pass would have used its operators
            shutil.copyfile(compiled, folder / native.LIBRARY)
        return super().complete(lowered, model, folder)

    def open(self, bundle: Artifact[EngineBundle], *, threads: int, slots: int | None) -> Engine:
        from engines.bundle import BLOCK_TOKENS
        from engines.targets.ort_cpu.paged_engine import PagedEngine
        from engines.targets.ort_cpu.slot_engine import OrtSlotEngine

        io = bundle.record.io
        slots = slots or io.slots
        if not io.paged:
            return OrtSlotEngine(bundle, threads=threads, slots=slots)
        return PagedEngine(bundle, threads=threads, blocks=slots * -(-io.max_tokens // BLOCK_TOKENS))

    def probe(self, bundle: Artifact[EngineBundle], *, threads: int) -> Probe:
        from engines.probe import OrtProbe

        return OrtProbe(bundle, threads=threads)

    def timer(self, model: ir.Model, threads: int) -> Timer:
        from engines.sessions import SessionTimer

        return SessionTimer(model, threads, library())

    def kernels(self) -> str:
        compiled = library()
        return "" if compiled is None else compiled.parent.name


TARGET = OrtCpu()
