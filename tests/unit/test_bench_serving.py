"""The client and the arithmetic of the serving benchmark: what is counted, and that each bar can be missed."""

from __future__ import annotations

import asyncio
import random
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serving import kernel_threads
from benchmarks.serving.client import Answer, Plan, Planned, play
from benchmarks.serving.kernel_threads import KernelThreads
from benchmarks.serving.load import Text
from benchmarks.serving.openvino_server import answer
from benchmarks.serving.report import Measured, Run, bars, page, write
from benchmarks.serving.run import arguments, bench
from benchmarks.serving.scenarios import (
    Gap,
    Gaps,
    Interruption,
    Load,
    Prefix,
    decode_rate,
    gaps_between,
    summary,
    throughput,
)
from benchmarks.serving.servers import KINDS, OURS, VLLM, ServerProcess, command
from tapeout.errors import EvidenceError, TapeoutError


def served(*responses: bytes, pause: float = 0.0) -> tuple[list[Answer], list[bytes]]:
    """The answers of a server that writes these pieces of a response to each of two requests, and what it was sent."""
    bodies: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        size = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        bodies.append(await reader.readexactly(size))
        for piece in responses:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(pause)
        writer.close()

    async def run() -> list[Answer]:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server:
            requests = [Planned([1, 2], 3), Planned([4], 3, after_pieces=2)]
            return list((await play(Plan(f"http://127.0.0.1:{port}", "m", requests))).answers)

    return asyncio.run(run()), bodies


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
TEXT = b'data: {"choices":[{"text":"a"}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":2}}}\n\n'
DONE = b"data: [DONE]\n\n"


def test_events_are_timed_by_the_piece_that_completes_them() -> None:
    cut = TEXT + TEXT + USAGE + DONE
    answers, bodies = served(HEAD + TEXT[:10], TEXT[10:], cut, pause=0.05)
    assert [len(answer.events) for answer in answers] == [3, 3]
    assert all(answer.tokens == 3 and answer.cached == 2 and not answer.error for answer in answers)
    assert all(answer.gaps[0] > 0.03 and answer.gaps[1] == 0 for answer in answers)
    assert answers[1].sent >= answers[0].events[0]
    assert b'"ignore_eos":true' in bodies[0]


@pytest.mark.parametrize(
    ("response", "error"),
    [
        (b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 4\r\n\r\nfull", "429: full"),
        (HEAD + TEXT, "ended early"),
        (HEAD + DONE, "ended early"),
        (HEAD + TEXT + b'data: {"error":{"message":"broken"}}\n\n' + DONE, "broken"),
        (b"", "no whole response"),
    ],
)
def test_what_is_no_complete_answer_is_an_error(response: bytes, error: str) -> None:
    answers, _ = served(response)
    assert all(error in answer.error for answer in answers)


class TwoTokens:
    """In place of OpenVINO's engine: two tokens, and the end."""

    def add(self, body: dict[str, Any]) -> asyncio.Queue[tuple[str, int] | None]:
        queue: asyncio.Queue[tuple[str, int] | None] = asyncio.Queue()
        for message in (("a", 1), (body["model"], 2), None):
            queue.put_nowait(message)
        return queue


def test_the_server_of_openvino_closes_the_connection_of_the_client() -> None:
    """The client reads until then: a server that keeps the connection hangs the benchmark."""
    engine: Any = TwoTokens()

    async def run() -> list[Answer]:
        server = await asyncio.start_server(lambda r, w: answer(engine, r, w), "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server:
            return list((await play(Plan(url, "m", [Planned([1, 2], 2)], timeout_seconds=10.0))).answers)

    (found,) = asyncio.run(run())
    assert (found.error, found.tokens, len(found.events)) == ("", 2, 2)


def text() -> Text:
    return Text(list(range(5000)), random.Random(1))


def test_arrivals_are_seeded_and_prompts_share_nothing() -> None:
    load = text().poisson(400, 10.0)
    assert load == text().poisson(400, 10.0)
    gaps = [after.at - before.at for before, after in pairwise(load)]
    assert sum(gaps) / len(gaps) == pytest.approx(0.1, rel=0.15)
    assert len({tuple(request.prompt[:4]) for request in load}) == 400
    assert len({request.new_tokens for request in load}) == 4


def test_throughput_is_of_the_whole_run() -> None:
    bursts = Answer(1, 2, [1.5, 1.9], 100)  # two events, whatever the number of their tokens
    straggler = Answer(0, 10, [9.0], 1)
    assert throughput([bursts, straggler]) == pytest.approx(10.1)


def test_decode_is_timed_while_every_stream_runs() -> None:
    first = Answer(0, 9, [i / 10 for i in range(50)], 50)
    second = Answer(0, 9, [2 + i / 10 for i in range(50)], 50)
    assert decode_rate([first, second]) == pytest.approx(20)
    with pytest.raises(EvidenceError):
        decode_rate([first, Answer(0, 9, [7.0, 8.0], 2)])


def test_gaps_are_those_of_streams_that_run_then() -> None:
    """A gap counts that lies in part between the two times; the median is of the whole answer."""
    slow = Answer(0, 9, [0, 1, 2, 5, 6], 5)
    ended = Answer(0, 2, [0, 1, 2], 3)
    assert gaps_between([slow, ended], 3, 5.5) == [(2, 5, 1), (5, 6, 1)]
    assert gaps_between([slow, ended], 1.5, 1.6) == [(1, 2, 1), (1, 2, 1)]
    with pytest.raises(EvidenceError, match="every stream ended"):
        gaps_between([slow, ended], 7, 8)


def load(tokens: float = 100.0, itl: float = 10.0, ttft: float = 50.0) -> Load:
    return Load(
        offered_per_s=1,
        requests=1,
        failed=0,
        first_error="",
        tokens_per_s=tokens,
        requests_per_s=1,
        ttft_ms=(ttft / 2, ttft),
        itl_ms=(itl / 2, itl),
        client_cpu_share=0.01,
    )


def gaps(worst: float, undisturbed: float = 1.4) -> Gaps:
    return Gaps(
        worst_ratio=worst,
        p99_ratio=1.7,
        undisturbed_ratio=undisturbed,
        disturbed_share=0.02,
        worst_ms=10 * worst,
        median_ms=10,
    )


def ours(**changes: Any) -> Measured:
    good: dict[str, Any] = {
        "saturation": (load(160),),
        "latency": load(itl=9, ttft=40),
        "cost": ((95.0, 100.0),),
        "long_prompt": (Interruption(fed=gaps(1.9), usual=gaps(1.5), long_ttft_ms=900),),
        "prefix": Prefix(cold_ms=90, warm_ms=10, cached_tokens=512),
        "streams": ((1, (50.0,)), (8, (200.0,))),
        "cold_start_seconds": 2.0,
    }
    return Measured(name="ours", ours=True, **(good | changes))


def run_of(mine: Measured) -> Run:
    peer = Measured(name="peer", ours=False, cold_start_seconds=9, saturation=(load(),), latency=load())
    return Run(
        servers=(mine, peer),
        failures={"other": "is missing"},
        machine="",
        threads=2,
        requests=1,
        rounds=1,
        load_before=0,
    )


MISSED: list[dict[str, Any]] = [
    {"saturation": (load(149),)},
    {"latency": load(itl=11, ttft=40)},
    {"latency": load(itl=9, ttft=51)},
    {"cost": ((89.0, 100.0),)},
    {"long_prompt": (Interruption(fed=gaps(2.1), usual=gaps(1.5), long_ttft_ms=900),)},
    {"prefix": Prefix(cold_ms=79, warm_ms=10, cached_tokens=512)},
    {"streams": ((1, (50.0,)), (8, (48.0,)))},
    {"cold_start_seconds": 3.1},
]


def test_every_bar_holds_is_missed_or_has_no_figure(tmp_path: Path) -> None:
    assert [bar.holds for bar in bars(run_of(ours()))] == [True] * 8
    for number, change in enumerate(MISSED):
        assert [bar.holds for bar in bars(run_of(ours(**change)))] == [i != number for i in range(8)]
    bare = Measured(name="ours", ours=True, cold_start_seconds=1.0)
    assert [bar.holds for bar in bars(run_of(bare))] == [None] * 7 + [True]
    write(run_of(bare), tmp_path)
    assert "not measured" in (tmp_path / "serving.md").read_text() and (tmp_path / "serving.json").is_file()
    assert "other" in page(run_of(ours()))


def test_latencies_in_which_the_kernel_had_a_core_are_shown_and_judge_all_the_same() -> None:
    """Planted: a server whose other latencies would keep the bar."""
    rounds = [gaps(3.0, 1.8), gaps(1.9, 1.7), gaps(2.1, 2.0)]
    long = tuple(Interruption(fed=each, usual=gaps(2.5), long_ttft_ms=900) for each in rounds)
    bar = next(bar for bar in bars(run_of(ours(long_prompt=long))) if "largest" in bar.what)
    assert bar.holds is False and bar.found.startswith("2.1 times (3.0, 1.9, 2.1), without the prompt 2.5")
    assert bar.found.endswith(
        "Without the 2.0% of the latencies in which a thread of the kernel had a core for 3 ms: "
        "1.8 times (1.8, 1.7, 2.0)"
    )


def test_a_latency_is_disturbed_where_the_kernel_had_a_core_in_a_part_of_it() -> None:
    streams = [Gap(0, 1, 1), Gap(1, 4, 1), Gap(4, 5, 1), Gap(5, 7, 1)]
    assert summary(streams, []).undisturbed_ratio == 3
    assert [summary(streams, [held]).undisturbed_ratio for held in ((3.9, 4.1), (1, 3), (4, 5), (0, 9))] == [2, 2, 3, 0]
    assert summary(streams, [(1, 3), (6, 9)]).disturbed_share == 0.5
    assert summary(streams, [(0, 9)]).worst_ratio == 3


def test_a_kernel_thread_had_a_core_where_its_time_grew_between_two_readings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A ``/proc`` of three threads of the kernel and a program."""
    (tmp_path / "2").mkdir()
    (tmp_path / "2" / "comm").write_text("kthreadd\n")
    for id, parent, name in ((7, 2, "kworker/0:1"), (8, 2, "odd) 1 2 ("), (9, 2, "idle"), (10, 1, "program")):
        (tmp_path / str(id)).mkdir()
        (tmp_path / str(id) / "stat").write_text(f"{id} ({name}) S {parent} 0 0")
        (tmp_path / str(id) / "schedstat").write_text(f"{1_000_000 * id} 0 0")
    monkeypatch.setattr(kernel_threads, "PROC", tmp_path)
    monkeypatch.setattr(kernel_threads, "WATCHED", 2)
    monkeypatch.setattr(kernel_threads, "READ_SECONDS", 0.001)
    watch = KernelThreads()
    with watch:
        time.sleep(0.01)
        begin = time.time()
        (tmp_path / "more").write_text("38000000 0 0")  # 30 ms
        (tmp_path / "more").rename(tmp_path / "8" / "schedstat")
        (tmp_path / "9" / "schedstat").unlink()  # it ends: it had 9 ms
        (tmp_path / "7" / "schedstat").write_text("999000000 0 0")  # it is not among the two busiest
        time.sleep(0.01)
        end = time.time()
    [(since, until)] = watch.held(30)
    assert since < end and until > begin and until - since < 1
    assert not watch.held(31)


@pytest.mark.parametrize("process_2", [None, "bash\n"])
def test_where_threads_of_the_kernel_are_not_shown_none_is_seen(
    process_2: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No ``/proc``, or that of a container, in which process 2 is a program with children of its own."""
    if process_2:
        for id in (2, 7):
            (tmp_path / str(id)).mkdir()
        (tmp_path / "2" / "comm").write_text(process_2)
        (tmp_path / "7" / "stat").write_text("7 (child) S 2 0 0")
        (tmp_path / "7" / "schedstat").write_text("5000000 0 0")
    monkeypatch.setattr(kernel_threads, "PROC", tmp_path)
    with KernelThreads() as watch:
        (tmp_path / "more").write_text("95000000 0 0")
        if process_2:
            (tmp_path / "more").rename(tmp_path / "7" / "schedstat")
        time.sleep(0.05)
    assert not watch.held(1)


def test_every_server_has_a_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TAPEOUT_PEERS", str(tmp_path))
    assert "--unsafe" in command(OURS, Path("b"), 1, 2)[0]
    assert "VLLM_CPU_KVCACHE_SPACE" in command(VLLM, Path("b"), 1, 2)[1]
    with pytest.raises(TapeoutError, match="install-only"):
        command(KINDS[1], Path("b"), 1, 2)


def test_a_server_that_ends_is_told_with_its_log(tmp_path: Path) -> None:
    with pytest.raises(TapeoutError, match="ended with code"):
        ServerProcess(OURS, tmp_path / "no bundle", tmp_path / "log", 1)


def test_a_bundle_that_is_none_is_said_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(TapeoutError):
        bench(arguments(["--bundle", str(tmp_path), "--out", str(tmp_path / "out")]), lambda _: None)
    assert not (tmp_path / "out").exists()
