"""The quantize stage on tiny random llamas: what transformers loads, what was kept, and what is refused."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from quantization import quantized_layers
from quantization.calibration import Calibration, statistics_file
from quantization.checkpoint import KV_SCALES, KVScales, QuantizedModel
from quantization.compressed_tensors import open_checkpoint
from quantization.quantize import quantize
from quantization.quantized_layers import MemoryBudget
from quantization.reference import QuantizedReference
from quantization.statistics import Statistics
from tapeout.artifact import Artifact, ArtifactRef, create, load
from tapeout.errors import QuantizationError
from tapeout.portable_graph import FoldTarget, LinearGroup, PortableGraph
from tapeout.progress import ProgressBar
from tapeout.recipe import BaseRecipe, Calibrate, DataSource, KVCache, ModelSource, Plan, Quantize, Rule
from tapeout.schemes import Scheme
from tests.plans import written_plan
from tests.states import attention_state

LAYERS, HIDDEN, INNER, VOCAB, HEADS, KV_HEADS, HEAD = 2, 64, 160, 96, 4, 2, 16
MIXED = (
    Rule(match="*.o", bits=4, group_size=32, symmetric=True),
    Rule(match="layers.0.gate_up", bits=4, group_size=16, symmetric=True),
    Rule(match="layers.1.down", bits=4, group_size=64, symmetric=True),
    Rule(match="*", bits=8, group_size=64, symmetric=True),
)
LAYERS_BEFORE = ((), ("layers.0.",), ("layers.",))  # names of groups in the first layers
EIGHT_BITS, KV_CACHE = Scheme(bits=8, group_size=64, symmetric=True), KVCache()
INT4_ASYMMETRIC = (Rule(match="*", bits=4, group_size=32, symmetric=False),)


def recipe(
    rules: tuple[Rule, ...] = MIXED,
    *,
    embeddings: Scheme = EIGHT_BITS,
    kv_cache: KVCache = KV_CACHE,
    **settings: Any,
) -> BaseRecipe:
    return BaseRecipe(
        model=ModelSource(source="file:m"),
        data=DataSource(source="file:d"),
        plan=Plan(schemes=rules, embeddings=embeddings, kv_cache=kv_cache),
        quantize=Quantize(**settings),
    )


def quantized(
    recipe: BaseRecipe, graph: Artifact[PortableGraph], calibration: Artifact[Calibration], folder: Path
) -> Artifact[QuantizedModel]:
    plan = written_plan(recipe, graph, folder.with_name(f"{folder.name}-plan"))
    return quantize(recipe.quantize, graph, calibration, plan, folder)


def groups() -> tuple[LinearGroup, ...]:
    found: list[LinearGroup] = []
    for layer in range(LAYERS):
        block = f"model.layers.{layer}"
        attention, mlp = f"{block}.self_attn", f"{block}.mlp"

        def group(
            unit: str,
            names: tuple[str, ...],
            sizes: tuple[int, ...],
            width: int,
            fold_target: FoldTarget,
            layer: int = layer,
        ) -> LinearGroup:
            return LinearGroup(
                name=f"layers.{layer}.{unit}",
                members=names,
                biases=(None,) * len(names),
                in_features=width,
                out_features=sizes,
                fold_target=fold_target,
            )

        found += [
            group(
                "qkv",
                tuple(f"{attention}.{p}_proj.weight" for p in "qkv"),
                (HIDDEN, KV_HEADS * HEAD, KV_HEADS * HEAD),
                HIDDEN,
                FoldTarget(kind="norm", weight=f"{block}.input_layernorm.weight"),
            ),
            group(
                "o",
                (f"{attention}.o_proj.weight",),
                (HIDDEN,),
                HIDDEN,
                FoldTarget(
                    kind="linear",
                    weight=f"{attention}.v_proj.weight",
                    bias=f"{attention}.v_proj.bias",
                    rows=(0, KV_HEADS * HEAD),
                    repeat=HEADS // KV_HEADS,
                    head_size=HEAD,
                ),
            ),
            group(
                "gate_up",
                (f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight"),
                (INNER, INNER),
                HIDDEN,
                FoldTarget(kind="norm", weight=f"{block}.post_attention_layernorm.weight"),
            ),
            group(
                "down",
                (f"{mlp}.down_proj.weight",),
                (HIDDEN,),
                INNER,
                FoldTarget(kind="linear", weight=f"{mlp}.up_proj.weight"),
            ),
        ]
    return tuple(found)


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def inputs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Artifact[PortableGraph], Artifact[Calibration]]:
    """A llama with salient channels in its norms and biases in attention, and statistics of its own inputs."""
    folder = tmp_path_factory.mktemp("model")
    return make_inputs(folder, tied=request.param)


def make_inputs(folder: Path, *, tied: bool) -> tuple[Artifact[PortableGraph], Artifact[Calibration]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        attention_bias=True,
        tie_word_embeddings=tied,
        dtype="float32",
    )
    model: Any = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(torch.rand(HIDDEN) + 0.5)
                parameter[[3, 40]] = 12.0
            elif parameter.ndim == 1:
                parameter.normal_(std=0.2)
            else:
                parameter.mul_(4)
    embedding = "model.embed_tokens.weight"
    head = LinearGroup(
        name="lm_head",
        members=(embedding if tied else "lm_head.weight",),
        biases=(None,),
        in_features=HIDDEN,
        out_features=(VOCAB,),
    )
    with create(folder / "graph", PortableGraph) as draft:
        model.save_pretrained(draft.folder)
        (draft.folder / "tokenizer.json").write_text("{}")
        (draft.folder / "model.onnx").write_text("not copied")
        record = PortableGraph(
            architecture="LlamaForCausalLM",
            layers=LAYERS,
            state=attention_state(LAYERS, KV_HEADS, HEAD),
            hidden_size=HIDDEN,
            heads=HEADS,
            kv_heads=KV_HEADS,
            head_size=HEAD,
            value_size=HEAD,
            vocab_size=VOCAB,
            tied_embeddings=tied,
            embedding=embedding,
            rotary="half",
            max_positions=64,
            model_positions=64,
            groups=(*groups(), head),
            stop_tokens=(1,),
            max_relative_error=0.0,
            versions={},
        )
        draft.finish(record, parents={})
    graph = load(folder / "graph", PortableGraph)
    with create(folder / "calibration", Calibration) as draft:
        write_statistics(model, graph.record, draft.folder)
        calibration = Calibration(
            asked=Calibrate(),
            samples_hash="0",
            samples=8,
            holdout_samples=2,
            tokens_per_sample=64,
            tokens=512,
            layers=LAYERS,
            statistics=(),
            versions={},
        )
        draft.finish(calibration, parents={"graph": graph})
    return graph, load(folder / "calibration", Calibration)


def write_statistics(model: Any, graph: PortableGraph, folder: Path) -> None:
    seen: dict[str, list[torch.Tensor]] = {}
    modules = dict(model.named_modules())
    handles = [
        modules["lm_head" if g.name == "lm_head" else g.members[0].removesuffix(".weight")].register_forward_pre_hook(
            lambda _module, args, name=g.name: seen.setdefault(name, []).append(args[0].reshape(-1, args[0].shape[-1]))
        )
        for g in graph.groups
    ]
    keys, values = ([torch.zeros(KV_HEADS, HEAD) for _ in range(LAYERS)] for _ in range(2))
    with torch.no_grad():
        for row in tokens(8, seed=1):
            cache = model(row[None], use_cache=True).past_key_values
            for n, layer in enumerate(cache.layers):
                pairs = torch.hypot(layer.keys[0], layer.keys[0].roll(HEAD // 2, -1))
                keys[n] = torch.maximum(keys[n], pairs.amax(1))
                values[n] = torch.maximum(values[n], layer.values[0].abs().amax(1))
    for handle in handles:
        handle.remove()
    files: dict[str, dict[str, np.ndarray]] = {}
    for group in graph.groups:
        content = files.setdefault(statistics_file(group.name), {})
        fit, holdout = (torch.cat(rows) for rows in (seen[group.name][:6], seen[group.name][6:]))
        grams = ((rows.T @ rows / len(rows)).numpy()[None] for rows in (fit, holdout))
        content |= Statistics(*grams, fit.abs().mean(0).numpy(), fit.abs().amax(0).numpy()).tensors(group.name)
    for layer in range(LAYERS):
        content = files[statistics_file(f"layers.{layer}.qkv")]
        content[f"layers.{layer}.k_pair_absmax"] = keys[layer].numpy()
        content[f"layers.{layer}.v_absmax"] = values[layer].numpy()
    (folder / "statistics").mkdir()
    for name, content in files.items():
        save_file({key: np.ascontiguousarray(value) for key, value in content.items()}, folder / name)


def tokens(rows: int, seed: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (rows, 48), generator=torch.Generator().manual_seed(seed))


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens(4, seed=9)).logits.log_softmax(-1)


def float_model(graph: Artifact[PortableGraph]) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(graph.folder).eval()


def decoded(graph: Artifact[PortableGraph], model: Artifact[QuantizedModel]) -> Any:
    """The stock float module with our reader's weights."""
    checkpoint = open_checkpoint(model.folder)
    module = float_model(graph)
    weights = {name: torch.from_numpy(checkpoint.weight(name)) for name in checkpoint.names()}
    missing, unexpected = module.load_state_dict(weights, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    module.tie_weights()
    return module


def divergence(reference: torch.Tensor, other: torch.Tensor) -> float:
    return float((reference.exp() * (reference - other)).sum(-1).mean())


Inputs = tuple[Artifact[PortableGraph], Artifact[Calibration]]


@pytest.mark.parametrize(
    ("granularity", "dtype"), [("per_channel", "int8"), ("per_tensor", "int8"), ("per_tensor", "int4")]
)
def test_transformers_loads_the_folder_and_computes_what_we_decode(
    inputs: Inputs, tmp_path: Path, granularity: Any, dtype: Any
) -> None:
    from transformers import AutoModelForCausalLM

    graph, calibration = inputs
    cache = KVCache(dtype=dtype, granularity=granularity)
    model = quantized(recipe(kv_cache=cache), graph, calibration, tmp_path / "q")
    loaded = AutoModelForCausalLM.from_pretrained(model.folder).eval()
    ours, theirs = logits(decoded(graph, model)), logits(loaded)
    if granularity == "per_channel":
        torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-5)
    else:  # per-tensor scales are published: transformers rounds its keys and values as well
        least, most = (1e-9, 0.02) if dtype == "int8" else (0.02, 0.3)
        assert least < divergence(ours, theirs) < most
    assert divergence(logits(float_model(graph)), ours) < 0.1
    assert (model.folder / "tokenizer.json").is_file() and not (model.folder / "model.onnx").exists()


@pytest.mark.parametrize("bits", [4, 6])
def test_transformers_loads_tables_of_fewer_bits(inputs: Inputs, tmp_path: Path, bits: Any) -> None:
    from transformers import AutoModelForCausalLM

    graph, calibration = inputs
    tables = Scheme(bits=bits, group_size=32, symmetric=True)
    model = quantized(recipe(embeddings=tables), graph, calibration, tmp_path / "q")
    loaded = AutoModelForCausalLM.from_pretrained(model.folder).eval()
    ours = logits(decoded(graph, model))
    torch.testing.assert_close(logits(loaded), ours, rtol=0, atol=1e-5)
    assert divergence(logits(float_model(graph)), ours) > 1e-4  # that is not the float table
    report = next(report for report in model.record.linears if report.name == graph.record.embedding)
    assert report.scheme.bits == bits and report.error < report.error_rtn


def test_every_linear_is_at_least_as_good_as_rounding_to_nearest_and_most_are_better(
    inputs: Inputs, tmp_path: Path
) -> None:
    graph, calibration = inputs
    model = quantized(recipe(INT4_ASYMMETRIC), graph, calibration, tmp_path / "awq")
    plain = quantized(recipe(INT4_ASYMMETRIC, candidates=("rtn",)), graph, calibration, tmp_path / "rtn")
    linears = [report for report in model.record.linears if report.scheme.bits == 4]
    by_group: dict[str, list[float]] = {}
    for report in linears:
        sums = by_group.setdefault(report.group, [0.0, 0.0])
        sums[0] += report.error
        sums[1] += report.error_rtn
    assert len(linears) == 7 * LAYERS
    assert sum(report.error < 0.9 * report.error_rtn for report in linears) > len(linears) / 2
    assert {report.error_rtn for report in linears} == {r.error for r in plain.record.linears if r.scheme.bits == 4}
    assert any(report.input_scale != "identity" for report in linears), "the model has salient channels"
    reference = logits(float_model(graph))
    assert divergence(reference, logits(decoded(graph, model))) < 0.8 * divergence(
        reference, logits(decoded(graph, plain))
    )


def test_the_proof_and_the_reference_show_how_far_they_are(
    inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each reads every weight again, which takes minutes of a large model."""
    shown: list[tuple[str, int]] = []

    class Bar(ProgressBar):
        def __init__(self, items: Any, *, title: str, unit: str) -> None:
            super().__init__(items, title=title, unit=unit)
            shown.append((title, self.total))

    for module in ("quantize", "reference"):
        monkeypatch.setattr(f"quantization.{module}.ProgressBar", Bar)
    graph, calibration = inputs
    rules = (Rule(match="*", bits=8, group_size=16, symmetric=True),)
    model = quantized(recipe(rules), graph, calibration, tmp_path / "q")
    QuantizedReference(model.folder)
    count = len(open_checkpoint(model.folder).names())
    assert shown == [("proof of quantization", count), ("reading the quantized model", count)]


def test_folded_scales_cancel(inputs: Inputs, tmp_path: Path) -> None:
    """In 8 bits rounding is almost nothing, so a scale not undone somewhere would show at once."""
    graph, calibration = inputs
    rules = (Rule(match="*", bits=8, group_size=16, symmetric=True),)
    model = quantized(recipe(rules), graph, calibration, tmp_path / "q")
    checkpoint, source = open_checkpoint(model.folder), open_checkpoint(graph.folder)
    folded = [n for n in checkpoint.names() if "layernorm" in n and (checkpoint.tensor(n) != source.tensor(n)).any()]
    assert folded, "no scale was folded into a norm: this test shows nothing"
    assert divergence(logits(float_model(graph)), logits(decoded(graph, model))) < 1e-3


def test_value_scales_follow_the_fold_into_the_value_projection(inputs: Inputs, tmp_path: Path) -> None:
    graph, calibration = inputs
    model = quantized(recipe(INT4_ASYMMETRIC), graph, calibration, tmp_path / "q")
    scales = load_file(model.folder / KV_SCALES)
    assert sorted(scales) == [f"layers.{n}.{part}_scale" for n in range(LAYERS) for part in "kv"]
    source = load_file(calibration.folder / statistics_file("layers.0.qkv"))
    np.testing.assert_allclose(scales["layers.0.k_scale"], source["layers.0.k_pair_absmax"] / 127, rtol=1e-6)
    module = decoded(graph, model)
    peak: dict[int, np.ndarray] = {}
    for layer in range(LAYERS):
        module.model.layers[layer].self_attn.v_proj.register_forward_hook(
            lambda _m, _a, out, layer=layer: peak.__setitem__(
                layer, out.reshape(-1, KV_HEADS, HEAD).abs().amax(0).numpy()
            )
        )
    with torch.no_grad():
        module(tokens(8, seed=1))
    for layer in range(LAYERS):  # same rows as the calibration: the new values reach the new thresholds
        np.testing.assert_allclose(peak[layer], scales[f"layers.{layer}.v_scale"] * 127, rtol=0.35)


def test_4_bit_scales_reach_little_over_half_of_what_was_seen_and_say_their_bits(
    inputs: Inputs, tmp_path: Path
) -> None:
    graph, calibration = inputs
    model = quantized(recipe(kv_cache=KVCache(dtype="int4")), graph, calibration, tmp_path / "q")
    stored = KVScales.read(model.folder)
    assert stored.dtype == "int4" and model.record.kv_cache.dtype == "int4" and model.record.summary.endswith("kv-int4")
    source = load_file(calibration.folder / statistics_file("layers.0.qkv"))
    np.testing.assert_allclose(
        stored.scales["layers.0.k_scale"], source["layers.0.k_pair_absmax"] * 0.55 / 7, rtol=1e-6
    )


def test_the_record_tells_formats_sizes_and_fallbacks(inputs: Inputs, tmp_path: Path) -> None:
    graph, calibration = inputs
    rules = (Rule(match="*.qkv", bits=32), Rule(match="*", bits=4, group_size=64, symmetric=True))
    record = quantized(recipe(rules), graph, calibration, tmp_path / "q").record
    sizes = {
        r.group.partition("layers.")[2][2:]: (r.scheme.bits, r.scheme.group_size)
        for r in record.linears
        if "." in r.group
    }
    assert sizes == {"qkv": (32, None), "o": (4, 64), "gate_up": (4, 64), "down": (4, 32)}
    assert record.notes == (
        "layers.0.down, layers.1.down: groups of 32 instead of 64, which does not divide 160 inputs",
    )
    assert record.proof.passed and record.proof.quantized_tensors == record.proof.planned_tensors
    assert 4 < record.proof.bits_per_weight < 8.5
    config = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]
    assert len(config["ignore"]) == 3


STATIC = (
    Rule(match="*.down", bits=8, group_size=32, symmetric=True),
    Rule(match="*", bits=8, activations="int8"),
)


def test_static_int8_inputs_are_what_transformers_and_our_reference_round_to(inputs: Inputs, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    graph, calibration = inputs
    model = quantized(recipe(STATIC, kv_cache=KVCache(dtype="float32")), graph, calibration, tmp_path / "q")
    reference = QuantizedReference(model.folder)
    loaded = AutoModelForCausalLM.from_pretrained(model.folder).eval()
    ours = torch.stack([torch.from_numpy(reference(row.tolist())) for row in tokens(4, seed=9)]).log_softmax(-1)
    assert divergence(logits(loaded), ours) < 1e-4  # a rounding may fall the other way
    exact = logits(float_model(graph))
    assert 10 * divergence(logits(loaded), ours) < divergence(exact, ours) < 0.05

    record = model.record
    by_unit = {
        r.group.rpartition(".")[2]: r.scheme.activations for r in record.linears if r.group.startswith("layers.")
    }
    assert by_unit == {"qkv": "int8", "o": "int8", "gate_up": "int8", "down": "float"}
    assert "w8a8:12" in record.summary and record.proof.passed
    assert all(r.error <= r.error_rtn for r in record.linears)
    assert any(r.input_scale.startswith("smooth") for r in record.linears), "the model has salient channels"
    checkpoint = open_checkpoint(model.folder)
    for group in graph.record.groups:
        stored = [checkpoint.linear(name) for name in group.members]
        assert len({getattr(part, "input_scale", None) for part in stored}) == 1, "members read one tensor"


def test_the_same_inputs_give_the_same_digest(inputs: Inputs, tmp_path: Path) -> None:
    graph, calibration = inputs
    first = quantized(recipe(), graph, calibration, tmp_path / "a")
    second = quantized(recipe(), graph, calibration, tmp_path / "b")
    assert first.digest == second.digest


@pytest.mark.parametrize("stopped_at", ["layers.0.o", "layers.1.o", "lm_head"])
def test_an_interrupted_run_goes_on_after_the_layers_it_finished(
    inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped_at: str
) -> None:
    per_tensor = recipe(kv_cache=KVCache(granularity="per_tensor"))
    whole = quantized(per_tensor, *inputs, tmp_path / "whole")
    plan = written_plan(per_tensor, inputs[0], tmp_path / "plan")
    read, seen = quantized_layers.read_statistics, list[str]()

    def interrupted(calibration: Artifact[Calibration], group: LinearGroup) -> Statistics:
        seen.append(group.name)
        if group.name == stopped_at and not resumed:
            raise KeyboardInterrupt
        return read(calibration, group)

    monkeypatch.setattr(quantized_layers, "read_statistics", interrupted)
    monkeypatch.setattr("quantization.quantized_layers.psutil.cpu_count", lambda logical: 1)
    resumed = False
    with pytest.raises(KeyboardInterrupt):
        quantize(per_tensor.quantize, *inputs, plan, tmp_path / "q")
    assert not (tmp_path / "q").exists()
    resumed, seen = True, []
    again = quantize(per_tensor.quantize, *inputs, plan, tmp_path / "q")
    finished = {"layers.0.o": 0, "layers.1.o": 1, "lm_head": 2}[stopped_at]
    assert seen == [
        group.name for group in inputs[0].record.groups if not group.name.startswith(LAYERS_BEFORE[finished])
    ]
    assert again.files == whole.files
    assert not list(tmp_path.glob(".*"))


def test_searches_that_do_not_fit_into_memory_wait_for_one_another() -> None:
    memory, together, most = MemoryBudget(100), list[int](), list[int]()

    def search(size: int) -> None:
        with memory.taken(size):
            together.append(size)
            most.append(sum(together))
            time.sleep(0.001)
            together.remove(size)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(search, [40, 70, 30, 1000, 20, 60, 100, 10] * 20))
    assert max(size for size in most if size != 1000) <= 100
    assert all(size in (1000, 100) or size < 100 for size in most) and 1000 in most


def test_float_embeddings_stay_float(inputs: Inputs, tmp_path: Path) -> None:
    graph, calibration = inputs
    settings = recipe(embeddings=Scheme(bits=32))
    model = quantized(settings, graph, calibration, tmp_path / "q")
    name = graph.record.embedding
    checkpoint = open_checkpoint(model.folder)
    np.testing.assert_array_equal(checkpoint.weight(name), open_checkpoint(graph.folder).weight(name))


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ((Rule(match="*.o", bits=4),), "no rule of plan.schemes matches layers.0.qkv"),
        ((Rule(match="*", bits=32),), "this is not a quantized model: "),
    ],
)
def test_a_plan_that_quantizes_nothing_or_forgets_a_unit_is_refused(
    inputs: Inputs, tmp_path: Path, rules: tuple[Rule, ...], message: str
) -> None:
    graph, calibration = inputs
    with pytest.raises(QuantizationError, match=message):
        quantized(recipe(rules, embeddings=Scheme(bits=32)), graph, calibration, tmp_path / "q")
    assert not (tmp_path / "q").exists()


def test_calibration_of_another_graph_is_refused(inputs: Inputs, tmp_path: Path) -> None:
    graph, calibration = inputs
    foreign = Artifact(
        calibration.folder,
        calibration.record,
        calibration.files,
        {"graph": ArtifactRef("PortableGraph", "f" * 64)},
        "0",
    )
    with pytest.raises(QuantizationError, match="was calibrated on graph ffffffffffff"):
        quantized(recipe(), graph, foreign, tmp_path / "q")


def test_a_plan_of_another_graph_is_refused(inputs: Inputs, tmp_path: Path) -> None:
    graph, calibration = inputs
    plan = written_plan(recipe(), graph, tmp_path / "plan")
    foreign = Artifact(plan.folder, plan.record, plan.files, {"graph": ArtifactRef("PortableGraph", "f" * 64)}, "0")
    with pytest.raises(QuantizationError, match="was planned on graph ffffffffffff"):
        quantize(recipe().quantize, graph, calibration, foreign, tmp_path / "q")


def _spoil_weight(graph: Path, calibration: Path) -> None:
    weights = dict(load_file(graph / "model.safetensors"))
    spoiled = weights["model.layers.0.mlp.up_proj.weight"].copy()
    spoiled[1, 1] = np.inf
    save_file({**weights, "model.layers.0.mlp.up_proj.weight": spoiled}, graph / "model.safetensors")


def _spoil_statistics(graph: Path, calibration: Path) -> None:
    file = calibration / statistics_file("layers.1.o")
    content = dict(load_file(file))
    save_file({**content, "layers.1.o.gram_power": np.full_like(content["layers.1.o.gram_power"], np.nan)}, file)


@pytest.mark.parametrize(
    ("spoil", "message"), [(_spoil_weight, "1 weights are NaN or infinite"), (_spoil_statistics, "layers.1.o")]
)
def test_values_that_are_not_finite_stop_the_stage(
    tmp_path: Path, spoil: Callable[[Path, Path], None], message: str
) -> None:
    graph, calibration = make_inputs(tmp_path, tied=True)
    spoil(graph.folder, calibration.folder)
    with pytest.raises(QuantizationError, match=message):
        quantized(recipe(), graph, calibration, tmp_path / "q")
