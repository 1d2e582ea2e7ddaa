"""A database that answers, but not to this user: one message at start, rather than to wait for it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from pipeline.cli.gateway import find_engines
from pipeline.cli.main import main
from runtime.gateway.accounts.leases import LeaseDatabase, LimitAsk
from runtime.gateway.accounts.shared_quotas import SharedQuotas
from runtime.gateway.fleet.discovery import DiscoveryError, FleetFile
from runtime.gateway.fleet.release import PlanAwayError, PlanRefusedError, ReleasePlan
from runtime.gateway.fleet.release_table import PlanTable
from runtime.gateway.fleet.table_discovery import TableDiscovery
from runtime.wire.engine_table import EngineTable
from tapeout.database import DatabaseRefusedError
from tapeout.errors import ExitCode
from tests.postgres import Postgres, running_postgres
from tests.waiting import wait_for

PLAN = ReleasePlan(stable="d" * 8, phase="done")
RIGHT, WRONG = "right-horse", "wrong-horse"
TABLES = "release_plans", "engine_addresses", "limits", "limit_leases"
LONG = 200 * "f"  # name of a fleet


@pytest.fixture(scope="module")
def server() -> Iterator[Postgres]:
    with running_postgres(RIGHT) as found:
        yield found


@pytest.fixture
def database(server: Postgres) -> Iterator[Postgres]:
    """Without tables; with a user ``guest`` that may only log in."""
    owner(server, f"CREATE ROLE guest LOGIN PASSWORD '{RIGHT}'")
    yield server
    owner(server, *(f"DROP TABLE IF EXISTS {name}" for name in TABLES), "DROP ROLE guest")


def owner(database: Postgres, *statements: str) -> None:
    engine = sa.create_engine(database.url)
    with engine.begin() as connection:
        for statement in statements:
            connection.execute(sa.text(statement))
    engine.dispose()


def of_guest(database: Postgres) -> str:
    return database.url.replace("tapeout:", "guest:")


def fleet_file(folder: Path, url: str) -> Path:
    path = folder / "fleet.yaml"
    path.write_text(f"engines: [unix:/a]\nreleases: {url}\n")
    return path


@pytest.mark.parametrize("place", ["`releases`", "`table`", "--limits-database"])
def test_a_wrong_password_ends_a_gateway_at_its_start(
    database: Postgres, tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    """Planted: what a connection was refused for is not looked at, so the gateway starts and waits."""
    path, wrong, words = tmp_path / "fleet.yaml", database.url.replace(RIGHT, WRONG), list[str]()
    (tmp_path / "key").write_text(64 * "a")
    if place == "--limits-database":
        path.write_text("engines: [unix:/a]\n")
        words = [place, wrong, "--port", "0"]
    elif place == "`releases`":
        path.write_text(f"engines: [unix:/a]\nreleases: {wrong}\n")
    else:
        path.write_text(f"table: {wrong}\nkey: key\n")
    with pytest.MonkeyPatch.context() as patch:
        if not words:
            patch.setattr("pipeline.cli.gateway.listen", lambda *_: pytest.fail("it takes its port"))
        assert main(["gateway", str(path), *words]) == ExitCode.BROKEN
    said = capsys.readouterr().err
    assert "does not let this user in" in said and "password authentication failed" in said
    assert f"correct {'the URL of ' if words else ''}{place}" in said and WRONG not in said and "Traceback" not in said
    table = PlanTable(database.url.replace(f":{RIGHT}", ""), "fleet")
    with pytest.raises(PlanRefusedError, match="no password supplied"):
        table.read()


@pytest.mark.parametrize("rules", ["local all all reject", "local other all scram-sha-256"])
def test_whom_the_server_lets_in_from_nowhere_is_refused(database: Postgres, rules: str) -> None:
    """By a line of pg_hba.conf, or by none. Planted: no password was asked for, so the server counts as away."""
    path = Path(database.url.partition("host=")[2]) / "data" / "pg_hba.conf"
    before = path.read_text()

    def answer() -> str:
        try:
            PlanTable(database.url, "fleet").read()
        except PlanAwayError as error:
            return f"{type(error).__name__}: {error.found}"
        return "it answers"

    try:
        path.write_text(rules + "\n")
        database.process.send_signal(signal.SIGHUP)
        wait_for(lambda: answer() != "it answers")
        assert answer().startswith("PlanRefusedError") and "pg_hba.conf" in answer()
    finally:
        path.write_text(before)
        database.process.send_signal(signal.SIGHUP)
        wait_for(lambda: answer() == "it answers")


def test_missing_rights_to_the_tables_of_engines_and_of_limits_are_named(database: Postgres) -> None:
    """Planted: they count as a database that is away. That is still what one that has stopped is."""
    asks = [LimitAsk("key", "requests", 10, 0.1, used=0, need=1, keep=1, granted=0)]
    for rights in ((), ("GRANT SELECT ON engine_addresses, limits TO guest",)):
        owner(database, *rights)
        with pytest.raises(DatabaseRefusedError, match="permission denied"):
            EngineTable(of_guest(database)).write("unix:/a")
        with pytest.raises(DatabaseRefusedError, match="permission denied") as caught:
            LeaseDatabase(of_guest(database)).sync("holder", [])
        assert "the tables limits and limit_leases" in caught.value.found
        EngineTable(database.url).write("unix:/b")
        LeaseDatabase(database.url).sync("holder", asks)
    assert list(EngineTable(of_guest(database)).read()) == ["unix:/b"]
    owner(database, "GRANT SELECT, INSERT, UPDATE ON limits, limit_leases TO guest")
    assert LeaseDatabase(of_guest(database)).sync("other", asks)
    shared = SharedQuotas(database.url)
    database.stop()
    try:
        shared.require_access()
        with pytest.raises(DiscoveryError, match="cannot be read"):
            TableDiscovery(database.url, None).read()
    finally:
        database.start()


def test_a_server_that_stops_is_away_also_where_it_asks_for_passwords(database: Postgres) -> None:
    """Planted: every connection on which a password was given counts as refused."""
    table = PlanTable(database.url, "fleet")
    assert table.read() is None
    database.stop()
    try:
        for _ in range(2):  # with a connection that is cut, and without one
            with pytest.raises(PlanAwayError) as caught:
                table.read()
            assert not isinstance(caught.value, PlanRefusedError)
    finally:
        database.start()
    assert table.read() is None


def test_missing_rights_are_named_and_nobody_needs_more_than_the_table(database: Postgres) -> None:
    """Planted: a table that is there is created all the same, which takes rights to the schema."""
    with pytest.raises(PlanRefusedError, match="permission denied"):
        PlanTable(of_guest(database), "fleet").read()
    PlanTable(database.url, "fleet").write(PLAN, None)
    with pytest.raises(PlanRefusedError, match="permission denied for table release_plans"):
        PlanTable(of_guest(database), "fleet").read()
    owner(database, "GRANT SELECT ON release_plans TO guest")
    assert PlanTable(of_guest(database), "fleet").read() == PLAN
    with pytest.raises(PlanRefusedError, match="permission denied"):
        PlanTable(of_guest(database), "other").write(PLAN, None)
    owner(database, "GRANT INSERT, UPDATE ON release_plans TO guest")
    PlanTable(of_guest(database), "other").write(PLAN, None)
    assert PlanTable(database.url, "other").read() == PLAN


def test_a_table_of_an_earlier_version_gets_room_for_longer_names(database: Postgres) -> None:
    """Planted: tables that are there stay as they are."""
    owner(database, "CREATE TABLE release_plans (fleet VARCHAR(64) PRIMARY KEY, plan TEXT NOT NULL)")
    PlanTable(database.url, LONG).write(PLAN, None)
    assert PlanTable(database.url, LONG).read() == PLAN


def test_who_may_not_change_such_a_table_gets_the_statement_for_its_owner(database: Postgres) -> None:
    owner(
        database,
        "CREATE TABLE release_plans (fleet VARCHAR(64) PRIMARY KEY, plan TEXT NOT NULL)",
        "GRANT SELECT, INSERT, UPDATE ON release_plans TO guest",
    )
    with pytest.raises(PlanRefusedError, match="holds 64 characters, and this user may not change it") as caught:
        PlanTable(of_guest(database), LONG).read()
    assert caught.value.expected == "255 characters"
    owner(database, caught.value.remedy.partition(": ")[2])
    PlanTable(of_guest(database), LONG).write(PLAN, None)
    assert PlanTable(of_guest(database), LONG).read() == PLAN


def test_a_password_that_changes_later_leaves_the_plan_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Planted: a refusal ends every look, so the list of engines stands still, too."""
    path = fleet_file(tmp_path, f"sqlite:///{tmp_path}/fleet.db")
    PlanTable(f"sqlite:///{tmp_path}/fleet.db", "fleet").write(PLAN, None)
    discovery = find_engines(path, FleetFile.read(path))
    assert discovery.read().plan == PLAN

    def refused(_: PlanTable) -> None:
        raise PlanRefusedError("the password is wrong")

    monkeypatch.setattr(PlanTable, "read", refused)
    path.write_text(path.read_text().replace("unix:/a", "unix:/b"))
    listing = discovery.read()
    assert (listing.plan, listing.engines) == (PLAN, ("unix:/b",))
    assert caplog.messages == ["the release plan stays as it was (stable bundle dddddddd): the password is wrong"]
    with pytest.raises(PlanRefusedError):
        find_engines(path, FleetFile.read(path)).read()
