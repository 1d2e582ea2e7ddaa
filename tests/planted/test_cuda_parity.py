"""Defects of engines in FP8 whose attention computes in 16 bits: parity judges attention and the linear behind it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from engines.bundle import EngineBundle
from engines.kernels.cuda.plan import PLAN_FILE, LaunchPlan, PlanOperation
from engines.load import graph_target, open_probe
from evals.check import Check, Outcome
from evals.kind import Report
from evals.kinds.parity import KIND, ParityBounds, ParityReport, TableError
from evals.kinds.parity.measure import compare
from pipeline.stages.candidate import build_candidate
from quantization.calibrate import calibrate
from quantization.checkpoint import QuantizedModel
from quantization.quantize import quantize
from quantization.reference import QuantizedReference
from tapeout import artifact
from tapeout.artifact import RECORD, Artifact, ArtifactRef
from tapeout.portable_graph import PortableGraph
from tests.exported import family_graph
from tests.fake_engine import MACHINE
from tests.family_engines import texts
from tests.plans import written_plan
from tests.unit.test_cuda_fp8_engine import RECIPE, words

TOKENS, WINDOW = 90, 80
ATTENTION = {"parity_attention_error", "parity_attention_position_error"}
LINEARS = {"parity_error", "parity_mean_error", "parity_position_error"}


@pytest.fixture(scope="module")
def graph() -> Artifact[PortableGraph]:
    """Of two heads of keys, each with two of queries."""
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    return family_graph("llama-rope-scaling", max_position_embeddings=640, **sizes)


@pytest.fixture(scope="module")
def quantized(graph: Artifact[PortableGraph], tmp_path_factory: pytest.TempPathFactory) -> Artifact[QuantizedModel]:
    folder = tmp_path_factory.mktemp("quantized")
    samples = texts([words(48, 10 + row) for row in range(4)])
    calibration = calibrate(RECIPE.calibrate, graph, samples, folder / "calibration")
    return quantize(
        RECIPE.quantize, graph, calibration, written_plan(RECIPE, graph, folder / "plan"), folder / "quantized"
    )


def built(graph: Artifact[PortableGraph], quantized: Artifact[QuantizedModel], folder: Path) -> Artifact[EngineBundle]:
    return build_candidate(graph, quantized, folder, target=graph_target("cuda:host"), slots=1, progress=lambda _: None)


@pytest.fixture(scope="module")
def bundle(
    graph: Artifact[PortableGraph], quantized: Artifact[QuantizedModel], tmp_path_factory: pytest.TempPathFactory
) -> Artifact[EngineBundle]:
    return built(graph, quantized, tmp_path_factory.mktemp("bundle") / "bundle")


def judged(
    graph: Artifact[PortableGraph], quantized: Artifact[QuantizedModel], bundle: Artifact[EngineBundle], scratch: Path
) -> dict[str, Check]:
    head = next(group.members[0] for group in graph.record.groups if group.name == "lm_head")
    reference = QuantizedReference(quantized.folder, fp8_activations=True, half_cache=True)
    probe = open_probe(bundle, scratch, threads=1)
    items = compare(probe, reference, [words(TOKENS, 3), words(TOKENS, 4)], head=head, free=False)
    table = TableError(rows=1, error=0.0, worst=0)
    record = ParityReport(
        candidate="a",
        built_from="b",
        documents=len(items),
        vocabulary=1,
        max_tokens=TOKENS,
        attention=tuple(items[0].attention_errors),
        embedding=table,
        head=table,
        executed_on=MACHINE,
    )
    report = Report(ArtifactRef("ParityReport", "0" * 64), record, tuple(items))
    checks = KIND.judge(report, None, ParityBounds(min_documents=2)).checks  # type: ignore[arg-type]
    return {check.name: check for check in checks}


def failed(checks: dict[str, Check]) -> set[str]:
    return {name for name, check in checks.items() if check.outcome is Outcome.FAIL}


def test_a_sound_engine_passes(
    graph: Artifact[PortableGraph], quantized: Artifact[QuantizedModel], bundle: Artifact[EngineBundle], tmp_path: Path
) -> None:
    checks = judged(graph, quantized, bundle, tmp_path)
    assert failed(checks) == set() and checks.keys() >= ATTENTION


Edit = Callable[[list[PlanOperation], int], PlanOperation]  # of all operations, one; by its number


def changed(one: PlanOperation, pointers: dict[str, str] | None = None, **numbers: float) -> PlanOperation:
    return one.model_copy(update={"pointers": one.pointers | (pointers or {}), "numbers": one.numbers | numbers})


def of_another_layer(field: str) -> Edit:
    def edit(operations: list[PlanOperation], number: int) -> PlanOperation:
        one = operations[number]
        other = next(o for o in operations[number + 1 :] if o.kind == one.kind and o.numbers == one.numbers)
        return changed(one, {field: other.pointers[field]})

    return edit


def exchanged(operations: list[PlanOperation], number: int) -> PlanOperation:
    one = operations[number].pointers
    return changed(operations[number], {"cosines": one["sines"], "sines": one["cosines"]})


def edited(bundle: Artifact[EngineBundle], folder: Path, kind: str, edit: Edit) -> Artifact[EngineBundle]:
    """A bundle that launches the first attention, or the linear behind it, otherwise."""
    plan = LaunchPlan.model_validate_json((bundle.folder / PLAN_FILE).read_bytes())
    operations = list(plan.operations)
    at = next(
        number
        for number, one in enumerate(operations)
        if one.kind == kind and (kind == "attention" or one.pointers["y"] in plan.behind_attention)
    )
    operations[at] = edit(operations, at)
    with artifact.create(folder, EngineBundle) as draft:
        shutil.copytree(bundle.folder, draft.folder, ignore=shutil.ignore_patterns(RECORD), dirs_exist_ok=True)
        text = plan.model_copy(update={"operations": tuple(operations)}).model_dump_json()
        (draft.folder / PLAN_FILE).write_text(text)
        draft.finish(bundle.record, parents={})
    return artifact.load(folder, EngineBundle)


DEFECTS: dict[str, tuple[str, Edit, set[str]]] = {
    "a linear behind attention has the scales of another layer": (
        "linear", of_another_layer("weight.scales"), LINEARS,
    ),
    "keys have the scales of another layer": ("attention", of_another_layer("key_scales"), ATTENTION),
    "values have the scales of another layer": ("attention", of_another_layer("value_scales"), ATTENTION),
    "a mask hides the first tokens": ("attention", lambda o, n: changed(o[n], window=WINDOW), ATTENTION),
    "scores are 5 % too large": ("attention", lambda o, n: changed(o[n], scale=1.05 * 64**-0.5), ATTENTION),
    "queries and keys are turned the other way": ("attention", exchanged, ATTENTION),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "edit", "found"), DEFECTS.values(), ids=DEFECTS)
def test_a_defect_of_attention_or_of_the_linear_behind_it(
    kind: str,
    edit: Edit,
    found: set[str],
    graph: Artifact[PortableGraph],
    quantized: Artifact[QuantizedModel],
    bundle: Artifact[EngineBundle],
    tmp_path: Path,
) -> None:
    """One is not taken for the other: each is judged by what it was given."""
    checks = judged(graph, quantized, edited(bundle, tmp_path / "bundle", kind, edit), tmp_path)
    others = LINEARS if kind == "attention" else ATTENTION
    assert found <= failed(checks) and failed(checks).isdisjoint(others)
