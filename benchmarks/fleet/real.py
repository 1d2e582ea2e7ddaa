"""Real engines and a gateway beside the simulation of the same traffic: how far the simulation is from them.

python -m benchmarks.fleet.real artifacts/candidate --json real.json
python -m benchmarks.fleet.run --traces FOLDER --real real.json --page docs/benchmarks/fleet.md

Engines are processes of ``tapeout engine`` with one thread each, and the gateway's client of a fleet runs in this
process. First the lengths of steps are measured, then conversations are answered as they come, and the same ones are
simulated. Engines on one machine share its memory, so steps are measured while the others idle and while they work,
and the simulation takes a mean of both, weighed by how busy engines are in it. Takes minutes; nothing here asserts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from array import array
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from itertools import count, pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any

from benchmarks.fleet.processes import engine_processes, fleet_client
from runtime.gateway.fleet.client import FleetClient
from runtime.gateway.fleet.replica import Patience
from runtime.simulation.fleet import WARM, FleetShape, percentile, simulate
from runtime.simulation.step_lengths import StepLengths, step_lengths
from runtime.simulation.traffic import Conversation, Traffic, multi_turn
from runtime.wire.limits import Limits
from runtime.wire.messages import GenerateRequest

BAR = 0.15  # most that a figure of the simulation may differ
STREAMS = (1, 2, 4, 8)  # that decode at once while steps are measured
# As shares of the tokens that a sequence may have. Of prompts while steps are measured, and of the cached tokens before
# them: attention over those takes its part of a step, as in the conversations.
PROMPTS, CONTEXT = (1 / 256, 1 / 64, 1 / 32, 1 / 16, 1 / 8), 1 / 4
SYSTEM, MESSAGE, ANSWER = 1 / 8, 1 / 25, 1 / 20  # of the conversations
ROUNDS = 5
STREAM_TOKENS = 48
# A slow machine may take a second for a step: an engine is not to be suspected for that.
PATIENCE = Patience(suspect=10.0)
SPECIAL = 10  # token ids from 0 on that no prompt has


@dataclass
class Measured:
    """Of real replicas. Times in seconds. ``hits`` and ``prompt_tokens`` are tokens, of the requests that count."""

    ttft: list[float] = field(default_factory=list[float])
    gaps: array[float] = field(default_factory=lambda: array("d"))
    hits: int = 0
    prompt_tokens: int = 0
    tokens: list[float] = field(default_factory=list[float])  # when each came

    @property
    def tokens_per_second(self) -> float:
        """While the middle three fifths of all tokens were made."""
        times = sorted(self.tokens)
        first, last = (int(share * len(times)) for share in (0.2, 0.8))
        return (last - first) / (times[last] - times[first])

    def as_json(self) -> dict[str, float]:
        ttft, gaps = sorted(self.ttft), sorted(self.gaps)
        return {
            "requests": len(ttft),
            "ttft_p50": 1000 * percentile(ttft, 0.5),
            "ttft_p99": 1000 * percentile(ttft, 0.99),
            "itl_p50": 1000 * percentile(gaps, 0.5),
            "itl_p99": 1000 * percentile(gaps, 0.99),
            "hits": self.hits / max(1, self.prompt_tokens),
            "tokens_per_second": self.tokens_per_second,
        }


_ids = count()


async def _times(client: FleetClient, prompt: Sequence[int], tokens: int) -> list[float]:
    """When the request began, and when each of its tokens came."""
    times = [monotonic()]
    request = GenerateRequest(f"m{next(_ids)}", prompt, tokens)
    async with aclosing(client.generate(request)) as deltas:
        async for delta in deltas:
            times += [monotonic()] * len(delta.tokens)
    return times


def _fresh(tokens: int, vocabulary: int) -> list[int]:
    """A prompt that shares nothing with any other."""
    start = 7919 * next(_ids)
    return [token_id(-start - position, vocabulary) for position in range(tokens)]


def token_id(number: int, vocabulary: int) -> int:
    """Of a number in a traffic: equal numbers give equal ids."""
    return SPECIAL + (number * 2654435761 % (1 << 32)) % (vocabulary - SPECIAL)


async def measured_lengths(clients: Sequence[FleetClient]) -> list[StepLengths]:
    """Of each client's engine, while all clients' engines do the same.

    They wait for each other before each part: else steps of one stream are measured beside prompts of another engine.
    """
    together = asyncio.Barrier(len(clients))

    async def one(client: FleetClient) -> StepLengths:
        most, vocabulary = client.info.max_tokens, client.info.vocab_size
        decodes = dict[int, float]()
        contexts = [_fresh(int(most * CONTEXT), vocabulary) for _ in range(max(STREAMS))]
        for context in contexts:
            await _times(client, context, 1)
        for streams in STREAMS:
            await together.wait()
            asked = [[*context, *_fresh(8, vocabulary)] for context in contexts[:streams]]
            found = await asyncio.gather(*(_times(client, prompt, STREAM_TOKENS) for prompt in asked))
            # Of the steps that all streams are in: not while they come or go.
            gaps = [after - before for times in found for before, after in pairwise(times[9:-8])]
            decodes[streams] = median(gaps)
        await together.wait()
        prompts = {1: decodes[1]}  # also a step with one token
        for length in (int(most * share) for share in PROMPTS):
            found = [await _times(client, [*context, *_fresh(length, vocabulary)], 1) for context in contexts[:ROUNDS]]
            prompts[length] = median(times[1] - times[0] for times in found)
        return step_lengths(decodes, prompts)

    return await asyncio.gather(*map(one, clients))


def between(alone: StepLengths, together: StepLengths, share: float) -> StepLengths:
    """Lengths of steps where other engines work for this share of the time.

    >>> between(StepLengths(((1, 0.002),), ((8, 0.001),)), StepLengths(((1, 0.004),), ((8, 0.003),)), 0.5)
    StepLengths(decodes=((1, 0.003),), prompts=((8, 0.002),))
    """

    def mixed(
        one: tuple[tuple[int, float], ...], other: tuple[tuple[int, float], ...]
    ) -> tuple[tuple[int, float], ...]:
        pairs = zip(one, other, strict=True)
        return tuple((count, mine + share * (theirs - mine)) for (count, mine), (_, theirs) in pairs)

    return StepLengths(mixed(alone.decodes, together.decodes), mixed(alone.prompts, together.prompts))


async def replayed(client: FleetClient, traffic: Traffic) -> Measured:
    """Conversations begin when they begin in the traffic; a next turn's prompt has the answers that really came."""
    measured, started, vocabulary = Measured(), monotonic(), client.info.vocab_size
    warm = WARM * max(conversation.start for conversation in traffic.conversations)

    async def talk(conversation: Conversation) -> None:
        await asyncio.sleep(max(0.0, started + conversation.start - monotonic()))
        answers = dict[int, list[int]]()
        for place, turn in enumerate(conversation.turns):
            if place:
                await asyncio.sleep(turn.think_seconds)
            prompt = list[int]()
            for span in turn.prompt:
                prompt += answers.get(span.start) or [token_id(number, vocabulary) for number in span]
            counts, before, answer = monotonic() - started >= warm, monotonic(), list[int]()
            request = GenerateRequest(f"r{next(_ids)}", prompt, len(turn.answer))
            async with aclosing(client.generate(request, session=conversation.name)) as deltas:
                async for delta in deltas:
                    now = monotonic()
                    if counts and delta.tokens:
                        if answer:
                            measured.gaps.append(now - before)
                        else:
                            measured.ttft.append(now - before)
                            measured.hits += delta.cached_tokens
                            measured.prompt_tokens += len(prompt)
                    before = now
                    measured.tokens += [now] * len(delta.tokens)
                    answer += delta.tokens
            answers[turn.answer.start] = answer

    await asyncio.gather(*map(talk, traffic.conversations))
    return measured


async def compared(addresses: Sequence[str], folder: Path, load: float, seconds: float, seed: int) -> dict[str, Any]:
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(fleet_client(folder, addresses, patience=PATIENCE))
        singles = list[FleetClient]()
        for number, address in enumerate(addresses):
            (own := folder / f"own{number}").mkdir()
            singles.append(await stack.enter_async_context(fleet_client(own, [address], patience=PATIENCE)))
        info = client.info
        (alone,) = await measured_lengths(singles[:1])
        together = (await measured_lengths(singles))[0]
        shape = FleetShape(len(addresses), info.blocks * info.block_tokens, Limits(max_draft_tokens=0), info.max_tokens)
        # In a thread, so that reports are read meanwhile.
        traffic = await asyncio.to_thread(traffic_at, load, seconds, together, shape, seed)
        real = await replayed(client, traffic)
    lengths = between(alone, together, simulate(traffic, between(alone, together, load), shape, seed=seed).busy)
    simulated = simulate(traffic, lengths, shape, seed=seed)
    return {
        "engines": len(addresses),
        "load": load,
        "requests": traffic.turns,
        "weights_mb": round(info.weight_bytes / 1e6),
        "lengths": {"alone": alone.as_json(), "together": together.as_json(), "simulated": lengths.as_json()},
        "real": real.as_json(),
        "simulated": simulated.as_json(),
    }


def traffic_at(load: float, seconds: float, lengths: StepLengths, shape: FleetShape, seed: int) -> Traffic:
    """Conversations that keep the engines busy for this share of the time, by simulation."""
    most = shape.max_tokens

    def at(rate: float) -> Traffic:
        return multi_turn(
            seed,
            seconds=seconds,
            rate=rate,
            system_tokens=int(most * SYSTEM),
            message_tokens=most * MESSAGE,
            answer_tokens=most * ANSWER,
            most_tokens=most,
        )

    low, high = 0.0, 1.0  # conversations a second
    while simulate(at(high), lengths, shape, seed=seed).busy < load:
        low, high = high, 2 * high
    for _ in range(4):
        rate = (low + high) / 2
        low, high = (rate, high) if simulate(at(rate), lengths, shape, seed=seed).busy < load else (low, rate)
    return at(high)


FIGURES = {  # of both; title and unit
    "ttft_p50": ("TTFT P50", "ms"),
    "ttft_p99": ("TTFT P99", "ms"),
    "hits": ("hits", "%"),
    "tokens_per_second": ("tokens/s", ""),
    "itl_p50": ("ITL P50", "ms"),
    "itl_p99": ("ITL P99", "ms"),
}
BARRED = ("ttft_p50", "ttft_p99", "hits", "tokens_per_second")


def differences(found: Mapping[str, Any]) -> dict[str, float]:
    """By figure: of the simulation, as a share of the real one."""
    return {name: found["simulated"][name] / found["real"][name] - 1 for name in FIGURES}


def section(found: Mapping[str, Any]) -> str:
    """Of the page."""
    off = differences(found)
    lines = ["| figure | real | simulated | off | |", "|---|--:|--:|--:|---|"]
    for name, (title, unit) in FIGURES.items():
        scale, digits = (100, 1) if unit == "%" else (1, 1)
        verdict = ("holds" if abs(off[name]) <= BAR else "**missed**") if name in BARRED else ""
        real, simulated = (f"{scale * found[of][name]:,.{digits}f} {unit}".strip() for of in ("real", "simulated"))
        lines.append(f"| {title} | {real} | {simulated} | {off[name]:+.0%} | {verdict} |")
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--load", type=float, default=0.5, help="share of the time that engines are to be busy")
    parser.add_argument("--seconds", type=float, default=120, help="in which conversations start")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(words)
    with TemporaryDirectory() as folder, engine_processes(options.bundle, Path(folder), options.engines) as engines:
        addresses = [engine.address for engine in engines]
        found = asyncio.run(compared(addresses, Path(folder), options.load, options.seconds, options.seed))
    print(section(found))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
