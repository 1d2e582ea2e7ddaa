"""``tapeout build``: bundles for hardware that need not be here, and how a graph is lowered, pass by pass."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from engines.bundle import EngineBundle, PassReport
from engines.load import target_module
from tapeout import artifact
from tapeout.artifact import Artifact, ArtifactRef, Parents
from tapeout.errors import ArtifactError, BuildError
from tapeout.portable_graph import PortableGraph
from tapeout.recipe import Recipe
from tapeout.schemes import FLOAT, Scheme

if TYPE_CHECKING:
    from engines.lowered import LoweredGraph
    from evals.kinds.portable import PortableReport
    from evals.verdict import Verdict
    from quantization.checkpoint import QuantizedModel
    from quantization.compressed_tensors import Checkpoint
    from quantization.rounding import QuantizedLinear


# Groups of 64 are what the compiler's own kernels have; they shrink where a linear's width asks.
INT4 = Scheme(bits=4, group_size=64, symmetric=True, positive_scales=True)


@dataclass(frozen=True)
class Request:
    """What was asked for. ``checkpoint``: where weights are taken from; None: made here, of the float graph's own.

    ``documents``: how many held-out ones portable evidence is taken on.
    """

    artifacts: Path
    recipe: Recipe
    target: str
    capabilities: tuple[str, ...]
    precision: str
    checkpoint: Path | None
    batches: tuple[int, ...]
    documents: int

    @property
    def folder(self) -> Path:
        """Where all that is made for this precision goes."""
        return self.artifacts / "targets" / self.precision

    def bundle_folder(self, capability: str) -> Path:
        return self.folder / f"{self.target}-{capability}"

    def timing_cache(self, capability: str) -> Path:
        """Beside the precisions, so that it outlives what DVC removes before it runs a stage again."""
        return self.artifacts / "targets" / "timing" / f"{self.target}-{capability}.bin"


def parse_target(text: str) -> tuple[str, tuple[str, ...]]:
    """A target and the compute capabilities to compile for.

    >>> parse_target("tensorrt-rtx:sm89,sm120")
    ('tensorrt-rtx', ('sm89', 'sm120'))
    """
    name, _, rest = text.partition(":")
    return name, tuple(part.strip().lower() for part in rest.split(",") if part.strip())


def parse_batches(text: str, slots: int) -> tuple[int, ...]:
    """Decode buckets as written, ``1,8,32``; without any, one row and all slots. :class:`BuildError` if not counts."""
    if not text:
        return (1, slots)
    if not all(part.strip().isdigit() and int(part) for part in text.split(",")):
        raise BuildError(f"--batches {text}", expected="row counts, such as 1,8,32")
    return tuple(sorted({int(part) for part in text.split(",")}))


def explain(request: Request) -> list[PassReport]:
    """Lower the graph by the target's passes and keep only what each did."""
    import onnx_ir as ir

    from engines.compile import lower
    from engines.passes.base import Lowering
    from quantization import qdq
    from quantization.checkpoint import KVScales
    from quantization.compressed_tensors import open_checkpoint

    graph, module = _graph(request), target_module(request.target)
    weights: Any = open_checkpoint(request.checkpoint or graph.folder)
    kv = KVScales.read(request.checkpoint or graph.folder)
    if hasattr(module, "compile_for"):
        kv = KVScales({}, kv.bits)  # such targets keep keys and values in their float type
    if request.precision == "int4" and request.checkpoint is None:
        weights = _Nearest(weights)
    lowering = Lowering(
        ir.load(graph.folder / "model.onnx"),
        graph.record,
        weights,
        graph.record.max_positions,
        dict(kv.scales),
        kv.bits,
        float_type="bf16" if request.precision == "bf16" else "fp16",
        precision=request.precision,
        activation_max=_activation_max(request, graph)[0],
        qdq=qdq,
    )
    return list(lower(lowering, module.PASSES, lambda _: None))


def build(request: Request, console: Any) -> None:
    """Lower once, take portable evidence once, compile for every capability, and print what came of it.

    A capability that the compiler refuses does not keep the others from being built; its :class:`BuildError` is raised
    at the end.
    """
    from evals.kind import Bounds
    from evals.portable import portable_verdict, recorded

    module: Any = target_module(request.target)
    if not hasattr(module, "compile_for"):
        raise BuildError(
            f"{request.target} has no compile step of its own",
            expected="a target that compiles for named hardware, such as tensorrt-rtx:sm89",
            remedy="`dvc repro build-candidate` builds it; --explain shows how it is lowered",
        )
    if not request.capabilities:
        raise BuildError(
            f"--target {request.target} names no hardware",
            expected=f"compute capabilities, such as {request.target}:sm89,sm120",
        )
    for capability in request.capabilities:
        if hasattr(module, "require"):
            module.require(capability)
    lowered = _lower(request, console)
    report = _evidence(request, lowered, console)
    built: list[Built] = []
    refused: list[BuildError] = []
    for capability in request.capabilities:
        with _bar(console) as bar:
            task = bar.add_task(capability, total=None)

            def progress(phase: str, done: int, total: int, *, name: str = capability) -> None:
                bar.update(task, description=f"{name}: {phase}", completed=done, total=total or None)  # noqa: B023

            start = time.monotonic()
            try:
                bundle = module.compile_for(
                    lowered,
                    request.bundle_folder(capability),
                    capability=capability,
                    batches=request.batches,
                    evidence=recorded(report) if report else None,
                    timing_cache=request.timing_cache(capability),
                    progress=progress,
                )
            except BuildError as error:
                refused.append(error)
                continue
            seconds = time.monotonic() - start
        verdict = None
        if report is not None:
            folder = request.bundle_folder(capability)
            bounds = request.recipe.section(Bounds)
            verdict = portable_verdict(lowered, bundle, report, bounds, folder.with_name(f"{folder.name}-verdict"))
        built.append(Built(bundle, verdict, seconds))
    if built:
        console.print(bundle_table(built))
    if refused:
        raise refused[0]


@dataclass(frozen=True)
class Built:
    bundle: Artifact[EngineBundle]
    verdict: Artifact[Verdict] | None  # None: no evidence was taken
    seconds: float  # of the compiler


def pass_table(reports: Sequence[PassReport]) -> Table:
    table = Table(title="Lowering", title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    for column in ("pass", "matched", "nodes before", "after", "declined"):
        table.add_column(column, justify="left" if column in ("pass", "declined") else "right", overflow="fold")
    for report in reports:
        nodes = (str(report.nodes_before), str(report.nodes_after))
        table.add_row(report.name, str(report.matched), *nodes, escape("\n".join(reasons(report.declined))))
    return table


def reasons(declined: Sequence[str]) -> list[str]:
    """Why a pass declined, every reason once.

    >>> reasons(["layer 0: soft cap 50", "layer 1: soft cap 50", "no Sigmoid in the graph"])
    ['layer 0 and 1 more: soft cap 50', 'no Sigmoid in the graph']
    """
    subjects: dict[str, list[str]] = {}
    for sentence in declined:
        subject, colon, reason = sentence.rpartition(": ")
        subjects.setdefault(reason, []).append(subject + colon)
    return [
        (f"{first.removesuffix(': ')} and {len(others)} more: " if others else first) + reason
        for reason, (first, *others) in subjects.items()
    ]


def bundle_table(built: Sequence[Built]) -> Table:
    table = Table(title="Engines", title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    numbers = ("engine MB", "seconds", "layers", "warnings")
    for column in ("bundle", *numbers[:3], "native layers", numbers[3], "verdict"):
        table.add_column(column, justify="right" if column in numbers else "left", overflow="fold")
    for item in built:
        compiled = item.bundle.record.compiled
        assert compiled is not None
        native = {n: compiled.network.get(n, 0) for n in ("ATTENTION_INPUT", "KV_CACHE_UPDATE", "ROTARY_EMBEDDING")}
        table.add_row(
            str(item.bundle.folder),
            f"{compiled.engine_bytes / 1e6:.0f}",
            f"{item.seconds:.0f}",
            str(sum(compiled.network.values())),
            ", ".join(f"{count} {name}" for name, count in native.items()),
            str(len(compiled.warnings)),
            "none: no evidence" if item.verdict is None else _headline(item.verdict.record),
        )
    return table


def _headline(verdict: Verdict) -> str:
    reasons = [check.reason for check in verdict.checks if check.outcome is verdict.outcome]
    return f"{verdict.outcome}: {reasons[0]}"


def _graph(request: Request) -> Artifact[PortableGraph]:
    return artifact.load(request.artifacts / "graph", PortableGraph)


def _weights(request: Request, graph: Artifact[PortableGraph]) -> tuple[Checkpoint, Parents]:
    """Where parameters come from, and the parents that makes."""
    from quantization.checkpoint import QuantizedModel
    from quantization.compressed_tensors import open_checkpoint

    parents = {"graph": graph}
    if request.checkpoint is not None:
        quantized = artifact.load(request.checkpoint, QuantizedModel)
        if quantized.record.kv_cache.dtype == "int4":
            raise BuildError(
                f"{request.checkpoint} keeps keys and values in 4 bits",
                expected=f"8 bits or float: {request.target} compiles for caches of 16",
                remedy="quantize with plan.kv_cache.dtype int8 or float32, or build for ort-cpu",
            )
    elif request.precision == "int4":
        quantized = _four_bits(request, graph)
    else:
        return open_checkpoint(graph.folder), parents
    return open_checkpoint(quantized.folder), {**parents, "quantized": quantized}


def _four_bits(request: Request, graph: Artifact[PortableGraph]) -> Artifact[QuantizedModel]:
    """The float weights by AWQ in the blocks TensorRT takes, from the recipe's own calibration."""
    from quantization.calibration import Calibration
    from quantization.plan_search import write_plan
    from quantization.quantize import quantize
    from tapeout.recipe import KVCache, Plan, Quantize, Rule

    plan = Plan(
        schemes=(Rule(match="*", scheme=INT4),),
        embeddings=FLOAT,
        kv_cache=KVCache(dtype="float32"),
    )
    return quantize(
        Quantize(scale_grid=request.recipe.quantize.scale_grid),
        graph,
        artifact.load(request.artifacts / "calibration", Calibration),
        write_plan(plan, graph, request.folder / "plan"),
        request.folder / "quantized",
    )


class _Nearest:
    """Weights that ``_four_bits`` would quantize, rounded to nearest instead: the same graph, in a second."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self.weight, self.tensor = checkpoint.weight, checkpoint.tensor

    def linear(self, name: str) -> QuantizedLinear:
        from quantization.rounding import round_to_nearest

        weight = self._checkpoint.weight(name)
        return round_to_nearest(weight, INT4.fitted(weight.shape[1]))


def _activation_max(request: Request, graph: Artifact[PortableGraph]) -> tuple[dict[str, float], Parents]:
    """Largest calibrated ``|x|`` of every linear group, and the parents that makes; nothing where FP8 does not ask."""
    if request.precision != "fp8":
        return {}, {}
    if request.checkpoint is not None:
        raise BuildError(
            f"--precision fp8 with --checkpoint {request.checkpoint}",
            expected="float weights, on which the activations were calibrated",
            remedy="leave --checkpoint away",
        )
    from safetensors import safe_open

    from quantization.calibration import Calibration, statistics_file

    calibration = artifact.load(request.artifacts / "calibration", Calibration)
    largest: dict[str, float] = {}
    for group in graph.record.groups:
        path = calibration.folder / statistics_file(group.name)
        with safe_open(path, framework="numpy") as statistics:
            name = f"{group.name}.max_abs"
            if name in statistics.keys():  # noqa: SIM118
                largest[group.name] = float(statistics.get_tensor(name).max())
    return largest, {"calibration": calibration}


def _lower(request: Request, console: Any) -> Artifact[LoweredGraph]:
    from engines.compile import lower_graph
    from quantization import qdq

    graph = _graph(request)
    largest, calibrated = _activation_max(request, graph)
    weights, parents = _weights(request, graph)
    with console.status("lowering") as status:
        return lower_graph(
            graph,
            weights,
            request.folder / "lowered",
            passes=target_module(request.target).PASSES,
            precision=request.precision,
            slots=request.recipe.build.slots,
            activation_max=largest,
            qdq=qdq,
            parents={**parents, **calibrated},
            progress=lambda step: status.update(f"lowering: {step}"),
        )


def _evidence(request: Request, lowered: Artifact[LoweredGraph], console: Any) -> Artifact[PortableReport] | None:
    """The lowered graph against the float engine, where there is one and text to compare them on."""
    from engines.load import load
    from engines.portable import PortableEngine
    from evals.portable import portable_report

    if not request.documents:
        return None
    if request.precision == "bf16":
        console.print("no portable evidence: ONNX Runtime has no BF16 kernels on CPU")
        return None
    try:
        documents = _documents(request)
        baseline = load(request.artifacts / "baseline", slots=1)
    except ArtifactError as error:
        console.print(f"no portable evidence: {error.found} (`dvc repro build-baseline`)", markup=False)
        return None
    engine = PortableEngine(lowered, max_tokens=max(len(tokens) for tokens in documents))
    report = portable_report(
        baseline,
        engine,
        documents,
        request.folder / "evidence",
        parents={"lowered": lowered, "baseline": ArtifactRef(EngineBundle.noun, baseline.digest)},
    )
    found = report.record
    console.print(
        f"portable evidence on {found.documents} held-out documents: KL {found.kl:.2g}, "
        f"same top token {found.top_token:.1%}, perplexity x{found.perplexity_ratio:.4f}"
    )
    return report


def _documents(request: Request) -> list[list[int]]:
    """Held-out documents as token ids, the ones `dvc repro` evaluates on."""
    from tokenizers import Tokenizer

    from evals.kinds.text import TextSettings
    from pipeline.sources.corpus import calibration_and_heldout
    from pipeline.sources.source import Source

    recipe = request.recipe
    source = artifact.load(request.artifacts / "source", Source)
    settings, text = recipe.calibrate, recipe.section(TextSettings)
    _, heldout = calibration_and_heldout(
        source, settings.dataset, settings.column, settings.samples, text.documents, recipe.seed
    )
    tokenizer: Any = Tokenizer.from_file(str(request.artifacts / "graph" / "tokenizer.json"))
    return [tokenizer.encode(words).ids[: text.document_tokens] for words in heldout[: request.documents]]


def _bar(console: Any) -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    )
