"""NVIDIA GPUs with kernels of our own: a bundle carries machine code for several of them, and needs only a driver.

At the level ``host`` the same kernels run as fibers on the CPU. That shows what they compute, and nothing of a GPU.
"""

from __future__ import annotations

import platform
import shutil
from typing import TYPE_CHECKING

from engines.kernels.cpu.compiler import COMPILER
from engines.kernels.cuda import ARCHITECTURES, HOST, HOST_FILE, cubin_file
from engines.kernels.cuda.compiler import NVRTC
from engines.target import Capabilities, GraphTarget, Lacking, Passes
from tapeout.errors import BuildError, FingerprintError
from tapeout.fingerprint import Fingerprint, cpu_features
from tapeout.schemes import CANDIDATE_SCHEMES, FP8_DYNAMIC
from tapeout.throughput import H100, Throughput

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import onnx_ir as ir

    from engines.bundle import EngineBundle, LoweredRecord
    from engines.kernels.cuda.kernel_set import CudaKernels
    from engines.kernels.serving import ServingKernels
    from engines.protocol import Engine
    from engines.target import Probe
    from tapeout.artifact import Artifact

LEVELS = (*reversed(ARCHITECTURES), HOST)  # the best first; no GPU runs two of them but 8.9, which also runs sm80

# sm90 and sm100 multiply E4M3 at its full rate with wgmma and tcgen05 alone. Kernels use mma.sync, which compilers make
# of matmuls in half there: FP8 reads fewer bytes, and computes no faster.
THROUGHPUT = Throughput(H100.bytes_per_second, {"float": H100.operations["float"]})


DRIVER_REMEDY = (
    "install or update the driver, or give the container the GPU (docker run --gpus all); `tapeout doctor` looks again"
)


class Cuda(GraphTarget):
    """``levels``: that bundles carry."""

    def __init__(self, levels: tuple[str, ...] = LEVELS) -> None:
        self._levels = levels

    name = "cuda"
    capabilities = Capabilities(
        libraries=(),
        kv_dtypes=("float16", "int8", "fp8"),
        activations=("float",),
        compilers=(COMPILER, NVRTC),
        float_type="fp16",
        parity_probe=True,
        fp8_activations=True,
        ahead_of_time=True,
        operators=("Attention",),
        schemes=(*(scheme for scheme in CANDIDATE_SCHEMES if scheme.activations == "float"), FP8_DYNAMIC),
        throughput=THROUGHPUT,
    )

    @property
    def kernels(self) -> CudaKernels:
        from engines.kernels.cuda.kernel_set import CudaKernels

        return CudaKernels()

    @property
    def serving_kernels(self) -> ServingKernels:
        from engines.kernels.cuda.serving import CudaServing

        return CudaServing()

    def require_machine(self) -> None:
        from engines.kernels.cuda.compiler import host_target_flags

        try:
            host_target_flags()
        except BuildError as error:
            raise FingerprintError(error.found, expected=error.expected, remedy="use such a machine") from error

    def passes(self) -> Passes:
        from engines.passes.cuda import operators
        from engines.passes.graph import linears, logit_positions, merge_linears, rotary_tables, transposes
        from engines.passes.onnxruntime import (
            block_linears,
            cached_attention,
            embedding,
            greedy_head,
            linear_inputs,
            norm_rows,
            norms,
            silu,
        )

        return Passes(
            (
                rotary_tables,
                linears,
                merge_linears,
                cached_attention,
                transposes,
                norms,
                silu,
                logit_positions,
                block_linears,
                greedy_head,
                linear_inputs,
                norm_rows,
                embedding,
                operators,
            ),
            attention=(cached_attention,),
            linears=(block_linears,),
        )

    def at(self, level: str) -> Cuda:
        if level not in LEVELS:
            raise BuildError(f"no level {level!r}", expected=f"one of {', '.join(LEVELS)}")
        return Cuda((level,))

    def features(self) -> tuple[str, ...]:
        """Of the processor, and the machine code that the GPU runs."""
        from engines.kernels.cuda.device import find_gpu

        gpu = find_gpu()
        return (*cpu_features(), *(() if isinstance(gpu, str) else gpu.architectures))

    def lacking(self, built: Sequence[Fingerprint]) -> Lacking | None:
        from engines.kernels.cuda.device import find_gpu

        gpu = find_gpu()
        expected = "a GPU of one of the bundle's levels, and a driver for CUDA 13.0 or later: version 580"
        if isinstance(gpu, str):
            return Lacking(gpu, expected, DRIVER_REMEDY)
        if {feature for one in built for feature in one.features}.intersection(gpu.architectures):
            return None  # it is the processor
        found = f"{gpu.name} has compute capability {gpu.capability_text}"
        return Lacking(found, expected, "use such a GPU, or build for this one (docs/cuda-kernels.md)")

    def complete(self, lowered: LoweredRecord, model: ir.Model, folder: Path) -> EngineBundle:
        """Adds the plan of launches, machine code of each level, and the host's library."""
        from engines.kernels.cpu import LEVELS as PROCESSORS
        from engines.kernels.cuda import compiler
        from engines.kernels.cuda.plan import CONSTANTS_FILE, PLAN_FILE
        from engines.kernels.cuda.planner import make_plan, with_tensors

        bundle = super().complete(lowered, model, folder)
        plan, constants = with_tensors(make_plan(model), model)
        (folder / PLAN_FILE).write_text(plan.model_dump_json() + "\n")
        (folder / CONSTANTS_FILE).write_bytes(constants)
        (folder / "kernels").mkdir()
        architectures = tuple(level for level in self._levels if level != HOST)
        for architecture, compiled in compiler.cubins(architectures, plan.selected).items():
            shutil.copyfile(compiled, folder / cubin_file(architecture))
        shutil.copyfile(compiler.host_library(), folder / HOST_FILE)
        needed = next(level for level in reversed(PROCESSORS) if level.machine == platform.machine()).needed
        hardware = tuple(
            Fingerprint(
                machine=platform.machine(),
                features=needed if level == HOST else (*needed, level),
                libraries={},
                level=level,
                more_features=True,
                emulated=level == HOST,
            )
            for level in self._levels
        )
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
        from engines.targets.cuda.engine import open_engine

        return open_engine(bundle, sequences=slots or bundle.record.io.slots)

    def free_state_bytes(self, bundle: Artifact[EngineBundle]) -> int:
        from engines.targets.cuda.engine import free_state_bytes

        return free_state_bytes(bundle)

    def probe(self, bundle: Artifact[EngineBundle], scratch: Path, *, threads: int) -> Probe:
        from engines.targets.cuda.probe import CudaProbe

        return CudaProbe(bundle)


TARGET = Cuda()
