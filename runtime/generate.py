"""One request on one engine: prompt tokens in, a stream of text pieces out.

Serving many requests at once is the scheduler's task; this is the whole path of a single one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from tokenizers import Tokenizer

from engines.protocol import FloatArray
from engines.sequences import Sequences
from runtime.detokenize import Detokenizer, TokenTexts
from runtime.messages import GenerateRequest, SamplingSettings
from runtime.sampling import BatchSampler
from runtime.stops import StopMatcher
from tapeout.errors import RequestError

FinishReason = Literal["stop", "length"]
_ID = "only"  # the sampler's name of the one request


@dataclass(frozen=True)
class GenerationSettings:
    """When to stop, and how to choose tokens.

    ``stop_tokens`` end the response and have no text; neither does the stop string that ends it.
    """

    max_new_tokens: int = 256
    stop_tokens: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    sampling: SamplingSettings = field(default_factory=SamplingSettings)

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise RequestError(f"max_new_tokens is {self.max_new_tokens}", expected="at least 1")
        if "" in self.stop_strings:
            raise RequestError("a stop string is empty", expected="stop strings of at least one character")


@dataclass(frozen=True)
class Piece:
    """New text, and the number of tokens of the response so far. The last piece has a finish reason."""

    text: str
    tokens: int
    finish_reason: FinishReason | None = None


def generate(
    engine: Sequences, tokenizer: Tokenizer, prompt: Sequence[int], settings: GenerationSettings, *, slot: int = 0
) -> Iterator[Piece]:
    """Stream the response to ``prompt`` (token ids) from one KV slot of ``engine``.

    The prompt is checked here, before the first piece is asked for: :class:`RequestError` if it is empty, holds ids
    outside the vocabulary, or does not fit the slot together with ``max_new_tokens``.
    """
    if not prompt:
        raise RequestError("the prompt has no tokens", expected="at least one")
    outside = [token for token in prompt if not 0 <= token < engine.vocab_size]
    if outside:
        raise RequestError(f"the prompt holds token {outside[0]}", expected=f"ids below {engine.vocab_size}")
    # The last new token is never fed back, so it needs no position in the slot.
    room = engine.max_tokens - len(prompt) + 1
    if settings.max_new_tokens > room:
        remedy = f"ask for at most {room} new tokens" if room > 0 else "shorten the prompt"
        raise RequestError(
            f"{len(prompt)} prompt tokens and {settings.max_new_tokens} new ones",
            expected=f"at most {engine.max_tokens} positions, which this bundle was built for",
            remedy=f"{remedy}, or raise export.max_positions and rebuild",
        )
    return _stream(engine, tokenizer, prompt, settings, slot)


def _stream(
    engine: Sequences, tokenizer: Tokenizer, prompt: Sequence[int], settings: GenerationSettings, slot: int
) -> Iterator[Piece]:
    sampler = BatchSampler(engine.vocab_size)
    sampler.add(GenerateRequest(_ID, prompt, settings.max_new_tokens, settings.sampling))
    detokenizer = Detokenizer(TokenTexts(tokenizer))
    matcher = StopMatcher(settings.stop_strings)
    token = _choose(sampler, engine.prefill(slot, prompt))
    for count in range(1, settings.max_new_tokens + 1):
        if token in settings.stop_tokens:
            yield Piece(_last_text(detokenizer, matcher), count, "stop")
            return
        text = matcher.push(detokenizer.push(token))
        if matcher.matched:
            yield Piece(text, count, "stop")
            return
        if count == settings.max_new_tokens:
            text += _last_text(detokenizer, matcher)
            # The characters that were held back may themselves complete a stop string.
            yield Piece(text, count, "stop" if matcher.matched else "length")
            return
        if text:
            yield Piece(text, count)
        step = [token], [len(prompt) + count - 1]
        if sampler.needs(_ID) == "token":
            token = int(engine.decode_greedy(*step, first_slot=slot)[0])
        else:
            token = _choose(sampler, engine.decode(*step, first_slot=slot))


def _choose(sampler: BatchSampler, logits: FloatArray) -> int:
    (choice,) = sampler.choose([_ID], logits)
    if choice.error is not None:
        raise RequestError(
            choice.error,
            expected="finite logits",
            remedy="rebuild the bundle; `tapeout inspect` shows which quantized layers have the largest errors",
        )
    return choice.token


def _last_text(detokenizer: Detokenizer, matcher: StopMatcher) -> str:
    text = matcher.push(detokenizer.finish())
    return text if matcher.matched else text + matcher.finish()
