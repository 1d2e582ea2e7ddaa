"""Disks of gateways and engines that are full in the midst of requests: answers go on, and nothing is counted wrongly.

Real processes, each with all that it writes on a small file system.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml

from runtime.gateway.accounts.key_file import new_key
from runtime.gateway.fleet.release import PlanFile, ReleasePlan
from runtime.gateway.fleet.release_table import PlanTable
from tests import command, web
from tests.command import ROOT, Running
from tests.fleet_load import build_tiny, digests
from tests.integration.test_serve_elsewhere import Engine
from tests.small_disk import SmallDisk, small_disk
from tests.waiting import wait_for

BODY: dict[str, Any] = {"model": "tiny", "prompt": "The list is", "max_tokens": 300, "min_tokens": 300, "seed": 3}
SHORT = BODY | {"max_tokens": 5, "min_tokens": 5}
WRITTEN, LOST = (f'tapeout:traffic_calls_total{{outcome="{outcome}"}}' for outcome in ("written", "lost"))


class Gateways:
    """Two before one engine: ``counted`` with usage records, shared limits and a traffic log, ``plain`` with a traffic
    log alone. Each writes below a folder of its own on one disk.

    ``told``: prompt and new tokens of each request that ``counted`` has answered, by its id.
    """

    def __init__(self, folder: Path, disk: SmallDisk, engine: Engine) -> None:
        self.folder, self.disk, self.key = folder, disk, new_key()
        self.told: dict[str, int] = {}
        self._stack = ExitStack()
        entry = {"name": "k", "hash": self.key[1], "token_budget": 1_000_000}
        (folder / "keys.yaml").write_text(yaml.safe_dump({"keys": [entry]}))
        (folder / "engine.key").write_text("c" * 64)
        self.plans = PlanTable(f"sqlite:///{folder}/plans.db", "fleet")
        listed = {"engines": [engine.address], "key": "engine.key", "releases": f"sqlite:///{folder}/plans.db"}
        (folder / "fleet.yaml").write_text(yaml.safe_dump(listed))
        self.counted, self.plain = self.start_counted(), self._start("plain")

    def place(self, name: str) -> Path:
        return self.disk.folder / name

    def start_counted(self) -> Running:
        place = self.place("counted")
        place.mkdir(exist_ok=True)
        options = [
            f"--keys-file={self.folder}/keys.yaml",
            f"--usage-database=sqlite:///{place}/usage.db",
            f"--limits-database=sqlite:///{place}/limits.db",
            f"--usage-journal={place}/journal",
        ]
        return self._start("counted", *options)

    def _start(self, name: str, *options: str) -> Running:
        place = self.place(name)
        variables = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(place / "cache")}
        options = (*options, f"--traffic-log={place}/traffic", "--traffic-share=1", "--served-model-name=tiny")
        served = command.served(
            str(self.folder / "fleet.yaml"), *options, variables=variables, folder=self.folder, command="gateway"
        )
        return self._stack.enter_context(served)

    def ask(self, gateway: Running, body: dict[str, Any]) -> httpx2.Response:
        found = web.post(f"{gateway.url}/v1/completions", json=body, headers=self.headers(gateway), timeout=60)
        if found.status_code == 200 and gateway is self.counted:
            self.told[found.headers["x-request-id"]] = found.json()["usage"]["total_tokens"]
        return found

    def headers(self, gateway: Running) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key[0]}"} if gateway is self.counted else {}

    def stream(self, gateway: Running, begun: threading.Barrier) -> str:
        body, text, used = BODY | {"stream": True, "stream_options": {"include_usage": True}}, "", 0
        first = True
        with web.stream(
            "POST", f"{gateway.url}/v1/completions", json=body, headers=self.headers(gateway), timeout=60
        ) as answer:
            assert answer.status_code == 200
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                if first:
                    begun.wait(60)
                    first = False
                text += "".join(choice["text"] for choice in event["choices"])
                used = (event.get("usage") or {}).get("total_tokens", used)
            if gateway is self.counted:
                self.told[answer.headers["x-request-id"]] = used
        return text

    def metric(self, gateway: Running, name: str) -> float:
        lines = web.get(f"{gateway.url}/metrics", headers=self.headers(gateway), timeout=30).text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))

    def ready(self, gateway: Running) -> httpx2.Response:
        return web.get(f"{gateway.url}/ready", timeout=30)

    def records(self) -> dict[str, tuple[str, int]]:
        """Finish reason and tokens, by the client's id; each once."""
        with sqlite3.connect(self.place("counted") / "usage.db", timeout=30) as database:
            query = "SELECT request_id, finish_reason, prompt_tokens + completion_tokens FROM usage"
            found = database.execute(query).fetchall()
        assert len({id for id, *_ in found}) == len(found)
        return {id: (reason, tokens) for id, reason, tokens in found}

    def logged(self, name: str) -> int:
        """Lines of the traffic log, each of which is whole."""
        text = (self.place(name) / "traffic" / "traffic.jsonl").read_text()
        return sum(bool(json.loads(line)["responses"]) for line in text.splitlines())

    def close(self) -> None:
        self._stack.close()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, SmallDisk]]:
    """With its folder and caches on a disk of its own."""
    folder = tmp_path_factory.mktemp("fleet")
    build_tiny(folder)
    with small_disk(folder / "disk", 2) as disk:
        here = dict.fromkeys(("TAPEOUT_CACHE", "XDG_CACHE_HOME", "TMPDIR"), str(disk.folder))
        found = Engine(disk.folder, folder / "engine.key", **here)
        found.start(folder / "tiny")
        yield found, disk
        assert found.stop() == 0


@pytest.fixture
def gateways(engine: tuple[Engine, SmallDisk], tmp_path: Path) -> Iterator[Gateways]:
    with small_disk(tmp_path / "disk") as disk:
        found = Gateways(tmp_path, disk, engine[0])
        try:
            yield found
        finally:
            found.close()


def fill_among_streams(gateways: Gateways) -> None:
    """All end as they would have."""
    counted, plain = gateways.counted, gateways.plain
    wanted = [gateways.ask(one, BODY).json()["choices"][0]["text"] for one in (counted, plain)]
    begun = threading.Barrier(9)
    with ThreadPoolExecutor(8) as pool:
        running = [pool.submit(gateways.stream, one, begun) for one in (counted, plain) for _ in range(4)]
        begun.wait(60)
        gateways.disk.fill()
        assert {one.result() for one in running} == set(wanted) and len(set(wanted)) == 1


def fill_until_refused(gateways: Gateways) -> None:
    """What cannot be recorded is not admitted, and a balancer is told so."""
    refused: list[httpx2.Response] = []

    def is_refused() -> bool:
        found = gateways.ask(gateways.counted, SHORT)
        if found.status_code != 200:
            refused.append(found)
        return bool(refused)

    wait_for(is_refused)
    assert (refused[0].status_code, refused[0].json()["error"]["code"]) == (503, "usage_unavailable")
    told = gateways.ready(gateways.counted)
    assert told.status_code == 503 and "usage records cannot be written" in told.text
    assert web.get(f"{gateways.counted.url}/health", timeout=30).status_code == 200
    assert gateways.metric(gateways.counted, 'tapeout:requests_refused_total{reason="usage_unavailable"}') >= 1


def test_a_disk_that_is_full_for_a_while(gateways: Gateways) -> None:
    counted, plain = gateways.counted, gateways.plain
    fill_among_streams(gateways)
    fill_until_refused(gateways)

    def is_lost() -> bool:
        assert gateways.ask(plain, SHORT).status_code == 200
        return gateways.metric(plain, LOST) > 0

    wait_for(is_lost)
    (digest,) = set(digests(plain.url))
    plan = ReleasePlan(stable=digest, phase="done")
    gateways.plans.write(plan, None)
    wait_for(lambda: any("no copy of the release plan is kept" in line for line in plain.log))
    assert gateways.ready(plain).status_code == 200
    gateways.disk.free()
    wait_for(lambda: gateways.ready(counted).status_code == 200)
    for gateway in (counted, plain):
        assert gateways.ask(gateway, SHORT).status_code == 200
        copies = gateways.place("counted" if gateway is counted else "plain") / "cache" / "tapeout" / "plans"
        wait_for(lambda copies=copies: [PlanFile(path).read() for path in copies.glob("*.json")] == [plan])
    wait_for(lambda: gateways.metric(counted, "tapeout:usage_records_waiting") == 0)
    assert gateways.records() == {id: ("length", tokens) for id, tokens in gateways.told.items()}
    for name, gateway in (("counted", counted), ("plain", plain)):
        wait_for(lambda name=name, gateway=gateway: gateways.logged(name) == gateways.metric(gateway, WRITTEN))
        assert gateway.stop() == 0 and "Traceback" not in "".join(gateway.log)
    assert not list((gateways.place("counted") / "journal").glob("*.jsonl"))
    with sqlite3.connect(gateways.place("counted") / "limits.db") as database:
        (taken,) = database.execute("SELECT taken FROM limits WHERE kind = 'budget'").fetchone()
    assert taken == sum(gateways.told.values())


def test_a_gateway_that_is_killed_on_a_full_disk(gateways: Gateways) -> None:
    """It does not start until there is room, and says why; then each request is recorded, once."""
    fill_among_streams(gateways)
    fill_until_refused(gateways)
    gateways.counted.process.kill()
    gateways.counted.process.wait()
    with pytest.raises(AssertionError) as ended:
        gateways.start_counted()
    assert "Traceback" not in str(ended.value) and "expected:" in str(ended.value)
    gateways.disk.free()
    gateways.counted = gateways.start_counted()
    wait_for(lambda: gateways.ready(gateways.counted).status_code == 200)
    assert gateways.ask(gateways.counted, SHORT).status_code == 200
    assert gateways.counted.stop() == 0
    found = gateways.records()
    assert found.keys() == gateways.told.keys()
    # Of what ended when the journal was full already, it is known that it was admitted.
    assert {reason for reason, _ in found.values()} <= {"length", "interrupted"}
    for id, (reason, tokens) in found.items():
        assert tokens == gateways.told[id] or (reason == "interrupted" and tokens < gateways.told[id])


def test_an_engine_needs_no_disk(engine: tuple[Engine, SmallDisk], gateways: Gateways) -> None:
    """Neither to answer nor to start again."""
    found, disk = engine
    wanted = gateways.ask(gateways.plain, BODY).json()["choices"][0]["text"]
    disk.fill()
    try:
        assert gateways.ask(gateways.plain, BODY).json()["choices"][0]["text"] == wanted
        assert found.process is not None
        found.process.kill()
        found.process.communicate()
        found.start(found.folder.parent / "tiny")
        wait_for(lambda: gateways.ready(gateways.plain).status_code == 200)
        assert gateways.ask(gateways.plain, BODY).json()["choices"][0]["text"] == wanted
    finally:
        disk.free()
