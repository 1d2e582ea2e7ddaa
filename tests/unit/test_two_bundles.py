"""Two bundles in one gateway: each conversation has the text side of its own, and operators see both."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from runtime.gateway.fleet.release import ReleasePlan
from runtime.gateway.fleet.replica import ReplicaState, ReplicaStatus
from runtime.gateway.http.service import Service
from runtime.gateway.operations.fleet import FleetView
from runtime.gateway.protocol.calls import Call, Caller
from runtime.gateway.protocol.errors import ApiError
from runtime.gateway.text.chat_template import ChatTemplate
from runtime.gateway.text.model import TextModel
from runtime.wire.messages import EngineInfo, EngineStats
from tests.http_server import byte_tokenizer

OLD, NEW = "a" * 64, "b" * 64
INFO = EngineInfo(OLD, "old", 100, 260, 4, 100, 1, 1, frozenset())
INFOS = {OLD: INFO, NEW: replace(INFO, digest=NEW, name="new", max_tokens=50)}


class Client:
    """Conversations with these openings get the new bundle."""

    def __init__(self) -> None:
        self.info, self.bundles, self.new = INFO, INFOS, {b"new"}

    def info_for(self, opening: bytes) -> EngineInfo:
        return INFOS[NEW if opening in self.new else OLD]


def service(client: Client) -> Service:
    texts = {OLD: "<{{ messages }}>", NEW: "[{{ messages }}]"}
    models = {digest: TextModel(digest, byte_tokenizer(), ChatTemplate(text, {})) for digest, text in texts.items()}
    return Service(cast(Any, client), models, ("m",))


def test_each_conversation_is_encoded_for_its_bundle() -> None:
    """Planted: the template or the limits of the stable one for all."""

    async def encode(model: TextModel, info: EngineInfo) -> str:
        assert model.template is not None
        return f"{model.template.render('hello', tools=None, add_generation_prompt=False)} {info.max_tokens}"

    async def test() -> None:
        found = service(Client())
        assert (await found.encoded(b"old", encode))[1:] == (INFO, "<hello> 100")
        assert (await found.encoded(b"new", encode))[1:] == (INFOS[NEW], "[hello] 50")

    asyncio.run(test())


def test_one_that_moves_while_it_is_encoded_is_encoded_again() -> None:
    client = Client()

    async def encode(model: TextModel, _: EngineInfo) -> str:
        client.new.clear()
        return model.digest

    async def test() -> None:
        model, info, encoded = await service(client).encoded(b"new", encode)
        assert model.digest == info.digest == encoded == OLD

    asyncio.run(test())


def test_the_text_side_of_a_bundle_is_kept_while_it_has_engines() -> None:
    async def test() -> None:
        client = Client()
        found = service(client)
        await found.opened(cast(Any, SimpleNamespace(info=INFOS[NEW])))
        assert found.models.keys() == {OLD, NEW}
        client.bundles = {OLD: INFO}
        await found.opened(cast(Any, SimpleNamespace(info=INFO)))
        assert found.models.keys() == {OLD}

    asyncio.run(test())


def view(plan: ReleasePlan | None) -> FleetView:
    statuses = [
        ReplicaStatus(f"tcp:h:{n}", ReplicaState.READY, "", 0, 0, info, EngineStats())
        for n, info in enumerate([INFO, INFO, INFOS[NEW], None])
    ]
    counts = Counter(retries=0, resumptions=0, lost=0)
    return FleetView(
        cast(Any, SimpleNamespace(plan=plan, counts=counts, replicas_wanted={}, statuses=lambda: statuses))
    )


def of_release(found: FleetView) -> dict[str, Any]:
    """What a release is judged by."""
    app = Starlette(routes=found.routes())
    with TestClient(app) as client:
        return client.get("/fleet").json()["bundles"]


def failed_call(digest: str) -> Call:
    call = Call("i", "r", "/v1/completions", "m", digest, Caller(), False, [[1]], 1, 5, arrival=1.0)
    call.error = ApiError(500, "engine")
    return call


def test_a_bundle_that_failed_is_judged_anew_when_it_is_tried_again() -> None:
    """Planted: what it did at the first try counts, so it fails at once. Metrics never go back."""
    canary = ReleasePlan(stable=OLD, candidate=NEW, share=0.25, phase="canary")
    fleet = SimpleNamespace(plan=canary, counts=Counter(), replicas_wanted={}, statuses=list)
    found = FleetView(cast(Any, fleet))
    for plan, calls in (
        (canary, 1),
        (canary.model_copy(update={"share": 0.5, "phase": "rolling"}), 2),
        (ReleasePlan(stable=OLD, phase="rolled back"), 3),
        (canary, 1),
    ):
        fleet.plan = plan
        found.ended(failed_call(NEW))
        assert of_release(found)[NEW]["failed"] == calls
    fleet.plan = ReleasePlan(stable=OLD, phase="rolled back")
    assert of_release(found)
    fleet.plan = canary
    assert not of_release(found), "also where no call has ended since"
    registry = CollectorRegistry()
    registry.register(found)
    assert f'tapeout:bundle_calls_total{{bundle="{NEW}"}} 4.0' in generate_latest(registry).decode()


def test_a_release_is_shown_in_words() -> None:
    plan = ReleasePlan(stable=OLD, candidate=NEW, share=0.05, phase="canary", moving="tcp:h:0")
    assert view(plan).release() == (
        "canary: bbbbbbbbbbbb is on 1 engines and gets 5 % of the conversations, aaaaaaaaaaaa is on 2; "
        "tcp:h:0 opens the other one"
    )
    assert [one["digest"] for one in view(plan).replicas()] == [OLD, OLD, NEW, None]
    for other in (None, ReleasePlan(stable=OLD, phase="done")):
        assert not view(other).release()


@pytest.mark.parametrize(
    ("error", "cancelled", "counted"),
    [
        (None, False, (1, 0)),
        (ApiError(500, "engine"), False, (1, 1)),
        (ApiError(503, "down"), False, (1, 1)),
        (ApiError(400, "prompt"), False, (0, 0)),
        (None, True, (0, 0)),
    ],
)
def test_calls_count_for_their_bundle_where_the_service_answers_for_them(
    error: ApiError | None, cancelled: bool, counted: tuple[int, int]
) -> None:
    found = view(ReleasePlan(stable=OLD, candidate=NEW, share=0.25, phase="canary"))
    call = Call("i", "r", "/v1/completions", "m", NEW, Caller(), False, [[1]], 1, 5, arrival=1.0)
    call.error, call.cancelled, call.first_token = error, cancelled, 1.03
    found.ended(call)
    figures = of_release(found).get(NEW)
    assert (counted == (0, 0)) == (figures is None)
    if figures is not None:
        assert (figures["calls"], figures["failed"], sum(figures["first_tokens"])) == (*counted, 1)
        registry = CollectorRegistry()
        registry.register(found)
        text = generate_latest(registry).decode()
        assert f'tapeout:bundle_calls_total{{bundle="{NEW}"}} 1.0' in text and "tapeout:release_share 0.25" in text
