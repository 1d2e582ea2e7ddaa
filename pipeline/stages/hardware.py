"""Engines for hardware that need not be present: lowered once, judged once on the CPU, compiled for each device."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engines.bundle import EngineBundle, LoweredGraph, PassReport
from engines.target import Compilation, GraphTarget, HardwareTarget, Precision, Progress, Target
from pipeline.recipe import Recipe
from quantization.units import HEAD
from tapeout import artifact
from tapeout.artifact import Artifact, ArtifactRef, Parents
from tapeout.errors import BuildError, RecipeError
from tapeout.portable_graph import PortableGraph
from tapeout.quantized import QuantizedWeight
from tapeout.recipe import KVCache, Quantize
from tapeout.schemes import AUTO, FLOAT

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from evals.portable import PortableReport
    from evals.verdict import Verdict
    from quantization.calibration import Calibration
    from quantization.compressed_tensors import Checkpoint
    from quantization.plan import PrecisionPlan


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
    """What each pass of the target does to the graph. Nothing is written; weights are rounded to nearest, all of them
    to the smallest scheme where a plan would choose.
    """
    from engines.compile import lower, lowering_for
    from quantization import qdq
    from quantization.checkpoint import KVScales
    from quantization.compressed_tensors import open_checkpoint
    from quantization.uniform import RoundedWeights

    graph, schemes = request.graph, target.capabilities.precision(request.precision).schemes
    folder = request.checkpoint or graph.folder
    weights: Any = open_checkpoint(folder)
    if schemes and request.checkpoint is None:
        weights = RoundedWeights(weights, schemes[0])
    kv = KVScales.read(folder)
    lowering = lowering_for(
        target,
        graph,
        weights,
        request.precision,
        kv_scales=kv.scales if kv.dtype in target.capabilities.kv_dtypes else {},
        kv_dtype=kv.dtype,
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
    folder, quantized = _checkpoint(request, target, graph, progress)
    lowered = build(
        graph,
        open_checkpoint(folder),
        request.folder / "lowered",
        target=target,
        precision=request.precision,
        slots=request.recipe.build.slots,
        kv_scales={},
        qdq=qdq,
        parents={"graph": graph, **quantized},
        progress=progress,
    )
    # Evidence asks it of int4, where a checkpoint may hold other linears, too.
    if request.checkpoint is None or target.capabilities.precision(request.precision).choices:
        require_planned(lowered, open_checkpoint(folder), graph.record)
    return lowered


def require_planned(lowered: Artifact[LoweredGraph], checkpoint: Checkpoint, graph: PortableGraph) -> None:
    """:class:`BuildError` where the graph computes a linear of the layers otherwise than it was quantized for."""
    computed = {name: how for label, how in lowered.record.computed.items() for name in label.split("+")}
    wrong: list[str] = []
    for group in (group for group in graph.groups if group.name != HEAD):
        for name in group.members:
            stored = checkpoint.linear(name)
            asked = stored.scheme.format if isinstance(stored, QuantizedWeight) else FLOAT.format
            found = computed.get(name, computed.get(group.name, "no linear"))
            if found != asked:
                wrong.append(f"{name} in {found} instead of {asked}")
    if wrong:
        raise BuildError(
            f"the lowered graph computes {len(wrong)} linears otherwise than planned: {', '.join(wrong[:3])}",
            expected="every linear as its plan says",
            remedy="see why the passes declined it with `tapeout build --explain`",
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
    from evals.kinds.text import HeldOutSettings

    text = request.recipe.section(HeldOutSettings)
    _, heldout = _texts(request, text.documents, document_tokens=text.document_tokens)
    return [tokens[: text.document_tokens] for tokens in _encoded(request, heldout[: request.documents])]


def calibration_samples(request: BuildRequest) -> list[list[int]]:
    """Token ids of what was calibrated on."""
    return _encoded(request, _texts(request, 0)[0])


def _texts(request: BuildRequest, heldout: int, *, document_tokens: int | None = None) -> tuple[list[str], list[str]]:
    from pipeline.sources.corpus import calibration_and_heldout
    from pipeline.sources.source import Source

    source, recipe = artifact.load(request.artifacts / "source", Source), request.recipe
    return calibration_and_heldout(
        source, recipe.calibrate, heldout, recipe.seed, _tokenizer(request), document_tokens=document_tokens
    )


def _encoded(request: BuildRequest, texts: Sequence[str]) -> list[list[int]]:
    tokenizer = _tokenizer(request)
    return [tokenizer.encode(text).ids for text in texts]


def _tokenizer(request: BuildRequest) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(request.artifacts / "graph" / "tokenizer.json"))


def _checkpoint(
    request: BuildRequest, target: HardwareTarget, graph: Artifact[PortableGraph], progress: Callable[[str], None]
) -> tuple[Path, Parents]:
    """The folder of the weights, and the parents that this adds."""
    from quantization.checkpoint import QuantizedModel
    from quantization.quantize import quantize
    from quantization.uniform import quantize_uniformly

    capabilities, settings = target.capabilities, Quantize(scale_grid=request.recipe.quantize.scale_grid)
    precision = capabilities.precision(request.precision)
    if request.checkpoint is not None:
        quantized = artifact.load(request.checkpoint, QuantizedModel)
        if quantized.record.kv_cache.dtype == "int4" and "int4" not in capabilities.kv_dtypes:
            raise BuildError(
                f"{request.checkpoint} keeps keys and values in 4 bits",
                expected=f"8 bits or float: {target.name} compiles for {', '.join(capabilities.kv_dtypes)}",
                remedy="quantize with plan.kv_cache.dtype int8 or float32, or build for a target with such a cache",
            )
    elif precision.choices:
        plan = _plan(request, target, precision, graph, settings, progress)
        quantized = quantize(
            settings, graph, request.calibration, plan, request.folder / "quantized", progress=progress
        )
    elif precision.weights is not None:
        quantized = quantize_uniformly(settings, graph, request.calibration, precision.weights, request.folder)
    else:
        return graph.folder, {}
    return quantized.folder, {"quantized": quantized}


def _plan(
    request: BuildRequest,
    target: HardwareTarget,
    precision: Precision,
    graph: Artifact[PortableGraph],
    settings: Quantize,
    progress: Callable[[str], None],
) -> Artifact[PrecisionPlan]:
    """Which linears have which of the precision's schemes: the recipe's goal within the precision's budget of KL."""
    from pipeline.stages.cost_table import declared
    from quantization.cost_table import visits_of
    from quantization.plan_search import make_plan
    from quantization.sensitivity_sweep import sweep
    from quantization.units import Candidates

    recipe = request.recipe
    candidates = Candidates(precision.choices, int8_inputs=target.capabilities.int8_activations)
    wanted = recipe.plan.model_copy(
        update={
            "schemes": AUTO,
            "embeddings": FLOAT,
            "kv_cache": KVCache(dtype="float32"),
            "max_kl": precision.max_kl,
            "max_bytes": None,
        }
    )
    if problems := recipe.model_copy(update={"plan": wanted}).conflicts():
        raise RecipeError(
            "; ".join(problems),
            expected="a recipe that a plan can be chosen by",
            remedy="correct the recipe, or choose --precision int4 or fp16, which choose nothing",
        )
    samples, calibration = calibration_samples(request), request.calibration
    progress("sensitivities")
    sensitivity = sweep(wanted, settings, graph, calibration, samples, request.folder / "sensitivity", candidates)
    costs = declared(target, recipe, graph.record, wanted, candidates, visits_of(calibration.record))
    plan = request.folder / "plan"
    return make_plan(
        wanted,
        settings,
        graph,
        calibration,
        sensitivity,
        costs,
        samples,
        plan,
        progress=progress,
        candidates=candidates,
    )
