"""A real bundle in a process of its own: responses are those of the engine called directly."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from engines.load import load
from engines.sequences import Sequences
from runtime.gateway.engines.local import ProcessClient
from runtime.wire.messages import GenerateRequest
from runtime.wire.start import EngineSettings
from tapeout.errors import ArtifactError, RequestError
from tests.exported import build_float, family_graph

NEW = 12


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return build_float(family_graph("llama"), tmp_path / "bundle", slots=2).folder


def greedy(sequences: Sequences, prompt: list[int]) -> list[int]:
    answer = [int(sequences.prefill(0, prompt)[0].argmax())]
    while len(answer) < NEW:
        logits = sequences.decode([answer[-1]], [len(prompt) + len(answer) - 1])
        answer.append(int(logits[0].argmax()))
    return answer


def test_requests_get_what_the_engine_gives_each_alone(bundle: Path) -> None:
    prompts = [[1 + (7 * i + j) % 40 for j in range(3 + 5 * i)] for i in range(6)]
    sequences = Sequences(load(bundle, threads=1))
    expected = [greedy(sequences, prompt) for prompt in prompts]
    sequences.close()

    async def test() -> list[list[int]]:
        client = ProcessClient(str(bundle), EngineSettings(threads=1))
        try:
            await client.open()
            assert client.info.digest and client.info.weight_bytes > 0 and client.info.name == "bundle"

            async def answer(id: str, prompt: list[int]) -> list[int]:
                request = GenerateRequest(id, prompt, NEW)
                return [token for delta in [d async for d in client.generate(request)] for token in delta.tokens]

            return await asyncio.gather(*[answer(f"{i}", prompt) for i, prompt in enumerate(prompts)])
        finally:
            await client.close()

    assert asyncio.run(test()) == expected


@pytest.mark.parametrize("missing", [True, False])
def test_what_cannot_be_opened_says_why(tmp_path: Path, bundle: Path, missing: bool) -> None:
    async def test() -> None:
        folder = tmp_path / "none" if missing else bundle
        client = ProcessClient(str(folder), EngineSettings(threads=1, kv_bytes=10))
        try:
            with pytest.raises(ArtifactError if missing else RequestError) as caught:
                await client.open()
            assert missing or caught.value.found == "10 bytes of keys, values and recurrent state"
        finally:
            await client.close()

    asyncio.run(test())
