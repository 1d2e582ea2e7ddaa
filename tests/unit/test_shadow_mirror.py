"""Mirroring to a challenger in a process of its own: what users get stays, and what is observed is right."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncGenerator, Awaitable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from evals.check import Outcome
from evals.kinds.online import Online, frozen_plan
from evals.kinds.online.measure import judge
from runtime.gateway.engines.local import ProcessClient
from runtime.gateway.http.generation import ResponseChoice, ResponseChunk, generate
from runtime.gateway.operations.shadow import ShadowMirror
from runtime.gateway.protocol.bodies import Message
from runtime.gateway.protocol.calls import Call, Caller
from runtime.gateway.text.model import ResponseText, TextModel
from runtime.wire.messages import GenerateRequest, SamplingSettings
from runtime.wire.start import EngineSettings
from tapeout.observations import OBSERVATIONS_FILE, ObservationLog, read_observations
from tests.faulty_engine import REFUSES, WORKER, Faulty, FaultyEngine, alone
from tests.http_server import byte_tokenizer
from tests.waiting import until

SAME, OTHER = Faulty("7"), Faulty("8")  # seeds of the challenger's weights; the champion's is 7
POISON = 12  # a token that ends a challenger's process
PLAN = frozen_plan(Online(share=1.0), FaultyEngine(SAME).digest, "b" * 64)
TEXT = TextModel(PLAN.champion, byte_tokenizer())
SAMPLED = SamplingSettings(temperature=1.0, seed=5)


@dataclass
class Mirroring:
    folder: Path
    client: ProcessClient
    shadow: ShadowMirror
    calls: int = 0

    async def ask(
        self,
        prompt: list[int],
        *,
        mirrored: bool = True,
        n: int = 1,
        new: int = 12,
        messages: Any = (),
        **settings: Any,
    ) -> list[ResponseChunk]:
        """One call as the endpoints make it."""
        self.calls += 1
        call = Call(
            id=f"call-{self.calls}", request_id="r", endpoint="/", model="m", digest=self.client.info.digest,
            caller=Caller(), stream=False, prompts=[prompt], n=n, max_new_tokens=new, conversation=messages,
        )  # fmt: skip
        choices = [
            ResponseChoice(i, 0, GenerateRequest(f"{call.id}-{i}", prompt, new, **settings), ResponseText(TEXT))
            for i in range(n)
        ]
        return [part async for part in generate(self.client, call, choices, [self.shadow] if mirrored else [])]

    async def observed(self, count: int) -> None:
        """Lines are only counted while it waits: whoever checks all of them again and again slows down what it waits
        for.
        """
        file = self.folder / OBSERVATIONS_FILE
        await until(lambda: file.read_bytes().count(b'"agree"') >= count)
        assert len(read_observations(self.folder).made) >= count


def challenger_process() -> psutil.Process:
    """The champion's process was started first."""
    return max(psutil.Process().children(), key=lambda child: child.pid)


@asynccontextmanager
async def mirroring(
    folder: Path, challenger: Faulty = SAME, *, plan: Any = PLAN, champion: Faulty = SAME
) -> AsyncGenerator[Mirroring]:
    client = ProcessClient(str(champion), worker=WORKER)
    shadow = ShadowMirror(ObservationLog(folder, plan), plan, folder)
    work = asyncio.ensure_future(shadow.run(str(challenger), EngineSettings(), worker=WORKER))
    try:
        await client.open()
        await until(lambda: shadow.ready or work.done())
        yield Mirroring(folder, client, shadow)
    finally:
        work.cancel()
        with suppress(asyncio.CancelledError):
            await work
        await client.close()
        with suppress(OSError):
            shadow.close()


def run(test: Awaitable[None]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(test, 240)

    asyncio.run(bounded())


def shown(parts: list[ResponseChunk]) -> list[tuple[Any, ...]]:
    """What a user can see. Where deltas end depends on time, so parts are joined."""
    tokens = [token for part in parts for token in part.tokens]
    entries = [entry for part in parts for entry in part.logprobs]
    return [("".join(part.text for part in parts), tokens, entries, parts[-1].finish_reason)]


SETTINGS = [
    {},
    {"sampling": SAMPLED},
    {"sampling": SAMPLED, "logprobs": 0},
    {"sampling": SAMPLED, "logprobs": 3},
    {"logprobs": 0},
    {"sampling": SamplingSettings(repetition_penalty=1.3)},
    {"sampling": SamplingSettings(logit_bias={3: 5.0})},
    {"min_new_tokens": 8, "stop_tokens": frozenset({0, 1, 2})},
]


def test_users_get_the_same_and_an_equal_challenger_agrees_everywhere(tmp_path: Path) -> None:
    async def test() -> None:
        async with mirroring(tmp_path) as served:
            for number, settings in enumerate(SETTINGS):
                prompt = [1, 2, 3 + number]
                plain = await served.ask(prompt, mirrored=False, **settings)
                assert shown(await served.ask(prompt, **settings)) == shown(plain), settings
            await served.observed(len(SETTINGS))
            for one in read_observations(tmp_path).made:
                assert one.tokens == one.agree > 0 and not one.failed and one.prompt_tokens == 3

    run(test())


def test_another_engine_disagrees_and_does_not_pass(tmp_path: Path) -> None:
    async def test() -> None:
        async with mirroring(tmp_path, OTHER) as served:
            for number in range(12):
                await served.ask([1, number], new=60, sampling=SAMPLED if number % 2 else SamplingSettings())
            await served.observed(12)
            verdict = judge(PLAN, read_observations(tmp_path))
            assert verdict.outcome is Outcome.FAIL and (verdict.disagreement or 0) > 0.5

    run(test())


def test_agreement_is_that_of_the_engines_token_by_token(tmp_path: Path) -> None:
    async def test() -> None:
        async with mirroring(tmp_path, OTHER) as served:
            answer = [t for part in await served.ask([4, 5], new=40, sampling=SAMPLED) for t in part.tokens]
            await served.observed(1)
            champion, challenger = FaultyEngine(SAME), FaultyEngine(OTHER)
            histories = [[4, 5, *answer[:place]] for place in range(40)]
            agree = sum(
                champion.logits_after(each).argmax() == challenger.logits_after(each).argmax() for each in histories
            )
            (one,) = read_observations(tmp_path).made
            assert (one.tokens, one.agree) == (40, agree) and 0 < agree < 40

    run(test())


def test_a_challenger_that_crashes_costs_no_request_and_disagrees(tmp_path: Path) -> None:
    async def test() -> None:
        async with mirroring(tmp_path, Faulty(crash=POISON)) as served:
            engine = FaultyEngine(SAME)
            harmless = [prompt for prompt in ([1, n] for n in range(10)) if POISON not in alone(engine, prompt, 12)]
            for prompt in (harmless[0], [1, POISON], harmless[1]):
                parts = await served.ask(prompt)
                assert sum(len(part.tokens) for part in parts) == 12 and parts[-1].finish_reason == "length"
            await served.observed(3)
            good, poisoned, after = read_observations(tmp_path).made
            assert (poisoned.failed, poisoned.disagreement) == (True, 1.0)
            assert good.disagreement == after.disagreement == 0 and not good.failed
            assert served.client.restarts == 0

    run(test())


def test_a_challenger_that_is_killed_is_started_again(tmp_path: Path) -> None:
    async def test() -> None:
        async with mirroring(tmp_path) as served:
            await served.ask([1, 2])
            await served.observed(1)
            challenger_process().kill()
            for number in range(3):
                await served.ask([2, number])
            await served.observed(4)
            assert not any(one.failed for one in read_observations(tmp_path).made)

    run(test())


def test_a_challenger_that_cannot_be_opened_costs_nothing(tmp_path: Path) -> None:
    async def test() -> None:
        async with mirroring(tmp_path, Path(REFUSES)) as served:
            assert not served.shadow.ready
            assert shown(await served.ask([1, 2])) == shown(await served.ask([1, 2], mirrored=False))
            assert read_observations(tmp_path).picked == ()

    run(test())


def test_a_log_that_cannot_be_written_costs_no_request(tmp_path: Path) -> None:
    async def test() -> None:
        async with mirroring(tmp_path) as served:
            served.shadow.close()
            assert len(shown(await served.ask([1, 2]))[0][1]) == 12
            assert not served.shadow.ready

    run(test())


def test_the_challenger_waits_while_calls_run(tmp_path: Path) -> None:
    async def test() -> None:
        async with mirroring(tmp_path, champion=Faulty(step_seconds=0.02)) as served:
            long = asyncio.ensure_future(served.ask([5, 6], new=60))
            await until(lambda: served.client.stats.running == 1)
            await served.ask([1, 2], new=4)
            await asyncio.sleep(0.3)
            assert not long.done() and served.shadow.waiting == 1 and not read_observations(tmp_path).made
            await until(lambda: challenger_process().status() == psutil.STATUS_STOPPED)
            await long
            await served.observed(2)
            assert challenger_process().status() != psutil.STATUS_STOPPED

    run(test())


def test_a_call_stops_the_challenger_in_the_middle_of_an_answer(tmp_path: Path) -> None:
    async def test() -> None:
        async with mirroring(tmp_path, Faulty(step_seconds=0.5), champion=Faulty(step_seconds=0.02)) as served:
            await served.ask([1, 2])
            await until(lambda: not served.shadow.waiting)
            assert not read_observations(tmp_path).made
            call = asyncio.ensure_future(served.ask([3, 4], new=100))
            await until(lambda: challenger_process().status() == psutil.STATUS_STOPPED)
            assert not call.done()
            await call
            await served.observed(2)
            assert not any(one.failed for one in read_observations(tmp_path).made)

    run(test())


def test_a_challenger_that_is_stopped_ends_with_the_server(tmp_path: Path) -> None:
    """A stopped process would outlive a server that was killed, and keep its memory."""
    server = subprocess.Popen([sys.executable, "-m", "tests.paused_challenger"], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        challenger = psutil.Process(int(server.stdout.readline()))
        assert challenger.status() == psutil.STATUS_STOPPED
    finally:
        server.kill()
        server.wait()
        server.stdout.close()
    psutil.wait_procs([challenger], timeout=10)
    assert not challenger.is_running() or challenger.status() == psutil.STATUS_ZOMBIE


def test_a_conversation_is_one_unit(tmp_path: Path) -> None:
    def talk(*said: str) -> list[Message]:
        roles = ("system", "user", "assistant", "user")
        return [
            Message.model_validate({"role": role, "content": text}) for role, text in zip(roles, said, strict=False)
        ]

    async def test() -> None:
        async with mirroring(tmp_path) as served:
            await served.ask([1, 2], messages=talk("Be kind.", "Who?"))
            await served.ask([1, 2, 3, 4], messages=talk("Be kind.", "Who?", "I.", "And where?"))
            await served.ask([1, 2], n=3, messages=talk("Be kind.", "Why?"))
            await served.ask([9, 9])
            await served.ask([9, 9])
            await served.observed(3)
            await asyncio.sleep(0.2)
            found = read_observations(tmp_path)
            assert len(found.picked) == len(found.made) == 3
            text = (tmp_path / OBSERVATIONS_FILE).read_text()
            assert not any(word in text for word in ("kind", "Who", 'tokens": [', "call-"))

    run(test())


def test_calls_are_drawn_by_their_ids(tmp_path: Path) -> None:
    async def test() -> None:
        plan = PLAN.model_copy(update={"share": 0.25})
        async with mirroring(tmp_path, plan=plan) as served:
            for number in range(150):
                await served.ask([number // 10 % 10, number % 10, number // 100], new=1)
            assert 15 <= served.shadow.picked <= 65

    run(test())


def test_answers_of_another_champion_are_not_compared(tmp_path: Path) -> None:
    async def test() -> None:
        async with mirroring(tmp_path, plan=replace_champion()) as served:
            await served.ask([1, 2])
            assert read_observations(tmp_path).picked == ()

    run(test())


def replace_champion() -> Any:
    return PLAN.model_copy(update={"champion": "c" * 64})


def test_an_answer_longer_than_the_challengers_context_disagrees(tmp_path: Path) -> None:
    async def test() -> None:
        async with mirroring(tmp_path, Faulty(max_tokens=16, slots=1)) as served:
            await served.ask([1] * 10, new=20)
            await served.ask([1] * 30, new=20)
            await served.observed(2)
            first, second = read_observations(tmp_path).made
            assert (first.agree, first.tokens) == (6, 20) and second.disagreement == 1

    run(test())


def test_without_room_conversations_are_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.gateway.operations.shadow.WAITING", 2)

    async def test() -> None:
        async with mirroring(tmp_path) as served:
            await asyncio.gather(*[served.ask([2, number], new=30) for number in range(6)])
            assert served.shadow.missed >= 3
            await served.observed(2)
            found = read_observations(tmp_path)
            assert found.missed == served.shadow.missed and len(found.picked) == 6

    run(test())
