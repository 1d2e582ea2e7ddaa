"""Log-probabilities as the two endpoints write them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from runtime.gateway.text.model import TextModel
from runtime.wire.messages import TokenLogprobs

LEAST = -9999.0  # JSON has no minus infinity


class Logprobs:
    """Writes tokens by their text, or as ``token_id:17``."""

    def __init__(self, model: TextModel, *, as_ids: bool = False) -> None:
        self._model, self._as_ids = model, as_ids

    def name(self, token: int) -> str:
        return f"token_id:{token}" if self._as_ids else self._model.token_text(token)

    def completion(
        self, tokens: Sequence[int], entries: Sequence[TokenLogprobs | None], offsets: Sequence[int], count: int
    ) -> dict[str, Any]:
        """``offsets``: where the tokens begin, in characters. The first token of a prompt has no log-probability."""
        return {
            "text_offset": list(offsets),
            "token_logprobs": [None if entry is None else _finite(entry.logprob) for entry in entries],
            "tokens": [self.name(token) for token in tokens],
            "top_logprobs": [None if entry is None else self._likeliest(entry, count) for entry in entries],
        }

    def chat(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        return {"content": [self._entry(entry) for entry in entries], "refusal": None}

    def prompt(self, entries: Sequence[TokenLogprobs | None]) -> list[dict[str, Any] | None]:
        """vLLM's ``prompt_logprobs``: for each token of the prompt, token id -> log-probability and text."""
        return [
            None
            if entry is None
            else {
                str(token): {"logprob": _finite(logprob), "decoded_token": self.name(token)}
                for token, logprob in dict([*entry.top, (entry.token, entry.logprob)]).items()
            }
            for entry in entries
        ]

    def _likeliest(self, entry: TokenLogprobs, count: int) -> dict[str, float]:
        found: dict[str, float] = {}
        owner: dict[str, int] = {}
        for token, logprob in (*entry.top[:count], (entry.token, entry.logprob)):
            name = self.name(token)
            if owner.setdefault(name, token) != token:  # two tokens can read the same
                name = f"token_id:{token}"
            found[name] = _finite(logprob)
        return found

    def _entry(self, entry: TokenLogprobs) -> dict[str, Any]:
        top = [self._one(token, logprob) for token, logprob in entry.top]
        return self._one(entry.token, entry.logprob) | {"top_logprobs": top}

    def _one(self, token: int, logprob: float) -> dict[str, Any]:
        content = list(self._model.token_bytes(token))
        return {"token": self.name(token), "logprob": _finite(logprob), "bytes": content}


def _finite(logprob: float) -> float:
    return max(logprob, LEAST)
