"""Which cores the engine's main thread leaves to the server."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest

from engines.cores import keep_to, share_cores, usable

Found = TypeVar("Found")
ALL = usable()
pytestmark = pytest.mark.skipif(len(ALL) < 2, reason="needs two cores")


def in_thread(work: Callable[[], Found]) -> Found:
    """Affinity is a thread's own, and ends with it."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


@pytest.mark.parametrize("threads", [len(ALL), len(ALL) + 1])
def test_an_engine_on_every_core_leaves_the_last_one_to_the_server(threads: int) -> None:
    servers, engine = in_thread(lambda: (share_cores(threads), usable()))
    assert servers == {max(ALL)} and engine == ALL - servers
    assert usable() == ALL


@pytest.mark.parametrize("threads", [0, 1, len(ALL) - 1])
def test_nothing_is_shared_where_cores_are_free(threads: int) -> None:
    assert in_thread(lambda: (share_cores(threads), usable())) == (frozenset(), ALL)


def test_one_core_is_not_divided() -> None:
    def on_one() -> tuple[frozenset[int], frozenset[int]]:
        os.sched_setaffinity(0, {min(ALL)})
        return share_cores(4), usable()

    assert in_thread(on_one) == (frozenset(), {min(ALL)})


def test_no_cores_means_any() -> None:
    in_thread(lambda: keep_to(frozenset()))
    assert usable() == ALL
