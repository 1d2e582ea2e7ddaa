"""lm-eval's model interface over the engine protocol: shared contexts are computed once.

Boundary rules (trailing spaces go to the continuation, context and continuation are encoded together) are lm-eval's
own, inherited from ``TemplateLM``; truncation follows its ``HFLM``.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice, takewhile
from typing import Any, NamedTuple

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tokenizers import Tokenizer

from engines.protocol import Engine, FloatArray
from engines.sequences import Sequences, SlotEntry
from evals.answers import Answerer, greedy
from evals.text import log_likelihoods
from tapeout.errors import EvidenceError
from tapeout.progress import ProgressBar

DEFAULT_NEW_TOKENS = 256  # lm-eval's own default for generate_until

SHARED_TOKENS = 4  # to copy fewer costs more than to compute them
# ((context, continuation) or None, context tokens, continuation tokens), as TemplateLM hands them over.
TokenRequest = tuple[tuple[str, str] | None, list[int], list[int]]


class HarnessText(NamedTuple):
    """The tokens that are fed to score a continuation: all but its last one, behind ``before`` tokens of context.

    ``shared``: so many are those of the first text of its prefix group; of the first itself, all.
    """

    tokens: tuple[int, ...]
    before: int
    continuation: list[int]
    shared: int = 0


def _prefix_groups(texts: Iterable[HarnessText], slots: int) -> Iterator[list[HarnessText]]:
    """Texts that follow one another and begin with the same tokens, such as the choices of one question."""
    prefix_group: list[HarnessText] = []
    for text in texts:
        same = takewhile(
            lambda pair: pair[0] == pair[1],
            zip(prefix_group[0].tokens if prefix_group else (), text.tokens, strict=False),
        )
        shared = sum(1 for _ in same)
        joined = [*prefix_group, text._replace(shared=shared)]
        if shared >= SHARED_TOKENS and _slots(joined) <= slots:
            prefix_group = joined
            continue
        if prefix_group:
            yield prefix_group
        prefix_group = [text._replace(shared=len(text.tokens))]
    if prefix_group:
        yield prefix_group


def _slots(prefix_group: Sequence[HarnessText]) -> int:
    """One for the first text, and one for each that has tokens of its own."""
    return 1 + sum(text.shared < len(text.tokens) for text in prefix_group)


def _begin(prefix_group: Sequence[HarnessText]) -> int:
    """The first position whose logits a prefix group needs."""
    return min(text.before for text in prefix_group) - 1


def bos_token_of(tokenizer: Tokenizer) -> int | None:
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


def encode(tokenizer: Tokenizer, text: str, bos_token: int | None) -> list[int]:
    """Token ids of a text, with ``bos_token`` once at its start, if given; nothing else is added."""
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return ids if bos_token is None or ids[:1] == [bos_token] else [bos_token, *ids]


class EngineLM(TemplateLM):
    """Scores through slot 0 and up of an :class:`engines.sequences.Sequences`.

    ``answerer``: makes the core that serves, which generates. Without one, tasks that generate are refused.

    ``bos_token``: the token put before every text, or None; pinned here so that both engines of a comparison, and
    the next run, read the same tokens. ``stop_tokens``: end a generation. The first of them stands before a text that
    has no context where there is no ``bos_token``.
    ``calls``, ``tokens`` and ``seconds`` count what scoring asked of the engine.
    """

    def __init__(
        self,
        engine: Sequences,
        tokenizer: Tokenizer,
        *,
        stop_tokens: Sequence[int],
        bos_token: int | None,
        name: str = "engine",
        answerer: Callable[[Engine], Answerer] | None = None,
    ) -> None:
        super().__init__()
        self.engine, self.tokenizer, self.answerer = engine, tokenizer, answerer
        self.bos_token, self.stop_tokens, self.name = bos_token, tuple(stop_tokens), name
        self.task = ""  # named in the progress bar
        self.calls = self.tokens = 0
        self.seconds = 0.0

    @property
    def eot_token_id(self) -> int:
        return self.stop_tokens[0]

    @property
    def prefix_token_id(self) -> int:
        return self.eot_token_id if self.bos_token is None else self.bos_token

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        return encode(self.tokenizer, string, None if add_special_tokens is False else self.bos_token)

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        # lm-eval's bar over the tokenization would write to logs that ours leaves alone.
        return super().loglikelihood(requests, disable_tqdm=True)

    def _loglikelihood_tokens(self, requests: Sequence[TokenRequest], **kwargs: Any) -> list[tuple[float, bool]]:
        """(log-likelihood in nats, is greedy) of each continuation, in the order of the requests."""
        results: list[tuple[float, bool]] = []
        with ProgressBar(title=f"{self.name} {self.task}", unit="choice", total=len(requests)) as bar:
            for group in self._scored_together(_prefix_groups(map(self._text, requests), self.engine.slots)):
                results += self._score(group)
                bar.update(len(results) - bar.n)
        for (strings, _, _), result in zip(requests, results, strict=True):
            if strings is not None:
                self.cache_hook.add_partial("loglikelihood", strings, result)
        return results

    def _text(self, request: TokenRequest) -> HarnessText:
        """What is fed for a request. The context is cut from the left so that it fits the engine."""
        strings, context, continuation = request
        # The last token is predicted, never fed; the context keeps at least the token that predicts the first.
        room = self.engine.max_tokens + 1 - len(continuation)
        if not context or not continuation or room < 1:
            raise EvidenceError(
                f"{strings}: {len(context)} context and {len(continuation)} continuation tokens",
                expected=f"at least one of each, and at most {self.engine.max_tokens} in the continuation",
                remedy="leave this item's task out of `evaluate.tasks`, or export with a larger `export.max_positions`",
            )
        kept = context[-room:]
        return HarnessText((*kept, *continuation[:-1]), len(kept), continuation)

    def _scored_together(self, prefix_groups: Iterable[list[HarnessText]]) -> Iterator[list[list[HarnessText]]]:
        """Prefix groups that are scored in one step: as many as there are slots for their texts, at least one."""
        group: list[list[HarnessText]] = []
        room = self.engine.slots
        for prefix_group in prefix_groups:
            if group and _slots(prefix_group) > room:
                yield group
                group, room = [], self.engine.slots
            group.append(prefix_group)
            room -= _slots(prefix_group)
        if group:
            yield group

    def _score(self, group: Sequence[list[HarnessText]]) -> list[tuple[float, bool]]:
        """Every continuation of some prefix groups. What texts share with the first of theirs is computed once."""
        firsts, others, slot = list[SlotEntry](), list[SlotEntry](), 0
        for prefix_group in group:
            source, tokens = slot, prefix_group[0].tokens
            resumed = min((text.shared for text in prefix_group if text.shared < len(text.tokens)), default=None)
            entry = SlotEntry(source, tokens, 0, range(_begin(prefix_group), len(tokens)), resumed=resumed)
            firsts.append(entry)
            for text in prefix_group:
                if fed := text.tokens[text.shared :]:
                    slot += 1
                    own = range(max(text.before - 1 - text.shared, 0), len(fed))
                    others.append(SlotEntry(slot, fed, text.shared, own, source))
            slot += 1
        rows_of_firsts = self._feed(firsts)
        further = iter(self._feed(others) if others else ())
        results: list[tuple[float, bool]] = []
        for prefix_group, rows in zip(group, rows_of_firsts, strict=True):
            begin = _begin(prefix_group)
            for text in prefix_group:
                common = rows[text.before - 1 - begin : max(text.shared - begin, 0)]
                whole = text.shared == len(text.tokens)
                logits = common if whole else np.concatenate([common, next(further)])
                results.append(_read(logits, text.continuation))
        return results

    def _feed(self, batch: Sequence[SlotEntry]) -> list[FloatArray]:
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
        if self.answerer is None:
            raise EvidenceError(
                f"task {self.task} generates",
                expected="a task that scores its choices",
                remedy="leave that task out of `evaluate.tasks`",
            )
        answerer = self.answerer(
            self.engine.engine
        )  # anew: scoring writes to the blocks that another holds prefixes in
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(number)
        answers: dict[int, str] = {}
        for settings, numbers in groups.items():
            until, limit = _generation_settings(json.loads(settings))
            room = self.engine.max_tokens - limit
            prompts = [self.tok_encode(requests[number].args[0])[-room:] for number in numbers]
            responses = greedy(
                answerer,
                prompts,
                max_new_tokens=limit,
                stop_tokens=self.stop_tokens,
                leaves=lambda tokens, until=until: any(stop in self.tokenizer.decode(tokens) for stop in until),
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
