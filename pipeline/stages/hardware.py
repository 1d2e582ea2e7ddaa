"""Engines for hardware that need not be present: lowered once, judged once on the CPU, compiled for each device."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engines.bundle import EngineBundle, LoweredGraph, PassReport
from engines.target import Compilation, GraphTarget, HardwareTarget, Progress, Target
from pipeline.recipe import Recipe
from tapeout import artifact
from tapeout.artifact import Artifact, ArtifactRef, Parents
from tapeout.errors import BuildError
from tapeout.portable_graph import PortableGraph

if TYPE_CHECKING:
    from collections.abc import Callable

    from evals.portable import PortableReport
    from evals.verdict import Verdict
    from quantization.calibration import Calibration


@dataclass(frozen=True)
class BuildRequest:
    """What was asked for. ``checkpoint``: quantized weights to build from; None: the float graph's own.

    ``documents``: held-out documents of the portable evidence.
    """

    artifacts: Path
    recipe: Recipe
    precision: str
    checkpoint: Path | None
    batches: tuple[int, ...]
    documents: int

    @property
    def folder(self) -> Path:
        """Where everything of this precision is written."""
        return self.artifacts / "targets" / self.precision

    @property
    def graph(self) -> Artifact[PortableGraph]:
        return artifact.load(self.artifacts / "graph", PortableGraph)

    @property
    def calibration(self) -> Artifact[Calibration]:
        from quantization.calibration import Calibration

        return artifact.load(self.artifacts / "calibration", Calibration)


@dataclass(frozen=True)
class Built:
    bundle: Artifact[EngineBundle]
    verdict: Artifact[Verdict] | None  # None: no evidence was taken
    seconds: float  # of the compiler


def explain(request: BuildRequest, target: Target[Any]) -> list[PassReport]:
    """What each pass of the target does to the graph. Nothing is written; weights are rounded to nearest."""
    from engines.compile import lower, lowering_for
    from quantization import qdq
    from quantization.checkpoint import KVScales
    from quantization.compressed_tensors import open_checkpoint
    from quantization.uniform import RoundedWeights

    graph, scheme = request.graph, target.capabilities.precision(request.precision).weights
    folder = request.checkpoint or graph.folder
    weights: Any = open_checkpoint(folder)
    if scheme is not None and request.checkpoint is None:
        weights = RoundedWeights(weights, scheme)
    kv = KVScales.read(folder)
    lowering = lowering_for(
        target,
        graph,
        weights,
        request.precision,
        kv_scales=kv.scales if kv.dtype in target.capabilities.kv_dtypes else {},
        kv_dtype=kv.dtype,
        activation_max=_activation_max(request, target, graph)[0],
        qdq=qdq,
    )
    return list(lower(lowering, target.passes().every, lambda _: None))


def build_at(
    request: BuildRequest, target: GraphTarget, level: str, progress: Callable[[str], None]
) -> Artifact[EngineBundle]:
    """The candidate of the recipe with kernels of one level, which need not be this machine's. ``level`` "": of all."""
    from pipeline.stages.candidate import build_candidate
    from quantization.checkpoint import QuantizedModel

    folder = request.checkpoint or request.artifacts / "quantized"
    return build_candidate(
        request.graph,
        artifact.load(folder, QuantizedModel),
        request.artifacts / "targets" / f"{target.name}-{level}".removesuffix("-"),
        target=target,
        slots=request.recipe.build.slots,
        progress=progress,
    )


def lower(request: BuildRequest, target: HardwareTarget, progress: Callable[[str], None]) -> Artifact[LoweredGraph]:
    """Quantize where the precision needs it, and write the graph that the compiler is given."""
    from engines.compile import build
    from quantization import qdq
    from quantization.compressed_tensors import open_checkpoint

    graph = request.graph
    activation_max, calibrated = _activation_max(request, target, graph)
    folder, quantized = _checkpoint(request, target, graph)
    return build(
        graph,
        open_checkpoint(folder),
        request.folder / "lowered",
        target=target,
        precision=request.precision,
        slots=request.recipe.build.slots,
        kv_scales={},
        activation_max=activation_max,
        qdq=qdq,
        parents={"graph": graph, **quantized, **calibrated},
        progress=progress,
    )


def evidence(request: BuildRequest, lowered: Artifact[LoweredGraph]) -> Artifact[PortableReport]:
    """The lowered graph on the CPU against the float engine, on held-out documents."""
    from engines.load import load
    from engines.portable import PortableEngine
    from engines.sequences import Sequences
    from evals.portable import portable_report

    documents = heldout_documents(request)
    engine = Sequences(PortableEngine(lowered, max_tokens=max(len(tokens) for tokens in documents)))
    baseline = Sequences(load(request.artifacts / "baseline", slots=1))
    return portable_report(
        baseline,
        engine,
        documents,
        request.folder / "evidence",
        parents={"lowered": lowered, "baseline": ArtifactRef(EngineBundle.artifact_type, baseline.digest)},
    )


def compile_for(
    request: BuildRequest,
    target: HardwareTarget,
    hardware: str,
    lowered: Artifact[LoweredGraph],
    report: Artifact[PortableReport] | None,
    progress: Progress,
) -> Built:
    """One bundle, and the gate's verdict on the evidence that there is."""
    from evals.kind import Bounds
    from evals.portable import portable_verdict, recorded

    folder = request.folder / f"{target.name}-{hardware}"
    wanted = Compilation(
        hardware,
        request.batches,
        evidence=recorded(report) if report else None,
        # Beside the precisions: DVC removes their folders before it runs a stage again.
        timing_cache=request.artifacts / "targets" / "timing" / f"{folder.name}.bin",
        progress=progress,
    )
    start = time.monotonic()
    bundle = target.compile(lowered, folder, wanted)
    seconds = time.monotonic() - start
    if report is None:
        return Built(bundle, None, seconds)
    verdict = portable_verdict(
        lowered, bundle, report, request.recipe.section(Bounds), folder.with_name(f"{folder.name}-verdict")
    )
    return Built(bundle, verdict, seconds)


def heldout_documents(request: BuildRequest) -> list[list[int]]:
    """Token ids of the documents that `dvc repro` evaluates on."""
    from tokenizers import Tokenizer

    from evals.kinds.text import HeldOutSettings
    from pipeline.sources.corpus import calibration_and_heldout
    from pipeline.sources.source import Source

    recipe, text = request.recipe, request.recipe.section(HeldOutSettings)
    source = artifact.load(request.artifacts / "source", Source)
    tokenizer: Any = Tokenizer.from_file(str(request.artifacts / "graph" / "tokenizer.json"))
    _, heldout = calibration_and_heldout(
        source, recipe.calibrate, text.documents, recipe.seed, tokenizer, document_tokens=text.document_tokens
    )
    return [tokenizer.encode(held).ids[: text.document_tokens] for held in heldout[: request.documents]]


def _checkpoint(request: BuildRequest, target: HardwareTarget, graph: Artifact[PortableGraph]) -> tuple[Path, Parents]:
    """The folder of the weights, and the parents that this adds."""
    from quantization.checkpoint import QuantizedModel
    from quantization.uniform import quantize_uniformly

    capabilities = target.capabilities
    scheme = capabilities.precision(request.precision).weights
    if request.checkpoint is not None:
        quantized = artifact.load(request.checkpoint, QuantizedModel)
        if quantized.record.kv_cache.dtype == "int4" and "int4" not in capabilities.kv_dtypes:
            raise BuildError(
                f"{request.checkpoint} keeps keys and values in 4 bits",
                expected=f"8 bits or float: {target.name} compiles for {', '.join(capabilities.kv_dtypes)}",
                remedy="quantize with plan.kv_cache.dtype int8 or float32, or build for a target with such a cache",
            )
    elif scheme is not None:
        quantized = quantize_uniformly(request.recipe.quantize, graph, request.calibration, scheme, request.folder)
    else:
        return graph.folder, {}
    return quantized.folder, {"quantized": quantized}


def _activation_max(
    request: BuildRequest, target: Target[Any], graph: Artifact[PortableGraph]
) -> tuple[dict[str, float], Parents]:
    """Ranges of activations where the precision needs them, and the parents that this adds."""
    from quantization.uniform import largest_inputs

    if not target.capabilities.precision(request.precision).activation_ranges:
        return {}, {}
    if request.checkpoint is not None:
        raise BuildError(
            f"--precision {request.precision} with --checkpoint {request.checkpoint}",
            expected="float weights, on which the activations were calibrated",
            remedy="leave --checkpoint away",
        )
    calibration = request.calibration
    return largest_inputs(calibration, graph.record), {"calibration": calibration}
