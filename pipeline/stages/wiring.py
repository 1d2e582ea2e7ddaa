"""The stages `dvc repro` runs: each reads artifacts, does one thing, writes one artifact. It decides nothing.

Only this module knows them all. `dvc.yaml` calls it as ``tapeout stage NAME``; what a stage reads here and the
``deps`` and ``params`` listed there must agree.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.recipe import KINDS, Recipe, load_recipe
from pipeline.stages.inputs import (
    ARTIFACTS,
    INCUMBENT,
    adapter_of,
    calibration_samples,
    checkpoint_of,
    corpus_texts,
    load_bundle,
    load_calibration,
    load_graph,
    load_quantized,
    load_source,
    stage_progress,
    steps_shown,
)
from pipeline.stages.measurement import Measurement
from tapeout import artifact
from tapeout.artifact import Artifact
from tapeout.errors import RecipeError
from tapeout.recipe import Rule

if TYPE_CHECKING:
    from evals.kind import EvidenceKind
    from pipeline.registry.release import Release

ACCEPTED = ARTIFACTS / "accepted.json"
FLOAT_PRECISION = "float32"  # what the float engine is called, whatever floats its target has
HARDWARE_TARGET = "tensorrt-rtx"  # of pipeline/targets/dvc.yaml


def run(name: str, recipe_path: Path) -> None:
    """Run one stage on the artifacts that are there."""
    if name not in STAGES:
        raise RecipeError(f"no stage {name!r}", expected=f"one of {', '.join(STAGES)}")
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    _quiet_libraries()
    with steps_shown(name):
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


def _environment(recipe: Recipe) -> None:
    """What other stages depend on besides artifacts and parameters, as files whose change makes them stale.

    It is the first, so a machine that cannot build for the recipe's target is refused here, before anything takes long.
    """
    from engines.load import graph_target
    from pipeline.stages.candidate import require_computed, require_kept, require_recurrent
    from pipeline.stages.code import code_hashes, module_hashes
    from pipeline.stages.environment import accelerators, libraries, listed, machine, resolved

    target = graph_target(recipe.build.target)
    target.require_machine()
    require_computed(target, [rule.scheme for rule in recipe.plan.schemes if isinstance(rule, Rule)])
    if recipe.plan.kv_cache != "auto":
        require_kept(target, recipe.plan.kv_cache.dtype)
    require_recurrent(target, recipe.plan.recurrent_state)
    hashes = code_hashes(STAGES, recipe.build.target)
    parameters = {name: listed("dvc.yaml", name) for name in STAGES}
    hashes["hardware"] = module_hashes("pipeline.stages.hardware", HARDWARE_TARGET)
    parameters["hardware"] = listed("pipeline/targets/dvc.yaml", "engines")
    code: dict[str, dict[str, object]] = {
        name: {"code": hashes[name], "recipe": resolved(recipe, parameters[name])} for name in hashes
    }
    for kind in KINDS:
        if kind.stage:  # evidence that was not taken is taken where the target's hardware is
            code[kind.stage]["hardware"] = accelerators(target)
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

    source = load_source()
    export(
        *checkpoint_of(source),
        ARTIFACTS / "graph",
        adapter=adapter_of(source),
        max_positions=recipe.export.max_positions,
        tolerance=recipe.export.tolerance,
        seed=recipe.seed,
        parents={"source": source},
        progress=stage_progress("export"),
    )


def _accept(recipe: Recipe) -> None:
    """The target lowers the graph, or refuses a part of it by name before anything takes long.

    The file does not say for which target, so what depends on it is not stale for another one.
    """
    from engines.compile import lower, lowering_for
    from engines.load import graph_target
    from quantization.compressed_tensors import open_checkpoint

    graph, target, progress = load_graph(), graph_target(recipe.build.target), stage_progress("accept")
    lowering = lowering_for(target, graph, open_checkpoint(graph.folder), FLOAT_PRECISION, kv_scales={})
    lower(lowering, target.passes().every, progress)
    ACCEPTED.write_text(json.dumps({"graph": graph.digest}) + "\n")


def _calibrate(recipe: Recipe) -> None:
    from quantization.calibrate import calibrate

    texts, _ = corpus_texts(recipe, heldout=0)
    calibrate(recipe.calibrate, load_graph(), texts, ARTIFACTS / "calibration", progress=stage_progress("calibrate"))


def _sensitivity(recipe: Recipe) -> None:
    from engines.load import find_target
    from pipeline.stages.target_candidates import target_candidates
    from quantization.sensitivity_sweep import sweep

    sweep(
        recipe.plan,
        recipe.quantize,
        load_graph(),
        load_calibration(),
        calibration_samples(recipe),
        ARTIFACTS / "sensitivity",
        target_candidates(find_target(recipe.build.target).capabilities),
    )


def _plan(recipe: Recipe) -> None:
    from engines.load import find_target
    from pipeline.stages.cost_table import cost_table
    from pipeline.stages.target_candidates import target_candidates
    from quantization.cost_table import visits_of
    from quantization.plan_search import make_plan
    from quantization.sensitivity import Sensitivity

    graph, progress = load_graph(), stage_progress("plan")
    make_plan(
        recipe.plan,
        recipe.quantize,
        graph,
        load_calibration(),
        artifact.load(ARTIFACTS / "sensitivity", Sensitivity),
        cost_table(
            recipe, graph.record, measure=recipe.plan.schemes == "auto", visits=visits_of(load_calibration().record)
        ),
        calibration_samples(recipe),
        ARTIFACTS / "plan",
        progress=progress,
        candidates=target_candidates(find_target(recipe.build.target).capabilities),
    )


def _quantize(recipe: Recipe) -> None:
    from quantization.plan import PrecisionPlan
    from quantization.quantize import quantize

    plan = artifact.load(ARTIFACTS / "plan", PrecisionPlan)
    quantize(
        recipe.quantize,
        load_graph(),
        load_calibration(),
        plan,
        ARTIFACTS / "quantized",
        progress=stage_progress("quantize"),
    )


def _build_baseline(recipe: Recipe) -> None:
    from engines.compile import build
    from engines.load import graph_target
    from quantization.compressed_tensors import open_checkpoint

    graph = load_graph()
    build(
        graph,
        open_checkpoint(graph.folder),
        ARTIFACTS / "baseline",
        target=graph_target(recipe.build.target),
        precision=FLOAT_PRECISION,
        slots=recipe.build.slots,
        kv_scales={},
        parents={"graph": graph},
        progress=stage_progress("build"),
    )


def _build_candidate(recipe: Recipe) -> None:
    from engines.load import graph_target
    from pipeline.stages.candidate import build_candidate

    build_candidate(
        load_graph(),
        load_quantized(),
        ARTIFACTS / "candidate",
        target=graph_target(recipe.build.target),
        slots=recipe.build.slots,
        progress=stage_progress("build"),
    )


def _incumbent(recipe: Recipe) -> None:
    """Which registered engine the candidate must be compared with, as a file the shadow stage depends on."""
    from pipeline.registry.register import incumbent

    found = incumbent(recipe.register_.model_name, load_bundle(ARTIFACTS / "candidate").digest)
    content = None if found is None else {"digest": found.digest, "location": str(found.location)}
    INCUMBENT.write_text(json.dumps(content) + "\n")


def _gate(recipe: Recipe) -> None:
    from evals.evidence import load_evidence
    from evals.gate import gate
    from evals.kind import Bounds

    for role in ("baseline", "candidate"):
        load_bundle(ARTIFACTS / role)
    load_quantized()
    gate(load_evidence(ARTIFACTS, recipe), recipe.section(Bounds), ARTIFACTS / "verdict")


def _report(recipe: Recipe) -> None:
    from pipeline.report.gather import gather
    from pipeline.report.write import write

    write(gather(recipe, ARTIFACTS), ARTIFACTS / "report")


def _measure(kind: EvidenceKind[Any, Any, Any], recipe: Recipe) -> None:
    """The stage of a kind of evidence. On a machine without the candidate's hardware it says so."""
    from engines.load import not_executable
    from evals.not_executed import write_not_executed

    context, folder = Measurement(recipe, kind.stage), ARTIFACTS / kind.folder
    candidate = load_bundle(ARTIFACTS / "candidate")
    reason = not_executable(candidate)
    if not reason:
        import_module(kind.measure_module).measure(context, folder)
    elif kind.emulated_module and any(one.emulated for one in candidate.record.hardware):
        import_module(kind.emulated_module).measure(context, folder, reason)
    else:
        write_not_executed(folder, candidate, reason)


def register_candidate(recipe: Recipe, *, key: Path | None = None, repair: bool = False) -> Artifact[Release]:
    """The stage ``register``. ``key``: to sign with, instead of the recipe's. ``repair``: read back what is there."""
    from evals.verdict import Verdict
    from pipeline.registry.bundle_store import keep
    from pipeline.registry.register import register

    verdict = artifact.load(ARTIFACTS / "verdict", Verdict)
    bundle = keep(load_bundle(ARTIFACTS / "candidate"))
    return register(recipe, verdict, bundle, ARTIFACTS, key=key, repair=repair)


STAGES: dict[str, Callable[[Recipe], object]] = {
    "environment": _environment,
    "fetch": _fetch,
    "export": _export,
    "accept": _accept,
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
