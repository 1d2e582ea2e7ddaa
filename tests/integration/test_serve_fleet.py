"""``tapeout gateway`` in front of two ``tapeout engine``: answers stay the same when engines die while they answer."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from engines.kernels.cpu import LEVELS
from tests import command, web
from tests.answering import SCHEMA
from tests.command import ROOT, Running
from tests.exported import build_float, tiny_graph
from tests.fleet import session_at
from tests.integration.test_serve_elsewhere import Engine
from tests.native import own_cache
from tests.waiting import wait_for

MODEL = "tiny"
TALK = [{"role": "user", "content": "What is a list?"}]
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": json.loads(SCHEMA)}}
CHAT: dict[str, Any] = {"messages": TALK, "max_tokens": 100, "stream": True, "seed": 3}
PROMPT: dict[str, Any] = {"prompt": "The list is", "max_tokens": 100, "stream": True, "seed": 3, "min_tokens": 60}
# By name: path and body. All are streamed.
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy chat": ("/v1/chat/completions", CHAT | {"temperature": 0, "min_tokens": 80}),
    "sampled": ("/v1/completions", PROMPT),
    "two choices": ("/v1/completions", PROMPT | {"n": 2, "frequency_penalty": 0.5, "presence_penalty": 0.5}),
    "logprobs": ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 3, "repetition_penalty": 1.2}),
    "schema": ("/v1/chat/completions", CHAT | {"structured_outputs": {"json": json.loads(SCHEMA)}}),
    "regex": ("/v1/completions", PROMPT | {"structured_outputs": {"regex": "[a-z ]{70,90}"}}),
    "grammar": ("/v1/completions", PROMPT | {"structured_outputs": {"grammar": 'start: ("a" | "b" | "c ")*'}}),
    "tool": ("/v1/chat/completions", CHAT | {"tools": [TOOL], "tool_choice": "required"}),
}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundles")
    with pytest.MonkeyPatch.context() as patch:
        own_cache(patch, folder / "cache")
        return build_float(tiny_graph(), folder / "tiny", 32).folder


@pytest.fixture(scope="module")
def engines(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Engine]]:
    folder = tmp_path_factory.mktemp("fleet")
    key = folder / "engine.key"
    key.write_text("b" * 64)
    found = [Engine(folder, key) for _ in range(2)]
    for engine in found:
        engine.start(bundle)
    (folder / "fleet.yaml").write_text(
        "engines:\n" + "".join(f"  - {engine.address}\n" for engine in found) + "key: engine.key\n"
    )
    yield found
    for engine in found:
        assert engine.stop() == 0


@pytest.fixture(scope="module")
def gateway(engines: list[Engine], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("gateway")
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(folder / "cache")}
    listed = str(engines[0].folder / "fleet.yaml")
    options = ["--served-model-name", MODEL]
    with command.served(listed, *options, variables=variables, folder=folder, command="gateway") as running:
        yield running
        assert running.process.poll() is None and running.stop() == 0


def events(gateway: Running, name: str, **more: Any) -> list[Any]:
    """What differs between two answers of one request left out: ids and times."""
    path, body = ASKED[name]
    found: list[Any] = []
    with web.stream("POST", f"{gateway.url}{path}", json={"model": MODEL} | body | more, timeout=60) as response:
        assert response.status_code == 200
        assert response.headers["x-engine-level"] in {level.name for level in LEVELS}
        for line in response.iter_lines():
            if line.startswith("data: {"):
                found.append(json.loads(line[6:]))
                assert "error" not in found[-1], found[-1]
    return found


def answer(gateway: Running, name: str, session: str = "") -> dict[int, Any]:
    """The whole of each choice: text, calls of tools, log-probabilities and why it ended."""
    whole: dict[int, Any] = {}
    for one in events(gateway, name, prompt_cache_key=session):
        for choice in one["choices"]:
            text, logprobs, calls, reason = whole.get(choice["index"], ("", [], "", None))
            delta = choice.get("delta", {})
            text += choice.get("text") or delta.get("content") or ""
            logprobs = logprobs + ((choice.get("logprobs") or {}).get("content") or [])
            for call in delta.get("tool_calls") or []:
                calls += call["function"].get("name") or ""
                calls += call["function"].get("arguments") or ""
            whole[choice["index"]] = (text, logprobs, calls, choice.get("finish_reason") or reason)
    return whole


def replicas(gateway: Running) -> list[dict[str, Any]]:
    return web.get(f"{gateway.url}/fleet", timeout=30).json()["replicas"]


def all_ready(gateway: Running) -> bool:
    return [replica["state"] for replica in replicas(gateway)] == ["ready", "ready"]


def test_every_kind_of_request_survives_a_killed_engine(gateway: Running, engines: list[Engine], bundle: Path) -> None:
    wait_for(lambda: all_ready(gateway))
    wanted = {name: answer(gateway, name) for name in ASKED}
    addresses = [engine.address for engine in engines]
    # By sessions, else their few prompts may gather on one engine. Each twice: on a busy machine a look comes late.
    sessions = [session_at(address, addresses) for address in addresses] * 2
    for killed in engines:
        with ThreadPoolExecutor(len(sessions) * len(ASKED)) as pool:
            running = {name: [pool.submit(answer, gateway, name, session) for session in sessions] for name in ASKED}
            wait_for(lambda: all(replica["running"] >= 3 for replica in replicas(gateway)))
            assert killed.process is not None
            killed.process.kill()
            found = {name: [one.result() for one in answers] for name, answers in running.items()}
        assert found == {name: [whole] * len(sessions) for name, whole in wanted.items()}
        killed.process.communicate()
        killed.start(bundle)
        wait_for(lambda: all_ready(gateway))
    counted = web.get(f"{gateway.url}/fleet", timeout=30).json()
    assert counted["resumptions"] > 0 and counted["lost"] == 0


def test_a_session_stays_and_finds_its_prompts_cached(gateway: Running, engines: list[Engine]) -> None:
    """One after another. The model is so small that a prompt costs next to nothing, so sessions decide."""
    wait_for(lambda: all_ready(gateway))
    for number in range(6):
        body = {"model": MODEL, "prompt": f"{number} " + "The list is long. " * 40, "max_tokens": 2}
        cached: list[int] = []
        for _ in range(2):
            found = web.post(
                f"{gateway.url}/v1/completions", json=body | {"prompt_cache_key": f"s{number}"}, timeout=60
            )
            assert found.status_code == 200
            cached.append(found.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert cached[0] < cached[1]


def test_what_operators_see(gateway: Running, engines: list[Engine]) -> None:
    wait_for(lambda: all_ready(gateway))
    for path in ("/health", "/ready", "/v1/models", "/version", "/live"):
        assert web.get(f"{gateway.url}{path}", timeout=30).status_code == 200
    shown = web.get(f"{gateway.url}/live", timeout=30).json()["replicas"]
    assert [one["address"] for one in shown] == [engine.address for engine in engines]
    text = web.get(f"{gateway.url}/metrics", timeout=30).text
    for engine in engines:
        assert f'vllm:num_requests_running{{engine="{engine.address}",model_name="tiny"}} 0.0' in text
        assert f'tapeout:replica_state{{engine="{engine.address}",state="ready"}} 1.0' in text
    assert 'vllm:time_to_first_token_seconds_count{engine="0"' in text and "tapeout:fleet_lost_total 0.0" in text
    assert text.count("# TYPE vllm:num_requests_running ") == 1


def test_a_gateway_without_engines_is_not_ready_and_no_request_hangs(gateway: Running, engines: list[Engine]) -> None:
    for engine in engines:
        assert engine.process is not None
        engine.process.send_signal(signal.SIGSTOP)
    try:
        wait_for(lambda: web.get(f"{gateway.url}/ready", timeout=30).status_code == 503)
        assert web.get(f"{gateway.url}/health", timeout=30).status_code == 200
    finally:
        for engine in engines:
            assert engine.process is not None
            engine.process.send_signal(signal.SIGCONT)
    wait_for(lambda: all_ready(gateway))
