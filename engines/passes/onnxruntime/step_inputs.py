"""Inputs of a graph over packed tokens, pools of blocks and slots, which its operators share."""

from __future__ import annotations

import onnx_ir as ir

from engines.bundle import BLOCK_TABLE, OFFSETS, SLOTS, STARTS

# B sequences, whose tokens are packed one after the other
SHAPES = {
    OFFSETS: ["offsets"],  # B + 1: the first token of each sequence, and the number of all
    STARTS: ["sequences"],  # the position of each sequence's first token
    BLOCK_TABLE: ["sequences", "columns"],  # blocks of paged state
    SLOTS: ["sequences"],  # of recurrent state
}


def step_inputs(model: ir.Model, *names: str) -> list[ir.Value]:
    """These inputs, int32; those that the graph lacks are added."""
    known = {value.name: value for value in model.graph.inputs}
    for name in names:
        if name not in known:
            shape, element = ir.Shape(SHAPES[name]), ir.TensorType(ir.DataType.INT32)
            known[name] = ir.Value(name=name, shape=shape, type=element)
            model.graph.inputs.append(known[name])
    return [known[name] for name in names]


def drop_mask(model: ir.Model) -> None:
    """Remove the padding mask once nothing reads it: packed tokens have no padding."""
    mask = next((value for value in model.graph.inputs if value.name == "attention_mask"), None)
    if mask is not None and not mask.uses():
        model.graph.inputs.remove(mask)
