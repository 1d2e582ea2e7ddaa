from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from engines.kernels.cpu.kernel_set import CpuKernels
from engines.passes.onnxruntime import block_linears, embedding
from tapeout.quantized import round_to_nearest
from tapeout.schemes import Scheme
from tests.lowering import apply, lowering, model_of, named, op, operators, parameter, run, value

RNG = np.random.default_rng(0)
TABLE = RNG.standard_normal((53, 64)).astype(np.float32)
IDS = np.array([[0, 52, 7], [7, 1, 51]], np.int64)


def graph() -> ir.Model:
    ids = value("input_ids", ["batch", "tokens"], ir.DataType.INT64)
    rows = op("Gather", [parameter("embed.weight", TABLE), ids], ["batch", "tokens", 64], axis=0)
    return model_of([ids], [named("rows", op("Neg", [rows], rows.shape))])


def formats(*bits: int) -> list[Scheme]:
    return [
        Scheme(bits=b, group_size=size, symmetric=symmetric)
        for b in bits
        for size in (32, 64)
        for symmetric in (True, False)
    ]


@pytest.mark.parametrize("fmt", formats(4, 5, 6, 8), ids=str)
def test_a_quantized_table_is_read_row_by_row(fmt: Scheme, native_operators: None) -> None:
    table = round_to_nearest(TABLE, fmt)
    model = graph()
    lowered = lowering(model, {"embed.weight": table})
    outcome = apply(lowered, embedding)
    assert (outcome.matched, outcome.declined) == (1, ())
    assert operators(model) == ["BlockGather", "Neg"]
    assert lowered.plan == {"embedding": f"BlockGather {fmt.bits}-bit g{fmt.group_size}"}
    np.testing.assert_array_equal(-run(model, {"input_ids": IDS})["rows"], table.dequantize()[IDS])


def test_5_bit_codes_in_groups_of_16_are_stored_in_6_bits(native_operators: None) -> None:
    table = round_to_nearest(TABLE, Scheme(bits=5, group_size=16, symmetric=True))
    model = graph()
    lowered = lowering(model, {"embed.weight": table})
    apply(lowered, embedding)
    assert lowered.plan == {"embedding": "BlockGather 5-bit g16, stored in 6 bits"}
    np.testing.assert_array_equal(-run(model, {"input_ids": IDS})["rows"], table.dequantize()[IDS])


@pytest.mark.parametrize("fmt", formats(4, 5, 6, 8), ids=str)
def test_where_native_operators_do_not_run_a_stock_one_reads_it_and_that_is_said(
    fmt: Scheme, stock_operators: str
) -> None:
    table = round_to_nearest(TABLE, fmt)
    model = graph()
    lowered = lowering(model, {"embed.weight": table})
    outcome = apply(lowered, embedding)
    said = f"embed.weight: {stock_operators}; ONNX Runtime's own operator reads it"
    assert (outcome.matched, outcome.declined) == (1, (said,))
    assert operators(model) == ["GatherBlockQuantized", "Neg"]
    stored = ", stored in 8 bits" if fmt.bits in (5, 6) else ""
    assert lowered.plan == {"embedding": f"GatherBlockQuantized {fmt.bits}-bit g{fmt.group_size}{stored}"}
    np.testing.assert_allclose(-run(model, {"input_ids": IDS})["rows"], table.dequantize()[IDS], rtol=1e-6, atol=1e-6)


def test_the_native_table_and_a_tied_head_hold_the_same_bytes(native_operators: None) -> None:
    table = round_to_nearest(TABLE, Scheme(bits=6, group_size=32, symmetric=False))
    model = graph()
    apply(lowering(model, {"embed.weight": table}), embedding)
    head = model_of([], [])
    for value_, expected in zip(
        block_linears.stacked(head, CpuKernels(), "embedding", lambda: [table]),
        (model.graph.initializers[f"embedding.{part}"] for part in ("codes", "scales", "zero_points")),
        strict=True,
    ):
        assert value_ is not None and value_.const_value is not None and expected.const_value is not None
        assert value_.const_value.tobytes() == expected.const_value.tobytes()


def test_a_float_table_stays_and_that_is_said() -> None:
    model = graph()
    lowered = lowering(model)
    outcome = apply(lowered, embedding)
    assert (outcome.matched, outcome.declined) == (
        0,
        ("embed.weight: it is not quantized; it is gathered in float",),
    )
    assert operators(model) == ["Gather", "Neg"]
    assert lowered.plan == {"embedding": "Gather fp32"}


def test_a_table_that_nothing_gathers_is_said() -> None:
    x = value("x", ["rows", 64])
    model = model_of([x], [named("y", op("Neg", [x], ["rows", 64]))])
    lowered = lowering(model, {"embed.weight": round_to_nearest(TABLE, Scheme(bits=8, group_size=32, symmetric=True))})
    assert apply(lowered, embedding).declined == ("embed.weight: no Gather reads it; its codes are left unused",)
