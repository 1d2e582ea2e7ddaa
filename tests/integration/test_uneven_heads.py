"""Engines whose keys have other heads than their values, as those of DeepSeek-V2 and V3 do: 192 channels and 128."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engines.compile import lowering_for
from engines.load import find_target, known_targets, load
from engines.protocol import FloatArray
from engines.sequences import Sequences, SlotEntry
from quantization.compressed_tensors import open_checkpoint
from tapeout.errors import BuildError
from tapeout.recipe import KVCache, Rule
from tapeout.state import ELEMENT_BITS
from tests.exported import family_graph
from tests.families import LAYERS
from tests.family_engines import Made, difference_from_checkpoint, make, words

KEYS, VALUES = 192, 128
# Of both layers. Those with a window have twice as many in MiMo.
KV_HEADS = {"deepseek_v2-published-heads": 4, "deepseek_v3-published-heads": 4, "mimo_v2_flash": 6}
POSITIONS, TOKENS = 192, 150  # two full blocks and more
CACHES = (
    KVCache(dtype="float32"),
    KVCache(dtype="int8"),
    KVCache(dtype="int8", granularity="per_tensor"),
    KVCache(dtype="int4"),
)
CODES = (Rule(match="*", bits=8, group_size=32, symmetric=True),)  # linears whose bits depend on nothing else


@pytest.fixture(scope="module", params=KV_HEADS)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module", params=CACHES, ids=lambda cache: cache.name)
def made(family: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("uneven")
    return make(family, folder, CODES, kv_cache=request.param, max_position_embeddings=POSITIONS)


def opened(made: Made) -> Sequences:
    return Sequences(load(made.bundle.folder, threads=2))


def alone(engine: Sequences, tokens: list[int]) -> FloatArray:
    return engine.prefill(0, tokens, positions=range(len(tokens)))


def test_an_engine_computes_what_its_checkpoint_says(made: Made) -> None:
    assert difference_from_checkpoint(made, 2, 60) == ""


def test_keys_are_put_together_by_copies_alone(made: Made) -> None:
    found = {report.name: report for report in made.bundle.record.passes}["latent_keys"]
    latent = made.name.startswith("deepseek")
    assert found.matched == (LAYERS if latent else 0)
    assert not latent or found.declined == ()


def test_a_token_takes_what_its_keys_and_values_take(made: Made) -> None:
    bits = ELEMENT_BITS[made.quantized.record.kv_cache.dtype]
    assert made.bundle.record.io.token_bytes == KV_HEADS[made.name] * (KEYS + VALUES) * bits // 8
    assert (made.graph.record.head_size, made.graph.record.value_size) == (KEYS, VALUES)


def test_a_sequence_is_the_same_to_the_bit_however_it_is_computed(made: Made) -> None:
    """At once, cut anywhere, token by token, beside another one, and over blocks that another engine has computed."""
    first, other = opened(made), opened(made)
    try:
        tokens, neighbour = words(made.name, 2, TOKENS, 3)
        expected = alone(first, tokens)
        moved = first.read_blocks(0, TOKENS // 64)
        for pieces in ((64, 64, 22), (1, 100, 49), (TOKENS - 6, *[1] * 6)):
            start, parts = 0, list[FloatArray]()
            for size in pieces:
                parts.append(other.prefill(0, tokens[start : start + size], start=start, positions=range(size)))
                start += size
            np.testing.assert_array_equal(np.concatenate(parts), expected)
        fed, at = other.feed([SlotEntry(0, neighbour, 0), SlotEntry(1, tokens, 0, range(TOKENS))]), TOKENS - 1
        np.testing.assert_array_equal(fed[1], expected)
        together = other.decode([neighbour[at], tokens[at]], [at, at])
        np.testing.assert_array_equal(together[1], expected[at])
        other.write_blocks(0, moved)
        start = len(moved) * 64
        behind = other.prefill(0, tokens[start:], start=start, positions=range(TOKENS - start))
        np.testing.assert_array_equal(behind, expected[start:])
    finally:
        first.close()
        other.close()


@pytest.mark.parametrize("name", sorted({*known_targets()} - {"ort-cpu"}))
def test_other_targets_refuse_them_before_anything_takes_long(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    target = find_target(name)
    monkeypatch.setattr(type(target), "require_machine", lambda _: None)
    graph = family_graph("minicpm3-uneven-heads")
    precision = next(iter(target.capabilities.precisions), "")
    with pytest.raises(BuildError) as refused:
        lowering_for(target, graph, open_checkpoint(graph.folder), precision, kv_scales={})
    assert refused.value.found == f"the model has keys of 16 channels and values of 32, which {name} does not compute"
    assert "ort-cpu" in refused.value.remedy
