"""Random checkpoints of a named shape load in transformers, and its bundles have the schemes that were asked for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks import scale
from benchmarks.peers import shapes
from benchmarks.peers.run import arguments, bench
from benchmarks.shapes import SHAPES, Shape, write
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


def test_a_plan_needs_a_shape(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arguments(["--ours", "a=b", "--plan", "latency=c"])
    assert "--plan needs --shape" in capsys.readouterr().err


def test_a_plan_is_not_named_as_the_recipes_bundle() -> None:
    with pytest.raises(EvidenceError, match="--plan default"):
        bench(arguments(["--shape", "llama-3.2-1b", "--plan", "default=a"]), print)
