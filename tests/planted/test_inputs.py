"""What comes in: checkpoints, tokenizers, adapters and recipes that would change the model without a word."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from pipeline.cli.main import main
from pipeline.export import sentencepiece_file
from pipeline.export.adapter import merge_adapter
from pipeline.export.checkpoint import load_checkpoint
from pipeline.export.export import find_stop_tokens
from pipeline.export.tokenizer import save_tokenizer
from pipeline.recipe import Recipe, load_recipe
from pipeline.sources.fetch import fetch
from quantization.units import resolve
from tapeout.errors import ExportError, QuantizationError, RecipeError, RequestError, SourceError
from tapeout.portable_graph import LinearGroup, PortableGraph
from tapeout.recipe import Rule
from tapeout.schemes import Scheme
from tests import checkpoints
from tests.checkpoints import CONFIG, WEIGHTS, Tensors, change_json, change_weights, gguf_file, shard, write_index
from tests.families import VOCAB_SIZE
from tests.sentencepiece_files import write_sentencepiece
from tests.stored_formats import EXAMPLES

UP = "model.layers.1.mlp.up_proj.weight"
BYTES = Scheme(bits=8)
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A llama of two layers, its head not tied."""
    return checkpoints.checkpoint(tmp_path / "checkpoint")


def refused(folder: Path, pattern: str, entry: str = "") -> None:
    with pytest.raises((ExportError, QuantizationError), match=pattern) as caught:
        load_checkpoint(folder, entry)
    assert caught.value.expected or caught.value.remedy
    assert "\x1b" not in str(caught.value)


# --- tensors


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("name", [UP, HEAD, EMBEDDING, "model.norm.weight"])
def test_a_tensor_is_missing(folder: Path, name: str, sharded: bool) -> None:
    change_weights(folder, lambda tensors: tensors.pop(name))
    if sharded:
        shard(folder)
    refused(folder, rf"lacks 1 tensor of LlamaForCausalLM: {re.escape(name)}")


def test_the_configuration_has_too_few_layers(folder: Path) -> None:
    change_json(folder / CONFIG, num_hidden_layers=1)
    refused(folder, r"holds 9 tensors that LlamaForCausalLM does not have: model\.layers\.1\.")


def test_the_configuration_has_too_many_layers(folder: Path) -> None:
    change_json(folder / CONFIG, num_hidden_layers=3)
    refused(folder, r"lacks 9 tensors of LlamaForCausalLM: model\.layers\.2\.")


def test_a_tensor_that_the_model_has_no_place_for(folder: Path) -> None:
    change_weights(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}))
    refused(folder, r"does not have: model\.layers\.0\.self_attn\.q_proj\.bias")


@pytest.mark.parametrize("sizes", [{"intermediate_size": 128}, {"head_dim": 32}, {"vocab_size": 101}])
def test_shapes_do_not_fit_the_configuration(folder: Path, sizes: dict[str, int]) -> None:
    change_json(folder / CONFIG, **sizes)
    refused(folder, r"(mlp|self_attn|embed|lm_head).* \[\d+, \d+\] where the model has \[\d+, \d+\]")


@pytest.mark.parametrize("sizes", [{"num_key_value_heads": 3}, {"num_attention_heads": 3, "head_dim": None}])
def test_heads_do_not_divide(folder: Path, sizes: dict[str, Any]) -> None:
    change_json(folder / CONFIG, **sizes)
    refused(folder, "is no multiple of|is not a multiple of|do not have the shapes")


def test_the_configuration_ties_a_head_that_is_stored_apart(folder: Path) -> None:
    change_json(folder / CONFIG, tie_word_embeddings=True)
    refused(folder, r"lm_head\.weight and model\.embed_tokens\.weight with different values")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_is_not_finite(folder: Path, value: float) -> None:
    change_weights(folder, lambda tensors: tensors[UP].view(-1)[7:8].fill_(value))
    refused(folder, rf"NaN or infinite weights in {re.escape(UP)}")


def test_codes_lost_the_configuration_that_reads_them(folder: Path) -> None:
    def to_codes(tensors: Tensors) -> None:
        tensors[UP] = (tensors[UP] * 100).to(torch.int8)

    change_weights(folder, to_codes)
    refused(folder, rf"{re.escape(UP)} \(I8\) are no floats, and config\.json has no quantization_config")


# --- files


@pytest.mark.parametrize("kept", [0, 5, 200, 50_000])
def test_a_safetensors_file_is_cut_off(folder: Path, kept: int) -> None:
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[:kept])
    refused(folder, r"model\.safetensors is not a complete safetensors file")


def test_a_safetensors_file_holds_something_else(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(b"version https://git-lfs.github.com/spec/v1\n" * 20)
    refused(folder, r"model\.safetensors is not a complete safetensors file")


def test_shards_and_their_index_disagree(folder: Path) -> None:
    index = shard(folder)
    write_index(folder, index | {"model.extra.weight": index[UP]})
    refused(folder, r"model\.extra\.weight is in .*, but no file holds it")
    write_index(folder, {name: file for name, file in index.items() if name != UP})
    refused(folder, rf"the shards hold {re.escape(UP)}, which model\.safetensors\.index\.json does not list")
    write_index(folder, index | {UP: "model-00003-of-00003.safetensors"})
    refused(folder, r"lacks model-00003-of-00003\.safetensors")
    write_index(folder, index)
    (folder / WEIGHTS).write_bytes(b"")
    refused(folder, r"holds both model\.safetensors and the shards")


def test_a_tensor_is_stored_in_two_shards(folder: Path) -> None:
    index = shard(folder)
    other = next(file for file in index.values() if file != index[UP])
    tensors = {name: torch.ones(1) for name, file in index.items() if file == other} | {UP: torch.ones(1)}
    save_file(tensors, folder / other)
    refused(folder, rf"{re.escape(UP)} is stored twice")


def test_weights_lie_beside_those_that_are_read(folder: Path) -> None:
    save_file({UP: torch.ones(1)}, folder / "model-lora.safetensors")
    refused(folder, r"holds model-lora\.safetensors, which model\.safetensors does not cover")


def test_the_configuration_names_another_weights_file(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "other.safetensors")
    change_json(folder / CONFIG, transformers_weights="other.safetensors")
    refused(folder, "names another weights file")


@pytest.mark.parametrize("name", [CONFIG, "generation_config.json"])
@pytest.mark.parametrize("content", ["{", "[1]", ""])
def test_a_configuration_file_is_damaged(folder: Path, name: str, content: str) -> None:
    (folder / name).write_text(content)
    refused(folder, rf"{re.escape(name)} (is not JSON|holds list)")


# --- architectures


@pytest.mark.parametrize("names", [["LlamaForSequenceClassification"], ["LlamaModel"], ["Qwen2ForCausalLM"], None])
def test_the_checkpoint_is_no_language_model(folder: Path, names: list[str] | None) -> None:
    change_json(folder / CONFIG, architectures=names)
    (folder / WEIGHTS).write_bytes(b"")  # refused before a weight is read
    refused(folder, rf"names the architecture {names[0] if names else 'none'}")


def test_an_encoder_decoder(folder: Path) -> None:
    config = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}
    (folder / CONFIG).write_text(json.dumps(config))
    refused(folder, "is an encoder-decoder model")


@pytest.mark.parametrize("family", ["llama4_text", "jetmoe", "longcat_flash"])
def test_a_mixture_of_experts(folder: Path, family: str) -> None:
    """Of families that have loops of their own; others call transformers' interface, and are exported."""
    from transformers import AutoConfig

    config: Any = AutoConfig.for_model(family, num_hidden_layers=4)
    config.architectures = [f"{type(config).__name__.removesuffix('Config').removesuffix('Text')}ForCausalLM"]
    config.save_pretrained(folder)
    (folder / WEIGHTS).write_bytes(b"")  # refused before a weight is read
    refused(folder, "is a mixture of experts outside transformers' experts interface")


# --- quantized checkpoints


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "gptq", "bits": 4, "group_size": 128},
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        {"quant_method": "awq", "bits": 4, "version": "gemv"},
        {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
        {"quant_method": "compressed-tensors", "format": "pack-quantized", "transform_config": {"a": 1}},
    ],
)
def test_a_quantization_that_is_not_read(folder: Path, config: dict[str, Any]) -> None:
    change_json(folder / CONFIG, quantization_config=config)
    refused(folder, rf"is quantized by quant_method {config['quant_method']}")


def test_codes_without_their_scales(folder: Path) -> None:
    def to_codes(tensors: Tensors) -> None:
        tensors[UP.replace(".weight", ".qweight")] = torch.zeros(64, 12, dtype=torch.int32)
        tensors[UP.replace(".weight", ".qzeros")] = torch.zeros(2, 12, dtype=torch.int32)
        del tensors[UP]

    change_weights(folder, to_codes)
    change_json(folder / CONFIG, quantization_config={"quant_method": "awq", "bits": 4, "group_size": 32})
    refused(folder, r"no model\.layers\.1\.mlp\.up_proj\.scales")


def change_stored(folder: Path, example: str, change: Callable[[Tensors], object]) -> None:
    """A sound quantized checkpoint of ``tests/stored_formats.py``, then changed."""
    EXAMPLES[example].write(folder)
    change_weights(folder, change)


@pytest.mark.parametrize(
    ("example", "part"), [("fp8", "weight"), ("float8, channels", "weight"), ("bytes, channels", "weight")]
)
def test_codes_are_stored_as_bytes(folder: Path, example: str, part: str) -> None:
    name = UP.replace("weight", part)
    change_stored(folder, example, lambda tensors: tensors.update({name: tensors[name].view(torch.uint8)}))
    refused(folder, rf"{re.escape(name)} \(U8 \[96, 64\]\) does not fit")


@pytest.mark.parametrize(
    ("example", "name"),
    [
        ("fp8", f"{UP}_scale_inv"),
        ("bytes, channels", f"{UP}_scale"),
        ("packed, asymmetric groups", f"{UP}_scale"),
        ("float8, blocks", f"{UP}_scale"),
    ],
)
def test_scales_are_of_a_type_that_is_not_known(folder: Path, example: str, name: str) -> None:
    for change in (torch.Tensor.double, lambda scales: scales.float().to(torch.float8_e8m0fnu).view(torch.uint8)):
        change_stored(folder, example, lambda tensors, to=change: tensors.update({name: to(tensors[name])}))
        refused(folder, rf"{re.escape(name)} \((F64|U8) \[\d+, \d+\]\) does not fit")


@pytest.mark.parametrize(
    ("example", "name"),
    [
        ("fp8, exponents", f"{UP}_scale_inv"),
        ("fp8, exponents as bytes", f"{UP}_scale_inv"),
        ("mxfp4 of gpt-oss", "model.layers.1.mlp.experts.down_proj_scales"),
    ],
)
def test_a_scale_is_the_code_of_nan(folder: Path, example: str, name: str) -> None:
    change_stored(folder, example, lambda tensors: tensors[name].view(torch.uint8)[1, 1].fill_(255))
    refused(folder, rf"{re.escape(name)} .* holds scales that are not finite")


@pytest.mark.parametrize("name", [HEAD, EMBEDDING, "model.norm.weight"])
@pytest.mark.parametrize(("example", "part"), [("fp8", "weight_scale_inv"), ("bytes, channels", "weight_scale")])
def test_scales_beside_a_weight_that_is_not_quantized(folder: Path, example: str, part: str, name: str) -> None:
    stray = name.replace("weight", part)
    change_stored(folder, example, lambda tensors: tensors.update({stray: torch.ones(2, 2)}))
    refused(folder, rf"{re.escape(name)} \(\w+ \[[\d, ]+\]\).*does not fit.*{re.escape(stray)}")


def test_scales_of_other_blocks_than_the_configuration_says(folder: Path) -> None:
    for blocks in ([16, 16], [64, 64], [128, 128], [32, 64], None):
        EXAMPLES["fp8"].write(folder)
        config = dict(EXAMPLES["fp8"].config) | {"weight_block_size": blocks}
        change_json(folder / CONFIG, quantization_config=config)
        refused(folder, r"weight_scale_inv \(F32 \[\d+, \d+\]\) does not fit")


@pytest.mark.parametrize(
    ("example", "config"),
    [
        ("awq", {"group_size": 16}),
        ("awq", {"group_size": 48}),
        ("awq", {"group_size": "32"}),
        ("fp8", {"weight_block_size": [32]}),
        ("fp8", {"weight_block_size": [0, 32]}),
        ("fp8", {"scale_fmt": "ue4m3"}),
        ("bytes, channels", {"format": "pack-quantized"}),
        ("bytes, channels", {"format": "float-quantized"}),
    ],
)
def test_the_quantization_config_is_of_another_checkpoint(folder: Path, example: str, config: dict[str, Any]) -> None:
    EXAMPLES[example].write(folder)
    change_json(folder / CONFIG, quantization_config=dict(EXAMPLES[example].config) | config)
    refused(folder, "quantization_config says|does not fit|is quantized by|which .* needs in")


def test_a_group_of_the_configuration_has_a_format_that_is_not_read(folder: Path) -> None:
    EXAMPLES["packed, sorted"].write(folder)
    config = dict(EXAMPLES["packed, sorted"].config)
    group = config["config_groups"]["group_0"] | {"format": "mxfp4-pack-quantized"}
    change_json(folder / CONFIG, quantization_config=config | {"config_groups": {"group_0": group}})
    refused(folder, "is stored in mxfp4-pack-quantized")


def test_an_input_channel_is_of_a_group_without_scales(folder: Path) -> None:
    name = f"{UP}_g_idx"
    change_stored(folder, "packed, sorted", lambda tensors: tensors[name][3:4].fill_(4))
    refused(folder, rf"{re.escape(name)} names groups 0 to 4")


# --- GGUF files


def test_a_gguf_file_lacks_a_tensor(tmp_path: Path) -> None:
    gguf_file(tmp_path / "m.gguf", lambda tensors: tensors.pop("blk.1.ffn_up.weight"))
    refused(tmp_path, rf"lacks 1 tensor of LlamaForCausalLM: {re.escape(UP)}", "m.gguf")


@pytest.mark.parametrize("name", ["rope_freqs.weight", "blk.0.attn_q.bias"])
def test_a_gguf_file_holds_a_tensor_that_transformers_leaves_out(tmp_path: Path, name: str) -> None:
    gguf_file(tmp_path / "m.gguf", lambda tensors: tensors.update({name: torch.full((16,), 2.0)}))
    refused(tmp_path, rf"holds {re.escape(name)}", "m.gguf")


def test_a_gguf_file_whose_tensor_does_not_fit_its_metadata(tmp_path: Path) -> None:
    gguf_file(tmp_path / "m.gguf", lambda tensors: tensors.update({"blk.0.attn_q.weight": torch.zeros(60, 64)}))
    refused(tmp_path, r"blk\.0\.attn_q\.weight of m\.gguf \(F32, \[64, 60\]\) cannot be read", "m.gguf")


def test_a_gguf_file_without_tensors(tmp_path: Path) -> None:
    gguf_file(tmp_path / "m.gguf", lambda tensors: tensors.clear())
    refused(tmp_path, r"m\.gguf holds no tensor", "m.gguf")


def test_a_gguf_file_of_a_name_that_changes_its_type(tmp_path: Path) -> None:
    """transformers takes a llama file for a mistral one by the model's name, and gguf knows no such type."""
    gguf_file(tmp_path / "m.gguf", title="mistral")
    refused(tmp_path, r"transformers has no names for the tensors of m\.gguf: Unknown gguf model_type", "m.gguf")


def test_a_gguf_file_asks_for_what_transformers_leaves_out(tmp_path: Path) -> None:
    gguf_file(tmp_path / "m.gguf", rope__scaling__type="yarn", rope__scaling__factor=4.0)
    refused(tmp_path, r"says llama\.rope\.scaling\.type = yarn, llama\.rope\.scaling\.factor", "m.gguf")


@pytest.mark.parametrize("value", [None, 0.0, -1e-6, float("nan"), float("inf"), "small"])
@pytest.mark.parametrize("key", ["context_length", "attention.layer_norm_rms_epsilon", "rope.freq_base"])
def test_a_gguf_file_lacks_a_number_that_transformers_fills_in(
    tmp_path: Path, key: str, value: float | str | None
) -> None:
    """Its own defaults, which no shape contradicts. Without a base llama.cpp has that of transformers, too."""
    more: dict[str, Any] = {} if value is None else {key.replace(".", "__"): value}
    gguf_file(tmp_path / "m.gguf", without=f"llama.{key}", **more)
    if (key, value) == ("rope.freq_base", None):
        assert load_checkpoint(tmp_path, "m.gguf").model.config.rope_parameters["rope_theta"] == 10000.0
    else:
        refused(tmp_path, rf"no positive number for {re.escape(key)}|transformers cannot read", "m.gguf")


@pytest.mark.parametrize("kept", [0, 3, 100, 20_000, 400_000])
def test_a_gguf_file_is_cut_off(tmp_path: Path, kept: int) -> None:
    path = gguf_file(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes()[:kept])
    refused(tmp_path, "is not a GGUF file that can be read|is cut off", "m.gguf")


# --- tokenizers


def tokenizer_refused(folder: Path, pattern: str, rows: int = VOCAB_SIZE) -> None:
    written = folder.parent / "written"
    written.mkdir(exist_ok=True)
    with pytest.raises(ExportError, match=pattern) as caught:
        save_tokenizer(folder, "", written, rows)
    assert caught.value.remedy


def test_transformers_makes_another_tokenizer_of_the_file(tmp_path: Path) -> None:
    folder = checkpoints.checkpoint(tmp_path / "checkpoint", "qwen2")
    change_json(folder / "tokenizer_config.json", tokenizer_class="Qwen2Tokenizer")
    tokenizer_refused(folder, r"tokenizer\.json and the tokenizer that transformers makes of this checkpoint differ")


def test_the_tokenizers_files_disagree_on_the_start_token(tiny_checkpoint: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint")
    change_json(folder / "tokenizer_config.json", add_bos_token=True)
    tokenizer_refused(folder, r"says add_bos_token true, and tokenizer\.json does not add it", rows=1024)


def test_a_tokenizer_that_cuts_texts(folder: Path) -> None:
    truncation = {"direction": "Right", "max_length": 64, "strategy": "LongestFirst", "stride": 0}
    change_json(folder / "tokenizer.json", truncation=truncation)
    tokenizer_refused(folder, "cuts or pads every text")


def test_a_tokenizer_larger_than_the_embedding(folder: Path) -> None:
    tokenizer_refused(folder, r"no row for: 'w201' is 201, 'w202' is 202", rows=201)


def test_a_chat_uses_a_token_that_the_embedding_lacks(folder: Path) -> None:
    """An added token is harmless as long as no chat uses it: gemma3 keeps one for images."""
    file = Tokenizer.from_file(str(folder / "tokenizer.json"))
    file.add_special_tokens(["<turn>"])
    file.save(str(folder / "tokenizer.json"))
    written = folder.parent / "written"
    written.mkdir()
    save_tokenizer(folder, "", written, VOCAB_SIZE)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}<turn>{{ m.content }}{% endfor %}")
    tokenizer_refused(folder, f"no row for: '<turn>' is {VOCAB_SIZE}")


def added(number: int, content: str) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": content, "special": True, **flags}


@pytest.mark.parametrize(
    ("tokens", "pattern"),
    [
        ([(1500, "<tool>")], "'<tool>' is id 1500; .* id 1024"),
        ([(7, "<tool>")], "'<tool>' is id 7; .* id 1024"),
        ([(1024, "<a>"), (1024, "<b>")], "'<b>' is id 1024; .* id 1025"),
        ([(1024, "<a>"), (1025, "<a>")], "'<a>' is id 102[45]; .* id 102[45]"),
        ([(1500, "e")], "'e' is id 1500"),
    ],
    ids=["a gap", "the id of another", "one id", "twice", "in the vocabulary"],
)
def test_added_tokens_that_get_other_ids_than_the_file_says(
    tiny_checkpoint: Path, tmp_path: Path, tokens: list[tuple[int, str]], pattern: str
) -> None:
    folder = shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint")
    known = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    change_json(folder / "tokenizer.json", added_tokens=[*known, *(added(*token) for token in tokens)])
    tokenizer_refused(folder, rf"tokenizer\.json says that token {pattern}", rows=2000)


def test_the_tokenizers_files_disagree_on_the_id_of_an_added_token(tiny_checkpoint: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint")
    change_json(folder / "tokenizer_config.json", added_tokens_decoder={"9": added(9, "<|im_end|>")})
    tokenizer_refused(folder, r"tokenizer_config\.json says that token '<.im_end.>' is id 9", rows=1024)


def test_two_tokens_of_the_vocabulary_have_one_id(tiny_checkpoint: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint")
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    last, before = sorted(model["vocab"], key=lambda token: model["vocab"][token])[:-3:-1]
    model["vocab"][last] = model["vocab"][before]
    change_json(folder / "tokenizer.json", model=model)
    tokenizer_refused(folder, r"gives id 1022 to 2 tokens", rows=1024)


def test_there_is_no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"model": ')
    tokenizer_refused(folder, r"tokenizer\.json of the checkpoint cannot be read")
    (folder / "tokenizer.json").unlink()
    tokenizer_refused(folder, "no tokenizer in")
    (folder / "tokenizer.model").write_bytes(b"\x0a\x07garbage")
    tokenizer_refused(folder, r"tokenizer\.model cannot be converted to tokenizer\.json")
    (folder / "vocab.json").write_text("{")
    tokenizer_refused(folder, r"cannot read the tokenizer of .*vocab\.json")


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_a_sentencepiece_file_is_converted_into_another_tokenizer(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the space that sentencepiece puts before a text."""
    write_sentencepiece(tmp_path / "tokenizer.model", kind)
    monkeypatch.setattr(sentencepiece_file, "FORMS", ((),))
    tokenizer_refused(tmp_path, "is another tokenizer than sentencepiece makes of it: 'The quick brown")


def test_a_chat_template_that_is_no_template(tiny_checkpoint: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint")
    (folder / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}")
    (tmp_path / "written").mkdir()
    with pytest.raises(RequestError, match=r"chat_template\.jinja line 1"):
        save_tokenizer(folder, "", tmp_path / "written", 1024)


def test_nothing_ends_an_answer(folder: Path) -> None:
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | {"eos_token_id": None}))
    (folder / "generation_config.json").unlink()
    change_json(folder / "tokenizer_config.json", eos_token=None)
    model = load_checkpoint(folder).model
    (folder / "written").mkdir()
    tokenizer = save_tokenizer(folder, "", folder / "written", VOCAB_SIZE)
    with pytest.raises(ExportError, match="has no stop token"):
        find_stop_tokens(model, tokenizer)
    model.generation_config.eos_token_id = [2, VOCAB_SIZE]
    with pytest.raises(ExportError, match=f"eos_token_id is {VOCAB_SIZE}"):
        find_stop_tokens(model, tokenizer)


LINEAR = {"rope_type": "linear", "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("settings", "pattern"),
    [
        ({"rope_theta": 5e5}, "rope_theta 500000.0 and 10000.0"),
        ({"rope_theta": [5e5]}, r"rope_theta \[500000.0\] and 10000.0"),
        ({"rope_parameters": LINEAR | {"type": ["x"], "rope_theta": 1.0}, "rope_theta": {}}, "rope_theta {} and 1.0"),
        ({"rope_scaling": LINEAR}, "rope_scaling .*linear.* and rope_parameters .*default"),
        ({"rope_scaling": LINEAR, "rope_parameters": LINEAR | {"factor": 2.0}}, "'factor': 4.0.* and .*'factor': 2.0"),
        ({"rope_scaling": LINEAR, "rope_parameters": YARN}, "linear.* and .*yarn"),
        ({"rope_parameters": LINEAR | {"type": "yarn"}}, "type yarn and rope_type linear"),
        ({"rope_parameters": None, "rope_scaling": {"factor": 8.0}}, "factor 8.0 and rope_type default"),
        ({"rope_parameters": {"rope_type": "default", "factor": 4.0}}, "factor 4.0 and rope_type default"),
        ({"rope_parameters": {"full_attention": LINEAR | {"type": "dynamic"}}}, "type dynamic and rope_type linear"),
        ({"text_config": {"rope_theta": 1.0, "rope_parameters": {"rope_theta": 2.0}}}, "rope_theta 1.0 and 2.0"),
    ],
)
def test_the_configuration_contradicts_itself_on_rotary_embeddings(
    folder: Path, settings: dict[str, Any], pattern: str
) -> None:
    change_json(folder / CONFIG, **settings)
    refused(folder, f"contradicts itself on rotary embeddings: .*{pattern}")


@pytest.mark.parametrize(
    "settings",
    [
        {"rope_theta": 10000.0},
        {"rope_scaling": LINEAR, "rope_parameters": LINEAR | {"factor": 4, "rope_theta": 10000, "type": "linear"}},
        {"rope_parameters": None, "rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_scaling": {"rope_type": "default", "type": "mrope"}},
        {"rope_parameters": None},
    ],
)
def test_rotary_embeddings_that_are_described_twice_alike(folder: Path, settings: dict[str, Any]) -> None:
    change_json(folder / CONFIG, **settings)
    assert load_checkpoint(folder).model.config.rope_parameters["rope_theta"] == 10000.0


# --- adapters


def sources(folder: Path, **model: str) -> Recipe:
    return Recipe.model_validate({"model": {"source": f"file:{folder}"} | model, "data": {"source": "file:none"}})


def test_an_adapter_is_named_as_the_model(folder: Path, tmp_path: Path) -> None:
    checkpoints.adapter(tmp_path / "adapter", load_checkpoint(folder).model)
    with pytest.raises(SourceError, match="is a LoRA adapter, not a model") as caught:
        fetch(sources(tmp_path / "adapter"), tmp_path / "source")
    assert "set model.adapter: file:" in caught.value.remedy and "org/tiny" in caught.value.remedy


def test_an_adapter_lies_beside_the_model(folder: Path, tmp_path: Path) -> None:
    checkpoints.adapter(tmp_path / "adapter", load_checkpoint(folder).model)
    for file in (tmp_path / "adapter").iterdir():
        file.rename(folder / file.name)
        with pytest.raises(SourceError, match="holds an adapter beside the model") as caught:
            fetch(sources(folder), tmp_path / "source")
        assert "model.adapter" in caught.value.remedy and not (tmp_path / "source").exists()


def test_a_folder_is_named_as_an_adapter_and_is_none(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="holds none of the files that are needed"):
        fetch(sources(folder, adapter=f"file:{folder}"), tmp_path / "source")
    checkpoints.adapter(tmp_path / "adapter", load_checkpoint(folder).model)
    (tmp_path / "adapter/adapter_model.safetensors").unlink()
    with pytest.raises(SourceError, match=r"is no LoRA adapter: it has no adapter_model\.safetensors"):
        fetch(sources(folder, adapter=f"file:{tmp_path / 'adapter'}"), tmp_path / "source")


@pytest.mark.parametrize(
    ("settings", "pattern"),
    [
        ({"use_dora": True}, "use_dora True"),
        ({"bias": "all"}, "bias all"),
        ({"peft_type": "IA3"}, "peft_type IA3"),
        ({"task_type": "SEQ_CLS"}, "task_type SEQ_CLS"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights pissa"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
        ({"r": 0}, "r 0"),
        ({"lora_alpha": None}, "lora_alpha None"),
        ({"a_setting_of_tomorrow": 1}, "a_setting_of_tomorrow"),
        ({"target_modules": ["q_proj", "down_proj", "v_proj"]}, "lacks tensors for .*v_proj"),
        ({"target_modules": ["q_proj"]}, "has tensors for .*down_proj"),
        ({"r": 8}, r"lora_A\.weight of the adapter is \[4, "),
        ({"use_rslora": "false"}, "use_rslora 'false'"),
        ({"modules_to_save": "lm_head"}, "modules_to_save 'lm_head'"),
        ({"target_modules": "q_proj("}, r"target_modules 'q_proj\('"),
        ({"target_modules": 5}, "target_modules 5"),
        ({"exclude_modules": "["}, r"exclude_modules '\['"),
        ({"layers_to_transform": "1"}, "layers_to_transform '1'"),
        ({"layers_to_transform": True}, "layers_to_transform True"),
        ({"fan_in_fan_out": "no"}, "fan_in_fan_out 'no'"),
        ({"lora_alpha": 10**400}, "lora_alpha 1000"),
        ({"lora_alpha": float("nan")}, "lora_alpha nan"),
        ({"modules_to_save": ["lm_head"]}, r"lacks lm_head\.weight, by its modules_to_save"),
        ({"modules_to_save": ["score"]}, "modules_to_save names score, which LlamaForCausalLM does not have"),
    ],
)
def test_an_adapter_asks_for_more_than_is_merged(
    folder: Path, tmp_path: Path, settings: dict[str, Any], pattern: str
) -> None:
    model = load_checkpoint(folder).model
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    checkpoints.adapter(tmp_path / "adapter", model, **settings)
    with pytest.raises(ExportError, match=pattern) as caught:
        merge_adapter(model, tmp_path / "adapter")
    assert caught.value.remedy
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        (lambda t: t.pop(min(t)), "holds base_model.*, which cannot be merged"),
        (lambda t: [t.pop(name) for name in list(t) if "layers.1" in name], r"lacks tensors for model\.layers\.1"),
        (lambda t: t.update({"base_model.model.lm_head.weight": torch.ones(1)}), "lm_head.weight, which cannot be"),
        (lambda t: t[min(t)].fill_(float("nan")), "makes NaN or infinite weights of"),
        (lambda t: t.clear(), "holds no tensor"),
        (lambda t: t.update({min(t): (10 * t[min(t)]).to(torch.uint8)}), r"\(U8\) of the adapter are no floats"),
        (lambda t: t.update({min(t): t[min(t)].to(torch.float8_e4m3fn)}), r"\(F8_E4M3\) of the adapter are no floats"),
    ],
)
def test_an_adapter_is_incomplete(
    folder: Path, tmp_path: Path, change: Callable[[Tensors], object], pattern: str
) -> None:
    model = load_checkpoint(folder).model
    tensors = checkpoints.adapter(tmp_path / "adapter", model)
    change(tensors)
    save_file(tensors, tmp_path / "adapter/adapter_model.safetensors")
    with pytest.raises(ExportError, match=pattern):
        merge_adapter(model, tmp_path / "adapter")


# --- recipes


@pytest.mark.parametrize(
    ("lines", "pattern"),
    [
        ("seed: 1\nseed: 2", "has 'seed' twice, on line 3 and on line 4"),
        ("gate: {max_kl: 0.1, max_kl: 9.0}", "has 'max_kl' twice, on line 3"),
        ("seed: true", "seed: Input should be a valid integer"),
        ("seed: -1", "seed: Input should be greater than or equal to 0"),
        ("gate: {max_kl: true}", "gate.max_kl: Input should be a valid number"),
        ("gate: {max_kl: .nan}", "gate.max_kl: Input should be a finite number"),
        ("gate: {max_kl: .inf}", "gate.max_kl: Input should be a finite number"),
        ('gate: {min_items: "9"}', "gate.min_items: Input should be a valid integer"),
        ('register: {model_name: ""}', "register.model_name: '' is no name"),
        ("register: {model_name: a/b c}", "register.model_name: 'a/b c' is no name"),
        ("register: {model_name: 'a:b'}", "register.model_name: 'a:b' is no name"),
        ("register: {experiment: ''}", "register.experiment: '' is no name"),
        ("build: {target: tensorrt}", "build.target: tensorrt compiles for named hardware"),
        ("evaluate: {tasks: [piqa, piqa]}", "evaluate.tasks: contains duplicates"),
        ("shadow: {datasets: [nq_open, nq_open]}", "shadow.datasets: contains duplicates"),
        ("plan: {schemes: [{match: '*', bits: 8}, {match: 'layers.*.o', bits: 4}]}", "'layers.*.o' is never used"),
    ],
)
def test_a_recipe_says_something_else_than_it_seems(
    tmp_path: Path, lines: str, pattern: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "params.yaml"
    path.write_text(f"model: {{source: 'file:/m'}}\ndata: {{source: 'file:/d'}}\n{lines}\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    assert pattern in caught.value.found
    assert main(["stage", "fetch", "--params", str(path)]) == 2
    assert "fault in tapeout" not in capsys.readouterr().err


def test_a_rule_of_the_plan_never_matches() -> None:
    group = LinearGroup(name="layers.0.qkv", members=("w",), biases=(None,), in_features=64, out_features=(64,))
    graph = PortableGraph.model_construct(layers=1, groups=(group,))
    for matches in (["layers.*.gateup"], ["layers.1.qkv"], ["layers.0.*", "layers.*.qkv"]):
        with pytest.raises(RecipeError, match=r"matches no unit|is never used") as caught:
            resolve(graph, [*(Rule(match=match, scheme=BYTES) for match in matches), Rule(match="*", scheme=BYTES)])
        assert matches[-1] in caught.value.found
    assert (
        resolve(graph, [Rule(match="layers.*.down", scheme=Scheme(bits=4)), Rule(match="*", scheme=BYTES)])[
            "layers.0.qkv"
        ]
        == BYTES
    )
