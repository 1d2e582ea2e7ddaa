"""Values as columns of the tensor that they are a part of, which native operators read where they lie."""

from __future__ import annotations

import onnx_ir as ir

from engines.passes.base import attribute, dimension, producer_of, sizes


def columns_of(value: ir.Value) -> tuple[ir.Value, int]:
    """The tensor ``[.., W]`` of which ``[.., C]`` is a part, and the part's first column; else the value and 0.

    Parts that are split and joined again in their order are one part.
    """
    joined = producer_of(value, "Concat")
    parts = [value] if joined is None else list(joined.inputs)
    first = parts[0]
    split = producer_of(first, "Split")
    whole = split.inputs[0] if split is not None else None
    if first is None or split is None or whole is None or whole.shape is None or value.shape is None:
        return value, 0
    last = (-1, len(whole.shape) - 1)
    if attribute(split, "axis", 0) not in last or (joined is not None and attribute(joined, "axis", 0) not in last):
        return value, 0
    outputs = list(split.outputs)
    at = outputs.index(first)
    if outputs[at : at + len(parts)] != parts:
        return value, 0
    return whole, sum(dimension(part, -1) for part in outputs[:at])


def runs_of(value: ir.Value) -> tuple[ir.Value, int, int, int]:
    """The tensor ``[.., W]`` of which ``[B, S, C]`` is runs of columns: it, the first column, and length and period.

    So lies a part of each head, such as a gate behind its query. Of columns that lie together both are 0.
    """
    joined = producer_of(value, "Reshape")
    rows = joined.inputs[0] if joined is not None else None
    split = producer_of(rows, "Split")
    apart = producer_of(split.inputs[0], "Reshape") if split is not None else None
    flat = apart.inputs[0] if apart is not None else None
    if rows is None or split is None or apart is None or flat is None or len(rows.shape or ()) != 4:
        return *columns_of(value), 0, 0
    run, period = dimension(rows, 3), dimension(apart.outputs[0], 3)
    widths = [flat.shape[-1] if flat.shape is not None else 0, value.shape[-1] if value.shape is not None else 0]
    heads = dimension(rows, 2)
    if (
        attribute(split, "axis", 0) not in (-1, 3)
        or len(flat.shape or ()) != 3
        or widths != [heads * period, heads * run]
    ):
        return *columns_of(value), 0, 0
    whole, first = columns_of(flat)
    return whole, first + columns_of(rows)[1], run, period


def flat_columns_of(model: ir.Model, value: ir.Value, created: list[ir.Node]) -> tuple[ir.Value, int]:
    """The same of ``[B, S, H, D]``, whose heads are columns of a tensor ``[B, S, W]``. ``created``: what is added."""
    width = dimension(value, 2) * dimension(value, 3)
    reshape = producer_of(value, "Reshape")
    flat = reshape.inputs[0] if reshape is not None else None
    if flat is None or flat.shape is None or len(flat.shape) != 3 or flat.shape[2] != width:
        node = ir.node("Reshape", [value, sizes(model, 0, 0, width)])
        node.outputs[0].shape, node.outputs[0].type = ir.Shape([*list(value.shape or ())[:2], width]), value.type
        created.append(node)
        flat = node.outputs[0]
    return columns_of(flat)
