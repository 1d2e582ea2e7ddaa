"""The core that serves, as evidence asks it (:class:`evals.answers.Answerer`): the same code, in this process."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING

from evals.answers import Answer, Ask, Leaves, Score
from runtime.engine.core import EngineCore
from runtime.engine.in_process import CoreAnswer, ModelledTime, answer_all
from runtime.engine.sampling import BatchSampler
from runtime.wire.limits import Limits
from runtime.wire.messages import Constraint, GenerateRequest, SamplingSettings, TokenLogprobs
from tapeout.errors import RequestError
from tapeout.progress import ProgressBar

if TYPE_CHECKING:
    from engines.bundle import EngineBundle
    from engines.protocol import Engine
    from runtime.constraints.compiler import ConstraintCompiler
    from tapeout.artifact import Artifact


def served_core(
    engine: Engine, bundle: Artifact[EngineBundle], limits: Limits, *, threads: int, blocks: int | None = None
) -> CoreAnswerer:
    """Over an engine with the tokenizer of ``bundle``, whose library chooses tokens and whose constraints hold."""
    from engines.load import at_level, find_target
    from runtime.constraints.compiler import ConstraintCompiler

    size = engine.capabilities.vocab_size
    text = (bundle.folder / "tokenizer.json").read_text(encoding="utf-8")
    compiler = ConstraintCompiler(text, size, bundle.record.stop_tokens)
    kernels = find_target(bundle.record.target).serving_kernels
    kernel = kernels.sampler(kernels.library(at_level(bundle)), size, threads)
    sampler = BatchSampler(size, compiler, kernel)
    return CoreAnswerer(engine, limits, blocks=blocks, sampler=sampler, constrains=_constrains(compiler))


def _constrains(compiler: ConstraintCompiler) -> bool:
    try:
        compiler.load()
    except RequestError:  # the server refuses constraints of this model
        return False
    return True


class CoreAnswerer:
    """``blocks``: of the pool, as many as the engine has unless given.

    ``sampler``: numpy's, unless given. ``constrains``: it takes constraints of this model.
    """

    def __init__(
        self,
        engine: Engine,
        limits: Limits,
        *,
        blocks: int | None = None,
        sampler: BatchSampler | None = None,
        constrains: bool = False,
    ) -> None:
        self._timed = ModelledTime(engine, blocks)
        self.core = EngineCore(self._timed, limits, sampler, clock=self._timed.clock)
        self.constrains = constrains
        self.max_tokens = engine.capabilities.max_tokens
        self._ids = count()

    @property
    def drafts(self) -> tuple[int, int]:
        stats = self.core.stats()
        return stats.drafted_tokens, stats.accepted_tokens

    @property
    def steps_ahead(self) -> int:
        return self._timed.steps_ahead

    def answer(self, asks: Sequence[Ask], *, leaves: Leaves | None = None, progress: str | None = None) -> list[Answer]:
        requests = [_request(f"{next(self._ids)}", ask) for ask in asks]
        patience = {request.id: ask.leaves_after for request, ask in zip(requests, asks, strict=True)}

        def left(request: GenerateRequest, tokens: Sequence[int]) -> bool:
            after = patience[request.id]
            return (after is not None and len(tokens) >= after) or (leaves is not None and leaves(tokens))

        with ProgressBar(title=progress or "", unit="answer", total=len(asks), hidden=not progress) as bar:
            found = answer_all(self.core, requests, leaves=left, ended=bar.update)
        return [_answer(one) for one in found]


def _request(id: str, ask: Ask) -> GenerateRequest:
    return GenerateRequest(
        id=id,
        prompt=ask.prompt,
        max_new_tokens=ask.max_new_tokens,
        sampling=SamplingSettings(
            temperature=ask.temperature,
            top_k=ask.top_k,
            top_p=ask.top_p,
            min_p=ask.min_p,
            presence_penalty=ask.presence_penalty,
            frequency_penalty=ask.frequency_penalty,
            repetition_penalty=ask.repetition_penalty,
            logit_bias=ask.logit_bias,
            seed=ask.seed,
        ),
        stop_tokens=ask.stop_tokens,
        min_new_tokens=ask.min_new_tokens,
        logprobs=ask.logprobs,
        prompt_logprobs=ask.prompt_logprobs,
        constraint=Constraint("choice", json.dumps(ask.choices)) if ask.choices else None,
        priority=ask.priority,
        tenant=ask.tenant,
        cache_salt=ask.cache_salt,
    )


def _answer(found: CoreAnswer) -> Answer:
    return Answer(
        tokens=tuple(found.tokens),
        ending=found.reason or "error",
        error=found.error,
        scores=tuple(map(_score, found.logprobs)),
        prompt_scores=tuple(None if one is None else _score(one) for one in found.prompt_logprobs or ()),
        cached=found.cached_tokens,
        accepted=found.accepted,
        preempted=found.preempted,
    )


def _score(found: TokenLogprobs) -> Score:
    return Score(found.token, found.logprob, found.top)
