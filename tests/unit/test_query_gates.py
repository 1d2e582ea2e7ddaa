"""Projections that hold queries and gates: neither half decides for the other. And rates of a recurrence, in float."""

from __future__ import annotations

import numpy as np
import pytest

from quantization.output_error import output_error
from quantization.query_gates import multiplied, restored, row_factors
from quantization.search import SearchResult, search
from quantization.statistics import Statistics
from quantization.units import candidates_of, resolve, units_of
from tapeout.errors import RecipeError
from tapeout.number_format import FloatArray
from tapeout.portable_graph import FoldTarget, LinearGroup, PortableGraph
from tapeout.quantized import round_to_nearest
from tapeout.recipe import Quantize, Rule
from tapeout.schemes import FLOAT, Scheme
from tests.exported import family_graph

COLUMNS, ROWS = 64, 8  # input channels; rows of a query's head, and of its gate's
FOUR = Scheme(bits=4, group_size=32, symmetric=True)
NORM = FoldTarget(kind="norm", weight="norm")
RULES = (Rule(match="*", bits=8, symmetric=True),)


@pytest.fixture(scope="module")
def graph() -> PortableGraph:
    return family_graph("qwen3_5").record


def test_the_graph_says_which_rows_are_gates(graph: PortableGraph) -> None:
    gated = {group.name: group.gated for group in graph.groups if group.gated}
    assert gated == {"layers.1.qkv": (16, 0, 0)}


def inputs(rng: np.random.Generator) -> Statistics:
    x = rng.standard_normal((200, COLUMNS)).astype(np.float32) * np.geomspace(0.1, 10, COLUMNS, dtype=np.float32)
    gram = (x.T @ x / len(x))[None]
    return Statistics(gram=gram, holdout=gram, mean_abs=np.abs(x).mean(axis=0), max_abs=np.abs(x).max(axis=0))


def fused(rng: np.random.Generator) -> tuple[FloatArray, FloatArray]:
    """A weight, and which rows are gates: a hundred times as large, most so for the smallest inputs."""
    weight = rng.standard_normal((4 * ROWS, COLUMNS)).astype(np.float32)
    gates = np.arange(len(weight)) // ROWS % 2 == 1
    spread = np.geomspace(0.1, 10, COLUMNS, dtype=np.float32)
    weight[gates] *= 100 / spread
    return weight, gates


def group(gated: tuple[int, ...]) -> LinearGroup:
    return LinearGroup(
        name="layers.0.qkv",
        members=("q",),
        biases=(None,),
        in_features=COLUMNS,
        out_features=(4 * ROWS,),
        fold_target=NORM,
        gated=gated,
    )


def searched(weight: FloatArray, seen: Statistics, gated: tuple[int, ...]) -> tuple[FloatArray, SearchResult]:
    """The weight that an engine computes with, and what was found."""
    factors = row_factors([weight], group(gated), seen)
    found = search(multiplied([weight], factors), FOUR, seen, Quantize(candidates=("rtn", "awq")), NORM)
    (linear,) = restored([found.members[0].linear], factors)
    return linear.dequantize() / found.scale.values, found


def test_an_input_scale_serves_queries_and_gates_alike() -> None:
    rng = np.random.default_rng(3)
    weight, gates = fused(rng)
    seen = inputs(rng)

    def relative_error(decoded: FloatArray, rows: FloatArray) -> float:
        return output_error((decoded - weight)[rows], seen.gram) / output_error(weight[rows], seen.gram)

    (together, by_gates), (apart, by_both) = (searched(weight, seen, gated) for gated in ((), (ROWS,)))
    assert by_gates.scale.label != by_both.scale.label
    assert relative_error(apart, ~gates) < 0.7 * relative_error(together, ~gates)


def test_no_code_and_no_scale_of_a_rounding_changes() -> None:
    rng = np.random.default_rng(4)
    weight, _ = fused(rng)
    factors = row_factors([weight], group((ROWS,)), inputs(rng))
    assert factors[0] is not None and set(factors[0]) == {1.0, min(factors[0])} and min(factors[0]) < 0.1
    plain = round_to_nearest(weight, FOUR)
    (linear,) = restored([round_to_nearest(part, FOUR) for part in multiplied([weight], factors)], factors)
    assert (linear.codes == plain.codes).all() and (linear.scales == plain.scales).all()


def test_rates_stay_in_float_unless_a_rule_names_them(graph: PortableGraph) -> None:
    assert resolve(graph, RULES)["layers.0.delta_rates"] == FLOAT
    assert resolve(graph, (Rule(match="layers.*", bits=8), *RULES))["layers.0.delta_rates"] == FLOAT
    for named in ("layers.*.delta_rates", "*.delta_rates"):
        rule = Rule(match=named, bits=8, symmetric=True)
        for rules in ((rule, *RULES), (*RULES, rule)):
            assert resolve(graph, rules)["layers.0.delta_rates"] == rule.scheme
    with pytest.raises(RecipeError, match="is never used"):
        resolve(graph, (*RULES, Rule(match="layers.*.delta_out", bits=8)))
    assert "layers.0.delta_in" not in resolve(graph, RULES)  # there is nothing else before it but the convolution


def test_rates_of_a_low_rank_stay_in_float() -> None:
    """Kimi Linear makes decays by two linears, of which the first reads what betas are made of."""
    graph = family_graph("kimi_linear").record
    members = {group.name: [name.split(".")[-2] for name in group.members] for group in graph.groups}
    rates = {name: members[name] for name in ("layers.0.delta_rates", "layers.0.delta_rates.f_b_proj")}
    assert list(rates.values()) == [["f_a_proj", "b_proj"], ["f_b_proj"]]
    resolved = resolve(graph, RULES)
    assert {name for name, scheme in resolved.items() if scheme == FLOAT} == {*rates}
    assert all(candidates_of(group) == (FLOAT,) for group in graph.groups if group.name in rates)
    named = Rule(match="layers.*.delta_rates*", bits=8, symmetric=True)
    assert all(resolve(graph, (named, *RULES))[name] == named.scheme for name in rates)


def test_a_gate_of_what_a_recurrence_gives_is_no_mlp() -> None:
    """It is made by two linears, too, of which a rule over the MLP says nothing."""
    members = {group.name: [*group.members] for group in family_graph("kimi_linear").record.groups}
    mlp, gate = "model.layers.0.mlp", "model.layers.0.self_attn"
    assert members["layers.0.gate_up"] == [f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight"]
    assert members["layers.0.down"] == [f"{mlp}.down_proj.weight"]
    assert members["layers.0.g_a_proj"] == [f"{gate}.g_a_proj.weight"]
    assert members["layers.0.g_b_proj"] == [f"{gate}.g_b_proj.weight"]


def test_the_planner_leaves_rates_in_float(graph: PortableGraph) -> None:
    menus = {unit.name: candidates_of(unit.groups[0]) for unit in units_of(graph, 1)}
    assert menus["layers.0.delta_rates"] == (FLOAT,)
    assert all(len(menu) > 1 for name, menu in menus.items() if name != "layers.0.delta_rates")
