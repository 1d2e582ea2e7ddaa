"""Sensitivities of the tiny llama: real weights, real text, every kernel of the menu."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from engines.load import find_target
from pipeline.stages.target_candidates import target_candidates
from quantization.calibrate import calibrate
from quantization.calibration import Calibration
from quantization.quick_rounding import QuickRounding
from quantization.reference import round_by_token
from quantization.sensitivity import Sensitivity
from quantization.sensitivity_sweep import sweep
from quantization.simulate import Distributions, Simulation
from quantization.statistics import held_out
from quantization.units import candidates_for, candidates_of, units_of
from tapeout.artifact import Artifact
from tapeout.errors import QuantizationError, ResourceError
from tapeout.portable_graph import PortableGraph
from tapeout.recipe import BaseRecipe, Calibrate, DataSource, KVCache, ModelSource, Plan, Quantize
from tapeout.schemes import CANDIDATE_SCHEMES, EMBEDDING_CANDIDATES, FLOAT, FP8_DYNAMIC, Scheme
from tests.graphs import llama_graph

KINDS = ("8-bit g128", "4-bit g32", "4-bit g128")
TABLES = ("8-bit g64", "6-bit g64", "6-bit g32", "5-bit g32", "4-bit g32")
FOUR_BITS = Scheme(bits=4, group_size=32, symmetric=True)


class Inputs(NamedTuple):
    recipe: BaseRecipe
    graph: Artifact[PortableGraph]
    calibration: Artifact[Calibration]
    samples: list[list[int]]


def swept(inputs: Inputs, folder: Path) -> Artifact[Sensitivity]:
    recipe, graph, calibration, samples = inputs
    return sweep(recipe.plan, recipe.quantize, graph, calibration, samples, folder)


@pytest.fixture(scope="module")
def inputs(
    tiny_checkpoint: Path, tiny_texts: Callable[[int, int], list[str]], tmp_path_factory: pytest.TempPathFactory
) -> Inputs:
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("inputs")
    recipe = BaseRecipe(
        model=ModelSource(source="file:m"),
        data=DataSource(source="file:d"),
        calibrate=Calibrate(samples=24, tokens=96),
        plan=Plan(schemes="auto", embeddings="auto", kv_cache="auto", layers_per_group=2, samples=3),
    )
    graph = llama_graph(tiny_checkpoint, folder / "graph")
    texts = tiny_texts(24, 5)
    tokenizer: Any = AutoTokenizer.from_pretrained(tiny_checkpoint)
    return Inputs(
        recipe,
        graph,
        calibrate(recipe.calibrate, graph, texts, folder / "calibration"),
        [tokenizer(text).input_ids for text in texts],
    )


@pytest.fixture(scope="module")
def measured(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Artifact[Sensitivity]:
    return swept(inputs, tmp_path_factory.mktemp("out") / "sensitivity")


def test_float_costs_nothing_and_fewer_bits_cost_more(inputs: Inputs, measured: Artifact[Sensitivity]) -> None:
    record = measured.record
    assert record.asked and record.positions == 3 * 64 and len(record.samples) == 3
    assert [unit.name for unit in record.units] == [unit.name for unit in units_of(inputs.graph.record, 2)]
    for unit in record.units:
        columns = 256 if unit.name.endswith("down") else 128
        assert list(unit.kl) == [*dict.fromkeys([FLOAT.name, *(kernel.name for kernel in candidates_for(columns))])]
        # 8 bits in one group of the tiny model may cost less than single precision can tell from nothing.
        assert unit.kl["fp32"] == 0 <= min(unit.kl.values()) and min(unit.kl[name] for name in KINDS[1:]) > 0
    eight, four, coarse = (sum(unit.kl[name] for unit in record.units) for name in KINDS)
    assert 1.5 * eight < four < coarse
    assert list(record.embeddings) == [kernel.name for kernel in candidates_for(128, EMBEDDING_CANDIDATES)]
    eight, six, fine, five, four = (record.embeddings[name] for name in TABLES)
    # Which of the finest three is best is a matter of chance: the tiny model differs between processors.
    assert record.embeddings["fp32"] == 0 < min(eight, fine, six) and max(eight, fine, six) < five < four
    assert list(record.kv_cache) == ["float32", "int8 per channel", "int4 per channel"]
    assert (
        record.kv_cache["float32"] == 0 < 4 * record.kv_cache["int8 per channel"] < record.kv_cache["int4 per channel"]
    )
    assert {kernel.name for kernel in CANDIDATE_SCHEMES} >= set(record.units[0].kl)


def test_the_same_inputs_give_the_same_digest(inputs: Inputs, measured: Artifact[Sensitivity], tmp_path: Path) -> None:
    assert swept(inputs, tmp_path / "again").digest == measured.digest


def test_a_written_plan_asks_for_nothing(inputs: Inputs, tmp_path: Path) -> None:
    written = inputs.recipe.model_copy(update={"plan": Plan()})
    found = swept(inputs._replace(recipe=written, samples=[]), tmp_path / "sensitivity")
    assert found.record == Sensitivity(asked=False)


def test_too_little_memory_is_said_before_anything_is_measured(
    inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tapeout.resources.available_memory", lambda: 100 << 20)
    with pytest.raises(ResourceError, match=r"0\.1 GB of memory available") as caught:
        swept(inputs, tmp_path / "sensitivity")
    assert "for measuring sensitivity" in caught.value.expected and not list(tmp_path.iterdir())


def test_samples_of_other_lengths_are_measured_as_alone(inputs: Inputs) -> None:
    """They go through the model together, the shorter ones with other tokens behind them."""
    samples = [sample[:length] for sample, length in zip(inputs.samples, (96, 17, 70), strict=False)]
    unit = changed(inputs, "layers.0-1.o")
    together = Simulation(inputs.graph, samples, ())
    alone = [Simulation(inputs.graph, [sample], ()) for sample in samples]
    expected = sum(one.kl(unit) * one.positions for one in alone) / together.positions
    assert together.kl(unit) == pytest.approx(expected, rel=1e-3, abs=1e-6)


def test_tables_and_cache_that_are_written_out_are_measured_alone(inputs: Inputs, tmp_path: Path) -> None:
    fixed = {"embeddings": Scheme(bits=4, group_size=16, symmetric=True), "kv_cache": KVCache(granularity="per_tensor")}
    written = inputs.recipe.model_copy(update={"plan": inputs.recipe.plan.model_copy(update=fixed | {"samples": 1})})
    found = swept(inputs._replace(recipe=written), tmp_path / "sensitivity").record
    assert list(found.embeddings) == ["4-bit g16"] and list(found.kv_cache) == ["int8 per tensor"]
    assert min(*found.embeddings.values(), *found.kv_cache.values()) > 0


@pytest.fixture(scope="module")
def simulation(inputs: Inputs) -> Simulation:
    return Simulation(inputs.graph, held_out(inputs.calibration, inputs.samples)[:3], {0, 2})


def test_nan_is_no_kl_of_zero(simulation: Simulation) -> None:
    with pytest.raises(QuantizationError, match="a KL of nan"):
        simulation.kl({}, kv=lambda _layer, _name, kept: kept * float("nan"))


def changed(inputs: Inputs, *units: str, kernel: Scheme = FOUR_BITS) -> dict[str, Any]:
    rounding = QuickRounding(inputs.graph, inputs.calibration, inputs.recipe.quantize)
    groups = [g for unit in units_of(inputs.graph.record, 2) if unit.name in units for g in unit.groups]
    return rounding.rounded(rounding.prepare(groups), kernel)


def test_what_lies_before_a_unit_need_not_run_again(inputs: Inputs, simulation: Simulation) -> None:
    late = changed(inputs, "layers.2-3.gate_up")
    assert simulation.kl(late, first_layer=2) == pytest.approx(simulation.kl(late), rel=1e-4)
    assert simulation.kl({}, first_layer=2) == pytest.approx(0, abs=1e-6)
    assert simulation.kl({}) == pytest.approx(0, abs=1e-6)  # and nothing of what was changed stays behind


def test_a_divergence_is_exact_over_a_large_vocabulary() -> None:
    noise = torch.Generator().manual_seed(0)
    logits = 15 + 4 * torch.randn(16, 50_000, generator=noise)
    exact = Distributions.of(logits)
    assert exact.divergence(logits).abs().max() < 2e-5 and abs(float(exact.divergence(logits).mean())) < 1e-5
    moved = logits + 0.02 * torch.randn(logits.shape, generator=noise)
    logs, others = (x.double().log_softmax(-1) for x in (logits, moved))
    expected = (logs.exp() * (logs - others)).sum(-1).float()
    assert 1e-4 < float(expected.mean()) < 1e-3
    torch.testing.assert_close(exact.divergence(moved), expected, rtol=0, atol=2e-5)


def test_the_sum_over_units_is_about_what_they_cost_together(inputs: Inputs, simulation: Simulation) -> None:
    names = ("layers.0-1.o", "layers.0-1.down", "layers.2-3.gate_up")
    alone = [simulation.kl(changed(inputs, name)) for name in names]
    assert simulation.kl(changed(inputs, *names)) == pytest.approx(sum(alone), rel=0.5)


def test_a_changed_unit_costs_what_the_whole_model_says_in_torch(inputs: Inputs, simulation: Simulation) -> None:
    """The same by hand: weights put into a copy of the model, inputs rounded, every position compared."""
    from transformers import AutoModelForCausalLM

    unit = changed(inputs, "layers.0-1.o")
    samples = held_out(inputs.calibration, inputs.samples)[:3]
    total = count = 0.0
    models: list[Any] = [AutoModelForCausalLM.from_pretrained(inputs.graph.folder).eval() for _ in range(2)]
    for layer in (0, 1):
        module, group = models[1].model.layers[layer].self_attn.o_proj, unit[f"layers.{layer}.o"]
        module.weight.data = group.weight(0)
        module.register_forward_pre_hook(lambda _m, args, group=group: (group.round_inputs(args[0], int8=True),))
    with torch.no_grad():
        for sample in samples:
            kept = torch.linspace(0, len(sample) - 1, 64).long()
            exact, other = (model(torch.tensor([list(sample)])).logits[0, kept].log_softmax(-1) for model in models)
            total += float((exact.exp() * (exact - other)).sum())
            count += len(kept)
    assert simulation.kl(unit) == pytest.approx(total / count, rel=1e-3, abs=5e-7)  # float32 sums over a vocabulary


def test_inputs_are_rounded_as_the_kernels_of_the_target_do(inputs: Inputs, simulation: Simulation) -> None:
    """To E4M3 beside weights in it, on every target; to int8 beside integer codes only where kernels do."""
    samples = held_out(inputs.calibration, inputs.samples)[:3]
    float_inputs = Simulation(inputs.graph, samples, {0, 2}, int8_inputs=False)
    fine = changed(inputs, "layers.0-1.down", kernel=Scheme(bits=8, group_size=32, symmetric=True))
    assert float_inputs.kl(fine) < 0.9 * simulation.kl(fine)
    floats = changed(inputs, "layers.0-1.down", kernel=FP8_DYNAMIC)
    assert float_inputs.kl(floats) == simulation.kl(floats)
    group = floats["layers.0.down"]
    factor = torch.from_numpy(group.scale.values)
    values = torch.randn(3, len(factor), generator=torch.Generator().manual_seed(0))
    expected = round_by_token(values / factor) * factor
    for int8 in (True, False):
        torch.testing.assert_close(group.round_inputs(values, int8=int8), expected)
    assert not torch.equal(expected, values)


def test_a_plan_for_the_target_cuda_tries_fp8(inputs: Inputs) -> None:
    """And takes its inputs as the kernels do: those of integer codes in float."""
    found = target_candidates(find_target("cuda").capabilities)
    unit = units_of(inputs.graph.record, 2)[0]
    assert FP8_DYNAMIC in candidates_of(unit.groups[0], found) and not found.int8_inputs
    cpu = target_candidates(find_target("ort-cpu").capabilities)
    assert FP8_DYNAMIC not in candidates_of(unit.groups[0], cpu) and cpu.int8_inputs
    assert [cache.dtype for cache in found.caches] == ["float32", "int8", "fp8"]
    assert [cache.dtype for cache in cpu.caches] == ["float32", "int8", "int4"]


def test_what_a_declared_rate_says_of_fp8_is_what_kernels_reach() -> None:
    """No kernel of `cuda` has wgmma or tcgen05: E4M3 is as fast as 16 bits, where it does not wait for memory."""
    rates = find_target("cuda").capabilities.throughput
    assert rates is not None
    assert rates.seconds(1, 1e15, "fp8") == rates.seconds(1, 1e15)


def test_tables_and_cache_are_rounded_as_the_recipe_says(inputs: Inputs, simulation: Simulation) -> None:
    rounding = QuickRounding(inputs.graph, inputs.calibration, inputs.recipe.quantize)
    eight, four = (rounding.embeddings(Scheme(bits=bits, group_size=64, symmetric=True)) for bits in (8, 4))
    assert set(eight) == {"embedding", "lm_head"} and rounding.embeddings(FLOAT) == {}
    assert 0 < simulation.kl(eight) < 0.2 * simulation.kl(four)
    assert rounding.kv_cache(KVCache(dtype="float32")) is None
    per = [rounding.kv_cache(KVCache(granularity=granularity)) for granularity in ("per_channel", "per_tensor")]
    assert 0 < simulation.kl({}, kv=per[0]) < simulation.kl({}, kv=per[1])
    assert simulation.kl({}, kv=per[1]) < simulation.kl({}, kv=rounding.kv_cache(KVCache(dtype="int4")))


def test_rounding_to_nearest_searches_for_nothing(inputs: Inputs, simulation: Simulation) -> None:
    plain = inputs._replace(recipe=inputs.recipe.model_copy(update={"quantize": Quantize(candidates=("rtn",))}))
    kls = [simulation.kl(changed(which, "layers.0-1.down")) for which in (inputs, plain)]
    assert kls[0] < kls[1]


def samples_without_one(samples: Sequence[Sequence[int]]) -> list[Sequence[int]]:
    return list(samples[:-1])


def samples_with_another_token(samples: Sequence[Sequence[int]]) -> list[Sequence[int]]:
    return [[samples[0][0] + 1, *samples[0][1:]], *samples[1:]]


@pytest.mark.parametrize("change", [samples_without_one, samples_with_another_token])
def test_samples_that_were_not_calibrated_on_are_refused(inputs: Inputs, change: Any, tmp_path: Path) -> None:
    with pytest.raises(QuantizationError, match="samples that are not the 24 of"):
        swept(inputs._replace(samples=change(inputs.samples)), tmp_path / "sensitivity")
    assert not (tmp_path / "sensitivity").exists()
