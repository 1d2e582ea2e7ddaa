"""What is measured of a server. Each scenario plans requests, has them sent, and sums up what the client saw.

Throughput is of a whole run, with its first prompts and its last stragglers. Latencies are of all its requests.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import NamedTuple

import numpy as np
import orjson

from benchmarks.peers.process import ROOT, PeerProcess
from benchmarks.serving.client import Answer, Plan, Planned, Played
from benchmarks.serving.kernel_threads import KernelThreads
from benchmarks.serving.load import Text
from benchmarks.serving.servers import MODEL
from tapeout.artifact import Frozen
from tapeout.errors import EvidenceError

SATURATING_RATE = 50.0  # arrivals per second, above what any server here can answer
COST_STREAMS, COST_PROMPT, COST_TOKENS = 16, 32, 256  # short prompts, so that all streams soon run together
LONG_PROMPT = 2000  # tokens
# Pieces read of each stream before the long prompt arrives. Where drafts hold, a piece has up to nine tokens: streams
# that repeat themselves must not end before the slowest has so many pieces.
LONG_AFTER = 16
KERNEL_MS = 3.0  # a thread of the kernel that has a core for longer decides how long a step of 10 ms takes
LONG_TOKENS, LONG_ANSWER = 640, 16  # new tokens of each stream, and of the long prompt
PREFIX, QUESTION, PREFIX_PAIRS = 512, 16, 5
STREAM_PROMPT, STREAM_TOKENS = 64, 96
SHORT_ROUNDS = 9  # of scenarios that take seconds, and whose figures differ most between rounds


class Load(Frozen):
    """Of one open-loop run. Latencies in milliseconds, ``tokens_per_s`` and ``requests_per_s`` of what was answered."""

    offered_per_s: float
    requests: int
    failed: int
    first_error: str
    tokens_per_s: float
    requests_per_s: float
    ttft_ms: tuple[float, float]  # median, P99
    itl_ms: tuple[float, float]
    client_cpu_share: float


class Gaps(Frozen):
    """The inter-token latencies of streams, each divided by the median of its stream: the largest, and the 99th
    percentile. ``undisturbed_ratio``: the largest without those in which a thread of the kernel had a core for
    ``KERNEL_MS``; their share is ``disturbed_share``.
    """

    worst_ratio: float
    p99_ratio: float
    undisturbed_ratio: float
    disturbed_share: float
    worst_ms: float
    median_ms: float  # of the streams


class Interruption(Frozen):
    """``fed``: while a long prompt is read among streams. ``usual``: without it, over as long a time."""

    fed: Gaps
    usual: Gaps
    long_ttft_ms: float


class Gap(NamedTuple):
    """Between two events of a stream, and the median of all gaps of that stream. Seconds."""

    begin: float
    end: float
    median: float

    @property
    def ratio(self) -> float:
        return (self.end - self.begin) / self.median


class Prefix(Frozen):
    cold_ms: float
    warm_ms: float
    cached_tokens: int  # of the warm requests, as the server says; the smallest


def play(url: str, requests: Sequence[Planned]) -> Played:
    """Have a process of its own send the requests."""
    given = orjson.dumps(Plan(url, MODEL, requests))
    with tempfile.TemporaryFile() as answers:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.serving.client"],
            cwd=ROOT,
            input=given,
            stdout=answers,
            stderr=subprocess.PIPE,
            check=False,
        )
        if done.returncode:
            raise EvidenceError(f"the client failed: {done.stderr.decode()[-500:]}")
        answers.seek(0)
        found = orjson.loads(answers.read())
    return Played([Answer(**answer) for answer in found["answers"]], found["cpu_share"], found["started"])


def complete(url: str, requests: Sequence[Planned]) -> Sequence[Answer]:
    """The answers; :class:`EvidenceError` if one is missing or has another length than asked for."""
    return _complete(url, requests).answers


def _complete(url: str, requests: Sequence[Planned]) -> Played:
    played = play(url, requests)
    for answer, request in zip(played.answers, requests, strict=True):
        if answer.error or answer.tokens != request.new_tokens:
            found = answer.error or f"{answer.tokens} new tokens"
            raise EvidenceError(f"{url}: {found}", expected=f"{request.new_tokens} new tokens")
    return played


def throughput(answers: Sequence[Answer]) -> float:
    """New tokens per second, from the first request to the last token, as ``vllm bench serve`` counts.

    >>> throughput([Answer(0, 10, tokens=100), Answer(5, 20, tokens=60)])
    8.0
    """
    seconds = max(answer.ended for answer in answers) - min(answer.sent for answer in answers)
    return sum(answer.tokens for answer in answers) / seconds


def percentiles_ms(seconds: Sequence[float]) -> tuple[float, float]:
    middle, high = np.percentile(np.asarray(seconds) * 1000, (50, 99))
    return float(middle), float(high)


def open_loop(url: str, text: Text, count: int, rate: float) -> Load:
    played = play(url, text.poisson(count, rate))
    good = [answer for answer in played.answers if not answer.error]
    if not good:
        raise EvidenceError(f"no request was answered: {played.answers[0].error}")
    gaps = [gap for answer in good for gap in answer.gaps]
    return Load(
        offered_per_s=rate,
        requests=count,
        failed=count - len(good),
        first_error=next((answer.error for answer in played.answers if answer.error), ""),
        tokens_per_s=throughput(good),
        requests_per_s=len(good) / max(answer.ended for answer in good),
        ttft_ms=percentiles_ms([answer.first_token_seconds for answer in good]),
        itl_ms=percentiles_ms(gaps),
        client_cpu_share=played.cpu_share,
    )


def streams(url: str, text: Text, count: int) -> float:
    """Tokens per second of so many streams."""
    return throughput(complete(url, text.streams(count, STREAM_PROMPT, STREAM_TOKENS)))


@dataclass(frozen=True)
class Bare:
    """The engine alone: the same prompts, decoded without a server, in a process that is paused meanwhile."""

    process: PeerProcess

    def tokens_per_s(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> float:
        self.process.resume()
        answer = self.process.ask("decode", prompts=[list(prompt) for prompt in prompts], new_tokens=new_tokens)
        self.process.pause()
        return len(prompts) * answer["steps"] / answer["seconds"]


def cost(url: str, text: Text, bare: Bare) -> tuple[float, float]:
    """Tokens per second at 16 streams: of the server, then of the bare engine on the same prompts."""
    planned = text.streams(COST_STREAMS, COST_PROMPT, COST_TOKENS)
    server = decode_rate(complete(url, planned))
    return server, bare.tokens_per_s([request.prompt for request in planned], COST_TOKENS)


def decode_rate(answers: Sequence[Answer]) -> float:
    """Tokens per second while every stream runs: after the last first token, up to the first last one."""
    start = max(answer.events[0] for answer in answers)
    end = min(answer.events[-1] for answer in answers)
    tokens = sum(answer.tokens / len(answer.events) for answer in answers for at in answer.events if start < at <= end)
    if end <= start:
        raise EvidenceError("the streams never ran together", remedy="use longer answers")
    return tokens / (end - start)


def interruption(url: str, text: Text) -> Interruption:
    """16 streams, among which a prompt of 2,000 tokens arrives once each has had its first tokens."""
    planned = text.streams(COST_STREAMS, STREAM_PROMPT, LONG_TOKENS)
    long = Planned(text.prompt(LONG_PROMPT), LONG_ANSWER, after_pieces=LONG_AFTER)
    with KernelThreads() as kernel:
        played = _complete(url, [*planned, long])
        *others, arrived = played.answers
        fed = _gaps(played.started, others, arrived.sent, arrived.events[0], kernel)
        alone = _complete(url, text.streams(COST_STREAMS, STREAM_PROMPT, LONG_TOKENS))
        begin = max(answer.events[LONG_AFTER - 1] for answer in alone.answers)
        usual = _gaps(alone.started, alone.answers, begin, begin + arrived.first_token_seconds, kernel)
    return Interruption(fed=fed, usual=usual, long_ttft_ms=1000 * arrived.first_token_seconds)


def _gaps(started: float, answers: Sequence[Answer], begin: float, end: float, kernel: KernelThreads) -> Gaps:
    held = [(since - started, until - started) for since, until in kernel.held(KERNEL_MS)]
    return summary(gaps_between(answers, begin, end), held)


def summary(gaps: Sequence[Gap], held: Sequence[tuple[float, float]]) -> Gaps:
    """``held``: when a thread of the kernel had a core.

    >>> found = summary([Gap(0, 2, 1), Gap(2, 3, 1), Gap(3, 9, 2)], [(3.5, 4)])
    >>> found.worst_ratio, found.undisturbed_ratio, round(found.disturbed_share, 2), found.worst_ms
    (3.0, 2.0, 0.33, 6000.0)
    """
    ratios = [gap.ratio for gap in gaps]
    undisturbed = [gap.ratio for gap in gaps if not any(gap.begin < until and gap.end > since for since, until in held)]
    return Gaps(
        worst_ratio=max(ratios),
        p99_ratio=float(np.percentile(ratios, 99)),
        undisturbed_ratio=max(undisturbed, default=0.0),
        disturbed_share=1 - len(undisturbed) / len(ratios),
        worst_ms=1000 * max(gap.end - gap.begin for gap in gaps),
        median_ms=1000 * median(gap.median for gap in gaps),
    )


def gaps_between(answers: Sequence[Answer], begin: float, end: float) -> list[Gap]:
    """The gaps of each stream that runs between two times, those that lie there in part too."""
    found: list[Gap] = []
    for answer in answers:
        middle = median(answer.gaps) if answer.gaps else 0.0
        times = pairwise(answer.events)
        found += [Gap(before, after, middle) for before, after in times if after > begin and before < end]
    if not found:
        raise EvidenceError("every stream ended before the time that is looked at", remedy="use longer answers")
    return found


def prefix(url: str, text: Text) -> Prefix:
    """Time to first token of a prompt of 528 tokens, and of another one that shares its first 512."""
    cold: list[float] = []
    warm: list[float] = []
    cached: list[int] = []
    for _ in range(PREFIX_PAIRS):
        shared = text.prompt(PREFIX)
        for times in (cold, warm):
            answer = complete(url, [Planned([*shared, *text.prompt(QUESTION)], 4)])[0]
            times.append(answer.first_token_seconds)
        cached.append(answer.cached)
    return Prefix(cold_ms=1000 * median(cold), warm_ms=1000 * median(warm), cached_tokens=min(cached))
