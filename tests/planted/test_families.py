"""Planted: models and graphs that compute something else than transformers where a short check would not look."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch

from pipeline.export.check.difference import Difference, largest_difference
from pipeline.export.export import MODEL_FILE
from pipeline.export.trace import trace
from tapeout.errors import ExportError
from tapeout.graph_analysis.groups import find_groups
from tapeout.graph_analysis.linears import size
from tapeout.operators.attention import is_attention
from tapeout.operators.experts import UP_INPUT, is_experts
from tests.exported import family_graph
from tests.families import MAX_POSITIONS, export_model, random_model
from tests.lowering import parameter

POSITIONS, WINDOW = 512, 300  # neither is reached by a prompt of some twenty tokens
SIZES = {"sliding_window": WINDOW, "max_position_embeddings": POSITIONS}
TOLERANCE = 1e-3  # the default of export.tolerance
Edit = Callable[[ir.Graph], None]


@pytest.fixture(scope="module")
def model() -> Any:
    return random_model("mistral-short-window", **SIZES)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    graph = family_graph("mistral-short-window", **SIZES)
    return shutil.copytree(graph.folder, tmp_path_factory.mktemp("mistral") / "graph")


def difference_of_edited(model: Any, exported: Path, edit: Edit) -> Difference:
    """Of the exported graph after ``edit``, which lies beside the weights for the time of the comparison."""
    graph_model = ir.load(exported / MODEL_FILE)
    edit(graph_model.graph)
    edited = exported / "edited.onnx"
    ir.save(graph_model, edited)
    try:
        with TemporaryDirectory() as work:
            return largest_difference(model, edited, Path(work), positions=POSITIONS)
    finally:
        edited.unlink()


def attentions(graph: ir.Graph) -> list[ir.Node]:
    return [node for node in graph if is_attention(node)]


def insert(graph: ir.Graph, before: ir.Node, kind: str, *inputs: ir.Value | None) -> ir.Value:
    node = ir.node(kind, list(inputs))
    for value in inputs:
        if value is not None and value.const_value is not None and value.name not in graph.initializers:
            graph.initializers[value.name or ""] = value
    graph.insert_before(before, node)
    return node.outputs[0]


def int64(name: str, number: int) -> ir.Value:
    import numpy as np

    return parameter(name, np.array(number, np.int64))


def test_the_graph_without_an_edit_passes(model: Any, exported: Path) -> None:
    assert difference_of_edited(model, exported, lambda _: None).error < 1e-5


@pytest.mark.parametrize("first", [257, POSITIONS - 1])
def test_rotary_angles_that_are_wrong_from_a_position_on(model: Any, exported: Path, first: int) -> None:
    def edit(graph: ir.Graph) -> None:
        positions = next(value for value in graph.inputs if value.name == "position_ids")
        uses = list(positions.uses())
        before = uses[0].node
        late = insert(graph, before, "GreaterOrEqual", positions, int64("first", first))
        wrong = insert(graph, before, "Where", late, int64("zero", 0), positions)
        for use in uses:
            use.node.replace_input_with(use.idx, wrong)

    found = difference_of_edited(model, exported, edit)
    assert found.error > TOLERANCE
    assert "position" in found.where


@pytest.mark.parametrize("window", [WINDOW - 1, WINDOW + 1, 0])
def test_a_sliding_window_of_another_size(model: Any, exported: Path, window: int) -> None:
    def edit(graph: ir.Graph) -> None:
        attentions(graph)[1].attributes["window"] = ir.AttrInt64("window", window)

    assert difference_of_edited(model, exported, edit).error > TOLERANCE


def test_padding_that_is_attended_to(model: Any, exported: Path) -> None:
    def edit(graph: ir.Graph) -> None:
        first = attentions(graph)[0]
        mask = first.inputs[3]
        seen = insert(graph, first, "Max", mask, int64("one", 1))
        first.replace_input_with(3, seen)

    assert difference_of_edited(model, exported, edit).error > TOLERANCE


def test_caches_of_two_layers_exchanged(model: Any, exported: Path) -> None:
    def edit(graph: ir.Graph) -> None:
        first, second = attentions(graph)
        keys = first.inputs[4], second.inputs[4]
        first.replace_input_with(4, keys[1])
        second.replace_input_with(4, keys[0])

    assert difference_of_edited(model, exported, edit).error > TOLERANCE


def test_a_soft_cap_that_is_dropped(tmp_path: Path) -> None:
    """Scores of random weights are far from a cap of 50; the check makes scores that are not."""
    model = random_model("gemma2")
    exported = shutil.copytree(family_graph("gemma2").folder, tmp_path / "graph")

    def edit(graph: ir.Graph) -> None:
        for node in attentions(graph):
            assert node.attributes["softcap"].as_float() == 50
            node.attributes["softcap"] = ir.AttrFloat32("softcap", 0.0)

    graph_model = ir.load(exported / MODEL_FILE)
    edit(graph_model.graph)
    ir.save(graph_model, exported / "edited.onnx")
    for name in ("same", "edited"):
        (tmp_path / name).mkdir()
    assert largest_difference(model, exported / MODEL_FILE, tmp_path / "same", positions=64).error < 1e-4
    assert largest_difference(model, exported / "edited.onnx", tmp_path / "edited", positions=64).error > TOLERANCE


def test_rotary_factors_chosen_by_the_longest_sequence_of_a_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As transformers chooses those of longrope: the exporter is kept from fixing them."""
    monkeypatch.setattr("pipeline.export.export.fix_rotary", lambda model, positions: "fixed")
    with pytest.raises(ExportError, match="differ from transformers"):
        export_model(random_model("phi3-longrope", num_hidden_layers=1), tmp_path)


def test_rotary_scaling_that_grows_with_the_sequence(tmp_path: Path) -> None:
    """A model of dynamic scaling says how far its frequencies hold; one that is exported beyond is refused."""
    from pipeline.export.rotary import fix_rotary

    model = random_model("llama-dynamic-scaling")
    with pytest.raises(ExportError, match="type dynamic"):
        fix_rotary(model, 65)


def test_positions_that_do_not_come_from_position_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As llama4 counts for its attention temperature: from the length of transformers' cache, which a graph lacks."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    forward = LlamaRotaryEmbedding.forward

    def counted(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return forward(self, x, torch.arange(x.shape[1])[None].expand(x.shape[0], -1))

    monkeypatch.setattr(LlamaRotaryEmbedding, "forward", counted)
    with pytest.raises(ExportError, match="differ from transformers"):
        export_model(random_model("llama", num_hidden_layers=1), tmp_path)


def test_a_scale_that_changes_at_a_late_position_of_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries scaled from position 48 on, counted from the cache: nothing differs before that."""
    from transformers.models.llama.modeling_llama import LlamaModel, LlamaRotaryEmbedding

    started = [0]
    forward, rotate = LlamaModel.forward, LlamaRotaryEmbedding.forward

    def remembering(self: Any, *args: Any, **kwargs: Any) -> Any:
        cache = kwargs.get("past_key_values")
        started[0] = cache.get_seq_length() if cache is not None else 0
        return forward(self, *args, **kwargs)

    def scaled(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        cos, sin = rotate(self, x, position_ids)
        factor = 1 + ((started[0] + torch.arange(x.shape[1])) >= 48).float()[None, :, None]
        return cos * factor, sin * factor

    monkeypatch.setattr(LlamaModel, "forward", remembering)
    monkeypatch.setattr(LlamaRotaryEmbedding, "forward", scaled)
    with pytest.raises(ExportError, match="differ from transformers"):
        export_model(random_model("llama", num_hidden_layers=1), tmp_path)


@pytest.mark.parametrize("option", ["position_bias", "head_mask", "an_option_of_tomorrow"])
def test_an_option_of_attention_that_nobody_carries(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama.modeling_llama import LlamaAttention

    forward = LlamaAttention.forward

    def with_option(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **{**kwargs, option: torch.zeros(1)})

    monkeypatch.setattr(LlamaAttention, "forward", with_option)
    with pytest.raises(ExportError, match=f"passes {option} to"):
        trace(random_model("llama"))


def test_attention_that_sees_later_tokens() -> None:
    with pytest.raises(ExportError, match="mask is not a causal band"):
        trace(random_model("gemma3", use_bidirectional_attention=True))


def test_a_module_that_is_not_causal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.models.llama.modeling_llama.create_causal_mask", lambda **_: None)
    model = random_model("llama")
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    with pytest.raises(ExportError, match="is not causal"):
        trace(model)


def test_a_prefix_that_all_tokens_see(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond what a prompt of three tokens would show: positions 40 to 49 are seen by every query."""
    from transformers import masking_utils

    def with_prefix(**kwargs: Any) -> Any:
        return masking_utils.create_causal_mask(
            **kwargs, or_mask_function=lambda batch, head, query, key: (key >= 40) & (key < 50)
        )

    monkeypatch.setattr("transformers.models.llama.modeling_llama.create_causal_mask", with_prefix)
    with pytest.raises(ExportError, match="mask is not a causal band"):
        trace(random_model("llama"))


def test_chunked_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import masking_utils

    def chunked(config: Any, **kwargs: Any) -> Any:
        config.attention_chunk_size = 24
        return masking_utils.create_chunked_causal_mask(config=config, **kwargs)

    monkeypatch.setattr("transformers.models.llama.modeling_llama.create_causal_mask", chunked)
    with pytest.raises(ExportError, match="attention mask"):
        trace(random_model("llama"))


def test_a_bias_in_the_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ALiBi adds to a mask, before attention gets it."""
    from transformers import masking_utils

    def biased(**kwargs: Any) -> Any:
        return masking_utils.create_causal_mask(**kwargs) * 0.5

    monkeypatch.setattr("transformers.models.llama.modeling_llama.create_causal_mask", biased)
    with pytest.raises(ExportError, match="a mask that transformers did not make"):
        trace(random_model("llama"))


def test_experts_outside_the_interface() -> None:
    with pytest.raises(ExportError, match="is a mixture of experts outside transformers' experts interface") as caught:
        trace(random_model("llama4"))
    assert "\x1b" not in str(caught.value)


def test_a_gate_of_experts_that_no_graph_has() -> None:
    model = random_model("olmoe")
    model.model.layers[1].mlp.experts.act_fn = torch.nn.Tanh()
    with pytest.raises(
        ExportError, match=r"layers\.1\.mlp\.experts .* computes something else between its projections"
    ):
        trace(model)


@pytest.mark.parametrize("part", ["index", "weight", "gate"])
def test_experts_are_not_those_of_the_model(part: str, tmp_path: Path) -> None:
    """The next expert is asked; its share is a hundredth larger; gelu stands where silu was."""
    graph = family_graph("olmoe")
    graph_model = ir.load(graph.folder / MODEL_FILE)
    node = next(node for node in graph_model.graph if is_experts(node))
    if part == "index":
        later = insert(graph_model.graph, node, "Add", node.inputs[1], integer(graph_model.graph, "one", 1))
        count = integer(graph_model.graph, "count", size(node.inputs[UP_INPUT], 0))
        node.replace_input_with(1, insert(graph_model.graph, node, "Mod", later, count))
    elif part == "weight":
        more = parameter("more", np.array(1.01, np.float32))
        graph_model.graph.register_initializer(more)
        node.replace_input_with(2, insert(graph_model.graph, node, "Mul", node.inputs[2], more))
    else:
        node.attributes["activation"] = ir.AttrString("activation", "gelu")
    edited = shutil.copytree(graph.folder, tmp_path / "graph") / "edited.onnx"
    ir.save(graph_model, edited)
    (work := tmp_path / "work").mkdir()
    assert largest_difference(random_model("olmoe"), edited, work, positions=MAX_POSITIONS).error > TOLERANCE


def integer(graph: ir.Graph, name: str, number: int) -> ir.Value:
    value = parameter(name, np.array(number, np.int64))
    graph.register_initializer(value)
    return value


def test_a_weight_that_two_linears_read() -> None:
    """gemma3n routes its streams twice in a layer by one linear."""
    one_layer = {"num_hidden_layers": 1, "layer_types": ["full_attention"], "activation_sparsity_pattern": [0.0]}
    with pytest.raises(ExportError, match=r"2 linears read model\.layers\.0\.altup\.modality_router\.weight"):
        find_groups(trace(random_model("gemma3n", **one_layer)), {})


@pytest.mark.parametrize("name", ["granite", "granite-scaled-logits", "hyperclovax", "minicpm3"])
def test_a_scaled_residual_taken_for_a_rotary_embedding(name: str) -> None:
    """Each projection is in its own group, and the head is one linear; whole engines are in docs/models.md."""
    record = family_graph(name).record
    groups = {group.name: group.members for group in record.groups}
    for layer in range(2):
        for unit, part in (("o", "self_attn.o_proj"), ("down", "mlp.down_proj")):
            assert groups[f"layers.{layer}.{unit}"] == (f"model.layers.{layer}.{part}.weight",)
    assert groups["lm_head"] == ("model.embed_tokens.weight" if record.tied_embeddings else "lm_head.weight",)
