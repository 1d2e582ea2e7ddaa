"""An engine client without a process: the real scheduler over an engine of this process, one step at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

import numpy as np

from engines.protocol import Entry, FloatArray
from runtime.blocks import BlockPool
from runtime.client import EngineDownError
from runtime.messages import Delta, EngineInfo, EngineStats, GenerateRequest, TokenLogprobs
from runtime.scheduler import Limits, Outcome, Request, Scheduler
from tapeout.errors import RequestError
from tests.fake_engine import HistoryEngine


class LocalClient:
    """See :class:`runtime.client.EngineClient`. ``cancelled``: ids of the requests that were cancelled."""

    def __init__(
        self, engine: HistoryEngine, *, stop_tokens: frozenset[int] = frozenset(), limits: Limits | None = None
    ) -> None:
        has = engine.capabilities
        self.engine: HistoryEngine = engine
        self.limits = limits or Limits(has.block_tokens, has.max_tokens, max_running=has.max_batch)
        self.scheduler = Scheduler(BlockPool(has.blocks), self.limits)
        self.info = EngineInfo(
            digest=engine.digest,
            name="history",
            max_tokens=has.max_tokens,
            vocab_size=has.vocab_size,
            block_tokens=has.block_tokens,
            blocks=has.blocks,
            block_bytes=has.block_bytes,
            weight_bytes=0,
            stop_tokens=stop_tokens,
        )
        self.stats = EngineStats()
        self.ready = self.healthy = True
        self.cancelled: list[str] = []
        self.requests: dict[str, GenerateRequest] = {}
        self.down = False  # as if the engine's process had ended
        self._answers: dict[str, asyncio.Queue[Delta | EngineDownError]] = {}
        self._tokens: dict[str, list[int]] = {}
        self._loop: asyncio.Task[None] | None = None

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta]:
        for token in (*request.sampling.logit_bias, *request.stop_tokens, *request.prompt):
            if token >= self.info.vocab_size:
                raise RequestError(f"token {token}", expected=f"ids below {self.info.vocab_size}")
        scores = None
        if request.prompt_logprobs is not None:
            scores = self._prompt_scores(request.prompt, request.prompt_logprobs)
        if request.max_new_tokens == 0:
            yield Delta(request.id, prompt_logprobs=scores, finish_reason="length")
            return
        now = time.monotonic()

        def deadline(seconds: float | None) -> float | None:
            return None if seconds is None else now + seconds

        self.scheduler.add(
            Request(
                request.id,
                request.prompt,
                request.max_new_tokens,
                request.priority,
                request.tenant,
                request.salt,
                deadline(request.queue_timeout),
                deadline(request.first_token_timeout),
                deadline(request.timeout),
            ),
            now,
        )
        answers = self._answers[request.id] = asyncio.Queue()
        self.requests[request.id], self._tokens[request.id] = request, []
        if self._loop is None or self._loop.done():
            self._loop = asyncio.create_task(self._run())
        finished = False
        try:
            while not finished:
                delta = await answers.get()
                if isinstance(delta, EngineDownError):
                    raise delta
                finished = delta.finish_reason is not None
                yield delta._replace(prompt_logprobs=scores)
                scores = None
        finally:
            if not finished and self.scheduler.cancel(request.id) is not None:
                self.cancelled.append(request.id)
            del self._answers[request.id]

    async def _run(self) -> None:
        while self.scheduler.running or self.scheduler.waiting:
            await asyncio.sleep(0)
            if self.down:
                for id, answers in self._answers.items():
                    self.scheduler.cancel(id)
                    answers.put_nowait(EngineDownError("the engine's process has ended"))
                return
            now = time.monotonic()
            for finished in self.scheduler.expire(now):
                self._send(Delta(finished.id, finish_reason=finished.reason))
            work = self.scheduler.plan(now)
            batch = [Entry(w.tokens, w.start, w.blocks, "logits") for w in work]
            results = await asyncio.to_thread(self.engine.step, batch)  # as in another process
            outcomes: dict[str, Outcome] = {}
            logprobs: dict[str, tuple[TokenLogprobs, ...] | None] = {}
            for entry, result in zip(work, results, strict=True):
                if not entry.samples:
                    outcomes[entry.id] = Outcome()
                    continue
                assert result.logits is not None
                token = self._choose(entry.id, result.logits[-1])
                request, tokens = self.requests[entry.id], self._tokens[entry.id]
                tokens.append(token)
                stop = token in request.stop_tokens and len(tokens) >= request.min_new_tokens
                outcomes[entry.id] = Outcome(token, stop)
                wanted = request.logprobs
                logprobs[entry.id] = None if wanted is None else (scored(result.logits[-1], token, wanted),)
            cached = {w.id: self.scheduler.cached_tokens(w.id) for w in work}
            ended = {finished.id: finished.reason for finished in self.scheduler.commit(outcomes, time.monotonic())}
            for id, outcome in outcomes.items():
                if outcome.token is not None:
                    self._send(Delta(id, (outcome.token,), logprobs[id], None, cached[id], ended.get(id)))

    def _send(self, delta: Delta) -> None:
        if delta.id in self._answers:
            self._answers[delta.id].put_nowait(delta)

    def _choose(self, id: str, logits: FloatArray) -> int:
        request, position = self.requests[id], len(self._tokens[id])
        scores = logits.astype(np.float64)
        for token, bias in request.sampling.logit_bias.items():
            scores[token] += bias
        if position < request.min_new_tokens:
            scores[list(request.stop_tokens)] = -np.inf
        if request.sampling.temperature:
            seed = request.sampling.seed
            noise = np.random.default_rng(None if seed is None else [seed, position]).gumbel(size=scores.shape)
            scores = scores / request.sampling.temperature + noise
        return int(np.argmax(scores))

    def _prompt_scores(self, prompt: Sequence[int], count: int) -> tuple[TokenLogprobs | None, ...]:
        following = range(1, len(prompt))
        return None, *(scored(self.engine.logits_after(prompt[:end]), prompt[end], count) for end in following)

    async def swap(self, folder: Path) -> None:
        raise NotImplementedError

    async def drain(self, timeout: float) -> None:
        self.ready = False
        async with asyncio.timeout(timeout):
            while self._answers:
                await asyncio.sleep(0.01)

    async def close(self) -> None: ...


def scored(logits: FloatArray, token: int, count: int) -> TokenLogprobs:
    shifted = logits.astype(np.float64) - logits.max()
    logprobs = shifted - np.log(np.exp(shifted).sum())
    best = np.argsort(-logprobs, kind="stable")[:count].tolist()
    return TokenLogprobs(token, float(logprobs[token]), tuple((other, float(logprobs[other])) for other in best))


class ScriptEngine(HistoryEngine):
    """After the last ``mark`` (token ids) in a sequence it says ``script``, then ``end``; each nearly certain."""

    def __init__(self, mark: Sequence[int], end: int, vocab_size: int, *, slots: int = 3, max_tokens: int = 64) -> None:
        super().__init__(vocab_size, slots=slots, max_tokens=max_tokens)
        self.mark, self.end, self.script = list(mark), end, list[int]()

    def logits_after(self, tokens: Sequence[int]) -> FloatArray:
        size, tokens = len(self.mark), list(tokens)
        place = next(at for at in range(len(tokens), 0, -1) if tokens[at - size : at] == self.mark)
        said = len(tokens) - place
        logits = super().logits_after(tokens).copy()
        logits[self.script[said] if said < len(self.script) else self.end] = 50.0
        return logits
