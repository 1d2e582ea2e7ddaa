"""Units, and rules as the kernels and formats they come to."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantization import input_scale
from quantization.units import (
    candidates_for,
    fitted_schemes,
    fold_target_of,
    resolve,
    unit_of,
    units_of,
    written_units,
)
from tapeout.artifact import Artifact
from tapeout.formats import formats
from tapeout.number_format import NumberFormat
from tapeout.portable_graph import FoldTarget, LinearGroup, PortableGraph
from tapeout.quantized import format_of, round_to_nearest, stored_by_rtn
from tapeout.recipe import Rule
from tapeout.schemes import CANDIDATE_SCHEMES, FLOAT, STATIC_INT8, Scheme
from tests.graphs import llama_graph


@pytest.fixture(scope="module")
def graph(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Artifact[PortableGraph]:
    return llama_graph(tiny_checkpoint, tmp_path_factory.mktemp("graph") / "graph")


@given(layers_per_group=st.integers(1, 9))
def test_units_hold_every_linear_but_the_head_once(graph: Artifact[PortableGraph], layers_per_group: int) -> None:
    units = units_of(graph.record, layers_per_group)
    names = [group.name for unit in units for group in unit.groups]
    assert sorted(names) == sorted(g.name for g in graph.record.groups if g.name != "lm_head")
    assert len(units) == 4 * -(-graph.record.layers // layers_per_group)
    assert all(
        len(unit.groups) <= layers_per_group and len({g.in_features for g in unit.groups}) == 1 for unit in units
    )


def test_units_are_named_by_their_layers_and_end_where_shapes_change(graph: Artifact[PortableGraph]) -> None:
    assert [unit.name for unit in units_of(graph.record, 3)][:5] == [
        *("layers.0-2.qkv", "layers.0-2.o", "layers.0-2.gate_up", "layers.0-2.down"),
        "layers.3.qkv",
    ]
    groups = tuple(
        g.model_copy(update={"in_features": 64}) if g.name == "layers.1.o" else g for g in graph.record.groups
    )
    changed = graph.record.model_copy(update={"groups": groups})
    assert {u.name for u in units_of(changed, 3) if u.name.endswith(".o")} == {
        *("layers.0.o", "layers.1.o", "layers.2.o", "layers.3.o"),
    }


def test_a_linear_outside_the_layers_is_a_unit_of_its_own(graph: Artifact[PortableGraph]) -> None:
    alone = LinearGroup(
        name="project_out", members=("project_out.weight",), biases=(None,), in_features=128, out_features=(64,)
    )
    record = graph.record.model_copy(update={"groups": (*graph.record.groups, alone)})
    unit = units_of(record, 4)[-1]
    assert (unit.name, unit.first_layer, unit.columns) == ("project_out", 0, 128)
    assert resolve(record, [Rule(match="project_*", bits=32), Rule(match="*", bits=8)])["project_out"].bits == 32


RULES = (
    Rule(match="layers.*.o", bits=4, group_size=32, symmetric=True),
    Rule(match="layers.[01].gate_up", bits=8, activations="int8"),
    Rule(match="*", bits=8, group_size=64, symmetric=True),
)


def test_a_written_plan_is_the_rules_exactly(graph: Artifact[PortableGraph]) -> None:
    kernels = resolve(graph.record, RULES)
    assert kernels["layers.3.o"] == Scheme(bits=4, group_size=32, symmetric=True)
    assert kernels["layers.1.gate_up"] == Scheme(bits=8, activations="int8")
    assert kernels["layers.2.gate_up"] == kernels["layers.0.qkv"] == Scheme(bits=8, group_size=64, symmetric=True)
    assert "lm_head" not in kernels
    units = {unit.name: kernels[unit.groups[0].name].name for unit in written_units(graph.record, kernels)}
    assert units == {
        "layers.0-3.qkv": "8-bit g64",
        "layers.0-3.o": "4-bit g32",
        "layers.0-1.gate_up": "static int8",
        "layers.2-3.gate_up": "8-bit g64",
        "layers.0-3.down": "8-bit g64",
    }


def test_runs_of_layers_are_cut_where_one_is_missing(graph: Artifact[PortableGraph]) -> None:
    rules = [Rule(match="layers.2.qkv", bits=4), Rule(match="*", bits=8)]
    units = [u.name for u in written_units(graph.record, resolve(graph.record, rules)) if u.name.endswith("qkv")]
    assert sorted(units) == ["layers.0-1.qkv", "layers.2.qkv", "layers.3.qkv"]
    assert unit_of(graph.record.groups[:1]).name == "layers.0.qkv"


def test_group_sizes_that_do_not_divide_shrink_and_are_told(graph: Artifact[PortableGraph]) -> None:
    kernels = resolve(graph.record, [Rule(match="*", bits=4, group_size=256, symmetric=True)])
    stored, notes = fitted_schemes(graph.record, kernels, Scheme(bits=32))
    assert stored["layers.0.down"] == kernels["layers.0.down"]
    shrunk = stored["layers.0.qkv"]
    assert shrunk.group_size == 128
    assert stored["lm_head"] == stored["embedding"] == FLOAT
    assert len(notes) == 1 and "groups of 128 instead of 256, which does not divide 128 inputs" in notes[0]


@pytest.mark.parametrize("columns", [576, 1536, 100, 16])
def test_the_menu_fits_every_width_and_offers_nothing_twice(columns: int) -> None:
    kernels = candidates_for(columns)
    assert len({kernel.name for kernel in kernels}) == len(kernels) <= len(CANDIDATE_SCHEMES)
    assert {FLOAT, STATIC_INT8} <= set(kernels)
    weight = np.random.default_rng(0).standard_normal((4, columns)).astype(np.float32)
    for kernel in kernels:
        assert kernel.fitted(columns) == kernel
        stored = stored_by_rtn(kernel, weight)
        decoded = stored if isinstance(stored, np.ndarray) else stored.dequantize()
        assert np.abs(decoded - weight).max() < (1e-9 if kernel == FLOAT else 0.5)


def test_a_scale_goes_into_a_linear_of_the_same_layer_only(graph: Artifact[PortableGraph]) -> None:
    groups = {g.name: g for g in graph.record.groups}
    near = groups["layers.1.down"].model_copy(
        update={"fold_target": FoldTarget(kind="linear", weight=groups["layers.1.gate_up"].members[1])}
    )
    far = near.model_copy(update={"fold_target": FoldTarget(kind="linear", weight=groups["layers.0.o"].members[0])})
    norm = near.model_copy(update={"fold_target": FoldTarget(kind="norm", weight="model.norm.weight")})
    assert fold_target_of(near, graph.record) == near.fold_target
    assert fold_target_of(far, graph.record) is None
    assert fold_target_of(norm, graph.record) == norm.fold_target
    assert fold_target_of(groups["layers.1.o"], graph.record) is None


@pytest.mark.parametrize("name", [name for name, found in formats().items() if isinstance(found, NumberFormat)])
def test_a_producer_makes_up_for_an_input_scale_or_gets_none(graph: Artifact[PortableGraph], name: str) -> None:
    """Planted: scales of FP8 that are divided and then cut off where float16 has no smaller normal number."""
    groups = {group.name: group for group in graph.record.groups}
    producer = groups["layers.1.gate_up"].members[1]
    down = groups["layers.1.down"].model_copy(update={"fold_target": FoldTarget(kind="linear", weight=producer)})
    scheme = Scheme.model_validate({"format": name} | ({"group_size": 32} if formats()[name].grouped else {}))
    target = fold_target_of(down, graph.record, {"layers.1.gate_up": scheme})
    weight = (np.random.default_rng(0).standard_normal((64, 64)) * 0.02).astype(np.float32)
    scale = np.geomspace(0.01, 100, 64).astype(np.float32)
    made, absorbing = round_to_nearest(weight, scheme), FoldTarget(kind="linear", weight=producer)
    folded = format_of(scheme).storable(input_scale.absorb(made.scales, scale, absorbing))
    divided = np.allclose(folded * scale[:, None], made.scales, rtol=1e-3)
    assert (target == down.fold_target) == divided, (
        "a linear of this format is divided by what it cannot hold, or never"
    )
