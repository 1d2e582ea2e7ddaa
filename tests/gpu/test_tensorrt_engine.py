"""TensorRT engines on the GPU they were compiled for. Skipped without one: nothing here has run on a GPU yet."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import numpy as np
import pytest

from engines.load import hardware_target, load
from engines.portable import PortableEngine
from engines.sequences import Sequences
from engines.target import Compilation
from tests.exported import family_graph
from tests.lowered import SLOTS, lowered

GPU = hardware_target("tensorrt").features()
pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("tensorrt_rtx_bindings") is None and importlib.util.find_spec("tensorrt") is None,
        reason="no TensorRT is installed",
    ),
    pytest.mark.skipif(not GPU, reason="no GPU here, or no cuda-bindings to reach it"),
]
TARGET = "tensorrt-rtx" if importlib.util.find_spec("tensorrt_rtx_bindings") else "tensorrt"
FAMILIES = ("llama", "qwen3", "gemma2")
PRECISIONS = ("fp16", "int4", "fp8")
TOKENS = 24
Pair = Callable[[str, str], tuple[Sequences, Sequences]]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """The compiled engine, and the same lowered graph on ONNX Runtime."""

    def get(family: str, precision: str) -> tuple[Sequences, Sequences]:
        folder = tmp_path_factory.mktemp(f"{family}-{precision}")
        source = lowered(family_graph(family), folder / "lowered", precision)
        hardware_target(TARGET).compile(source, folder / "bundle", Compilation(GPU[0], (1, SLOTS)))
        engines = load(folder / "bundle"), PortableEngine(source, max_tokens=TOKENS + 8, slots=SLOTS)
        return Sequences(engines[0]), Sequences(engines[1])

    return get


def tokens_of(engine: Sequences) -> list[int]:
    return np.random.default_rng(0).integers(3, engine.vocab_size, TOKENS).tolist()


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_engine_computes_the_lowered_graph(pair: Pair, family: str, precision: str) -> None:
    engine, reference = pair(family, precision)
    tokens = tokens_of(engine)
    expected = reference.prefill(0, tokens, positions=range(TOKENS))
    actual = engine.prefill(0, tokens, positions=range(TOKENS))
    assert np.abs(actual - expected).max() < 0.02 * np.abs(expected).max()
    engine.close()


def test_ragged_decode_in_a_captured_graph_is_a_prefill_in_steps(pair: Pair) -> None:
    engine, _ = pair("llama", "fp16")
    tokens = tokens_of(engine)
    whole = engine.prefill(3, tokens, positions=range(TOKENS))
    lengths = [4, 9, 1]
    for slot, length in enumerate(lengths):
        engine.prefill(slot, tokens[:length])
    for _ in range(4):  # the first step runs as it is, the second is the first replay
        stepped = engine.decode([tokens[n] for n in lengths], lengths)
        np.testing.assert_allclose(stepped, whole[lengths], atol=2e-2)
        lengths = [n + 1 for n in lengths]
    # The bucket's fourth row was slot 3, which must go on as if nothing had happened.
    np.testing.assert_allclose(engine.prefill(3, tokens[-1:], start=TOKENS - 1), whole[-1:], atol=2e-2)
    engine.close()


def test_a_full_neighbour_is_left_alone(pair: Pair) -> None:
    engine, _ = pair("llama", "fp16")
    tokens = (tokens_of(engine) * 3)[: engine.max_tokens]
    full = engine.prefill(3, tokens)
    for slot in range(3):
        engine.prefill(slot, tokens[:5])
    engine.decode(tokens[5:6] * 3, [5, 5, 5])
    np.testing.assert_allclose(engine.prefill(3, tokens[-1:], start=len(tokens) - 1), full, atol=2e-2)
    engine.close()


def test_a_copied_slot_goes_on_like_its_source(pair: Pair) -> None:
    engine, _ = pair("qwen3", "fp16")
    tokens = tokens_of(engine)
    engine.prefill(0, tokens[:10])
    engine.copy_slot(0, 2, 10)
    np.testing.assert_allclose(
        engine.prefill(2, tokens[10:12], start=10), engine.prefill(0, tokens[10:12], start=10), atol=1e-3
    )
    engine.close()
