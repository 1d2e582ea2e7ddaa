"""Limits that processes share through a real database: kills, a database that is away, what is given back."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import sqlalchemy as sa
from sqlalchemy import exc

from runtime.gateway.accounts import shared_quotas
from runtime.gateway.accounts.key_file import ApiKey
from runtime.gateway.accounts.leases import LeaseDatabase, LimitAsk
from runtime.gateway.accounts.shared_quotas import SharedQuotas
from runtime.gateway.protocol.errors import ApiError
from tests.command import ROOT
from tests.postgres import Postgres, running_postgres
from tests.waiting import until, wait_for

BUDGET = 60_000


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    with running_postgres() as found:
        yield found


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/limits.db"
    found: Postgres = request.getfixturevalue("postgres")
    drop(found.url)
    return found.url


def drop(url: str) -> None:
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        for table in ("limits", "limit_leases"):
            connection.execute(sa.text(f"DROP TABLE IF EXISTS {table}"))
    engine.dispose()


def taken(url: str) -> dict[str, float]:
    engine = sa.create_engine(url)
    with engine.connect() as connection:
        found = {row.kind: row.taken for row in connection.execute(sa.text("SELECT kind, taken FROM limits"))}
    engine.dispose()
    return found


def key(**limits: Any) -> ApiKey:
    return ApiKey(name="k", hash="0" * 64, **limits)


def test_four_gateways_that_are_killed_never_use_more_than_the_budget(url: str, tmp_path: Path) -> None:
    notes, draw = tmp_path / "notes", random.Random(1)

    def start(seed: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.lease_holder", url, str(notes), str(seed), str(BUDGET)], cwd=ROOT
        )

    holders, seed = [start(seed) for seed in range(4)], 4
    try:
        wait_for(lambda: notes.exists() and notes.stat().st_size > 0)
        for _ in range(6):
            time.sleep(draw.uniform(0.1, 0.5))
            place = draw.randrange(4)
            os.kill(holders[place].pid, signal.SIGKILL)
            holders[place].wait()
            holders[place], seed = start(seed), seed + 1
        wait_for(lambda: notes.read_text().count("R\n") > 20)
    finally:
        for holder in holders:
            holder.kill()
            holder.wait()
    admitted = ended = used = 0
    for line in notes.read_text().splitlines():
        kind, *numbers = line.split()
        if kind == "A":
            admitted += int(numbers[0])
        elif kind == "E":
            ended, used = ended + int(numbers[0]), used + int(numbers[1])
    assert used > BUDGET / 4, "too little was asked for"
    assert used + (admitted - ended) <= taken(url)["budget"] <= BUDGET


def test_gateways_that_begin_at_once_make_the_tables_once(url: str) -> None:
    ask = LimitAsk("k", "budget", 100, 0.0, 0.0, 5.0, 0.0, 0.0)

    def begin(number: int) -> float:
        database = LeaseDatabase(url)
        barrier.wait()
        granted = database.sync(str(number), [ask])["k", "budget"].granted
        database.close()
        return granted

    for _ in range(5):
        barrier = threading.Barrier(8)
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(begin, range(8))) == [5.0] * 8
        assert taken(url) == {"budget": 40}
        drop(url)


def test_all_that_was_not_used_comes_back(url: str) -> None:
    async def use() -> list[SharedQuotas]:
        pair = [SharedQuotas(url), SharedQuotas(url)]
        limits = key(token_budget=1000, requests_per_minute=60, tokens_per_minute=100_000)
        quotas = [one.quota(limits, 100) for one in pair]
        for quota in quotas:
            await quota.prepare(40)
            quota.admit(40).settle(7)
        return pair

    for one in asyncio.run(use()):
        one.close()
    found = taken(url)
    assert found["budget"] == 114, "100 were used before anybody leased"
    assert found["requests"] <= 2 and found["tokens"] <= 14
    engine = sa.create_engine(url)
    with engine.connect() as connection:
        assert connection.execute(sa.text("SELECT count(*) FROM limit_leases")).scalar_one() == 0
    engine.dispose()


def test_a_limit_is_used_up_by_both_and_each_is_told_so(url: str) -> None:
    async def use() -> None:
        pair = [SharedQuotas(url), SharedQuotas(url)]
        quotas = [one.quota(key(token_budget=1000, requests_per_minute=6000), 0) for one in pair]
        count = refused = 0
        for quota in itertools.cycle(quotas):
            await quota.prepare(10)
            try:
                quota.admit(10).settle(10)
            except ApiError as error:
                assert (error.status, error.code) == (429, "insufficient_quota")
                assert error.headers["x-should-retry"] == "false"
                refused += count >= 100
                if refused == 200:
                    break
                await asyncio.sleep(0.01)  # until the other one returns what it does not need
                continue
            count += 1
        assert count == 100

    asyncio.run(use())


def test_while_the_database_is_away_requests_go_on_with_what_is_leased(postgres: Postgres) -> None:
    async def use() -> None:
        shared = SharedQuotas(postgres.url)
        quota = shared.quota(key(token_budget=10_000_000, requests_per_minute=60_000), 0)
        idle = shared.quota(ApiKey(name="idle", hash="1" * 64, token_budget=100), 0)
        for _ in range(300):  # a pace is known
            await quota.prepare(10)
            quota.admit(10).settle(10)
            await asyncio.sleep(0.005)
        await until(lambda: quota.budget.most - quota.budget.used > 3000)
        postgres.stop()
        await until(lambda: shared.away)
        for _ in range(300):  # as many again as in the time before
            await quota.prepare(10)
            quota.admit(10).settle(10)
        held = quota.budget.most - quota.budget.used
        for one, tokens in ((quota, int(held) + 1), (idle, 1)):
            await one.prepare(tokens)
            with pytest.raises(ApiError) as refused:
                one.admit(tokens)
            assert (refused.value.status, refused.value.code) == (503, "limits_unavailable")
            assert refused.value.headers["retry-after"] == "1"
        postgres.start()
        await until(lambda: not shared.away)
        for one in (quota, idle):
            await one.prepare(20)
            one.admit(20).settle(20)

    try:
        asyncio.run(use())
    finally:
        if postgres.process.poll() is not None:
            postgres.start()


STOPPED = """
import os, signal, sys
from runtime.gateway.accounts import leases

leases.database_seconds = lambda _: os.kill(os.getpid(), signal.SIGSTOP)  # it has locked the rows by then
ask = leases.LimitAsk("k", "budget", 100, 0.0, 0.0, 40.0, 0.0, 0.0)
leases.LeaseDatabase(sys.argv[1]).sync("stopped", [ask])
"""


def test_a_gateway_that_is_stopped_in_the_midst_of_a_transaction_holds_up_no_other(postgres: Postgres) -> None:
    """Planted: its locks stay until it goes on, and others refuse what they have not leased."""
    drop(postgres.url)
    ask = LimitAsk("k", "budget", 100, 0.0, 0.0, 30.0, 0.0, 0.0)
    database, granted = LeaseDatabase(postgres.url), list[float]()
    database.sync("other", [ask])
    stopped = subprocess.Popen([sys.executable, "-c", STOPPED, postgres.url], cwd=ROOT, stderr=subprocess.DEVNULL)

    def answered() -> bool:
        with suppress(exc.SQLAlchemyError):
            granted.append(database.sync("other", [ask._replace(used=30.0, granted=30.0)])["k", "budget"].granted)
        return bool(granted)

    try:
        wait_for(lambda: psutil.Process(stopped.pid).status() == psutil.STATUS_STOPPED)
        wait_for(answered, 60)
        stopped.send_signal(signal.SIGCONT)
        assert stopped.wait(60) != 0, "its transaction was ended"
        assert granted == [60.0] and taken(postgres.url) == {"budget": 60}
    finally:
        stopped.kill()
        stopped.wait()
        database.close()


def test_a_database_that_does_not_answer_holds_no_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_quotas, "ANSWER_SECONDS", 0.2)
    silent = threading.Event()

    async def use() -> None:
        shared = SharedQuotas(f"sqlite:///{tmp_path}/limits.db")
        monkeypatch.setattr(shared._database, "sync", lambda *_: silent.wait(60))  # pyright: ignore[reportPrivateUsage]
        quota = shared.quota(key(token_budget=100), 0)
        for _ in range(2):  # the second one does not even wait
            await quota.prepare(10)
            with pytest.raises(ApiError, match="cannot be looked up"):
                quota.admit(10)
            assert shared.away
        silent.set()

    asyncio.run(use())
