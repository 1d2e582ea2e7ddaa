"""Token ids to text, piece by piece, never half a character.

A character can span several tokens, and the text of a token can depend on the token before it (a leading space). So
each step decodes a short window that starts with the previous piece, and holds text back while it ends inside a
character.

``tokenizers.decoders.DecodeStream`` does the same, but version 0.23.3 raises "Invalid prefix encountered" where a
byte-fallback tokenizer (Llama 2, Mistral, Gemma) gets byte tokens that are not UTF-8; a sampled response may hold them.
"""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer

REPLACEMENT = "\ufffd"  # what undecodable bytes read as
MOST_PENDING = 64  # tokens; no character has so many, so these are bytes without any


def special_tokens(tokenizer: Tokenizer) -> frozenset[int]:
    added: dict[int, AddedToken] = tokenizer.get_added_tokens_decoder()
    return frozenset(token for token, entry in added.items() if entry.special)


class Detokenizer:
    """The text of one response as it grows. Tokens in ``special`` (end of turn, padding) have no text."""

    def __init__(self, tokenizer: Tokenizer, special: frozenset[int] | None = None) -> None:
        self._tokenizer = tokenizer
        self._special = special_tokens(tokenizer) if special is None else special
        self._context: list[int] = []  # tokens of the last piece
        self._pending: list[int] = []  # tokens whose text is still held back

    def push(self, token: int) -> str:
        """The text that this token completes; empty while a character is unfinished."""
        if token in self._special:
            return ""
        self._pending.append(token)
        text = self._new_text()
        unfinished = not text or text.endswith(REPLACEMENT)
        if unfinished and len(self._pending) < MOST_PENDING:
            return ""
        self._context, self._pending = self._pending, []
        return text

    def finish(self) -> str:
        """The text that is still held back: bytes that never became a character read as U+FFFD."""
        text = self._new_text() if self._pending else ""
        self._context, self._pending = [], []
        return text

    def _new_text(self) -> str:
        before: str = self._tokenizer.decode(self._context, skip_special_tokens=False)
        return self._tokenizer.decode(self._context + self._pending, skip_special_tokens=False)[len(before) :]
