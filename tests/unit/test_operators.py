"""The table of operators: graphs and documentation agree with it."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from engines.graph_check import check
from engines.kernels.operators import DOMAIN, OPERATORS
from tapeout.errors import BuildError
from tests.lowering import model_of, named, value

PAGE = Path(__file__).parents[2] / "docs" / "native-kernels.md"


def norm_rows(**changed: ir.Value | None) -> ir.Model:
    """NormRows as its pass writes it, but for what is ``changed``."""
    inputs: dict[str, ir.Value | None] = {
        "x": value("x", ["tokens", 32]),
        "residual": None,
        "weight": value("weight", [32]),
        "rows": value("rows", ["rows"], ir.DataType.INT64),
    }
    node = ir.node("NormRows", list((inputs | changed).values()), domain=DOMAIN)
    y = named("y", node.outputs[0])
    y.type, y.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape(["rows", 32])
    model = model_of([found for found in (inputs | changed).values() if found is not None], [y])
    model.opset_imports[DOMAIN] = 1
    return model


def test_a_node_as_declared_is_accepted() -> None:
    check(norm_rows(), "norm_rows")
    check(norm_rows(residual=value("residual", ["tokens", 32])), "norm_rows")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"weight": None}, "input weight of NormRows is missing"),
        ({"rows": value("rows", ["rows"])}, "input rows of NormRows is float32, not int64"),
        ({"more": value("more", [1])}, "NormRows has 5 inputs, and 4 are declared"),
    ],
)
def test_a_node_that_is_not_as_declared_names_the_pass(changed: dict[str, ir.Value | None], message: str) -> None:
    with pytest.raises(BuildError, match=f"invalid after the pass norm_rows: {message}"):
        check(norm_rows(**changed), "norm_rows")


def test_an_operator_that_is_not_declared_is_refused() -> None:
    model = norm_rows()
    next(iter(model.graph)).op_type = "NormColumns"
    with pytest.raises(BuildError, match="no operator NormColumns"):
        check(model, "norm_rows")


def test_types_are_those_of_numpy() -> None:
    for operator in OPERATORS.values():
        for argument in (*operator.inputs, *operator.outputs):
            assert argument.types == tuple(np.dtype(name).name for name in argument.types), operator.name


def test_the_page_of_kernels_lists_every_operator() -> None:
    rows = re.findall(r"^\| (`[^|]*`) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(OPERATORS)
