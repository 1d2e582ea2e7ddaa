"""Mirrors a share of the finished calls to a challenger, which scores the champion's answers. Users notice nothing.

The challenger is an engine in a process of its own. It gets only the processor time that others leave, and is stopped
while a call runs: threads share memory and caches. It is fed the champion's prompt and answer as one prompt, so that
one early divergence does not make every later token count as different. Where it fails on an answer, it disagrees
everywhere; where an answer had no room to wait, its conversation was missed. Nothing but counts is written
(``tapeout/observations.py``).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import orjson

from runtime.gateway.accounts.salt import kept_salt
from runtime.gateway.engines.client import EngineClient, EngineDownError
from runtime.gateway.engines.local import WORKER, ProcessClient
from runtime.gateway.http.requests import context_tokens
from runtime.gateway.protocol.bodies import Message
from runtime.gateway.protocol.calls import Call, Hook
from runtime.gateway.text.conversations import opening_of
from runtime.wire.limits import Limits
from runtime.wire.messages import Delta, GenerateRequest, SamplingSettings
from runtime.wire.start import EngineSettings
from tapeout.errors import RequestError
from tapeout.observations import Observation, ObservationLog, ShadowPlan

WAITING = 256  # answers that wait for the challenger; more are missed
ATTEMPTS = 2  # at an answer during which the challenger's process ends
QUIET_SECONDS = 0.05  # without a call, before the challenger goes on
STUCK_SECONDS = 300.0  # that a step of the challenger may take: other processes of the machine come first
RESTART_SECONDS = 0.1  # between two looks whether the challenger has been started again

log = logging.getLogger(__name__)


@dataclass
class MirroredAnswer:
    """One answer of a picked call. ``likeliest``: the champion's likeliest token at each place of ``tokens``."""

    prompt: Sequence[int] = ()
    tokens: list[int] = field(default_factory=list[int])
    likeliest: list[int] = field(default_factory=list[int])
    plain: bool = True  # each token is the likeliest
    asked: int | None = None  # log-probabilities that the user wants

    def request(self, request: GenerateRequest) -> GenerateRequest:
        """What the engine gets: where a token need not be the likeliest, log-probabilities say which one is."""
        self.prompt, self.asked = request.prompt, request.logprobs
        filters = replace(request.sampling, seed=None, top_k=0, top_p=1.0, min_p=0.0)
        self.plain = filters == SamplingSettings() and request.constraint is None and not request.min_new_tokens
        return request if self.plain else replace(request, logprobs=max(request.logprobs or 0, 1))

    def delta(self, delta: Delta) -> Delta:
        """The same without what the user has not asked for."""
        self.tokens += delta.tokens
        if self.plain:
            self.likeliest += delta.tokens
            return delta
        entries = delta.logprobs or ()
        self.likeliest += [entry.top[0][0] for entry in entries]
        if self.asked or delta.logprobs is None:
            return delta
        return delta._replace(logprobs=None if self.asked is None else tuple(e._replace(top=()) for e in entries))

    @property
    def whole(self) -> bool:
        return bool(self.tokens) and len(self.tokens) == len(self.likeliest)


class ShadowMirror(Hook):
    """A hook of all calls; :meth:`run` is the challenger's side. ``observed``: told of each observation.

    ``picked``, ``missed``: conversations since this server started, ``waiting``: answers now. ``ready``: the challenger
    takes answers.
    """

    def __init__(
        self,
        log: ObservationLog,
        plan: ShadowPlan,
        folder: Path,
        *,
        observed: Callable[[Observation], None] = lambda _: None,
    ) -> None:
        self._log, self._plan, self._observed = log, plan, observed
        self._salt = kept_salt(folder)
        self._running = 0
        self._quiet = asyncio.Event()  # no call has run for QUIET_SECONDS
        self._quiet.set()
        self._resuming: asyncio.TimerHandle | None = None
        self._challenger: ProcessClient | None = None
        self._answers: deque[tuple[str, MirroredAnswer]] = deque()
        self._arrived = asyncio.Event()
        self.picked = self.missed = 0
        self.ready = False

    @property
    def waiting(self) -> int:
        return len(self._answers)

    def admit(self, call: Call) -> None:
        self._running += 1
        if self._running == 1:
            self._make_way()
        if self.ready and call.digest == self._plan.champion and self._drawn(call.id):
            call.answer = MirroredAnswer()

    def ended(self, call: Call) -> None:
        self._running -= 1
        if not self._running:
            self._resuming = asyncio.get_running_loop().call_later(QUIET_SECONDS, self._go_on)
        answer = call.answer
        if not isinstance(answer, MirroredAnswer) or not answer.whole or call.error is not None or call.cancelled:
            return
        conversation = self._hash(_opening(call))[:16]
        try:
            if not self._log.pick(conversation):
                return
        except OSError as error:  # no call fails because of its copy
            self.ready = False
            log.error("no call is mirrored any more: the log cannot be written: %s", error.strerror)
            return
        self.picked += 1
        if len(self._answers) >= WAITING:
            self.missed += 1
            return
        self._answers.append((conversation, answer))
        self._arrived.set()

    async def run(self, bundle: str, settings: EngineSettings, *, worker: str = WORKER) -> None:
        """Open the challenger's bundle and score answers until cancelled. No error of the challenger's is raised."""
        settings = replace(settings, background=True)
        client = ProcessClient(bundle, settings, Limits(max_running=1), worker=worker, stuck_seconds=STUCK_SECONDS)
        try:
            await client.open()
            self._challenger, self.ready = client, True
            if self._running:
                client.pause()
            log.info("the challenger %s is open; %g %% of the calls are mirrored", bundle, 100 * self._plan.share)
            while True:
                conversation, answer = await self._next()
                self._record(conversation, answer, await agreeing(client, answer))
        except Exception as error:  # whatever the challenger does, the server goes on
            log.error("no call is mirrored any more: %s", error)
        finally:
            self._challenger, self.ready = None, False
            await client.close()

    def close(self) -> None:
        self._log.close()

    def _drawn(self, id: str) -> bool:
        """By the call's id, which clients do not choose, so not by its content or by the load."""
        return int(self._hash(id.encode())[:16], 16) < self._plan.share * 2**64

    def _hash(self, content: bytes) -> str:
        return hashlib.sha256(self._salt + content).hexdigest()

    async def _next(self) -> tuple[str, MirroredAnswer]:
        """The oldest answer that waits, once no call has run for a moment."""
        while not self._answers:
            self._arrived.clear()
            await self._arrived.wait()
        await self._quiet.wait()
        return self._answers.popleft()

    def _make_way(self) -> None:
        """A call has come."""
        self._quiet.clear()
        if self._resuming is not None:
            self._resuming.cancel()
        if self._challenger is not None:
            self._challenger.pause()

    def _go_on(self) -> None:
        self._quiet.set()
        if self._challenger is not None:
            self._challenger.resume()

    def _record(self, conversation: str, answer: MirroredAnswer, agree: int | None) -> None:
        observation = Observation(
            conversation=conversation,
            prompt_tokens=len(answer.prompt),
            tokens=len(answer.tokens),
            agree=agree or 0,
            failed=agree is None,
        )
        self._log.add(observation)
        self._observed(observation)


async def agreeing(client: EngineClient, answer: MirroredAnswer) -> int | None:
    """At so many tokens of the answer both engines find the same one likeliest; None if the challenger fails on it."""
    for _ in range(ATTEMPTS):
        while not client.ready:
            await asyncio.sleep(RESTART_SECONDS)
        try:
            return await _scored(client, answer)
        except EngineDownError:
            continue
        except RequestError as error:
            log.warning("the challenger refuses an answer: %s", error.found)
            return None
    return None


async def _scored(client: EngineClient, answer: MirroredAnswer) -> int | None:
    prompt, first = [*answer.prompt, *answer.tokens], len(answer.prompt)
    # The champion never fed its last token. Where there is no room for it, what it could not score disagrees.
    request = GenerateRequest(
        uuid.uuid4().hex, prompt[: context_tokens(client.info)], max_new_tokens=0, prompt_logprobs=1
    )
    agree = None
    async for delta in client.generate(request):
        if delta.prompt_logprobs is not None and delta.finish_reason != "error":
            scores = delta.prompt_logprobs[first:]
            pairs = zip(scores, answer.likeliest, strict=False)
            agree = sum(score is not None and score.top[0][0] == likeliest for score, likeliest in pairs)
    return agree


def _opening(call: Call) -> bytes:
    """What all turns of a conversation share: its messages up to the first of the user, or else the prompt."""
    messages = [entry for entry in call.conversation if isinstance(entry, Message)]
    return opening_of(messages) if messages else orjson.dumps(list(call.prompts[0]))
