"""Which token each running request takes from its logits: one :class:`BatchSampler` for an engine.

P  rows of logits      V  vocabulary size

A request's tokens depend on its settings, its seed and its logits alone, never on its batch neighbours: the random
number of a position is computed from the seed and the position. The number of a position does not depend on how many
steps led there either, so a response is the same with and without speculation.

Presence and frequency penalties count tokens of the response, as OpenAI's do; the repetition penalty counts those of
the prompt too, as in transformers and vLLM. The logit bias is added first, then come the penalties.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from engines.kernels.sampling import Adjustments, Drawn, Sampler, SamplingRow
from engines.protocol import Draw, Entry, Filters, FloatArray, Ranked
from runtime.constraints.compiler import ConstraintCompiler, Matcher
from runtime.engine.draw import draw, filters_of, random_bits
from runtime.wire.messages import GenerateRequest, SamplingSettings, TokenLogprobs
from tapeout.errors import RequestError, one_line

MOST_LOGPROBS = 128


class SampledToken(NamedTuple):
    """``error``: why this request alone has failed; its ``token`` is then -1."""

    token: int
    logprobs: TokenLogprobs | None = None
    error: str | None = None


class BatchSampler:
    """Requests are added when they first run and removed when they end; a preempted one stays.

    Not for several threads at once.
    """

    def __init__(
        self, vocab_size: int, constraints: ConstraintCompiler | None = None, kernel: Sampler | None = None
    ) -> None:
        """``constraints``: compiles those of the requests; without one, requests with a constraint are refused.

        ``kernel``: of the target (:class:`engines.kernels.serving.ServingKernels`); numpy chooses the same without one.
        """
        self._vocab_size, self._constraints, self._kernel = vocab_size, constraints, kernel
        self._states: dict[str, _State] = {}

    def add(self, request: GenerateRequest) -> None:
        """:class:`RequestError` for settings that this model cannot follow; the request is then not added.

        A constraint is compiled in a thread from here on, while the engine computes the prompt. The first
        :meth:`choose` waits for it; a constraint that does not compile fails the request there.
        """
        if request.id in self._states:
            raise RequestError(f"request {request.id} is there already", expected="an id of its own")
        check(request, self._vocab_size)
        matcher = None
        if request.constraint is not None:
            if self._constraints is None or not request.stop_tokens:
                raise RequestError(
                    "a request with a constraint",
                    expected="a model with a tokenizer, and a stop token that ends the response",
                )
            matcher = self._constraints.start(request.constraint)
        self._states[request.id] = _State.of(request, self._vocab_size, matcher)

    def remove(self, id: str) -> None:
        """Forget a request; nothing happens if it is not there."""
        self._states.pop(id, None)

    def needs(self, id: str) -> Literal["token", "logits"]:
        """What the request wants of the engine at its next token: the likeliest token, or logits to choose from.

        A token that the engine chose need not be reported here.
        """
        state = self._states[id]
        plain = (
            state.filters.scale == 0
            and state.request.logprobs is None
            and state.request.constraint is None
            and (state.changes is None or state.changes.done(state.position))
        )
        return "token" if plain else "logits"

    def handed_over(self, entry: Entry, id: str, position: int) -> Entry:
        """An entry whose tokens an engine that draws can choose wants these of it; another one stays as it is.

        ``position``: of the first of them in the response. They need not be reported here.
        """
        state, changes = self._states[id], self._states[id].changes
        state.position = position
        if state.compiling is not None or not (changes is None or changes.done(position)):
            return entry
        draw = None
        if state.filters.scale:
            count = 1 if entry.positions is None else len(entry.positions)
            draw = Draw(state.filters, [random_bits(state.seed, position + at) for at in range(count)])
        return entry._replace(wanted="token", draw=draw, ranked=state.request.logprobs)

    def choose(self, ids: Sequence[str], logits: Sequence[FloatArray] | FloatArray) -> list[SampledToken]:
        """The next token of each request, which counts as said from now on.

        ``ids``: different requests. ``logits``: float32 ``[P, V]``, or P rows ``[V]`` that lie in different arrays;
        they are not changed.
        """
        assert len(ids) == len(logits) == len(set(ids)), "one row of logits for each request"
        states = [self._states[id] for id in ids]
        rows = [state.row(row) for state, row in zip(states, logits, strict=True)]
        drawn = iter(self._draw([row for row in rows if isinstance(row, SamplingRow)]))
        return [
            state.take(row.logits, next(drawn)) if isinstance(row, SamplingRow) else SampledToken(-1, error=row)
            for state, row in zip(states, rows, strict=True)
        ]

    def choose_drafted(
        self, drafts: Mapping[str, Sequence[int]], logits: Mapping[str, FloatArray]
    ) -> dict[str, list[SampledToken]]:
        """The next tokens of requests with D drafts each, of which D may differ: one token at least, 1 + D at most.

        ``logits[id]``: float32 ``[1 + D, V]``, after the last token and after each draft. The choices end with the
        first that differs from its draft, fails, or is a stop token; all of them count as said. So what raises behind a
        draft fails those that are still drawing, and raises here only where nothing was chosen yet.
        """
        choices: dict[str, list[SampledToken]] = {id: [] for id in drafts}
        going, at = list(drafts), 0
        while going:
            try:
                found = self.choose(going, [logits[id][at] for id in going])
            except Exception as failure:
                if not at:
                    raise
                found = [SampledToken(-1, error=f"sampling failed: {one_line(failure)}")] * len(going)
            for id, choice in zip(going, found, strict=True):
                choices[id].append(choice)
            going = [
                id
                for id in going
                if at < len(drafts[id])
                and choices[id][at].token == drafts[id][at]
                and drafts[id][at] not in self._states[id].request.stop_tokens
            ]
            at += 1
        return choices

    def score(
        self, tokens: Sequence[int], logits: Sequence[FloatArray] | FloatArray, count: int
    ) -> list[TokenLogprobs]:
        """Log-probabilities of given tokens, such as a prompt's: ``logits[i]`` are those that ``tokens[i]`` is of.

        :class:`RequestError` if logits are not finite.
        """
        greedy = filters_of(SamplingSettings())
        drawn = self._draw([SamplingRow(row, greedy, top=count) for row in logits])
        for one in drawn:
            if isinstance(one.token, str):
                raise RequestError(one.token, expected="finite logits")
        return [_logprobs(token, row, one) for token, row, one in zip(tokens, logits, drawn, strict=True)]

    def _draw(self, rows: Sequence[SamplingRow]) -> list[Drawn]:
        assert all(row.logits.shape == (self._vocab_size,) and row.logits.dtype == np.float32 for row in rows)
        if self._kernel is None or not rows:
            return [draw(row) for row in rows]
        return self._kernel.draw(rows)


def check(request: GenerateRequest, vocab_size: int) -> None:
    """:class:`RequestError` if a request names tokens that the model does not have, or too many of them."""
    settings = request.sampling
    named = {
        "the prompt": request.prompt,
        "answered": request.answered,
        "stop_tokens": request.stop_tokens,
        "logit_bias": settings.logit_bias,
    }
    for name, tokens in named.items():
        _check_tokens(name, tokens, vocab_size)
    for name, value in (("logprobs", request.logprobs), ("prompt_logprobs", request.prompt_logprobs)):
        if value is not None and not 0 <= value <= MOST_LOGPROBS:
            raise RequestError(f"{name} is {value}", expected=f"between 0 and {MOST_LOGPROBS}")
    if not 0 <= request.min_new_tokens <= request.max_new_tokens:
        raise RequestError(
            f"min_new_tokens is {request.min_new_tokens}", expected=f"between 0 and {request.max_new_tokens} new tokens"
        )
    if request.answered and (len(request.answered) >= request.max_new_tokens or request.prompt_logprobs is not None):
        raise RequestError(
            f"{len(request.answered)} tokens are answered of {request.max_new_tokens}, and prompt_logprobs is "
            f"{request.prompt_logprobs}",
            expected="a response that goes on, whose prompt is not scored again",
        )


def _logprobs(token: int, logits: FloatArray, drawn: Drawn) -> TokenLogprobs:
    likeliest = ((other, float(logits[other]) - drawn.normalizer) for other in drawn.likeliest)
    return TokenLogprobs(token, float(logits[token]) - drawn.normalizer, tuple(likeliest))


def logprobs_of(tokens: Sequence[int], ranked: Sequence[Ranked]) -> tuple[TokenLogprobs, ...]:
    """Of tokens that an engine has drawn. There may be fewer of them than it gave."""
    return tuple(
        TokenLogprobs(
            token, one.logit - one.normalizer, tuple((other, logit - one.normalizer) for other, logit in one.likeliest)
        )
        for token, one in zip(tokens, ranked, strict=False)
    )


@dataclass
class _State:
    request: GenerateRequest
    filters: Filters
    seed: int
    changes: _Changes | None
    compiling: Future[Matcher] | None
    position: int = 0  # tokens of the response so far
    unmatched: list[int] = field(default_factory=list[int])  # of them, those that the matcher has not seen

    @classmethod
    def of(cls, request: GenerateRequest, vocab_size: int, compiling: Future[Matcher] | None) -> _State:
        settings = request.sampling
        seed = secrets.randbits(64) if settings.seed is None else settings.seed
        changes = _Changes(request, vocab_size) if _Changes.needed(request) else None
        state = cls(request, filters_of(settings), seed, changes, compiling, unmatched=list(request.answered))
        for token in request.answered:
            state.count(token)
        return state

    def matcher(self) -> Matcher:
        """After the response so far. It waits for the constraint; :class:`RequestError` if that does not compile."""
        assert self.compiling is not None
        matcher = self.compiling.result()
        for token in self.unmatched:
            if token not in self.request.stop_tokens:
                matcher.advance(token)
        self.unmatched.clear()
        return matcher

    def count(self, token: int) -> None:
        """A token of the response."""
        self.position += 1
        if self.changes is not None:
            self.changes.count(token)

    def row(self, logits: FloatArray) -> SamplingRow | str:
        """What to draw from; or why the request fails."""
        mask, complete = None, False
        if self.compiling is not None:
            try:
                matcher = self.matcher()
            except RequestError as error:
                return error.found
            mask = matcher.mask(self.request.stop_tokens)
            if matcher.error is not None:
                return matcher.error
            complete = matcher.complete
        adjustments = self.changes.at(self.position, complete) if self.changes else None
        bits = random_bits(self.seed, self.position) if self.filters.scale else 0
        return SamplingRow(logits, self.filters, bits, adjustments, mask, self.request.logprobs)

    def take(self, logits: FloatArray, drawn: Drawn) -> SampledToken:
        token = drawn.token
        if isinstance(token, str):
            return SampledToken(-1, error=token)
        self.count(token)
        if self.compiling is not None:
            self.unmatched.append(token)
        return SampledToken(token, None if self.request.logprobs is None else _logprobs(token, logits, drawn))


class _Changes:
    """Which logits of a request change, and by how much: bias, penalties, and stop tokens that would come too early."""

    def __init__(self, request: GenerateRequest, vocab_size: int) -> None:
        self._settings = request.sampling
        self._stops = sorted(request.stop_tokens) if request.min_new_tokens else []
        self._min_new_tokens = request.min_new_tokens
        self._counts: Counter[int] = Counter()
        self._penalizes = self._has_penalties(request.sampling)
        repeated = set(request.prompt) if request.sampling.repetition_penalty != 1 else set[int]()
        first = dict.fromkeys([*self._stops, *request.sampling.logit_bias, *repeated])
        self._adjustments = Adjustments(
            len(first) + (min(request.max_new_tokens, vocab_size) if self._penalizes else 0)
        )
        self._places = {token: self._adjustments.add(token) for token in first}
        for token, bias in request.sampling.logit_bias.items():
            self._adjustments.bias[self._places[token]] = bias
        for token in repeated:
            self._adjustments.factor[self._places[token]] = request.sampling.repetition_penalty
        for token in self._stops:
            self._adjustments.bias[self._places[token]] = -np.inf

    @classmethod
    def needed(cls, request: GenerateRequest) -> bool:
        early = bool(request.min_new_tokens and request.stop_tokens)
        return early or bool(request.sampling.logit_bias) or cls._has_penalties(request.sampling)

    @staticmethod
    def _has_penalties(settings: SamplingSettings) -> bool:
        return bool(settings.presence_penalty or settings.frequency_penalty or settings.repetition_penalty != 1)

    def done(self, position: int) -> bool:
        """Nothing changes from this position on."""
        return not self._penalizes and not self._settings.logit_bias and position >= self._min_new_tokens

    def at(self, position: int, complete: bool = False) -> Adjustments:
        """``complete``: only a stop token can follow, however early."""
        if self._stops and (complete or position >= self._min_new_tokens):
            for token in self._stops:
                self._adjustments.bias[self._places[token]] = self._settings.logit_bias.get(token, 0.0)
            self._stops = []
        return self._adjustments

    def count(self, token: int) -> None:
        """A token of the response."""
        if not self._penalizes:
            return
        self._counts[token] += 1
        if token not in self._places:
            self._places[token] = self._adjustments.add(token)
        place, settings = self._places[token], self._settings
        self._adjustments.factor[place] = settings.repetition_penalty
        self._adjustments.shift[place] = -settings.presence_penalty - settings.frequency_penalty * self._counts[token]


def _check_tokens(name: str, tokens: Iterable[int], vocab_size: int) -> None:
    outside = next((token for token in tokens if not 0 <= token < vocab_size), None)
    if outside is not None:
        raise RequestError(f"token {outside} in {name}", expected=f"ids from 0 to {vocab_size - 1}")
