"""Keys that are put together from a latent and from a part that all heads share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir
import pytest

from engines.kernels.cpu.kernel_set import CpuKernels
from engines.passes.base import Lowering, PassResult
from engines.passes.graph import rotary_tables
from engines.passes.onnxruntime import latent_keys
from tapeout.operators.attention import is_attention
from tests.exported import build_float, family_graph
from tests.families import LAYERS, random_model
from tests.family_engines import largest_errors
from tests.lowering import FixedWeights

FAMILY = "deepseek_v3-dense"
SIZES = {"qk_nope_head_dim": 24, "qk_rope_head_dim": 8}


def lowered(name: str, change: Callable[[ir.Node], None] = lambda _: None) -> tuple[ir.Model, PassResult]:
    """A family's graph after the pass. ``change``: of each attention before it."""
    graph = family_graph(name)
    found = Lowering(
        ir.load(graph.folder / "model.onnx"), graph.record, FixedWeights({}), graph.record.max_positions, CpuKernels()
    )
    rotary_tables.run(found)
    for node in [node for node in found.model.graph if is_attention(node)]:
        change(node)
    return found.model, latent_keys.run(found)


@pytest.mark.parametrize(
    "name", [FAMILY, "deepseek_v2", "minicpm3", "youtu", "minicpm3-uneven-heads", "deepseek_v2-published-heads"]
)
def test_each_linear_is_split_once_and_keys_are_joined_once(name: str) -> None:
    model, outcome = lowered(name)
    assert (outcome.matched, outcome.declined) == (LAYERS, ())
    for node in [node for node in model.graph if is_attention(node)]:
        query, key, value = (each.producer() for each in node.inputs[:3] if each is not None)
        assert query is not None and key is not None and value is not None
        assert [query.op_type, key.op_type, value.op_type] == ["Concat", "Concat", "Transpose"]
        turned = key.inputs[0].producer() if key.inputs[0] is not None else None
        assert turned is not None and turned.op_type == "RotaryEmbedding"
        sources = {part.producer() for part in joined(turned).inputs if part is not None}
        assert [source.op_type for source in sources if source is not None] == ["Split"] * 2
    assert not {"ScatterND", "Expand"} & {node.op_type for node in model.graph}


def test_keys_without_positions_are_joined_once() -> None:
    """As in Kimi Linear."""
    model, outcome = lowered("kimi_linear")
    assert (outcome.matched, outcome.declined) == (1, ())
    (node,) = (node for node in model.graph if is_attention(node))
    names: list[list[str]] = []
    for value in node.inputs[1:3]:
        producer = value.producer() if value is not None else None
        assert producer is not None
        names.append([part.name or "" for part in joined(producer).inputs if part is not None])
    keys, values = names
    # Of each of 4 heads two parts, of which all share one.
    assert (len(keys), len({*keys}), len({*values})) == (8, 5, 4)
    query, way = node.inputs[0], list[str]()
    while query is not None and (producer := query.producer()) is not None and "MatMul" not in way:
        way.append(producer.op_type)
        query = producer.inputs[0]
    assert way == ["Transpose", "Reshape", "MatMul"]  # as a linear gives them
    assert not {"ScatterND", "RotaryEmbedding"} & {node.op_type for node in model.graph}


def joined(node: ir.Node) -> ir.Node:
    """The Concat behind a rotary embedding of keys."""
    while node.op_type != "Concat":
        value = node.inputs[0]
        producer = value.producer() if value is not None else None
        assert producer is not None
        node = producer
    return node


@pytest.mark.parametrize("name", [FAMILY, "deepseek_v2"])
@pytest.mark.parametrize(("rank", "values"), [(0, 32), (24, 32), (0, 16), (24, 48)])
def test_an_engine_computes_what_transformers_computes(name: str, rank: int, values: int, tmp_path: Path) -> None:
    """Without a latent of queries, as in DeepSeek-V2-Lite, and with one; most channels are not turned."""
    settings = {**SIZES, "q_lora_rank": rank or None, "v_head_dim": values}
    graph = family_graph(name, **settings)  # type: ignore[arg-type]
    errors = largest_errors(build_float(graph, tmp_path / "bundle", 4), random_model(name, **settings), name)
    assert max(errors.values()) < 1e-5, errors


def test_keys_that_are_changed_after_they_are_put_together_stay() -> None:
    def negate(node: ir.Node) -> None:
        key = node.inputs[1]
        assert key is not None and node.graph is not None
        changed = ir.node("Neg", [key])
        changed.outputs[0].type, changed.outputs[0].shape = key.type, key.shape
        node.graph.insert_before(node, changed)
        node.replace_input_with(1, changed.outputs[0])

    assert lowered(FAMILY, negate)[1].matched == 0


@pytest.mark.parametrize("place", [0, 1, 2])
def test_what_onnx_runtime_does_not_compute_stays(place: int) -> None:
    """Numbers are moved as for one sequence of seven tokens, which those that are sent through are not."""

    def only_so_many(node: ir.Node) -> None:
        value = node.inputs[place]
        assert value is not None and value.shape is not None and node.graph is not None
        _, heads, _, channels = value.shape
        shape = ir.Value(name=f"{value.name}.fixed", const_value=ir.tensor([1, heads, 7, channels]))
        node.graph.register_initializer(shape)
        changed = ir.node("Reshape", [value, shape])
        changed.outputs[0].type, changed.outputs[0].shape = value.type, value.shape
        node.graph.insert_before(node, changed)
        node.replace_input_with(place, changed.outputs[0])

    model, outcome = lowered(FAMILY, only_so_many)
    assert outcome.matched == 0 and all("not copied from linears alone" in reason for reason in outcome.declined)
    assert sum(node.op_type == "Reshape" and node.outputs[0].uses()[0].idx == place for node in model.graph) >= LAYERS


def test_values_that_are_moved_to_other_tokens_stay() -> None:
    def exchange(node: ir.Node) -> None:
        value = node.inputs[2]
        assert value is not None and node.graph is not None
        changed = ir.node("Transpose", [value], attributes={"perm": [2, 1, 0, 3]})
        changed.outputs[0].type, changed.outputs[0].shape = value.type, value.shape
        node.graph.insert_before(node, changed)
        node.replace_input_with(2, changed.outputs[0])

    _, outcome = lowered(FAMILY, exchange)
    assert outcome.matched == 0 and all("not copied from linears alone" in reason for reason in outcome.declined)


def other_cosines(rotary: ir.Node) -> None:
    rotary.replace_input_with(1, rotary.inputs[2])


def other_sines(rotary: ir.Node) -> None:
    rotary.replace_input_with(2, rotary.inputs[1])


def other_pairs(rotary: ir.Node) -> None:
    rotary.attributes["interleaved"] = ir.AttrInt64("interleaved", 1 - rotary.attributes.get_int("interleaved", 0))


def fewer_channels(rotary: ir.Node) -> None:
    rotary.attributes["rotary_embedding_dim"] = ir.AttrInt64("rotary_embedding_dim", 4)


@pytest.mark.parametrize("change", [other_cosines, other_sines, other_pairs, fewer_channels])
def test_queries_that_are_turned_in_another_way_stay(change: Callable[[ir.Node], None]) -> None:
    _, outcome = lowered(FAMILY, lambda node: change(next(iter(latent_keys.rotaries(node.inputs[0])))))
    assert outcome.matched == 0 and all("turned in different ways" in reason for reason in outcome.declined)


def test_keys_of_one_linear_are_none_of_these() -> None:
    assert lowered("llama")[1] == PassResult(0, ("no keys are put together from parts",))
