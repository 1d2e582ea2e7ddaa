"""The head of a cluster of Ray dies with all its processes, Redis keeps its state, and another head goes on with that.

The head has a PID namespace of its own, with which all of it dies at once, as a machine does. Another node, where the
engines are, is beside it. It takes minutes on two cores: FLEET_DRILLS=all.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

import psutil
import pytest

from runtime.fleet.ray_cluster import LOOPBACK, MARK, TOKEN_PATH, LocalRay
from tests.fleet_load import Load, answers, build_tiny, free_port, lost, ready
from tests.integration.test_fleet_on_ray import Fleet, thorough
from tests.integration.test_fleet_on_ray import pytestmark as with_ray
from tests.waiting import wait_for

pytestmark = [with_ray, thorough]
AWAY_SECONDS = 75.0  # without Redis, Ray ends everything after 60
NAME = f"head-{os.getpid()}"


@contextmanager
def running_redis() -> Generator[str]:
    """HOST:PORT."""
    if shutil.which("redis-server") is None:
        pytest.skip("no redis-server; `apt-get install redis-server`")
    port = free_port()
    command = ["redis-server", "--bind", LOOPBACK, "--port", str(port), "--save", "", "--appendonly", "no"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd="/tmp")
    try:
        wait_for(lambda: answers_at(port))
        yield f"{LOOPBACK}:{port}"
    finally:
        process.kill()
        process.wait()


def answers_at(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((LOOPBACK, port)) == 0


class Cluster:
    """``ray``: finds its processes, all of which have its folder in their environment."""

    def __init__(self, redis: str) -> None:
        self.ray, self._port, self._heads = LocalRay(NAME), free_port(), 0
        self.ray.make_folder()
        (self.ray.folder / "token").write_text("5" * 64)
        self.address = f"{LOOPBACK}:{self._port}"
        self.variables = {
            "RAY_AUTH_MODE": "token",
            TOKEN_PATH: str(self.ray.folder / "token"),
            "RAY_gcs_rpc_server_reconnect_timeout_s": "3600",
        }
        self._environment = {**os.environ, **self.variables, MARK: str(self.ray.folder), "OMP_NUM_THREADS": "1"}
        self._redis = {"RAY_REDIS_ADDRESS": redis, "RAY_external_storage_namespace": NAME}
        self._head: subprocess.Popen[bytes] | None = None
        self._keeping: threading.Thread | None = None
        self._wanted = False

    def start_head(self) -> None:
        """It is started again where it has not come up, as whoever runs it would: Ray gives a start 30 seconds."""
        self._keeping = threading.Thread(target=self._keep_head, daemon=True)
        self._keeping.start()
        # Written once it is up; the socket answers before.
        wait_for(lambda: (self._disk / "ray_current_cluster").exists(), 300)

    @property
    def _disk(self) -> Path:
        """Of the head; each has a new one."""
        return self.ray.folder / f"head{self._heads}"

    def _keep_head(self) -> None:
        self._wanted = True
        while self._wanted:
            self._heads += 1
            # `ray start` looks at all processes for a Ray that runs already, and would find the other node.
            machine = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
            options = ["--head", "--block", f"--port={self._port}", "--num-cpus=0", "--include-dashboard=false"]
            self._head = self._start(machine, self._disk, [*options, "--disable-usage-stats"], self._redis)
            self._head.wait()

    def start_node(self) -> None:
        self._start([], self.ray.folder / "node", [f"--address={self.address}", "--num-cpus=4", "--block"], {})

    def kill_head(self) -> None:
        """All of its processes die with the first one of its namespace."""
        assert self._head is not None and self._keeping is not None
        self._wanted = False
        self._head.kill()
        self._keeping.join()
        wait_for(lambda: not answers_at(self._port))

    def stop(self) -> None:
        self._wanted = False
        self.ray.stop()

    def _start(
        self, machine: list[str], place: Path, options: list[str], variables: dict[str, str]
    ) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--node-ip-address={LOOPBACK}"]
        return subprocess.Popen(
            [*machine, *command, f"--temp-dir={place}", *options],
            env=self._environment | variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            cwd="/",
        )


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    tried = subprocess.run(["unshare", "--pid", "--fork", "--mount-proc", "true"], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"no PID namespaces here: {tried.stderr.strip()}")
    with running_redis() as redis:
        found = Cluster(redis)
        try:
            found.start_head()
            found.start_node()
            yield found
        finally:
            found.stop()


@pytest.fixture
def fleet(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fleet:
    for name, value in cluster.variables.items():
        monkeypatch.setenv(name, value)
    build_tiny(tmp_path)
    found = Fleet(tmp_path)
    found.file.write_text(
        f"""
key: engine.key
up:
  name: {NAME}
  ray: {cluster.address}
  bundle: tiny
  engines: {{cpus: 0.1, options: [--unsafe, --threads, "1"]}}
  gateways: {{cpus: 0.1, port: {found.port}, options: [--served-model-name, tiny]}}
  drain_seconds: 20
scaling: {{least: 2, most: 3}}
"""
    )
    return found


def engines(status: dict[str, Any]) -> dict[str, int]:
    """Processes by address."""
    return {one["address"]: one["process"] for one in status["engines"]}


def test_the_head_dies_and_another_one_has_its_state(cluster: Cluster, fleet: Fleet) -> None:
    before = fleet.told("up")
    wait_for(lambda: len(ready(fleet.url)) == 2)
    with Load(fleet.url, answers(fleet.url)) as load:
        load.more(4)
        cluster.kill_head()
        killed = monotonic()
        assert "no Ray answers" in fleet.run("status", code=2)
        load.more(40)
        # Their replicas look after them meanwhile. Planted: they wait for Ray.
        (address, process), *_ = engines(before).items()
        os.kill(process, signal.SIGKILL)
        wait_for(lambda: address not in ready(fleet.url))
        wait_for(lambda: sorted(ready(fleet.url)) == sorted(engines(before)))
        wait_for(lambda: monotonic() > killed + AWAY_SECONDS)
        cluster.start_head()
        wait_for(lambda: is_whole(fleet), 400)
        after = fleet.told("status")
        assert engines(after).items() & engines(before).items() == engines(before).items() - {(address, process)}
        assert engines(after).keys() == engines(before).keys()
        assert fleet.told("scale", "3")["pools"]["mixed"]["fixed"] == 3
        wait_for(lambda: len(ready(fleet.url)) == 3)
        load.more(8)
        load.end()
    assert lost(fleet.url) == 0
    status = fleet.told("status")
    processes = [one["process"] for one in (*status["engines"], *status["gateways"])]
    fleet.run("down")
    wait_for(lambda: not any(psutil.pid_exists(process) for process in processes))
    assert "is not up" in fleet.run("status", code=2)
    cluster.stop()
    assert cluster.ray.processes() == []


def is_whole(fleet: Fleet) -> bool:
    try:
        status = fleet.told("status")
    except AssertionError:  # Ray or the roster is not back yet
        return False
    return status["state"] == "RUNNING" and len(status["engines"]) == 2 and len(status["gateways"]) == 1
