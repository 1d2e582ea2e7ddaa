"""What a constraint may cost, when it is checked and when a response follows it; and a probe of what it costs.

A response must not end because its constraint became too complex: by then a client has read half of it. So a constraint
is checked with lower limits than it is served with, along some responses that it allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from runtime.constraints.schemas.keywords import with_subschemas

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

# llguidance makes about 14,000 expressions and 20,000 items in a millisecond, so a mask takes at most 10 ms. The
# schemas of MaskBench need at most 30,000 and 15,000 in a step.
STEP_EXPRESSIONS = 100_000
STEP_ITEMS = 50_000
ROW_ITEMS = 5_000  # behind one letter
GRAMMAR_SYMBOLS = 100_000
FIRST_EXPRESSIONS = 500_000
STATES = 250_000  # of a lexer: 30 to 100 MB where all are needed
STATES_PER_CHARACTER = 12  # of a text whose length is bounded: 5 to 10 are made
MOST_CHARACTERS = 100_000  # that are counted for one schema

WALKS = (1, 4, 16)  # free tokens that a text gets in each walk before it is ended
WALKED = 128  # tokens of a walk
FREE = 0.02  # share of the vocabulary: where more is allowed, any text may come
DRAWN = 8  # tokens that one is chosen from


@dataclass(frozen=True)
class Effort:
    """``share``: of the limits that responses are served with."""

    share: float = 1.0

    def limits(self, characters: int) -> LLParserLimits:
        """For a constraint that bounds texts of so many characters in all."""
        from llguidance import LLParserLimits

        return LLParserLimits(
            initial_lexer_fuel=int(self.share * FIRST_EXPRESSIONS),
            step_lexer_fuel=int(self.share * STEP_EXPRESSIONS),
            step_max_items=int(self.share * STEP_ITEMS),
            max_items_in_row=int(self.share * ROW_ITEMS),
            max_grammar_size=int(self.share * GRAMMAR_SYMBOLS),
            max_lexer_states=STATES + STATES_PER_CHARACTER * min(characters, MOST_CHARACTERS),
            verbose_errors=False,
        )


SERVED, CHECKED = Effort(), Effort(0.4)


def bounded_characters(schema: Any) -> int:
    """The sum of all lengths that a schema bounds texts by, each as often as it is written.

    >>> bounded_characters({"items": {"maxLength": 5}, "properties": {"a": {"minLength": 2}}})
    7
    """
    total = 0

    def count(inner: Any) -> Any:
        nonlocal total
        if isinstance(inner, dict):
            total += int(max(inner.get("minLength", 0), inner.get("maxLength", 0)))
            with_subschemas(inner, count)
        return inner

    count(schema)
    return total


def probe(matcher: LLMatcher, tokenizer: LLTokenizer, stop_tokens: Sequence[int]) -> str | None:
    """Follow some responses that a constraint allows, short and long ones. Why one cannot go on, if so."""
    quote = tokenizer.tokenize_str('"')[0]
    for number, free in enumerate(WALKS):
        walk = _Walk(matcher.deep_copy(), tokenizer, stop_tokens, quote, free, seed=number)
        if reason := walk.reason():
            return reason
    return None


class _Walk:
    """One response of random tokens. ``free``: how many a text gets; then it is ended where that is allowed."""

    def __init__(
        self,
        matcher: LLMatcher,
        tokenizer: LLTokenizer,
        stop_tokens: Sequence[int],
        quote: int,
        free: int,
        *,
        seed: int,
    ) -> None:
        self._matcher, self._tokenizer, self._stop_tokens = matcher, tokenizer, list(stop_tokens)
        self._quote, self._free = quote, free
        self._random = np.random.default_rng(seed)

    def reason(self) -> str | None:
        in_text = 0
        for _ in range(WALKED):
            if self._matcher.is_stopped():
                break
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            if self._matcher.is_error():
                break
            mask = np.unpackbits(bits, bitorder="little")
            mask[self._stop_tokens] = 0
            allowed = np.flatnonzero(mask)
            if not len(allowed):
                return None if self._matcher.is_accepting() else "a response that it allows cannot be completed"
            in_text = in_text + 1 if len(allowed) > FREE * len(mask) else 0
            ends = in_text > self._free and mask[self._quote]
            self._matcher.consume_token(self._quote if ends else self._drawn(allowed))
        return self._matcher.get_error() if self._matcher.is_error() else None

    def _drawn(self, allowed: np.ndarray[Any, np.dtype[np.intp]]) -> int:
        """Not white space, where there is anything else: it leads nowhere."""
        drawn = [int(token) for token in self._random.choice(allowed, min(DRAWN, len(allowed)), replace=False)]
        return next((token for token in drawn if self._tokenizer.decode_bytes([token]).strip()), drawn[0])
