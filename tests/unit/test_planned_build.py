"""Plans of targets that compile for hardware that is not here: chosen, obeyed by the passes, recorded; planted defects.

On the tiny llama, with its text. Precisions have budgets for real models; a small one here makes the plan choose.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import onnx_ir as ir
import pytest
import yaml

from engines.bundle import LoweredGraph
from engines.load import graph_target
from engines.passes.base import PassResult
from engines.passes.graph.linears import is_linear
from engines.passes.tensorrt import fp8_linears, int4_linears
from engines.target import Capabilities
from engines.targets.tensorrt import TARGET, TensorRT
from pipeline.recipe import load_recipe
from pipeline.stages import hardware
from pipeline.stages.candidate import build_candidate
from pipeline.stages.cost_table import cost_table, timed
from pipeline.stages.hardware import BuildRequest
from pipeline.stages.target_candidates import target_candidates
from pipeline.stages.wiring import STAGES
from quantization.calibrate import calibrate
from quantization.checkpoint import QuantizedModel
from quantization.plan import PLAN_FILE, PrecisionPlan
from quantization.quantize import quantize
from quantization.units import HEAD
from tapeout import artifact
from tapeout.artifact import Artifact
from tapeout.errors import BuildError, RecipeError
from tapeout.recipe import KVCache, Rule
from tapeout.schemes import FLOAT, FP8, STATIC_INT8, Scheme
from tapeout.throughput import Throughput
from tests.exported import tiny_graph
from tests.plans import written_plan

SAMPLES, TOKENS = 24, 96
BUDGETS = {"fp8": 4e-4, "auto": 4e-4}  # nats per token, for the tiny llama
# For prompts alone: FP8 computes fastest, and costs this model more than 4 bits do, whose inputs stay in float.
PROMPTS = {128: 1.0}
MANY = 4096  # tokens of a step whose time is that of computing
PARAMS = {
    "model": {"source": "file:m"},
    "data": {"source": "file:d"},
    "calibrate": {"samples": SAMPLES, "tokens": TOKENS},
    "plan": {"layers_per_group": 1, "samples": 3, "context": 64, "workload": PROMPTS},
    "build": {"slots": 2, "target": "cuda"},
    "export": {"max_positions": 512},
    "benchmark": {"batches": [1, 2], "prompt_tokens": 16},
}


@pytest.fixture(scope="module")
def project(tiny_texts: Callable[[int, int], list[str]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe, a graph and its calibration."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "params.yaml").write_text(yaml.safe_dump(PARAMS))
    (folder / "artifacts").mkdir()
    (folder / "artifacts" / "graph").symlink_to(tiny_graph().folder)
    asked = load_recipe(folder / "params.yaml").calibrate
    calibrate(asked, tiny_graph(), tiny_texts(SAMPLES, 5), folder / "artifacts" / "calibration")
    return folder


def target_of(budgets: Mapping[str, float]) -> TensorRT:
    found = TensorRT("tensorrt", "tensorrt", ("tensorrt",))
    precisions = {name: replace(TARGET.capabilities.precisions[name], max_kl=kl) for name, kl in budgets.items()}
    found.capabilities = replace(TARGET.capabilities, precisions=precisions)
    return found


@pytest.fixture
def target() -> TensorRT:
    return target_of(BUDGETS)


def request_for(project: Path, folder: Path, precision: str, **changes: Any) -> BuildRequest:
    artifacts = folder / "artifacts"
    artifacts.mkdir()
    for name in ("graph", "calibration"):
        (artifacts / name).symlink_to((project / "artifacts" / name).resolve())
    recipe = load_recipe(project / "params.yaml")
    recipe = recipe.model_copy(update={"plan": recipe.plan.model_copy(update=changes)})
    return BuildRequest(artifacts, recipe, precision, checkpoint=None, batches=(1,), documents=0)


def lowered(request: BuildRequest, target: TensorRT) -> Artifact[LoweredGraph]:
    return hardware.lower(request, target, lambda _: None)


Built = Callable[[str], tuple[BuildRequest, Artifact[LoweredGraph]]]


@pytest.fixture(scope="module")
def built(
    project: Path, tiny_texts: Callable[[int, int], list[str]], tmp_path_factory: pytest.TempPathFactory
) -> Built:
    """The request and the lowered graph of a precision, made once; calibration samples need no source here."""
    from tokenizers import Tokenizer

    tokenizer: Any = Tokenizer.from_file(str(tiny_graph().folder / "tokenizer.json"))
    samples: list[list[int]] = [tokenizer.encode(text).ids for text in tiny_texts(SAMPLES, 5)]

    @cache
    def get(precision: str) -> tuple[BuildRequest, Artifact[LoweredGraph]]:
        request = request_for(project, tmp_path_factory.mktemp(precision), precision)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(hardware, "calibration_samples", lambda _: samples)
            return request, lowered(request, target_of(BUDGETS))

    return get


@pytest.mark.parametrize("precision", BUDGETS)
def test_a_plan_is_chosen_obeyed_and_recorded(built: Built, target: TensorRT, precision: str) -> None:
    request, found = built(precision)
    plan = artifact.load(request.folder / "plan", PrecisionPlan)
    search, asked = plan.record.search, target.capabilities.precision(precision)
    assert search is not None and not search.timed and search.target == "tensorrt"
    assert search.joint_kl <= BUDGETS[precision] == search.max_kl
    assert "No device timed anything" in (plan.folder / PLAN_FILE).read_text()
    chosen = plan.record.schemes
    kinds = {scheme.format for scheme in chosen.values()}
    assert len(kinds) > 1 and kinds <= {scheme.format for scheme in asked.choices}, "the plan had nothing to choose"
    assert (precision == "auto") == ("int4" in kinds) and "fp8" in kinds
    assert plan.record.embeddings.scheme == FLOAT

    quantized = artifact.load(request.folder / "quantized", QuantizedModel)
    assert quantized.parents["plan"] == plan.ref and found.parents["quantized"] == quantized.ref
    computed = found.record.computed
    for group in (group for group in tiny_graph().record.groups if group.name != HEAD):
        how = {computed.get(name, computed.get(group.name)) for name in group.members}
        assert how == {chosen[group.name].format}, group.name
    assert found.record.operator_counts["QuantizeLinear"] == sum(
        linear.scheme == FP8 for linear in quantized.record.linears
    )


def skips(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass that leaves one of its linears to the next."""
    run = module.run

    def most(lowering: Any) -> PassResult:
        first = next(
            node
            for node in lowering.model.graph
            if is_linear(node) and module.FORMAT in {p.scheme.format for p in module.quantized(lowering, node)}
        )
        name, others = first.op_type, lowering.model.graph
        assert others is not None
        first.op_type = "Hidden"
        try:
            return run(lowering)
        finally:
            first.op_type = name

    monkeypatch.setattr(module, "run", most)


def forgets_inputs(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights in FP8 that are multiplied by inputs in float, under a label that says FP8."""
    finish = module.finish

    def without(lowering: Any, node: ir.Node, nodes: Sequence[ir.Node], kind: str) -> None:
        matmul = nodes[-1]
        matmul.replace_input_with(0, node.inputs[0])
        finish(lowering, node, list(nodes[2:]), kind)

    monkeypatch.setattr(module, "finish", without)


DEFECTS = {
    "a unit in 4 bits is left in float": (skips, int4_linears, "float instead of int4"),
    "a unit in FP8 is left in float": (skips, fp8_linears, "float instead of fp8"),
    "inputs of FP8 weights stay in float": (forgets_inputs, fp8_linears, "weights of float inputs instead of fp8"),
}


@pytest.mark.parametrize(("plant", "module", "found"), DEFECTS.values(), ids=DEFECTS)
def test_a_planned_unit_that_is_not_obeyed_is_found(
    built: Built,
    project: Path,
    tmp_path: Path,
    target: TensorRT,
    monkeypatch: pytest.MonkeyPatch,
    plant: Callable[[ModuleType, pytest.MonkeyPatch], None],
    module: ModuleType,
    found: str,
) -> None:
    quantized = artifact.load(built("auto")[0].folder / "quantized", QuantizedModel)
    monkeypatch.setattr(hardware, "_checkpoint", lambda *_: (quantized.folder, {"quantized": quantized}))
    plant(module, monkeypatch)
    with pytest.raises(BuildError) as refused:
        lowered(request_for(project, tmp_path, "auto"), target)
    assert "otherwise than planned" in refused.value.found and found in refused.value.found


def test_linears_of_a_checkpoint_that_its_precision_does_not_have_are_refused(
    project: Path, tmp_path: Path, target: TensorRT
) -> None:
    """Evidence of fp8 and auto counts on it: it asks which linears are in float of int4 alone."""
    request = request_for(project, tmp_path, "fp8")
    rules = (Rule(match="layers.0.*", scheme=FP8), Rule(match="*", scheme=Scheme(bits=8, symmetric=True)))
    plan = request.recipe.plan.model_copy(update={"schemes": rules, "kv_cache": KVCache(dtype="float32")})
    graph, recipe = tiny_graph(), request.recipe.model_copy(update={"plan": plan})
    planned = written_plan(recipe, graph, tmp_path / "plan")
    quantized = quantize(recipe.quantize, graph, request.calibration, planned, tmp_path / "quantized")
    with pytest.raises(BuildError, match="float instead of int8"):
        lowered(replace(request, checkpoint=quantized.folder), target)


def test_a_recipe_with_too_few_samples_is_refused(project: Path, tmp_path: Path, target: TensorRT) -> None:
    with pytest.raises(RecipeError, match=r"plan\.samples is 20"):
        lowered(request_for(project, tmp_path, "auto", samples=20), target)


@pytest.mark.parametrize("name", ["ort-cpu", "cuda", "ort-cuda"])
def test_a_target_refuses_inputs_that_it_does_not_round(built: Built, tmp_path: Path, name: str) -> None:
    quantized = artifact.load(built("fp8")[0].folder / "quantized", QuantizedModel)
    with pytest.raises(BuildError, match=f"linears in fp8, which {name} does not compute"):
        build_candidate(
            tiny_graph(), quantized, tmp_path / "b", target=graph_target(name), slots=1, progress=lambda _: None
        )


@pytest.mark.parametrize("name", ["cuda", "ort-cuda"])
def test_a_gpu_without_a_device_is_planned_for_by_what_it_declares(project: Path, name: str) -> None:
    recipe, graph = load_recipe(project / "params.yaml"), tiny_graph().record
    written = recipe.model_copy(update={"build": recipe.build.model_copy(update={"target": name})})
    chosen = written.model_copy(
        update={"plan": written.plan.model_copy(update={"schemes": "auto", "embeddings": "auto", "kv_cache": "auto"})}
    )
    for asked in (written, chosen):
        table = cost_table(asked, graph, measure=asked is chosen)
        assert table.target == name and not table.timed
    caches = {"int8", "float32", "fp8"} if name == "cuda" else {"int8", "float32"}
    assert caches == table.attention.keys(), "no cache that the target has not"
    for (columns, outputs), sizes in table.bytes.items():
        assert sizes["fp32"] == 2 * columns * outputs and "static int8" not in sizes
        assert all(size < sizes["fp32"] for scheme, size in sizes.items() if scheme != "fp32")
        one = {scheme: seconds[1] for scheme, seconds in table.seconds[columns, outputs].items()}
        assert min(one, key=one.__getitem__) == min(sizes, key=sizes.__getitem__), "one token is bandwidth-bound"


def test_linears_in_fp8_are_as_fast_as_the_target_computes_them(project: Path) -> None:
    """At the rate of 16 bits: ort-cuda decodes such weights, and kernels of cuda do not reach twice that on sm90."""
    recipe, graph = load_recipe(project / "params.yaml"), tiny_graph().record
    rule = Rule(match="*", scheme=Scheme.model_validate({"format": "fp8-dynamic"}))
    plan = recipe.plan.model_copy(update={"schemes": (rule,), "workload": {MANY: 1.0}})
    found: dict[str, set[float]] = {}
    for name in ("cuda", "ort-cuda"):
        build = recipe.build.model_copy(update={"target": name})
        table = cost_table(recipe.model_copy(update={"plan": plan, "build": build}), graph, measure=False)
        rows = [(2 * MANY * k * n, table.seconds[k, n].get("fp8-dynamic")) for k, n in table.seconds]
        found[name] = {round(operations / seconds[MANY] / 1e12) for operations, seconds in rows if seconds}
    assert found == {"cuda": {790}, "ort-cuda": {790}}


def test_static_inputs_are_refused_before_anything_takes_long(project: Path) -> None:
    """Other passes of cuda count on linears that its kernels compute, and blamed a norm."""
    recipe = load_recipe(project / "params.yaml")
    plan = recipe.plan.model_copy(update={"schemes": (Rule(match="*", scheme=STATIC_INT8),)})
    with pytest.raises(BuildError, match="linears in static int8, which cuda does not compute"):
        STAGES["environment"](recipe.model_copy(update={"plan": plan}))


def test_a_written_plan_says_which_times_nobody_measured(project: Path, tmp_path: Path) -> None:
    recipe, graph = load_recipe(project / "params.yaml"), tiny_graph()
    plan = written_plan(recipe, graph, tmp_path / "plan").record
    found = timed(plan, recipe, graph.record)
    for part in (*found.units, found.embeddings, found.kv_cache):
        assert part.seconds and part.reason == "written in the recipe; time by what cuda declares"
    here = recipe.model_copy(update={"build": recipe.build.model_copy(update={"target": "ort-cpu"})})
    assert {unit.reason for unit in timed(plan, here, graph.record).units} == {"written in the recipe"}


@pytest.mark.parametrize(("name", "dtype"), [("ort-cpu", "fp8"), ("ort-cuda", "fp8"), ("cuda", "int4")])
def test_a_cache_that_the_target_does_not_keep_is_refused_before_anything_takes_long(
    project: Path, name: str, dtype: str
) -> None:
    recipe = load_recipe(project / "params.yaml")
    plan = recipe.plan.model_copy(update={"kv_cache": KVCache.model_validate({"dtype": dtype})})
    build = recipe.build.model_copy(update={"target": name})
    with pytest.raises(BuildError, match=f"plan.kv_cache.dtype: {dtype}, which {name} does not keep"):
        STAGES["environment"](recipe.model_copy(update={"plan": plan, "build": build}))


def test_candidates_are_what_the_target_has() -> None:
    device = Throughput(1.0, {"float": 1.0})
    candidates = target_candidates(
        Capabilities((), kv_dtypes=("float16",), schemes=(FLOAT, STATIC_INT8), throughput=device)
    )
    assert candidates.schemes == (FLOAT, STATIC_INT8) and [cache.dtype for cache in candidates.caches] == ["float32"]
