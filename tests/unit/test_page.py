"""The live page in a real browser: phone and desktop width, light and dark, keyboard, chat, and numbers that change."""

from __future__ import annotations

import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from fastapi import FastAPI

from runtime.gateway.fleet.release import ReleasePlan
from runtime.gateway.fleet.replica import ReplicaState, ReplicaStatus
from runtime.gateway.http.app import create_app
from runtime.gateway.http.service import Service
from runtime.gateway.operations.fleet import Fleet
from runtime.gateway.operations.operations import Operations, OperationsSettings
from runtime.gateway.operations.page import policy
from runtime.gateway.text.chat_template import ChatTemplate
from runtime.gateway.text.model import TextModel
from runtime.wire.messages import EngineStats
from tapeout.slo import LatencyObjective, ServiceLevelObjectives
from tests import web
from tests.http_server import END, END_TOKEN, MODEL, TEMPLATE, VOCAB, byte_tokenizer, ids, listening
from tests.serving_client import LocalClient, ScriptEngine

CHROMIUM = Path(os.environ.get("TAPEOUT_CHROMIUM", "/usr/bin/chromium"))
SAID = "Rayleigh scattering: <b>blue</b> light is scattered most by the molecules of the air."

playwright = pytest.importorskip("playwright.sync_api")
pytestmark = pytest.mark.skipif(not CHROMIUM.is_file(), reason="no chromium; name one in TAPEOUT_CHROMIUM")


@pytest.fixture
def client() -> LocalClient:
    engine = ScriptEngine(ids("<|start|>assistant\n"), END_TOKEN, VOCAB, slots=8, max_tokens=1024)
    engine.script = ids(SAID)
    engine.before = lambda: time.sleep(0.03)
    return LocalClient(engine, stop_tokens=frozenset({END_TOKEN}))


def application(client: LocalClient, settings: OperationsSettings, fleet: Fleet | None = None) -> FastAPI:
    operations = Operations(client, MODEL, settings, fleet)
    extensions = operations.extensions
    digest = client.info.digest
    text = TextModel(digest, byte_tokenizer(), ChatTemplate(TEMPLATE, {}), special_texts={"eos_token": END})
    service = Service(client, {digest: text}, (MODEL,), hooks=extensions.hooks)
    assert extensions.attach is not None
    extensions.attach(service)
    return create_app(service, routers=extensions.routers, middleware=extensions.middleware)


@pytest.fixture
def url(client: LocalClient) -> Iterator[str]:
    with listening(application(client, OperationsSettings(read_bandwidth=1e9))) as url:
        yield url


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as library:
        browser = library.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def opened(browser: Any) -> Iterator[Callable[..., tuple[Any, list[str]]]]:
    """Opens a page; also what its console complains about."""
    contexts: list[Any] = []

    def opened(url: str, width: int = 1440, scheme: str = "light") -> tuple[Any, list[str]]:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        page, problems = context.new_page(), []
        page.on("console", lambda said: problems.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda asked: None if asked.url.startswith(url) else problems.append(asked.url))
        page.goto(url)
        return page, problems

    yield opened
    for context in contexts:
        context.close()


def ask(page: Any, text: str) -> None:
    page.get_by_label("Message").fill(text)
    page.keyboard.press("Control+Enter")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1440])
def test_chat_streams_and_the_numbers_change(
    url: str, opened: Callable[..., tuple[Any, list[str]]], width: int, scheme: str, tmp_path: Path
) -> None:
    page, problems = opened(url, width, scheme)
    playwright.expect(page.locator("#status")).to_have_text("ready")
    assert page.locator("#ttft-50").inner_text() == "–"
    ask(page, "Why is the sky blue?")
    answer = page.locator(".said.assistant span")
    playwright.expect(answer).to_have_text(re.compile("^Rayleigh"))
    assert answer.inner_text() != SAID, "the whole answer came at once"
    playwright.expect(page.locator("#running")).to_have_text("1")
    playwright.expect(answer).to_have_text(SAID)
    playwright.expect(page.locator("#chat-note")).to_contain_text("first token after")
    playwright.expect(page.locator("#ttft-50")).to_contain_text("ms")
    playwright.expect(page.locator("#itl-99")).to_contain_text("ms")
    playwright.expect(page.locator("#running")).to_have_text("0")
    playwright.expect(page.locator("#recent td").last).to_have_text("stop")
    assert page.locator("#recent tr").count() == 1
    ask(page, "And at sunset?")
    playwright.expect(page.locator(".said.assistant")).to_have_count(2)
    playwright.expect(answer.last).to_have_text(SAID)
    assert float(page.locator("#speed").inner_text()) > 0
    page.screenshot(
        path=str(Path(os.environ.get("TAPEOUT_SCREENSHOTS", tmp_path)) / f"page-{width}-{scheme}.png"), full_page=True
    )
    inner, needed = page.evaluate("[innerWidth, document.documentElement.scrollWidth]")
    assert needed <= inner
    assert problems == []


def test_gauges_show_what_the_engine_reports(
    url: str, client: LocalClient, opened: Callable[..., tuple[Any, list[str]]]
) -> None:
    page, _ = opened(url)
    playwright.expect(page.locator("#slo")).to_be_hidden()
    for held, hits in ((2, 0), (6, 30)):
        client.stats = client.stats._replace(blocks=8, blocks_held=held, prefix_queries=40, prefix_hits=hits)
        playwright.expect(page.get_by_role("meter", name="KV cache in use")).to_have_attribute(
            "aria-valuenow", f"{100 * held / 8:g}"
        )
        playwright.expect(page.locator("#prefix")).to_have_text(f"{100 * hits / 40:g} %")
    playwright.expect(page.locator("#slots")).to_be_hidden()
    client.stats = client.stats._replace(slots=16, slots_held=3, slots_cached=9)
    playwright.expect(page.locator("#slots")).to_have_text("3 of 16 slots of recurrent state, 9 kept for prefixes")
    client.info = replace(client.info, slot_bytes=250_000)
    playwright.expect(page.locator("#slots")).to_have_text(
        "3 of 16 slots of recurrent state, 9 kept for prefixes, 4.0 MB in all"
    )
    playwright.expect(page.locator("#kv-blocks")).to_be_visible()
    client.stats = client.stats._replace(blocks=0, blocks_held=0)  # of a model without attention
    playwright.expect(page.locator("#kv-blocks")).to_be_hidden()
    playwright.expect(page.get_by_role("meter", name="Recurrent state in use")).to_have_attribute(
        "aria-valuenow", f"{round(1000 * 3 / 16) / 10:g}"
    )
    playwright.expect(page.locator("#slots")).to_be_visible()
    playwright.expect(page.locator("#experts")).to_be_hidden()
    client.info = replace(client.info, mapped_bytes=3_000_000_000)
    playwright.expect(page.locator("#experts")).to_contain_text("an unknown part of 3.0 GB of experts in memory")
    client.stats = client.stats._replace(mapped_bytes=4000, resident_bytes=1000, page_faults=7)
    playwright.expect(page.locator("#experts")).to_have_text(
        "25.0 % of 3.0 GB of experts in memory, 7 pages read from disk"
    )
    client.healthy = False
    playwright.expect(page.locator("#status")).to_contain_text("the engine has not reported")


def test_a_fleet_shows_its_engines_and_a_release_that_is_under_way(
    client: LocalClient, opened: Callable[..., tuple[Any, list[str]]]
) -> None:
    old, new = client.info, replace(client.info, digest="b" * 64, pool="decode")
    statuses = [
        ReplicaStatus(f"tcp:h:{n}", ReplicaState.READY, "", 0, 0, info, EngineStats())
        for n, info in enumerate([old, old, new])
    ]
    fleet: Any = SimpleNamespace(
        plan=None, counts=Counter(), replicas_wanted={}, statuses=lambda: statuses, away=lambda: "no engine is ready"
    )
    with listening(application(client, OperationsSettings(), fleet)) as url:
        page, problems = opened(url, 390)
        playwright.expect(page.locator("#replicas tr")).to_have_count(3)
        playwright.expect(page.locator("#replicas tr").last).to_contain_text("b" * 12)
        playwright.expect(page.locator("#replicas tr").last).to_contain_text("decode")
        playwright.expect(page.locator("#release")).to_be_hidden()
        fleet.plan = ReleasePlan(stable=old.digest, candidate=new.digest, share=0.05, phase="canary")
        playwright.expect(page.locator("#release")).to_contain_text("Release, canary: bbbbbbbbbbbb is on 1 engines")
        inner, needed = page.evaluate("[innerWidth, document.documentElement.scrollWidth]")
        assert needed <= inner and problems == []


def test_objectives_show_what_is_left_of_their_budgets(
    client: LocalClient, opened: Callable[..., tuple[Any, list[str]]], tmp_path: Path
) -> None:
    slo = ServiceLevelObjectives(
        availability=0.999, ttft=LatencyObjective(seconds=60), itl=LatencyObjective(seconds=0.001)
    )
    with listening(application(client, OperationsSettings(slo=slo))) as url:
        page, problems = opened(url, 390)
        playwright.expect(page.locator("#budgets tr")).to_have_count(3)
        playwright.expect(page.locator("#budgets tr").first).to_contain_text("–")
        ask(page, "Why is the sky blue?")
        playwright.expect(page.locator("#budgets tr").last).to_contain_text("spent")
        playwright.expect(page.locator("#budgets tr").last).to_contain_text("between tokens at most 1 ms")
        playwright.expect(page.locator("#budgets tr").nth(1)).to_contain_text("100 %")
        page.screenshot(
            path=str(Path(os.environ.get("TAPEOUT_SCREENSHOTS", tmp_path)) / "page-slo.png"), full_page=True
        )
        assert problems == []


def test_stop_ends_the_answer_and_its_request(
    url: str, client: LocalClient, opened: Callable[..., tuple[Any, list[str]]]
) -> None:
    page, problems = opened(url)
    client.engine.before = lambda: time.sleep(0.1)
    playwright.expect(page.locator("#status")).to_have_text("ready")
    ask(page, "Why?")
    playwright.expect(page.locator(".said.assistant span")).to_have_text(re.compile("^R"))
    page.get_by_role("button", name="Stop").click()
    playwright.expect(page.locator("#chat-note")).to_have_text("stopped")
    playwright.expect(page.locator("#running")).to_have_text("0")
    playwright.expect(page.locator("#recent td").last).to_have_text("abort")
    page.get_by_role("button", name="New conversation").click()
    playwright.expect(page.locator(".said")).to_have_count(0)
    assert problems == []


def test_a_protected_server_asks_for_a_key(client: LocalClient, opened: Callable[..., tuple[Any, list[str]]]) -> None:
    with listening(application(client, OperationsSettings(api_keys=("secret",)))) as url:
        page, _ = opened(url)
        playwright.expect(page.locator("#status")).to_have_text("an API key is needed")
        page.get_by_label("Key, kept in this page only").fill("secret")
        playwright.expect(page.locator("#status")).to_have_text("ready")
        ask(page, "Why?")
        playwright.expect(page.locator(".said.assistant span")).to_have_text(SAID)


def test_every_control_is_labelled_reached_by_keyboard_and_has_contrast(
    url: str, opened: Callable[..., tuple[Any, list[str]]]
) -> None:
    for scheme in ("light", "dark"):
        page, _ = opened(url, 390, scheme)
        playwright.expect(page.locator("#status")).to_have_text("ready")
        nameless = page.evaluate(
            "[...document.querySelectorAll('button, input, textarea, [role=meter], [role=region], [role=log]')].filter("
            "e => !(e.labels?.length || e.textContent.trim() && e.matches('button') || e.ariaLabel"
            " || e.getAttribute('aria-labelledby'))).length"
        )
        assert nameless == 0
        reached: set[str] = set()
        for _ in range(12):
            page.keyboard.press("Tab")
            reached.add(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
        assert {"SUMMARY", "prompt", "send", "clear"} <= reached
        assert page.evaluate(CONTRAST) == []


# Text whose contrast with its background is below 4.5 (WCAG 2.2, 1.4.3).
CONTRAST = """() => {
  const numbers = (color) => color.match(/[\\d.]+/g).map(Number);
  const light = (color) => numbers(color).slice(0, 3).map((c) => c / 255)
    .map((c) => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (e) => {
    for (; e; e = e.parentElement) {
      const color = numbers(getComputedStyle(e).backgroundColor);
      if (color.length === 3 || color[3] > 0) return getComputedStyle(e).backgroundColor;
    }
    return "rgb(255, 255, 255)";
  };
  const own = (e) => [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
  const texts = [...document.body.querySelectorAll("*")].filter((e) => own(e) && !e.disabled && !e.matches("script"));
  return texts.filter((e) => {
    const [a, b] = [light(getComputedStyle(e).color), light(behind(e))];
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05) < 4.5;
  }).map((e) => e.outerHTML.slice(0, 80));
}"""


def test_the_policy_lets_no_other_script_run(url: str, opened: Callable[..., tuple[Any, list[str]]]) -> None:
    page, problems = opened(url)
    page.evaluate("document.body.appendChild(document.createElement('script')).textContent = 'window.planted = 1'")
    assert page.evaluate("window.planted") is None
    assert any("Content Security Policy" in problem for problem in problems)


def test_the_policy_follows_the_page() -> None:
    assert policy("<style>a</style><script>b</script>") != policy("<style>a</style><script>c</script>")


def test_metrics_and_usage_see_what_the_openai_client_does(client: LocalClient, tmp_path: Path) -> None:
    settings = OperationsSettings(
        api_keys=("secret",), usage_database=f"sqlite:///{tmp_path}/u.db", usage_journal=tmp_path / "j"
    )
    operations_app = application(client, settings)
    talk: Any = [{"role": "user", "content": "hi"}]
    with listening(operations_app) as url:
        api = web.openai_client(url, "secret")
        threads = [
            threading.Thread(target=lambda: api.chat.completions.create(model=MODEL, messages=talk)) for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        text = web.get(f"{url}/metrics").text
        with pytest.raises(openai.AuthenticationError):
            web.openai_client(url, "wrong").models.list()
    assert f'vllm:generation_tokens_total{{engine="0",model_name="{MODEL}"}} {3.0 * (len(SAID) + 1)}' in text
