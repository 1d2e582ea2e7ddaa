"""An engine client without a process: the real core over an engine of this process, one step at a time in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from time import monotonic
from typing import Any
from uuid import uuid4

from engines.protocol import Entry, FloatArray, Result
from runtime.engine.core import EngineCore
from runtime.gateway.engines.client import EngineDownError
from runtime.gateway.engines.unread import DeltaStream, Unread
from runtime.gateway.protocol.calls import Call, Caller, Hook
from runtime.gateway.protocol.errors import ApiError
from runtime.wire.limits import Limits
from runtime.wire.messages import Delta, EngineInfo, GenerateRequest, StepReport
from tapeout.errors import TapeoutError
from tests.fake_engine import HistoryEngine


class LocalClient:
    """See :class:`runtime.gateway.engines.client.EngineClient`. ``down``: as if the engine's process had ended."""

    def __init__(
        self,
        engine: HistoryEngine | None = None,
        *,
        stop_tokens: frozenset[int] = frozenset(),
        limits: Limits | None = None,
    ) -> None:
        engine = engine or HistoryEngine(slots=8, max_tokens=256)
        has = engine.capabilities
        self.engine, self.core = engine, EngineCore(engine, limits or Limits())
        self.info = EngineInfo(
            digest=engine.digest,
            name="history",
            max_tokens=has.max_tokens,
            vocab_size=has.vocab_size,
            block_tokens=has.block_tokens,
            blocks=has.blocks,
            block_bytes=has.block_bytes,
            weight_bytes=1000,
            stop_tokens=stop_tokens,
        )
        self.stats, self.unread = self.core.stats(), Unread()
        self.healthy = True
        self.silent_seconds: float | None = None
        self.draining = self.down = False
        self._commands: list[GenerateRequest | str] = []  # a request to add, or the id of one to cancel
        self._streams: dict[str, DeltaStream] = {}
        self.sessions: list[str] = []  # of its requests
        self._loop: asyncio.Task[None] | None = None

    @property
    def ready(self) -> bool:
        return not (self.draining or self.down)

    @property
    def bundles(self) -> Mapping[str, EngineInfo]:
        return {self.info.digest: self.info}

    def info_for(self, opening: bytes) -> EngineInfo:
        return self.info

    async def generate(
        self, request: GenerateRequest, age: float = 0.0, session: str = "", digest: str = ""
    ) -> AsyncGenerator[Delta]:
        if not self.ready:
            raise EngineDownError("the engine takes no requests")
        self.sessions.append(session)
        stream = self._streams[request.id] = DeltaStream(request.id, self.unread, self._cancel)
        self._commands.append(request)
        if self._loop is None or self._loop.done():
            self._loop = asyncio.create_task(self._run())
        try:
            while True:
                for delta in await stream.next():
                    yield delta
                    if delta.finish_reason is not None:
                        return
        finally:
            stream.leave()

    def _cancel(self, stream: DeltaStream) -> None:
        if self._streams.pop(stream.id, None) is not None:
            self._commands.append(stream.id)

    def level_of(self, id: str) -> str:
        return ""

    async def _run(self) -> None:
        while self._commands or self.core.busy:
            commands, self._commands = self._commands, []
            report = await asyncio.to_thread(self._step, commands)
            self.stats = report.stats
            for delta in report.deltas:
                self._tell(delta.id, delta, ends=delta.finish_reason is not None)
            for id, error in report.refusals:
                self._tell(id, error, ends=True)
            if self.down:
                for id in list(self._streams):
                    self._tell(id, EngineDownError("the engine's process has ended"), ends=True)
                    self._commands.append(id)

    def _step(self, commands: Sequence[GenerateRequest | str]) -> StepReport:
        for command in commands:
            if isinstance(command, str):
                self.core.cancel(command)
            else:
                self.core.add(command, monotonic())
        return self.core.step(monotonic())

    def _tell(self, id: str, message: Delta | TapeoutError, *, ends: bool) -> None:
        stream = self._streams.pop(id, None) if ends else self._streams.get(id)
        if stream is not None and isinstance(message, TapeoutError):
            stream.fail(message)
        elif stream is not None:
            stream.push(message)

    async def swap(self, bundle: str, settings: object = None) -> None:
        raise NotImplementedError

    async def files(self) -> Path:
        raise NotImplementedError

    async def drain(self, timeout: float) -> None:
        self.draining = True
        async with asyncio.timeout(timeout):
            while self._streams or (self._loop is not None and not self._loop.done()):
                await asyncio.sleep(0.01)

    async def close(self) -> None: ...


async def run_call(
    client: LocalClient,
    hooks: Sequence[Hook],
    *,
    prompt: int = 3,
    new: int = 5,
    n: int = 1,
    leave: int = 0,
    **more: Any,
) -> Call:
    """One call as the server makes it, without text. ``leave``: the client goes away after so many tokens."""
    values = {
        "id": uuid4().hex,
        "request_id": "r",
        "endpoint": "/v1/completions",
        "model": "m",
        "caller": Caller(),
    } | more
    call = Call(
        digest=client.info.digest, stream=True, prompts=[list(range(prompt))], n=n, max_new_tokens=new, **values
    )
    admitted: list[Hook] = []
    try:
        for hook in hooks:
            hook.admit(call)
            admitted.append(hook)
        for choice in range(n):
            async with aclosing(client.generate(GenerateRequest(call.id, call.prompts[0], new))) as deltas:
                async for delta in deltas:
                    now = monotonic()
                    if call.first_token is None:
                        call.first_token, call.queue_seconds = now, delta.queue_seconds
                    for hook in hooks:
                        hook.tokens(call, choice, len(delta.tokens), now)
                    call.completion_tokens += len(delta.tokens)
                    if delta.finish_reason:
                        call.finish_reasons[choice] = delta.finish_reason
                    if call.completion_tokens == leave:
                        call.cancelled = True
                        return call
    except ApiError as error:
        call.error, call.rejected = error, len(admitted) < len(hooks)
    finally:
        call.end = monotonic()
        for hook in admitted:
            hook.ended(call)
    return call


class SlowEngine(HistoryEngine):
    """Calls ``before`` ahead of each step."""

    def __init__(self, vocab_size: int, *, slots: int = 3, max_tokens: int = 64, block_tokens: int = 0) -> None:
        super().__init__(vocab_size, slots=slots, max_tokens=max_tokens, block_tokens=block_tokens)
        self.before = lambda: None

    def step(self, batch: Sequence[Entry]) -> list[Result]:
        self.before()
        return super().step(batch)


class ScriptEngine(SlowEngine):
    """After the last ``mark`` (token ids) in a sequence it says ``script``, then ``end``; each nearly certain."""

    def __init__(self, mark: Sequence[int], end: int, vocab_size: int, *, slots: int = 3, max_tokens: int = 64) -> None:
        super().__init__(vocab_size, slots=slots, max_tokens=max_tokens)
        self.mark, self.end, self.script = list(mark), end, list[int]()

    def logits_after(self, tokens: Sequence[int]) -> FloatArray:
        size, tokens = len(self.mark), list(tokens)
        place = next((at for at in range(len(tokens), 0, -1) if tokens[at - size : at] == self.mark), len(tokens))
        said = len(tokens) - place
        logits = super().logits_after(tokens).copy()
        logits[self.script[said] if said < len(self.script) else self.end] = 50.0
        return logits
