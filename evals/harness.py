"""lm-eval's model interface over the engine protocol: shared contexts are computed once.

Boundary rules (trailing spaces go to the continuation, context and continuation are encoded together) are lm-eval's
own, inherited from ``TemplateLM``; truncation follows its ``HFLM``.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tokenizers import Tokenizer
from tqdm import tqdm

from engines.protocol import FloatArray
from engines.sequences import Fed, Sequences
from evals.generation import greedy
from evals.text import log_likelihoods
from tapeout.errors import EvidenceError

DEFAULT_NEW_TOKENS = 256  # lm-eval's own default for generate_until

Context = tuple[int, ...]
# ((context, continuation) or None, context tokens, continuation tokens), as TemplateLM hands them over.
TokenRequest = tuple[tuple[str, str] | None, list[int], list[int]]


def beginning_of_text(tokenizer: Tokenizer) -> int | None:
    """The token this tokenizer's own template puts before a text, if it puts one.

    :class:`EvidenceError` for a template that adds anything else: such a tokenizer was not made for a causal model.
    """
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    full = tokenizer.encode("a", add_special_tokens=True).ids
    if full == plain:
        return None
    if full[1:] == plain:
        return full[0]
    raise EvidenceError(
        f"the tokenizer turns tokens {plain} into {full}",
        expected="nothing added, or one beginning-of-text token",
        remedy="remove the post-processor's other tokens from tokenizer.json",
    )


def encode(tokenizer: Tokenizer, text: str, beginning: int | None) -> list[int]:
    """Token ids of a text, with ``beginning`` once at its start, if given; nothing else is added."""
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return ids if beginning is None or ids[:1] == [beginning] else [beginning, *ids]


class EngineLM(TemplateLM):
    """Scores and generates through slot 0 and up of an :class:`engines.sequences.Sequences`.

    ``beginning``: the token put before every text, or None; pinned here so that both engines of a comparison, and
    the next run, read the same tokens. ``end_of_text``: ends a generation, and stands before a text that has no
    context where there is no ``beginning``.
    ``calls``, ``tokens`` and ``seconds`` count what scoring asked of the engine.
    """

    def __init__(
        self, engine: Sequences, tokenizer: Tokenizer, *, end_of_text: int, beginning: int | None, name: str = "engine"
    ) -> None:
        super().__init__()
        self.engine, self.tokenizer = engine, tokenizer
        self.beginning, self.end_of_text, self.name = beginning, end_of_text, name
        self.task = ""  # named in the progress bar
        self.calls = self.tokens = 0
        self.seconds = 0.0

    @property
    def eot_token_id(self) -> int:
        return self.end_of_text

    @property
    def prefix_token_id(self) -> int:
        return self.end_of_text if self.beginning is None else self.beginning

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        return encode(self.tokenizer, string, None if add_special_tokens is False else self.beginning)

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        # lm-eval's bar over the tokenization would write to logs that ours leaves alone.
        return super().loglikelihood(requests, disable_tqdm=True)

    def _loglikelihood_tokens(self, requests: Sequence[TokenRequest], **kwargs: Any) -> list[tuple[float, bool]]:
        """(log-likelihood in nats, is greedy) of each continuation, in the order of the requests."""
        shared: dict[Context, list[int]] = {}
        for number, request in enumerate(requests):
            shared.setdefault(self._fit_context(request), []).append(number)
        results: dict[int, tuple[float, bool]] = {}
        with tqdm(total=len(requests), desc=f"{self.name} {self.task}", unit="choice", disable=None) as bar:
            for group in self._groups(shared):
                scores = self._score([(context, [requests[n][2] for n in numbers]) for context, numbers in group])
                numbers = [number for _, own in group for number in own]
                results.update(zip(numbers, scores, strict=True))
                bar.update(len(numbers))
        for number, (strings, _, _) in enumerate(requests):
            if strings is not None:
                self.cache_hook.add_partial("loglikelihood", strings, results[number])
        return [results[number] for number in range(len(requests))]

    def _fit_context(self, request: TokenRequest) -> Context:
        """The context, cut from the left so that all but the last continuation token fit the engine."""
        strings, context, continuation = request
        # The last token is predicted, never fed; the context keeps at least the token that predicts the first.
        room = self.engine.max_tokens + 1 - len(continuation)
        if not context or not continuation or room < 1:
            raise EvidenceError(
                f"{strings}: {len(context)} context and {len(continuation)} continuation tokens",
                expected=f"at least one of each, and at most {self.engine.max_tokens} in the continuation",
                remedy="leave this item's task out of `evaluate.tasks`, or export with a larger `export.max_positions`",
            )
        return tuple(context[-room:])

    def _groups(self, shared: Mapping[Context, list[int]]) -> Iterator[list[tuple[Context, list[int]]]]:
        """Contexts that are scored together: as many as there are slots for their continuations, at least one."""
        group: list[tuple[Context, list[int]]] = []
        room = self.engine.slots
        for context, numbers in shared.items():
            if group and len(numbers) > room:
                yield group
                group, room = [], self.engine.slots
            group.append((context, numbers))
            room -= len(numbers)
        if group:
            yield group

    def _score(self, group: Sequence[tuple[Context, list[list[int]]]]) -> list[tuple[float, bool]]:
        """Every continuation of the contexts. A context is computed once, together with its first continuation."""
        slots, slot = self.engine.slots, 0
        firsts, others = list[Fed](), list[Fed]()
        for context, continuations in group:
            before, (first, *rest) = len(context), continuations
            tokens = (*context, *first[:-1])
            firsts.append(Fed(slot, tokens, 0, range(before - 1, len(tokens))))
            fed = [continuation[:-1] for continuation in rest if len(continuation) > 1]
            others += [
                Fed((slot + number) % slots, tokens, before, range(len(tokens)), slot)
                for number, tokens in enumerate(fed, start=1)
            ]
            slot += len(continuations)
        rows_of_firsts = self._feed(firsts)
        further = iter([rows for begin in range(0, len(others), slots) for rows in self._feed(others[begin:][:slots])])
        results: list[tuple[float, bool]] = []
        for (_, (first, *rest)), rows in zip(group, rows_of_firsts, strict=True):
            results.append(_read(rows, first))
            for continuation in rest:
                whole = rows[:1] if len(continuation) == 1 else np.concatenate([rows[:1], next(further)])
                results.append(_read(whole, continuation))
        return results

    def _feed(self, batch: Sequence[Fed]) -> list[FloatArray]:
        began = time.perf_counter()
        logits = self.engine.feed(batch)
        self.seconds += time.perf_counter() - began
        self.calls += 1
        self.tokens += sum(len(fed.tokens) for fed in batch)
        return logits

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts, each token predicted once, from the longest context that fits."""
        windows: list[TokenRequest] = []
        counts: list[int] = []
        for request in requests:
            cut = get_rolling_token_windows(
                token_list=encode(self.tokenizer, request.args[0], None),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.engine.max_tokens,
                context_len=1,
            )
            own: list[TokenRequest] = [(None, *make_disjoint_window(window)) for window in cut]
            windows += own
            counts.append(len(own))
        scores = iter(self._loglikelihood_tokens(windows))
        totals = [sum(score for score, _ in islice(scores, count)) for count in counts]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Greedy text until one of the request's ``until`` strings, which is cut off, or its token limit."""
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(number)
        answers: dict[int, str] = {}
        for settings, numbers in groups.items():
            until, limit = _generation_settings(json.loads(settings))
            room = self.engine.max_tokens - limit
            prompts = [self.tok_encode(requests[number].args[0])[-room:] for number in numbers]
            responses = greedy(
                self.engine,
                prompts,
                max_new_tokens=limit,
                stop_tokens=[self.end_of_text],
                finished=lambda tokens, until=until: any(stop in self.tokenizer.decode(tokens) for stop in until),
                progress=f"{self.name} {self.task}",
            )
            for number, response in zip(numbers, responses, strict=True):
                text = self.tokenizer.decode(response.tokens)
                for stop in until:
                    text = text.split(stop)[0]
                answers[number] = text
                self.cache_hook.add_partial("generate_until", requests[number].args, text)
        return [answers[number] for number in range(len(requests))]


def _read(logits: FloatArray, continuation: list[int]) -> tuple[float, bool]:
    """Score a continuation of C tokens from the logits ``[C, V]`` that predict it."""
    return float(log_likelihoods(logits, continuation).sum()), logits.argmax(axis=1).tolist() == continuation


def _generation_settings(settings: dict[str, Any]) -> tuple[list[str], int]:
    if settings.get("do_sample") or settings.get("temperature", 0) > 0:
        raise EvidenceError(
            f"a task asks for sampling: {settings}",
            expected="greedy generation, which can be paired",
            remedy="leave that task out of `evaluate.tasks`",
        )
    until = settings.get("until", [])
    return [until] if isinstance(until, str) else list(until), int(settings.get("max_gen_toks", DEFAULT_NEW_TOKENS))
