"""Groups are read from dataflow: the same block in shapes that families really have, with no names to go by."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from tapeout.errors import ExportError
from tapeout.graph_analysis.groups import find_groups
from tapeout.graph_analysis.linears import find_linears
from tapeout.graph_analysis.rotary import find_rotary
from tapeout.operators import DOMAIN
from tapeout.portable_graph import FoldTarget, LinearGroup
from tests.lowering import linear, model_of, named, op, parameter, value

HIDDEN, HEADS, KV_HEADS, HEAD, INNER, VOCAB = 32, 4, 2, 8, 48, 53
STREAM = ["batch", "tokens", HIDDEN]
RNG = np.random.default_rng(0)


def weights(rows: int, columns: int) -> np.ndarray:
    return RNG.standard_normal((rows, columns)).astype(np.float32)


def vector(size: int) -> np.ndarray:
    return RNG.standard_normal(size).astype(np.float32)


def norm(x: ir.Value, name: str, *, offset: bool = False) -> ir.Value:
    weight: ir.Value = parameter(f"{name}.weight", vector(HIDDEN))
    if offset:  # gemma: 1 + weight
        weight = op("Add", [weight, parameter(f"one_{name.replace('.', '_')}", np.array(1.0, np.float32))], [HIDDEN])
    return op("RMSNormalization", [x, weight], x.shape, axis=-1)


def cut(x: ir.Value, name: str, sizes: list[int]) -> list[ir.Value]:
    first = op("Split", [x, parameter(name, np.array(sizes, np.int64))], outputs=len(sizes), axis=-1)
    node = first.producer()
    assert node is not None
    for part, size in zip(node.outputs, sizes, strict=True):
        part.shape = ir.Shape(["batch", "tokens", size])
    return list(node.outputs)


def heads(flat: ir.Value, count: int, name: str) -> ir.Value:
    shape = parameter(name, np.array([0, 0, count, HEAD], np.int64))
    rows = op("Reshape", [flat, shape], ["batch", "tokens", count, HEAD])
    return op("Transpose", [rows], ["batch", count, "tokens", HEAD], perm=[0, 2, 1, 3])


def decoder(
    *, fused: bool = False, biased: bool = False, gated: bool = True, offset: bool = False, residual: float = 1.0
) -> ir.Model:
    """One layer and a head over an embedded stream."""
    ids = value("input_ids", ["batch", "tokens"], ir.DataType.INT64)
    mask = value("attention_mask", ["batch", "total"], ir.DataType.INT64)
    past = [value(f"past_key_values.0.{part}", ["batch", KV_HEADS, "past", HEAD]) for part in ("key", "value")]
    x = op("Gather", [parameter("wte.weight", weights(VOCAB, HIDDEN)), ids], STREAM, axis=0)

    def fc(source: ir.Value, name: str, rows: int) -> ir.Value:
        columns = int(source.shape[-1])  # type: ignore[index,arg-type]
        return linear(source, f"h.0.{name}", weights(rows, columns), vector(rows) if biased else None)

    def branch(y: ir.Value, name: str) -> ir.Value:
        return y if residual == 1 else op("Mul", [y, parameter(f"by_{name}", np.array(residual, np.float32))], STREAM)

    normed = norm(x, "h.0.n1", offset=offset)
    widths = [HEADS * HEAD, KV_HEADS * HEAD, KV_HEADS * HEAD]
    if fused:
        q, k, v = cut(fc(normed, "a", sum(widths)), "sizes_qkv", widths)
    else:
        q, k, v = (fc(normed, name, width) for name, width in zip("abc", widths, strict=True))
    table = [parameter(name, np.ones((8, HEAD // 2), np.float32)) for name in ("cos", "sin")]
    positions = value("position_ids", ["batch", "tokens"], ir.DataType.INT64)
    turned = [
        op("RotaryEmbedding", [heads(part, n, name), *table, positions], ["batch", n, "tokens", HEAD])
        for part, n, name in ((q, HEADS, "shape_q"), (k, KV_HEADS, "shape_k"))
    ]
    attended = op(
        "Attention",
        [*turned, heads(v, KV_HEADS, "shape_v"), mask, *past],
        ["batch", HEADS, "tokens", HEAD],
        domain=DOMAIN,
        outputs=3,
        scale=0.3,
        softcap=0.0,
        window=0,
    )
    rows = op("Transpose", [attended], ["batch", "tokens", HEADS, HEAD], perm=[0, 2, 1, 3])
    flat = op("Reshape", [rows, parameter("shape_o", np.array([0, 0, HEADS * HEAD], np.int64))])
    flat.shape = ir.Shape(["batch", "tokens", HEADS * HEAD])
    x = op("Add", [x, branch(fc(flat, "d", HIDDEN), "d")], STREAM)
    normed = norm(x, "h.0.n2", offset=offset)
    inner = ["batch", "tokens", INNER]
    if not gated:
        hidden = op("Relu", [fc(normed, "e", INNER)], inner)
    else:
        if fused:
            gate, up = cut(fc(normed, "e", 2 * INNER), "sizes_mlp", [INNER, INNER])
        else:
            gate, up = fc(normed, "e", INNER), fc(normed, "f", INNER)
        hidden = op("Mul", [op("Relu", [gate], inner), up], inner)
    x = op("Add", [branch(fc(hidden, "g", HIDDEN), "g"), x], STREAM)
    logits = named("logits", linear(norm(x, "nf"), "head", weights(VOCAB, HIDDEN)))
    return model_of([ids, mask, positions, *past], [logits])


def by_name(model: ir.Model, aliases: dict[str, str] | None = None) -> dict[str, LinearGroup]:
    return {group.name: group for group in find_groups(model, aliases or {})}


@pytest.mark.parametrize("biased", [False, True])
def test_groups_of_a_gated_block(biased: bool) -> None:
    groups = by_name(decoder(biased=biased))
    assert {name: [m.split(".")[2] for m in group.members] for name, group in groups.items() if name != "lm_head"} == {
        "layers.0.qkv": ["a", "b", "c"],
        "layers.0.o": ["d"],
        "layers.0.gate_up": ["e", "f"],
        "layers.0.down": ["g"],
    }
    assert groups["lm_head"].members == ("head.weight",)
    assert groups["layers.0.qkv"].out_features == (32, 16, 16) and groups["layers.0.down"].in_features == INNER
    expected = ("h.0.a.bias", "h.0.b.bias", "h.0.c.bias") if biased else (None, None, None)
    assert groups["layers.0.qkv"].biases == expected


def test_what_is_added_outside_of_a_linear_is_not_its_bias() -> None:
    """Such as the dt_bias of a recurrence: the linear's own output is without it."""
    for name, biased in (("h.0.a.bias", True), ("h.0.dt_bias", False)):
        x = value("x", ["batch", HIDDEN])
        product = linear(x, "h.0.a", weights(8, HIDDEN))
        y = op("Add", [product, parameter(name, weights(8, 1)[:, 0])], ["batch", 8])
        (found,) = find_linears(model_of([x], [named("y", y)]).graph)
        assert (found.bias is not None, found.output is y) == (biased, biased)


def test_a_scaled_residual_is_no_rotary_embedding() -> None:
    plain, scaled = by_name(decoder()), by_name(decoder(residual=0.4))
    assert list(plain) == list(scaled) == ["layers.0.qkv", "layers.0.o", "layers.0.gate_up", "layers.0.down", "lm_head"]
    assert [group.members for group in plain.values()] == [group.members for group in scaled.values()]


def test_a_rotary_embedding_written_out_is_no_residual() -> None:
    """Linears before it are still those of queries and keys."""
    model = decoder()
    positions = next(value for value in model.graph.inputs if value.name == "position_ids")
    for number, node in enumerate(n for n in list(model.graph) if n.op_type == "RotaryEmbedding"):
        x = node.inputs[0]
        assert x is not None
        tables = [op("Cast", [positions], ["batch", "tokens"], to=ir.DataType.FLOAT.value) for _ in range(2)]
        turned_by = [op("Mul", [part, table], x.shape) for part, table in zip((x, op("Neg", [x])), tables, strict=True)]
        written = op("Add", turned_by, x.shape)
        for made in (*tables, turned_by[1].producer().inputs[0], *turned_by, written):  # type: ignore[union-attr]
            assert made is not None
            made_by = made.producer()
            assert made_by is not None and number < 2
            model.graph.insert_before(node, made_by)
        ir.convenience.replace_all_uses_with(node.outputs[0], written)
        model.graph.remove(node, safe=True)
    assert by_name(model)["layers.0.qkv"].members == ("h.0.a.weight", "h.0.b.weight", "h.0.c.weight")


def test_two_linears_over_one_weight_are_refused() -> None:
    model = decoder()
    first = next(node for node in model.graph if node.op_type == "MatMul")
    again = ir.node("MatMul", list(first.inputs))
    model.graph.insert_after(first, again)
    with pytest.raises(ExportError, match=r"2 linears read h\.0\.a\.weight"):
        find_groups(model, {})


def test_fused_projections_are_groups_of_one() -> None:
    groups = by_name(decoder(fused=True))
    assert groups["layers.0.qkv"].members == ("h.0.a.weight",)
    assert groups["layers.0.gate_up"].members == ("h.0.e.weight",)
    assert groups["layers.0.down"].members == ("h.0.g.weight",)


def test_a_block_with_no_gate_has_the_same_groups() -> None:
    groups = by_name(decoder(gated=False))
    assert list(groups) == ["layers.0.qkv", "layers.0.o", "layers.0.gate_up", "layers.0.down", "lm_head"]
    assert groups["layers.0.gate_up"].members == ("h.0.e.weight",)
    assert groups["layers.0.down"].fold_target is None  # nothing scales through what stands between


def test_scales_are_absorbed_where_the_product_stays_the_same() -> None:
    groups = by_name(decoder(biased=True))
    assert groups["layers.0.qkv"].fold_target == FoldTarget(kind="norm", weight="h.0.n1.weight")
    assert groups["layers.0.gate_up"].fold_target == FoldTarget(kind="norm", weight="h.0.n2.weight")
    assert groups["layers.0.o"].fold_target == FoldTarget(
        kind="linear",
        weight="h.0.c.weight",
        bias="h.0.c.bias",
        rows=(0, KV_HEADS * HEAD),
        repeat=HEADS // KV_HEADS,
        head_size=HEAD,
    )
    down = groups["layers.0.down"].fold_target
    assert down is not None and (down.kind, down.weight, down.bias) == ("linear", "h.0.f.weight", "h.0.f.bias")


def test_a_norm_of_one_plus_weight_says_so() -> None:
    fold_target = by_name(decoder(offset=True))["layers.0.qkv"].fold_target
    assert fold_target == FoldTarget(kind="norm", weight="h.0.n1.weight", offset=1.0)


def test_parts_of_a_fused_projection_are_named_by_their_rows() -> None:
    groups = by_name(decoder(fused=True))
    value_target, up_target = groups["layers.0.o"].fold_target, groups["layers.0.down"].fold_target
    assert value_target is not None and (value_target.weight, value_target.rows) == ("h.0.a.weight", (48, 64))
    assert up_target is not None and (up_target.weight, up_target.rows) == ("h.0.e.weight", (INNER, 2 * INNER))


def test_a_tied_head_absorbs_nothing() -> None:
    assert by_name(decoder())["lm_head"].fold_target is not None
    assert by_name(decoder(), {"lm_head.weight": "head.weight"})["lm_head"].fold_target is None


def test_rotary_is_read_from_its_nodes() -> None:
    model = decoder()
    assert find_rotary(model) == "half"
    for node in model.graph:
        if node.op_type == "RotaryEmbedding":
            node.attributes["interleaved"] = ir.AttrInt64("interleaved", 1)
    assert find_rotary(model) == "interleaved"
    x = value("x", STREAM)
    assert find_rotary(model_of([x], [named("y", op("Neg", [x], STREAM))])) == "none"


def turned(key: ir.Value, *, step: int) -> ir.Value:
    """``x·cos + rotate(x)·sin`` as it is left in a graph: every other channel negated, or half of them."""
    half, ends = HEAD // 2, np.array([2**62])
    cuts = ((0, ends), (1, ends)) if step == 2 else ((0, np.array([half])), (half, ends))

    def part(which: int) -> ir.Value:
        start, end = cuts[which]
        numbers = [np.array([start]), end, np.array([3]), np.array([step])]
        names = [f"{name}_{which}_{step}" for name in ("start", "end", "axis", "step")]
        given = [parameter(name, number.astype(np.int64)) for name, number in zip(names, numbers, strict=True)]
        return op("Slice", [key, *given], ["batch", KV_HEADS, "tokens", half])

    rotated = op("Concat", [op("Neg", [part(1)]), part(0)], key.shape, axis=-1)
    cos, sin = (parameter(f"{name}_{step}", np.ones((8, HEAD), np.float32)) for name in ("cos", "sin"))
    return op("Add", [op("Mul", [key, cos], key.shape), op("Mul", [rotated, sin], key.shape)], key.shape)


@pytest.mark.parametrize(("step", "pairing"), [(2, "interleaved"), (1, "half")])
def test_rotary_is_read_from_arithmetic_where_no_node_says_it(step: int, pairing: str) -> None:
    model = decoder()
    for node in [n for n in model.graph if n.op_type == "RotaryEmbedding"]:
        ir.convenience.replace_all_uses_with(node.outputs[0], node.inputs[0])
        model.graph.remove(node, safe=True)
    assert find_rotary(model) == "none"
    attention = next(n for n in model.graph if n.op_type == "Attention")
    key = attention.inputs[1]
    assert key is not None
    attention.replace_input_with(1, turned(key, step=step))
    assert find_rotary(model) == pairing


def test_a_constant_is_no_parameter() -> None:
    """Only initializers with a checkpoint name are weights."""
    x = value("x", STREAM)
    transposed = op("Transpose", [parameter("table", weights(4, HIDDEN))], [HIDDEN, 4], perm=[1, 0])
    model = model_of([x], [named("y", op("MatMul", [x, transposed], ["batch", "tokens", 4]))])
    assert find_linears(model.graph) == []
