"""Plans: chosen by costs and sensitivities, corrected by what they cost as a whole, and told with their reasons."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantization.calibrate import calibrate
from quantization.calibration import Calibration
from quantization.cost_table import CostTable, schemes_by_shape, workload_of
from quantization.plan import COLUMNS, FRONTIER_FILE, PLAN_FILE, PrecisionPlan, summary, table
from quantization.plan_search import make_plan, reason
from quantization.plan_solver import Chosen, Option, PlanBudget, Settled, Workload, choose, settle
from quantization.sensitivity import Sensitivity
from quantization.sensitivity_sweep import sweep
from quantization.units import resolve, units_of
from tapeout.artifact import Artifact, ArtifactRef, create, load
from tapeout.errors import QuantizationError
from tapeout.portable_graph import PortableGraph
from tapeout.recipe import BaseRecipe, Calibrate, DataSource, KVCache, ModelSource, Plan, Rule
from tapeout.schemes import CANDIDATE_SCHEMES, EMBEDDING_CANDIDATES, FLOAT, Scheme
from tests.graphs import llama_graph

ONE_ROW = Workload(shares={1: 1.0})
# Faster is worse, in even steps: a plan of n units can have any KL up to 4n thousandths.
OPTIONS = [Option(name=f"k{n}", seconds={1: 10.0 - n}, bytes=10 - n, kl=n / 1000) for n in range(5)]
UNITS = {f"unit {n}": OPTIONS for n in range(6)}


def settled(joint: Callable[[Chosen], float], limit: float = 0.01) -> Settled:
    return settle(UNITS, ONE_ROW, PlanBudget(kl=limit), "seconds", joint_kl=joint)


@pytest.mark.parametrize("ratio", [0.5, 0.9, 1.0, 1.5, 3.0])
def test_the_budget_of_the_sum_follows_what_plans_cost_as_a_whole(ratio: float) -> None:
    limit = 0.0101  # between two plans at every ratio
    found = settled(lambda chosen: ratio * chosen.kl, limit)
    assert found.round in found.rounds and found.round.joint_kl <= limit
    best = choose(UNITS, ONE_ROW, PlanBudget(kl=limit / ratio))
    assert found.chosen.seconds == pytest.approx(best.seconds)
    assert found.round.predicted_kl == pytest.approx(found.chosen.kl)


def test_a_plan_that_was_tried_is_not_measured_again() -> None:
    asked: list[tuple[str, ...]] = []

    def joint(chosen: Chosen) -> float:
        asked.append(tuple(choice.option for choice in chosen.choices))
        return 0.0111 if chosen.kl > 0.0095 else 0.0089  # the limit lies between two plans

    found = settled(joint)
    assert len(asked) == len(set(asked)) == len(found.rounds) and found.round.joint_kl == 0.0089


def test_plans_that_keep_missing_the_limit_by_little_are_given_less() -> None:
    fine = [Option(name=str(n), seconds={1: 400.0 - n}, bytes=1, kl=n / 1e5) for n in range(0, 400, 20)]

    def joint(chosen: Chosen) -> float:
        return 0.01001 if chosen.kl > 0.0085 else 1.1 * chosen.kl

    found = settle({f"unit {n}": fine for n in range(6)}, ONE_ROW, PlanBudget(kl=0.01), "seconds", joint_kl=joint)
    assert [r.joint_kl for r in found.rounds[:3]] == [0.01001] * 3 and found.round.joint_kl <= 0.01


def test_no_plan_within_the_limit_is_told_with_the_least_that_was_found() -> None:
    with pytest.raises(
        QuantizationError, match=r"no plan has a KL of at most 0\.01 as a whole; the least of \d is 0\.0"
    ):
        settled(lambda chosen: 0.02 + chosen.kl)


def test_the_reason_names_the_next_faster_kernel_and_what_it_would_spend() -> None:
    fast, slow, slowest = (
        Option(name="4-bit g32", seconds={1: 1e-6}, bytes=1_000_000, kl=0.004),
        Option(name="static int8", seconds={1: 2e-6}, bytes=2_000_000, kl=0.001),
        Option(name="fp32", seconds={1: 9e-6}, bytes=8_000_000, kl=0.0),
    )
    picked = choose({"o": [fast, slow, slowest]}, ONE_ROW, PlanBudget(kl=0.002)).choices[0]
    assert picked.option == "static int8"
    options = [fast, slow, slowest]
    assert reason(picked, options, ONE_ROW, "seconds") == "4-bit g32 would save 1.0 µs and spend 0.0030 more KL"
    assert reason(picked, options, ONE_ROW, "bytes") == "4-bit g32 would save 1.00 MB and spend 0.0030 more KL"
    cheapest = choose({"o": options}, ONE_ROW, PlanBudget()).choices[0]
    assert reason(cheapest, options, ONE_ROW, "seconds") == "the fastest there is"
    assert reason(cheapest, options, ONE_ROW, "bytes") == "the smallest there is"
    assert reason(cheapest, options[:1], ONE_ROW, "seconds") == "the only one there is for its size"


# On the tiny llama:

FIGURES = {  # seconds and size
    "fp32": (8.0, 32),
    "8-bit g64": (4.1, 9),
    "8-bit g128": (4.0, 9),
    "static int8": (3.0, 8),
    "6-bit g32": (2.95, 8),
    "6-bit g64": (2.9, 7),
    "6-bit g128": (2.85, 6.5),
    "5-bit g32": (2.5, 6),
    "4-bit g32": (2.0, 5),
    "4-bit g128": (1.9, 4),
}
assert set(FIGURES) == {kernel.name for kernel in (*CANDIDATE_SCHEMES, *EMBEDDING_CANDIDATES)}


# Tables and cache as a recipe writes them out:
FIXED: dict[str, Any] = {"embeddings": Scheme(bits=8, group_size=64, symmetric=True), "kv_cache": KVCache()}


def recipe(**settings: Any) -> BaseRecipe:
    return BaseRecipe(
        model=ModelSource(source="file:m"),
        data=DataSource(source="file:d"),
        calibrate=Calibrate(samples=24, tokens=96),
        plan=Plan(
            **{
                "schemes": "auto",
                "embeddings": "auto",
                "kv_cache": "auto",
                "context": 64,
                "layers_per_group": 2,
                "samples": 2,
                "workload": {1: 1.0},
                "max_kl": 2e-4,
            }
            | settings
        ),
    )


def costs(graph: PortableGraph, plan: Plan) -> CostTable:
    """Made up: as many microseconds and eighths of a byte for each weight as above, at any number of rows."""
    speeds = {"float32": 3e-6, "int8": 1e-6, "int4": 4e-6}
    attention = {dtype: dict.fromkeys(workload_of(plan), seconds) for dtype, seconds in speeds.items()}
    found = CostTable("ort-cpu", 2, 4, plan.context, {}, {}, attention)
    for (columns, outputs), kernels in schemes_by_shape(graph, plan).items():
        weights = columns * outputs
        figures = {kernel.name: FIGURES.get(kernel.name, (4.0, 9)) for kernel in kernels}
        found.bytes[columns, outputs] = {name: weights * size // 8 for name, (_, size) in figures.items()}
        found.seconds[columns, outputs] = {
            name: dict.fromkeys((1, *workload_of(plan)), weights * seconds * 1e-09)
            for name, (seconds, _) in figures.items()
        }
    return found


Inputs = tuple[Artifact[PortableGraph], Artifact[Calibration], Artifact[Sensitivity], list[list[int]]]


@pytest.fixture(scope="module")
def inputs(
    tiny_checkpoint: Path, tiny_texts: Callable[[int, int], list[str]], tmp_path_factory: pytest.TempPathFactory
) -> Inputs:
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("inputs")
    graph = llama_graph(tiny_checkpoint, folder / "graph")
    texts = tiny_texts(24, 5)
    tokenizer: Any = AutoTokenizer.from_pretrained(tiny_checkpoint)
    rows = [tokenizer(text).input_ids for text in texts]
    calibration = calibrate(recipe().calibrate, graph, texts, folder / "calibration")
    return (
        graph,
        calibration,
        sweep(recipe().plan, recipe().quantize, graph, calibration, rows, folder / "sensitivity"),
        rows,
    )


def planned(inputs: Inputs, wanted: BaseRecipe, folder: Path) -> Artifact[PrecisionPlan]:
    graph, calibration, sensitivity, rows = inputs
    return make_plan(
        wanted.plan, wanted.quantize, graph, calibration, sensitivity, costs(graph.record, wanted.plan), rows, folder
    )


def test_a_chosen_plan_keeps_to_its_budget_as_a_whole(inputs: Inputs, tmp_path: Path) -> None:
    found = planned(inputs, recipe(), tmp_path / "plan")
    search, units = found.record.search, found.record.units
    assert search is not None and search.joint_kl <= 2e-4
    assert [unit.name for unit in units] == [unit.name for unit in units_of(inputs[0].record, 2)]
    parts = (*units, found.record.embeddings, found.record.kv_cache)
    assert sum(part.kl or 0 for part in parts) == pytest.approx(search.predicted_kl)
    assert sum(part.bytes or 0 for part in parts) in {r.bytes for r in search.rounds}
    assert len({unit.scheme for unit in units}) > 1, "the budget neither binds nor frees: this shows nothing"
    assert set(search.samples).isdisjoint(inputs[2].record.samples) and len(search.samples) == 4
    assert (search.predicted_kl, search.joint_kl) in {(r.predicted_kl, r.joint_kl) for r in search.rounds}
    assert found.parents["sensitivity"] == inputs[2].ref
    assert "KV cache for 4 sequences of 64 tokens" in summary(found.record)
    kernels = found.record.schemes
    assert kernels.keys() == {group.name for group in inputs[0].record.groups} - {"lm_head"}

    text = (found.folder / PLAN_FILE).read_text()
    assert all(f"| {unit.name} | {unit.scheme.name} |" in text and unit.reason in text for unit in units)
    assert {len(row) for row in table(found.record)} == {len(COLUMNS)}
    points = list(csv.DictReader((found.folder / FRONTIER_FILE).open()))
    assert [p["chosen"] for p in points].count("1") == 1
    assert all(float(a["kl"]) <= float(b["kl"]) for a, b in itertools.pairwise(points))


def test_more_quality_to_spend_buys_time_and_fewer_bytes_buy_bytes(inputs: Inputs, tmp_path: Path) -> None:
    def sums(folder: str, **settings: Any) -> tuple[float, int]:
        record = planned(inputs, recipe(**settings), tmp_path / folder).record
        parts = (*record.units, record.embeddings, record.kv_cache)
        return sum(part.seconds or 0 for part in parts), sum(part.bytes or 0 for part in parts)

    tight, loose, small = sums("a", max_kl=1e-4), sums("b"), sums("c", goal="memory")
    assert loose[0] < tight[0] and small[1] <= loose[1]
    fastest, smallest = sums("d", max_kl=1.0), sums("e", max_kl=1.0, goal="memory")
    bounded = sums("f", max_kl=1.0, max_bytes=smallest[1])
    assert bounded[1] == smallest[1] < fastest[1] and bounded[0] >= fastest[0]


def test_the_same_inputs_give_the_same_plan(inputs: Inputs, tmp_path: Path) -> None:
    assert planned(inputs, recipe(), tmp_path / "a").digest == planned(inputs, recipe(), tmp_path / "b").digest


def test_tables_and_cache_are_chosen_like_any_unit(inputs: Inputs, tmp_path: Path) -> None:
    def made(folder: str, **settings: Any) -> PrecisionPlan:
        return planned(inputs, recipe(**settings), tmp_path / folder).record

    exact, loose, small = made("a", max_kl=1e-7), made("b", max_kl=1.0), made("c", max_kl=1.0, goal="memory")
    assert exact.embeddings.scheme == FLOAT and exact.kv_cache.settings.dtype == "float32"
    for plan, dtype in ((loose, "int8"), (small, "int4")):  # the fastest attention, and the fewest bytes
        assert plan.embeddings.scheme == EMBEDDING_CANDIDATES[-1] and plan.kv_cache.settings == KVCache(dtype=dtype)
        assert plan.embeddings.kl == inputs[2].record.embeddings["4-bit g32"]
        assert plan.kv_cache.kl == inputs[2].record.kv_cache[f"{dtype} per channel"]
    assert loose.embeddings.reason == loose.kv_cache.reason == "the fastest there is"
    assert small.embeddings.reason == small.kv_cache.reason == "the smallest there is"
    assert " would save " in exact.embeddings.reason and " would save " in exact.kv_cache.reason
    rows = {row[0]: row for row in table(small)}
    assert rows["embeddings"][1] == "4-bit g32" and rows["KV cache"][1] == "int4 per channel"
    assert all(rows["embeddings"]) and all(rows["KV cache"])


def test_what_is_written_out_beside_chosen_kernels_stays(inputs: Inputs, tmp_path: Path) -> None:
    found = planned(inputs, recipe(max_kl=1.0, **FIXED), tmp_path / "plan").record
    assert found.search is not None and {unit.scheme.name for unit in found.units} == {"4-bit g128"}
    assert found.embeddings.scheme == FIXED["embeddings"] and found.kv_cache.settings == FIXED["kv_cache"]
    assert found.embeddings.reason == found.kv_cache.reason == "written in the recipe"
    assert (found.embeddings.kl or 0) > 0 and (found.kv_cache.kl or 0) > 0
    with pytest.raises(QuantizationError, match="no sensitivity of embeddings to 4-bit g16"):
        other = {"embeddings": Scheme(bits=4, group_size=16, symmetric=True)}
        planned(inputs, recipe(**other), tmp_path / "other")


def test_a_budget_that_tables_and_cache_use_up_is_refused(inputs: Inputs, tmp_path: Path) -> None:
    with pytest.raises(QuantizationError, match="no plan within KL 1e-09, of which the most sparing options need"):
        planned(inputs, recipe(max_kl=1e-9, **FIXED), tmp_path / "plan")
    with pytest.raises(QuantizationError, match=r"no plan within KL .* and bytes"):
        planned(inputs, recipe(max_bytes=1000), tmp_path / "plan")
    assert not (tmp_path / "plan").exists()


def test_sensitivities_of_other_inputs_or_kernels_are_refused(inputs: Inputs, tmp_path: Path) -> None:
    graph, calibration, sensitivity, rows = inputs
    foreign = Artifact(
        sensitivity.folder,
        sensitivity.record,
        sensitivity.files,
        {"graph": ArtifactRef("PortableGraph", "f" * 64)},
        "0",
    )
    with pytest.raises(QuantizationError, match="was measured on another graph or calibration"):
        planned((graph, calibration, foreign, rows), recipe(), tmp_path / "plan")
    with pytest.raises(QuantizationError, match=r"no sensitivity of layers\.0-2\.qkv to"):
        planned(inputs, recipe(layers_per_group=3), tmp_path / "plan")


RULES = (Rule(match="layers.*.o", bits=4, group_size=32), Rule(match="*", bits=8, activations="int8"))
WRITTEN: dict[str, Any] = {"schemes": RULES} | FIXED


def test_a_written_plan_comes_through_as_it_is(inputs: Inputs, tmp_path: Path) -> None:
    graph, calibration, _, _ = inputs
    wanted = recipe(**WRITTEN)
    with create(tmp_path / "sensitivity", Sensitivity) as draft:
        draft.finish(Sensitivity(asked=False), parents={"graph": graph, "calibration": calibration})
    nothing = load(tmp_path / "sensitivity", Sensitivity)
    found = planned((graph, calibration, nothing, []), wanted, tmp_path / "plan")
    assert found.record.search is None
    assert found.record.schemes == resolve(graph.record, RULES)
    assert [(u.name, u.scheme) for u in found.record.units if u.name.endswith(".o")] == [
        ("layers.0-3.o", Scheme(bits=4, group_size=32))
    ]
    assert (
        not (found.folder / FRONTIER_FILE).exists()
        and "Written in the recipe" in (found.folder / PLAN_FILE).read_text()
    )
    # What auto is asked for does not touch a plan that is written.
    other = recipe(**WRITTEN, max_kl=0.5, goal="memory", context=32)
    assert planned((graph, calibration, nothing, []), other, tmp_path / "other").digest == found.digest


def test_a_type_of_recurrent_state_is_refused_where_there_is_none(inputs: Inputs, tmp_path: Path) -> None:
    with pytest.raises(QuantizationError, match=r"plan\.recurrent_state is bfloat16, but the model has no recurrent"):
        planned(inputs, recipe(**WRITTEN, recurrent_state="bfloat16"), tmp_path / "plan")
    assert not (tmp_path / "plan").exists()


def test_every_product_is_asked_about_with_the_kernels_it_may_get(inputs: Inputs) -> None:
    record = inputs[0].record
    auto = schemes_by_shape(record, recipe().plan)
    assert set(auto) == {(128, 256), (128, 128), (128, 512), (256, 128), (128, 1024)}
    assert {kernel.name for kernel in auto[128, 512]} == {kernel.name for kernel in CANDIDATE_SCHEMES}
    assert auto[128, 1024] == EMBEDDING_CANDIDATES  # the head
    half = schemes_by_shape(record, recipe(embeddings=WRITTEN["embeddings"]).plan)
    assert [kernel.name for kernel in half[128, 1024]] == ["8-bit g64"]
    written = schemes_by_shape(record, recipe(**WRITTEN).plan)
    assert [kernel.name for kernel in written[128, 128]] == ["4-bit g32 asym"]
