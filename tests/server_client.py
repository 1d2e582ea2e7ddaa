"""An engine's client in this process, for tests of the server: greedy answers of a fake engine, without a scheduler."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from engines.protocol import Entry
from runtime.messages import Delta, EngineInfo, EngineStats, GenerateRequest
from runtime.server.calls import Call, Caller, Hook
from runtime.server.errors import ApiError
from tests.fake_engine import HistoryEngine


class InProcessClient:
    """``pause``: seconds between two tokens. Each request has a block of its own."""

    def __init__(self, engine: HistoryEngine | None = None, *, pause: float = 0.0, end: int = -1) -> None:
        self.engine = engine or HistoryEngine(slots=8, max_tokens=256)
        slots = self.engine.capabilities.blocks
        self.free, self.pause, self.end = list(range(slots)), pause, end
        self.stats = EngineStats(blocks=slots)
        self.ready = self.healthy = True
        size = self.engine.capabilities
        self.info = EngineInfo(
            digest=self.engine.digest,
            name="fake",
            max_tokens=size.max_tokens,
            vocab_size=size.vocab_size,
            block_tokens=size.block_tokens,
            blocks=size.blocks,
            block_bytes=size.block_bytes,
            weight_bytes=1000,
            stop_tokens=frozenset({self.end} - {-1}),
        )

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta]:
        block = self.free.pop()
        self.count(running=1, blocks_held=1, prefix_queries=len(request.prompt), prompt_tokens=len(request.prompt))
        tokens, start = list(request.prompt), 0
        try:
            for number in range(request.max_new_tokens):
                began = time.monotonic()
                result = self.engine.step([Entry(tokens[start:], start, [block])])[0]
                assert result.tokens is not None
                fed, start, token = len(tokens) - start, len(tokens), int(result.tokens[0])
                tokens.append(token)
                self.count(steps=1, generated_tokens=1)
                now = time.monotonic()
                self.stats = replace(
                    self.stats, step_tokens=fed, step_requests=1, step_seconds=now - began, stepped_at=now
                )
                reason = "stop" if token == self.end else "length" if number + 1 == request.max_new_tokens else None
                yield Delta(request.id, (token,), finish_reason=reason, queue_seconds=0.0)
                if reason:
                    return
                await asyncio.sleep(self.pause)
        finally:
            self.free.append(block)
            self.count(running=-1, blocks_held=-1)

    def count(self, **more: int) -> None:
        self.stats = replace(self.stats, **{name: getattr(self.stats, name) + by for name, by in more.items()})

    async def swap(self, folder: Path, opener: Any = None) -> None: ...

    async def drain(self, timeout: float) -> None: ...

    async def close(self) -> None: ...


async def run_call(
    client: InProcessClient,
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
                    now = time.monotonic()
                    call.first_token = call.first_token or now
                    call.queue_seconds = delta.queue_seconds
                    for hook in hooks:
                        hook.tokens(call, choice, len(delta.tokens), now)
                    call.completion_tokens += len(delta.tokens)
                    if delta.finish_reason:
                        call.finish_reasons[choice] = delta.finish_reason
                    if call.completion_tokens == leave:
                        call.cancelled = True
                        return call
    except ApiError as error:
        call.error = error
    finally:
        call.end = time.monotonic()
        for hook in admitted:
            hook.ended(call)
    return call
