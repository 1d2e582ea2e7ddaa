"""A tokenizer that is a file of sentencepiece alone becomes a tokenizer.json with the same ids."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sentencepiece import SentencePieceProcessor
from tokenizers import Tokenizer

from pipeline.export.tokenizer import TEXTS, save_tokenizer
from tests.sentencepiece_files import SIZE, write_sentencepiece

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "bpe, as Llama's": ("bpe", {}),
    "unigram, as Llama's": ("unigram", {}),
    "bpe without a space before a text": ("bpe", {"add_dummy_prefix": False}),
}

SPECIAL = ("<unk>", "<s>", "</s>")


@pytest.fixture(scope="module", params=KINDS)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """sentencepiece's own processor, and the tokenizer that is exported."""
    folder = tmp_path_factory.mktemp("checkpoint")
    kind, options = KINDS[request.param]
    write_sentencepiece(folder / "tokenizer.model", kind, **options)
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "add_eos_token": False})
    )
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "written").mkdir()
    save_tokenizer(folder, "", folder / "written", SIZE)
    served: Any = Tokenizer.from_file(str(folder / "written" / "tokenizer.json"))
    return SentencePieceProcessor(model_file=str(folder / "tokenizer.model")), served


def test_a_text_has_sentencepieces_ids_and_the_start_token(both: tuple[Any, Any]) -> None:
    processor, served = both
    assert served.get_vocab_size() == processor.get_piece_size() == SIZE
    for text in TEXTS:
        assert served.encode(text).ids == [processor.bos_id(), *processor.encode(text)]


@settings(deadline=None, max_examples=200)
@given(text=st.text(max_size=40))
def test_any_text_has_sentencepieces_ids_and_comes_back(both: tuple[Any, Any], text: str) -> None:
    processor, served = both
    # sentencepiece reads the name of such a piece as text, tokenizer.json as the token.
    assume(not any(name in text for name in SPECIAL))
    ids = served.encode(text, add_special_tokens=False).ids
    assert ids == processor.encode(text)
    assert served.decode(ids) == processor.decode(ids)
