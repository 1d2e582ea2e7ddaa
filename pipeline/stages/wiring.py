"""The stages `dvc repro` runs: each reads artifacts, does one thing, writes one artifact. It decides nothing.

Only this module knows them all. `dvc.yaml` calls it as ``tapeout stage NAME``; what a stage reads here and the
``deps`` and ``params`` listed there must agree.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.recipe import KINDS, Recipe, load_recipe
from tapeout import artifact
from tapeout.artifact import Artifact
from tapeout.errors import ArtifactError, RecipeError, RegistryError, TapeoutError
from tapeout.portable_graph import PortableGraph
from tapeout.recipe import Rule

if TYPE_CHECKING:
    from engines.bundle import EngineBundle
    from engines.protocol import Engine, FloatArray
    from engines.sequences import Sequences
    from engines.target import Probe
    from evals.answers import Answerer
    from evals.kind import EvidenceKind, S, SourceModel
    from pipeline.registry.release import Release
    from pipeline.sources.source import Source
    from quantization.calibration import Calibration
    from quantization.checkpoint import QuantizedModel
    from quantization.reference import QuantizedReference
    from tapeout.fingerprint import Fingerprint

ARTIFACTS = Path("artifacts")
INCUMBENT = ARTIFACTS / "incumbent.json"
TOKENIZER = "tokenizer.json"
HARDWARE_TARGET = "tensorrt-rtx"  # of pipeline/targets/dvc.yaml


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
    for name in ("torch.onnx", "torch.onnx._internal.exporter._registration"):  # torch sets the first one's level again
        logging.getLogger(name).setLevel(logging.ERROR)


def _progress(stage: str) -> Callable[[str], None]:
    """Progress of a stage as a line on the terminal; the same step is said once."""
    from rich.console import Console

    console, last = Console(stderr=True, highlight=False), [""]

    def progress(step: str) -> None:
        if step != last[0]:
            console.print(f"  [dim]{stage}:[/] {step}")
            last[0] = step

    return progress


def _environment(recipe: Recipe) -> None:
    """What other stages depend on besides artifacts and parameters, as files whose change makes them stale.

    It is the first, so a machine that cannot build for the recipe's target is refused here, before anything takes long.
    """
    from engines.load import graph_target
    from pipeline.stages.candidate import require_computed, require_kept
    from pipeline.stages.code import code_hashes, module_hashes
    from pipeline.stages.environment import libraries, listed, machine, resolved

    target = graph_target(recipe.build.target)
    target.require_machine()
    require_computed(target, [rule.scheme for rule in recipe.plan.schemes if isinstance(rule, Rule)])
    if recipe.plan.kv_cache != "auto":
        require_kept(target, recipe.plan.kv_cache.dtype)
    hashes = code_hashes(STAGES, recipe.build.target)
    parameters = {name: listed("dvc.yaml", name) for name in STAGES}
    hashes["hardware"] = module_hashes("pipeline.stages.hardware", HARDWARE_TARGET)
    parameters["hardware"] = listed("pipeline/targets/dvc.yaml", "engines")
    code = {name: {"code": hashes[name], "recipe": resolved(recipe, parameters[name])} for name in hashes}
    files = {
        "libraries": libraries(recipe.build.target),
        "machine": machine(),
        **{f"code/{name}": code[name] for name in code},
    }
    (ARTIFACTS / "environment" / "code").mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        path = ARTIFACTS / "environment" / f"{name}.json"
        path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")


def _fetch(recipe: Recipe) -> None:
    from pipeline.sources.fetch import fetch

    fetch(recipe, ARTIFACTS / "source")


def _export(recipe: Recipe) -> None:
    from pipeline.export.export import export

    source = _source()
    export(
        *_checkpoint(source),
        ARTIFACTS / "graph",
        adapter=_adapter(source),
        max_positions=recipe.export.max_positions,
        tolerance=recipe.export.tolerance,
        seed=recipe.seed,
        parents={"source": source},
        progress=_progress("export"),
    )


def _calibrate(recipe: Recipe) -> None:
    from quantization.calibrate import calibrate

    texts, _ = _texts(recipe, heldout=0)
    calibrate(recipe.calibrate, _graph(), texts, ARTIFACTS / "calibration", progress=_progress("calibrate"))


def _sensitivity(recipe: Recipe) -> None:
    from engines.load import find_target
    from pipeline.stages.target_candidates import target_candidates
    from quantization.sensitivity_sweep import sweep

    sweep(
        recipe.plan,
        recipe.quantize,
        _graph(),
        _calibration(),
        _calibration_samples(recipe),
        ARTIFACTS / "sensitivity",
        target_candidates(find_target(recipe.build.target).capabilities),
    )


def _plan(recipe: Recipe) -> None:
    from engines.load import find_target
    from pipeline.stages.cost_table import cost_table
    from pipeline.stages.target_candidates import target_candidates
    from quantization.plan_search import make_plan
    from quantization.sensitivity import Sensitivity

    graph, progress = _graph(), _progress("plan")
    make_plan(
        recipe.plan,
        recipe.quantize,
        graph,
        _calibration(),
        artifact.load(ARTIFACTS / "sensitivity", Sensitivity),
        cost_table(recipe, graph.record, measure=recipe.plan.schemes == "auto"),
        _calibration_samples(recipe),
        ARTIFACTS / "plan",
        progress=progress,
        candidates=target_candidates(find_target(recipe.build.target).capabilities),
    )


def _quantize(recipe: Recipe) -> None:
    from quantization.plan import PrecisionPlan
    from quantization.quantize import quantize

    plan = artifact.load(ARTIFACTS / "plan", PrecisionPlan)
    quantize(recipe.quantize, _graph(), _calibration(), plan, ARTIFACTS / "quantized", progress=_progress("quantize"))


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
        parents={"graph": graph},
        progress=_progress("build"),
    )


def _build_candidate(recipe: Recipe) -> None:
    from engines.load import graph_target
    from pipeline.stages.candidate import build_candidate

    build_candidate(
        _graph(),
        _quantized(),
        ARTIFACTS / "candidate",
        target=graph_target(recipe.build.target),
        slots=recipe.build.slots,
        progress=_progress("build"),
    )


def _incumbent(recipe: Recipe) -> None:
    """Which registered engine the candidate must be compared with, as a file the shadow stage depends on."""
    from pipeline.registry.register import incumbent

    found = incumbent(recipe.register_.model_name, _bundle(ARTIFACTS / "candidate").digest)
    content = None if found is None else {"digest": found.digest, "location": str(found.location)}
    INCUMBENT.write_text(json.dumps(content) + "\n")


def _gate(recipe: Recipe) -> None:
    from evals.evidence import load_evidence
    from evals.gate import gate
    from evals.kind import Bounds

    for role in ("baseline", "candidate"):
        _bundle(ARTIFACTS / role)
    _quantized()
    gate(load_evidence(ARTIFACTS, recipe), recipe.section(Bounds), ARTIFACTS / "verdict")


def _report(recipe: Recipe) -> None:
    from pipeline.report.gather import gather
    from pipeline.report.write import write

    write(gather(recipe, ARTIFACTS), ARTIFACTS / "report")


def _measure(kind: EvidenceKind[Any, Any, Any], recipe: Recipe) -> None:
    """The stage of a kind of evidence."""
    import_module(kind.measure_module).measure(Measurement(recipe, kind.stage), ARTIFACTS / kind.folder)


def register_candidate(recipe: Recipe, *, key: Path | None = None, repair: bool = False) -> Artifact[Release]:
    """The stage ``register``. ``key``: to sign with, instead of the recipe's. ``repair``: read back what is there."""
    from evals.verdict import Verdict
    from pipeline.registry.bundle_store import keep
    from pipeline.registry.register import register

    verdict = artifact.load(ARTIFACTS / "verdict", Verdict)
    bundle = keep(_bundle(ARTIFACTS / "candidate"))
    return register(recipe, verdict, bundle, ARTIFACTS, key=key, repair=repair)


def _source() -> Artifact[Source]:
    from pipeline.sources.source import Source

    return artifact.load(ARTIFACTS / "source", Source)


def _checkpoint(source: Artifact[Source]) -> tuple[Path, str]:
    """The folder of the checkpoint, and the name of the GGUF file in it, if it is one."""
    entry = source.folder / source.record.model_entry
    return (entry.parent, entry.name) if source.record.model_kind == "gguf" else (entry, "")


def _adapter(source: Artifact[Source]) -> Path | None:
    return source.folder / source.record.adapter_entry if source.record.adapter_entry else None


def _graph() -> Artifact[PortableGraph]:
    return artifact.load(ARTIFACTS / "graph", PortableGraph)


def _calibration() -> Artifact[Calibration]:
    from quantization.calibration import Calibration

    return artifact.load(ARTIFACTS / "calibration", Calibration)


def _quantized() -> Artifact[QuantizedModel]:
    from quantization.checkpoint import QuantizedModel

    return artifact.load(ARTIFACTS / "quantized", QuantizedModel)


def _bundle(folder: Path) -> Artifact[EngineBundle]:
    from engines.bundle import EngineBundle

    return artifact.load(folder, EngineBundle)


def _texts(recipe: Recipe, heldout: int) -> tuple[list[str], list[str]]:
    """Calibration texts and so many held-out texts, disjoint, from one column."""
    from evals.kinds.text import HeldOutSettings
    from pipeline.sources.corpus import calibration_and_heldout

    return calibration_and_heldout(
        _source(),
        recipe.calibrate,
        heldout,
        recipe.seed,
        _tokenizer(),
        document_tokens=recipe.section(HeldOutSettings).document_tokens if heldout else None,
    )


def _calibration_samples(recipe: Recipe) -> list[list[int]]:
    """Token ids of the calibration samples, where the plan is chosen by them; a written plan asks for none."""
    return _encode(_texts(recipe, heldout=0)[0]) if recipe.plan.schemes == "auto" else []


def _tokenizer() -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(ARTIFACTS / "graph" / TOKENIZER))


def _encode(texts: Sequence[str]) -> list[list[int]]:
    tokenizer = _tokenizer()
    return [tokenizer.encode(text).ids for text in texts]


@dataclass(frozen=True)
class Measurement:
    """See :class:`evals.kind.Context`."""

    recipe: Recipe
    stage: str

    @property
    def seed(self) -> int:
        return self.recipe.seed

    @property
    def threads(self) -> int:
        from tapeout.cores import physical_cores

        return self.recipe.build.threads or physical_cores()

    def section(self, kind: type[S]) -> S:
        return self.recipe.section(kind)

    def source(self) -> Artifact[Source]:
        return _source()

    def source_model(self) -> SourceModel:
        from pipeline.export.source_model import CheckpointModel
        from tapeout.work_folder import scratch_folder

        source = _source()
        positions = _graph().record.max_positions
        with scratch_folder(ARTIFACTS / "model") as scratch:
            return CheckpointModel(*_checkpoint(source), scratch, adapter=_adapter(source), positions=positions)

    def tokenizer(self) -> Any:
        from pipeline.export.tokenizer import load_tokenizer

        return load_tokenizer(_graph().folder)

    def graph(self) -> Artifact[PortableGraph]:
        return _graph()

    def bundle(self, role: str) -> Artifact[EngineBundle]:
        return _bundle(ARTIFACTS / role)

    def engine(self, role: str, *, slots: int | None = None, threads: int | None = None) -> Sequences:
        return self._open(ARTIFACTS / role, slots, threads)

    def _open(self, folder: Path, slots: int | None = None, threads: int | None = None) -> Sequences:
        from engines.load import load
        from engines.sequences import Sequences

        count = threads or self.recipe.build.threads
        return Sequences(load(folder, threads=count, slots=slots or self.recipe.build.slots))

    def champion(self) -> tuple[Artifact[EngineBundle], Sequences, bool]:
        incumbent = json.loads(INCUMBENT.read_text())
        folder = Path(incumbent["location"]) if incumbent else ARTIFACTS / "baseline"
        try:
            champion = self._open(folder)
            bundle = _bundle(folder)
            if incumbent is not None and bundle.digest != incumbent["digest"]:
                raise ArtifactError(f"{folder} holds bundle {bundle.digest[:12]}, not {incumbent['digest'][:12]}")
            if bundle.files[TOKENIZER].sha256 != self.bundle("candidate").files[TOKENIZER].sha256:
                raise ArtifactError(f"{folder} has another tokenizer than the candidate")
        except TapeoutError as error:
            if incumbent is None:
                raise
            raise RegistryError(
                f"the registered champion of {self.recipe.register_.model_name} cannot be replayed here: {error.found}",
                expected="a champion of the same model that runs on this machine",
                remedy="give another model or machine its own register.model_name, or `tapeout rollback` first",
            ) from error
        return bundle, champion, incumbent is None

    def answerer(self, engine: Engine, *, blocks: int | None = None) -> Answerer:
        from pipeline.stages.answering import served_core
        from runtime.wire.limits import Limits

        return served_core(engine, self.bundle("candidate"), Limits(), threads=self.threads, blocks=blocks)

    def draw_counts(self, logits: FloatArray) -> dict[str, tuple[int, int]]:
        from engines.load import at_level
        from runtime.engine.draw_check import draw_counts

        return draw_counts(at_level(self.bundle("candidate")), logits)

    def executed_on(self) -> Fingerprint:
        from engines.load import runs_here

        return runs_here(self.bundle("candidate"))

    def heldout_texts(self, count: int) -> list[str]:
        return _texts(self.recipe, count)[1]

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return _encode(texts)

    def decode(self, tokens: Sequence[int]) -> str:
        return _tokenizer().decode(list(tokens))

    def chat_prompts(self, datasets: Sequence[str], count: int) -> list[list[int]]:
        from tokenizers import Tokenizer

        from pipeline.sources.corpus import chat_prompts
        from runtime.gateway.text.chat_template import ChatTemplate

        folder = self.bundle("candidate").folder
        tokenizer: Any = Tokenizer.from_file(str(folder / TOKENIZER))
        template = ChatTemplate.load(folder)
        questions = chat_prompts(_source(), datasets, count, self.seed)
        prompts = [template.render([{"role": "user", "content": question}]) for question in questions]
        return [tokenizer.encode(prompt, add_special_tokens=False).ids for prompt in prompts]

    def probe(self) -> Probe:
        from engines.load import open_probe

        return open_probe(self.bundle("candidate"), ARTIFACTS, threads=self.threads)

    def reference(self) -> tuple[Artifact[QuantizedModel], QuantizedReference]:
        from engines.load import find_target
        from quantization.reference import QuantizedReference

        quantized = _quantized()
        capabilities = find_target(self.bundle("candidate").record.target).capabilities
        return quantized, QuantizedReference(
            quantized.folder,
            int8_activations=capabilities.int8_activations,
            fp8_activations=capabilities.fp8_activations,
            recurrent_state=quantized.record.recurrent_state,
        )

    def head(self) -> str:
        return next(group.members[0] for group in _graph().record.groups if group.name == "lm_head")

    def progress(self, step: str) -> None:
        _progress(self.stage)(step)


STAGES: dict[str, Callable[[Recipe], object]] = {
    "environment": _environment,
    "fetch": _fetch,
    "export": _export,
    "calibrate": _calibrate,
    "sensitivity": _sensitivity,
    "plan": _plan,
    "quantize": _quantize,
    "build-baseline": _build_baseline,
    "build-candidate": _build_candidate,
    "incumbent": _incumbent,
    **{kind.stage: partial(_measure, kind) for kind in KINDS if kind.stage},
    "gate": _gate,
    "report": _report,
    "register": register_candidate,
}
