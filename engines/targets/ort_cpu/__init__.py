"""ONNX Runtime on CPU with native kernels: attention over a pool of KV blocks, linears over block-quantized weights."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from engines.kernels.cpu.compiler import COMPILER
from engines.target import Capabilities, GraphTarget, Passes
from tapeout.cores import physical_cores
from tapeout.errors import BuildError, FingerprintError
from tapeout.fingerprint import Fingerprint

if TYPE_CHECKING:
    import onnx_ir as ir

    from engines.bundle import EngineBundle, LoweredRecord
    from engines.kernels.cpu import Level
    from engines.kernels.cpu.kernel_set import CpuKernels
    from engines.passes.base import Pass
    from engines.protocol import Engine
    from engines.target import Probe, Timer
    from tapeout.artifact import Artifact


def library() -> Path | None:
    """The native kernels of this machine's level, compiled; None where they cannot run."""
    from engines.kernels.cpu import compiler, level

    here = level()
    return compiler.library(here) if here else None


class OrtCpu(GraphTarget):
    """``level``: of native kernels that bundles carry; None for all."""

    def __init__(self, level: Level | None = None) -> None:
        self._level = level

    name = "ort-cpu"
    capabilities = Capabilities(
        libraries=("onnxruntime",),
        kv_dtypes=("float32", "int8", "int4"),
        recurrent_dtypes=("float32", "bfloat16"),
        compilers=(COMPILER,),
        parity_probe=True,
        int8_activations=True,
        timed=True,
        uneven_heads=True,
        maps_experts=True,
    )

    @property
    def kernels(self) -> CpuKernels:
        from engines.kernels.cpu.kernel_set import CpuKernels

        return CpuKernels(self._level)

    def require_machine(self) -> None:
        from engines.kernels.cpu import LEVELS

        if reason := self.kernels.unsupported("CachedAttention"):
            raise FingerprintError(
                f"{self.name} cannot run here: {reason}",
                expected=f"a processor of one of the levels {', '.join(level.name for level in LEVELS)}",
                remedy="use such a machine: most x86-64 processors since 2013 and 64-bit ARM ones since 2018 are "
                "(docs/native-kernels.md)",
            )

    def passes(self) -> Passes:
        from engines.passes.graph import folded, linears, logit_positions, merge_linears, rotary_tables, transposes
        from engines.passes.onnxruntime import (
            block_linears,
            cached_attention,
            embedding,
            gated_norms,
            greedy_head,
            latent_keys,
            linear_inputs,
            linear_kernels,
            linear_parts,
            native_experts,
            native_norms,
            norm_rows,
            norms,
            recurrences,
            recurrent_conv,
            routers,
            silu,
            static_int8_linears,
            token_rows,
        )

        kernels: tuple[Pass, ...] = (static_int8_linears, block_linears, linear_kernels)
        return Passes(
            (
                rotary_tables,
                latent_keys,
                folded,
                linears,
                merge_linears,
                cached_attention,
                transposes,
                silu,
                linear_parts,
                recurrences,
                recurrent_conv,
                native_experts,
                routers,
                token_rows,
                norms,
                logit_positions,
                *kernels,
                greedy_head,
                linear_inputs,
                gated_norms,
                norm_rows,
                native_norms,
                embedding,
            ),
            attention=(cached_attention,),
            linears=kernels,
        )

    def at(self, level: str) -> OrtCpu:
        from engines.kernels.cpu import find_level

        return OrtCpu(find_level(level))

    def complete(self, lowered: LoweredRecord, model: ir.Model, folder: Path) -> EngineBundle:
        """Adds native kernels: of every level, where they are all that computes.

        Where ONNX Runtime's operators compute too, the processor's features select their kernels. Such a bundle is for
        processors that are like this one.
        """
        from engines.kernels import cpu as native
        from engines.kernels.cpu import compiler
        from tapeout.progress import ProgressBar

        bundle = super().complete(lowered, model, folder)
        if native.all_native(lowered.operator_counts):
            levels = (self._level,) if self._level else native.LEVELS
            libraries = bundle.hardware[0].libraries
            hardware = tuple(
                Fingerprint(
                    machine=level.machine,
                    features=level.needed,
                    libraries=libraries,
                    level=level.name,
                    more_features=True,
                )
                for level in levels
            )
        else:
            level = self._level or native.level()
            assert level is not None  # see require_machine
            _require_here(level)
            levels = (level,)
            hardware = (bundle.hardware[0].model_copy(update={"level": level.name}),)
        (folder / "kernels").mkdir()
        with ThreadPoolExecutor(physical_cores()) as pool:  # a compiler each, where they are not compiled yet
            made = zip(levels, pool.map(compiler.library, levels), strict=True)
            for level, compiled in ProgressBar(made, title="kernels", unit="level", total=len(levels)):
                shutil.copyfile(compiled, folder / level.file)
        return bundle.model_copy(update={"hardware": hardware})

    def open(
        self,
        bundle: Artifact[EngineBundle],
        *,
        threads: int,
        slots: int | None,
        snapshots: int | None = None,
        map_experts: bool = False,
    ) -> Engine:
        from engines.targets.ort_cpu.paged_engine import PagedEngine

        sequences = slots or bundle.record.io.slots
        return PagedEngine(bundle, threads=threads, sequences=sequences, snapshots=snapshots, map_experts=map_experts)

    def probe(self, bundle: Artifact[EngineBundle], scratch: Path, *, threads: int) -> Probe:
        from engines.probe import OrtProbe

        return OrtProbe(bundle, scratch, threads=threads)

    def timer(self, model: ir.Model, threads: int) -> Timer:
        from engines.sessions import SessionTimer

        return SessionTimer(model, threads, self._library())

    def kernels_version(self) -> str:
        compiled = self._library()
        return "" if compiled is None else compiled.parent.name

    def _library(self) -> Path | None:
        """Of the level that bundles run at here."""
        from engines.kernels.cpu import compiler

        if self._level is None:
            return library()
        _require_here(self._level)
        return compiler.library(self._level)


def _require_here(level: Level) -> None:
    """:class:`BuildError` where kernels of this level must run, or ONNX Runtime's beside them, and cannot."""
    if reason := level.refusal():
        raise BuildError(
            f"{level.name} cannot run here: {reason}",
            expected="a level of this machine: ONNX Runtime's operators compute too, or kernels are timed",
            remedy="do this on a machine of that level",
        )


TARGET = OrtCpu()
