"""Answers of the core that serves: what is asked of it, what comes back, and greedy answers to many prompts.

``evals`` does not know the core: a stage hands in an :class:`Answerer`, which runs it in this process
(``pipeline/stages/answering.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from tapeout.errors import EvidenceError


@dataclass(frozen=True)
class Ask:
    """One request, with the settings that the server's API has. The defaults are greedy.

    ``choices``: texts, of which the answer must be one. ``logprobs``: so many of the likeliest tokens with each token;
    ``prompt_logprobs`` the same of the prompt. ``leaves_after``: the client leaves once it has so many tokens.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    stop_tokens: frozenset[int] = frozenset()
    min_new_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict[int, float])
    seed: int = 0
    choices: tuple[str, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    priority: int = 0
    tenant: str = ""
    cache_salt: bytes = b""
    leaves_after: int | None = None


class Score(NamedTuple):
    """Log-probability of a token in nats, and the likeliest tokens with theirs."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Answer:
    """``tokens``: the stop token included. ``ending``: "stop", "length", "cancelled", or "error" and which.

    ``scores``: of the tokens; ``prompt_scores`` of the prompt, None for its first. ``cached``: prompt tokens that were
    found in blocks. ``accepted``: tokens that were drafted before. ``preempted``: how often.
    """

    tokens: tuple[int, ...]
    ending: str
    error: str = ""
    scores: tuple[Score, ...] = ()
    prompt_scores: tuple[Score | None, ...] = ()
    cached: int = 0
    accepted: int = 0
    preempted: int = 0

    @property
    def stopped(self) -> bool:
        """It ended by its own decision, or by what it said, rather than by the length limit."""
        return self.ending in ("stop", "cancelled")


Leaves = Callable[[Sequence[int]], bool]


class Answerer(Protocol):
    """The core that serves, with an engine that is open."""

    @property
    def max_tokens(self) -> int:
        """Positions of a sequence."""
        ...

    @property
    def constrains(self) -> bool:
        """Answers can be held to a constraint, such as a choice of texts."""
        ...

    @property
    def drafts(self) -> tuple[int, int]:
        """Tokens that were drafted so far, and how many of them were accepted."""
        ...

    @property
    def steps_ahead(self) -> int:
        """Steps so far that began before the one before had ended."""
        ...

    def answer(self, asks: Sequence[Ask], *, leaves: Leaves | None = None, progress: str | None = None) -> list[Answer]:
        """Answers to requests that arrive at once, in their order. ``leaves``: whether a client has read enough."""
        ...


def greedy(
    answerer: Answerer,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_tokens: Collection[int],
    leaves: Leaves | None = None,
    progress: str | None = None,
) -> list[Answer]:
    """Answer every prompt with the likeliest token each time, in the order of the prompts.

    :class:`EvidenceError` for an empty prompt, for one that leaves no room for ``max_new_tokens``, and for a request
    that fails.
    """
    for number, prompt in enumerate(prompts):
        if not prompt or len(prompt) + max_new_tokens > answerer.max_tokens:
            raise EvidenceError(
                f"prompt {number} has {len(prompt)} tokens",
                expected=f"1 to {answerer.max_tokens - max_new_tokens}: the engine holds {answerer.max_tokens} "
                f"positions, {max_new_tokens} of them for the answer",
                remedy="leave out that prompt, lower `shadow.max_new_tokens` or raise `export.max_positions`",
            )
    stops = frozenset(stop_tokens)
    asks = [Ask(tuple(prompt), max_new_tokens, stops) for prompt in prompts]
    answers = answerer.answer(asks, leaves=leaves, progress=progress)
    for number, answer in enumerate(answers):
        if answer.error:
            raise EvidenceError(
                f"prompt {number} was not answered: {answer.error}",
                expected="an answer to every prompt",
                remedy="`tapeout inspect` shows scales and kernels of the engine; build it again",
            )
    return answers
