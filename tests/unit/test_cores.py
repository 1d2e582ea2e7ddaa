"""Which cores the engine's main thread leaves to the server."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest

from runtime.engine.shared_cores import FREE_SECONDS, OFTEN, WINDOW_SECONDS, SharedCores, interruptions
from tapeout.cores import keep_to, usable

Found = TypeVar("Found")
ALL = usable()
pytestmark = pytest.mark.skipif(len(ALL) < 2, reason="needs two cores")


def in_thread(work: Callable[[], Found]) -> Found:
    """Affinity is a thread's own, and ends with it."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


@pytest.mark.parametrize("threads", [len(ALL), len(ALL) + 1])
def test_an_engine_on_every_core_leaves_the_last_one_to_the_server(threads: int) -> None:
    servers, engine = in_thread(lambda: (SharedCores(threads).servers, usable()))
    assert servers == {max(ALL)} and engine == ALL - servers
    assert usable() == ALL


@pytest.mark.parametrize("threads", [0, 1, len(ALL) - 1])
def test_nothing_is_shared_where_cores_are_free(threads: int) -> None:
    assert in_thread(lambda: (SharedCores(threads).servers, usable())) == (frozenset(), ALL)


def test_one_core_is_not_divided() -> None:
    def on_one() -> tuple[frozenset[int], frozenset[int]]:
        os.sched_setaffinity(0, {min(ALL)})
        return SharedCores(4).servers, usable()

    assert in_thread(on_one) == (frozenset(), {min(ALL)})


def test_no_cores_means_any() -> None:
    in_thread(lambda: keep_to(frozenset()))
    assert usable() == ALL


def test_the_main_thread_runs_anywhere_for_a_while_when_it_is_interrupted_often() -> None:
    kept, count, found = ALL - {max(ALL)}, [0], list[frozenset[int]]()

    def run() -> None:
        cores, now = SharedCores(len(ALL), lambda: count[0]), 100.0
        for rate, seconds in ((0, 1.0), (0.8 * OFTEN, 1.0), (2 * OFTEN, 1.0), (0, FREE_SECONDS), (0, 1.0)):
            end, begin = now + seconds, count[0]
            while now < end:
                now += WINDOW_SECONDS * 1.01
                count[0] = begin + round(rate * (now - end + seconds))
                cores.stepped(now)
            found.append(usable())

    in_thread(run)
    assert found == [kept, kept, ALL, kept, kept]


def test_a_thread_that_shares_its_core_with_a_busy_process_is_interrupted() -> None:
    def run() -> None:
        os.sched_setaffinity(0, {min(ALL)})
        busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        try:
            before, deadline = interruptions(), time.monotonic() + 60
            while interruptions() == before:
                assert time.monotonic() < deadline, "no interruption was counted in a minute"
        finally:
            busy.kill()
            busy.wait()

    in_thread(run)
