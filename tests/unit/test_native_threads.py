"""The threads of native operators: results to the bit with any number of them, whoever sleeps, runs beside or ends."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.kernels import cpu as native
from engines.kernels.cpu import SMALL
from engines.kernels.operators import OPERATORS
from engines.sessions import THREADS_ENTRY, cpu_options, threads_of
from engines.targets.ort_cpu import library
from tapeout.cores import physical_cores
from tapeout.schemes import Scheme
from tests.native import Array, Run, linear_session
from tests.random_linears import random_linear

pytestmark = pytest.mark.skipif(native.level() is None, reason=native.unsupported())
EIGHT = Scheme(bits=8, group_size=64, symmetric=True)
COLUMNS = 192


def session(threads: int, *, own: bool = True, outputs: int = 2000) -> Run:
    return linear_session("BlockLinear", random_linear(outputs, COLUMNS, EIGHT), threads=threads, own_threads=own)


def tokens(count: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal((count, COLUMNS)).astype(np.float32)


def running() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


@pytest.mark.parametrize("threads", [1, 2, 3, 4, 8, 16])
def test_any_number_of_threads_gives_the_same_bits(threads: int) -> None:
    x = {count: tokens(count) for count in (1, 2, 7, 300)}
    stock, own = session(1, own=False), session(threads)
    for count, given_tokens in x.items():
        expected = stock(given_tokens)[0]
        for _ in range(5):
            assert np.array_equal(own(given_tokens)[0], expected), f"{count} tokens"


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 40), st.sampled_from([0.0, 0.0, 0.0005, 0.003])), min_size=1, max_size=12))
def test_threads_that_fell_asleep_take_part_again(steps: list[tuple[int, float]]) -> None:
    """Threads sleep after about half a millisecond without work; a step may come before, after and meanwhile."""
    own, expected = _shared()
    for count, pause in steps:
        time.sleep(pause)
        assert np.array_equal(own(tokens(count))[0], expected[:count])


def _shared(cache: list[tuple[Run, Array]] = []) -> tuple[Run, Array]:  # noqa: B006
    """``tokens(n)`` begins with the same rows for every n, so one result has them all."""
    if not cache:
        cache.append((session(3), session(1, own=False)(tokens(40))[0]))
    return cache[0]


def test_runs_beside_each_other_are_computed_by_their_callers() -> None:
    own, x = session(3), [tokens(20, seed) for seed in range(4)]
    expected, wrong = [own(given_tokens)[0] for given_tokens in x], list[int]()

    def run(number: int) -> None:
        for _ in range(100):
            if not np.array_equal(own(x[number])[0], expected[number]):
                wrong.append(number)

    callers = [threading.Thread(target=run, args=(number,)) for number in range(len(x))]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


@contextmanager
def busy_processes(count: int) -> Generator[None]:
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@contextmanager
def on_cores(cores: set[int]) -> Generator[None]:
    """The calling thread, and what it starts meanwhile."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.parametrize("most_cores", [1, 2, 64])
def test_threads_that_lose_their_cores_give_the_same_bits(most_cores: int) -> None:
    """Beside two busy processes for each core they are moved from core to core, and may run on the same ones after."""
    x = [tokens(count, count) for count in (1, 3, 40)]
    expected = [session(1, own=False)(given_tokens)[0] for given_tokens in x]
    cores = set(sorted(os.sched_getaffinity(0))[:most_cores])
    before = {int(task.name) for task in Path("/proc/self/task").iterdir()}
    with on_cores(cores), busy_processes(2 * len(cores)):
        own = session(3)
        for _ in range(300):
            for given_tokens, result in zip(x, expected, strict=True):
                assert np.array_equal(own(given_tokens)[0], result)
        started = {int(task.name) for task in Path("/proc/self/task").iterdir()} - before
        assert len(started) == 2
        for task in (0, *started):  # one that just leaves a core may not be on it for a moment
            until(lambda task=task: os.sched_getaffinity(task) == cores)


@pytest.mark.parametrize("kind", ["BlockLinear", "NormLinear", "ResidualNormLinear", "GatedLinear", "HeadLinear"])
def test_the_number_of_threads_is_chosen_where_none_is_asked_for(kind: str) -> None:
    """Which one is faster depends on the machine. The results do not."""
    columns = COLUMNS // 2 if kind == "GatedLinear" else COLUMNS
    linear = random_linear(2000, columns, Scheme(bits=8, group_size=32, symmetric=True))
    weight = tokens(1)[0] if "Norm" in kind else None
    inputs: list[Array] = [tokens(9)] * (2 if kind == "ResidualNormLinear" else 1)
    if kind == "HeadLinear":
        inputs.append(np.array(False))
    found = {name: linear_session(kind, linear, weight=weight, **how) for name, how in CHOICES.items()}
    expected = found["one"](*inputs)
    for name, own in found.items():
        assert all(np.array_equal(y, e) for y, e in zip(own(*inputs), expected, strict=True)), name


CHOICES: dict[str, dict[str, Any]] = {"one": {"threads": 1}, "all": {"threads": 3}, "chosen": {"threads": 0}}


def test_a_session_tells_how_many_threads_compute() -> None:
    linear = random_linear(2000, COLUMNS, EIGHT)
    every = physical_cores()
    linear_session("BlockLinear", linear, threads=0)
    assert threads_of(0, library()) in (1, every)
    linear_session("BlockLinear", linear, threads=3)
    assert threads_of(3, library()) == 3  # not what the session before it chose
    assert threads_of(0, None) == every


def test_threads_without_work_sleep() -> None:
    before = {task.name for task in Path("/proc/self/task").iterdir()}
    own = session(4)
    for count in (1, 9):
        own(tokens(count))
        started = {task.name for task in Path("/proc/self/task").iterdir()} - before
        assert len(started) == 3
        deadline = time.monotonic() + 60
        while states(started) != {"S"}:
            assert time.monotonic() < deadline, f"threads are in the states {states(started)}"
            time.sleep(0.001)


def states(tasks: set[str]) -> set[str]:
    return {Path(f"/proc/self/task/{task}/stat").read_text().rpartition(")")[2].split()[0] for task in tasks}


def test_threads_end_with_their_session() -> None:
    session(2)(tokens(1))
    before = running()
    for _ in range(3):
        own = session(5)
        own(tokens(3))
        assert running() == before + 4
        del own
        assert running() == before


def test_a_graph_with_other_operators_keeps_the_threads_of_the_runtime() -> None:
    def threads_of(operators: list[str]) -> tuple[int, bool]:
        options = cpu_options(3, library(), operators)
        try:
            own = options.get_session_config_entry(THREADS_ENTRY) == "3"
        except RuntimeError:
            own = False
        return options.intra_op_num_threads, own

    assert threads_of([*OPERATORS, *SMALL]) == (1, True)
    assert threads_of([*OPERATORS, "MatMulNBits"]) == (3, False)
    assert threads_of([]) == (3, False)
    assert cpu_options(3, None, ["Gather"]).intra_op_num_threads == 3
