"""The stages `dvc repro` runs: each reads artifacts, calls one verb, writes one artifact. It wires and decides nothing.

Only this module knows all verbs. `dvc.yaml` calls it as ``tapeout stage NAME``; what a stage reads here and the
``deps`` and ``params`` listed there must agree.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tapeout import artifact
from tapeout.artifact import Artifact
from tapeout.errors import ArtifactError, RecipeError, RegistryError, TapeoutError
from tapeout.portable_graph import PortableGraph
from tapeout.recipe import Recipe, load_recipe

if TYPE_CHECKING:
    from engines.bundle import EngineBundle
    from pipeline.sources.source import Source
    from quantization.calibration import Calibration

ARTIFACTS = Path("artifacts")
INCUMBENT = ARTIFACTS / "incumbent.json"


def run(name: str, recipe_path: Path) -> None:
    """Run one stage on the artifacts that are there."""
    if name not in STAGES:
        raise RecipeError(f"no stage {name!r}", expected=f"one of {', '.join(STAGES)}")
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    _quiet_libraries()
    STAGES[name](load_recipe(recipe_path))


def _quiet_libraries() -> None:
    """Leave the terminal to our own lines; what a library warns of here has been looked at."""
    import os
    import warnings

    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.filterwarnings("ignore", module=r"(torch|transformers|onnxscript|copyreg|mlflow|lm_eval).*")
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)


def _say(stage: str) -> Callable[[str], None]:
    """Progress of a stage as a line on the terminal; the same step is said once."""
    from rich.console import Console

    console, last = Console(stderr=True, highlight=False), [""]

    def say(step: str) -> None:
        if step != last[0]:
            console.print(f"  [dim]{stage}:[/] {step}")
            last[0] = step

    return say


def _environment(recipe: Recipe) -> None:
    """Library versions and machine, as files other stages depend on: a change of either makes them stale."""
    from pipeline.stages.environment import libraries, machine

    folder = ARTIFACTS / "environment"
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in (("libraries", libraries()), ("machine", machine())):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")


def _fetch(recipe: Recipe) -> None:
    from pipeline.sources.fetch import fetch

    fetch(recipe, ARTIFACTS / "source")


def _export(recipe: Recipe) -> None:
    from pipeline.export.export import export

    source = _source()
    entry = source.folder / source.record.model_entry
    gguf = source.record.model_kind == "gguf"
    export(
        entry.parent if gguf else entry,
        entry.name if gguf else "",
        ARTIFACTS / "graph",
        max_positions=recipe.export.max_positions,
        tolerance=recipe.export.tolerance,
        seed=recipe.seed,
        parents={"Source": source.digest},
        progress=_say("export"),
    )


def _calibrate(recipe: Recipe) -> None:
    from quantization.calibrate import calibrate

    texts, _ = _texts(recipe, heldout=0)
    calibrate(recipe, _graph(), texts, ARTIFACTS / "calibration")


def _sensitivity(recipe: Recipe) -> None:
    from quantization.sensitivity_sweep import sweep

    sweep(recipe, _graph(), _calibration(), _calibrated_rows(recipe), ARTIFACTS / "sensitivity")


def _plan(recipe: Recipe) -> None:
    from pipeline.stages.cost_table import cost_table
    from quantization.plan_search import make_plan
    from quantization.sensitivity import Sensitivity

    graph, say = _graph(), _say("plan")
    make_plan(
        recipe,
        graph,
        _calibration(),
        artifact.load(ARTIFACTS / "sensitivity", Sensitivity),
        cost_table(recipe, graph.record, measure=recipe.plan.kernels == "auto", progress=say),
        _calibrated_rows(recipe),
        ARTIFACTS / "plan",
        progress=say,
    )


def _quantize(recipe: Recipe) -> None:
    from quantization.plan import PrecisionPlan
    from quantization.quantize import quantize

    plan = artifact.load(ARTIFACTS / "plan", PrecisionPlan)
    quantize(recipe, _graph(), _calibration(), plan, ARTIFACTS / "quantized")


def _build_baseline(recipe: Recipe) -> None:
    from engines.compile import build
    from engines.load import graph_target
    from quantization.compressed_tensors import open_checkpoint

    graph = _graph()
    build(
        graph,
        open_checkpoint(graph.folder),
        ARTIFACTS / "baseline",
        target=graph_target(recipe.build.target),
        precision="float32",
        slots=recipe.build.slots,
        kv_scales={},
        parents={"PortableGraph": graph.digest},
        progress=_say("build"),
    )


def _build_candidate(recipe: Recipe) -> None:
    from engines.compile import build
    from engines.load import graph_target
    from quantization.checkpoint import KVScales, QuantizedModel
    from quantization.compressed_tensors import open_checkpoint

    graph = _graph()
    quantized = artifact.load(ARTIFACTS / "quantized", QuantizedModel)
    kv = KVScales.read(quantized.folder)
    build(
        graph,
        open_checkpoint(quantized.folder),
        ARTIFACTS / "candidate",
        target=graph_target(recipe.build.target),
        precision=quantized.record.summary,
        slots=recipe.build.slots,
        kv_scales=kv.scales,
        kv_bits=kv.bits,
        parents={"PortableGraph": graph.digest, "QuantizedModel": quantized.digest},
        progress=_say("build"),
    )


def _parity(recipe: Recipe) -> None:
    from engines.load import find_target, open_probe
    from evals.parity import parity
    from quantization.checkpoint import QuantizedModel
    from quantization.reference import QuantizedReference

    quantized = artifact.load(ARTIFACTS / "quantized", QuantizedModel)
    bundle = _bundle(ARTIFACTS / "candidate")
    _, heldout = _texts(recipe)
    documents = [ids[: recipe.evaluate.document_tokens] for ids in _encode(heldout[: recipe.evaluate.parity_documents])]
    parity(
        open_probe(bundle, threads=recipe.build.threads),
        QuantizedReference(
            quantized.folder, int8_activations=find_target(bundle.record.target).capabilities.int8_activations
        ),
        documents,
        ARTIFACTS / "parity",
        head=next(group.members[0] for group in _graph().record.groups if group.name == "lm_head"),
        candidate=bundle.digest,
        quantized=quantized.digest,
        parents={"EngineBundle": bundle.digest, "QuantizedModel": quantized.digest},
    )


def _benchmark(recipe: Recipe) -> None:
    from engines.load import load
    from engines.threads import physical_cores
    from evals.benchmark import benchmark

    folders = {name: ARTIFACTS / name for name in ("baseline", "candidate")}
    bundles = {name: _bundle(folder) for name, folder in folders.items()}
    threads = recipe.build.threads or physical_cores()
    slots = max(recipe.benchmark.batches)
    engines = {name: load(folder, threads=threads, slots=slots) for name, folder in folders.items()}
    benchmark(
        recipe.benchmark,
        engines["baseline"],
        engines["candidate"],
        folders=folders,
        read_bytes={name: bundle.record.step_bytes for name, bundle in bundles.items()},
        bundle_bytes={name: sum(f.size_bytes for f in bundle.files.values()) for name, bundle in bundles.items()},
        threads=threads,
        seed=recipe.seed,
        folder=ARTIFACTS / "benchmark",
        parents={name: bundle.digest for name, bundle in bundles.items()},
        progress=_say("benchmark"),
    )


def _evaluate(recipe: Recipe) -> None:
    from engines.load import load
    from evals.quality import evaluate

    source = _source()
    baseline, candidate = (
        load(ARTIFACTS / name, threads=recipe.build.threads, slots=1) for name in ("baseline", "candidate")
    )
    _, heldout = _texts(recipe)
    bundle = _bundle(ARTIFACTS / "candidate")
    evaluate(
        recipe,
        baseline,
        candidate,
        tokenizer_file=bundle.folder / "tokenizer.json",
        end_of_text=bundle.record.stop_tokens[0],
        data=source.folder / source.record.data_entry,
        heldout_texts=heldout,
        folder=ARTIFACTS / "evaluation",
        parents={"baseline": baseline.digest, "candidate": candidate.digest, "Source": source.digest},
    )


def _incumbent(recipe: Recipe) -> None:
    """Which registered engine the candidate must be compared with, as a file the shadow stage depends on."""
    from pipeline.registry.register import incumbent

    found = incumbent(recipe.register_.model_name, _bundle(ARTIFACTS / "candidate").digest)
    content = None if found is None else {"digest": found.digest, "location": str(found.location)}
    INCUMBENT.write_text(json.dumps(content) + "\n")


def _shadow(recipe: Recipe) -> None:
    from engines.load import load
    from evals.shadow import shadow
    from pipeline.sources.corpus import chat_prompts

    incumbent = json.loads(INCUMBENT.read_text())
    source, bundle = _source(), _bundle(ARTIFACTS / "candidate")
    place = Path(incumbent["location"]) if incumbent else ARTIFACTS / "baseline"
    try:
        champion = load(place, threads=recipe.build.threads, slots=recipe.build.slots)
        tokenizer = artifact.identify(place)[2]["tokenizer.json"].sha256
        if tokenizer != bundle.files["tokenizer.json"].sha256:
            raise ArtifactError(f"{place} has another tokenizer than the candidate")
    except TapeoutError as error:
        if incumbent is None:
            raise
        raise RegistryError(
            f"the registered champion of {recipe.register_.model_name} cannot be replayed here: {error.found}",
            expected="a champion of the same model that runs on this machine",
            remedy="give another model or machine its own register.model_name, or `tapeout rollback` first",
        ) from error
    candidate = load(ARTIFACTS / "candidate", threads=recipe.build.threads, slots=recipe.build.slots)
    questions = chat_prompts(source, recipe.shadow.datasets, recipe.shadow.prompts, recipe.seed)
    shadow(
        recipe,
        champion,
        candidate,
        prompts=_chat(bundle, questions),
        stop_tokens=bundle.record.stop_tokens,
        champion_is_baseline=incumbent is None,
        folder=ARTIFACTS / "shadow",
        parents={"champion": champion.digest, "candidate": candidate.digest, "Source": source.digest},
    )


def _gate(recipe: Recipe) -> None:
    from evals.evidence import ProofSummary, SpeedSummary, load_evidence
    from evals.gate import gate
    from evals.reports import Benchmark
    from quantization.checkpoint import QuantizedModel

    baseline, candidate = _bundle(ARTIFACTS / "baseline"), _bundle(ARTIFACTS / "candidate")
    quantized = artifact.load(ARTIFACTS / "quantized", QuantizedModel)
    timed = artifact.load(ARTIFACTS / "benchmark", Benchmark)
    proof = quantized.record.proof
    evidence = load_evidence(
        baseline=baseline.digest,
        candidate=candidate.digest,
        quantized=quantized.digest,
        target=candidate.record.target,
        # A compiled engine says itself where it ran; others only load on the machine they were built for.
        executed_on=candidate.record.compiled.executed_on if candidate.record.compiled else candidate.record.target,
        proof=ProofSummary(
            quantized=candidate.parents["QuantizedModel"],
            ok=proof.passed,
            reasons=proof.reasons,
            bits_per_weight=proof.bits_per_weight,
        ),
        speed=SpeedSummary(
            baseline=timed.record.baseline.digest,
            candidate=timed.record.candidate.digest,
            batches=recipe.benchmark.batches,
            samples=timed.record.samples,
        ),
        digests={"Benchmark": timed.digest, "QuantizedModel": quantized.digest},
        evaluation=ARTIFACTS / "evaluation",
        shadow=ARTIFACTS / "shadow",
        parity=ARTIFACTS / "parity",
    )
    gate(evidence, recipe.gate, ARTIFACTS / "verdict")


def _report(recipe: Recipe) -> None:
    from pipeline.report.gather import gather
    from pipeline.report.write import write

    write(gather(recipe, ARTIFACTS), ARTIFACTS / "report")


def _register(recipe: Recipe) -> None:
    from evals.verdict import Verdict
    from pipeline.registry.bundle_store import keep
    from pipeline.registry.register import register

    verdict = artifact.load(ARTIFACTS / "verdict", Verdict)
    bundle = keep(_bundle(ARTIFACTS / "candidate"))
    register(recipe, verdict, bundle, ARTIFACTS / "report", ARTIFACTS / "release")


def _source() -> Artifact[Source]:
    from pipeline.sources.source import Source

    return artifact.load(ARTIFACTS / "source", Source)


def _graph() -> Artifact[PortableGraph]:
    return artifact.load(ARTIFACTS / "graph", PortableGraph)


def _calibration() -> Artifact[Calibration]:
    from quantization.calibration import Calibration

    return artifact.load(ARTIFACTS / "calibration", Calibration)


def _bundle(folder: Path) -> Artifact[EngineBundle]:
    from engines.bundle import EngineBundle

    return artifact.load(folder, EngineBundle)


def _texts(recipe: Recipe, heldout: int | None = None) -> tuple[list[str], list[str]]:
    """Calibration texts and held-out texts (``evaluate.documents`` unless told), disjoint, from one column."""
    from pipeline.sources.corpus import calibration_and_heldout

    settings, count = recipe.calibrate, recipe.evaluate.documents if heldout is None else heldout
    return calibration_and_heldout(_source(), settings.dataset, settings.column, settings.rows, count, recipe.seed)


def _calibrated_rows(recipe: Recipe) -> list[list[int]]:
    """Token ids of the calibration rows, where the plan is chosen by them; a plan that is written out asks for none."""
    return _encode(_texts(recipe, heldout=0)[0]) if recipe.plan.kernels == "auto" else []


def _encode(texts: Sequence[str]) -> list[list[int]]:
    from tokenizers import Tokenizer

    tokenizer: Any = Tokenizer.from_file(str(ARTIFACTS / "graph" / "tokenizer.json"))
    return [tokenizer.encode(text).ids for text in texts]


def _chat(bundle: Artifact[EngineBundle], questions: Sequence[str]) -> list[list[int]]:
    from tokenizers import Tokenizer

    from runtime.chat import ChatTemplate

    tokenizer: Any = Tokenizer.from_file(str(bundle.folder / "tokenizer.json"))
    template = ChatTemplate.load(bundle.folder)
    prompts = [template.render([{"role": "user", "content": question}]) for question in questions]
    return [tokenizer.encode(prompt, add_special_tokens=False).ids for prompt in prompts]


STAGES: dict[str, Callable[[Recipe], None]] = {
    "environment": _environment,
    "fetch": _fetch,
    "export": _export,
    "calibrate": _calibrate,
    "sensitivity": _sensitivity,
    "plan": _plan,
    "quantize": _quantize,
    "build-baseline": _build_baseline,
    "build-candidate": _build_candidate,
    "parity": _parity,
    "benchmark": _benchmark,
    "evaluate": _evaluate,
    "incumbent": _incumbent,
    "shadow": _shadow,
    "gate": _gate,
    "report": _report,
    "register": _register,
}
