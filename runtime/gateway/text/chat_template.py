"""Messages to prompt text through the bundle's own chat template.

The environment is the one transformers renders with (``utils/chat_template_utils.py``): sandboxed, since a template
is code from an untrusted author; a test compares the two.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tapeout.errors import ArtifactError, RequestError

TEMPLATE = "chat_template.jinja"
TOKENIZER_CONFIG = "tokenizer_config.json"


class ChatTemplate:
    """A compiled chat template and the special tokens it may name."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """:class:`RequestError` if the template is not valid Jinja."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        helpers: dict[str, Any] = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        environment.globals.update(helpers)
        self.source, self.special_tokens = source, dict(special_tokens)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise RequestError(
                f"{TEMPLATE} line {error.lineno}: {error.message}", expected="a Jinja template"
            ) from error

    @classmethod
    def load(cls, folder: Path) -> ChatTemplate:
        """From a bundle's ``chat_template.jinja`` and ``tokenizer_config.json``."""
        path = folder / TEMPLATE
        if not path.is_file():
            raise RequestError(
                f"no {TEMPLATE} in {folder}: this model has no chat format",
                expected="a bundle of a chat model",
                remedy="pass --raw to continue the prompt as plain text",
            )
        return cls(path.read_text(encoding="utf-8"), special_tokens(folder))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text. It already holds every special token: encode it with ``add_special_tokens=False``.

        Messages, tools and variables must be plain JSON values. :class:`RequestError` carries what the template itself
        objects to (``raise_exception``), such as roles that do not alternate.
        """
        if not messages:
            raise RequestError("the conversation is empty", expected="at least one message")
        try:
            return self._template.render(
                self.special_tokens
                | _plain(variables or {})
                | {
                    "messages": _plain(messages),
                    "tools": None if tools is None else _plain(tools),
                    "documents": None,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            # A template is a program: any error in it is about these messages and this template.
            raise RequestError(f"the chat template refused the messages: {error}") from error


def special_tokens(folder: Path) -> dict[str, str]:
    """``bos_token``, ``eos_token`` and their like from ``tokenizer_config.json``."""
    path = folder / TOKENIZER_CONFIG
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ArtifactError(f"no {TOKENIZER_CONFIG} in {folder}", expected="a finished bundle") from error
    except ValueError as error:
        raise ArtifactError(f"{path} is not JSON: {error}") from error
    tokens: dict[str, str] = {}
    for name, value in config.items():
        if not name.endswith("_token"):
            continue
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            tokens[name] = text
    return tokens


class _GenerationBlock(Extension):
    """``{% generation %}`` marks the assistant's text for training; serving ignores it."""

    tags = {"generation"}  # noqa: RUF012  the base class declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _plain(value: Any) -> Any:
    """A deep copy of JSON types only, so that a template never gets an object with methods that have side effects."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_plain(item) for item in value]
    raise RequestError(f"a message holds {type(value).__name__}", expected="text, numbers, lists and mappings")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which would change the prompt.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
