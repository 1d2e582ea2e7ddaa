"""Sound models with weights that look like a fault: they are quantized, and a fault that is planted in them is found.

Rows of zeros, constants, tiny and huge numbers, single entries, layers that contribute nothing (block expansion sets
``o_proj`` and ``down_proj`` to zero), layers of zeros and repeated layers.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from quantization.calibrate import calibrate
from quantization.checkpoint import QuantizedModel
from quantization.compressed_tensors import CheckpointWriter, open_checkpoint
from quantization.proof import QuantizationProof, count_tensors, prove
from quantization.quantize import quantize
from tapeout.artifact import Artifact, create, load
from tapeout.portable_graph import PortableGraph
from tapeout.quantized import QuantizedWeight, fit_range, round_to, round_to_nearest
from tapeout.recipe import BaseRecipe, Calibrate, DataSource, KVCache, ModelSource, Plan, Quantize, Rule
from tapeout.schemes import STATIC_INT8, Scheme
from tests.checkpoints import say_schemes
from tests.exported import tiny_graph
from tests.plans import written_plan
from tests.tiny import tiny_texts

Weights = dict[str, np.ndarray]
LARGEST_BFLOAT16 = 3.3895e38
EMBEDDING = "model.embed_tokens.weight"
LINEARS = tuple(f"self_attn.{part}_proj" for part in "qkvo") + tuple(
    f"mlp.{part}_proj" for part in ("gate", "up", "down")
)
SCHEMES = {
    "4-bit": Scheme(bits=4, group_size=32, symmetric=True),
    "4-bit asymmetric": Scheme(bits=4, group_size=32),
    "4-bit positive": Scheme(bits=4, group_size=64, symmetric=True, positive_scales=True),
    "5-bit": Scheme(bits=5, group_size=16, symmetric=True),
    "6-bit": Scheme(bits=6, group_size=64, symmetric=True),
    "8-bit": Scheme(bits=8, group_size=128, symmetric=True),
    "static": STATIC_INT8,
}
# What a row becomes; ``row`` is one of random weights of size 0.1 or so.
ROWS: dict[str, Callable[[np.ndarray], Any]] = {
    "zero": lambda row: 0,
    "constant": lambda row: row[0],
    "of ones": lambda row: 1,
    "tiny": lambda row: row * 1e-30,
    "denormal": lambda row: row * 1e-41,
    "small": lambda row: row * 1e-8,
    "large": lambda row: row * 1e4,
    "largest half": lambda row: np.sign(row) * 65504,
    "single": lambda row: np.where(np.arange(len(row)) == 3, row, 0),
    "one sign": np.abs,
    "nearly constant": lambda row: 0.2 + 0.01 * row,
}


def linear_names(weights: Weights) -> list[str]:
    return [name for name in weights if name.removesuffix(".weight").endswith("_proj")]


def change_rows(weights: Weights, name: str, kind: str, random: np.random.Generator, share: float = 0.1) -> None:
    weight = weights[name]
    for row in random.choice(len(weight), max(1, int(share * len(weight))), replace=False):
        weight[row] = ROWS[kind](weight[row])


def with_weights(folder: Path, change: Callable[[Weights], None]) -> Artifact[PortableGraph]:
    """The graph of the tiny llama, with other weights."""
    graph = tiny_graph()
    with create(folder, PortableGraph) as draft:
        shutil.copytree(graph.folder, draft.folder, dirs_exist_ok=True)
        (draft.folder / "record.json").unlink()
        weights = load_file(draft.folder / "model.safetensors")
        change(weights)
        save_file(weights, draft.folder / "model.safetensors", {"format": "pt"})
        draft.finish(graph.record, parents={})
    return load(folder, PortableGraph)


def quantized(
    folder: Path, change: Callable[[Weights], None], scheme: Scheme, **chosen: Any
) -> Artifact[QuantizedModel]:
    """Through calibration and all methods."""
    graph = with_weights(folder / "graph", change)
    recipe = BaseRecipe(
        model=ModelSource(source="file:m"),
        data=DataSource(source="file:d"),
        calibrate=Calibrate(samples=4, tokens=48),
        plan=Plan(
            schemes=(Rule(match="*", scheme=scheme),),
            embeddings=Scheme(bits=6, group_size=32, symmetric=True),
            kv_cache=KVCache(),
        ),
        quantize=Quantize(scale_grid=3, **chosen),
    )
    calibration = calibrate(recipe.calibrate, graph, tiny_texts(4, 1), folder / "calibration")
    return quantize(recipe.quantize, graph, calibration, written_plan(recipe, graph, folder / "plan"), folder / "out")


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(data=st.data())
def test_a_sound_model_passes(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    scheme = SCHEMES[data.draw(st.sampled_from(sorted(SCHEMES)))]
    random = np.random.default_rng(data.draw(st.integers(0, 1000)))
    rows = {part: data.draw(st.sampled_from(["", *ROWS]), label=part) for part in (*LINEARS, "embed_tokens")}
    empty = data.draw(st.sampled_from(["", "expansion", "zero", "repeated"]))
    unread = data.draw(st.booleans(), label="a token that no text has")

    def change(weights: Weights) -> None:
        for name in [*linear_names(weights), EMBEDDING]:
            kind = next(kind for part, kind in rows.items() if part in name)
            if kind:
                change_rows(weights, name, kind, random)
        if unread:
            weights[EMBEDDING][-1] = np.sign(weights[EMBEDDING][-1]) * np.float32(LARGEST_BFLOAT16)
        for name in [name for name in weights if ".layers.2." in name]:
            if empty == "repeated":
                weights[name] = weights[name.replace(".2.", ".1.")].copy()
            elif (empty == "zero" and "norm" not in name) or (
                empty == "expansion" and ("o_proj" in name or "down" in name)
            ):
                weights[name][:] = 0

    proof = quantized(tmp_path_factory.mktemp("sound"), change, scheme).record.proof
    assert proof.passed and proof.bits_per_weight <= proof.planned_bits_per_weight * 1.05


@pytest.mark.parametrize("case", ["a small row in every linear", "block expansion"])
def test_models_that_were_taken_for_a_fault(case: str, tmp_path: Path) -> None:
    """Small rows have float32 scales; a block that contributes nothing has scales of one and one code."""
    random = np.random.default_rng(0)

    def change(weights: Weights) -> None:
        for name in linear_names(weights):
            if case != "block expansion":
                change_rows(weights, name, "small", random, share=0.01)
            elif ".layers.2." in name and ("o_proj" in name or "down_proj" in name):
                weights[name][:] = 0

    proof = quantized(tmp_path, change, SCHEMES["5-bit"], candidates=("rtn",)).record.proof
    assert proof.passed and proof.bits_per_weight <= proof.planned_bits_per_weight * 1.05


PLANTED: dict[str, tuple[Callable[[QuantizedWeight, np.ndarray], QuantizedWeight | np.ndarray], str]] = {
    "never fitted": (lambda linear, weight: never_fitted(linear, weight), "only scales of one"),
    "never fitted, large": (lambda linear, weight: never_fitted(linear, 20 * weight), "only scales of one"),
    "one code": (lambda linear, _: replace(linear, codes=np.zeros_like(linear.codes)), "one code, or zeros"),
    "the middle": (lambda linear, _: replace(linear, codes=np.full_like(linear.codes, 8)), "one code, or zeros"),
    "NaN": (lambda linear, _: replace(linear, scales=linear.scales * np.nan), "NaN or infinite"),
    "zero": (lambda linear, _: replace(linear, scales=linear.scales * 0), "scales that are zero"),
    "other bits": (lambda _, weight: round_to_nearest(weight, SCHEMES["8-bit"].fitted(64)), "stored in 8 bits"),
    "float": (lambda _, weight: weight, "stored in float"),
    "more scales": (lambda linear, _: with_more_scales(linear), "bits per weight are stored"),
}


def never_fitted(linear: QuantizedWeight, weight: np.ndarray) -> QuantizedWeight:
    """Codes under scales of one, as where a calibration left the initial ones."""
    grid = fit_range(weight, linear.scheme)
    ones = replace(grid, scales=np.ones_like(grid.scales))
    return round_to(weight, ones, linear.scheme)


def with_more_scales(linear: QuantizedWeight) -> QuantizedWeight:
    return replace(
        linear, scales=np.repeat(linear.scales, 2, axis=1), scheme=linear.scheme.model_copy(update={"group_size": 16})
    )


@pytest.mark.parametrize("base", ["plain", "unusual"])
@pytest.mark.parametrize("planted", sorted(PLANTED))
def test_a_fault_in_such_a_model_is_found(planted: str, base: str, tmp_path: Path) -> None:
    """In one linear of a file; nine in ten of its rows are zero, constant or tiny."""
    spoil, reason = PLANTED[planted]
    scheme = SCHEMES["4-bit"]
    random = np.random.default_rng(5)
    weights = {"w": (0.1 * random.standard_normal((40, 64))).astype(np.float32)}
    if base == "unusual":
        for number, kind in enumerate(("zero", "constant", "of ones", "tiny", "denormal", "nearly constant")):
            for row in range(6 * number, 6 * number + 6):
                weights["w"][row] = ROWS[kind](weights["w"][row])
    sound = round_to_nearest(weights["w"], scheme)
    assert proof_of(tmp_path / "sound", sound, weights["w"], scheme).passed
    found = proof_of(tmp_path / "planted", spoil(sound, weights["w"]), weights["w"], scheme)
    assert any(reason in one for one in found.reasons), found.reasons


def proof_of(
    folder: Path, stored: QuantizedWeight | np.ndarray, weight: np.ndarray, scheme: Scheme
) -> QuantizationProof:
    folder.mkdir()
    writer = CheckpointWriter(folder)
    writer.add_linear("w.weight", stored)
    writer.finish()
    say_schemes(folder, {"w.weight": stored.scheme if isinstance(stored, QuantizedWeight) else scheme})
    checkpoint = open_checkpoint(folder)
    return prove(count_tensors(checkpoint, "w.weight", lambda _: weight), {"w.weight": scheme})
