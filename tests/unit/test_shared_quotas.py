"""A key whose limits are shared is told the same as one whose limits are counted here."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from runtime.gateway.accounts import shared_quotas
from runtime.gateway.accounts.key_file import ApiKey
from runtime.gateway.accounts.keys import Keys
from runtime.gateway.accounts.leases import LimitAnswer, LimitAsk
from runtime.gateway.accounts.quotas import KeyQuota, Quota
from runtime.gateway.accounts.shared_quotas import SYNC_SECONDS, SharedQuotas
from runtime.gateway.http.service import Service
from runtime.gateway.operations.operations import Operations, OperationsSettings
from runtime.gateway.protocol.calls import Call
from runtime.gateway.protocol.errors import ApiError
from tests.serving_client import LocalClient
from tests.waiting import until


def key(**limits: Any) -> ApiKey:
    return ApiKey(name="k", hash="0" * 64, **limits)


async def told(quota: Quota, tokens: list[int]) -> list[Any]:
    """Of each request: None if it was admitted, else status, code, whether to come again, and how."""
    found: list[Any] = []
    for amount in tokens:
        await quota.prepare(amount)
        try:
            quota.admit(amount).settle(amount)
            found.append(None)
        except ApiError as error:
            found.append((error.status, error.code, *sorted(error.headers)))
    return found


@pytest.mark.parametrize(
    ("limits", "tokens"),
    [
        ({"requests_per_minute": 5}, [1] * 8),
        ({"tokens_per_minute": 100}, [60, 101, 30, 30, 10, 10]),
        ({"token_budget": 100}, [60, 101, 50, 40, 1]),
        ({"requests_per_minute": 3, "tokens_per_minute": 50, "token_budget": 60}, [50, 1, 60, 61, 51]),
        ({}, [10**9] * 3),
    ],
)
def test_what_is_admitted_and_refused_is_the_same(limits: dict[str, int], tokens: list[int], tmp_path: Path) -> None:
    async def both() -> None:
        shared = SharedQuotas(f"sqlite:///{tmp_path}/limits.db")
        quotas = KeyQuota(key(**limits)), shared.quota(key(**limits), 0)
        alone, leased = [await told(quota, tokens) for quota in quotas]
        assert leased == alone and (None in alone)
        assert quotas[1].headers().keys() == quotas[0].headers().keys()

    asyncio.run(both())


def test_changed_limits_apply_and_what_was_used_of_the_budget_stays(tmp_path: Path) -> None:
    async def use() -> None:
        shared = SharedQuotas(f"sqlite:///{tmp_path}/limits.db")
        quota = shared.quota(key(), 0)
        assert await told(quota, [70] * 2) == [None] * 2  # counted, though nothing limits it
        quota.change(key(token_budget=200, requests_per_minute=2))
        found = await told(quota, [50, 50, 10, 1])
        assert [one and one[1] for one in found] == [None, "insufficient_quota", None, "insufficient_quota"]
        quota.change(key(token_budget=1000))
        assert await told(quota, [500, 500]) == [None, (429, "insufficient_quota", "x-should-retry")]

    asyncio.run(use())


def test_a_call_prepares_reserves_and_gives_back(tmp_path: Path) -> None:
    async def use() -> None:
        shared = SharedQuotas(f"sqlite:///{tmp_path}/limits.db")
        keys = Keys(["secret"], quota=shared.quota)
        known = keys.authenticate("Bearer secret").model_copy(update={"token_budget": 100})
        keys._take([known])  # pyright: ignore[reportPrivateUsage]
        calls = [Call(str(number), "r", "x", "m", "b", known.caller, False, [[1] * 40], 1, 20) for number in range(3)]
        await keys.prepare(calls[0])
        keys.admit(calls[0])
        await keys.prepare(calls[1])
        with pytest.raises(ApiError, match="60 are reserved"):
            keys.admit(calls[1])
        calls[0].completion_tokens = 1
        keys.ended(calls[0])
        await keys.prepare(calls[2])
        with pytest.raises(ApiError, match="has used 41 of its budget of 100"):
            keys.admit(calls[2])

    asyncio.run(use())


def test_a_budget_is_counted_where_limits_are_shared(tmp_path: Path) -> None:
    (tmp_path / "keys.yaml").write_text(f'keys: [{{name: k, hash: "{"0" * 64}", token_budget: 5}}]')
    settings = OperationsSettings(keys_file=tmp_path / "keys.yaml", limits_database=f"sqlite:///{tmp_path}/limits.db")
    Operations(LocalClient(), "m", settings).close()


def test_a_database_that_cannot_be_reached_is_named_at_the_start_and_is_used_once_it_answers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Planted: a server that asks it with its first request, and says nothing before."""
    folder = tmp_path / "later"
    operations = Operations(LocalClient(), "m", OperationsSettings(limits_database=f"sqlite:///{folder}/limits.db"))
    attach = operations.extensions.attach
    assert attach is not None

    async def use() -> None:
        attach(Service(LocalClient(), {}, ("m",)))
        await until(lambda: caplog.messages != [])
        (said,) = caplog.messages
        assert "requests of keys with limits are refused until the database of the limits answers: " in said
        assert "database of the limits has not answered" in (operations.health.not_ready() or "")
        await asyncio.sleep(1.5 * SYNC_SECONDS)  # it has tried again by then
        assert len(caplog.messages) == 1
        folder.mkdir()
        await until(lambda: operations.health.not_ready() is None)
        assert caplog.messages[1:] == ["the database of the limits answers"]

    asyncio.run(use())
    operations.close()


@pytest.mark.parametrize("late", ["question", "answer"])
def test_a_rate_that_was_leased_too_long_ago_is_not_used(
    late: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as by a gateway that was stopped: others use it by then. A budget stays its own.

    Planted: only the next transaction ends it, or a late answer counts as new.
    """
    monkeypatch.setattr(shared_quotas, "STALE_SECONDS", 0.5)
    monkeypatch.setattr(shared_quotas, "SYNC_SECONDS", 0.05)
    asked, answered, ending = Event(), Event(), Event()

    async def use() -> None:
        shared = SharedQuotas(f"sqlite:///{tmp_path}/limits.db")
        rated, counted = ApiKey(name="r", hash="0" * 64, requests_per_minute=600), key(token_budget=10_000)
        rate, budget = shared.quota(rated, 0), shared.quota(counted, 0)
        for _ in range(20):  # a pace, for which more is leased ahead
            for quota in (rate, budget):
                await quota.prepare(1)
                quota.admit(1).settle(1)
            await asyncio.sleep(0.02)
        sync = shared._database.sync  # pyright: ignore[reportPrivateUsage]

        def slow(holder: str, asks: list[LimitAsk]) -> dict[tuple[str, str], LimitAnswer]:
            answers = sync(holder, asks) if late == "answer" else None
            asked.set()
            ending.wait(2.0)
            answered.set()
            return answers or sync(holder, asks)

        monkeypatch.setattr(shared._database, "sync", slow)  # pyright: ignore[reportPrivateUsage]
        await until(asked.is_set)
        if late == "answer":
            await until(answered.is_set)
            await asyncio.sleep(0.1)
        else:
            await asyncio.sleep(0.7)
        with pytest.raises(ApiError) as refused:
            rate.admit(1)
        assert (refused.value.status, refused.value.code) == (503, "limits_unavailable")
        budget.admit(1).settle(1)
        ending.set()
        await until(lambda: rate.requests.fits(1, time.monotonic()))

    asyncio.run(use())
