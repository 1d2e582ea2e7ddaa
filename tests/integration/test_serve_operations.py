"""``tapeout serve`` with keys, usage records, a traffic log and metrics, when the server or its engine is killed."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import time
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import openai
import psutil
import pytest
import yaml

from runtime.gateway.accounts.key_file import new_key
from runtime.gateway.accounts.usage import connect, sums
from tests import web
from tests.command import COMMAND, ROOT
from tests.integration.test_serve import MODEL, Served, bundles, served
from tests.waiting import wait_for

__all__ = ["bundles"]
TALK: Any = [{"role": "user", "content": "I am ann@example.org. What is a list?"}]


class Place:
    """Files of one server, and how to start it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.url = folder, f"sqlite:///{folder}/usage.db"
        self.key, digest = new_key()
        entry = {"name": "team", "hash": digest, "tenant": "acme", "token_budget": 5000}
        (folder / "keys.yaml").write_text(yaml.safe_dump({"keys": [entry]}))

    @property
    def options(self) -> list[str]:
        place = self.folder
        return [
            f"--keys-file={place}/keys.yaml",
            f"--usage-database={self.url}",
            f"--usage-journal={place}/journal",
            f"--traffic-log={place}/traffic",
            "--traffic-share=1",
        ]

    def client(self, server: Served) -> openai.OpenAI:
        return web.openai_client(server.url, self.key, timeout=60)

    def rows(self) -> list[dict[str, Any]]:
        engine, table = connect(self.url)
        with engine.connect() as connection:
            found = [dict(row) for row in connection.execute(table.select()).mappings()]
        engine.dispose()
        return found


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def metric(server: Served, name: str) -> float:
    lines = web.get(f"{server.url}/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))


def test_usage_is_exact_when_the_server_is_killed(place: Place, bundles: tuple[Path, Path]) -> None:
    used = {"prompt": 0, "completion": 0}
    with served(str(bundles[0]), "--unsafe", *place.options) as server:
        with pytest.raises(openai.AuthenticationError):
            server.openai.models.list()
        api = place.client(server)
        for count in (3, 8, 1):
            answer = api.chat.completions.create(model=MODEL, messages=TALK, max_tokens=count, temperature=0, n=2)
            assert answer.usage is not None
            used["prompt"] += answer.usage.prompt_tokens
            used["completion"] += answer.usage.completion_tokens
        assert metric(server, "vllm:generation_tokens_total") == used["completion"]
        assert metric(server, "vllm:prompt_tokens_total") == used["prompt"]
        with pytest.raises(openai.BadRequestError):
            api.completions.create(model=MODEL, prompt="x", max_tokens=100_000)
        stream = api.completions.create(
            model=MODEL, prompt="The list", max_tokens=400, stream=True, extra_body={"ignore_eos": True}
        )
        seen = [next(stream) for _ in range(5)]
        server.process.kill()
        server.process.wait()
    assert len(seen) == 5
    with served(str(bundles[0]), "--unsafe", *place.options) as server:
        rows = place.rows()
        ended = [row for row in rows if row["finish_reason"] != "interrupted"]
        assert len(rows) == 4 and len(ended) == 3
        (interrupted,) = [row for row in rows if row not in ended]
        assert interrupted["prompt_tokens"] > 0 and interrupted["endpoint"] == "/v1/completions"
        assert sum(row["prompt_tokens"] for row in ended) == used["prompt"]
        assert sum(row["completion_tokens"] for row in ended) == used["completion"]
        assert {(row["key"], row["tenant"], row["model"]) for row in rows} == {("team", "acme", MODEL)}
        with pytest.raises(openai.RateLimitError) as over:
            place.client(server).completions.create(model=MODEL, prompt="x", max_tokens=400, n=13)
        assert over.value.code == "insufficient_quota"
        place.client(server).completions.create(model=MODEL, prompt="x", max_tokens=2)
        assert server.stop() == 0
    (total,) = sums(place.url)
    assert total.requests == 5
    log = [json.loads(line) for path in place.folder.glob("traffic/*.jsonl") for line in path.read_text().splitlines()]
    assert [entry["messages"][0]["content"] for entry in log if entry["messages"]] == [
        "I am [email]. What is a list?"
    ] * 3


def test_a_crash_of_the_engine_is_seen_and_counted(place: Place, bundles: tuple[Path, Path]) -> None:
    with served(str(bundles[0]), "--unsafe", *place.options) as server:
        api = place.client(server)

        def ready() -> int:
            return web.get(f"{server.url}/ready").status_code

        api.completions.create(model=MODEL, prompt="x", max_tokens=4, extra_body={"ignore_eos": True})
        before = metric(server, "tapeout:steps_total")
        stream = api.completions.create(
            model=MODEL, prompt="The list", max_tokens=400, stream=True, extra_body={"ignore_eos": True}
        )
        next(stream)
        for child in psutil.Process(server.process.pid).children():
            child.kill()
        with pytest.raises(openai.APIError):
            list(stream)
        wait_for(lambda: ready() == 200)
        api.completions.create(model=MODEL, prompt="x", max_tokens=4, extra_body={"ignore_eos": True})
        assert metric(server, "tapeout:steps_total") > before
        assert metric(server, "vllm:request_success_total") == 3
        assert server.stop() == 0
    assert sorted(row["finish_reason"] for row in place.rows()) == ["engine_down", "length", "length"]


def test_a_server_with_few_open_files(bundles: tuple[Path, Path]) -> None:
    """It says so, refuses connections beyond its room, and serves again once they are gone."""
    with served(str(bundles[0]), "--unsafe", open_files=128) as server:
        assert "leaves room for 64 connections" in "".join(server.log)
        address = httpx2.URL(server.url)
        held = [socket.create_connection((address.host, address.port or 80), timeout=20) for _ in range(200)]
        try:
            held[64].settimeout(20)
            answer = held[64].recv(1 << 16)
            assert b" 503 " in answer and b"too_many_connections" in answer
            time.sleep(1)
            process = psutil.Process(server.process.pid)
            before = process.cpu_times()
            time.sleep(2)
            after = process.cpu_times()
            assert after.user + after.system - before.user - before.system < 1
        finally:
            for connection in held:
                connection.close()
        answered = server.openai.with_options(max_retries=5).chat.completions.create
        assert answered(model=MODEL, messages=TALK, max_tokens=3).choices[0].finish_reason == "length"
        assert server.stop() == 0
    assert "Traceback" not in "".join(server.log)


def test_too_few_open_files_to_begin(bundles: tuple[Path, Path]) -> None:
    limit = partial(resource.setrlimit, resource.RLIMIT_NOFILE, (12, 12))
    done = subprocess.run(
        [*COMMAND, "serve", str(bundles[0]), "--unsafe", "--port", "0"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        preexec_fn=limit,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 2 and "ulimit -n" in done.stderr and "Traceback" not in done.stderr, done.stderr
