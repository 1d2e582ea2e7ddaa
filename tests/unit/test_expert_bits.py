"""Experts in bits of their own: what each costs, what a plan may give them, and what it chooses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from quantization.compressed_tensors import open_checkpoint
from quantization.cost_table import Cost, CostTable, declared_costs, shape_of, visited, visits_of
from quantization.expert_bits import ExpertErrors, mixtures
from quantization.plan import PrecisionPlan
from quantization.plan_search import make_plan
from quantization.quantize import quantize
from quantization.sensitivity_sweep import sweep
from quantization.units import ALL_CANDIDATES
from tapeout.artifact import Artifact
from tapeout.mapped_model import open_model
from tapeout.quantized import round_to_nearest
from tapeout.recipe import KVCache, Plan
from tapeout.schemes import FLOAT, Scheme
from tapeout.throughput import Throughput
from tests.experts import SAMPLES, TOKENS, Mixture, group_named, of_bits, quantized, recipe
from tests.family_engines import words

FAMILY = "qwen3_moe"


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Mixture:
    return quantized(FAMILY, tmp_path_factory.mktemp("mixture"))


def test_costs_count_each_expert_by_how_often_it_is_chosen() -> None:
    """A rare one costs its bytes and hardly any time."""
    group, scheme = group_named(FAMILY, "layers.0.experts_up"), of_bits(8, 4, 4, 4)
    shape, own = shape_of(group), {4: "4-bit g32", 8: "8-bit g32"}
    seconds = {shape: {own[4]: {1: 1.0, 2: 1.5}, own[8]: {1: 2.0, 2: 2.5}}}
    sizes = {shape: {own[4]: 100, own[8]: 180}}

    def cost(*visits: int, scheme: Scheme = scheme) -> Cost:
        table = CostTable("ort-cpu", 1, 8, 64, sizes, seconds, {}, visits={group.name: visits})
        return table.linears([group], scheme)

    # Two experts of four at one token: each by its share of 2 choices.
    often, rarely = cost(500, 300, 100, 100), cost(100, 300, 300, 300)
    assert often.bytes == rarely.bytes == 180 + 3 * 100
    assert often.seconds[1] == pytest.approx(1.0 * 2 + (0.6 + 0.2 + 0.2) * 1)
    assert rarely.seconds[1] == pytest.approx(0.2 * 2 + 3 * 0.6 * 1)
    # At two tokens one that all choose is read once, and others less than twice as often.
    reads = 1 - (1 - np.array([1.0, 0.6, 0.2, 0.2])) ** 2
    assert often.seconds[2] == pytest.approx(reads @ [2.5, 1.5, 1.5, 1.5])
    # Skewed routing reads fewer experts than an even one; one that no token chose may be chosen all the same.
    counts = [float(visited(group, 2, visits)[0].sum()) for visits in ((500, 300, 100, 100), (1, 1, 1, 1))]
    assert counts == pytest.approx([2.56, 3.0])
    assert (visited(group, 2, (0, 100, 100, 100))[0] > 0).all()


def test_mixtures_give_bits_to_experts_that_are_worth_them() -> None:
    """By loss for price: an expert whose loss is large, or whose price is small, comes first."""
    schemes = [Scheme(bits=bits, symmetric=True) for bits in (8, 4, 6)] + [FLOAT, Scheme(bits=4, format="mxfp4")]
    loss = np.array([8.0, 4.0, 2.0, 1.0])
    kl = {s.name: (loss * 0.25 ** (s.bits - 4)).tolist() for s in schemes}
    even = {s.name: [float(s.bits)] * 4 for s in schemes}
    found = mixtures(schemes, kl, [even])
    assert all(scheme.group_size == 32 and scheme.symmetric for scheme in found)
    for scheme, predicted in found.items():
        assert list(scheme.expert_bits) == sorted(scheme.expert_bits, reverse=True) and len(set(scheme.expert_bits)) > 1
        assert predicted == pytest.approx(sum(kl[f"{bits}-bit g32"][e] for e, bits in enumerate(scheme.expert_bits)))
    assert len({scheme.mean_bits for scheme in found}) == len(found) >= 5
    cheap = {s.name: [float(s.bits), float(s.bits), float(s.bits), s.bits / 1000] for s in schemes}
    assert all(scheme.expert_bits[3] == scheme.bits for scheme in mixtures(schemes, kl, [cheap]))
    assert mixtures(schemes[:1], kl, [even]) == {}


def test_an_expert_makes_of_a_layers_loss_what_its_rounding_changes_of_the_output(mixture: Mixture) -> None:
    """Against transformers: the change of the layer's output when that expert alone is rounded, on held-out text."""
    source, scheme = open_checkpoint(mixture.graph.folder), Scheme(bits=4, symmetric=True)
    for name in ("layers.0.experts_up", "layers.0.experts_down"):
        group, changes = group_named(FAMILY, name), list[float]()
        rounded = round_to_nearest(source.tensor(group.members[0]), scheme.fitted(group.in_features))
        shares = ExpertErrors(group, mixture.graph.record, mixture.calibration, source).shares(rounded)
        for expert in range(4):
            model, found = open_model(mixture.graph.folder), list[torch.Tensor]()
            module = model.get_submodule("model.layers.0.mlp.experts")
            module.register_forward_hook(lambda _module, _inputs, output, found=found: found.append(output.clone()))
            for row in words(FAMILY, SAMPLES, TOKENS, 1):
                with torch.inference_mode():
                    model(torch.tensor([row]), use_cache=False)
            exact, size = torch.cat(found), len(found)
            with torch.inference_mode():
                model.get_parameter(group.members[0])[expert] = torch.from_numpy(rounded.part(expert).dequantize())
            for row in words(FAMILY, SAMPLES, TOKENS, 1):
                with torch.inference_mode():
                    model(torch.tensor([row]), use_cache=False)
            changes.append(float((torch.cat(found[size:]) - exact).square().sum()))
        np.testing.assert_allclose(shares, np.array(changes) / sum(changes), rtol=0.5)
        assert np.argsort(shares).tolist() == np.argsort(changes).tolist() or np.ptp(shares) < 0.1


def test_an_expert_counts_by_how_many_tokens_chose_it(mixture: Mixture) -> None:
    source, scheme = open_checkpoint(mixture.graph.folder), Scheme(bits=4, symmetric=True)
    group = group_named(FAMILY, "layers.0.experts_up")
    rounded = round_to_nearest(source.tensor(group.members[0]), scheme.fitted(group.in_features))

    def shares(*fit: int) -> np.ndarray:
        layers = mixture.calibration.record.visits
        visits = tuple(layer.model_copy(update={"fit": fit, "holdout": (0,) * 4}) for layer in layers)
        record = mixture.calibration.record.model_copy(update={"visits": visits})
        calibration = replace(mixture.calibration, record=record)
        return ExpertErrors(group, mixture.graph.record, calibration, source).shares(rounded)

    even, skewed = shares(100, 100, 100, 100), shares(400, 100, 100, 0)
    wanted = even * [400, 100, 100, 1]  # one that nobody chose may be chosen all the same
    np.testing.assert_allclose(skewed, wanted / wanted.sum(), rtol=1e-6)


def test_a_plan_chooses_bits_by_expert(mixture: Mixture, tmp_path: Path) -> None:
    """Within the same budget of KL it takes fewer bytes than one scheme for all experts of a layer."""
    graph, calibration, rows = mixture.graph, mixture.calibration, words(FAMILY, SAMPLES, TOKENS, 1)
    settings, made = recipe().quantize, dict[str, Artifact[PrecisionPlan]]()
    asked = Plan(
        schemes="auto", embeddings=FLOAT, kv_cache=KVCache(dtype="float32"), goal="memory", samples=1,
        layers_per_group=1, max_kl=1.0,
    )  # fmt: skip
    for how in ("per_projection", "per_expert"):
        wanted = asked.model_copy(update={"experts": how})
        measured = sweep(wanted, settings, graph, calibration, rows, tmp_path / f"sensitivity-{how}")
        units = {unit.name: unit for unit in measured.record.units}
        for name, unit in units.items():
            apart = how == "per_expert" and ".experts_" in name
            assert unit.experts.keys() == (unit.kl.keys() - {"fp32"} if apart else set())
            assert all(sum(parts) == pytest.approx(unit.kl[scheme]) for scheme, parts in unit.experts.items())
        least = sum(min(kl for name, kl in unit.kl.items() if name.startswith("4-bit")) for unit in units.values())
        wanted = wanted.model_copy(update={"max_kl": least / 8})
        throughput = Throughput(1e9, {"float": 1e12})
        costs = declared_costs(
            graph.record, wanted, ALL_CANDIDATES, throughput, target="ort-cpu", slots=2, float_bits=32,
            visits=visits_of(calibration.record),
        )  # fmt: skip
        arguments = (wanted, settings, graph, calibration, measured, costs, rows)
        made[how] = make_plan(*arguments, tmp_path / f"plan-{how}")
    plan = made["per_expert"].record
    sizes = {name: sum(unit.bytes or 0 for unit in one.record.units) for name, one in made.items()}
    assert sizes["per_expert"] < sizes["per_projection"]
    assert plan.search is not None and plan.search.joint_kl <= plan.search.max_kl
    chosen = {group: scheme for group, scheme in plan.schemes.items() if scheme.expert_bits}
    assert chosen and all(".experts_" in name for name in chosen)
    stored = quantize(settings, graph, calibration, made["per_expert"], tmp_path / "quantized").record
    assert stored.proof.passed
    found = {report.group: report.scheme for report in stored.linears if report.experts}
    assert chosen.items() <= found.items()
