"""Rotary factors of longrope hold for every sequence, and are those that transformers uses for its length."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from pipeline.export.rotary import fix_rotary
from tests.exported import family_graph
from tests.families import MAX_POSITIONS, random_model

ORIGINAL = 24  # original_max_position_embeddings of the family


def logits(model: Any, tokens: int) -> np.ndarray:
    ids = torch.arange(3, 3 + tokens)[None]
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits[0].numpy()


@pytest.mark.parametrize(("positions", "factors"), [(ORIGINAL, "short"), (ORIGINAL + 1, "long")])
def test_the_longest_sequence_chooses(positions: int, factors: str) -> None:
    model = random_model("phi3-longrope")
    assert fix_rotary(model, positions) == factors
    chosen = model.config.rope_parameters
    assert (
        chosen["short_factor"]
        == chosen["long_factor"]
        == random_model("phi3-longrope").config.rope_parameters[f"{factors}_factor"]
    )


def test_up_to_the_original_length_nothing_changes() -> None:
    model, unchanged = random_model("phi3-longrope"), random_model("phi3-longrope")
    fix_rotary(model, ORIGINAL)
    for tokens in (5, ORIGINAL):
        np.testing.assert_array_equal(logits(model, tokens), logits(unchanged, tokens))


def test_a_sequence_beyond_the_original_length_gets_what_transformers_gives_it() -> None:
    model, unchanged = random_model("phi3-longrope"), random_model("phi3-longrope")
    fix_rotary(model, MAX_POSITIONS)
    np.testing.assert_array_equal(logits(model, 40), logits(unchanged, 40))
    np.testing.assert_allclose(logits(model, 20), logits(unchanged, 40)[:20], atol=1e-5)  # the beginning of a long one
    assert np.abs(logits(model, 20) - logits(unchanged, 20)).max() > 1e-2


def test_the_exported_checkpoint_has_the_chosen_factors_only() -> None:
    """What calibration and every comparison load is the model that the graph computes."""
    graph = family_graph("phi3-longrope")
    assert graph.record.rotary_factors == "long"
    model, loaded = random_model("phi3-longrope"), AutoModelForCausalLM.from_pretrained(graph.folder)
    fix_rotary(model, MAX_POSITIONS)
    for tokens in (5, 40):
        np.testing.assert_array_equal(logits(loaded, tokens), logits(model, tokens))


def test_other_scaling_is_left_alone() -> None:
    for name in ("llama", "llama-yarn", "llama-linear-scaling", "gemma3"):
        assert fix_rotary(random_model(name), MAX_POSITIONS) == "fixed"


def test_factors_of_layer_types_are_chosen_one_by_one() -> None:
    """gemma3 keeps rotary parameters for each type of layer."""
    model = random_model("gemma3", layer_types=["sliding_attention", "full_attention"])
    rotary, parameters = model.model.rotary_emb, model.config.rope_parameters
    factors = {"short_factor": [1.0] * 8, "long_factor": [3.0] * 8, "original_max_position_embeddings": ORIGINAL}
    parameters["full_attention"] |= {"rope_type": "longrope", "factor": 2.0, **factors}
    rotary.rope_type["full_attention"] = "longrope"
    before = {name: getattr(rotary, f"{name}_inv_freq").clone() for name in ("full_attention", "sliding_attention")}
    assert fix_rotary(model, MAX_POSITIONS) == "long"
    torch.testing.assert_close(rotary.full_attention_inv_freq, before["full_attention"] / 3)
    torch.testing.assert_close(rotary.sliding_attention_inv_freq, before["sliding_attention"])
