"""Engines of the target ``cuda`` in FP8, linears and KV cache, from a checkpoint to what they compute."""

from __future__ import annotations

import re
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from engines.bundle import EngineBundle
from engines.compile import build
from engines.kernels.cuda.plan import PLAN_FILE, LaunchPlan
from engines.load import graph_target, load, open_probe
from engines.protocol import Engine, Entry, FloatArray
from evals.kinds.parity.measure import compare
from pipeline.stages.candidate import build_candidate
from quantization.calibrate import calibrate
from quantization.calibration import Calibration
from quantization.checkpoint import QuantizedModel
from quantization.compressed_tensors import open_checkpoint
from quantization.quantize import quantize
from quantization.reference import QuantizedReference
from tapeout import artifact
from tapeout.artifact import Artifact
from tapeout.errors import BuildError
from tapeout.portable_graph import PortableGraph
from tapeout.quantized import round_to_nearest
from tapeout.recipe import BaseRecipe, Calibrate, DataSource, KVCache, ModelSource, Plan, Quantize, Rule
from tapeout.schemes import FP8_DYNAMIC, Scheme
from tests.cuda_bundles import small_graph
from tests.family_engines import texts
from tests.lowering import FixedWeights
from tests.plans import written_plan

RECIPE = BaseRecipe(
    model=ModelSource(source="file:model"),
    data=DataSource(source="file:data"),
    calibrate=Calibrate(samples=4, tokens=48),
    plan=Plan(
        schemes=(Rule(match="*", scheme=Scheme.model_validate({"format": "fp8-dynamic"})),),
        embeddings=Scheme(bits=8, group_size=64, symmetric=True),
        kv_cache=KVCache(dtype="fp8"),
    ),
    quantize=Quantize(scale_grid=4),
)


def words(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 200, count).tolist()


@pytest.fixture(scope="module")
def graph() -> Artifact[PortableGraph]:
    return small_graph()


@pytest.fixture(scope="module")
def quantized(graph: Artifact[PortableGraph], tmp_path_factory: pytest.TempPathFactory) -> Artifact[QuantizedModel]:
    folder = tmp_path_factory.mktemp("fp8")
    calibration = calibrate(
        RECIPE.calibrate, graph, texts([words(48, 10 + row) for row in range(4)]), folder / "calibration"
    )
    plan = written_plan(RECIPE, graph, folder / "plan")
    return quantize(RECIPE.quantize, graph, calibration, plan, folder / "quantized")


@pytest.fixture(scope="module")
def bundle(
    graph: Artifact[PortableGraph], quantized: Artifact[QuantizedModel], tmp_path_factory: pytest.TempPathFactory
) -> Artifact[EngineBundle]:
    return build_candidate(
        graph,
        quantized,
        tmp_path_factory.mktemp("bundle") / "bundle",
        target=graph_target("cuda:host"),
        slots=4,
        progress=lambda _: None,
    )


def test_a_recipe_in_fp8_becomes_a_bundle(quantized: Artifact[QuantizedModel], bundle: Artifact[EngineBundle]) -> None:
    """All linears of layers in E4M3, with inputs that the norm, the gate or one more kernel rounds."""
    assert {linear.scheme.format for linear in quantized.record.linears if "layers" in linear.name} == {"fp8-dynamic"}
    summary, in_layers = quantized.record.summary, sum("layers" in linear.name for linear in quantized.record.linears)
    assert summary == f"fp8-dynamic:{in_layers} w8:1 kv-fp8"
    plan = LaunchPlan.model_validate_json((bundle.folder / PLAN_FILE).read_bytes())
    assert {"LINEAR_E4M3_8_any", "CACHE_Fp8", "ATTENTION_Fp8_64"} < {*plan.selected}
    linears = [one for one in plan.operations if one.kind == "linear"]
    assert [one.numbers["weight.e4m3"] for one in linears] == [1] * 8 + [0]  # qkv, o, gate and up, down; lm_head
    assert sum(one.kind == "quantize" for one in plan.operations) == 2  # what attention gives, of each layer
    assert sum("scales" in one.pointers for one in plan.operations if one.kind in ("norm", "gated")) == 6


def test_an_engine_computes_what_its_checkpoint_says(
    quantized: Artifact[QuantizedModel], bundle: Artifact[EngineBundle], graph: Artifact[PortableGraph], tmp_path: Path
) -> None:
    """Each linear for itself, over inputs that the reference rounds to the same grid. One in float is told from it."""
    head = next(group.members[0] for group in graph.record.groups if group.name == "lm_head")
    probe, worst = open_probe(bundle, tmp_path, threads=1), list[float]()
    for rounds in (True, False):
        reference = QuantizedReference(quantized.folder, fp8_activations=rounds)
        items = compare(probe, reference, [words(90, 3)], head=head)
        worst.append(max(item.worst_error for item in items))
    assert worst[0] < 0.01 < 0.02 < worst[1], worst  # the gate's bound


def test_a_cache_in_float16_is_what_the_reference_has_too(graph: Artifact[PortableGraph], tmp_path: Path) -> None:
    """Keys and values that stay in float are in 16 bits there. A reference that keeps 32 is off at the linear behind
    attention, whose inputs then fall on other codes of E4M3, and at no other.
    """
    asked = RECIPE.model_copy(update={"plan": RECIPE.plan.model_copy(update={"kv_cache": KVCache(dtype="float32")})})
    samples = texts([words(48, 10 + row) for row in range(4)])
    calibration = calibrate(asked.calibrate, graph, samples, tmp_path / "calibration")
    plan = written_plan(asked, graph, tmp_path / "plan")
    quantized = quantize(asked.quantize, graph, calibration, plan, tmp_path / "quantized")
    bundle = build_candidate(
        graph, quantized, tmp_path / "b", target=graph_target("cuda:host"), slots=1, progress=lambda _: None
    )
    head = next(group.members[0] for group in graph.record.groups if group.name == "lm_head")
    _, outputs = open_probe(bundle, tmp_path, threads=1)(words(90, 3))
    outputs = {name: value for name, value in outputs.items() if name != head}
    behind: dict[bool, float] = {}
    for half in (True, False):
        reference = QuantizedReference(quantized.folder, fp8_activations=True, half_cache=half)
        errors = {name: whole for name, (whole, _) in reference.teacher_forced(words(90, 3), outputs, {})[1].items()}
        behind[half] = max(error for name, error in errors.items() if "o_proj" in name)
        assert max(error for name, error in errors.items() if "o_proj" not in name) < 1e-3
    assert behind[True] < behind[False] < 0.01, behind


def test_other_readers_refuse_the_checkpoint_instead_of_taking_bytes_for_integers(
    quantized: Artifact[QuantizedModel],
) -> None:
    with pytest.raises(ValueError, match=r"format\n.*float-quantized"):
        AutoModelForCausalLM.from_pretrained(quantized.folder)


@pytest.mark.parametrize("planted", ["0x7f", "0xff", "scale"])
def test_a_planted_nan_of_a_checkpoint_is_refused_at_build(
    graph: Artifact[PortableGraph], tmp_path: Path, planted: str
) -> None:
    """Later damage of a bundle is found by its digests, as that of any file."""
    checkpoint = open_checkpoint(graph.folder)
    tensors: dict[str, Any] = {name: checkpoint.linear(name) for name in checkpoint.names()}
    name = next(group for group in graph.record.groups if group.name == "layers.1.down").members[0]
    rounded = round_to_nearest(checkpoint.weight(name), FP8_DYNAMIC.fitted(checkpoint.shape(name)[1]))
    if planted == "scale":
        rounded.scales[3] = np.nan
    else:
        rounded.codes[3, 4] = int(planted, 16)
    tensors[name] = rounded
    with pytest.raises(BuildError, match=f"{re.escape(name)} has 1 (codes in E4M3|scales) that are NaN"):
        build(graph, FixedWeights(tensors), tmp_path / "bundle", target=graph_target("cuda:host"),
              precision="mix", slots=1, kv_scales={}, parents={})  # fmt: skip
    assert not (tmp_path / "bundle").exists()


def test_a_model_without_recurrences_keeps_no_state_in_bfloat16(
    graph: Artifact[PortableGraph], quantized: Artifact[QuantizedModel], tmp_path: Path
) -> None:
    """Its evidence has no states to compare, and would be refused for that."""
    calibration = artifact.load(quantized.folder.parent / "calibration", Calibration)
    asked = RECIPE.model_copy(update={"plan": RECIPE.plan.model_copy(update={"recurrent_state": "bfloat16"})})
    found = quantize(asked.quantize, graph, calibration, written_plan(asked, graph, tmp_path / "p"), tmp_path / "q")
    assert found.record.recurrent_state == "float32" and found.record.summary == quantized.record.summary


def logits_of(engine: Engine, entries: list[Entry]) -> list[FloatArray]:
    results = engine.step(entries)
    assert not [result.error for result in results if result.error]
    return [result.logits for result in results if result.logits is not None]


def test_a_token_has_the_same_bits_alone_in_batches_and_in_chunks(bundle: Artifact[EngineBundle]) -> None:
    tokens, others = words(150, 4), words(70, 5)
    with closing(load(bundle.folder)) as engine:
        blocks = [range(10 * number, 10 * number + 10) for number in range(4)]
        (whole,) = logits_of(engine, [Entry(tokens, 0, blocks[0], "logits", range(150))])
        assert np.isfinite(whole).all()
        first, _ = logits_of(
            engine,
            [Entry(tokens[:67], 0, blocks[1], "logits", range(67)), Entry(others, 0, blocks[2], "logits", [69])],
        )
        (second,) = logits_of(engine, [Entry(tokens[67:140], 67, blocks[1], "logits", range(73))])
        parts = [first, second]
        for at in range(140, 150):
            beside = [Entry([others[at - 140]], 70 + at - 140, blocks[2], "logits")] if at % 2 else []
            parts.append(logits_of(engine, [Entry([tokens[at]], at, blocks[1], "logits"), *beside])[0])
    np.testing.assert_array_equal(np.concatenate(parts), whole)
