"""What TensorRT is given, computed by ONNX Runtime: the lowered graph is the model, to the precision asked for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from engines.portable import PortableEngine
from engines.sequences import Sequences
from quantization.qdq import positive_int4
from tapeout.artifact import Artifact
from tapeout.errors import BuildError
from tapeout.portable_graph import PortableGraph
from tapeout.quantized import QuantizedWeight, round_to_nearest
from tapeout.schemes import FP8, Scheme
from tests.exported import family_graph
from tests.lowered import SCHEMES, lowered, rounded
from tests.lowering import FixedWeights

FAMILIES = ("qwen2", "qwen3", "mistral-short-window", "gemma2", "minicpm3")
# Largest relative logit error of two random layers: rounding of fp16, of three-bit mantissas, of sixteen levels.
TOLERANCE = {"fp16": 0.01, "fp8": 0.25, "int4": 0.6, "auto": 0.6}
TOKENS = 24


def float_logits(graph: Artifact[PortableGraph], tokens: list[int]) -> NDArray[np.float32]:
    """``[S, V]`` from the portable graph itself."""
    session = ort.InferenceSession(str(graph.folder / "model.onnx"), providers=["CPUExecutionProvider"])
    feeds: dict[str, NDArray[Any]] = {
        "input_ids": np.array([tokens]),
        "attention_mask": np.ones((1, len(tokens)), np.int64),
        "position_ids": np.arange(len(tokens))[None],
    }
    for put in session.get_inputs():
        if put.name.startswith("past_"):
            feeds[put.name] = np.zeros((1, put.shape[1], 0, put.shape[3]), np.float32)
    known = {put.name for put in session.get_inputs()}
    return np.asarray(session.run(["logits"], {k: v for k, v in feeds.items() if k in known})[0])[0]


def tokens_for(graph: Artifact[PortableGraph], seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, graph.record.vocab_size, TOKENS).tolist()


@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_lowered_graph_computes_the_model(tmp_path: Path, family: str, precision: str) -> None:
    graph = family_graph(family)
    tokens = tokens_for(graph)
    expected = float_logits(graph, tokens)
    engine = Sequences(PortableEngine(lowered(graph, tmp_path / "lowered", precision), max_tokens=TOKENS))
    actual = engine.prefill(0, tokens, positions=range(TOKENS))
    error = np.abs(actual - expected).max() / np.abs(expected).max()
    assert error < TOLERANCE[precision]
    if precision != "fp16":
        assert error > 1e-3, "nothing was rounded"


@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_steps_and_neighbours_change_nothing(tmp_path: Path, family: str) -> None:
    graph = family_graph(family)
    tokens = tokens_for(graph)
    engine = Sequences(PortableEngine(lowered(graph, tmp_path / "lowered", "fp16"), max_tokens=TOKENS + 2, slots=3))
    whole = engine.prefill(0, tokens, positions=range(TOKENS))
    engine.prefill(1, tokens[:9])
    np.testing.assert_allclose(engine.prefill(1, tokens[9:], start=9), whole[-1:], atol=2e-2)
    # Slot 0 is one step from the end of the text, slot 1 somewhere in its middle, slot 2 at its start.
    engine.prefill(2, tokens[:1])
    lengths = [TOKENS - 1, 13, 1]
    stepped = engine.decode([tokens[n] for n in lengths], lengths)
    np.testing.assert_allclose(stepped, whole[lengths], atol=2e-2)


def test_a_copied_slot_goes_on_like_its_source(tmp_path: Path) -> None:
    graph = family_graph("qwen3")
    tokens = tokens_for(graph, seed=3)
    engine = Sequences(PortableEngine(lowered(graph, tmp_path / "lowered", "fp16"), max_tokens=TOKENS, slots=2))
    engine.prefill(0, tokens[:10])
    engine.copy_slot(0, 1, 10)
    np.testing.assert_array_equal(
        engine.prefill(1, tokens[10:12], start=10), engine.prefill(0, tokens[10:12], start=10)
    )


def test_masks_are_explicit_and_shared(tmp_path: Path) -> None:
    """The parser drops ``nonpad_kv_seqlen`` and misreads ``is_causal`` over fixed buffers: neither may appear."""
    model = onnx.load(lowered(family_graph("mistral-short-window"), tmp_path / "l", "fp16").folder / "model.onnx")
    attentions = [n for n in model.graph.node if n.op_type == "Attention"]
    assert len(attentions) == 2
    assert all(len(n.input) == 4 and n.input[3] == "seen.8" for n in attentions)
    assert not any(a.name == "is_causal" for n in attentions for a in n.attribute)


def test_a_soft_cap_is_written_out_and_said(tmp_path: Path) -> None:
    record = lowered(family_graph("gemma2"), tmp_path / "l", "fp16").record
    report = next(r for r in record.passes if r.name == "fixed_kv_cache")
    assert report.matched == 2 and len(report.declined) == 2 and "soft cap" in report.declined[0]
    assert "Attention" not in record.operator_counts and record.operator_counts["TensorScatter"] == 4


def test_precision_is_in_the_graph(tmp_path: Path) -> None:
    graph = family_graph("qwen3")
    linears = sum(len(group.members) for group in graph.record.groups if group.name != "lm_head")
    int4 = lowered(graph, tmp_path / "int4", "int4").record
    fp8 = lowered(graph, tmp_path / "fp8", "fp8").record
    assert int4.operator_counts["DequantizeLinear"] == linears
    assert (fp8.operator_counts["DequantizeLinear"], fp8.operator_counts["QuantizeLinear"]) == (2 * linears, linears)
    assert lowered(graph, tmp_path / "fp16", "fp16").record.bits_per_weight == 16
    assert 4 < int4.bits_per_weight < fp8.bits_per_weight < 12  # the head, large here, stays in fp16


def test_what_cannot_be_lowered_is_refused(tmp_path: Path) -> None:
    graph = family_graph("qwen3")
    with pytest.raises(BuildError, match="precision 'int3'"):
        lowered(graph, tmp_path / "a", "int3")
    for name, scales in (("b", [None]), ("c", [float("nan")]), ("d", [0.5, 0.25])):
        tensors = rounded(graph, SCHEMES["fp8"])
        for group in graph.record.groups:
            for number, member in enumerate(group.members if group.name != "lm_head" else ()):
                tensors[member] = replace(tensors[member], input_scale=scales[number % len(scales)])
        with pytest.raises(BuildError, match=f"input scale of .*{scales[0]}"):
            lowered(graph, tmp_path / name, "fp8", weights=FixedWeights(tensors))
    assert not list(tmp_path.iterdir())


weights = st.integers(0, 2**32 - 1).map(
    lambda seed: (np.random.default_rng(seed).standard_normal((3, 32)) * 10.0 ** (seed % 5 - 3)).astype(np.float32)
)


@given(weights)
@settings(max_examples=30, deadline=None)
def test_fp8_rows_keep_their_relative_precision(weight: NDArray[np.float32]) -> None:
    found = round_to_nearest(weight, FP8)
    restored, scales = found.dequantize(), found.scales[:, 0]
    # Three mantissa bits: half a unit in the last place is 1/16; below the smallest normal, half of its last step.
    assert (np.abs(restored - weight) <= np.maximum(np.abs(weight) / 16, scales[:, None] * 2**-10) * 1.001).all()


def test_zero_weights_have_positive_scales() -> None:
    zeros = round_to_nearest(np.zeros((2, 16), np.float32), FP8)
    assert not zeros.dequantize().any() and (zeros.scales > 0).all()
    tiny = QuantizedWeight(
        np.full((1, 16), 9, np.uint8),
        np.array([[1e-9]], np.float32),
        None,
        Scheme(bits=4, group_size=16, symmetric=True),
    )
    assert (positive_int4([tiny])[1].astype(np.float16) > 0).all()


def test_negative_scales_are_negated_and_what_that_loses_is_counted() -> None:
    codes = np.array([[0, 8, 15, 9] * 4], np.uint8)
    linear = QuantizedWeight(codes, np.array([[-0.5]], np.float32), None, Scheme(bits=4, group_size=16, symmetric=True))
    signed, scales, count = positive_int4([linear])
    restored = signed * scales
    lost = codes[0] == 0
    np.testing.assert_array_equal(restored[0, ~lost], linear.dequantize()[0, ~lost])
    assert (restored[0, lost] == 3.5).all() and count == 4
