"""API keys: who is let in, what each key may use, and what a client is told otherwise."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml
from fastapi import FastAPI, Request
from hypothesis import given
from hypothesis import strategies as st
from starlette.responses import JSONResponse

from pipeline.cli.main import main
from runtime.gateway.accounts import keys, quotas
from runtime.gateway.accounts.key_file import ApiKey, KeyFileError, hash_of, new_key
from runtime.gateway.accounts.keys import Keys, RequireKey
from runtime.gateway.accounts.quotas import KeyQuota
from runtime.gateway.protocol.calls import CALLER, Call
from runtime.gateway.protocol.errors import ApiError
from tests import web
from tests.http_server import listening


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (keys, quotas):
        monkeypatch.setattr(module, "time", clock)
    return clock


def key(**limits: Any) -> ApiKey:
    return ApiKey(name="k", hash="0" * 64, **limits)


def write(file: Path, *entries: dict[str, Any]) -> Path:
    file.write_text(yaml.safe_dump({"keys": list(entries)}))
    return file


def call_of(key: ApiKey, model: str = "m", tokens: int = 5, id: str = "1") -> Call:
    return Call(id, "r", "/v1/chat/completions", model, "b", key.caller, False, [[1] * (tokens - 1)], 1, 1)


def test_keys_come_from_the_command_line_the_environment_and_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret, digest = new_key()
    monkeypatch.setenv("TAPEOUT_API_KEYS", " from-env , ")
    keys = Keys(["given"], write(tmp_path / "keys.yaml", {"name": "team", "hash": digest, "priority": 2}))
    assert keys.authenticate("Bearer given").name == "key-1"
    assert keys.authenticate("bearer from-env").name == "key-2"
    found = keys.authenticate(f"Bearer {secret}")
    assert found.caller[:3] == ("team", "team", 2)
    assert secret not in (tmp_path / "keys.yaml").read_text()
    for wrong in (None, "", "Bearer", "Bearer ", f"Basic {secret}", f"Bearer {secret}x", f"Bearer {digest}"):
        with pytest.raises(ApiError) as refused:
            keys.authenticate(wrong)
        assert refused.value.status == 401


def test_an_empty_file_of_keys_lets_nobody_in(tmp_path: Path) -> None:
    with pytest.raises(ApiError):
        Keys(file=write(tmp_path / "keys.yaml")).authenticate("Bearer x")


def test_tenants_have_different_salts_and_keys_of_one_tenant_the_same() -> None:
    a, b, c = (ApiKey(name=name, hash="0" * 64, tenant=tenant) for name, tenant in (("1", "x"), ("2", "x"), ("3", "y")))
    assert a.caller.cache_salt == b.caller.cache_salt != c.caller.cache_salt


def test_the_file_is_read_again_when_it_changes(tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    file = write(tmp_path / "keys.yaml", {"name": "old", "hash": hash_of("old")})
    keys = Keys(file=file)
    assert keys.authenticate("Bearer old").name == "old"
    write(file, {"name": "new", "hash": hash_of("new")})
    clock.now += 1.5
    assert keys.authenticate("Bearer new").name == "new"
    with pytest.raises(ApiError):
        keys.authenticate("Bearer old")
    for broken in ("keys: [", "keys: [{name: x, hash: tk-pasted-by-mistake}]", "other: 1", None):
        file.unlink() if broken is None else file.write_text(broken)
        clock.now += 1.5
        with caplog.at_level(logging.ERROR):
            assert keys.authenticate("Bearer new").name == "new"
        assert "stay as they were" in caplog.text and "tk-pasted" not in caplog.text


@pytest.mark.parametrize(
    "entries",
    [
        [{"name": "a", "hash": "0" * 64}, {"name": "a", "hash": "1" * 64}],
        [{"name": "a", "hash": "0" * 64}, {"name": "b", "hash": "0" * 64}],
        [{"name": "a", "hash": "0" * 64, "requests_per_minute": 0}],
        [{"name": "a", "hash": "0" * 64, "surprise": 1}],
        [{"name": "a"}],
    ],
)
def test_a_wrong_file_is_refused_at_the_start(tmp_path: Path, entries: list[dict[str, Any]]) -> None:
    with pytest.raises(KeyFileError):
        Keys(file=write(tmp_path / "keys.yaml", *entries))


def test_a_file_that_is_not_there_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(KeyFileError):
        Keys(file=tmp_path / "none.yaml")


def test_requests_per_minute(clock: Clock) -> None:
    limits = KeyQuota(key(requests_per_minute=60))
    for _ in range(60):
        limits.admit(5)
    with pytest.raises(ApiError) as refused:
        limits.admit(5)
    wait, headers = refused.value.headers, limits.headers()
    assert refused.value.status == 429 and wait["retry-after"] == "1"
    assert headers["x-ratelimit-remaining-requests"] == "0" and headers["x-ratelimit-reset-requests"] == "1m0s"
    clock.now += float(wait["retry-after-ms"]) / 1000
    limits.admit(5)
    with pytest.raises(ApiError):
        limits.admit(5)


def test_tokens_per_minute_are_reserved_and_given_back(clock: Clock) -> None:
    limits = KeyQuota(key(tokens_per_minute=100))
    grant = limits.admit(80)
    with pytest.raises(ApiError) as refused:
        limits.admit(50)
    assert float(refused.value.headers["retry-after-ms"]) == pytest.approx(30 / 100 * 60_000)
    grant.settle(10)
    grant.settle(10)
    assert limits.headers()["x-ratelimit-remaining-tokens"] == "90"
    limits.admit(50)
    with pytest.raises(ApiError) as refused:
        limits.admit(101)
    assert refused.value.headers["x-should-retry"] == "false" and "retry-after" not in refused.value.headers


def test_a_refused_request_uses_nothing(clock: Clock) -> None:
    limits = KeyQuota(key(requests_per_minute=10, tokens_per_minute=100, token_budget=1000))
    for _ in range(50):
        with pytest.raises(ApiError):
            limits.admit(200)
    assert limits.headers()["x-ratelimit-remaining-requests"] == "10" and limits.reserved == 0


@given(st.lists(st.tuples(st.integers(1, 60), st.floats(0, 1)), max_size=60), st.integers(0, 200))
def test_a_budget_is_never_exceeded(requests: list[tuple[int, float]], used: int) -> None:
    limits, open_grants = KeyQuota(key(token_budget=300), used=used), []
    for tokens, share in requests:
        try:
            open_grants.append((limits.admit(tokens), int(tokens * share)))
        except ApiError as error:
            assert error.code == "insufficient_quota"
            assert limits.used + limits.reserved + tokens > 300
        if len(open_grants) > 3:
            grant, spent = open_grants.pop(0)
            grant.settle(spent)
        assert limits.used + limits.reserved <= 300
    for grant, spent in open_grants:
        grant.settle(spent)
    assert limits.reserved == 0 and limits.used <= 300


def test_a_call_reserves_the_most_it_can_use_and_gives_back_the_rest() -> None:
    keys = Keys()
    team = key(token_budget=100)
    keys._take([team])  # pyright: ignore[reportPrivateUsage]
    first = call_of(team, tokens=60)
    keys.admit(first)
    with pytest.raises(ApiError, match="60 are reserved"):
        keys.admit(call_of(team, tokens=41, id="2"))
    first.completion_tokens = 1
    first.prompts = [[1] * 9]
    keys.ended(first)
    limits = keys.limits(team)
    assert (limits.used, limits.reserved) == (10, 0)
    refused = call_of(team, tokens=90, id="3")
    keys.admit(refused)
    refused.error = ApiError(429, "the queue is full")
    keys.ended(refused)
    assert (limits.used, limits.reserved) == (10, 0)


def test_what_was_used_before_a_restart_counts() -> None:
    keys = Keys(["x"])
    keys.used = {"key-1": 40}
    assert keys.limits(keys.authenticate("Bearer x")).used == 40


def test_a_changed_limit_applies_and_the_budget_goes_on(clock: Clock) -> None:
    keys = Keys(["x"])
    limits = keys.limits(key(requests_per_minute=1, token_budget=100))
    limits.admit(60).settle(60)
    again = keys.limits(key(requests_per_minute=5, token_budget=100))
    assert again is limits and again.used == 60
    again.admit(40)


def test_the_openai_client_understands_every_refusal(clock: Clock, tmp_path: Path) -> None:
    entry = {"name": "team", "hash": hash_of("good"), "requests_per_minute": 2, "models": ["m"]}
    keys = Keys(file=write(tmp_path / "keys.yaml", entry))
    app = FastAPI()

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Any:
        caller = request.scope["state"][CALLER]
        call = Call("1", "r", "x", (await request.json())["model"], "b", caller, False, [[1] * 4], 1, 1)
        try:
            keys.admit(call)
        except ApiError as error:
            return JSONResponse(error.body, error.status, error.headers)
        call.completion_tokens = 1
        keys.ended(call)
        message = {"role": "assistant", "content": caller.name}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}

    @app.get("/health")
    def health() -> str:
        return "ok"

    app.add_middleware(RequireKey, keys=keys)
    messages: Any = [{"role": "user", "content": "hi"}]
    with listening(app) as url:

        def call(key: str, model: str = "m") -> Any:
            client = web.openai_client(url, key)
            return client.chat.completions.create(model=model, messages=messages)

        with pytest.raises(openai.AuthenticationError) as wrong:
            call("bad")
        assert wrong.value.code == "invalid_api_key"
        with pytest.raises(openai.PermissionDeniedError) as denied:
            call("good", "other")
        assert denied.value.code == "model_not_found"
        assert call("good").choices[0].message.content == "team"
        call("good")
        with pytest.raises(openai.RateLimitError) as limited:
            call("good")
        assert limited.value.code == "rate_limit_exceeded"
        assert limited.value.response.headers["retry-after"] == "30"
        assert limited.value.response.headers["x-ratelimit-remaining-requests"] == "0"
        open_path = web.get(f"{url}/health")
        assert open_path.status_code == 200
        assert web.get(f"{url}/docs").status_code == 401


def test_every_key_of_a_long_file_is_known(tmp_path: Path) -> None:
    entries = [{"name": f"k{i}", "hash": hash_of(str(i))} for i in range(500)]
    keys = Keys(file=write(tmp_path / "keys.yaml", *entries))
    assert [keys.authenticate(f"Bearer {i}").name for i in (0, 250, 499)] == ["k0", "k250", "k499"]


def test_the_command_prints_a_key_once_and_an_entry_that_accepts_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["keys", "new", "search-team", "--requests-per-minute", "60"]) == 0
    secret, entry = capsys.readouterr().out.strip().splitlines()[0].split()[-1], None
    assert main(["keys", "new", "search-team", "--json"]) == 0
    entry = json.loads(capsys.readouterr().out)
    keys = Keys(file=write(tmp_path / "keys.yaml", entry["entry"]))
    assert keys.authenticate(f"Bearer {entry['key']}").name == "search-team"
    assert secret.startswith("tk-") and secret != entry["key"]
    assert main(["keys", "new", "not a name"]) == 2
