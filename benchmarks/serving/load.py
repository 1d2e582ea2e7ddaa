"""What the client sends: prompts cut from a text at random places, and random lengths and arrivals. All are seeded."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks.serving.client import Planned

ROOT = Path(__file__).parents[2]
# Mixed lengths in tokens with their weights: questions and short answers are the most frequent, as in chats.
PROMPTS = ((32, 4), (64, 3), (128, 2), (256, 1), (512, 1))
ANSWERS = ((16, 3), (32, 3), (64, 3), (128, 2))


@dataclass
class Text:
    """Tokens that prompts are cut from. Two prompts begin at different places, so they share no prefix."""

    tokens: Sequence[int]
    random: random.Random

    @classmethod
    def read(cls, tokenizer: Path, seed: int) -> Text:
        """Of this repository's documents."""
        text = "\n".join(path.read_text() for path in sorted((ROOT / "docs").rglob("*.md")))
        return cls(Tokenizer.from_file(str(tokenizer)).encode(text, add_special_tokens=False).ids, random.Random(seed))

    def prompt(self, size: int) -> list[int]:
        """``size`` tokens. The first is random, so that not even a repeated place is found in a prefix cache."""
        start = self.random.randrange(len(self.tokens) - size)
        return [self.random.choice(self.tokens), *self.tokens[start + 1 : start + size]]

    def streams(self, count: int, prompt_tokens: int, new_tokens: int) -> list[Planned]:
        """Requests of equal lengths that all start at once."""
        return [Planned(self.prompt(prompt_tokens), new_tokens) for _ in range(count)]

    def poisson(self, count: int, rate: float) -> list[Planned]:
        """Requests of mixed lengths. ``rate``: mean arrivals per second; the gaps are exponentially distributed."""
        at, found = 0.0, list[Planned]()
        for _ in range(count):
            at += self.random.expovariate(rate)
            found.append(Planned(self.prompt(self._size(PROMPTS)), self._size(ANSWERS), at))
        return found

    def _size(self, weighted: Sequence[tuple[int, int]]) -> int:
        sizes, weights = zip(*weighted, strict=True)
        return self.random.choices(sizes, weights)[0]


def mean_answer() -> float:
    """Mean new tokens of a request of :meth:`Text.poisson`.

    >>> round(mean_answer(), 1)
    53.8
    """
    return sum(size * weight for size, weight in ANSWERS) / sum(weight for _, weight in ANSWERS)
