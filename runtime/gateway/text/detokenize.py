"""Token ids to text, piece by piece, never half a character.

A character can span several tokens, and the text of a token can depend on the token before it (a leading space). So
each step decodes a short window that starts with the previous piece, and holds text back while it ends inside a
character. In a byte-level vocabulary no text depends on what was before it: there the window starts after that piece.

``tokenizers.decoders.DecodeStream`` does the same, but version 0.23.3 raises "Invalid prefix encountered" where a
byte-fallback tokenizer (Llama 2, Mistral, Gemma) gets byte tokens that are not UTF-8; a sampled response may hold them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from tokenizers import AddedToken, Tokenizer

REPLACEMENT = "\ufffd"  # what undecodable bytes read as
MOST_PENDING = 64  # tokens; no character has so many, so these are bytes without any
# Texts of single tokens that are kept, 12 MB at most: a token then takes 0.3 µs in a loop, and 1.0 where it is decoded
# together with the one before it.
KEPT_TEXTS = 1 << 16


def decoder_state(tokenizer: Tokenizer) -> dict[str, Any]:
    """How a tokenizer turns tokens into text, as its file says it; empty without a decoder."""
    return json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder else {}


class TokenTexts:
    """The texts of tokens.

    ``special``: ids of special tokens (end of turn, padding); they have a text here, which a response leaves out.
    ``byte_level``: a text is the bytes of its tokens one after the other, as in GPT-2, Llama 3, Qwen and SmolLM.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        added: dict[int, AddedToken] = tokenizer.get_added_tokens_decoder()
        self.special = frozenset(token for token, entry in added.items() if entry.special)
        self.byte_level = decoder_state(tokenizer).get("type") == "ByteLevel"
        self._tokenizer = tokenizer
        self._one = _cached(tokenizer)

    def text(self, tokens: Sequence[int]) -> str:
        if len(tokens) == 1:
            return self._one(tokens[0])
        return self._tokenizer.decode(tokens, skip_special_tokens=False) if tokens else ""


def _cached(tokenizer: Tokenizer) -> Callable[[int], str]:
    """Not a method: the cache would hold its owner, which then is not freed when a server changes its bundle."""

    @lru_cache(KEPT_TEXTS)
    def one(token: int) -> str:
        return tokenizer.decode([token], skip_special_tokens=False)

    return one


class Detokenizer:
    """The text of one response as it grows. ``skip_special``: special tokens have no text."""

    def __init__(self, texts: TokenTexts, *, skip_special: bool = True) -> None:
        self._texts = texts
        self._skipped = texts.special if skip_special else frozenset[int]()
        self._context: list[int] = []  # tokens of the last piece, where texts depend on them
        self._pending: list[int] = []  # tokens whose text is still held back

    def push(self, token: int) -> str:
        """The text that this token completes; empty while a character is unfinished."""
        if token in self._skipped:
            return ""
        self._pending.append(token)
        text = self._new_text()
        unfinished = not text or text.endswith(REPLACEMENT)
        if unfinished and len(self._pending) < MOST_PENDING:
            return ""
        if not self._texts.byte_level:
            self._context = self._pending
        self._pending = []
        return text

    def finish(self) -> str:
        """The text that is still held back: bytes that never became a character read as U+FFFD."""
        text = self._new_text() if self._pending else ""
        self._context, self._pending = [], []
        return text

    def _new_text(self) -> str:
        if not self._context:
            return self._texts.text(self._pending)
        before = self._texts.text(self._context)
        return self._texts.text(self._context + self._pending)[len(before) :]
