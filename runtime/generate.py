"""One request on one engine: prompt tokens in, a stream of text pieces out, by the core that serves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Literal

from tokenizers import Tokenizer

from runtime.engine.core import EngineCore
from runtime.engine.in_process import deltas
from runtime.gateway.text.detokenize import Detokenizer, TokenTexts
from runtime.gateway.text.stops import StopMatcher
from runtime.wire.messages import GenerateRequest, SamplingSettings
from tapeout.errors import RequestError

FinishReason = Literal["stop", "length"]
_ID = "only"


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
    core: EngineCore, tokenizer: Tokenizer, prompt: Sequence[int], settings: GenerationSettings
) -> Iterator[Piece]:
    """Stream the response to ``prompt`` (token ids) from a core that serves nobody else.

    The prompt is checked here, before the first piece is asked for: :class:`RequestError` if it is empty, holds ids
    outside the vocabulary, or does not fit the engine together with ``max_new_tokens``.
    """
    has = core.engine.capabilities
    if not prompt:
        raise RequestError("the prompt has no tokens", expected="at least one")
    outside = [token for token in prompt if not 0 <= token < has.vocab_size]
    if outside:
        raise RequestError(f"the prompt holds token {outside[0]}", expected=f"ids below {has.vocab_size}")
    # The last new token is never fed back, so it needs no position.
    room = has.max_tokens - len(prompt) + 1
    if settings.max_new_tokens > room:
        remedy = f"ask for at most {room} new tokens" if room > 0 else "shorten the prompt"
        raise RequestError(
            f"{len(prompt)} prompt tokens and {settings.max_new_tokens} new ones",
            expected=f"at most {has.max_tokens} positions, which this bundle was built for",
            remedy=f"{remedy}, or raise export.max_positions and rebuild",
        )
    return _stream(core, tokenizer, prompt, settings)


def _stream(
    core: EngineCore, tokenizer: Tokenizer, prompt: Sequence[int], settings: GenerationSettings
) -> Iterator[Piece]:
    request = GenerateRequest(_ID, prompt, settings.max_new_tokens, settings.sampling, settings.stop_tokens)
    detokenizer = Detokenizer(TokenTexts(tokenizer))
    matcher = StopMatcher(settings.stop_strings)
    count = 0
    with closing(deltas(core, request)) as steps:
        for delta in steps:
            if delta.error is not None:
                raise RequestError(
                    delta.error,
                    expected="finite logits",
                    remedy="rebuild the bundle; `tapeout inspect` shows which quantized layers have the largest errors",
                )
            for token in delta.tokens:
                count += 1
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


def _last_text(detokenizer: Detokenizer, matcher: StopMatcher) -> str:
    text = matcher.push(detokenizer.finish())
    return text if matcher.matched else text + matcher.finish()
