"""``tapeout build``: bundles for hardware that need not be here, and how a graph is lowered, pass by pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from engines.bundle import EngineBundle, PassReport
from engines.load import target_module
from pipeline import artifact
from pipeline.artifact import Artifact
from pipeline.errors import ArtifactError, BuildError
from pipeline.graph import PortableGraph
from pipeline.recipe import Recipe

if TYPE_CHECKING:
    from engines.lowered import LoweredGraph
    from evals.portable import PortableReport
    from evals.verdict import Verdict
    from quantization.compressed_tensors import Checkpoint


@dataclass(frozen=True)
class Request:
    """What was asked for. ``checkpoint``: where weights are taken from; None: the float graph's own.

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
    def targets(self) -> Path:
        return self.artifacts / "targets"

    def bundle_folder(self, capability: str) -> Path:
        return self.targets / f"{self.target}-{capability}-{self.precision}"


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

    graph = _graph(request)
    passes = target_module(request.target).PASSES
    lowering = Lowering(
        ir.load(graph.folder / "model.onnx"),
        graph.record,
        _weights(request, graph)[0],
        graph.record.max_positions,
        float_type="bf16" if request.precision == "bf16" else "fp16",
        precision=request.precision,
        activation_max=_activation_max(request, graph)[0],
    )
    return list(lower(lowering, passes, lambda _: None))


def build(request: Request, console: Any) -> list[tuple[Artifact[EngineBundle], Artifact[Verdict] | None]]:
    """Lower once, take portable evidence once, compile for every capability; all of it to ``artifacts/targets``."""
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
    lowered = _lower(request, console)
    report = _evidence(request, lowered, console)
    built: list[tuple[Artifact[EngineBundle], Artifact[Verdict] | None]] = []
    for capability in request.capabilities:
        with _bar(console) as bar:
            task = bar.add_task(capability, total=None)

            def progress(phase: str, done: int, total: int, *, name: str = capability) -> None:
                bar.update(task, description=f"{name}: {phase}", completed=done, total=total or None)  # noqa: B023

            bundle = module.compile_for(
                lowered,
                request.bundle_folder(capability),
                capability=capability,
                batches=request.batches,
                timing_cache=request.targets / "timing" / f"{request.target}-{capability}.bin",
                progress=progress,
            )
        built.append((bundle, _verdict(request, lowered, bundle, report)))
    return built


def pass_table(reports: Sequence[PassReport]) -> Table:
    table = Table(title="Lowering", title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    for column in ("pass", "matched", "nodes before", "after", "declined"):
        table.add_column(column, justify="left" if column in ("pass", "declined") else "right", overflow="fold")
    for report in reports:
        first = escape(report.declined[0]) if report.declined else ""
        more = f" (+{len(report.declined) - 1} more)" if len(report.declined) > 1 else ""
        nodes = (str(report.nodes_before), str(report.nodes_after))
        table.add_row(report.name, str(report.matched), *nodes, first + more)
    return table


def bundle_table(built: Sequence[tuple[Artifact[EngineBundle], Artifact[Verdict] | None]]) -> Table:
    table = Table(title="Engines", title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    for column in ("bundle", "engine MB", "layers", "native layers", "warnings", "verdict"):
        table.add_column(column, justify="right" if column in ("engine MB", "layers") else "left", overflow="fold")
    for bundle, verdict in built:
        compiled = bundle.record.compiled
        assert compiled is not None
        native = {n: compiled.network.get(n, 0) for n in ("ATTENTION_INPUT", "KV_CACHE_UPDATE", "ROTARY_EMBEDDING")}
        table.add_row(
            str(bundle.folder),
            f"{compiled.engine_bytes / 1e6:.0f}",
            str(sum(compiled.network.values())),
            ", ".join(f"{count} {name}" for name, count in native.items()),
            str(len(compiled.warnings)),
            "none: no baseline" if verdict is None else _headline(verdict.record),
        )
    return table


def _headline(verdict: Verdict) -> str:
    reasons = [check.reason for check in verdict.checks if check.outcome is verdict.outcome]
    return f"{verdict.outcome}: {reasons[0]}"


def _graph(request: Request) -> Artifact[PortableGraph]:
    return artifact.load(request.artifacts / "graph", PortableGraph)


def _weights(request: Request, graph: Artifact[PortableGraph]) -> tuple[Checkpoint, dict[str, str]]:
    """Where parameters come from, and the parents that makes."""
    from quantization.checkpoint import QuantizedModel
    from quantization.compressed_tensors import open_checkpoint

    parents = {"PortableGraph": graph.digest}
    if request.checkpoint is None:
        return open_checkpoint(graph.folder), parents
    quantized = artifact.load(request.checkpoint, QuantizedModel)
    return open_checkpoint(quantized.folder), parents | {"QuantizedModel": quantized.digest}


def _activation_max(request: Request, graph: Artifact[PortableGraph]) -> tuple[dict[str, float], dict[str, str]]:
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
    return largest, {"Calibration": calibration.digest}


def _lower(request: Request, console: Any) -> Artifact[LoweredGraph]:
    from engines.targets.tensorrt.lower import lower_graph

    graph = _graph(request)
    weights, parents = _weights(request, graph)
    largest, calibrated = _activation_max(request, graph)
    with console.status("lowering") as status:
        return lower_graph(
            graph,
            weights,
            request.targets / f"lowered-{request.precision}",
            precision=request.precision,
            slots=request.recipe.build.slots,
            activation_max=largest,
            parents=parents | calibrated,
            progress=lambda step: status.update(f"lowering: {step}"),
        )


def _evidence(request: Request, lowered: Artifact[LoweredGraph], console: Any) -> Artifact[PortableReport] | None:
    """The lowered graph against the float engine, where there is one and text to compare them on."""
    from engines.load import load
    from engines.targets.tensorrt.portable import PortableEngine
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
        request.targets / f"evidence-{request.precision}",
        parents={"LoweredGraph": lowered.digest, "baseline": baseline.digest},
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

    from pipeline.corpus import calibration_and_heldout
    from pipeline.fetch import Source

    recipe = request.recipe
    source = artifact.load(request.artifacts / "source", Source)
    settings = recipe.calibrate
    _, heldout = calibration_and_heldout(
        source, settings.dataset, settings.column, settings.rows, recipe.evaluate.documents, recipe.seed
    )
    tokenizer: Any = Tokenizer.from_file(str(request.artifacts / "graph" / "tokenizer.json"))
    return [tokenizer.encode(text).ids[: recipe.evaluate.document_tokens] for text in heldout[: request.documents]]


def _verdict(
    request: Request,
    lowered: Artifact[LoweredGraph],
    bundle: Artifact[EngineBundle],
    report: Artifact[PortableReport] | None,
) -> Artifact[Verdict] | None:
    """The gate's own verdict, with no evidence from the hardware: at best INCONCLUSIVE."""
    from evals.evidence import Evidence, ProofSummary
    from evals.gate import gate

    compiled = bundle.record.compiled
    if report is None or compiled is None:
        return None
    reasons = _unproven(lowered.record.precision, lowered.record.plan)
    evidence = Evidence(
        baseline=report.record.baseline,
        candidate=bundle.digest,
        quantized=lowered.digest,
        target=compiled.capability,
        executed_on=compiled.executed_on,
        proof=ProofSummary(
            quantized=lowered.digest,
            ok=not reasons,
            reasons=reasons,
            bits_per_weight=lowered.record.bits_per_weight,
        ),
        digests={"QuantizedModel": lowered.digest, "PortableReport": report.digest},
    )
    folder = request.bundle_folder(compiled.capability)
    return gate(evidence, request.recipe.gate, folder.with_name(f"{folder.name}-verdict"))


def _unproven(precision: str, plan: Mapping[str, str]) -> tuple[str, ...]:
    """Linears inside the layers that are not in the precision the bundle is named after; 16-bit builds claim none."""
    if precision not in ("int4", "fp8"):
        return ()
    left = sorted(name for name, kernel in plan.items() if precision not in kernel and name != "lm_head")
    return (f"{len(left)} linears are not in {precision}: {', '.join(left[:3])}",) if left else ()


def _bar(console: Any) -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    )
