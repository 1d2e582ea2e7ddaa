"""The text side of a bundle: text to tokens, tokens to text, and the text of one response as it grows."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from runtime.constraints.check import ConstraintChecker
from runtime.gateway.protocol.errors import invalid
from runtime.gateway.text.chat_template import TEMPLATE, ChatTemplate
from runtime.gateway.text.chat_template import special_tokens as special_texts
from runtime.gateway.text.detokenize import Detokenizer, TokenTexts, decoder_state
from runtime.gateway.text.sampling_defaults import read_defaults
from runtime.gateway.text.stops import StopMatcher
from runtime.gateway.text.tools import ToolFormat, format_of
from runtime.wire.messages import Constraint, EngineInfo, FinishReason

THREAD_CHARS = 4096  # a longer text is tokenized in a thread: it takes milliseconds


class TextModel:
    """``defaults``: sampling settings of requests that do not name them. ``digest``: of the bundle.

    ``special_texts``: of tokens by name, such as ``eos_token``. ``tool_format``: how the model writes calls of tools.
    """

    def __init__(
        self,
        digest: str,
        tokenizer: Tokenizer,
        template: ChatTemplate | None = None,
        *,
        defaults: Mapping[str, float] | None = None,
        special_texts: Mapping[str, str] | None = None,
        tool_format: ToolFormat | None = None,
    ) -> None:
        self.digest, self.tokenizer, self.template = digest, tokenizer, template
        self.defaults, self.special_texts = dict(defaults or {}), dict(special_texts or {})
        self.tool_format: ToolFormat | None = tool_format or (format_of(template.source) if template else None)
        self.constraints: ConstraintChecker | None = None
        self._checking = asyncio.Lock()
        self.texts = TokenTexts(tokenizer)
        self._longest_token = max(map(len, tokenizer.get_vocab()))
        self._in_special = _in_special(tokenizer)
        added = [re.escape(token.content) for token in tokenizer.get_added_tokens_decoder().values()]
        self._added = re.compile("|".join(added) or "(?!)")
        self.token_bytes = lru_cache(1 << 16)(_token_bytes(tokenizer))

    @classmethod
    def load(cls, folder: Path, info: EngineInfo) -> TextModel:
        """From a bundle's text files. Sampling defaults are those of ``generation_config.json``, if it has any."""
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        template = ChatTemplate.load(folder) if (folder / TEMPLATE).is_file() else None
        defaults, texts = read_defaults(folder), special_texts(folder)
        model = cls(info.digest, tokenizer, template, defaults=defaults, special_texts=texts)
        model.constraints = ConstraintChecker(folder / "tokenizer.json", info.vocab_size, info.stop_tokens)
        return model

    async def require_constraint(self, constraint: Constraint) -> None:
        """:class:`RequestError` for a constraint that cannot be compiled."""
        if self.constraints is not None:
            async with self._checking:  # they take turns anyway, and must not take all threads meanwhile
                await asyncio.to_thread(self.constraints.check, constraint)

    def mark_special(self, value: Any, mark: str) -> Any:
        """Plain JSON with a ``mark`` in each special token that one of its texts spells, after the first character."""
        if isinstance(value, str):
            return self._in_special.sub(mark, value)
        if isinstance(value, Mapping):
            items: Any = value.items()  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
            return {self.mark_special(name, mark): self.mark_special(item, mark) for name, item in items}
        if isinstance(value, list | tuple):
            entries: Any = value
            return [self.mark_special(entry, mark) for entry in entries]
        return value

    def close(self) -> None:
        if self.constraints is not None:
            self.constraints.close()

    async def encode(
        self, texts: Sequence[str], *, add_special_tokens: bool, most_tokens: int | None = None, cut: str | None = None
    ) -> list[list[int]]:
        """Token ids of each text. Long texts do not hold up the other requests.

        ``cut``: a mark where a text is cut before it is tokenized, so that no token spans it; the text goes on there.

        :class:`ApiError` at once for a text that must have more than ``most_tokens``: no token has more characters than
        the longest of the vocabulary.
        """
        longest = max(map(len, texts), default=0)
        if most_tokens is not None and longest > most_tokens * self._longest_token:
            raise invalid(
                f"the prompt has {longest} characters, so more than {most_tokens} tokens",
                "prompt",
                "context_length_exceeded",
            )

        def encode() -> list[list[int]]:
            found: list[list[int]] = []
            for text in texts:
                whole, *rest = text.split(cut) if cut else [text]
                tokens = self.tokenizer.encode(whole, add_special_tokens=add_special_tokens).ids
                for part in rest:
                    tokens += self._continued(part)
                found.append(tokens)
            return found

        slow = sum(map(len, texts)) > THREAD_CHARS or (cut is not None and any(cut in text for text in texts))
        try:
            return await asyncio.to_thread(encode) if slow else encode()
        except UnicodeEncodeError as error:
            raise invalid(f"the text is not valid Unicode: {error.reason}", "prompt") from error

    def _continued(self, part: str) -> list[int]:
        """Token ids of a text that goes on: without the space that some tokenizers put before a text.

        Behind a special token they put one again, as they do wherever a model reads one.
        """
        if self._inside is self.tokenizer:
            return self.tokenizer.encode(part, add_special_tokens=False).ids
        special = self._added.search(part)
        end = special.start() if special else len(part)
        tokens = self._inside.encode(part[:end], add_special_tokens=False).ids
        return tokens + self.tokenizer.encode(part[end:], add_special_tokens=False).ids

    @cached_property
    def _inside(self) -> Tokenizer:
        """The tokenizer itself, unless it puts a space before a text: then one that does not."""
        parts = (self.tokenizer.normalizer, self.tokenizer.pre_tokenizer)
        states: list[Any] = [json.loads(part.__getstate__()) if part else None for part in parts]
        changed = [_without_prefix(state) for state in states]
        if changed == states:
            return self.tokenizer
        names = ("normalizer", "pre_tokenizer")
        whole = json.loads(self.tokenizer.to_str()) | dict(zip(names, changed, strict=True))
        return Tokenizer.from_str(json.dumps(whole))

    def decode(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(list(tokens), skip_special_tokens=False)

    def token_text(self, token: int) -> str:
        """The text of a token on its own; bytes that are no character are written as OpenAI does.

        For example ``bytes:\\xf0\\x9f``.
        """
        content = self.token_bytes(token)
        try:
            return content.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


class TextPiece(NamedTuple):
    """What new tokens brought: text that is certain, and where each token of the response begins in its whole text.

    There can be fewer ``offsets`` than tokens: what follows a stop string is no part of the response.
    ``finish_reason``: the engine's, or "stop" where a stop string was found.
    """

    text: str
    offsets: tuple[int, ...]
    finish_reason: FinishReason | None


class ResponseText:
    """The text of one response: never half a character, and never a stop string.

    ``min_tokens``: stop strings count once there are more tokens. ``stop_tokens`` have no text where they end the
    response. ``include_stop`` keeps the stop string or token that ended it. ``stopped_by``: which one did.
    """

    def __init__(
        self,
        model: TextModel,
        *,
        stop_strings: Sequence[str] = (),
        stop_tokens: frozenset[int] = frozenset(),
        min_tokens: int = 0,
        include_stop: bool = False,
        skip_special: bool = True,
    ) -> None:
        self._detokenizer = Detokenizer(model.texts, skip_special=skip_special)
        self._matcher, self._matches = StopMatcher(stop_strings), bool(stop_strings)
        self._stop_tokens, self._min_tokens, self._include_stop = stop_tokens, min_tokens, include_stop
        self.count = 0  # tokens so far
        self._characters = 0  # that are complete, held back or not
        self.stopped_by: str | int | None = None

    def push(self, tokens: Sequence[int], reason: FinishReason | None) -> TextPiece:
        """New tokens of the response; with a ``reason`` they are the last. After that, or a match, nothing follows."""
        text, offsets = "", list[int]()
        for place, token in enumerate(tokens, start=1):
            self.count += 1
            offsets.append(self._characters)
            if reason == "stop" and place == len(tokens) and token in self._stop_tokens:
                self.stopped_by = token
                if not self._include_stop:
                    break
            text += self._match(self._detokenizer.push(token))
            if self._matcher.matched:
                return TextPiece(text, tuple(offsets), "stop")
        if reason is not None:
            text += self._match(self._detokenizer.finish())
            text += self._matcher.finish()
        return TextPiece(text, tuple(offsets), "stop" if self._matcher.matched else reason)

    def _match(self, text: str) -> str:
        self._characters += len(text)
        if not self._matches or self.count <= self._min_tokens:
            return text
        text = self._matcher.push(text)
        if self._matcher.matched:
            self.stopped_by = self._matcher.stop
            return text + self._matcher.stop if self._include_stop else text
        return text


def _in_special(tokenizer: Tokenizer) -> re.Pattern[str]:
    """Matches, without a character, after the first one of each special token that a text spells."""
    rests: dict[str, list[str]] = {}  # by first character, which few places of a text have
    for token in tokenizer.get_added_tokens_decoder().values():
        if token.special and len(token.content) > 1:
            rests.setdefault(re.escape(token.content[0]), []).append(re.escape(token.content[1:]))
    return re.compile("|".join(f"(?<={first})(?={'|'.join(found)})" for first, found in rests.items()) or "(?!)")


def _without_prefix(part: Any) -> Any:
    """The state of a normalizer or a pre-tokenizer that puts no space before a text."""
    if isinstance(part, list):
        entries: list[Any] = part
        return [_without_prefix(entry) for entry in entries if entry["type"] != "Prepend"]
    if not isinstance(part, dict):
        return part
    state: dict[str, Any] = part
    match state.get("type"):
        case "Prepend":
            return None
        case "Metaspace":
            return state | {"prepend_scheme": "never"}
        case "ByteLevel":
            return state | {"add_prefix_space": False}
        case "Sequence":
            return {name: _without_prefix(value) for name, value in state.items()}
        case _:
            return state


def _token_bytes(tokenizer: Tokenizer) -> Callable[[int], bytes]:
    """How a token reads on its own, in bytes: the text of a token can be a part of a character."""
    added = {token: entry.content for token, entry in tokenizer.get_added_tokens_decoder().items()}
    state = decoder_state(tokenizer)
    kinds = {state.get("type"), *(entry.get("type") for entry in state.get("decoders", ()))}
    letters = _byte_letters()

    def read(token: int) -> bytes:
        if token in added:
            return added[token].encode()
        name = tokenizer.id_to_token(token)
        if name is None:
            return b""
        if "ByteLevel" in kinds and all(letter in letters for letter in name):
            return bytes(letters[letter] for letter in name)
        if "ByteFallback" in kinds:
            if len(name) == 6 and name.startswith("<0x"):
                return bytes([int(name[3:5], 16)])
            return name.replace("▁", " ").encode()
        return tokenizer.decode([token], skip_special_tokens=False).encode()

    return read


def _byte_letters() -> dict[str, int]:
    """The letter of each byte in a byte-level vocabulary: printable ones stand for themselves (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}
