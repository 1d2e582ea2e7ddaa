"""Clients of a fleet that ask again and again, and say what was not as before."""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic
from typing import Any, Self

import pytest

from evals.kinds.online.canary import CanaryBounds
from pipeline.cli.release import ReleaseOptions
from tests import web
from tests.exported import build_float, tiny_graph
from tests.native import own_cache
from tests.waiting import wait_for

SAMPLED = {"model": "tiny", "prompt": "The list is", "max_tokens": 100, "min_tokens": 90, "seed": 3}
REGEX = SAMPLED | {"structured_outputs": {"regex": "[a-z ]{70,90}"}, "seed": 4}
PAUSE_SECONDS = 0.1  # else the clients leave no processor to what is to start
ASKED = [SAMPLED, SAMPLED | {"n": 2, "frequency_penalty": 0.5}, REGEX, SAMPLED | {"temperature": 0, "logprobs": 2}]

# Speed is that of a busy machine here, so only a candidate that is nearly always slow would fail by it.
BOUNDS = CanaryBounds(max_failed=0.3, max_slow=0.9, min_calls=10)
RELEASE = ReleaseOptions(share=0.5, canary_seconds=120, drain_seconds=10, bounds=BOUNDS)


def build_tiny(folder: Path) -> None:
    """Bundles ``tiny`` and ``other``, which say the same, and a key ``engine.key``."""
    with pytest.MonkeyPatch.context() as patch:
        own_cache(patch, folder / "cache")
        for name, slots in (("tiny", 32), ("other", 31)):
            build_float(tiny_graph(), folder / name, slots)
    (folder / "engine.key").write_text("c" * 64)


def replicas(url: str) -> list[dict[str, Any]]:
    """As the gateway sees them."""
    return web.get(f"{url}/fleet", timeout=30).json()["replicas"]


def ready(url: str) -> list[str]:
    return [one["address"] for one in replicas(url) if one["state"] == "ready"]


def digests(url: str) -> list[str]:
    """Of the bundles of engines that are ready."""
    return [one["digest"] for one in replicas(url) if one["state"] == "ready"]


def by_pool(url: str) -> dict[str, int]:
    """Engines that are ready."""
    return Counter(one["pool"] for one in replicas(url) if one["state"] == "ready")


def lost(url: str) -> int:
    return web.get(f"{url}/fleet", timeout=30).json()["lost"]


def answers(url: str) -> list[Any]:
    """To each request once."""
    return [answer(url, number) for number in range(len(ASKED))]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def answer(url: str, number: int, conversation: str = "") -> Any:
    """What differs between two answers of one request left out."""
    body = ASKED[number % len(ASKED)] | ({"prompt_cache_key": conversation} if conversation else {})
    found = web.post(f"{url}/v1/completions", json=body, timeout=120)
    assert found.status_code == 200, found.text
    return found.json()["choices"], found.json()["usage"]["completion_tokens"]


class Load:
    """Clients that ask again and again; :meth:`end` says what was not as before.

    As a context manager it also ends them where the test fails: they would ask a server that is gone, for ever.

    ``new``: each request begins a conversation.
    """

    def __init__(
        self, url: str, wanted: list[Any], clients: int = 2, pause: float = PAUSE_SECONDS, *, new: bool = False
    ) -> None:
        self._url, self._wanted, self._ending, self.asked = url, wanted, threading.Event(), 0
        self._pause, self._new = pause, new
        self._pool = ThreadPoolExecutor(clients)
        self._clients = [self._pool.submit(self._ask, number) for number in range(clients)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._pool.shutdown()

    def end(self) -> int:
        self._ending.set()
        wrong = [one for client in self._clients for one in client.result()]
        self._pool.shutdown()
        assert not wrong
        return self.asked

    def more(self, count: int) -> None:
        until = self.asked + count
        wait_for(lambda: self.asked >= until)

    def _ask(self, number: int) -> list[Any]:
        wrong: list[Any] = []
        while not self._ending.is_set():
            try:
                name = f"conversation {number} {monotonic()}" if self._new else ""
                if (found := answer(self._url, number, name)) != self._wanted[number % len(ASKED)]:
                    wrong.append(found)
            except Exception as error:
                wrong.append(error)
            self.asked += 1
            number += 1
            time.sleep(self._pause)
        return wrong
