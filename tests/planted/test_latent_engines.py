"""Defects of latent attention in an engine: what is planted where keys are put together must show in its logits.

The engine is compared with its quantized checkpoint by the bounds of parity.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engines.passes.base import Lowering, PassResult
from engines.passes.onnxruntime import cached_attention, latent_keys
from tests.family_engines import difference_from_checkpoint, make

FAMILY = "deepseek_v3-dense"


TWO_SIZES = {"qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 16}  # keys of 32 channels


def difference(folder: Path, **settings: int) -> str:
    return difference_from_checkpoint(make(FAMILY, folder, **settings), 4, 30)


def planted(monkeypatch: pytest.MonkeyPatch, change: Callable[[latent_keys.Parts], latent_keys.Parts]) -> None:
    sound = latent_keys.parts_of

    def wrong(*arguments: object) -> latent_keys.Parts | str:
        found = sound(*arguments)  # type: ignore[arg-type]
        assert not isinstance(found, str)
        return change(found)

    monkeypatch.setattr(latent_keys, "parts_of", wrong)


def test_queries_have_the_turned_part_of_the_neighbouring_head(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def change(parts: latent_keys.Parts) -> latent_keys.Parts:
        query, key, value = parts.runs
        turned = query[::2]  # each before the other part of its head
        moved = [run for pair in zip([*turned[1:], turned[0]], query[1::2], strict=True) for run in pair]
        return replace(parts, runs=[moved, key, value])

    planted(monkeypatch, change)
    assert "linear off by" in difference(tmp_path)


def test_keys_have_the_own_part_of_the_neighbouring_head(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def change(parts: latent_keys.Parts) -> latent_keys.Parts:
        query, key, value = parts.runs
        own = key[1::2]
        moved = [run for pair in zip(key[::2], [*own[1:], own[0]], strict=True) for run in pair]
        return replace(parts, runs=[query, moved, value])

    planted(monkeypatch, change)
    assert "linear off by" in difference(tmp_path)


def test_pairs_of_channels_that_turn_are_taken_for_halves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    planted(monkeypatch, lambda parts: replace(parts, interleaved=not parts.interleaved))
    assert "linear off by" in difference(tmp_path)


def test_scales_of_the_cache_are_in_the_old_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sound = latent_keys.run

    def wrong(lowering: Lowering) -> PassResult:
        scales = lowering.kv_scales
        outcome = sound(lowering)
        lowering.kv_scales = scales
        return outcome

    monkeypatch.setattr(latent_keys, "run", wrong)
    assert "linear off by" in difference(tmp_path)


def test_the_norm_of_a_latent_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sound = latent_keys.run

    def wrong(lowering: Lowering) -> PassResult:
        for node in [n for n in lowering.model.graph if n.op_type == "RMSNormalization"]:
            x, weight = node.inputs[:2]
            if x is not None and weight is not None and "kv_a_layernorm" in (weight.name or ""):
                node.outputs[0].replace_all_uses_with(x)
        return sound(lowering)

    monkeypatch.setattr(latent_keys, "run", wrong)
    assert "linear off by" in difference(tmp_path)


def test_values_have_the_columns_of_the_neighbouring_head(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def change(parts: latent_keys.Parts) -> latent_keys.Parts:
        query, key, value = parts.runs
        return replace(parts, runs=[query, key, [*value[1:], value[0]]])

    planted(monkeypatch, change)
    assert "linear off by" in difference(tmp_path, **TWO_SIZES)


def test_values_of_another_size_have_the_scale_of_the_neighbouring_channel(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sound = cached_attention.run

    def wrong(lowering: Lowering) -> PassResult:
        moved = {name: np.roll(scale, 1, -1) for name, scale in lowering.kv_scales.items() if name.endswith("v_scale")}
        lowering.kv_scales = {**lowering.kv_scales, **moved}
        return sound(lowering)

    monkeypatch.setattr(cached_attention, "run", wrong)
    assert "linear off by" in difference(tmp_path, **TWO_SIZES)


@pytest.mark.parametrize("settings", [{}, TWO_SIZES], ids=["one size", "two sizes"])
def test_a_sound_engine(settings: dict[str, int], tmp_path: Path) -> None:
    assert difference(tmp_path, **settings) == ""
