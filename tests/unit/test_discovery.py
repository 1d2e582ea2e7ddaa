"""Where engines are found besides the file: a table that they write, and the API of Kubernetes."""

from __future__ import annotations

import json
import os
import sqlite3
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from pipeline.cli.gateway import find_engines, find_plans, find_source
from runtime.gateway.fleet import table_discovery
from runtime.gateway.fleet.discovery import (
    Discovery,
    DiscoveryError,
    FleetFile,
    FleetFileError,
    FromFile,
    KubernetesService,
    Listing,
)
from runtime.gateway.fleet.kubernetes_discovery import KubernetesDiscovery
from runtime.gateway.fleet.release import PlanAwayError, PlanFile, ReleasePlan, ReleasePlanError, plan_path
from runtime.gateway.fleet.release_table import PlanTable
from runtime.gateway.fleet.table_discovery import TableDiscovery
from runtime.wire import engine_table
from runtime.wire.engine_table import Announcement, EngineTable
from tapeout.errors import SignatureError, TapeoutError
from tests.postgres import running_postgres
from tests.waiting import wait_for

KEY = b"k" * 32


@pytest.fixture
def key(tmp_path: Path) -> Path:
    found = tmp_path / "engine.key"
    found.write_bytes(KEY)
    return found


class LocalTime:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(table_discovery, "monotonic", lambda: self.now)


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch) -> LocalTime:
    return LocalTime(monkeypatch)


def age(url: str, seconds: float) -> None:
    """As a step of the database's clock does, or time in which nobody could write."""
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        connection.execute(sa.text("UPDATE engine_addresses SET seen_at = seen_at - :seconds"), {"seconds": seconds})
    engine.dispose()


def test_a_database_of_an_earlier_version_can_be_used(tmp_path: Path) -> None:
    """Planted: the table of that version, which has columns that must be filled."""
    url = f"sqlite:///{tmp_path}/fleet.db"
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        columns = ", ".join(f"{name} VARCHAR(255) NOT NULL" for name in ("address", "digest", "level"))
        connection.execute(sa.text(f"CREATE TABLE engines ({columns}, seen_at DOUBLE NOT NULL)"))
    engine.dispose()
    table = EngineTable(url)
    table.write("tcp:10.0.0.1:7000")
    assert [*table.read()] == ["tcp:10.0.0.1:7000"]
    table.close()


@pytest.mark.parametrize("database", ["sqlite", "postgres"])
def test_an_engine_is_listed_from_its_first_word_to_its_last(
    database: str, tmp_path: Path, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_table, "BEAT_SECONDS", 0.05)
    with running_postgres() if database == "postgres" else nullcontext() as server:
        url = server.url if server else f"sqlite:///{tmp_path}/fleet.db"
        found = TableDiscovery(url, key)
        assert found.read() == Listing((), KEY)
        with Announcement(url, "tcp:10.0.0.2:7000") as second, Announcement(url, "tcp:10.0.0.1:7000") as first:
            assert found.read().engines == (), "nothing is written before an engine is open"
            first.begin()
            second.begin()
            wait_for(lambda: found.read().engines == ("tcp:10.0.0.1:7000", "tcp:10.0.0.2:7000"))
            assert all(seconds < 5 for seconds in EngineTable(url).read().values())
            first.begin()
            age(url, 1000)
            wait_for(lambda: EngineTable(url).read()["tcp:10.0.0.1:7000"] < 10)
        assert found.read().engines == ()


def test_an_engine_that_died_leaves_the_list(tmp_path: Path, key: Path, local: LocalTime) -> None:
    url = f"sqlite:///{tmp_path}/fleet.db"
    table, found = EngineTable(url), TableDiscovery(url, key)
    table.write("tcp:h:1")
    assert found.read().engines == ("tcp:h:1",)
    age(url, 11)
    assert TableDiscovery(url, key).read().engines == (), "whoever starts now does not know it"
    local.now += 1
    assert found.read().engines == ("tcp:h:1",)
    local.now += 10
    assert found.read().engines == ()
    local.now += 1
    assert found.read().engines == ()


def test_a_database_that_was_away_and_a_step_of_its_clock_take_no_engine(
    tmp_path: Path, key: Path, local: LocalTime
) -> None:
    url = f"sqlite:///{tmp_path}/fleet.db"
    table, found = EngineTable(url), TableDiscovery(url, key)
    table.write("tcp:h:1")
    assert found.read().engines == ("tcp:h:1",)
    for step in (3600, -3600, 60):  # of ages
        local.now += 60  # in which nobody could read or write
        age(url, step)
        assert found.read().engines == ("tcp:h:1",)
        local.now += 1
        table.write("tcp:h:1")
        assert found.read().engines == ("tcp:h:1",)


def test_a_database_that_is_away_is_said_and_addresses_need_a_key(tmp_path: Path, key: Path) -> None:
    with pytest.raises(DiscoveryError, match="cannot be read"):
        TableDiscovery(f"sqlite:///{tmp_path}/no/such/folder.db", key).read()
    with pytest.raises(TapeoutError, match="cannot be opened"):
        TableDiscovery("nonsense", key)
    with pytest.raises(TapeoutError, match="is mysql"):
        TableDiscovery("mysql://h/x", key)
    url = f"sqlite:///{tmp_path}/fleet.db"
    EngineTable(url).write("tcp:h:1")
    with pytest.raises(SignatureError, match="without a key"):
        TableDiscovery(url, None).read()


def test_a_file_names_one_source(tmp_path: Path, key: Path) -> None:
    path = tmp_path / "fleet.yaml"
    for text, kind in (
        ("table: sqlite:///x.db\nkey: engine.key", TableDiscovery),
        ("kubernetes: {service: engines}\nkey: engine.key", KubernetesDiscovery),
    ):
        path.write_text(text)
        assert isinstance(find_source(FleetFile.read(path)), kind)
    for wrong in ("key: engine.key", "engines: [unix:/a]\ntable: sqlite:///x.db", "kubernetes: {port: engine}"):
        path.write_text(wrong)
        with pytest.raises(FleetFileError):
            FleetFile.read(path)


class ApiServer:
    """Answers for endpoint slices as the API of Kubernetes does, over TLS. ``asked``: path and token of requests."""

    def __init__(self, folder: Path) -> None:
        self.slices: Any = []
        self.status, self.asked = 200, list[tuple[str, str | None]]()
        certificate = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=k"]
        names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "key.pem", "-out", "ca.crt"]
        subprocess.run([*certificate, *names], cwd=folder, check=True, capture_output=True)
        (folder / "token").write_text("a-token\n")
        (folder / "namespace").write_text("models")
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.asked.append((self.path, self.headers["authorization"]))
                body = {"kind": "EndpointSliceList", "apiVersion": "discovery.k8s.io/v1", "items": outer.slices}
                text = json.dumps(body if outer.status == 200 else {"kind": "Status", "code": outer.status}).encode()
                self.send_response(outer.status)
                self.send_header("content-length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "ca.crt", folder / "key.pem")
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    folder = tmp_path / "account"
    folder.mkdir()
    found = ApiServer(folder)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(found.server.server_address[1]))
    yield found
    found.server.shutdown()
    found.server.server_close()


def endpoints(*pods: tuple[str, dict[str, bool] | None], ports: Any = ({"name": "engine", "port": 7000},)) -> Any:
    """As kube-controller-manager writes them."""
    listed = [
        {"addresses": [ip], "targetRef": {"kind": "Pod"}} | ({} if conditions is None else {"conditions": conditions})
        for ip, conditions in pods
    ]
    return {"addressType": "IPv4", "endpoints": listed or None, "ports": list(ports) or None, "metadata": {"name": "e"}}


def test_the_ready_pods_of_a_service_are_listed(api: ApiServer, tmp_path: Path, key: Path) -> None:
    found = KubernetesDiscovery(KubernetesService(service="engines"), key, tmp_path / "account")
    going = {"ready": False, "serving": True, "terminating": True}
    more = ({"name": "metrics", "port": 9000}, {"name": "engine", "port": 7001})
    api.slices = [
        endpoints(("10.1.0.2", {"ready": True}), ("10.1.0.3", {"ready": False}), ("10.1.0.1", None)),
        endpoints(("10.1.0.4", going), ("10.1.0.5", {"ready": True}), ports=more),
        endpoints(),
        endpoints(("10.1.0.6", {"ready": True}), ports=()),
    ]
    assert found.read() == Listing(("tcp:10.1.0.1:7000", "tcp:10.1.0.2:7000", "tcp:10.1.0.5:7001"), KEY)
    assert api.asked == [
        (
            "/apis/discovery.k8s.io/v1/namespaces/models/endpointslices"
            "?labelSelector=kubernetes.io/service-name%3Dengines",
            "Bearer a-token",
        )
    ]
    api.slices = []
    (tmp_path / "account" / "token").write_text("another")
    assert found.read().engines == () and api.asked[-1][1] == "Bearer another"


def test_what_the_api_refuses_is_said(
    api: ApiServer, tmp_path: Path, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = KubernetesDiscovery(KubernetesService(service="engines", namespace="a"), key, tmp_path / "account")
    api.status = 403
    with pytest.raises(DiscoveryError, match="403"):
        found.read()
    api.status, api.slices = 200, [{"endpoints": 7}]
    with pytest.raises(DiscoveryError, match="endpoints"):
        found.read()
    other = tmp_path / "other"
    other.mkdir()
    ApiServer(other).server.server_close()
    (tmp_path / "account" / "ca.crt").write_bytes((other / "ca.crt").read_bytes())
    with pytest.raises(DiscoveryError, match="CERTIFICATE"):
        found.read()
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST")
    with pytest.raises(DiscoveryError, match="KUBERNETES_SERVICE_HOST"):
        found.read()


def test_the_text_of_an_external_server_must_be_there(tmp_path: Path) -> None:
    """The server may come later, the folder does not. Planted: a gateway that waits for ever."""
    path = tmp_path / "fleet.yaml"
    path.write_text("external: [{url: 'http://127.0.0.1:1/v1', model: m, text: side}]")
    with pytest.raises(FleetFileError, match=f"there is no {tmp_path}/side/tokenizer.json"):
        FromFile(path).read()
    (tmp_path / "side").mkdir()
    (tmp_path / "side" / "tokenizer.json").touch()
    assert FromFile(path).read().external[0].text == tmp_path / "side"


def test_engines_of_a_table_take_the_release_plan_beside_the_file_or_in_a_database(tmp_path: Path, key: Path) -> None:
    """Planted: the file is read although it names a database."""
    url, path = f"sqlite:///{tmp_path}/fleet.db", tmp_path / "fleet.yaml"
    EngineTable(url).write("tcp:h:1")
    path.write_text(f"table: {url}\nkey: {key}\n")
    plan = ReleasePlan(stable="d" * 8, candidate="e" * 8, share=0.5, phase="canary")
    PlanFile(plan_path(path)).write(plan, None)
    found = find_engines(path, FleetFile.read(path)).read()
    assert found.engines == ("tcp:h:1",)
    assert found.plan is not None and (found.plan.stable, found.plan.share) == ("d" * 8, 0.5)
    path.write_text(f"table: {url}\nkey: {key}\nreleases: {url}\n")
    discovery = find_engines(path, FleetFile.read(path))
    assert discovery.read().plan is None
    for share in (0.1, 0.2):
        plans = find_plans(path, FleetFile.read(path))
        plans.write(found.plan.model_copy(update={"share": share}), plans.read())
        again = discovery.read().plan
        assert again is not None and again.share == share


def test_a_gateway_starts_while_the_release_plan_is_away(
    tmp_path: Path, key: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the plan that it knew last, if any, and says so once. Planted: it does not start; it says so at each look;
    the copy of another fleet's plan is taken, or one that is older than what was read since.
    """
    folder, path = tmp_path / "database", tmp_path / "fleet.yaml"
    path.write_text(f"engines: [unix:/a]\nkey: {key}\nreleases: sqlite:///{folder}/fleet.db\n")

    def started(path: Path = path) -> Discovery:
        return find_engines(path, FleetFile.read(path), kept=tmp_path / "kept")

    assert [started().read().plan for _ in range(2)] == [None, None]
    assert sum("none is known" in message for message in caplog.messages) == 2
    folder.mkdir()
    gateway, plans = started(), find_plans(path, FleetFile.read(path))
    for share in (0.1, 0.2):
        plan = ReleasePlan(stable="d" * 8, candidate="e" * 8, share=share, phase="canary")
        plans.write(plan, plans.read())
        assert gateway.read().plan == plan

    def away(_: PlanTable) -> None:
        raise PlanAwayError("the database does not answer")

    monkeypatch.setattr(PlanTable, "read", away)
    caplog.clear()
    for discovery in (gateway, started()):
        assert discovery.read().plan == discovery.read().plan == plan
    said = "the release plan stays as it was (stable bundle dddddddd): the database does not answer"
    assert caplog.messages == [said, said]
    other = tmp_path / "other.yaml"
    other.write_text(path.read_text())
    assert started(other).read().plan is None


def test_a_copy_of_the_release_plan_that_could_not_be_written_is_written_later(
    tmp_path: Path, key: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: an older plan stays in its place for good."""
    path = tmp_path / "fleet.yaml"
    path.write_text(f"engines: [unix:/a]\nkey: {key}\nreleases: sqlite:///{tmp_path}/fleet.db\n")
    fleet = FleetFile.read(path)
    gateway, plans = find_engines(path, fleet, kept=tmp_path / "kept"), find_plans(path, fleet)
    for share in (0.1, 0.2):
        plan = ReleasePlan(stable="d" * 8, candidate="e" * 8, share=share, phase="canary")
        plans.write(plan, plans.read())
        with monkeypatch.context() as full:
            full.setattr(PlanFile, "put", lambda *_: (_ for _ in ()).throw(OSError("no space left")))
            assert gateway.read().plan == gateway.read().plan == plan
        assert gateway.read().plan == plan
        (copy,) = (tmp_path / "kept").iterdir()
        assert PlanFile(copy).read() == plan
    assert caplog.messages == 2 * ["no copy of the release plan is kept: no space left"]


def test_two_gateways_may_keep_a_copy_of_a_plan_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: both write to one file, which the second does not find any more."""
    kept, plan = PlanFile(tmp_path / "plan.json"), ReleasePlan(stable="d" * 8, phase="done")
    replace, processes = Path.replace, iter((1, 2))

    def after_the_other(part: Path, target: Path) -> Path:
        monkeypatch.setattr(Path, "replace", replace)
        kept.put(plan)
        return replace(part, target)

    monkeypatch.setattr(os, "getpid", lambda: next(processes))
    monkeypatch.setattr(Path, "replace", after_the_other)
    kept.put(plan)
    assert kept.read() == plan and len(list(tmp_path.iterdir())) == 1


def test_of_two_commands_that_write_one_plan_the_second_is_refused(tmp_path: Path) -> None:
    """Whether the plan was there before or not. Planted: the last one that writes wins."""
    url = f"sqlite:///{tmp_path}/fleet.db"
    for one, other in (
        (PlanTable(url, "fleet"), PlanTable(url, "fleet")),
        (PlanFile(tmp_path / "plan"), PlanFile(tmp_path / "plan")),
    ):
        plans = [ReleasePlan(stable=digit * 8, phase="done") for digit in "abc"]
        before = None
        for plan in plans[:2]:
            assert one.read() == other.read() == before
            one.write(plan, before)
            with pytest.raises(ReleasePlanError, match="another command has written"):
                other.write(plans[2], before)
            before = plan
        assert one.read() == plans[1]


def test_a_database_of_releases_that_is_away_or_has_nonsense_is_named(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/nowhere/fleet.db"
    with pytest.raises(ReleasePlanError, match="the database of the release plan does not answer"):
        PlanTable(url, "fleet").read()
    url = f"sqlite:///{tmp_path}/fleet.db"
    PlanTable(url, "fleet").write(ReleasePlan(stable="d" * 8, phase="done"), None)
    with sqlite3.connect(tmp_path / "fleet.db") as connection:
        connection.execute("UPDATE release_plans SET plan = '{}'")
    connection.close()
    with pytest.raises(ReleasePlanError, match="`stable` is missing"):
        PlanTable(url, "fleet").read()
    assert PlanTable(url, "other").read() is None
