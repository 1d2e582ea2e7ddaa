"""Moving KV blocks between two engines on one machine: a hand-over of a prompt, and draining an engine.

    python -m benchmarks.moving artifacts/candidate --page docs/benchmarks/moving.md

Both engines are processes that listen, as `tapeout engine` starts them, with one thread each.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter
from typing import NamedTuple, get_args

from runtime.engine import worker
from runtime.engine.moving import sending
from runtime.gateway.engines.remote import RemoteEngine
from runtime.gateway.fleet.client import FleetClient
from runtime.gateway.fleet.discovery import FromFile
from runtime.wire.address import Address
from runtime.wire.messages import Delta, GenerateRequest, Pool
from runtime.wire.start import EngineSettings, Start

KEY = b"k" * 32
PROMPT, REPEATS, STREAMS, NEW = 2000, 9, 16, 400
POOLED_NEW = 40
BAR_SECONDS, BAR_GAP_SECONDS = 0.010, 0.100


class Way(NamedTuple):
    """How blocks go from one engine to the other. ``shared``: through memory that both map."""

    name: str
    address: str
    shared: bool


WAYS = (
    Way("shared memory", "unix", True),
    Way("Unix socket", "unix", False),
    Way("TCP, loopback", "tcp", False),
)


class HandOver(NamedTuple):
    """Medians. ``seconds``: until a request has its blocks and runs. ``computed``: of computing them instead."""

    way: str
    blocks: int
    megabytes: float
    seconds: float
    longest: float
    first_token: float
    computed: float
    same: bool


class Pooled(NamedTuple):
    """Of a prompt that one engine computes and another one goes on from. ``seconds``: from the first token until the
    request changes over, all blocks being there. ``gaps``: the longest between two tokens of each answer.
    """

    seconds: list[float]
    gaps: list[float]
    moved: int
    fetched: int
    same: bool


class Drained(NamedTuple):
    """``gaps``: of each stream the longest between two tokens, from when the engine was to drain. ``usual``: the
    longest of the same requests where nothing moved, from when all of them had begun.
    """

    streams: int
    moved: int
    same: int
    gaps: list[float]
    usual: float
    fetched: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--page", type=Path)
    parser.add_argument("--engine", help=argparse.SUPPRESS)  # of a process: the address to listen at
    parser.add_argument("--socket-only", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--pool", choices=get_args(Pool), default="mixed", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.engine:
        _engine(chosen.bundle, Address.parse(chosen.engine), chosen.pool, socket_only=chosen.socket_only)
        return
    page = asyncio.run(_measure(chosen.bundle.resolve()))
    print(page)
    if chosen.page:
        chosen.page.write_text(page, encoding="utf-8")


def _engine(bundle: Path, address: Address, pool: Pool, *, socket_only: bool) -> None:
    if socket_only:
        sending.map_shared = lambda _: None
    listener = address.listen(KEY)
    print(address if address.path else Address(*listener.getsockname()[:2]), flush=True)
    worker.listen(Start(str(bundle), EngineSettings(threads=1, pool=pool)), listener, KEY)


@asynccontextmanager
async def _engines(
    bundle: Path, folder: Path, way: Way, pools: Sequence[Pool] = ("mixed", "mixed")
) -> AsyncGenerator[list[str]]:
    processes, addresses = list[subprocess.Popen[str]](), list[str]()
    try:
        for number, pool in enumerate(pools):
            address = "tcp:127.0.0.1:0" if way.address == "tcp" else f"unix:{folder}/{number}"
            command = [sys.executable, "-m", "benchmarks.moving", str(bundle), "--engine", address, "--pool", pool]
            command += [] if way.shared else ["--socket-only"]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            processes.append(process)
            assert process.stdout is not None
            addresses.append(process.stdout.readline().strip())
        yield addresses
    finally:
        for process in processes:
            process.kill()
            process.communicate()


async def _measure(bundle: Path) -> str:
    found = [await _hand_over(bundle, way) for way in WAYS]
    return _page(bundle, found, await _pools(bundle), await _drain(bundle))


async def _hand_over(bundle: Path, way: Way) -> HandOver:
    seconds, firsts, computed, same, blocks, block_bytes = list[float](), list[float](), list[float](), True, 0, 0
    with tempfile.TemporaryDirectory() as scratch:
        async with _engines(bundle, Path(scratch), way) as addresses, AsyncExitStack() as stack:
            ends = [RemoteEngine(address, KEY, Path(scratch)) for address in addresses]
            for end in ends:
                stack.push_async_callback(end.close)
                await end.open(60)
            block_bytes = ends[1].info.block_bytes
            for number in range(REPEATS):
                prompt = _prompt(number, ends[0].info.vocab_size, PROMPT)
                before, first = await _answer(ends[0], GenerateRequest(f"{number}", prompt, 2))
                await asyncio.sleep(1.2)  # idle, as an engine that takes over is: its next blocks are made ready
                start = ends[1].stats.blocks_fetched
                after, fetched = await _answer(ends[1], GenerateRequest(f"{number}", prompt, 2), addresses[0])
                blocks = ends[1].stats.blocks_fetched - start
                same &= [delta.tokens for delta in before] == [delta.tokens for delta in after]
                if number:  # the first one connects, and knows no cost yet
                    seconds.append(after[0].queue_seconds or 0.0)
                    firsts.append(fetched)
                    computed.append(first)
    return HandOver(
        way.name,
        blocks,
        blocks * block_bytes / 1e6,
        median(seconds),
        max(seconds),
        median(firsts),
        median(computed),
        same,
    )


async def _answer(engine: RemoteEngine, request: GenerateRequest, source: str = "") -> tuple[list[Delta], float]:
    """The deltas, and seconds to the first token."""
    started, stream, found, first = perf_counter(), engine.add(request, 0.0, source), list[Delta](), 0.0
    while not found or found[-1].finish_reason is None:
        found += await stream.next()
        first = first or perf_counter() - started
    return found, first


async def _pools(bundle: Path) -> Pooled:
    """Prompts one after another, each once more on an engine alone."""
    pools: tuple[Pool, Pool] = ("prefill", "decode")
    seconds, gaps, same = list[float](), list[float](), True
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        async with _engines(bundle, folder, WAYS[0], pools) as addresses, _client(folder, addresses) as client:
            while sum(status.state.value == "ready" for status in client.statuses()) < len(pools):
                await asyncio.sleep(0.01)
            alone = RemoteEngine(addresses[0], KEY, folder / "alone")
            await alone.open(60)
            for number in range(REPEATS):
                await asyncio.sleep(1.2)  # both are idle
                prompt = _prompt(number, client.info.vocab_size, PROMPT)
                moves = client.counts["moves"]
                running = asyncio.ensure_future(_stream(client, GenerateRequest(f"p{number}", prompt, POOLED_NEW)))
                while client.counts["moves"] == moves and not running.done():
                    await asyncio.sleep(0.0005)
                changed = perf_counter()
                tokens, times = await running
                if number:  # the first one connects
                    seconds.append(changed - times[0])
                    gaps.append(_longest(times, times[0]))
                wanted, _ = await _answer(
                    alone, GenerateRequest(f"s{number}", prompt, POOLED_NEW, cache_salt=b"%d" % number)
                )
                same &= tokens == [token for delta in wanted for token in delta.tokens]
            stats, moved = client.statuses()[1].stats, client.counts["moves"]
            await alone.close()
    return Pooled(seconds, gaps, moved, stats.blocks_fetched, same)


async def _drain(bundle: Path) -> Drained:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        async with _engines(bundle, folder, WAYS[0]) as addresses, _client(folder, addresses[:1]) as client:
            prompts = [_prompt(number, client.info.vocab_size, 200) for number in range(STREAMS)]

            def streams(name: str) -> list[asyncio.Task[tuple[list[int], list[float]]]]:
                requests = [GenerateRequest(f"{name}{number}", prompt, NEW) for number, prompt in enumerate(prompts)]
                return [asyncio.create_task(_stream(client, request)) for request in requests]

            wanted, running = await asyncio.gather(*streams("e")), streams("r")
            while client.stats.running < STREAMS:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.3)
            drained = perf_counter()
            _list(folder, addresses[1:])
            found = await asyncio.gather(*running)
            fetched = sum(status.stats.blocks_fetched for status in client.statuses())
    return Drained(
        STREAMS,
        client.counts["moves"],
        sum(tokens == expected for (tokens, _), (expected, _) in zip(found, wanted, strict=True)),
        sorted(_longest(times, drained) for _, times in found),
        max(_longest(times, max(times[0] for _, times in wanted)) for _, times in wanted),
        fetched,
    )


@asynccontextmanager
async def _client(folder: Path, addresses: Sequence[str]) -> AsyncGenerator[FleetClient]:
    (folder / "key").write_bytes(KEY)
    _list(folder, addresses)
    client = FleetClient(FromFile(folder / "fleet.yaml"), folder / "cache")
    await client.open()
    try:
        yield client
    finally:
        await client.close()


def _prompt(seed: int, vocabulary: int, tokens: int) -> list[int]:
    return Random(seed).choices(range(100, vocabulary), k=tokens)


def _list(folder: Path, addresses: Sequence[str]) -> None:
    text = "engines:\n" + "".join(f"  - {address}\n" for address in addresses) + "key: key\n"
    (folder / "part").write_text(text)
    (folder / "part").replace(folder / "fleet.yaml")


async def _stream(client: FleetClient, request: GenerateRequest) -> tuple[list[int], list[float]]:
    """Tokens of an answer, and when they came."""
    tokens, times = list[int](), list[float]()
    async for delta in client.generate(request):
        times.append(perf_counter())
        tokens += delta.tokens
    return tokens, times


def _longest(times: Sequence[float], since: float) -> float:
    """The longest gap that ends after ``since``."""
    return max((after - before for before, after in pairwise(times) if after > since), default=0.0)


def _page(bundle: Path, found: Sequence[HandOver], pooled: Pooled, drained: Drained) -> str:
    pairs = [
        ("its blocks fetched while the next ones are computed", median(pooled.seconds)),
        ("of a prompt that was computed before", found[0].seconds),
    ]
    bars = [
        (
            f"hand-over of {PROMPT:,} tokens on one machine, {what}",
            f"at most {BAR_SECONDS * 1e3:.0f} ms",
            f"{seconds * 1e3:.1f} ms",
            seconds <= BAR_SECONDS,
        )
        for what, seconds in pairs
    ]
    bars += [
        (
            f"draining {drained.streams} streams: answers that are the same to the bit",
            f"{drained.streams}",
            f"{drained.same}, {drained.moved} of them moved",
            drained.same == drained.streams and drained.moved > 0,
        ),
        (
            "the same: longest gap between two tokens of a stream",
            f"at most {BAR_GAP_SECONDS * 1e3:.0f} ms",
            f"{drained.gaps[-1] * 1e3:.0f} ms",
            drained.gaps[-1] <= BAR_GAP_SECONDS,
        ),
    ]
    rows = [
        f"| {one.way} | {one.blocks} | {one.megabytes:.1f} | {one.seconds * 1e3:.1f} | {one.longest * 1e3:.1f} "
        f"| {one.first_token * 1e3:.1f} | {one.computed * 1e3:.0f} | {'yes' if one.same else 'no'} |"
        for one in found
    ]
    return f"""# Moving KV blocks between engines

This page is written by `python -m benchmarks.moving BUNDLE --page docs/benchmarks/moving.md`. Do not edit it.

Two engines of the bundle "{bundle.name}" with one thread each, on one machine
([docs/fleet.md](../fleet.md#blocks-that-move)).

## Bars

| what | bar | found | |
|---|---|---|---|
{chr(10).join(f"| {what} | {bar} | {value} | {'holds' if ok else '**missed**'} |" for what, bar, value, ok in bars)}

## Hand-over of a prompt

Of {PROMPT:,} tokens, medians of {REPEATS - 1}. *Hand-over*: from the request's arrival until it has its blocks
and runs.

| through | blocks | MB | hand-over ms | longest ms | first token ms | computed instead ms | same answer |
|---|--:|--:|--:|--:|--:|--:|---|
{chr(10).join(rows)}

From an engine for prompts to one for what follows ([docs/fleet.md](../fleet.md#pools)), blocks are fetched while the
next ones are computed: then a request changes over {median(pooled.seconds) * 1e3:.1f} ms after its first token, median
of {REPEATS - 1}, and {max(pooled.seconds) * 1e3:.1f} at most. The longest gap between two tokens of its answer is
{median(pooled.gaps) * 1e3:.1f} ms, {max(pooled.gaps) * 1e3:.1f} at most. {pooled.moved} of {REPEATS} requests changed
over, with {pooled.fetched} blocks; their answers {"are" if pooled.same else "ARE NOT"} those of one engine alone.

## Draining

{drained.streams} streams of {NEW} tokens on one engine, which is taken off the list; {drained.moved} went on on the
other one, with {drained.fetched} blocks. Longest gap of a stream from then on: median {median(drained.gaps) * 1e3:.0f}
ms, at most {drained.gaps[-1] * 1e3:.0f} ms. Where nothing moved it was at most {drained.usual * 1e3:.0f} ms, once all
had begun.
"""


if __name__ == "__main__":
    main()
