"""``tapeout serve`` and ``tapeout engine`` as two processes in two folders, over a socket with a key."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx2
import pytest

import tapeout
from tests import command, web
from tests.command import COMMAND, ROOT, Running
from tests.exported import build_float, tiny_graph
from tests.native import own_cache
from tests.waiting import wait_for

MODEL = "tiny"
TALK = [{"role": "user", "content": "What is a list?"}]


class Engine:
    """The process of ``tapeout engine``. It listens at the same address whenever it is started.

    ``within``: words before the command, see :class:`tests.network.Network`. ``variables``: of its environment.
    """

    def __init__(
        self,
        folder: Path,
        key: Path,
        address: str = "tcp:127.0.0.1:0",
        within: Sequence[str] = (),
        **variables: str,
    ) -> None:
        self.folder, self._key, self.address = folder, key, address
        self._within, self._variables = within, variables
        self.process: subprocess.Popen[str] | None = None

    def start(self, bundle: Path) -> None:
        words = ["engine", str(bundle), "--listen", self.address, "--key-file", str(self._key), "--unsafe"]
        self.process = subprocess.Popen(
            [*self._within, *COMMAND, *words, "--threads", "1"],
            cwd=self.folder,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **self._variables},
        )
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if found := re.search(r"servers that connect to (tcp:\S+)", line):
                self.address = found[1]
                return
        raise AssertionError("it has not started")

    def stop(self) -> int:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=30)
        return self.process.returncode


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("bundles")
    with pytest.MonkeyPatch.context() as patch:
        own_cache(patch, folder / "cache")
        return [build_float(tiny_graph(), folder / name, slots).folder for name, slots in (("first", 4), ("second", 3))]


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("key") / "engine.key"
    found.write_text("a" * 64)
    return found


@pytest.fixture(scope="module")
def engine(bundles: list[Path], key: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    found = Engine(tmp_path_factory.mktemp("engine"), key)
    found.start(bundles[0])
    yield found
    assert found.stop() == 0


@pytest.fixture(scope="module")
def server(engine: Engine, key: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("server")
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(folder / "cache")}
    variables["TAPEOUT_ENGINE_KEY"] = str(key)
    options = ["--engine", engine.address, "--served-model-name", MODEL]
    with command.served(*options, variables=variables, folder=folder) as running:
        yield running
        assert running.process.poll() is None and running.stop() == 0


def post(server: Running, path: str, body: dict[str, Any]) -> httpx2.Response:
    return web.post(f"{server.url}{path}", json=body, timeout=30)


def test_answers_are_those_of_the_bundle_opened_here(server: Running, bundles: list[Path]) -> None:
    with tapeout.load(bundles[0], threads=1) as opened:
        expected = tapeout.generate(opened, TALK[0]["content"], max_new_tokens=24)
    body = {"model": MODEL, "messages": TALK, "max_tokens": 24, "temperature": 0}
    answer = post(server, "/v1/chat/completions", body).json()
    assert answer["choices"][0]["message"]["content"] == expected
    streamed = web.post(f"{server.url}/v1/chat/completions", json=body | {"stream": True}, timeout=30).text
    chunks = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == expected


def test_what_takes_the_tokenizer_on_both_sides_works(server: Running) -> None:
    body = {"prompt": "x", "structured_outputs": {"choice": ["yes", "no"]}, "max_tokens": 8}
    assert post(server, "/v1/completions", body).json()["choices"][0]["text"] in ("yes", "no")
    assert post(server, "/v1/completions", {"prompt": "x", "guided_regex": "("}).status_code == 400
    scored = {"prompt": "a list", "max_tokens": 2, "prompt_logprobs": 2, "logprobs": 1}
    assert post(server, "/v1/completions", scored).status_code == 200


def test_health_and_metrics_are_those_of_the_engine(server: Running, engine: Engine) -> None:
    assert web.get(f"{server.url}/health").status_code == web.get(f"{server.url}/ready").status_code == 200
    found = web.get(f"{server.url}/metrics").text
    assert "vllm:engine_healthy" in found and 'target="first"' in found
    assert not (engine.folder / "cache").exists(), "what is fetched lies where the server runs"


def test_an_engine_that_comes_back_with_another_bundle_is_served(
    server: Running, engine: Engine, bundles: list[Path]
) -> None:
    before = web.get(f"{server.url}/live").json()["bundle"]
    assert engine.stop() == 0
    wait_for(lambda: web.get(f"{server.url}/ready").status_code == 503)
    refused = post(server, "/v1/completions", {"prompt": "x", "max_tokens": 2})
    assert refused.status_code == 503 and "retry" in refused.text
    engine.start(bundles[1])
    wait_for(lambda: web.get(f"{server.url}/ready").status_code == 200)
    assert web.get(f"{server.url}/live").json()["bundle"] != before
    assert post(server, "/v1/completions", {"prompt": "x", "max_tokens": 2}).status_code == 200


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["serve", "--engine", "ADDRESS"], "without a key"),
        (["serve", "--engine", "ADDRESS", "--engine-key", "OTHER"], "has another key"),
        (["serve", "--engine", "ADDRESS", "--engine-key", "SHORT"], "has 5 bytes"),
        (["serve", "--engine", "ADDRESS", "--engine-key", "KEY", "--threads", "2"], "--threads together with --engine"),
        (["serve", "a", "--engine", "ADDRESS", "--engine-key", "KEY"], "source together with --engine"),
        (["serve", "--engine", "tcp:127.0.0.1:1", "--engine-key", "KEY"], "nothing answers at tcp:127.0.0.1:1"),
        (["serve", "--engine", "somewhere", "--engine-key", "KEY"], "is no address"),
        (["engine", "BUNDLE", "--listen", "tcp:127.0.0.1:0", "--unsafe"], "without a key"),
        (["engine", "BUNDLE", "--listen", "tcp:127.0.0.1:0", "--key-file", "KEY"], "has no verdict"),
        (["engine", "BUNDLE", "--listen", "ADDRESS", "--key-file", "KEY", "--unsafe"], "cannot listen at"),
    ],
)
def test_what_cannot_work_says_why(
    engine: Engine, server: Running, key: Path, bundles: list[Path], tmp_path: Path, words: list[str], reason: str
) -> None:
    (tmp_path / "other").write_text("b" * 64)
    (tmp_path / "short").write_text("12345")
    named = {"ADDRESS": engine.address, "KEY": key, "OTHER": tmp_path / "other", "SHORT": tmp_path / "short"}
    named["BUNDLE"] = bundles[0]
    port = ["--port", "0"] if words[0] == "serve" else []
    done = subprocess.run(
        [*COMMAND, *[str(named.get(word, word)) for word in words], *port],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2 and reason in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert "expected:" in done.stderr


def test_a_killed_engine_costs_its_requests_and_nothing_else(
    server: Running, engine: Engine, bundles: list[Path]
) -> None:
    assert engine.process is not None
    engine.process.kill()
    engine.process.communicate()
    wait_for(lambda: web.get(f"{server.url}/ready").status_code == 503)
    time.sleep(1)
    engine.start(bundles[0])
    wait_for(lambda: web.get(f"{server.url}/ready").status_code == 200)
    assert post(server, "/v1/completions", {"prompt": "x", "max_tokens": 2}).status_code == 200
