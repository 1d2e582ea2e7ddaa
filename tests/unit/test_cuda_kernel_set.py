"""What passes are told of kernels for GPUs, and that these compute what passes pack."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from engines.costs.linears import LinearShape, linear_bytes
from engines.kernels.cuda.kernel_set import COMPUTED, HEAD_SIZES, CudaKernels
from engines.kernels.cuda.parameters import Weight
from engines.kernels.cuda.planner import make_plan
from engines.kernels.kernel_set import KernelSet
from engines.kernels.operators import DOMAIN, OPERATORS
from engines.load import find_target
from engines.passes.onnxruntime import block_linears
from tapeout.errors import BuildError
from tapeout.quantized import QuantizedWeight, stored_by_rtn
from tapeout.schemes import FLOAT, STATIC_INT8, Scheme
from tests.cuda import Device, at, block_linear, host, rounded
from tests.lowering import model_of, named, value
from tests.random_linears import random_linear

KERNELS: KernelSet = CudaKernels()


def test_operators_that_are_not_there_have_a_reason() -> None:
    assert {name for name in OPERATORS if not KERNELS.unsupported(name)} == COMPUTED
    assert KERNELS.unsupported("QuantizeActivations") == "CUDA kernels have no QuantizeActivations"


@pytest.mark.parametrize(
    ("scheme", "columns", "reason"),
    [
        (Scheme(bits=4, group_size=32), 96, ""),
        (Scheme(bits=5, group_size=256, symmetric=True), 512, ""),
        (Scheme(bits=4, group_size=16), 96, "groups of 16 of 96 input channels, where CUDA kernels take powers of two"),
        (Scheme(bits=8, group_size=64), 64, ""),
    ],
)
def test_weights_that_are_not_taken_have_a_reason(scheme: Scheme, columns: int, reason: str) -> None:
    found = KERNELS.unsupported_weight(random_linear(16, columns, scheme))
    assert found.startswith(reason) and bool(found) == bool(reason)


def test_float_weights_are_taken_in_whole_spans() -> None:
    assert KERNELS.unsupported_float(96) == ""
    assert KERNELS.unsupported_float(80) == "80 input channels, where CUDA kernels take multiples of 32"


def test_weights_in_fp8_are_taken_with_one_scale_a_row() -> None:
    scheme = Scheme.model_validate({"format": "fp8-dynamic"})
    weight = stored_by_rtn(scheme, np.ones((16, 96), np.float32))
    assert isinstance(weight, QuantizedWeight) and not KERNELS.unsupported_weight(weight)
    assert KERNELS.code_bits(weight) == 8
    odd = stored_by_rtn(scheme, np.ones((16, 80), np.float32))
    assert isinstance(odd, QuantizedWeight) and "80 input channels" in KERNELS.unsupported_weight(odd)
    assert linear_bytes(find_target("cuda"), LinearShape(64, 32), scheme, stored_by_rtn) == 2 * 128 * 8 + 32 * 2


@pytest.mark.parametrize(
    ("table", "others", "period", "reason"),
    [
        (16, (), 64, "no partial rotary"),
        (32, ("", "", "sinks"), 64, "no sinks"),
        (32, (), 128, "no gates between queries"),
    ],
)
def test_a_plan_drops_no_part_of_attention(table: int, others: tuple[str, ...], period: int, reason: str) -> None:
    """Planted: a pass that moves more into attention than its kernels compute."""
    caches = [value(name, ["blocks", 2, 64, 64]) for name in ("keys", "values")]
    tables = [value(name, [128, table]) for name in ("cosines", "sines")]
    weights = [value(name, [4]) if name else None for name in others]
    given = [qkv := value("qkv", [1, "tokens", 512]), *caches, *tables, *(each for each in weights if each)]
    inputs = [qkv, None, None, *caches, None, None, None, *tables, None, None, *weights]
    attributes = {"num_heads": 4, "kv_num_heads": 2, "query_period": period}
    node = ir.node("CachedAttention", inputs, attributes=attributes, domain=DOMAIN)
    with pytest.raises(BuildError, match=reason):
        make_plan(model_of(given, [named("y", node.outputs[0])]))


@pytest.mark.parametrize(
    ("changed", "reason"), [("attribute", "read no sharpness of it"), ("input", "it has 16 inputs")]
)
def test_a_plan_drops_nothing_that_passes_add(changed: str, reason: str) -> None:
    """Planted: an operator with something that no kernel reads. It would be computed without it."""
    caches = [value(name, ["blocks", 2, 64, 64]) for name in ("keys", "values")]
    tables = [value(name, [128, 32]) for name in ("cosines", "sines")]
    given = [qkv := value("qkv", [1, "tokens", 512]), *caches, *tables]
    more = [value("more", [4])] if changed == "input" else []
    inputs = [qkv, None, None, *caches, None, None, None, *tables, *[None] * 5, *more]
    attributes = {"num_heads": 4, "kv_num_heads": 2, **({"sharpness": 2.0} if changed == "attribute" else {})}
    node = ir.node("CachedAttention", inputs, attributes=attributes, domain=DOMAIN)
    with pytest.raises(BuildError, match=reason):
        make_plan(model_of([*given, *more], [named("y", node.outputs[0])]))


def test_bytes_of_a_linear_are_known_without_a_time() -> None:
    """A plan that is written out counts them; a chunk of a tile has 128 bytes a bit, a row a scale of two."""
    shape, target = LinearShape(64, 32), find_target("cuda")
    four = Scheme(bits=4, group_size=64, symmetric=True)
    assert linear_bytes(target, shape, four, stored_by_rtn) == 2 * 128 * 4 + 32 * 2
    assert linear_bytes(target, shape, FLOAT, stored_by_rtn) == 2 * 128 * 16 + 32 * 2


def test_static_activations_are_not_taken() -> None:
    weight = random_linear(16, 64, Scheme(bits=8, group_size=64))
    static = type(weight)(weight.codes, weight.scales, weight.zero_points, STATIC_INT8)
    assert KERNELS.unsupported_weight(static) == "CUDA kernels take no weights in static int8"


def test_caches_that_are_not_taken_have_a_reason() -> None:
    for cache in ("int8", "fp8", "float16"):
        assert not any(KERNELS.unsupported_cache(cache, size) for size in HEAD_SIZES)
        assert KERNELS.unsupported_cache(cache, 96) == "heads of 96 channels, where kernels take 64, 128, 256"
    assert "a KV cache in int4, where" in KERNELS.unsupported_cache("int4", 64)


@pytest.mark.parametrize("bits", [4, 5, 6, 8])
@pytest.mark.parametrize("half", [True, False])
def test_kernels_compute_what_the_pass_packs(bits: int, half: bool) -> None:
    """Two linears that are stacked along their outputs."""
    parts = [
        random_linear(outputs, 160, Scheme(bits=bits, group_size=32), half=half, seed=outputs) for outputs in (21, 40)
    ]
    model = model_of([], [])
    codes, scales, zero_points = block_linears.stacked(model, KERNELS, "linear", lambda: parts)
    values = [value.const_value for value in (codes, scales, zero_points) if value is not None]
    arrays = [value.numpy() for value in values if value is not None]
    assert arrays[0].shape == KERNELS.codes_shape(61, 160, KERNELS.code_bits(parts[0]))
    known = block_linears.attributes(parts[0], scales)
    assert known["half_scales"] == half
    device = Device(host())
    shift = known["block_size"].bit_length() - 1
    held = Weight(*(at(device.put(array)) for array in arrays), 61, known["K"], known["bits"], shift, int(half))
    x, exact = rounded(np.random.default_rng(5).standard_normal((3, 160)).astype(np.float32))
    matrix = np.concatenate([part.dequantize() for part in parts]).astype(np.float64)
    np.testing.assert_allclose(block_linear(device, held, x), exact @ matrix.T, rtol=1e-5, atol=1e-5)
    device.free()
