"""The tokenizer of a checkpoint: kept byte for byte, and compared with the one that transformers makes of it.

A checkpoint that has a file of sentencepiece alone gets a converted one (:mod:`pipeline.export.sentencepiece_file`).

Engines and evaluation encode with ``tokenizer.json`` alone. transformers may build another tokenizer from the same
folder: some of its classes replace the pre-tokenizer or the post-processor of the file. Then nobody can say which of
the two the model was trained with, so a difference is refused with an example.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from pipeline.export.gguf import quickly_read, tokens
from pipeline.export.gguf_mixtures import holds_experts
from pipeline.export.sentencepiece_file import converted
from runtime.gateway.text.chat_template import TEMPLATE, ChatTemplate
from tapeout.errors import ExportError, one_line
from tapeout.tensor_files import few

FILE = "tokenizer.json"
SENTENCEPIECE = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
CONFIG = "tokenizer_config.json"
# Classes that read the file as it is. transformers 5.23 overrules them for some types of models, such as qwen2.
AS_IT_IS = ("PreTrainedTokenizerFast", "TokenizersBackend")
OTHER_FILES = ("vocab.json", "vocab.txt", "merges.txt", *SENTENCEPIECE)
# Where tokenizers differ: scripts, digits, white space, code, punctuation, case, composed characters, emoji.
TEXTS = (
    "The quick brown fox jumps over the lazy dog, doesn't it? I'LL say WE'VE seen it.",
    " a leading space,  two  spaces,   three\ttabs\t\tand\nnew\n\nlines\r\nand trailing   ",
    "1 12 123 1234 12345 123456 3.14159 1,000,000 2024-02-29 0x1F 1e-3 ½ ² ٣٤٥",
    "def f(x: int) -> int:\n    return x**2  # square\n\n\tif (a != b && c <= d) { e[0] += 'x'; }\n",
    "https://example.org/a_b-c?d=e&f=%20#g user@example.com C:\\path\\file.txt /usr/bin/env",
    "Größe Straße naïve café cafe\u0301 ﬁnance Ａｂｃ İstanbul Æsir œuvre señor",
    "Быстрая лиса прыгает. Η γρήγορη αλεπού. השועל המהיר. الثعلب السريع. तेज़ लोमड़ी।",
    "敏捷的棕色狐狸。素早い茶色の狐。빠른 갈색 여우. สุนัขจิ้งจอกสีน้ำตาล",
    "🦊 👍🏽 👨‍👩‍👧‍👦 🇺🇳 ❤️ ∑∫√≠≤ → … — “quoted” ‘single’ «guillemets»",
    "\u200b zero width \u00a0 no-break \u3000 wide \ufeff mark \u0000 null \x1b escape \ufffd",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa !!!!!!!! ........ -------- ________",
    "",
    " ",
    "x",
    "word " * 3000,
)


def save_tokenizer(checkpoint: Path, entry: str, folder: Path, rows: int) -> Any:
    """Write the tokenizer's files into ``folder``; the tokenizer as transformers has it.

    ``rows``: of the embedding. :class:`ExportError` for a tokenizer that is missing, ambiguous or too large.
    """
    tokenizer = load_tokenizer(checkpoint, entry)
    tokenizer.save_pretrained(folder)
    kept = checkpoint / FILE
    if not entry and kept.is_file():
        shutil.copyfile(kept, folder / FILE)
    if not (folder / FILE).is_file():
        raise ExportError(
            f"{type(tokenizer).__name__} cannot be written as {FILE}",
            expected=f"a tokenizer that the tokenizers library runs: {FILE}",
            remedy=f"convert it to {FILE}, and put that beside the weights",
        )
    served: Any = _read(folder / FILE)
    _require_whole(served)
    _require_ids(served, folder / FILE, {} if entry else _read_config(checkpoint / CONFIG))
    _require_rows(served, rows, str(tokenizer.chat_template or ""))
    _require_same(served, tokenizer)
    _require_ends(served, tokenizer, {} if entry else _read_config(checkpoint / CONFIG))
    _require_template(folder, tokenizer)
    if entry:
        _require_tokens(served, tokens(checkpoint / entry), entry)
    return tokenizer


def load_tokenizer(checkpoint: Path, entry: str = "") -> Any:
    """The tokenizer in transformers, of the file as it is.

    AutoTokenizer puts another one in its place for some types of models (``AS_IT_IS``).
    """
    from transformers.models.auto.tokenization_auto import AutoTokenizer
    from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast

    files = [name for name in (FILE, *OTHER_FILES) if (checkpoint / name).is_file()]
    if not entry and not files:
        raise ExportError(
            f"no tokenizer in {checkpoint}",
            expected=f"{FILE}, or one of {', '.join(OTHER_FILES)}",
            remedy="copy the tokenizer's files from the model that this checkpoint was made from",
        )
    if not entry and all(name in SENTENCEPIECE for name in files):
        return converted(checkpoint, files[0], TEXTS)
    # AutoTokenizer builds a model's configuration of a GGUF file first, which it cannot for every mixture.
    kind: Any = PreTrainedTokenizerFast if entry and holds_experts(checkpoint / entry) else AutoTokenizer
    if FILE in files and not entry:
        _read(checkpoint / FILE)
        declared = _read_config(checkpoint / CONFIG).get("tokenizer_class")
        kind = PreTrainedTokenizerFast if declared in AS_IT_IS else AutoTokenizer
    options = {"gguf_file": entry} if entry else {}
    try:
        with quickly_read() if entry else nullcontext():
            return kind.from_pretrained(checkpoint, **options)
    except Exception as error:  # a library's own words about files that it cannot read
        raise ExportError(
            f"transformers cannot read the tokenizer of {checkpoint / entry} ({few(files) or 'in the file'}): "
            f"{one_line(error)}",
            expected=f"a tokenizer that transformers reads without remote code, best as {FILE}",
            remedy=f"complete the checkpoint with its {FILE}",
        ) from error


def _read_config(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError) as error:
        raise ExportError(
            f"{path.name} of the checkpoint is not a JSON mapping: {error}", remedy="complete the checkpoint"
        ) from error


def _read(path: Path) -> Any:
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ExportError(
            f"{path.name} of the checkpoint cannot be read: {error}",
            expected="a file of the tokenizers library",
            remedy="fetch the checkpoint again, or save its tokenizer with a current transformers",
        ) from error


def _require_whole(served: Any) -> None:
    """Some files cut or pad every text, which transformers ignores."""
    if served.truncation is not None or served.padding is not None:
        raise ExportError(
            f"{FILE} cuts or pads every text: truncation {served.truncation}, padding {served.padding}",
            expected="texts as they are",
            remedy=f'set "truncation": null and "padding": null in {FILE}',
        )


def _require_ids(served: Any, file: Path, config: Mapping[str, Any]) -> None:
    """Every token has the id that the files say. The tokenizers library numbers added tokens by itself where it can.

    Whatever they were trained with, the embedding's rows would be those of others.
    """
    content = json.loads(file.read_text(encoding="utf-8"))
    vocabulary = content["model"].get("vocab")
    if isinstance(vocabulary, dict) and len(set(vocabulary.values())) < len(vocabulary):
        number, count = Counter(vocabulary.values()).most_common(1)[0]
        shared = [token for token, held in vocabulary.items() if held == number]
        raise ExportError(
            f"{FILE} gives id {number} to {count} tokens: {few(map(repr, shared))}",
            expected="an id for each token",
            remedy="fetch the checkpoint again, or take the tokenizer of the model that it was made from",
        )
    stated = [(FILE, token["content"], token["id"]) for token in content.get("added_tokens") or ()]
    decoder = config.get("added_tokens_decoder") or {}
    stated += [(CONFIG, token["content"], int(number)) for number, token in decoder.items()]
    for name, token, number in stated:
        if (found := served.token_to_id(token)) != number:
            raise ExportError(
                f"{name} says that token {token!r} is id {number}; the tokenizers library makes it {_id(found)}",
                expected="added tokens whose ids follow those of the vocabulary, without gaps, each once",
                remedy="add tokens for the ids that are left out, or take the tokenizer of the model that this "
                "checkpoint was made from",
            )


def _require_rows(served: Any, rows: int, template: str) -> None:
    """Every token of the vocabulary has a row of the embedding, and so has every added token that a chat uses.

    Text models keep added tokens of their siblings, such as gemma3's for images. They occur in no text; an engine
    refuses a prompt that holds one.
    """
    plain = served.get_vocab(False)
    beyond = {
        token: number
        for token, number in served.get_vocab(True).items()
        if number >= rows and (token in plain or token in template)
    }
    if beyond:
        first = sorted(beyond.items(), key=lambda item: item[1])
        raise ExportError(
            f"the tokenizer has ids that the embedding has no row for: {few(f'{t!r} is {n}' for t, n in first)}",
            expected=f"ids below {rows}",
            remedy="resize the embedding as the tokenizer's author did, or take the tokenizer of this checkpoint",
        )


def _require_same(served: Any, reference: Any) -> None:
    """The same vocabulary, the same ids for every text with and without special tokens, and the same text again."""
    ours, theirs = served.get_vocab(True), reference.get_vocab()
    if ours != theirs:
        token = min(t for t in ours.keys() | theirs.keys() if ours.get(t) != theirs.get(t))
        raise _differ(f"token {token!r} is {_id(ours.get(token))}", _id(theirs.get(token)))
    for text in _texts(reference):
        for special in (False, True):
            ids: list[int] = served.encode(text, add_special_tokens=special).ids
            expected: list[int] = reference(text, add_special_tokens=special).input_ids
            if ids != expected:
                raise _differ(*_first_difference(text, ids, expected))
        decoded = served.decode(ids, skip_special_tokens=False)
        if decoded != reference.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False):
            raise _differ(f"the ids of {text[:40]!r} decode to {decoded[:60]!r}", "another text")


def _require_ends(served: Any, reference: Any, config: Mapping[str, Any]) -> None:
    """``add_bos_token`` and ``add_eos_token`` of tokenizer_config.json, which other programs obey, say the same."""
    ids: list[int] = served.encode("text").ids
    for name, token, at in (("bos", reference.bos_token_id, 0), ("eos", reference.eos_token_id, -1)):
        configured, done = config.get(f"add_{name}_token"), bool(ids) and token is not None and ids[at] == token
        if isinstance(configured, bool) and configured != done:
            raise ExportError(
                f"{CONFIG} says add_{name}_token {str(configured).lower()}, and {FILE} "
                + ("adds it" if done else "does not add it"),
                expected="one answer: whether a text gets that token decides what the model computes",
                remedy=f"set add_{name}_token: {str(done).lower()} if {FILE} is as the model was trained, else correct "
                "its post_processor",
            )


def _require_template(folder: Path, reference: Any) -> None:
    """The chat template gives the text that transformers makes with it, or refuses the same messages."""
    if not (folder / TEMPLATE).is_file():
        return
    template = ChatTemplate.load(folder)
    user, answer = {"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": " 4 <b>\n"}
    system = {"role": "system", "content": "Be brief."}
    for messages in ([user], [system, user], [user, answer, user]):
        try:
            expected = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception:  # a template is a program, and raises what it likes
            continue
        text = template.render(messages)
        if text != expected:
            raise ExportError(
                f"the chat template gives {text[:200]!r}; by transformers it gives {expected[:200]!r}",
                expected="the text that the model was trained with",
                remedy="report the template: the two programs must agree on it",
            )


def _texts(reference: Any) -> Iterator[str]:
    yield from TEXTS
    for token in dict.fromkeys([*reference.all_special_tokens, *reference.get_added_vocab()][:256]):
        yield f"before {token} after{token}{token}end"


def _first_difference(text: str, ids: Sequence[int], expected: Sequence[int]) -> tuple[str, str]:
    at = next((i for i, (a, b) in enumerate(zip(ids, expected, strict=False)) if a != b), min(len(ids), len(expected)))
    start = max(0, at - 2)
    return f"{text[:60]!r} is {len(ids)} ids, from the {start}th {list(ids[start : at + 6])}", (
        f"{len(expected)} ids, {list(expected[start : at + 6])}"
    )


def _differ(found: str, expected: str) -> ExportError:
    return ExportError(
        f"{FILE} and the tokenizer that transformers makes of this checkpoint differ: by the file, {found}; by "
        f"transformers, {expected}",
        expected="one tokenizer: an engine encodes with the file, the reference with transformers",
        remedy='if the file is right, set "tokenizer_class": "PreTrainedTokenizerFast" in tokenizer_config.json, and '
        "add_bos_token and add_eos_token as the file has them; if transformers is right, save its tokenizer over the "
        "file with save_pretrained",
    )


def _id(number: int | None) -> str:
    return "no token" if number is None else f"id {number}"


def _require_tokens(served: Any, listed: Sequence[str], entry: str) -> None:
    """A GGUF file lists its tokens by id."""
    different = [number for number, token in enumerate(listed) if served.id_to_token(number) != token]
    if different:
        number = different[0]
        raise ExportError(
            f"{entry} says that token {number} is {listed[number]!r}; converted, it is {served.id_to_token(number)!r}",
            expected=f"its {len(listed)} tokens, each with its id ({len(different)} differ)",
            remedy="take the safetensors checkpoint that the file was made from",
        )
