"""The search over candidates, on embeddings and heads; linears are in test_quantize.py."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pytest

from quantization import search
from quantization.methods import gptq
from quantization.output_error import output_error
from quantization.search import Rounded
from quantization.statistics import Statistics, every_channel_alike
from tapeout.number_format import FloatArray
from tapeout.quantized import round_to_nearest
from tapeout.recipe import Quantize
from tapeout.schemes import Scheme

EVERY, RTN = Quantize(), Quantize(candidates=("rtn",))
RNG = np.random.default_rng(0)
TABLE = RNG.standard_normal((70, 64)).astype(np.float32)


@dataclass(frozen=True)
class Searched(Rounded):
    error_rtn: float


def searched(scheme: Scheme, inputs: Statistics, settings: Quantize = EVERY, weight: FloatArray = TABLE) -> Searched:
    """One weight, without a producer that could take an input scale."""
    found = search.search([weight], scheme, inputs, settings)
    assert found.scale.is_identity
    kept = found.members[0]
    return Searched(kept.method, kept.linear, kept.error, found.errors_rtn[0])


@pytest.fixture
def head() -> Statistics:
    """Of inputs that lie near a few directions, as those of a head do."""
    mixing = RNG.standard_normal((8, 64))
    fitted, held = (
        (RNG.standard_normal((500, 8)) @ mixing + 0.1 * RNG.standard_normal((500, 64))).astype(np.float32)
        for _ in range(2)
    )
    grams = ((inputs.T @ inputs / np.float32(500)).astype(np.float32)[None] for inputs in (fitted, held))
    return Statistics(*grams, mean_abs=np.abs(fitted).mean(0), max_abs=np.abs(fitted).max(0))


@pytest.mark.parametrize("bits", [4, 5, 6, 8])
def test_a_head_loses_much_less_of_its_output_than_to_nearest(bits: int, head: Statistics) -> None:
    fmt = Scheme(bits=bits, group_size=32, symmetric=True)
    found = searched(fmt, head)
    energy = output_error(TABLE, head.holdout)
    assert found.method == "gptq" and found.error < 0.5 * found.error_rtn and found.linear.scheme == fmt
    assert found.error == pytest.approx(output_error(found.linear.dequantize() - TABLE, head.holdout) / energy)
    nearest = round_to_nearest(TABLE, fmt).dequantize()
    assert found.error_rtn == pytest.approx(output_error(nearest - TABLE, head.holdout) / energy)


def test_zero_points_are_kept_for_whoever_refuses_them(head: Statistics) -> None:
    fmt = Scheme(bits=8, group_size=32, symmetric=False)
    found = searched(fmt, head)
    assert found.linear.scheme == fmt
    error = output_error(found.linear.dequantize() - TABLE, head.holdout) / output_error(TABLE, head.holdout)
    assert found.error == pytest.approx(error)


@pytest.mark.parametrize("activations", ["float", "int8"])
def test_what_is_found_on_some_outputs_holds_for_all(
    activations: Literal["float", "int8"], head: Statistics, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A weight that is searched on every fourth output and rounded in slices, by several threads."""
    bits = 4 if activations == "float" else 8
    group_size = 32 if activations == "float" else None
    fmt = Scheme(bits=bits, group_size=group_size, symmetric=True, activations=activations).fitted(64)
    whole = searched(fmt, head)
    monkeypatch.setattr(search, "SEARCHED_OUTPUTS", 20)
    monkeypatch.setattr(search, "SEARCHED_WEIGHTS", 64)
    monkeypatch.setattr(search, "OUTPUTS_AT_ONCE", 16)
    seen: list[int] = []
    propose = gptq.propose
    monkeypatch.setattr(gptq, "propose", lambda problem: (seen.append(len(problem.weights[0])), propose(problem))[1])
    with ThreadPoolExecutor(3) as pool:
        found = search.search([TABLE], fmt, head, EVERY, run=pool.map)
    parts = found.members[0]
    assert seen[0] == 18 and sorted(seen[1:]) == [6, 16, 16, 16, 16]
    assert parts.method == whole.method == "gptq" and parts.linear.input_scale == whole.linear.input_scale
    assert parts.error == pytest.approx(whole.error, rel=0.3)
    np.testing.assert_array_equal(parts.linear.scales, whole.linear.scales)
    # Sums are added in another order, which may tip a weight that lies halfway.
    assert (parts.linear.codes != whole.linear.codes).mean() < 0.01


def test_an_embedding_of_its_own_is_judged_by_its_weights() -> None:
    fmt = Scheme(bits=4, group_size=32, symmetric=True)
    found = searched(fmt, every_channel_alike(64))
    assert found.error == pytest.approx(float(((found.linear.dequantize() - TABLE) ** 2).sum() / (TABLE**2).sum()))
    assert found.method == "scale_fit" and found.error < found.error_rtn


def test_rounding_to_nearest_is_what_was_asked_for(head: Statistics) -> None:
    fmt = Scheme(bits=6, group_size=32, symmetric=True)
    found = searched(fmt, head, RTN)
    np.testing.assert_array_equal(found.linear.codes, round_to_nearest(TABLE, fmt).codes)
    assert found.method == "rtn" and found.error == found.error_rtn
