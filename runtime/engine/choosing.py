"""What a step's results bring to its requests: new tokens, scores of prompts, and errors.

P  positions of an entry whose results are wanted      V  vocabulary size

It knows requests and the sampler; not the scheduler, the engine or reports.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engines.protocol import FloatArray, Result
from runtime.engine.active import ActiveRequest
from runtime.engine.sampling import BatchSampler, SampledToken, logprobs_of
from runtime.engine.scheduling.work import Work
from runtime.engine.speculation import accept
from tapeout.errors import RequestError, one_line


def choose(sampler: BatchSampler, step: Sequence[tuple[Work, ActiveRequest, Result]]) -> None:
    """Each request takes what its work has brought."""
    drawing: dict[str, ActiveRequest] = {}  # choose from logits
    drafts: dict[str, Sequence[int]] = {}
    logits: dict[str, FloatArray] = {}
    for work, active, result in step:
        first = len(work.tokens) - work.drafts
        if result.error is not None:
            active.error = str(result.error)
        elif result.tokens is not None:
            chosen = result.tokens.tolist()
            active.take(accept(chosen, work.tokens[first:]) if work.drafts else chosen)
            if result.ranked:
                active.logprobs = logprobs_of(active.tokens, result.ranked)
        elif result.logits is not None:
            _score(sampler, active, result.logits)
            if work.samples and active.error is None:
                drawing[work.id] = active
                drafts[work.id], logits[work.id] = work.tokens[first:], result.logits[-work.drafts - 1 :]
    if not drawing:
        return
    for id, choices in _draw(sampler, drafts, logits).items():
        active = drawing[id]
        active.error = choices[-1].error
        active.take([choice.token for choice in choices])
        active.logprobs = tuple(choice.logprobs for choice in choices if choice.logprobs is not None)


def _draw(
    sampler: BatchSampler, drafts: Mapping[str, Sequence[int]], logits: Mapping[str, FloatArray]
) -> Mapping[str, Sequence[SampledToken]]:
    """The choices of each request. If this fails, all choose alone, and those that fail alone end."""
    try:
        return sampler.choose_drafted(drafts, logits)
    except Exception as failure:
        if len(drafts) == 1:
            failed = SampledToken(-1, error=f"sampling failed: {one_line(failure)}")
            return {id: [failed] for id in drafts}
        return {id: _draw(sampler, {id: guesses}, logits)[id] for id, guesses in drafts.items()}


def _score(sampler: BatchSampler, active: ActiveRequest, logits: FloatArray) -> None:
    """Log-probabilities of prompt tokens that have none yet, from the logits ``[P, V]`` of the tokens before."""
    top, prompt, first = active.request.prompt_logprobs, active.request.prompt, len(active.scores)
    if top is not None and (count := min(len(logits), len(prompt) - first)):
        try:
            active.scores += sampler.score(prompt[first : first + count], logits[:count], top)
        except RequestError as error:
            active.error = error.found
