"""The fleet of deploy/fleet/compose.yaml as processes: its commands and variables, with places of this machine."""

from __future__ import annotations

import os
import re
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
import yaml

from tests import command, web
from tests.command import COMMAND, ROOT, Running
from tests.exported import build_float, tiny_graph
from tests.native import own_cache
from tests.postgres import running_postgres
from tests.waiting import wait_for

FOLDER = ROOT / "deploy" / "fleet"
SERVICES: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]
DATABASE = "postgresql+psycopg://tapeout@postgres/tapeout"
KEY = "a-key-of-the-test"
GIVEN = {"POSTGRES_PASSWORD": "p", "TAPEOUT_API_KEYS": KEY}
HEADERS = {"authorization": f"Bearer {KEY}"}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def interpolated(text: str) -> str:
    """As compose does for ``${NAME:-default}`` and ``${NAME:?message}``."""
    return re.sub(r"\$\{(\w+):[-?][^}]*\}", lambda found: GIVEN[found[1]], text)


class Composed:
    """``places``: what a path or an address of the file is here, for all services."""

    def __init__(self, folder: Path, bundle: Path, database: str) -> None:
        self._folder = folder
        (folder / "engine.key").write_text("d" * 64)
        self.ports = {name: free_port() for name in SERVICES if name.startswith("engine")}
        self._places = {
            DATABASE: database,
            "/artifacts/candidate": str(bundle),
            "/run/secrets/engine_key": str(folder / "engine.key"),
        }
        self._places |= {f"tcp:{name}:7000": f"tcp:127.0.0.1:{port}" for name, port in self.ports.items()}
        self.engines: dict[str, subprocess.Popen[bytes]] = {}
        self.gateways: dict[str, Running] = {}
        self._stack = ExitStack()

    def here(self, name: str, text: str) -> str:
        own = self._folder / name
        own.mkdir(exist_ok=True)
        places = self._places | {"/var/lib/tapeout": str(own), "/var/cache/tapeout": str(own / "cache")}
        if name in self.ports:
            places["tcp:0.0.0.0:7000"] = f"tcp:127.0.0.1:{self.ports[name]}"
        for volume in SERVICES[name]["volumes"]:
            source, target, *_ = volume.split(":")
            if source.startswith("./"):
                places[target] = str(own / Path(target).name)
        for there, place in places.items():
            text = text.replace(there, place)
        return text

    def start(self, name: str) -> None:
        service = SERVICES[name]
        for volume in service["volumes"]:
            source, target, *_ = volume.split(":")
            if source.startswith("./"):
                copied = self.here(name, (FOLDER / source).read_text())
                (self._folder / name / Path(target).name).write_text(copied)
        kind, *words = [self.here(name, word) for word in service["command"]]
        own = {key: self.here(name, interpolated(value)) for key, value in service["environment"].items()}
        variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **own}
        if kind == "engine":  # the bundle of the test has no verdict
            command_line = [*COMMAND, kind, *words, "--unsafe", "--threads", "1"]
            self.engines[name] = subprocess.Popen(command_line, env=variables, stderr=subprocess.DEVNULL)
            self._stack.callback(self.engines[name].kill)
        else:
            served = command.served(*words, variables=variables, folder=self._folder / name, command=kind)
            self.gateways[name] = self._stack.enter_context(served)

    def close(self) -> None:
        self._stack.close()

    def fleet(self, name: str) -> list[dict[str, Any]]:
        """Its engines, as a gateway sees them."""
        found: list[dict[str, Any]] = web.get(f"{self.gateways[name].url}/fleet", headers=HEADERS, timeout=30).json()[
            "replicas"
        ]
        return found

    def replicas(self, name: str) -> dict[str, str]:
        return {one["address"]: one["state"] for one in self.fleet(name)}

    def answers(self, name: str) -> bool:
        body = {"model": "engine", "prompt": "The list is", "max_tokens": 20, "seed": 1}
        found = web.post(f"{self.gateways[name].url}/v1/completions", json=body, headers=HEADERS, timeout=60)
        return found.status_code == 200


@pytest.fixture(scope="module")
def database() -> Iterator[str]:
    with running_postgres() as found:
        yield found.url


@pytest.fixture(scope="module")
def composed(database: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Composed]:
    folder = tmp_path_factory.mktemp("composed")
    with pytest.MonkeyPatch.context() as patch:
        own_cache(patch, folder / "cache")
        bundle = build_float(tiny_graph(), folder / "tiny", 32).folder
    found = Composed(folder, bundle, database)
    try:
        for name in sorted(set(SERVICES) - {"postgres"}):  # engines first
            found.start(name)
        yield found
    finally:
        found.close()


def rows(database: str, query: str) -> list[Any]:
    engine = sa.create_engine(database)
    with engine.connect() as connection:
        found = list(connection.execute(sa.text(query)))
    engine.dispose()
    return found


def test_the_fleet_of_compose_answers_and_survives_its_parts(composed: Composed, database: str) -> None:
    addresses = {f"tcp:127.0.0.1:{port}": "ready" for port in composed.ports.values()}
    for name in composed.gateways:
        wait_for(lambda name=name: composed.replicas(name) == addresses)
        assert composed.answers(name)
    found = composed.fleet("gateway-1")
    assert len({one["digest"] for one in found}) == 1 and all(one["level"] for one in found)
    assert {row.address for row in rows(database, "SELECT address FROM engine_addresses")} == set(addresses)

    composed.engines["engine-1"].kill()
    assert all(composed.answers(name) for name in composed.gateways)
    composed.engines["engine-2"].terminate()
    assert composed.engines["engine-2"].wait(60) == 0
    gone = f"tcp:127.0.0.1:{composed.ports['engine-2']}"
    assert gone not in [row.address for row in rows(database, "SELECT address FROM engine_addresses")]
    for name in composed.engines:
        composed.start(name)
    for name in composed.gateways:
        wait_for(lambda name=name: composed.replicas(name) == addresses)

    composed.gateways["gateway-1"].process.kill()
    assert composed.answers("gateway-2")
    wait_for(lambda: rows(database, "SELECT count(*) FROM usage")[0][0] >= 5)
    # gateway-1 died before it gave back what it held, so more may be taken than was used.
    (used,) = rows(database, "SELECT sum(prompt_tokens + completion_tokens) FROM usage")[0]
    assert composed.gateways["gateway-2"].stop() == 0
    (taken,) = rows(database, "SELECT taken FROM limits WHERE kind = 'budget'")[0]
    assert taken >= used > 0
