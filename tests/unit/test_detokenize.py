"""Streaming text equals decoding everything at once, and no piece ends inside a character."""

from __future__ import annotations

import gc
import weakref
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from runtime.gateway.text.detokenize import REPLACEMENT, Detokenizer, TokenTexts


@cache
def byte_level() -> Tokenizer:
    """As in GPT-2, Llama 3, Qwen and SmolLM: any byte sequence is a token sequence."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["The cat sat. naïve café 日本語 🙂🙃 the the cat"] * 4, trainer)
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    return tokenizer


@cache
def byte_fallback() -> Tokenizer:
    """As in Llama 2, Mistral and Gemma: a word marker, and byte tokens for characters outside the vocabulary."""
    vocabulary = {"<unk>": 0, "</s>": 1}
    for byte in range(256):
        vocabulary[f"<0x{byte:02X}>"] = len(vocabulary)
    for piece in ["▁", "H", "e", "l", "o", "w", "r", "d", "é", ".", "el", "lo", "▁w", "or"]:
        vocabulary[piece] = len(vocabulary)
    merges = [("e", "l"), ("l", "o"), ("▁", "w"), ("o", "r")]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return tokenizer


def pieces(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(TokenTexts(tokenizer))
    return [*(detokenizer.push(token) for token in ids), detokenizer.finish()]


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
@given(text=st.text(max_size=60))
def test_pieces_join_to_the_full_decode_of_any_text(make: object, text: str) -> None:
    tokenizer: Tokenizer = make()  # type: ignore[operator]
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


@given(ids=st.lists(st.integers(0, 399), max_size=60))
def test_pieces_join_to_the_full_decode_of_any_bytes(ids: list[int]) -> None:
    tokenizer = byte_level()
    ids = [token for token in ids if token < tokenizer.get_vocab_size()]
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


@given(text=st.text(alphabet="aé日🙂 ", min_size=1, max_size=20))
def test_no_piece_holds_half_a_character(text: str) -> None:
    for tokenizer in (byte_level(), byte_fallback()):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert not any(REPLACEMENT in piece for piece in pieces(tokenizer, ids))


def test_a_character_of_several_tokens_comes_out_whole() -> None:
    tokenizer = byte_fallback()
    ids = tokenizer.encode("🙂", add_special_tokens=False).ids[1:]  # without the word marker
    assert len(ids) == 4
    assert pieces(tokenizer, ids) == ["", "", "", "🙂", ""]


def test_unfinished_bytes_come_out_at_the_end_as_replacement_characters() -> None:
    tokenizer = byte_level()
    ids = [token for token in range(256) if tokenizer.decode([token]) == REPLACEMENT][-1:]
    assert pieces(tokenizer, ids) == ["", REPLACEMENT]


def test_byte_level_vocabularies_are_told_by_their_decoder() -> None:
    assert TokenTexts(byte_level()).byte_level
    assert not TokenTexts(byte_fallback()).byte_level
    assert not TokenTexts(Tokenizer(models.BPE())).byte_level
    several = Tokenizer.from_str(byte_level().to_str())
    several.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    assert not TokenTexts(several).byte_level, "what else it does may depend on the tokens before"


def test_texts_are_freed_without_the_collector() -> None:
    """A server of a champion opens new bundles, and what it had at its start is frozen."""
    texts = TokenTexts(byte_level())
    assert texts.text([70])
    seen = weakref.ref(texts)
    gc.disable()
    try:
        del texts
        assert seen() is None
    finally:
        gc.enable()


def test_a_skipped_special_token_does_not_eat_the_next_space() -> None:
    tokenizer = byte_fallback()
    first, second = (tokenizer.encode(word, add_special_tokens=False).ids for word in ("Hello", "world"))
    ids = [*first, 1, *second]
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids) == "Hello world"


def test_bytes_that_are_not_utf8_do_not_end_a_response() -> None:
    """After a byte token that was already given out, they change how it decodes: DecodeStream of tokenizers fails."""
    tokenizer = byte_fallback()
    ids = [tokenizer.token_to_id(token) for token in ("<0x09>", "<0xE4>", "<0x19>", "▁w", "or", "d")]
    assert pieces(tokenizer, ids)[-3:] == ["or", "d", ""]
    stream = decoders.DecodeStream(skip_special_tokens=True)
    with pytest.raises(Exception, match="Invalid prefix"):
        _ = [stream.step(tokenizer, token) for token in ids]
