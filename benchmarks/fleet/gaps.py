"""The gap in a stream whose engine is killed (SIGKILL) or stands still (SIGSTOP), with real engines.

Two engines with one thread each, and greedy streams over both. One of the engines gets the signal in the midst of
the answers, whose streams go on at the other one, which computes prompt and answer so far again.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import count, pairwise
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from time import monotonic

from benchmarks.fleet.processes import EngineProcess, connection, engine_processes, fleet_client
from runtime.gateway.engines.remote import RemoteEngine
from runtime.gateway.fleet.client import FleetClient
from runtime.wire.messages import GenerateRequest

STREAMS, PROMPT, NEW = 8, 256, 160  # tokens: at most, see lengths()
BAR_KILL_SECONDS, BAR_STOP_SECONDS = 0.25, 1.5
SPECIAL = 10  # token ids from 0 on that no prompt has
_ids = count()


@dataclass
class Gaps:
    """Seconds, one of each stream that was interrupted. ``gaps``: its longest one from the signal on. ``alone``: the
    first token of its prompt and answer so far, on the idle engine that was left; ``together``: of all those of one
    signal at once, when the last of them has it.

    ``same``: answers, of ``answers``, that are those of the engine that was left, asked again.
    """

    repeats: int = 0
    gaps: list[float] = field(default_factory=list[float])
    alone: list[float] = field(default_factory=list[float])
    together: list[float] = field(default_factory=list[float])
    answers: int = 0
    same: int = 0

    @property
    def beyond(self) -> list[float]:
        """Of each gap what is more than computing that prompt again alone."""
        return [gap - alone for gap, alone in zip(self.gaps, self.alone, strict=True)]


@dataclass
class _Stream:
    """``engine``: where it was begun."""

    request: GenerateRequest
    engine: str = ""
    tokens: list[int] = field(default_factory=list[int])
    times: list[float] = field(default_factory=list[float])


async def gaps(bundle: Path, repeats: int) -> dict[str, Gaps]:
    """By signal."""
    random, found = Random(0), {"SIGKILL": Gaps(), "SIGSTOP": Gaps()}
    with TemporaryDirectory() as scratch, engine_processes(bundle, Path(scratch), 2) as engines:
        for name, one in found.items():
            for number in count():
                if one.repeats == repeats:
                    break
                (folder := Path(scratch) / f"{name}-{number}").mkdir()
                await _interrupted(engines, signal.Signals[name], one, random, folder)
    return found


def lengths(most: int) -> tuple[int, int]:
    """Tokens of a prompt and of an answer, of engines with so many positions."""
    return min(PROMPT, most // 4), min(NEW, most // 2)


async def _interrupted(
    engines: Sequence[EngineProcess], number: signal.Signals, found: Gaps, random: Random, folder: Path
) -> None:
    for engine in engines:
        async with connection(engine.address, folder):
            pass  # it is open
    async with fleet_client(folder, [engine.address for engine in engines]) as client:
        prompt, new = lengths(client.info.max_tokens)
        streams, running = list[_Stream](), list[asyncio.Task[None]]()
        for _ in range(STREAMS):
            tokens = random.choices(range(SPECIAL, client.info.vocab_size), k=prompt)
            streams.append(_Stream(GenerateRequest(f"g{next(_ids)}", tokens, new)))
            running.append(await _begun(client, streams[-1]))
        least = random.randrange(new // 8, new // 2)
        while min(len(stream.tokens) for stream in streams) < least and not any(task.done() for task in running):
            await asyncio.sleep(0.0005)
        places = [stream.engine for stream in streams]
        victim = max(engines, key=lambda engine: places.count(engine.address))
        (left,) = [engine for engine in engines if engine is not victim]
        lost = [(stream, len(stream.tokens)) for stream in streams if stream.engine == victim.address]
        lost = [(stream, tokens) for stream, tokens in lost if tokens < new]
        if not lost:  # the last tokens of all of them came while this process had no processor
            await asyncio.gather(*running)
            return
        at = monotonic()
        victim.process.send_signal(number)
        await asyncio.gather(*running)
    found.repeats += 1
    found.gaps += [_longest(stream.times, at) for stream, _ in lost]
    async with connection(left.address, folder) as alone:
        prompts = [[*stream.request.prompt, *stream.tokens[:tokens]] for stream, tokens in lost]
        found.alone += [await _first_token(alone, prompt) for prompt in prompts]
        together = await asyncio.gather(*[_first_token(alone, prompt) for prompt in prompts])
        found.together.append(max(together))
        again = await asyncio.gather(*[_answer(alone, stream.request.prompt, new) for stream in streams])
    found.answers += len(streams)
    found.same += sum(stream.tokens == tokens for stream, tokens in zip(streams, again, strict=True))
    if number == signal.SIGSTOP:
        victim.process.send_signal(signal.SIGCONT)
    else:
        victim.again()


async def _begun(client: FleetClient, stream: _Stream) -> asyncio.Task[None]:
    """Once it has its first token: the engine that has one more request then is its own."""
    before = _own(client)
    task = asyncio.create_task(_read(client, stream))
    while not (stream.tokens or task.done()):
        await asyncio.sleep(0.0005)
    after = _own(client)
    stream.engine = max(after, key=lambda address: after[address] - before[address])
    return task


def _own(client: FleetClient) -> dict[str, int]:
    return {status.address: status.own for status in client.statuses()}


async def _read(client: FleetClient, stream: _Stream) -> None:
    async with aclosing(client.generate(stream.request)) as deltas:
        async for delta in deltas:
            stream.tokens += delta.tokens
            stream.times += [monotonic()] * len(delta.tokens)


async def _first_token(engine: RemoteEngine, prompt: Sequence[int]) -> float:
    began = monotonic()
    await _answer(engine, prompt, 1)
    return monotonic() - began


async def _answer(engine: RemoteEngine, prompt: Sequence[int], new: int) -> list[int]:
    """Computed anew: under a salt of its own nothing of it is cached."""
    id = next(_ids)
    stream, tokens = engine.add(GenerateRequest(f"a{id}", prompt, new, cache_salt=b"%d" % id)), list[int]()
    while True:
        for delta in await stream.next():
            tokens += delta.tokens
            if delta.finish_reason is not None:
                stream.leave()
                return tokens


def _longest(times: Sequence[float], since: float) -> float:
    """The longest gap that ends after ``since``."""
    return max((after - before for before, after in pairwise(times) if after > since), default=0.0)
