from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from engines.costs import timing
from engines.costs.linears import LinearShape, TimedLinear, linear_bytes, linear_model
from engines.costs.timing import OperatorTimer, Seconds, TimedOperator
from engines.load import find_target
from tapeout.fingerprint import Fingerprint
from tapeout.quantized import round_to_nearest
from tapeout.schemes import CANDIDATE_SCHEMES, FLOAT, STATIC_INT8, Scheme
from tests.native import own_cache

TARGET = find_target("ort-cpu")
FOUR_BITS, EIGHT_BITS = (Scheme(bits=bits, group_size=32, symmetric=True) for bits in (4, 8))


def stored(scheme: Scheme, weight: NDArray[np.float32]) -> Any:
    if scheme == FLOAT:
        return weight
    if scheme == STATIC_INT8:
        return replace(round_to_nearest(weight, STATIC_INT8), input_scale=0.03)
    return round_to_nearest(weight, Scheme(bits=scheme.bits, group_size=scheme.group_size, symmetric=scheme.symmetric))


def test_every_kernel_of_the_menu_has_a_name_of_its_own_and_is_what_the_passes_write(operators_of: str) -> None:
    weight = np.random.default_rng(0).standard_normal((8, 256)).astype(np.float32)
    operators: dict[str, set[str]] = {}
    for scheme in CANDIDATE_SCHEMES:
        model = linear_model(TARGET, stored(scheme, weight), LinearShape(256, 8), 3)
        assert [value.name for value in model.graph.outputs] == ["y0", "y1", "y2"]
        operators[scheme.name] = {node.op_type for node in model.graph}
    assert len(operators) == len(CANDIDATE_SCHEMES)
    product = {"native": "BlockLinear", "stock": "MatMulNBits"}[operators_of]
    assert operators.pop("fp32") == {"MatMul"}
    quantize = {"native": "QuantizeActivations", "stock": "QuantizeLinear"}[operators_of]
    assert operators.pop("static int8") == {quantize, "MatMulIntegerToFloat"}
    assert all(written == {product} for written in operators.values()) and "4-bit g32" in operators


def test_every_scheme_is_timed_at_every_number_of_tokens() -> None:
    schemes = (FLOAT, FOUR_BITS, STATIC_INT8)
    found = OperatorTimer(TARGET, 1 << 16, threads=1).measure(TimedLinear(LinearShape(64, 32), schemes, stored), (1, 3))
    assert list(found) == ["fp32", "4-bit g32", "static int8"]
    assert all(list(by_tokens) == [1, 3] and min(by_tokens.values()) > 0 for by_tokens in found.values())


def test_weights_of_a_sample_are_different_and_as_many_as_are_to_be_streamed() -> None:
    weight = np.random.default_rng(0).standard_normal((32, 64)).astype(np.float32)
    model = linear_model(TARGET, stored(EIGHT_BITS, weight), LinearShape(64, 32), 4)
    codes = [value.const_value.numpy().tobytes() for name, value in model.graph.initializers.items() if "codes" in name]  # type: ignore[union-attr]
    assert len(codes) == len(set(codes)) == 4


def test_bytes_are_those_of_codes_and_scales(operators_of: str) -> None:
    scales = 2 * {"native": 2, "stock": 4}[operators_of]  # native ones stay float16
    assert linear_bytes(TARGET, LinearShape(64, 32), EIGHT_BITS, stored) == 32 * (64 + scales)
    assert linear_bytes(TARGET, LinearShape(64, 32), FOUR_BITS, stored) == 32 * (32 + scales)
    assert linear_bytes(TARGET, LinearShape(64, 8), FLOAT, stored) == 8 * 64 * 4


def test_six_bits_are_three_quarters_of_eight_where_native_kernels_read_them(operators_of: str) -> None:
    six = Scheme(bits=6, group_size=32, symmetric=True)
    expected = {
        "native": 32 * (48 + 2 * 2),
        "stock": linear_bytes(TARGET, LinearShape(64, 32), EIGHT_BITS, stored),
    }
    assert linear_bytes(TARGET, LinearShape(64, 32), six, stored) == expected[operators_of]


def test_a_machine_measures_once_and_another_one_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, tuple[int, ...]]] = []

    def measure(timer: OperatorTimer, operator: TimedOperator, tokens: Collection[int]) -> Seconds:
        asked.append((operator.described(1)["shape"][0], tuple(tokens)))
        return {name: {count: count * 1e-3 for count in tokens} for name in operator.names}

    monkeypatch.setattr(OperatorTimer, "measure", measure)
    own_cache(monkeypatch, tmp_path / "cache")

    def ask(columns: int, tokens: tuple[int, ...], schemes: tuple[Scheme, ...] = (FLOAT,)) -> Seconds:
        linear = TimedLinear(LinearShape(columns, 8), schemes, stored)
        return OperatorTimer(TARGET, 1 << 16, threads=1).costs(linear, tokens)

    assert ask(16, (1, 4)) == ask(16, (1, 4)) == {"fp32": {1: 1e-3, 4: 4e-3}}
    assert ask(16, (1, 8)) == {"fp32": {1: 1e-3, 8: 8e-3}}
    ask(32, (1,))
    ask(32, (1,), (FLOAT, STATIC_INT8))
    assert asked == [(16, (1, 4)), (16, (8,)), (32, (1,)), (32, (1,))]
    other = Fingerprint(machine="other", features=(), libraries={})
    monkeypatch.setattr(TARGET, "fingerprint", lambda: other)
    ask(16, (1,))
    assert asked[-1] == (16, (1,)) and len(asked) == 5


def test_the_last_level_cache_is_the_largest_there_is(tmp_path: Path) -> None:
    for index, size in enumerate(("48K", "1024K", "32M\n")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(size)
    assert timing.last_level_cache_bytes(tmp_path) == 32 << 20
    assert timing.last_level_cache_bytes(tmp_path / "nowhere") == timing.USUAL_CACHE_BYTES


def test_a_sample_reads_no_more_than_the_model_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "last_level_cache_bytes", lambda: 1000)
    assert timing.streamed_bytes(300) == 300
    assert timing.streamed_bytes(1 << 30) == timing.STREAMED_CACHES * 1000
