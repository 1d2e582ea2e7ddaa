"""Norms that no linear computes with its input become native operators, with the residual sum before them.

    s = a + b, norm(s, w)   ->   ResidualNorm(a, b, w), which returns s, too
    norm(x, w)              ->   Norm(x, w)

    Split(x, [q, k, v]), Attention(Norm(q, w), Norm(k, u), v)   ->   Attention(Norm(x, w, u))

That is an RMSNorm with several consumers, such as a router beside experts, or before another operator than a linear. It
is replaced where a native operator reads it: between two steps of them (docs/native-kernels.md) it would end one. So
would the Split of a linear that makes queries, keys and values. Where all heads of queries are normalized together, and
of keys (OLMoE), one norm does both where they lie, and attention reads them with the values behind them.
"""

from __future__ import annotations

import onnx_ir as ir

from engines.kernels.operators import DOMAIN
from engines.passes.base import Lowering, PassResult, attribute, new_value, parameter_behind, remove_dead, replace
from engines.passes.onnxruntime.gated_norms import NORMS, is_native, readers_of

LANES = 16  # channels that a kernel computes together


def run(lowering: Lowering) -> PassResult:
    model, matched, declined = lowering.model, 0, list[str]()
    for node in [n for n in model.graph if n.op_type in NORMS]:
        if not any(is_native(reader) for reader in readers_of(node.outputs[0])):
            continue
        if reason := _replace(lowering, node):
            weight = node.inputs[1 if node.op_type == NORMS[0] else 2]
            assert weight is not None
            declined.append(f"{parameter_behind(weight)}: {reason}; ONNX Runtime computes it")
        else:
            matched += 1
    for node in [n for n in model.graph if n.op_type == "CachedAttention"]:
        _pack(lowering, node)
    if not matched and not declined:
        declined = ["no norm is left before a native operator"]
    return PassResult(matched, tuple(declined))


def _replace(lowering: Lowering, node: ir.Node) -> str:
    """Returns why not."""
    sums = node.op_type != NORMS[0]
    kind = "ResidualNorm" if sums else "Norm"
    if missing := lowering.kernels.unsupported(kind):
        return missing
    if len(node.inputs) > 2 + sums:
        return "the sum before its norm has a bias"
    x, weight = node.inputs[0], node.inputs[-1]
    assert x is not None and weight is not None
    size = weight.shape[0] if weight.shape is not None and len(weight.shape) == 1 else None
    if not isinstance(size, int) or size % LANES or x.shape is None or x.shape[-1] != size:
        return f"the norm has no weight for each of a multiple of {LANES} channels"
    old = [node.outputs[0], *([node.outputs[3]] if sums and len(node.outputs) > 3 else ())]
    new = [new_value(f"{old[0].name}.native", old[0])]
    if sums:
        new.append(new_value(f"{old[0].name}.sum", x))
    fused = ir.node(
        kind,
        list(node.inputs),
        attributes={"epsilon": attribute(node, "epsilon", 1e-5)},
        domain=DOMAIN,
        outputs=new,
    )
    replace(lowering.model, [node], [fused], dict(zip(old, new, strict=False)))
    return ""


def _pack(lowering: Lowering, attention: ir.Node) -> None:
    """One norm of queries and keys, which one linear made with the values, where nothing else reads any of them."""
    norms = [value and value.producer() for value in attention.inputs[:2]]
    query, key = (n if n is not None and n.op_type == "Norm" and len(n.inputs) == 2 else None for n in norms)
    if query is None or key is None:
        return
    parts = [query.inputs[0], key.inputs[0], attention.inputs[2]]
    split = parts[0].producer() if parts[0] is not None else None
    if split is None or split.op_type != "Split" or attribute(split, "axis", 0) not in (-1, 2):
        return
    read_once = all(len(list(value.uses())) == 1 for value in (*split.outputs, query.outputs[0], key.outputs[0]))
    if list(split.outputs) != parts or not read_once:
        return
    if attribute(query, "epsilon", 0.0) != attribute(key, "epsilon", 0.0):
        return
    whole = split.inputs[0]
    assert whole is not None
    packed = new_value(f"{query.outputs[0].name}.packed", whole)
    norm = ir.node(
        "Norm",
        [whole, query.inputs[1], key.inputs[1]],
        attributes={"epsilon": attribute(query, "epsilon", 0.0)},
        domain=DOMAIN,
        outputs=[packed],
    )
    lowering.model.graph.insert_before(attention, norm)
    for place, value in enumerate((packed, None, None)):
        attention.replace_input_with(place, value)
    remove_dead(lowering.model, [query, key, split])
