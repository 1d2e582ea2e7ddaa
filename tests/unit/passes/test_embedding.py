from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from engines.passes import embedding
from quantization.rounding import Format, round_to_nearest
from tests.lowering import apply, lowering, model_of, named, op, operators, parameter, run, value

RNG = np.random.default_rng(0)
TABLE = RNG.standard_normal((53, 64)).astype(np.float32)
IDS = np.array([[0, 52, 7], [7, 1, 51]], np.int64)


def graph() -> ir.Model:
    ids = value("input_ids", ["batch", "tokens"], ir.DataType.INT64)
    rows = op("Gather", [parameter("embed.weight", TABLE), ids], ["batch", "tokens", 64], axis=0)
    return model_of([ids], [named("rows", op("Neg", [rows], rows.shape))])


@pytest.mark.parametrize(
    "fmt",
    [Format(bits, size, symmetric) for bits in (4, 8) for size in (32, 64) for symmetric in (True, False)],
    ids=str,
)
def test_a_quantized_table_is_read_row_by_row(fmt: Format) -> None:
    table = round_to_nearest(TABLE, fmt)
    model = graph()
    lowered = lowering(model, {"embed.weight": table})
    outcome = apply(lowered, embedding)
    assert (outcome.matched, outcome.declined) == (1, ())
    assert operators(model) == ["GatherBlockQuantized", "Neg"]
    assert lowered.plan == {"embedding": f"GatherBlockQuantized {fmt.bits}-bit g{fmt.group_size}"}
    np.testing.assert_allclose(-run(model, {"input_ids": IDS})["rows"], table.dequantize()[IDS], rtol=1e-6, atol=1e-6)


def test_a_float_table_stays_and_that_is_said() -> None:
    model = graph()
    lowered = lowering(model)
    outcome = apply(lowered, embedding)
    assert (outcome.matched, outcome.declined) == (
        0,
        ("embed.weight: it is not quantized; its rows are read as floats",),
    )
    assert operators(model) == ["Gather", "Neg"]
    assert lowered.plan == {"embedding": "Gather fp32"}


def test_a_table_that_nothing_gathers_is_said() -> None:
    x = value("x", ["rows", 64])
    model = model_of([x], [named("y", op("Neg", [x], ["rows", 64]))])
    lowered = lowering(model, {"embed.weight": round_to_nearest(TABLE, Format(8, 32, symmetric=True))})
    assert apply(lowered, embedding).declined == ("embed.weight: no Gather reads it; its codes are left unused",)
