"""Every kind of scheme has an entry, or a refusal with its reason, in the table of each package and for each target."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
import pytest

from engines.load import find_target, known_targets
from engines.lowerings import LOWERINGS, Linears, lowering_of
from engines.passes.graph import linears
from quantization.formats import format_of, formats, stored_by_rtn
from tapeout.errors import BuildError, QuantizationError
from tapeout.recipe import TARGETS
from tapeout.schemes import FLOAT, KINDS, STATIC_INT8, Refusal, Scheme
from tests.lowering import apply, linear, lowering, model_of, named, run, value

FOLDERS = sorted(path.parent.name for path in TARGETS.glob("*/__init__.py"))
RNG = np.random.default_rng(0)


def scheme(kind: str, **fields: Any) -> Scheme:
    found = KINDS[kind]
    return Scheme.model_validate({"bits": found.bits, "activations": found.activations} | fields)


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_has_a_format_or_a_reason(kind: str) -> None:
    entry = formats()[kind]
    assert entry.kind == kind
    if isinstance(entry, Refusal):
        with pytest.raises(QuantizationError, match=entry.reason):
            format_of(scheme(kind))
        return
    weight = RNG.standard_normal((8, 64)).astype(np.float32)
    stored = stored_by_rtn(scheme(kind), weight)
    assert not isinstance(stored, np.ndarray) and stored.scheme == scheme(kind)
    read = entry.decode(entry.encode(stored), stored.scheme)
    np.testing.assert_array_equal(read.dequantize(), stored.dequantize())
    assert np.abs(read.dequantize() - weight).max() < 0.5 and read.input_scale == stored.input_scale


def test_no_table_knows_a_kind_that_is_not_there() -> None:
    assert formats().keys() == LOWERINGS.keys() == KINDS.keys()


@pytest.mark.parametrize("target", known_targets())
@pytest.mark.parametrize("kind", KINDS)
def test_a_target_has_passes_or_a_reason(kind: str, target: str) -> None:
    passes = [step.__name__.rpartition(".")[2] for step in find_target(target).passes().every]
    refusals = [entry for entry in LOWERINGS[kind].values() if isinstance(entry, Refusal)]
    assert all(refusal.reason for refusal in refusals)
    families = [entry.passes for entry in LOWERINGS[kind].values() if isinstance(entry, Linears)]
    own = [names for names in families if set(names) <= set(passes)]
    assert own or refusals, f"{target} runs the passes of no family"
    for names in own:
        assert sorted(names, key=passes.index) == list(names)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_the_passes_of_ort_cpu_compute_what_the_codes_say(kind: str, symmetric: bool) -> None:
    entry = LOWERINGS[kind]["onnxruntime"]
    assert isinstance(entry, Linears)
    weight = RNG.standard_normal((32, 64)).astype(np.float32)
    stored = stored_by_rtn(scheme(kind, symmetric=symmetric), weight)
    x = value("x", ["tokens", 64])
    model = model_of([x], [named("y", linear(x, "block.fc", weight))])
    lowered = lowering(model, {"block.fc.weight": stored})
    steps = [import_module(f"engines.passes.onnxruntime.{name}") for name in entry.passes]
    matched = [apply(lowered, step).matched for step in (linears, *steps)]
    assert sum(matched[1:]) == 1
    inputs = RNG.uniform(-3, 3, (5, 64)).astype(np.float32)
    decoded = stored if isinstance(stored, np.ndarray) else stored.dequantize()
    expected = inputs @ decoded.T
    # Inputs are rounded to int8 with codes; a wrong decoding would be off by far more.
    np.testing.assert_allclose(run(model, {"x": inputs})["y"], expected, atol=0.02 * np.abs(expected).max())


def test_a_refusal_is_told_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LOWERINGS["int4"], "onnxruntime", Refusal("int4", "codes this small were never measured"))
    with pytest.raises(BuildError, match="passes for onnxruntime take no weights in 4-bit g32: codes this small"):
        lowering_of(Scheme(bits=4, symmetric=True), "onnxruntime")


def test_a_kind_without_groups_has_one_form() -> None:
    assert Scheme(bits=32, group_size=64, symmetric=False) == FLOAT
    assert Scheme(bits=8, activations="int8", group_size=128, positive_scales=True, symmetric=True) == STATIC_INT8
    assert STATIC_INT8.fitted(576) == STATIC_INT8 and STATIC_INT8.bits_per_weight(64) == 8.25
    with pytest.raises(ValueError, match="8 bits need one"):
        Scheme(bits=8, group_size=None)
