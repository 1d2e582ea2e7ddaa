"""What is timed as attention is attention, over caches as the target keeps them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from engines.costs import timing
from engines.costs.attention import Step, TimedAttention, attention_model
from engines.costs.timing import OperatorTimer
from engines.load import find_target
from tapeout.errors import BuildError
from tapeout.portable_graph import PortableGraph
from tests.lowering import run
from tests.native import own_cache

Array = NDArray[np.float32]
CONTEXT = 24
TARGET = find_target("ort-cpu")
KEPT = ("float32", "int8", "int4")


Rotary = Literal["half", "interleaved", "none"]


def graph(rotary: Rotary = "half", head_size: int = 16, value_size: int = 16) -> PortableGraph:
    return PortableGraph(
        architecture="Test",
        layers=2,
        state=(),
        hidden_size=64,
        heads=4,
        kv_heads=2,
        head_size=head_size,
        value_size=value_size,
        vocab_size=8,
        tied_embeddings=True,
        embedding="",
        rotary=rotary,
        max_positions=CONTEXT,
        model_positions=CONTEXT,
        groups=(),
        stop_tokens=(),
        max_relative_error=0.0,
        versions={},
    )


def attended(qkv: Array, keys: Array, values: Array) -> Array:
    """One sequence's last tokens ``[S, (4+2)*16 + 2*E]`` without rotary embedding, over caches ``[2, T, 16 or E]``."""
    count = len(qkv)
    query, key, value = (part.reshape(count, heads, -1) for part, heads in
                         zip(np.split(qkv, [4 * 16, 6 * 16], axis=1), (4, 2, 2), strict=True))  # fmt: skip
    keys, values = keys.copy(), values.copy()
    keys[:, -count:], values[:, -count:] = key.swapaxes(0, 1), value.swapaxes(0, 1)
    hidden = np.triu(np.ones((count, CONTEXT), bool), CONTEXT - count + 1)
    outputs: list[Array] = []
    for head in range(4):
        scores = np.where(hidden, -np.inf, query[:, head] @ keys[head // 2].T / 4)
        weights = np.exp(scores - scores.max(1, keepdims=True))
        outputs.append(weights / weights.sum(1, keepdims=True) @ values[head // 2])
    return np.concatenate(outputs, axis=1)


@pytest.mark.parametrize(("sequences", "tokens"), [(3, 1), (1, 20)])
@pytest.mark.parametrize("value_size", [16, 48])
def test_every_copy_is_attention_over_a_cache_of_its_own(sequences: int, tokens: int, value_size: int) -> None:
    rng = np.random.default_rng(0)
    qkv = rng.standard_normal((sequences, tokens, 96 + 2 * value_size)).astype(np.float32)
    feeds = {
        f"past_key_values.{copy}.{part}": rng.standard_normal((sequences, 2, CONTEXT, size)).astype(np.float32)
        for copy in range(2)
        for part, size in (("key", 16), ("value", value_size))
    }
    found = run(
        attention_model(TARGET, graph("none", value_size=value_size), "float32", 2, CONTEXT),
        feeds
        | {
            "qkv": qkv,
            "offsets": np.arange(sequences + 1, dtype=np.int32) * tokens,
            "starts": np.full(sequences, CONTEXT - tokens, np.int32),
            "block_table": np.arange(sequences, dtype=np.int32)[:, None],
        },
    )
    for copy in range(2):
        for sequence in range(sequences):
            pasts = (feeds[f"past_key_values.{copy}.{part}"][sequence] for part in ("key", "value"))
            expected = attended(qkv[sequence], *pasts)
            np.testing.assert_allclose(found[f"y{copy}"][sequence], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rotary", ["half", "interleaved", "none"])
@pytest.mark.parametrize("dtype", KEPT)
def test_attention_is_what_the_passes_write(dtype: str, rotary: Rotary) -> None:
    model = attention_model(TARGET, graph(rotary, value_size=48), dtype, 3, CONTEXT)
    assert {node.op_type for node in model.graph} == {"CachedAttention"}
    for part, size in (("key", 16), ("value", 48)):
        shapes = {tuple(i.shape or ())[-1] for i in model.graph.inputs if (i.name or "").endswith(f".{part}")}
        assert shapes == {size // 2 if dtype == "int4" else size}


def test_every_way_to_keep_the_cache_is_timed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_cache(monkeypatch, tmp_path / "cache")
    asked: list[int] = []
    fastest = timing.fastest

    def counted(samples: Mapping[str, Callable[[], float]]) -> dict[str, float]:
        asked.append(len(samples))
        return fastest(samples)

    monkeypatch.setattr(timing, "fastest", counted)

    def seconds(
        tokens: list[int], *, slots: int = 4, context: int = CONTEXT, only_kept: bool = False, value_size: int = 16
    ) -> timing.Seconds:
        timer = OperatorTimer(TARGET, 1 << 14, threads=1, only_kept=only_kept)
        return timer.costs(TimedAttention(graph(value_size=value_size), KEPT, slots, context), tokens)

    assert seconds([1, 20], only_kept=True) == {dtype: {} for dtype in KEPT}
    found = seconds([1, 20])
    assert list(found) == list(KEPT) and all(min(by_tokens.values()) > 0 for by_tokens in found.values())
    assert seconds([1, 20]) == found == seconds([1, 20], only_kept=True)
    assert seconds([1, 20], slots=2) == found, "both steps stay what they are"
    assert asked == [3, 3]
    seconds([20], slots=20)
    seconds([1], context=CONTEXT // 2)
    assert asked == [3, 3, 3, 3]
    seconds([1], value_size=48)
    assert asked == [3, 3, 3, 3, 3]


def test_heads_that_no_kernel_takes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_cache(monkeypatch, tmp_path / "cache")
    with pytest.raises(BuildError, match="no attention for layer 0: heads of 24 channels"):
        OperatorTimer(TARGET, 1 << 14).costs(TimedAttention(graph(head_size=24), KEPT, 4, CONTEXT), [1, 20])


@given(tokens=st.integers(1, 64), slots=st.integers(1, 64), context=st.integers(1, 64))
def test_a_step_computes_its_tokens_and_leaves_the_cache_that_was_asked_for(
    tokens: int, slots: int, context: int
) -> None:
    step = Step.of(tokens, slots, context)
    assert step.sequences * step.tokens == tokens
    assert step.sequences == 1 or step.tokens == 1
    assert step.sequences <= slots and step.tokens <= step.context
    assert step.context == context or step.context == tokens > context
