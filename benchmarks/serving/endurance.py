"""Random requests, disconnects, bad inputs and killed engines at twice the capacity of a server; then look for leaks.

python -m benchmarks.serving.endurance --bundle artifacts/candidate --seconds 1800 --out endurance.json

The exit code is 1 if a problem was found. A test runs the same for less than a minute.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import psutil
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.serving.load import Text
from benchmarks.serving.servers import MODEL, OURS, ServerProcess
from tapeout.artifact import Frozen
from tapeout.errors import EvidenceError, ExitCode

OVERLOAD = 2.0
CAPACITY_SECONDS, CAPACITY_CLIENTS = 4.0, 16
STUCK_SECONDS = 60.0  # a request that has not ended by then is stuck
SETTLE_SECONDS = 20.0  # from the last response until the server must be idle
MAX_WAITING = 24  # small, so that twice the capacity fills the queue
PROMPT_TOKENS, NEW_TOKENS = (4, 160), (1, 64)
GROWTH_BYTES = 48 << 20  # that a process may grow by after the first third of the load: allocators keep what is freed
HANDLES = 4  # more than before the load: a journal or a database may be opened late
SAMPLE_SECONDS = 1.0
REFUSED = (408, 429, 503)  # what a good request may get while the server is overloaded or its engine starts again
SEEN = ("complete", "busy", "left", "refused")  # outcomes that a run must have had
# Each must be refused with 400 or 404; each has taken a server down somewhere.
BAD: tuple[dict[str, Any] | bytes, ...] = (
    b"{",
    b"\xff\xfe",
    b"[]",
    {"model": "other", "prompt": "a"},
    {"prompt": []},
    {"prompt": [-1]},
    {"prompt": [1 << 40]},
    {"prompt": [1] * 100_000},
    {"prompt": "a", "max_tokens": -1},
    {"prompt": "a", "max_tokens": 1 << 40},
    {"prompt": "a", "temperature": -1},
    {"prompt": "a", "top_p": 7},
    {"prompt": "a", "logit_bias": {"99999999": 1}},
    {"prompt": "a", "stop_token_ids": [-5]},
    {"prompt": "a", "logprobs": 10_000},
    {"prompt": "a", "n": 1_000_000},
    {"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": 7}}}},
    {"prompt": "a", "stream_options": {"include_usage": True}},
)
PLAIN, STREAM, CHAT, LEAVE, LEAVE_AT_ONCE, INVALID = "plain", "stream", "chat", "leave", "leave at once", "invalid"
KINDS = {STREAM: 8, PLAIN: 3, CHAT: 3, LEAVE: 3, LEAVE_AT_ONCE: 1, INVALID: 3}


class Sample(Frozen):
    """Of the server's and the engine's process: resident bytes and open handles; ``running`` as the server says."""

    at: float
    server_bytes: int
    engine_bytes: int
    handles: int


class Endurance(Frozen):
    """``problems``: empty if all is well. ``outcomes``: requests by kind and how they ended."""

    seconds: float
    offered_per_s: float
    sent: int
    outcomes: dict[str, int]
    kills: int
    records: int
    samples: tuple[Sample, ...]
    problems: tuple[str, ...]


@dataclass
class _Load:
    """What the clients saw. ``complete``: prompt and new tokens of every complete response, by request id."""

    outcomes: Counter[str] = field(default_factory=Counter[str])
    complete: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    problems: list[str] = field(default_factory=list[str])
    sent: int = 0


class Clients:
    """Random clients of one server. ``random`` decides everything but time."""

    def __init__(self, session: aiohttp.ClientSession, text: Text) -> None:
        self.session, self.text, self.random, self.load = session, text, text.random, _Load()

    async def one(self, kind: str) -> None:
        """One request from its start to its end. Its outcome is counted, and anything unexpected is a problem."""
        self.load.sent += 1
        id = f"endurance-{self.load.sent}"
        path, body = self._request(kind)
        try:
            async with asyncio.timeout(STUCK_SECONDS):
                outcome = await self._send(kind, id, path, body)
        except TimeoutError:
            outcome = "stuck"
        except aiohttp.ClientError as error:
            outcome = f"connection lost ({type(error).__name__})"
        expected = {"refused"} if kind == INVALID else {"complete", "busy", "failed"}
        expected = {"left", "busy", "complete", "failed"} if kind in (LEAVE, LEAVE_AT_ONCE) else expected
        if outcome not in expected:
            self.load.problems.append(f"request {id} ({kind}): {outcome}; body {body[:200]!r}")
        self.load.outcomes[f"{kind}: {outcome}"] += 1

    def _request(self, kind: str) -> tuple[str, bytes]:
        path = "/v1/completions"
        if kind == INVALID:
            bad = self.random.choice(BAD)
            return path, bad if isinstance(bad, bytes) else orjson.dumps({"model": MODEL, **bad})
        prompt = self.text.prompt(self.random.randint(*PROMPT_TOKENS))
        body: dict[str, Any] = {"model": MODEL, "prompt": prompt, "max_tokens": self.random.randint(*NEW_TOKENS)}
        if kind == CHAT:
            path, text = "/v1/chat/completions", "What is item " + str(self.random.random()) + "?"
            body = {**body, "messages": [{"role": "user", "content": text}]}
            del body["prompt"]
        if self.random.random() < 0.5:
            body |= {"temperature": 1.0, "top_p": 0.9, "seed": self.random.randrange(1000)}
        if kind != PLAIN:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return path, orjson.dumps(body)

    async def _send(self, kind: str, id: str, path: str, body: bytes) -> str:
        headers = {"Content-Type": "application/json", "X-Request-Id": id}
        if kind == LEAVE_AT_ONCE:
            task = asyncio.ensure_future(self.session.post(path, data=body, headers=headers))
            await asyncio.sleep(self.random.random() * 0.05)
            task.cancel()
            (result,) = await asyncio.gather(task, return_exceptions=True)
            if isinstance(result, aiohttp.ClientResponse):
                result.close()
            return "left"
        async with self.session.post(path, data=body, headers=headers) as response:
            if response.status in REFUSED:
                await response.read()
                return "busy"
            if response.status != 200:
                said = json.loads(await response.read())["error"]
                return "refused" if response.status in (400, 404) and said["message"] else f"{response.status}: {said}"
            if kind == LEAVE:
                for _ in range(self.random.randint(1, 4)):
                    await response.content.readany()
                response.close()
                return "left"
            return self._complete(id, kind, await response.read())

    def _complete(self, id: str, kind: str, body: bytes) -> str:
        """Whether a response ended exactly once, with a reason or with an error."""
        if kind == PLAIN:
            events, ended = [json.loads(body)], 1
        else:
            data = [line[5:].strip() for line in body.split(b"\n") if line.startswith(b"data:")]
            events, ended = [json.loads(each) for each in data if each != b"[DONE]"], data.count(b"[DONE]")
        reasons = [c["finish_reason"] for e in events for c in e.get("choices") or () if c.get("finish_reason")]
        errors = [event["error"] for event in events if event.get("error")]
        if errors and not reasons:
            return "failed"
        if errors or len(reasons) != 1 or ended != 1:
            return f"ended with reasons {reasons}, errors {errors} and {ended} ends"
        usage = next(event["usage"] for event in reversed(events) if event.get("usage"))
        self.load.complete[id] = usage["prompt_tokens"], usage["completion_tokens"]
        return "complete"


async def measure_capacity(clients: Clients, seconds: float) -> float:
    """Good requests per second that the server answers to clients that each wait for their response."""
    until, before = time.monotonic() + seconds, clients.load.sent

    async def client() -> None:
        while time.monotonic() < until:
            await clients.one(STREAM)

    await asyncio.gather(*(client() for _ in range(CAPACITY_CLIENTS)))
    return (clients.load.sent - before) / (time.monotonic() - until + seconds)


def engine_process(server: ServerProcess) -> psutil.Process | None:
    for process in server.processes[1:]:
        try:
            if any("runtime.engine.worker" in word for word in process.cmdline()):
                return process
        except psutil.Error:
            continue
    return None


def sample(server: ServerProcess, at: float) -> Sample | None:
    """None while the engine is being started again."""
    engine = engine_process(server)
    if engine is None:
        return None
    try:
        first = server.processes[0]
        return Sample(
            at=at,
            server_bytes=first.memory_info().rss,
            engine_bytes=engine.memory_info().rss,
            handles=first.num_fds(),
        )
    except (psutil.Error, IndexError):
        return None


async def gauges(session: aiohttp.ClientSession) -> dict[str, float]:
    async with session.get("/metrics") as response:
        text = (await response.read()).decode()
    return {each.name: each.value for family in text_string_to_metric_families(text) for each in family.samples}


async def idle(session: aiohttp.ClientSession) -> str | None:
    """None once no request runs or waits and no block is held; otherwise what there still is."""
    until = time.monotonic() + SETTLE_SECONDS
    while True:
        found = await gauges(session)
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
        left = {name: found[name] for name in names if found[name]}
        if not left and found["tapeout:ready"]:
            return None
        if time.monotonic() > until:
            return f"{SETTLE_SECONDS:.0f} s after the last response: {left or 'the server is not ready'}"
        await asyncio.sleep(0.1)


async def good_answer(session: aiohttp.ClientSession, prompt: Sequence[int]) -> str:
    body = {"model": MODEL, "prompt": list(prompt), "max_tokens": 16, "temperature": 0}
    async with session.post("/v1/completions", json=body) as response:
        found = await response.json()
    return str(found["choices"][0]["text"] if response.status == 200 else found)


def _session(server: ServerProcess) -> aiohttp.ClientSession:
    timeout = aiohttp.ClientTimeout(total=None)
    return aiohttp.ClientSession(server.url, connector=aiohttp.TCPConnector(limit=0), timeout=timeout)


async def endure(
    server: ServerProcess, text: Text, seconds: float, kill_seconds: float, settled_seconds: float = 0.5
) -> tuple[_Load, list[Sample], int, float]:
    """Run the load and check what the server's process says afterwards. Problems are in the load."""
    async with _session(server) as session:
        clients = Clients(session, text)
        problems = clients.load.problems
        prompt = text.prompt(32)
        answer = await good_answer(session, prompt)
        rate = OVERLOAD * await measure_capacity(clients, min(CAPACITY_SECONDS, seconds / 4))
        await idle(session)
    await asyncio.sleep(settled_seconds)
    before = sample(server, 0.0)  # without connections, as the last one is: else that many handles could be lost
    if before is None:
        raise EvidenceError("the server has no engine process")
    async with _session(server) as session:
        clients.session = session
        samples, kills = [before], 0
        started = time.monotonic()
        next_kill, next_sample, arrival = kill_seconds, SAMPLE_SECONDS, 0.0
        tasks: set[asyncio.Task[None]] = set()
        while (now := time.monotonic() - started) < seconds:
            if now >= next_sample:
                samples += [found for found in [sample(server, now)] if found]
                next_sample += SAMPLE_SECONDS
            if now >= next_kill:
                next_kill += kill_seconds
                engine = engine_process(server)
                if engine:
                    engine.kill()
                    kills += 1
            while arrival <= now:
                arrival += text.random.expovariate(rate)
                (kind,) = text.random.choices(list(KINDS), list(KINDS.values()))
                task = asyncio.create_task(clients.one(kind))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            await asyncio.sleep(min(0.01, max(arrival - now, 0.001)))
        await asyncio.gather(*tasks)
        if left := await idle(session):
            problems.append(left)
        if (after := await good_answer(session, prompt)) != answer:
            problems.append(f"a request got {answer!r} before the load and {after!r} after it")
    await asyncio.sleep(settled_seconds)
    last = sample(server, time.monotonic() - started)
    if last is None:
        problems.append("there is no engine process after the load")
    else:
        samples.append(last)
        problems += leaks(samples)
    return clients.load, samples, kills, rate


def leaks(samples: Sequence[Sample]) -> list[str]:
    """What grew although the load did not: memory since the first third of the load, handles since before it.

    A new engine process begins small, so its memory is compared with the largest of that first third.
    """
    last, third = samples[-1], max(len(samples) // 3, 1)
    found: list[str] = []
    for name, read in (("server", lambda s: s.server_bytes), ("engine", lambda s: s.engine_bytes)):  # pyright: ignore
        early = max(read(each) for each in samples[:third])
        if read(last) > early + GROWTH_BYTES:
            found.append(f"memory of the {name}'s process grew from {early >> 20} to {read(last) >> 20} MiB")
    if last.handles > samples[0].handles + HANDLES:
        found.append(f"open handles of the server grew from {samples[0].handles} to {last.handles}")
    return found


def usage_problems(database: Path, complete: dict[str, tuple[int, int]]) -> tuple[int, list[str]]:
    """Number of usage records, and where they differ from what the clients were told."""
    with sqlite3.connect(database) as connection:
        rows = connection.execute(
            "select request_id, prompt_tokens, completion_tokens, finish_reason from usage"
        ).fetchall()
    counts = Counter(row[0] for row in rows)
    problems = [f"{count} usage records of request {id}" for id, count in counts.items() if count > 1]
    records = {row[0]: row[1:] for row in rows}
    for id, tokens in complete.items():
        record = records.get(id)
        if record is None or tuple(record[:2]) != tokens or record[2] not in ("stop", "length"):
            problems.append(f"request {id} was told {tokens} tokens; its usage record is {record}")
    return len(rows), problems


def untried(outcomes: Counter[str], kills: int) -> list[str]:
    """What a run must have seen, or its silence says nothing."""
    seen = {name: sum(n for each, n in outcomes.items() if each.endswith(f": {name}")) for name in SEEN}
    found = [f"no request was {name}" for name, count in seen.items() if not count]
    if kills <= HANDLES:  # else a handle that is lost with each of them would not be found
        found.append(f"{kills} engines were killed instead of {HANDLES + 1} or more")
    return found


def run(bundle: Path, seconds: float, kill_seconds: float, seed: int, threads: int = 1) -> Endurance:
    """Start a server, endure, and stop it. ``kill_seconds``: between two kills of the engine."""
    text = Text.read(bundle / "tokenizer.json", seed)
    with tempfile.TemporaryDirectory(prefix="tapeout-endurance-") as scratch:
        database, log = Path(scratch) / "usage.db", Path(scratch) / "server.log"
        more = ["--max-waiting", str(MAX_WAITING), "--drain-seconds", "10"]
        more += ["--usage-database", f"sqlite:///{database}", "--usage-journal", str(Path(scratch) / "journal")]
        with ServerProcess(OURS, bundle, log, threads, more) as server:
            load, samples, kills, rate = asyncio.run(endure(server, text, seconds, kill_seconds))
            server.terminate()
            if (code := server.ended(30)) != 0:
                load.problems.append(f"after SIGTERM the server ended with {code}")
        said = log.read_text()
        if "Traceback" in said:
            load.problems.append(f"the server logged a traceback: {said[said.index('Traceback') :][:2000]}")
        records, differences = usage_problems(database, load.complete)
        differences += untried(load.outcomes, kills)
    return Endurance(
        seconds=seconds,
        offered_per_s=rate,
        sent=load.sent,
        outcomes=dict(sorted(load.outcomes.items())),
        kills=kills,
        records=records,
        samples=tuple(samples),
        problems=(*load.problems, *differences),
    )


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=1800)
    parser.add_argument("--kill-seconds", type=float, default=45, help="between two kills of the engine's process")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="also write the report as JSON")
    options = parser.parse_args(words)
    found = run(options.bundle, options.seconds, options.kill_seconds, options.seed, options.threads)
    if options.out:
        options.out.write_text(found.model_dump_json(indent=1) + "\n")
    print(found.model_dump_json(indent=1, exclude={"samples"}))
    return ExitCode.GATE_FAILED if found.problems else ExitCode.PASS


if __name__ == "__main__":
    sys.exit(main())
