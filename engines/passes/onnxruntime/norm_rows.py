"""The last norm becomes a native operator that normalizes only the tokens whose logits are wanted.

    s = a + b, norm(s, w), Reshape, Gather(logit_positions)   ->   NormRows(a, b, w, logit_positions)
    norm(x, w), Reshape, Gather(logit_positions)              ->   NormRows(x, none, w, logit_positions)

The norm is an RMSNorm before a native lm_head. All nodes of such a graph are then native, and run as one
(docs/native-kernels.md, Steps).
"""

from __future__ import annotations

import onnx_ir as ir

from engines.kernels.operators import DOMAIN
from engines.passes.base import Lowering, PassResult, attribute, new_value, only_use, producer_of, replace

HEADS = ("BlockLinear", "HeadLinear")
LANES = 16  # channels that a kernel computes together


def run(lowering: Lowering) -> PassResult:
    model = lowering.model
    gathers = [n for n in model.graph if n.op_type == "Gather" and _name(n.inputs[1]) == "logit_positions"]
    if not gathers:
        return PassResult(0, ("logits are not selected by position",))
    (gather,) = gathers
    reason = lowering.kernels.unsupported("NormRows") or _fuse(model, gather)
    return PassResult(0, (reason,)) if reason else PassResult(1)


def _fuse(model: ir.Model, gather: ir.Node) -> str:
    """Returns why not."""
    picked, rows = gather.inputs
    assert picked is not None and rows is not None
    head = only_use(gather.outputs[0])
    if head is None or (head.domain, head.op_type in HEADS) != (DOMAIN, True):
        return "lm_head is not a native linear"
    flat = producer_of(picked, "Reshape")
    x = flat.inputs[0] if flat is not None else None
    norms = [producer_of(x, f"{prefix}SimplifiedLayerNormalization") for prefix in ("Skip", "")]
    norm = next((node for node in norms if node is not None), None)
    if flat is None or x is None or norm is None or only_use(picked) is not gather:
        return "no norm right before lm_head's tokens are selected"
    if x is not norm.outputs[0] or only_use(x) is not flat or any(output.uses() for output in norm.outputs[1:]):
        return "the last norm or its sum has other consumers"
    skips = norms[0] is norm
    if skips and len(norm.inputs) > 3:
        return "the sum before the last norm has a bias"
    weight = norm.inputs[-1]
    if weight is None or weight.shape is None or len(weight.shape) != 1 or not _fits(weight.shape[0]):
        return f"the last norm has no weight for each of a multiple of {LANES} channels"
    fused = ir.node(
        "NormRows",
        [norm.inputs[0], norm.inputs[1] if skips else None, weight, rows],
        attributes={"epsilon": attribute(norm, "epsilon", 1e-5)},
        domain=DOMAIN,
        outputs=[new_value(f"{norm.outputs[0].name}.rows", gather.outputs[0])],
    )
    replace(model, [norm, flat, gather], [fused], {gather.outputs[0]: fused.outputs[0]})
    return ""


def _fits(size: int | ir.SymbolicDim) -> bool:
    return isinstance(size, int) and size % LANES == 0


def _name(value: ir.Value | None) -> str | None:
    return None if value is None else value.name
