"""The text of a response: never half a character, never a stop string, the same however its tokens arrive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from functools import cache

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from runtime.gateway.http.completions import CompletionWriter
from runtime.gateway.http.generation import ResponseChoice, ResponseChunk
from runtime.gateway.protocol.bodies import CompletionBody
from runtime.gateway.protocol.calls import Call, Caller
from runtime.gateway.text.model import ResponseText, TextModel
from runtime.wire.messages import FinishReason, GenerateRequest, TokenLogprobs
from tests.http_server import CALLS, END, END_TOKEN, START, byte_tokenizer, ids

TEXTS = st.text(st.sampled_from("aab<|>xé🙂日 \n"), max_size=30)
STOPS = st.lists(st.text(st.sampled_from("aabxé🙂<"), min_size=1, max_size=4), max_size=3)


@cache
def model() -> TextModel:
    return TextModel("digest", byte_tokenizer())


@cache
def fallback_model() -> TextModel:
    """A vocabulary as Llama 2 has it: pieces with a mark for spaces, and bytes."""
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁a", "b", "▁"]
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[], byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return TextModel("digest", tokenizer)


def read(
    text: ResponseText, tokens: Sequence[int], cuts: Sequence[int], reason: FinishReason
) -> tuple[list[str], FinishReason | None, list[int]]:
    """Pieces, reason and offsets when the tokens come in deltas that end at ``cuts``."""
    ends = sorted({cut % len(tokens) for cut in cuts if tokens} - {0})
    pieces: list[str] = []
    offsets: list[int] = []
    for first, last in zip([0, *ends], [*ends, len(tokens)], strict=True):
        piece = text.push(tokens[first:last], reason if last == len(tokens) else None)
        pieces.append(piece.text)
        offsets += piece.offsets
        if piece.finish_reason:
            return pieces, piece.finish_reason, offsets
    raise AssertionError("it never ended")


def first_stop(text: str, stops: Sequence[str]) -> int | None:
    """Where the text ends that precedes the stop string which is complete first."""
    found = [(text.index(stop) + len(stop), text.index(stop)) for stop in stops if stop in text]
    return min(found)[1] if found else None


@given(TEXTS, STOPS, st.lists(st.integers(0, 99), max_size=8), st.booleans())
@example("aab", ["ab"], [2], False)
@example("a🙂", ["🙂"], [3], True)
def test_text_does_not_depend_on_how_tokens_arrive(body: str, stops: list[str], cuts: list[int], include: bool) -> None:
    tokens = ids(body.replace("<|", "<"))
    whole = byte_tokenizer().decode(tokens, skip_special_tokens=False)
    text = ResponseText(model(), stop_strings=stops, include_stop=include)
    pieces, reason, _ = read(text, tokens, cuts, "length")
    end = first_stop(whole, stops)
    if end is None:
        assert "".join(pieces) == whole and reason == "length" and text.stopped_by is None
    else:
        assert isinstance(text.stopped_by, str) and whole[end:].startswith(text.stopped_by)
        assert "".join(pieces) == whole[:end] + (text.stopped_by if include else "") and reason == "stop"
    assert not any("\ufffd" in piece for piece in pieces)


@given(st.lists(st.integers(0, 255), max_size=24), st.lists(st.integers(0, 99), max_size=8))
def test_any_bytes_give_the_text_of_all_of_them(tokens: list[int], cuts: list[int]) -> None:
    """Bytes that are no character read as U+FFFD, wherever the deltas end."""
    pieces, _, offsets = read(ResponseText(model()), tokens, cuts, "length")
    assert "".join(pieces) == byte_tokenizer().decode(tokens, skip_special_tokens=False)
    assert offsets == sorted(offsets) and len(offsets) == len(tokens)


def test_bytes_that_never_become_a_character_are_not_held_forever() -> None:
    """Else each token would cost more than the one before it."""
    text = ResponseText(model())
    pieces = [text.push(ids("é")[:1], None).text for _ in range(1000)]
    assert sum(map(len, pieces)) > 900


@given(TEXTS.filter(bool), st.integers(0, 40))
def test_offsets_are_those_of_complete_characters(body: str, seed: int) -> None:
    tokens = ids(body.replace("<|", "<"))
    _, _, offsets = read(ResponseText(model()), tokens, [seed], "length")
    whole = byte_tokenizer().decode(tokens, skip_special_tokens=False)
    size = 0
    for letter in whole:
        for _ in letter.encode():
            assert offsets[size] == whole.encode()[:size].decode(errors="ignore").__len__()
            size += 1


def test_the_stop_token_has_no_text_unless_asked_for() -> None:
    tokens = [*ids("hi"), END_TOKEN]
    stops = frozenset({END_TOKEN})
    plain = ResponseText(model(), stop_tokens=stops)
    assert plain.push(tokens, "stop").text == "hi" and plain.stopped_by == END_TOKEN
    kept = ResponseText(model(), stop_tokens=stops, include_stop=True, skip_special=False)
    assert kept.push(tokens, "stop").text == "hi" + END
    ordinary = ResponseText(model(), stop_tokens=frozenset(ids("i")))
    assert ordinary.push(ids("hi"), "stop").text == "h"
    passed = ResponseText(model(), stop_tokens=frozenset(ids("i")))
    assert passed.push(ids("hi"), "length").text == "hi", "a stop token that did not end the response is text"


def test_an_echoed_text_has_no_room_for_what_the_tokenizer_puts_before_it() -> None:
    tokenizer = Tokenizer.from_str(byte_tokenizer().to_str())  # other tests share that one
    before = tokenizer.encode(START, add_special_tokens=False).ids
    assert len(before) == 1
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{START} $A", special_tokens=[(START, before[0])])
    prompt, body = tokenizer.encode("ab").ids, CompletionBody(prompt="ab", echo=True, logprobs=0)
    call = Call("", "", "", "", "", Caller(), stream=False, prompts=[prompt], n=1, max_new_tokens=1)
    made = TextModel("digest", tokenizer)
    choice = ResponseChoice(0, 0, GenerateRequest("", prompt, 1), ResponseText(made))
    scores = (None, *(TokenLogprobs(token, -1.0) for token in prompt[1:]))

    async def chunks() -> AsyncGenerator[ResponseChunk]:
        yield ResponseChunk(choice, "c", tuple(ids("c")), (0,), (TokenLogprobs(ids("c")[0], -1.0),), scores, "length")

    found = asyncio.run(CompletionWriter(body, call, made, ["ab"]).response(chunks()))["choices"][0]
    assert found["text"] == "abc" and found["logprobs"]["text_offset"] == [0, 0, 1, 2]


def test_special_tokens_are_hidden_or_shown() -> None:
    tokens = [*ids("a"), *ids(START), *ids("b")]
    assert ResponseText(model()).push(tokens, "length").text == "ab"
    assert ResponseText(model(), skip_special=False).push(tokens, "length").text == f"a{START}b"


def test_stop_strings_wait_for_min_tokens() -> None:
    text = ResponseText(model(), stop_strings=["x"], min_tokens=3)
    piece = text.push(ids("axbxc"), None)
    assert (piece.text, piece.finish_reason, len(piece.offsets)) == ("axb", "stop", 4)


@pytest.mark.parametrize(("token", "content", "text"), [
    (ids("a")[0], b"a", "a"), (ids(" ")[0], b" ", " "), (ids("é")[0], b"\xc3", "bytes:\\xc3"),
    (END_TOKEN, END.encode(), END), (ids(CALLS)[0], CALLS.encode(), CALLS),
])  # fmt: skip
def test_bytes_and_text_of_a_token(token: int, content: bytes, text: str) -> None:
    assert (model().token_bytes(token), model().token_text(token)) == (content, text)


@pytest.mark.parametrize(("name", "content"), [("<0xE6>", b"\xe6"), ("▁a", b" a"), ("b", b"b"), ("<unk>", b"<unk>")])
def test_bytes_of_a_byte_fallback_token(name: str, content: bytes) -> None:
    found = fallback_model()
    assert found.token_bytes(found.tokenizer.token_to_id(name)) == content


@given(TEXTS)
def test_bytes_of_tokens_are_those_of_the_text(body: str) -> None:
    tokens = ids(body)
    assert b"".join(model().token_bytes(token) for token in tokens) == body.encode()
