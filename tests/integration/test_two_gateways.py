"""Two ``tapeout gateway`` before two ``tapeout engine``: one of them dies, and limits and usage are those of both."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml

from runtime.gateway.accounts.key_file import new_key
from runtime.gateway.accounts.leases import LEASE_SECONDS
from tests import command, web
from tests.command import ROOT, Running
from tests.exported import build_float, tiny_graph
from tests.integration.test_serve_elsewhere import Engine
from tests.native import own_cache
from tests.stepped_clock import SteppedClock
from tests.waiting import wait_for

BUDGET, TOKENS, PACE = 6000, 60, 60
TRIES = int(os.environ.get("GATEWAY_KILLS", "2"))
BODY: dict[str, Any] = {"model": "tiny", "prompt": "The list is", "min_tokens": TOKENS, "max_tokens": TOKENS, "seed": 3}


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Engine]]:
    folder = tmp_path_factory.mktemp("fleet")
    with pytest.MonkeyPatch.context() as patch:
        own_cache(patch, folder / "cache")
        bundle = build_float(tiny_graph(), folder / "tiny", 32).folder
    (folder / "engine.key").write_text("c" * 64)
    found = [Engine(folder, folder / "engine.key") for _ in range(2)]
    for engine in found:
        engine.start(bundle)
    listed = {"engines": [engine.address for engine in found], "key": "engine.key"}
    (folder / "fleet.yaml").write_text(yaml.safe_dump(listed))
    yield found
    for engine in found:
        assert engine.stop() == 0


class Gateways:
    """Two that share limits and the database of usage records. ``keys``: secrets by name."""

    def __init__(self, engines: list[Engine], folder: Path) -> None:
        self._listed, self.folder, self.keys = str(engines[0].folder / "fleet.yaml"), folder, dict[str, str]()
        entries: list[dict[str, Any]] = []
        named = {"plain": {}, "other": {}, "poor": {"token_budget": BUDGET}, "slow": {"requests_per_minute": 20}}
        named |= {"paced": {"requests_per_minute": PACE}}
        for name, limits in named.items():
            self.keys[name], digest = new_key()
            entries.append({"name": name, "hash": digest, **limits})
        (folder / "keys.yaml").write_text(yaml.safe_dump({"keys": entries}))
        self._stack = ExitStack()
        self.running = [self.start(place) for place in range(2)]

    def start(self, place: int) -> Running:
        databases = [f"--{name}-database=sqlite:///{self.folder}/{name}.db" for name in ("usage", "limits")]
        options = ["--keys-file", str(self.folder / "keys.yaml"), "--served-model-name", "tiny", *databases]
        variables = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(self.folder / "cache")}
        journal = f"--usage-journal={self.folder}/journal-{place}"
        served = command.served(
            self._listed, *options, journal, variables=variables, folder=self.folder, command="gateway"
        )
        return self._stack.enter_context(served)

    def close(self) -> None:
        self._stack.close()

    def ask(self, place: int, key: str, **more: Any) -> httpx2.Response:
        url, header = f"{self.running[place].url}/v1/completions", {"authorization": f"Bearer {self.keys[key]}"}
        return web.post(url, json=BODY | more, headers=header, timeout=60)

    def replicas(self, place: int) -> list[dict[str, Any]]:
        header = {"authorization": f"Bearer {self.keys['plain']}"}
        found: list[dict[str, Any]] = web.get(f"{self.running[place].url}/fleet", headers=header).json()["replicas"]
        return found


@pytest.fixture(scope="module")
def gateways(engines: list[Engine], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateways]:
    found = Gateways(engines, tmp_path_factory.mktemp("gateways"))
    try:
        for place in range(2):
            wait_for(lambda place=place: all(one["state"] == "ready" for one in found.replicas(place)))
        yield found
    finally:
        found.close()


def records(gateways: Gateways) -> list[tuple[str, str, str, int]]:
    """Client's id, key, finish reason, and tokens."""
    connection = sqlite3.connect(gateways.folder / "usage.db", timeout=30)
    query = "SELECT request_id, key, finish_reason, prompt_tokens + completion_tokens FROM usage"
    found = connection.execute(query).fetchall()
    connection.close()
    return found


def test_a_budget_holds_over_both(gateways: Gateways) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda number: gateways.ask(number % 2, "poor"), range(200)))
    counts = {status: sum(one.status_code == status for one in answers) for status in (200, 429)}
    assert sum(counts.values()) == 200 and counts[429]
    assert {one.json()["error"]["code"] for one in answers if one.status_code == 429} == {"insufficient_quota"}
    used = sum(one.json()["usage"]["total_tokens"] for one in answers if one.status_code == 200)
    assert BUDGET - 8 * 2 * TOKENS < used <= BUDGET, "what was reserved for requests that ran may have been refused"
    wait_for(lambda: sum(tokens for _, key, _, tokens in records(gateways) if key == "poor") == used)


def test_a_rate_holds_over_both(gateways: Gateways) -> None:
    begin = time.monotonic()
    answers = [gateways.ask(number % 2, "slow", max_tokens=1, min_tokens=1) for number in range(30)]
    seconds = time.monotonic() - begin
    admitted = [one for one in answers if one.status_code == 200]
    refused = [one for one in answers if one.status_code == 429]
    assert len(admitted) + len(refused) == 30 and refused
    # From a full bucket of 20, and one every three seconds; one gateway may hold the last one for a moment.
    assert 19 <= len(admitted) <= 20 + seconds / 3
    assert all(int(one.headers["retry-after-ms"]) > 0 for one in refused)
    assert {one.headers["x-ratelimit-limit-requests"] for one in answers} == {"20"}


def test_a_gateway_that_is_killed_takes_nothing_with_it(gateways: Gateways) -> None:
    """Each client asks one gateway, and the other one when that fails. Each request is recorded once."""

    def client(number: int) -> tuple[int, list[str]]:
        place, failures, wanted = number % 2, 0, list[str]()
        for _ in range(25):
            try:
                answer = gateways.ask(place, "plain", n=2)
            except httpx2.HTTPError:
                failures += 1
                place = 1 - place
                answer = gateways.ask(place, "plain", n=2)
            assert answer.status_code == 200
            wanted.append(answer.headers["x-request-id"])
            texts.add(tuple(choice["text"] for choice in answer.json()["choices"]))
        return failures, wanted

    texts = set[tuple[str, ...]]()
    before = len(records(gateways))
    with ThreadPoolExecutor(12) as pool:
        clients = [pool.submit(client, number) for number in range(12)]
        wait_for(lambda: sum(one["running"] for one in gateways.replicas(1)) >= 8)
        gateways.running[0].process.kill()
        found = [one.result() for one in clients]
    assert [failures for failures, _ in found[1::2]] == [0] * 6, "clients of the gateway that lives saw nothing"
    assert [failures for failures, _ in found[0::2]] == [1] * 6
    assert len(texts) == 1
    wait_for(lambda: sum(one["running"] for one in gateways.replicas(1)) == 0)  # also those of the dead one
    gateways.running[0].process.wait()
    gateways.running[0] = gateways.start(0)  # replays its journal
    answered = {id for _, wanted in found for id in wanted}
    wait_for(lambda: len(records(gateways)) >= before + 12 * 25 + 1)
    mine = records(gateways)[before:]
    ids = [id for id, *_ in mine]
    assert len(set(ids)) == len(ids) and answered <= set(ids)
    assert {reason for id, _, reason, _ in mine if id in answered} == {"length"}
    # A request that was cut is recorded as far as it was known; one that had been answered, whole.
    assert {reason for id, _, reason, _ in mine if id not in answered} <= {"interrupted", "length"}


def processor_seconds(processes: Sequence[subprocess.Popen[Any]]) -> float:
    """That they have used so far, to a hundredth."""
    ticks = 0
    for process in processes:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def test_a_stream_that_is_cut_is_asked_again_at_the_other_gateway(gateways: Gateways, engines: list[Engine]) -> None:
    """The client has drawn no seed: its Idempotency-Key gives the same answer, of which it has the beginning.

    Planted: a seed that each gateway draws by itself.
    """
    body = BODY | {"stream": True, "temperature": 0.9, "min_tokens": 200, "max_tokens": 200}
    del body["seed"]
    begun = set[tuple[int, str]]()  # streams with some text, by gateway and name

    def stream(place: int, name: str) -> tuple[str, bool, tuple[float, float]]:
        """Text, whether it is whole, and seconds until it began, with those of processors that its servers took."""
        header = {"authorization": f"Bearer {gateways.keys['plain']}", "idempotency-key": name}
        processes = [gateways.running[place].process, *(engine.process for engine in engines if engine.process)]
        text, first, begin, used = "", (0.0, 0.0), time.monotonic(), processor_seconds(processes)
        url = f"{gateways.running[place].url}/v1/completions"
        try:
            with client.stream("POST", url, json=body, headers=header) as answer:
                assert answer.status_code == 200
                for line in answer.iter_lines():
                    if line == "data: [DONE]":
                        return text, True, first
                    if line.startswith("data: "):
                        if not first[0]:
                            first = time.monotonic() - begin, processor_seconds(processes) - used
                        text += json.loads(line[6:])["choices"][0]["text"]
                        if text:
                            begun.add((place, name))
        except httpx2.HTTPError:
            pass
        return text, False, first

    def kill(dead: int, attempt: int) -> tuple[float, float]:
        """Until the last of the streams that were cut had begun again, see :func:`stream`."""
        names = [f"{attempt}-{number}" for number in range(8)]
        clients = [pool.submit(stream, number % 2, name) for number, name in enumerate(names)]
        wait_for(lambda: sum(one["requests"] for one in gateways.replicas(dead)) == 4)
        wait_for(lambda: any((dead, name) in begun for name in names))
        gateways.running[dead].process.kill()
        found = [one.result() for one in clients]
        cut = [number for number, (_, whole, _) in enumerate(found) if not whole]
        assert cut and all(number % 2 == dead for number in cut), "streams of the gateway that lives went on"
        again = list(pool.map(lambda number: stream(1 - dead, names[number]), cut))
        for number, (text, whole, _) in zip(cut, again, strict=True):
            assert whole and text.startswith(found[number][0])
        assert len({text for text, *_ in again}) == len(cut), "each key has an answer of its own"
        assert any(found[number][0] for number in cut), "one was cut in its midst"
        gateways.running[dead].process.wait()
        gateways.running[dead] = gateways.start(dead)
        wait_for(lambda: all(one["state"] == "ready" for one in gateways.replicas(dead)))
        return max(seconds for *_, seconds in again)

    # One for all: to make one reads certificates, which takes 20 ms of a processor, and is not what is measured.
    with ThreadPoolExecutor(8) as pool, web.client(timeout=60) as client:
        found = [kill(attempt % 2, attempt) for attempt in range(TRIES)]
    print("first event at the other gateway, the last stream of each try, and processor time of gateway and engines:")
    print(*(f"{seconds:.3f} s ({used:.2f} s)" for seconds, used in found), sep=", ")


def test_the_clock_steps_among_streams(engines: list[Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A day ahead, and a day back, for both gateways and what SQLite takes for the time. Planted: a rate that is empty
    until the clock is where it was.
    """
    clock = SteppedClock(tmp_path)
    for name, value in clock.variables.items():
        monkeypatch.setenv(name, value)
    gateways, day = Gateways(engines, tmp_path), 86400
    try:
        for place in range(2):
            wait_for(lambda place=place: all(one["state"] == "ready" for one in gateways.replicas(place)))
        wanted = gateways.ask(0, "plain", min_tokens=200, max_tokens=200).json()["choices"][0]["text"]
        used, admitted, begin = 0, 0, time.monotonic()
        with ThreadPoolExecutor(8) as pool:
            for step in (day, -day, 0):
                running = [
                    pool.submit(gateways.ask, number % 2, "plain", min_tokens=200, max_tokens=200)
                    for number in range(8)
                ]
                wait_for(lambda: sum(one["running"] for one in gateways.replicas(0)) == 8)
                clock.set(step)
                later = [gateways.ask(number % 2, "plain") for number in range(4)]
                assert {one.status_code for one in later} == {200}
                assert all(abs(one.json()["created"] - time.time() - step) < 3600 for one in later), "it has stepped"
                for one in running:
                    answer = one.result()
                    assert answer.status_code == 200 and answer.json()["choices"][0]["text"] == wanted
                poor = [gateways.ask(number % 2, "poor") for number in range(20)]
                used += sum(one.json()["usage"]["total_tokens"] for one in poor if one.status_code == 200)
                slow = [gateways.ask(number % 2, "slow", max_tokens=1, min_tokens=1) for number in range(25)]
                admitted += sum(one.status_code == 200 for one in slow)
                wait_for(lambda: gateways.ask(0, "slow", max_tokens=1, min_tokens=1).status_code == 200, 30)
        assert used <= BUDGET
        # A bucket of 20 is full at first, and once more with each of two steps ahead: to `day`, and from `-day` to 0.
        assert 19 <= admitted <= 3 * 20 + (time.monotonic() - begin) / 3
        assert not any(one["state"] != "ready" for place in range(2) for one in gateways.replicas(place))
        asked = 1 + 3 * (8 + 4)
        wait_for(lambda: sum(key == "plain" for _, key, *_ in records(gateways)) == asked)
        ids = [id for id, *_ in records(gateways)]
        assert len(set(ids)) == len(ids), "each request is recorded once"
    finally:
        gateways.close()


def test_another_tenant_with_the_same_idempotency_key_draws_otherwise(gateways: Gateways) -> None:
    """Else who guesses a key sees what another one was answered. Planted: a seed of the key alone."""
    body = {name: value for name, value in BODY.items() if name != "seed"} | {"temperature": 0.9}

    def text(place: int, key: str) -> str:
        header = {"authorization": f"Bearer {gateways.keys[key]}", "idempotency-key": "1"}
        answer = web.post(f"{gateways.running[place].url}/v1/completions", json=body, headers=header, timeout=60)
        return answer.json()["choices"][0]["text"]

    assert text(0, "plain") == text(1, "plain") != text(1, "other")


def stop(gateways: Gateways, place: int) -> None:
    """Not in the midst of a transaction: SQLite keeps its lock until the process goes on."""
    process = gateways.running[place].process
    while True:
        process.send_signal(signal.SIGSTOP)
        try:
            with sqlite3.connect(gateways.folder / "limits.db", timeout=2, isolation_level=None) as database:
                database.execute("BEGIN IMMEDIATE")
                database.execute("ROLLBACK")
            return
        except sqlite3.OperationalError:
            process.send_signal(signal.SIGCONT)
            time.sleep(0.1)


@pytest.mark.skipif(os.environ.get("FLEET_DRILLS") != "all", reason="takes minutes: FLEET_DRILLS=all")
def test_what_a_stopped_gateway_holds_of_a_rate_goes_to_the_other_one(gateways: Gateways) -> None:
    """After 90 seconds, and it does not use that when it goes on."""

    def admitted(place: int, times: int) -> int:
        return sum(gateways.ask(place, "paced", **one).status_code == 200 for _ in range(times))

    one = {"max_tokens": 1, "min_tokens": 1}
    assert admitted(0, 10) == 10
    stop(gateways, 0)
    try:
        time.sleep(LEASE_SECONDS + 10)
        begin = time.monotonic()
        assert admitted(1, PACE) == PACE, "nothing is kept for the one that is stopped"
    finally:
        gateways.running[0].process.send_signal(signal.SIGCONT)
    late = admitted(0, 20) + admitted(1, 20)
    assert late <= (time.monotonic() - begin) * PACE / 60 + 1
    wait_for(lambda: gateways.ask(0, "paced", **one).status_code == 200)


def test_a_gateway_that_drains_ends_its_requests_and_no_others(gateways: Gateways) -> None:
    with ThreadPoolExecutor(8) as pool:
        running = [pool.submit(gateways.ask, number % 2, "plain", n=4) for number in range(8)]
        wait_for(lambda: sum(one["requests"] for one in gateways.replicas(0)) > 0)
        gateways.running[0].process.send_signal(signal.SIGTERM)
        statuses = [one.result().status_code for one in running]
    assert gateways.running[0].process.wait(60) == 0
    assert statuses[1::2] == [200] * 4 and set(statuses[0::2]) <= {200, 503}
    assert gateways.ask(1, "plain").status_code == 200
