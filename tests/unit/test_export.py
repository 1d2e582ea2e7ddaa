"""Every family goes from transformers to the portable graph to a running engine with its logits unchanged."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines.compile import build
from engines.load import find_target, load
from engines.native import unsupported
from engines.protocol import Engine, FloatArray
from pipeline.export.checkpoint import load_checkpoint
from pipeline.export.export import bind_weights, tied_parameters
from pipeline.export.trace import trace
from quantization.compressed_tensors import open_checkpoint
from tapeout.errors import ExportError
from tests.families import FAMILIES, LAYERS, VOCAB_SIZE, export_family, random_model, save_checkpoint

TOLERANCE = 1e-3  # of the issue; what is measured is near 1e-6
PROMPTS = (5, 13, 22, 31)  # tokens: shorter and longer than the sliding windows of the families
DECODED = 4


def reference(model: Any, tokens: Sequence[int]) -> FloatArray:
    import torch

    with torch.no_grad():
        return model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0].numpy()


def relative_error(actual: FloatArray, expected: FloatArray) -> float:
    """Largest error of a row over the row's largest logit."""
    assert actual.shape == expected.shape and np.isfinite(actual).all()
    return float((np.abs(actual - expected) / np.abs(expected).max(axis=-1, keepdims=True)).max())


def prefill_in_chunks(engine: Engine, slot: int, tokens: Sequence[int], chunks: Sequence[int]) -> FloatArray:
    """Logits of every token, fed in chunks of these sizes."""
    parts: list[FloatArray] = []
    start = 0
    for size in chunks:
        parts.append(engine.prefill(slot, tokens[start : start + size], start=start, positions=range(size)))
        start += size
    return np.concatenate(parts)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_keeps_its_logits_in_the_graph_and_in_the_engine(name: str, tmp_path: Path) -> None:
    model = random_model(name)
    graph = export_family(name, tmp_path, tolerance=TOLERANCE)
    assert graph.record.max_relative_error <= TOLERANCE
    assert graph.record.layers == LAYERS and graph.record.vocab_size == FAMILIES[name].vocab_size
    assert graph.record.rotary == FAMILIES[name].rotary
    bundle = build(
        graph,
        open_checkpoint(graph.folder),
        tmp_path / "bundle",
        target=find_target("ort-cpu"),
        precision="float32",
        slots=len(PROMPTS),
        kv_scales={},
        parents={},
    )
    attention = "GroupQueryAttention" if unsupported() else "CachedAttention"
    assert bundle.record.census[attention] == LAYERS

    tokens = [np.random.default_rng(n).integers(3, VOCAB_SIZE, n + DECODED).tolist() for n in PROMPTS]
    expected = [reference(model, row) for row in tokens]
    engine = load(bundle.folder, threads=1)
    try:
        for slot, (length, row) in enumerate(zip(PROMPTS, tokens, strict=True)):
            logits = engine.prefill(slot, row[:length], positions=range(length))
            assert relative_error(logits, expected[slot][:length]) < TOLERANCE
        for step in range(DECODED):  # rows of different lengths together
            lengths = [length + step for length in PROMPTS]
            logits = engine.decode([row[n] for row, n in zip(tokens, lengths, strict=True)], lengths)
            assert relative_error(logits, np.stack([e[n] for e, n in zip(expected, lengths, strict=True)])) < TOLERANCE
        chunked = prefill_in_chunks(engine, 0, tokens[3], (9, 2, 1, 17))  # over what the slot held before
        assert relative_error(chunked, expected[3][:29]) < TOLERANCE
    finally:
        engine.close()


def test_a_head_that_is_not_tied_is_told_from_one_that_is(tmp_path: Path) -> None:
    assert tied_parameters(random_model("llama")) == {}
    assert tied_parameters(random_model("qwen2")) == {"lm_head.weight": "model.embed_tokens.weight"}


def test_names_of_a_first_release_give_way_to_those_the_graph_carries(tmp_path: Path) -> None:
    """gpt_neox was published with ``embed_out``, which transformers calls ``lm_head`` today."""
    graph = export_family("gpt_neox", tmp_path)
    checkpoint = tmp_path / "checkpoint"
    assert "embed_out.weight" in open_checkpoint(checkpoint).names()
    stored = open_checkpoint(graph.folder)
    assert {name for group in graph.record.groups for name in group.members} <= set(stored.names())
    np.testing.assert_array_equal(
        stored.weight("lm_head.weight"), open_checkpoint(checkpoint).weight("embed_out.weight")
    )
    assert load_checkpoint(graph.folder).model.lm_head.weight.shape == (
        VOCAB_SIZE,
        64,
    )  # and transformers still reads it


def test_a_graph_that_differs_from_transformers_is_not_kept(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="differ from transformers") as caught:
        export_family("llama", tmp_path, tolerance=1e-12)
    assert "export.tolerance" in caught.value.expected
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_a_folder_that_holds_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"no config\.json"):
        load_checkpoint(tmp_path)


def test_a_weight_missing_from_the_checkpoint_is_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = random_model("llama")
    checkpoint = save_checkpoint(model, tmp_path / "checkpoint")
    graph = trace(model)
    weights = load_file(checkpoint / "model.safetensors")
    del weights["model.norm.weight"]
    shutil.rmtree(checkpoint)
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ExportError, match=r"model\.norm\.weight is not in model\.safetensors"):
        bind_weights(graph, tmp_path / "model.safetensors", {})
