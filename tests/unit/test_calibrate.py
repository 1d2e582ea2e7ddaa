"""Calibration against what a plain forward pass shows, on the tiny llama."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from quantization.calibrate import calibrate
from quantization.calibration import HEAD_FILE, SAMPLES_FILE, Calibration, layer_file, sample_hash
from quantization.hidden_states import HiddenStates
from quantization.statistics import read_statistics
from tapeout.artifact import Artifact
from tapeout.errors import QuantizationError, SourceError
from tapeout.layer_stream import LayerState, LayerStream
from tapeout.portable_graph import PortableGraph
from tapeout.recipe import BaseRecipe, Calibrate, DataSource, ModelSource
from tests.families import random_model
from tests.graphs import llama_graph

SAMPLES, TOKENS = 8, 48
Texts = Callable[[int, int], list[str]]


def recipe(samples: int = SAMPLES) -> BaseRecipe:
    return BaseRecipe(
        model=ModelSource(source="file:model"),
        data=DataSource(source="file:data"),
        calibrate=Calibrate(samples=samples, tokens=TOKENS),
    )


def small_blocks(patch: pytest.MonkeyPatch) -> None:
    """The widest Gram matrices are kept in two blocks, and each is summed in two that are uneven."""
    patch.setattr("quantization.calibration.BLOCK_CHANNELS", 128)
    patch.setattr("quantization.input_sums.GRAM_BLOCK", 96)


def blocks_of(channels: int) -> int:
    return channels // 128


@pytest.fixture(scope="module")
def graph(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Artifact[PortableGraph]:
    return llama_graph(tiny_checkpoint, tmp_path_factory.mktemp("graph") / "graph")


@pytest.fixture(scope="module")
def calibration(
    graph: Artifact[PortableGraph], tiny_texts: Texts, tmp_path_factory: pytest.TempPathFactory
) -> Artifact[Calibration]:
    with pytest.MonkeyPatch.context() as patch:
        small_blocks(patch)
        return calibrate(
            recipe().calibrate, graph, tiny_texts(SAMPLES, 1), tmp_path_factory.mktemp("calibration") / "calibration"
        )


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_checkpoint, attn_implementation="eager")


@pytest.fixture(scope="module")
def samples(tiny_checkpoint: Path, tiny_texts: Texts) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(tiny_checkpoint)
    return [tokenizer(text).input_ids[:TOKENS] for text in tiny_texts(SAMPLES, 1)]


def test_keeps_which_samples_were_read_but_not_their_text(
    calibration: Artifact[Calibration], graph: Artifact[PortableGraph], samples: list[list[int]]
) -> None:
    lines = [json.loads(line) for line in (calibration.folder / SAMPLES_FILE).read_text().splitlines()]
    assert lines == [
        {"sample_hash": sample_hash(sample), "tokens": TOKENS, "holdout": number >= 6}
        for number, sample in enumerate(samples)
    ]
    record = calibration.record
    assert (record.samples, record.holdout_samples, record.tokens, record.layers) == (8, 2, 8 * TOKENS, 4)
    assert calibration.parents == {"graph": graph.ref}
    assert set(record.statistics) == {HEAD_FILE, *map(layer_file, range(4))}


def test_every_group_and_cache_has_its_statistics(
    calibration: Artifact[Calibration], graph: Artifact[PortableGraph]
) -> None:
    expected = {
        f"{group.name}.{part}": shape
        for group in graph.record.groups
        for part, shape in {
            "gram": (blocks_of(group.in_features), 128 * 127 // 2),
            "gram_power": (group.in_features,),
            "gram_holdout": (blocks_of(group.in_features), 128 * 127 // 2),
            "gram_holdout_power": (group.in_features,),
            "mean_abs": (group.in_features,),
            "max_abs": (group.in_features,),
        }.items()
    } | {f"layers.{n}.{part}": (2, 32) for n in range(4) for part in ("k_absmax", "v_absmax", "k_pair_absmax")}
    found = {
        name: tensor.shape
        for file in calibration.record.statistics
        for name, tensor in load_file(calibration.folder / file).items()
    }
    assert found == expected


@pytest.mark.parametrize(
    ("group", "module"),
    [
        ("layers.2.qkv", "model.layers.2.self_attn.k_proj"),
        ("layers.0.down", "model.layers.0.mlp.down_proj"),
        ("lm_head", "lm_head"),
    ],
)
def test_inputs_match_a_plain_forward_pass(
    calibration: Artifact[Calibration],
    graph: Artifact[PortableGraph],
    model: Any,
    samples: list[list[int]],
    group: str,
    module: str,
) -> None:
    inputs: list[torch.Tensor] = []
    handle = model.get_submodule(module).register_forward_hook(lambda _, args, __: inputs.append(args[0][0].double()))
    with torch.inference_mode():
        for sample in samples:
            model(torch.tensor([sample]))
    handle.remove()
    fit, holdout = torch.cat(inputs[:6]).numpy(), torch.cat(inputs[6:]).numpy()
    found = read_statistics(calibration, next(g for g in graph.record.groups if g.name == group))
    for blocks, inputs_of in ((found.gram, fit), (found.holdout, holdout)):
        assert len(blocks) == blocks_of(inputs_of.shape[1])
        for gram, part in zip(blocks, np.split(inputs_of, len(blocks), axis=1), strict=True):
            expected = part.T @ part / len(part)
            size = np.sqrt(np.diag(expected))
            assert (np.abs(gram - expected) <= 2e-4 * np.outer(size, size)).all()
            np.testing.assert_allclose(np.diag(gram), np.diag(expected), rtol=1e-3)
    np.testing.assert_allclose(found.mean_abs, abs(fit).mean(0), rtol=1e-4)
    np.testing.assert_allclose(found.max_abs, abs(fit).max(0), rtol=1e-4)


def test_cache_ranges_match_the_models_own_cache(
    calibration: Artifact[Calibration], model: Any, samples: list[list[int]]
) -> None:
    found = load_file(calibration.folder / layer_file(1))
    keys, values = [], []
    with torch.inference_mode():
        for sample in samples:
            cache = model(torch.tensor([sample]), use_cache=True).past_key_values.layers[1]
            keys.append(cache.keys[0].numpy())
            values.append(cache.values[0].numpy())
    key, value = np.concatenate(keys, axis=1), np.concatenate(values, axis=1)  # [2, tokens, 32]
    np.testing.assert_allclose(found["layers.1.k_absmax"], abs(key).max(1), rtol=1e-4)
    np.testing.assert_allclose(found["layers.1.v_absmax"], abs(value).max(1), rtol=1e-4)
    pair = np.hypot(key, np.roll(key, 16, axis=2)).max(1)
    np.testing.assert_allclose(found["layers.1.k_pair_absmax"], pair, rtol=1e-4)


def test_the_pair_norm_bounds_keys_at_positions_never_read(
    calibration: Artifact[Calibration], model: Any, samples: list[list[int]]
) -> None:
    """Rotation moves length between two channels of a pair, never beyond its norm: here 200 positions further on."""
    found = load_file(calibration.folder / layer_file(0))  # its keys depend on a token and its position alone
    with torch.inference_mode():
        for sample in samples:
            positions = torch.arange(200, 200 + len(sample))[None]
            key = (
                model(torch.tensor([sample]), position_ids=positions, use_cache=True).past_key_values.layers[0].keys[0]
            )
            assert (key.abs().amax(1).numpy() <= found["layers.0.k_pair_absmax"] * 1.0001).all()


def test_an_interrupted_run_goes_on_at_the_layer_it_was_in(
    graph: Artifact[PortableGraph],
    calibration: Artifact[Calibration],
    tiny_texts: Texts,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    computed: list[int] = []
    run = LayerStream.run

    def watched(stream: LayerStream, number: int, state: LayerState, **inputs: Any) -> LayerState:
        computed.append(number)
        if len(computed) == stop_after:
            raise KeyboardInterrupt
        return run(stream, number, state, **inputs)

    monkeypatch.setattr(LayerStream, "run", watched)
    small_blocks(monkeypatch)
    stop_after = 1 + 2 * SAMPLES + 3  # the first call is the stream's own; then in the third layer
    with pytest.raises(KeyboardInterrupt):
        calibrate(recipe().calibrate, graph, tiny_texts(SAMPLES, 1), tmp_path / "calibration")
    assert not (tmp_path / "calibration").exists()
    computed, stop_after = [], 0
    again = calibrate(recipe().calibrate, graph, tiny_texts(SAMPLES, 1), tmp_path / "calibration")
    assert computed == [0] + [2] * SAMPLES + [3] * SAMPLES
    assert again.digest == calibration.digest
    assert [path.name for path in tmp_path.iterdir()] == ["calibration"]


def test_an_interrupted_run_over_other_samples_starts_again(
    graph: Artifact[PortableGraph],
    calibration: Artifact[Calibration],
    tiny_texts: Texts,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small_blocks(monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(LayerStream, "finish", interrupt)
        with pytest.raises(KeyboardInterrupt):
            calibrate(recipe().calibrate, graph, tiny_texts(SAMPLES, 2), tmp_path / "calibration")
    again = calibrate(recipe().calibrate, graph, tiny_texts(SAMPLES, 1), tmp_path / "calibration")
    assert again.digest == calibration.digest


def interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_keys_and_values_that_layers_share_survive_an_interruption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = random_model("gemma4-shared-caches")
    model.save_pretrained(tmp_path / "model", save_original_format=False)
    samples = [torch.arange(3, 3 + length)[None] for length in (9, 14)]

    def after(layers: range, states: HiddenStates) -> HiddenStates:
        stream = LayerStream(tmp_path / "model")
        for layer in layers:
            with stream.loaded(layer):
                for number, sample in enumerate(samples):
                    states.write(stream.run(layer, states.read(number), input_ids=sample))
            states.advance()
        return states

    (tmp_path / "states").mkdir()
    after(range(1), HiddenStates(tmp_path / "states", [9, 14]))
    resumed = HiddenStates(tmp_path / "states", [9, 14])
    assert resumed.layer == 1
    assert resumed.read(1).carried
    after(range(1, 2), resumed)
    stream = LayerStream(tmp_path / "model")
    with torch.inference_mode():
        for number, sample in enumerate(samples):
            found = stream.finish(resumed.read(number), input_ids=sample).logits
            torch.testing.assert_close(found, model(sample, use_cache=False).logits, rtol=1e-6, atol=1e-6)


def test_refuses_samples_that_are_too_few_too_short_or_repeated(
    graph: Artifact[PortableGraph], tiny_texts: Texts, tmp_path: Path
) -> None:
    texts = tiny_texts(4, 1)
    for wrong, message in [
        (texts[:3], "3 samples"),
        ([*texts[:3], "Yes."], "sample 3 has"),
        ([*texts[:3], texts[0]], "samples 0 and 3 hold the same"),
    ]:
        with pytest.raises(SourceError, match=message):
            calibrate(recipe(samples=4).calibrate, graph, wrong, tmp_path / "calibration")
    assert not (tmp_path / "calibration").exists()


def test_a_model_that_computes_nan_is_refused_by_layer(
    model: Any, tiny_checkpoint: Path, tiny_texts: Texts, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    broken: Any = AutoModelForCausalLM.from_pretrained(tiny_checkpoint)
    with torch.no_grad():
        broken.model.layers[2].mlp.up_proj.weight[5, 7] = float("nan")
    broken.save_pretrained(tmp_path / "broken")
    AutoTokenizer.from_pretrained(tiny_checkpoint).save_pretrained(tmp_path / "broken")
    graph = llama_graph(tmp_path / "broken", tmp_path / "graph")
    with pytest.raises(QuantizationError, match=r"the input of layers\.2\.down holds"):
        calibrate(recipe().calibrate, graph, tiny_texts(SAMPLES, 1), tmp_path / "calibration")
    assert not (tmp_path / "calibration").exists()


@pytest.mark.parametrize("family", ["gemma2", "stablelm", "opt"])
def test_other_families_go_through_the_same_hooks(family: str, tiny_checkpoint: Path, tmp_path: Path) -> None:
    """Soft-capped scores, partly rotated heads, no rotary at all: keys and values are seen, outputs unchanged."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from tapeout.operators.attention.in_torch import kv_function

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}
    extra = {
        "gemma2": {"num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128, "sliding_window": 4},
        "stablelm": {"num_key_value_heads": 2, "intermediate_size": 128},
        "opt": {"ffn_dim": 128, "word_embed_proj_dim": 64, "pad_token_id": 1},
    }[family]
    config = AutoConfig.for_model(family, **sizes, **extra)
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    tokens = torch.randint(3, 100, (1, 12))
    seen: list[int] = []

    def look(layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(layer)
        return key, value

    with torch.inference_mode():
        expected = model(tokens, use_cache=False).logits
        with kv_function(model, look):
            actual = model(tokens, use_cache=False).logits
    assert seen == [0, 1]
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
