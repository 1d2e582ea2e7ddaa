"""Experts of a mixture from the graph to a quantized model, stage by stage."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.kernels import cpu as native
from engines.load import open_probe
from engines.passes.onnxruntime import native_experts
from evals.kinds.parity.measure import compare
from pipeline.export.checkpoint import load_checkpoint
from quantization.checkpoint_formats.experts import names_of
from quantization.checkpoint_formats.write import export_checkpoint
from quantization.compressed_tensors import CheckpointWriter, open_checkpoint
from quantization.cost_table import CostTable, shape_of
from quantization.input_sums import ExpertSums
from quantization.proof import QuantizationProof, count_tensors, prove
from quantization.quick_rounding import QuickRounding
from quantization.reference import InputGrid, QuantizedReference
from quantization.simulate import Simulation
from quantization.statistics import read_statistics
from quantization.units import candidates_of, out_by_in, resolve, units_of
from tapeout.errors import ExportError, QuantizationError, TapeoutError
from tapeout.graph_analysis.groups import experts_groups
from tapeout.mapped_model import open_model
from tapeout.number_format import FloatArray
from tapeout.operators.experts import DOWN_INPUT, UP_INPUT, ExpertGate
from tapeout.operators.experts.in_torch import experts_changed
from tapeout.portable_graph import LinearGroup
from tapeout.quantized import QuantizedWeight, round_to_nearest, stacked
from tapeout.recipe import Plan, Rule
from tapeout.schemes import FLOAT, STATIC_INT8, Scheme
from tapeout.tensor_files import stored_tensors
from tests.checkpoints import say_schemes
from tests.experts import SAMPLES, TOKENS, Mixture, calibrated, group_named, of_bits, quantized, recipe
from tests.exported import family_graph
from tests.family_engines import words
from tests.lowering import apply, lowering, run
from tests.unit.passes.test_native_experts_pass import EXPERTS, FEEDS, HIDDEN, INNER, experts

SCHEMES = [
    *(Scheme(bits=bits, group_size=g, symmetric=s) for bits in (4, 5, 6, 8) for g in (16, 32) for s in (True, False)),
    Scheme(bits=4, format="mxfp4"),
]
BY_EXPERT = (  # experts of their own bits in both projections of the first layer, and in one of the second
    Rule(match="layers.0.experts_*", experts=(1,), scheme=Scheme(bits=8, symmetric=True)),
    Rule(match="layers.*.experts_down", experts=(0, 2), scheme=Scheme(bits=5, symmetric=True)),
    Rule(match="layers.*.experts_*", scheme=Scheme(bits=4, symmetric=True)),
    Rule(match="*", scheme=Scheme(bits=8, symmetric=True)),
)
FAMILY, UP = "qwen3_moe", "model.layers.0.mlp.experts.gate_up_proj"
DOWN = "model.layers.0.mlp.experts.down_proj"


def random(*shape: int, seed: int = 0) -> FloatArray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Mixture:
    return quantized(FAMILY, tmp_path_factory.mktemp("mixture"))


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Mixture:
    """Experts differ in bits."""
    return quantized(FAMILY, tmp_path_factory.mktemp("mixed"), recipe(BY_EXPERT))


def test_experts_are_groups_and_routers_and_gates_are_not() -> None:
    groups = {group.name: group for group in family_graph("qwen2_moe").record.groups}
    up, down = groups["layers.0.experts_up"], groups["layers.0.experts_down"]
    assert (up.members, up.experts, up.chosen, up.in_features, up.out_features) == ((UP,), 4, 2, 64, (64,))
    assert (down.members, down.experts, down.in_features, down.out_features) == ((DOWN,), 4, 32, (64,))
    assert up.weights == 4 * 64 * 64 and up.fold_target is None
    members = [name for group in groups.values() for name in group.members]
    assert not [name for name in members if name.endswith(("mlp.gate.weight", "shared_expert_gate.weight"))]
    assert groups["layers.0.gate_up"].members[0] == "model.layers.0.mlp.shared_expert.gate_proj.weight"


def test_experts_that_are_stored_the_other_way_are_told() -> None:
    model = experts(ExpertGate("silu", interleaved=True), has_gate=True, transposed=True, biased=True)
    up, down = find_experts(model)
    assert (up.transposed, up.experts, up.in_features, up.out_features) == (True, EXPERTS, HIDDEN, (2 * INNER,))
    assert (up.biases, down.biases) == (("mlp.up_bias",), ("mlp.down_bias",))


def find_experts(model: ir.Model) -> list[LinearGroup]:
    return [group for _, group in experts_groups(model.graph)]


def test_units_menus_and_rules_know_experts() -> None:
    graph = family_graph(FAMILY).record
    names = [unit.name for unit in units_of(graph, 2)]
    assert {"layers.0-1.experts_up", "layers.0-1.experts_down"} < set(names)
    candidates = candidates_of(group_named(FAMILY, "layers.0.experts_up"))
    assert STATIC_INT8 not in candidates and FLOAT in candidates
    assert STATIC_INT8 in candidates_of(group_named(FAMILY, "layers.0.qkv"))
    with pytest.raises(QuantizationError, match=r"gives layers\.0\.experts_up static int8"):
        resolve(graph, [Rule(match="*", scheme=STATIC_INT8)])
    with pytest.raises(QuantizationError, match=r"gives layers\.0\.experts_up fp8-dynamic"):
        resolve(graph, [Rule(match="*", scheme=Scheme.model_validate({"format": "fp8-dynamic"}))])
    dense = family_graph("llama").record
    assert resolve(dense, [Rule(match="layers.*.experts_*", scheme=FLOAT), Rule(match="*", scheme=STATIC_INT8)])


def test_rules_give_experts_bits_of_their_own() -> None:
    graph = family_graph(FAMILY).record
    found = resolve(graph, BY_EXPERT)
    assert found["layers.0.experts_up"].expert_bits == (4, 8, 4, 4)
    assert found["layers.0.experts_down"].expert_bits == (5, 8, 5, 4)
    assert found["layers.1.experts_down"] == of_bits(5, 4, 5, 4)
    assert found["layers.1.experts_up"] == Scheme(bits=4, symmetric=True)
    assert found["layers.0.qkv"] == Scheme(bits=8, symmetric=True)


FOUR, EVERY = Scheme(bits=4, symmetric=True), "layers.*.experts_*"


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ([Rule(match=EVERY, experts=(4,), scheme=FOUR)], "names expert 4.*experts up to 3"),
        ([Rule(match="layers.*", experts=(0,), scheme=FOUR)], "names expert 0.*a glob over experts of mixtures alone"),
        ([Rule(match=EVERY, experts=(0,), scheme=FLOAT)], "gives? experts of layers.0.experts_up 8-bit g32 and fp32"),
        ([Rule(match=EVERY, experts=(0,), scheme=Scheme(bits=4))], "4-bit g32 asym and 8-bit g32.*in bits alone"),
        ([Rule(match=EVERY, experts=(0,), scheme=Scheme(bits=4, format="mxfp4"))], "in bits alone"),
        (
            [Rule(match=EVERY, scheme=FOUR), Rule(match="layers.0.experts_up", experts=(0,), scheme=FOUR)],
            "is never used: 'layers",
        ),
        (
            [Rule(match=EVERY, experts=(0, 1), scheme=FOUR), Rule(match="*.experts_up", experts=(1,), scheme=FOUR)],
            "is never used: 'layers",
        ),
    ],
)
def test_rules_that_no_experts_can_follow_are_refused(rules: list[Rule], said: str) -> None:
    with pytest.raises(TapeoutError, match=f"(?s){said}"):
        resolve(family_graph(FAMILY).record, [*rules, Rule(match="*", scheme=Scheme(bits=8, symmetric=True))])


def test_rules_of_other_experts_and_of_all_do_not_hide_each_other() -> None:
    up = "layers.0.experts_up"
    rules = [Rule(match=up, experts=(experts,), scheme=FOUR) for experts in (0, 1)]
    rules += [Rule(match=up, scheme=Scheme(bits=6, symmetric=True)), Rule(match="*", scheme=FOUR)]
    assert resolve(family_graph(FAMILY).record, rules)[up] == of_bits(4, 4, 6, 6)


def test_schemes_of_experts_are_no_business_of_other_rules() -> None:
    scheme = of_bits(4, 8)
    assert Scheme.model_validate(scheme.model_dump()) == scheme
    with pytest.raises(ValueError, match="give experts of their own bits a rule"):
        Rule(match="*", scheme=scheme)
    with pytest.raises(ValueError, match="experts of a mixture alone"):
        Plan(embeddings=scheme)
    with pytest.raises(ValueError, match="are not the most"):
        Scheme(bits=8, expert_bits=(4, 6))


def test_costs_count_the_experts_that_a_step_reads() -> None:
    group = group_named(FAMILY, "layers.0.experts_up")
    shape, scheme = shape_of(group), Scheme(bits=4, group_size=32, symmetric=True)
    seconds = {shape: {scheme.name: {1: 1.0, 2: 1.25, 4: 2.0}}}
    table = CostTable("ort-cpu", 1, 8, 64, {shape: {scheme.name: 100}}, seconds, {})
    cost = table.linears([group, group], scheme)
    assert cost.bytes == 2 * 4 * 100
    # 2, 3 and 3.75 of 4 experts, with 1, 4 / 3 and 8 / 3.75 tokens each
    assert cost.seconds == {1: 2 * 2 * 1.0, 2: 2 * 3 * 1.0, 4: 2 * 3.75 * 1.25}


def test_experts_compute_one_by_one_what_they_do_together() -> None:
    model, ids = open_model(family_graph(FAMILY).folder), torch.tensor(words(FAMILY, 2, 12, 3))
    seen: list[tuple[int, int]] = []

    def change(module: Any, number: int, expert: int, inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        assert inputs.shape == (len(weight), {UP_INPUT: 64, DOWN_INPUT: 32}[number])
        seen.append((number, len(weight)))
        return inputs

    with torch.inference_mode():
        expected = model(ids, use_cache=False).logits
        with experts_changed(model, change):
            actual = model(ids, use_cache=False).logits
        torch.testing.assert_close(model(ids, use_cache=False).logits, expected, rtol=0, atol=0)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    assert sum(tokens for number, tokens in seen if number == UP_INPUT) == 2 * 2 * ids.numel()


Visits = dict[tuple[int, int], list[tuple[torch.Tensor, torch.Tensor]]]


def visits_of(folder: Path) -> tuple[Visits, dict[int, list[torch.Tensor]]]:
    """Of the first layer, for each sample: by projection and expert, inputs and routing weights; by expert, what its
    second projection would read of the tokens that did not choose it.
    """
    model, found = open_model(folder), Visits()
    others: dict[int, list[torch.Tensor]] = {expert: [] for expert in range(4)}
    first, samples = model.get_submodule("model.layers.0.mlp.experts"), list[int]()
    empty = {UP_INPUT: torch.zeros(0, 64), DOWN_INPUT: torch.zeros(0, 32)}

    def change(module: Any, number: int, expert: int, inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if module is first:
            found[number, expert][samples[-1]] = (inputs.clone(), weight.clone())
        return inputs

    def seen(module: Any, x: torch.Tensor, index: torch.Tensor) -> None:
        for expert in range(4) if module is first else ():
            tokens = [number for number, chosen in enumerate(index.tolist()) if expert not in chosen]
            gates, ups = (x[tokens] @ first.gate_up_proj[expert].T).chunk(2, 1)
            others[expert].append(gates * torch.sigmoid(gates) * ups)

    for number in empty:
        for expert in range(4):
            found[number, expert] = [(empty[number], torch.zeros(0))] * SAMPLES
    for number, row in enumerate(words(FAMILY, SAMPLES, TOKENS, 1)):
        samples.append(number)
        with experts_changed(model, change, seen), torch.inference_mode():
            model(torch.tensor([row]), use_cache=False)
    return found, others


def test_statistics_are_those_of_the_tokens_that_chose_an_expert(tmp_path: Path) -> None:
    """Weighted by the square of the routing weight. Tokens that did not choose it make up for what an expert lacks: of
    what all experts read, its mean; of what each has computed, what it makes of them.
    """
    graph, calibration = calibrated(FAMILY, tmp_path, recipe(min_visits=300))
    (seen, others), fit = visits_of(graph.folder), SAMPLES - SAMPLES // 4
    (layer,) = (found for found in calibration.record.visits if "layers.0.experts_up" in found.groups)
    assert layer.groups == ("layers.0.experts_up", "layers.0.experts_down")
    for number, name in ((UP_INPUT, "layers.0.experts_up"), (DOWN_INPUT, "layers.0.experts_down")):
        for part, least in (("gram", 300), ("holdout", 100)):
            rows = slice(fit) if part == "gram" else slice(fit, SAMPLES)
            grams, masses, counts = [], [], []
            for expert in range(4):
                inputs, weight = (torch.cat(parts) for parts in zip(*seen[number, expert][rows], strict=True))
                weighted = (inputs * weight[:, None]).double()
                grams.append(weighted.T @ weighted)
                masses.append(float(weight.square().sum()))
                counts.append(len(weight))
            assert counts == list(layer.fit if part == "gram" else layer.holdout)
            everyone = sum(grams) / sum(masses)
            for expert in range(4):
                share = min(1.0, counts[expert] / least)
                given = torch.cat(others[expert][rows]).double()
                stand_ins = everyone if number == UP_INPUT else given.T @ given / len(given)
                wanted = share * grams[expert] / masses[expert] + (1 - share) * stand_ins
                found = getattr(read_statistics(calibration, group_named(FAMILY, name), expert), part)[0]
                size = np.sqrt(np.diag(wanted))
                np.testing.assert_allclose(found / np.outer(size, size), wanted / np.outer(size, size), atol=2e-4)
    assert layer.starved(300) and layer.note(300).startswith("layers.0.experts_up, layers.0.experts_down: ")
    assert layer.starved(1) == () and layer.note(1) == ""


def test_an_expert_that_overflows_on_the_tokens_of_others_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        "quantization.calibrate.inner_channels", lambda module, expert, x: torch.full((len(x), 32), torch.inf)
    )
    with pytest.raises(QuantizationError, match=r"input of layers\.0\.experts_down, expert \d, for tokens of others"):
        calibrated(FAMILY, tmp_path, recipe(min_visits=300))


def test_only_a_starved_expert_has_the_statistics_of_its_stand_ins() -> None:
    sums = ExpertSums(2, 32, (4, 2))
    sums.begin(holdout=False)
    assert sums.starved(holdout=False) == [0, 1]
    own, others = torch.from_numpy(random(4, 32)), torch.from_numpy(random(40, 32, seed=1))
    sums.add(1, own, torch.ones(4), holdout=False)
    assert sums.starved(holdout=False) == [0] and sums.starved(holdout=True) == [0, 1]
    for expert, part in ((0, others[:30]), (0, others[30:]), (1, others)):
        sums.add_stand_ins(expert, part)
    sums.begin(holdout=True)
    fit = sums.fit
    for expert, wanted in enumerate((others, own)):
        np.testing.assert_allclose(fit["gram_power"][expert], wanted.square().mean(0), rtol=1e-5)
        np.testing.assert_allclose(fit["mean_abs"][expert], wanted.abs().mean(0), rtol=1e-5)
        np.testing.assert_allclose(fit["max_abs"][expert], wanted.abs().amax(0))


def test_an_expert_that_no_token_chose_has_the_statistics_of_the_others() -> None:
    sums = ExpertSums(3, 32, (10, 5))
    for holdout in (False, True):
        sums.begin(holdout=holdout)
        for expert in (0, 2):
            inputs = torch.from_numpy(random(20, 32, seed=expert))
            sums.add(expert, inputs, torch.full((20,), 0.5), holdout=holdout)
    found = sums.results()
    assert found["visits"].tolist() == [[20, 0, 20], [20, 0, 20]]
    for part in ("gram_power", "gram_holdout_power"):
        np.testing.assert_allclose(found[part][1], (found[part][0] + found[part][2]) / 2, rtol=1e-5)
    np.testing.assert_allclose(found["mean_abs"][1], (found["mean_abs"][0] + found["mean_abs"][2]) / 2, rtol=1e-5)
    assert (found["max_abs"][1] == np.maximum(found["max_abs"][0], found["max_abs"][2])).all()


@settings(max_examples=40, deadline=None)
@given(
    bits=st.lists(st.sampled_from((4, 5, 6, 8)), min_size=1, max_size=5), rows=st.integers(1, 9),
    groups=st.integers(1, 3), scheme=st.sampled_from(SCHEMES), differ=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_experts_are_stored_and_read_back(
    bits: list[int], rows: int, groups: int, scheme: Scheme, differ: bool, seed: int
) -> None:
    count, schemes = len(bits), [scheme.fitted(32 * groups)] * len(bits)
    if differ and scheme.format.startswith("int"):
        schemes = [one.in_format(f"int{own}") for one, own in zip(schemes, bits, strict=True)]
    weight = random(count, rows, 32 * groups, seed=seed)
    linear = stacked([round_to_nearest(part, own) for part, own in zip(weight, schemes, strict=True)])
    assert (linear.dequantize() == round_to_nearest(weight, linear.scheme).dequantize()).all()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, {UP: linear})
        checkpoint = open_checkpoint(folder)
        assert checkpoint.names() == (UP,) and checkpoint.is_quantized(UP)
        read = checkpoint.linear(UP)
        assert isinstance(read, QuantizedWeight) and read.scheme == linear.scheme
        np.testing.assert_array_equal(read.codes, linear.codes)
        np.testing.assert_array_equal(read.scales, linear.scales)
        np.testing.assert_array_equal(checkpoint.weight(UP), linear.dequantize())
        for expert in range(count):
            alone = round_to_nearest(weight[expert], schemes[expert])
            np.testing.assert_array_equal(read.part(expert).codes, alone.codes)
            np.testing.assert_array_equal(read.part(expert).dequantize(), alone.dequantize())


def write(folder: Path, weights: dict[str, QuantizedWeight]) -> None:
    writer = CheckpointWriter(folder)
    for name, weight in weights.items():
        writer.add_linear(name, weight)
    writer.finish()
    say_schemes(folder, {name: weight.scheme for name, weight in weights.items()})


def proof_of(folder: Path, stored: QuantizedWeight, source: FloatArray) -> QuantizationProof:
    write(folder, {UP: stored})
    return prove(count_tensors(open_checkpoint(folder), UP, lambda expert: source[expert]), {UP: stored.scheme})


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(SCHEMES), st.integers(0, 999), st.booleans(), st.sampled_from([0.0, 1.0, 3.0]))
def test_sound_experts_pass_the_proof(scheme: Scheme, seed: int, alike: bool, spread: float) -> None:
    """Experts that are near copies of one, and rows of any size, too."""
    source = random(4, 24, 64, seed=seed)
    if alike:
        source = source[:1] + np.float32(0.01) * source
    source = (source * np.exp(spread * random(4, 24, 1, seed=seed + 1))).astype(np.float32)
    source[2, 3] = 0
    stored = round_to_nearest(source, scheme)
    with tempfile.TemporaryDirectory() as folder:
        assert proof_of(Path(folder), stored, source).reasons == ()


def test_reports_name_experts_and_the_starved_ones(mixture: Mixture) -> None:
    reports = {report.name: report for report in mixture.quantized.record.linears}
    assert (reports[UP].experts, reports[UP].out_features, reports[UP].in_features) == (4, 64, 64)
    assert 0 < reports[UP].error <= reports[UP].error_rtn < 0.02
    starved = [layer for layer in mixture.calibration.record.visits if layer.starved(128)]
    assert [note for note in mixture.quantized.record.notes if "were chosen by fewer" in note] == [
        layer.note(128) for layer in starved
    ]
    assert starved, "the recipe has one to name"


def test_every_stage_sees_the_same_model(mixture: Mixture, tmp_path: Path) -> None:
    """The engine is the checkpoint's model, whose experts are those of the file."""
    bundle = mixture.build(tmp_path / "bundle")
    head = next(group.members[0] for group in mixture.graph.record.groups if group.name == "lm_head")
    probe = open_probe(bundle, tmp_path, threads=1)
    reference = QuantizedReference(mixture.quantized.folder, int8_activations=True)
    documents = words(FAMILY, 2, 40, 2)
    items = compare(probe, reference, documents, head=head)
    assert sum(item.kl_sum for item in items) / 80 < 1e-5
    assert sum(item.free_kl_sum or 0.0 for item in items) / 80 < 1e-4
    stored = open_checkpoint(mixture.quantized.folder)
    assert {stored.weight(name).shape for name in (UP, DOWN)} == {(4, 64, 64), (4, 64, 32)}


def test_experts_of_their_own_bits_go_from_a_rule_to_the_engine(mixed: Mixture, tmp_path: Path) -> None:
    """The file holds each in its bits, and the engine computes what the file says."""
    reports = {report.name: report for report in mixed.quantized.record.linears}
    assert reports[DOWN].scheme == of_bits(5, 8, 5, 4) and reports[UP].scheme == of_bits(4, 8, 4, 4)
    assert mixed.quantized.record.proof.passed and "w4-8:2 " in mixed.quantized.record.summary
    checkpoint = open_checkpoint(mixed.quantized.folder)
    stored = checkpoint.linear(DOWN)
    assert isinstance(stored, QuantizedWeight)
    assert [stored.part(expert).scheme.bits for expert in range(4)] == [5, 8, 5, 4]
    assert checkpoint.stored_bytes(DOWN) == 22 * 64 * 32 // 8 + 4 * 64 * 2 + 3 * 8 + 4  # codes, scales, shape, bits
    bundle = mixed.build(tmp_path / "bundle")
    assert bundle.record.plan["layers.0.experts_down"] == "BlockExperts 4 to 8-bit g32 sym, mean 5.50"
    head = next(group.members[0] for group in mixed.graph.record.groups if group.name == "lm_head")
    probe = open_probe(bundle, tmp_path, threads=1)
    reference = QuantizedReference(mixed.quantized.folder, int8_activations=True)
    items = compare(probe, reference, words(FAMILY, 2, 40, 2), head=head)
    assert sum(item.kl_sum for item in items) / 80 < 1e-5
    assert max(item.errors[DOWN] for item in items) < 1e-4


def test_formats_that_share_a_scheme_among_experts_take_the_widest(mixed: Mixture, tmp_path: Path) -> None:
    """Where it is asked for; else they refuse by name. What is read from the file is what we hold, bit for bit."""

    def export(wider: bool, folder: Path) -> None:
        export_checkpoint(
            mixed.quantized.folder, "compressed-tensors", folder, wider=wider, progress=lambda _done, _total: None
        )

    with pytest.raises(QuantizationError, match=r"4-bit g32: vLLM takes one scheme for all experts .*: 8-bit g32\)"):
        export(False, tmp_path / "refused")
    export(True, tmp_path / "exported")
    ours = open_checkpoint(mixed.quantized.folder)
    theirs = dict(load_checkpoint(tmp_path / "exported", "").model.named_parameters())
    for parameter in ours.names():
        np.testing.assert_array_equal(ours.weight(parameter), theirs[parameter].detach().numpy(), parameter)


def test_experts_beyond_the_memory_are_decoded_at_each_call(mixture: Mixture, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = words(FAMILY, 1, 20, 2)[0]
    held = QuantizedReference(mixture.quantized.folder)(tokens)
    monkeypatch.setattr("quantization.reference.decoded_bytes", lambda: 0)
    np.testing.assert_array_equal(QuantizedReference(mixture.quantized.folder)(tokens), held)


def test_inputs_of_experts_are_rounded_where_a_kernel_does(mixture: Mixture) -> None:
    tokens, seen = words(FAMILY, 1, 20, 2)[0], list[float]()
    exact = QuantizedReference(mixture.quantized.folder)(tokens)
    rounded = QuantizedReference(mixture.quantized.folder, int8_activations=True)(tokens)
    stored = open_checkpoint(mixture.quantized.folder).linear(UP)
    assert isinstance(stored, QuantizedWeight)
    grid, model = InputGrid.of(stored), QuantizedReference(mixture.quantized.folder).model
    first = model.get_submodule("model.layers.0.mlp.experts")

    def change(module: Any, number: int, expert: int, inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if module is first and number == UP_INPUT:
            seen.append(float((grid(inputs) - inputs).abs().max()))
        return inputs

    with experts_changed(model, change), torch.inference_mode():
        model(torch.tensor([tokens]), use_cache=False)
    assert 0 < max(seen) < 0.05 and 1e-5 < np.abs(rounded - exact).max() < 0.2


def test_outputs_of_experts_can_be_exchanged(mixture: Mixture) -> None:
    reference, tokens = QuantizedReference(mixture.quantized.folder), words(FAMILY, 1, 20, 2)[0]
    found: list[torch.Tensor] = []
    module = reference.model.get_submodule("model.layers.0.mlp.experts")
    handle = module.register_forward_hook(lambda _module, _inputs, output: found.append(output.clone()))
    free = reference(tokens)
    handle.remove()
    given = found[0].reshape(len(tokens), -1).numpy()
    logits, errors = reference.teacher_forced(tokens, {DOWN: given}, {})
    assert errors == {DOWN: (0.0, 0.0)} and np.array_equal(logits, free)
    logits, errors = reference.teacher_forced(tokens, {DOWN: 2 * given}, {})
    assert errors[DOWN][0] == pytest.approx(0.5) and not np.allclose(logits, free, atol=1e-3)


def test_a_simulation_computes_the_rounded_experts(mixture: Mixture) -> None:
    """Its KL is that of transformers' model with the same weights."""
    samples, scheme = words(FAMILY, 2, 24, 5), Scheme(bits=4, group_size=32, symmetric=True)
    simulation = Simulation(mixture.graph, samples, {0})
    rounding = QuickRounding(mixture.graph, mixture.calibration, recipe().quantize)
    groups = [group_named(FAMILY, "layers.0.experts_up"), group_named(FAMILY, "layers.0.experts_down")]
    changed = rounding.rounded(rounding.prepare(groups), scheme)
    model, ids = open_model(mixture.graph.folder), torch.tensor(samples)
    with torch.inference_mode():
        exact = model(ids, use_cache=False).logits.log_softmax(-1)
        for group in groups:
            model.get_parameter(group.members[0]).copy_(changed[group.name].weight(0))
        wrong = model(ids, use_cache=False).logits.log_softmax(-1)
    expected = float((exact.exp() * (exact - wrong)).sum(-1).mean())
    assert simulation.kl(changed) == pytest.approx(expected, rel=0.02) and expected > 1e-5
    assert simulation.kl({}) < 1e-6


EXPORTABLE = (Rule(match="*", scheme=Scheme(bits=4, symmetric=True)),)


@pytest.mark.parametrize("name", ["compressed-tensors", "autoawq"])
def test_other_formats_have_a_linear_for_each_expert(name: str, tmp_path: Path) -> None:
    """transformers' names are those of checkpoints on the hub; what is read from them is what we hold, bit for bit."""
    made = quantized(FAMILY, tmp_path, recipe(EXPORTABLE)).quantized
    folder = tmp_path / "exported"
    export_checkpoint(made.folder, name, folder, wider=False, progress=lambda _done, _total: None)
    stored = stored_tensors(folder)
    part = {"compressed-tensors": "weight_packed", "autoawq": "qweight"}[name]
    for projection in ("gate_proj", "up_proj", "down_proj"):
        assert f"model.layers.1.mlp.experts.3.{projection}.{part}" in stored
    ours, theirs = open_checkpoint(made.folder), dict(load_checkpoint(folder, "").model.named_parameters())
    assert set(ours.names()) == set(theirs) and UP in theirs
    for parameter in ours.names():
        np.testing.assert_array_equal(ours.weight(parameter), theirs[parameter].detach().numpy(), parameter)


def test_formats_without_a_place_for_experts_are_refused(tmp_path: Path) -> None:
    mixed = quantized(FAMILY, tmp_path / FAMILY, recipe()).quantized
    with pytest.raises(QuantizationError, match=r"(?s)cannot hold .* model\.layers\.0\.mlp\.experts\.0\.down_proj"):
        export_checkpoint(mixed.folder, "autoawq", tmp_path / "awq", wider=False, progress=lambda _done, _total: None)
    with pytest.raises(ExportError, match="a model of type qwen3_moe"):
        export_checkpoint(mixed.folder, "gguf", tmp_path / "gguf", wider=False, progress=lambda _done, _total: None)
    with pytest.raises(QuantizationError, match="checkpoints of granitemoe do not have a weight for each"):
        names_of("granitemoe", "model.layers.0.block_sparse_moe.experts.gate_up_proj")


@pytest.mark.skipif(native.level() is None, reason=native.unsupported())
@pytest.mark.parametrize("transposed", [False, True])
def test_passes_get_codes_by_rows_and_floats_as_they_are_stored(transposed: bool) -> None:
    """The engine computes what no kernel takes with decoded weights, whichever way the source stores them."""
    model = experts(ExpertGate("silu", interleaved=True), has_gate=True, transposed=transposed, biased=True)
    groups, stored, decoded = find_experts(model), dict[str, Any](), dict[str, FloatArray]()
    for group in groups:
        value = model.graph.initializers[group.members[0]].const_value
        assert value is not None
        weight = round_to_nearest(out_by_in(value.numpy(), group), STATIC_INT8)  # a scale for each output channel
        stored[group.members[0]], decoded[group.members[0]] = weight, out_by_in(weight.dequantize(), group)
    for name, weight in decoded.items():
        model.graph.initializers[name].const_value = ir.tensor(weight, name=name)
    expected = run(model, FEEDS)["y"]
    lowered = lowering(model, tensors=stored, groups=groups)
    assert lowered.weights.linear("mlp.up").codes.shape == (EXPERTS, 2 * INNER, HIDDEN)  # pyright: ignore
    np.testing.assert_array_equal(lowered.weights.weight("mlp.up"), decoded["mlp.up"])
    (declined,) = apply(lowered, native_experts).declined
    assert "no weights in static int8; decoded to floats" in declined
    np.testing.assert_allclose(run(model, FEEDS)["y"], expected, rtol=1e-4, atol=1e-4)
