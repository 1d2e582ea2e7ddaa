"""A real bundle in a process of its own: responses are those of the engine called directly."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from engines.compile import build
from engines.load import graph_target, load
from engines.sequences import Sequences
from quantization.compressed_tensors import open_checkpoint
from runtime.client import ProcessClient
from runtime.messages import GenerateRequest
from runtime.opening import OpenBundle
from tapeout.errors import ArtifactError, RequestError
from tests.families import export_family

NEW = 12


@pytest.fixture
def bundle(operators_of: str, tmp_path: Path) -> Path:
    """With native attention it is paged; with ONNX Runtime's own, one block is a sequence."""
    graph = export_family("llama", tmp_path)
    target = graph_target("ort-cpu")
    return build(
        graph,
        open_checkpoint(graph.folder),
        tmp_path / "bundle",
        target=target,
        precision="float32",
        slots=2,
        kv_scales={},
        parents={"graph": graph},
    ).folder


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
        client = ProcessClient(bundle, OpenBundle(threads=1))
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
        client = ProcessClient(tmp_path / "none" if missing else bundle, OpenBundle(threads=1, kv_bytes=10))
        try:
            with pytest.raises(ArtifactError if missing else RequestError) as caught:
                await client.open()
            assert missing or caught.value.found == "10 bytes of KV cache"
        finally:
            await client.close()

    asyncio.run(test())
