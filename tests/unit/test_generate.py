"""The path of one request: positions fed to the engine, stops, limits and the text that streams out."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from engines.protocol import EngineCapabilities, FloatArray
from engines.slot_engine import SlotEngine
from engines.step_inputs import Int64Array
from runtime.engine.core import EngineCore
from runtime.gateway.text.stops import StopMatcher
from runtime.generate import GenerationSettings, Piece, generate
from runtime.wire.limits import Limits
from runtime.wire.messages import SamplingSettings
from tapeout.errors import RequestError


@cache
def characters() -> Tokenizer:
    """One token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def ids(text: str) -> list[int]:
    return characters().encode(text).ids


class Scripted(SlotEngine):
    """An engine that says a fixed text after any prompt, and checks where each token is written."""

    digest = "scripted"
    prompt_tokens = 64
    capabilities = EngineCapabilities(
        block_tokens=64,
        blocks=4,
        block_bytes=0,
        max_batch=4,
        max_tokens=64,
        vocab_size=256,
        shares_blocks=False,
        chooses_tokens=False,
    )

    def __init__(self, says: str) -> None:
        self.script = ids(says)
        self.positions = 0
        self.prompt = 0
        self.slot = -1

    def _logits(self) -> FloatArray:
        logits = np.zeros((1, self.capabilities.vocab_size), dtype=np.float32)
        logits[0, self.script[self.positions - self.prompt]] = 30.0
        return logits

    def prefill(self, slot: int, tokens: Sequence[int], start: int, positions: Sequence[int]) -> FloatArray:
        assert start == 0 and list(positions) == [len(tokens) - 1]
        self.slot, self.prompt, self.positions = slot, len(tokens), len(tokens)
        return self._logits()

    def decode(self, first_slot: int, tokens: Int64Array, starts: Int64Array) -> FloatArray:
        assert first_slot == self.slot
        assert list(starts) == [self.positions] and self.positions < self.capabilities.max_tokens
        assert list(tokens) == [self.script[self.positions - self.prompt]]
        self.positions += 1
        return self._logits()

    def copy_block(self, source: int, target: int, tokens: int) -> None:
        raise NotImplementedError

    def close(self) -> None: ...


def core(says: str) -> EngineCore:
    return EngineCore(Scripted(says), Limits())


def run(says: str, settings: GenerationSettings, prompt: str = "Hi") -> list[Piece]:
    return list(generate(core(says), characters(), ids(prompt), settings))


def text(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def test_stops_at_the_length_and_counts_tokens() -> None:
    pieces = run("hello world", GenerationSettings(max_new_tokens=5))
    assert text(pieces) == "hello"
    assert [piece.tokens for piece in pieces] == [1, 2, 3, 4, 5]
    assert [piece.finish_reason for piece in pieces] == [None] * 4 + ["length"]


def test_a_stop_token_ends_the_response_and_has_no_text() -> None:
    pieces = run("hi!there", GenerationSettings(max_new_tokens=8, stop_tokens=frozenset(ids("!"))))
    assert text(pieces) == "hi"
    assert pieces[-1] == Piece("", 3, "stop")


def test_a_stop_string_over_several_tokens_does_not_leak() -> None:
    pieces = run("a < b </end> more", GenerationSettings(max_new_tokens=16, stop_strings=("</end>",)))
    assert text(pieces) == "a < b "
    assert pieces[-1].finish_reason == "stop"


def test_what_only_looked_like_a_stop_string_comes_out() -> None:
    settings = GenerationSettings(max_new_tokens=4, stop_strings=("cd!",))
    assert text(run("abcd!", settings)) == "abcd"
    assert text(run("abcd!", GenerationSettings(max_new_tokens=5, stop_strings=("cd!",)))) == "ab"


def test_characters_of_several_tokens_stream_whole() -> None:
    pieces = run("é🙂.", GenerationSettings(max_new_tokens=7))
    assert [piece.text for piece in pieces] == ["é", "🙂", "."]
    cut = run("é🙂.", GenerationSettings(max_new_tokens=4))
    assert text(cut) == "é\ufffd" and cut[-1].finish_reason == "length"


def test_the_engine_is_used_to_its_last_position() -> None:
    settings = GenerationSettings(max_new_tokens=5)
    assert text(run("hello", settings, prompt="x" * 60)) == "hello"
    with pytest.raises(RequestError, match="61 prompt tokens and 5") as caught:
        generate(core("hello"), characters(), ids("x" * 61), settings)  # before the first piece is asked for
    assert "at most 4 new tokens" in caught.value.remedy
    with pytest.raises(RequestError) as caught:
        generate(core("hello"), characters(), ids("x" * 70), settings)
    assert "shorten the prompt" in caught.value.remedy


@pytest.mark.parametrize(("prompt", "message"), [([], "no tokens"), ([3, 256], "token 256"), ([-1], "token -1")])
def test_invalid_prompts_are_refused(prompt: list[int], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        generate(core("x"), characters(), prompt, GenerationSettings())


def test_invalid_settings_are_refused() -> None:
    with pytest.raises(RequestError, match="max_new_tokens is 0"):
        GenerationSettings(max_new_tokens=0)
    with pytest.raises(RequestError, match="stop string is empty"):
        GenerationSettings(stop_strings=("a", ""))


def test_sampling_settings_reach_the_sampler() -> None:
    """At an enormous temperature the script no longer decides, but the seed does."""

    def first(seed: int) -> str:
        sampling = SamplingSettings(temperature=1e6, seed=seed)
        return text(run("a", GenerationSettings(max_new_tokens=1, sampling=sampling)))

    assert first(1) == first(1)
    assert len({first(seed) for seed in range(12)}) > 2


@given(
    body=st.text(alphabet="ab<", max_size=12),
    stops=st.lists(st.text(alphabet="ab<", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 12), max_size=5),
)
def test_matching_does_not_depend_on_where_the_pieces_are_cut(body: str, stops: list[str], cuts: list[int]) -> None:
    def feed(parts: list[str]) -> tuple[str, bool]:
        matcher = StopMatcher(stops)
        out = "".join(matcher.push(part) for part in parts)
        return out + matcher.finish(), matcher.matched

    edges = [0, *sorted(min(cut, len(body)) for cut in cuts), len(body)]
    out, matched = feed([body[a:b] for a, b in pairwise(edges)])
    assert (out, matched) == feed(list(body))
    assert matched == any(stop in body for stop in stops)
    assert body.startswith(out) and not any(stop in out for stop in stops)
    if not matched:
        assert out == body
