"""What commands share: options, and how a result is printed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

if TYPE_CHECKING:
    from rich.console import RenderableType

Artifacts = Annotated[Path, typer.Option(help="Folder the pipeline writes its artifacts to.")]
Threads = Annotated[int, typer.Option(min=0, help="Of the engine; 0 means every physical core.")]
Params = Annotated[Path, typer.Option(help="The recipe (docs/recipes.md explains every parameter).")]
PrivateKey = Annotated[
    Path | None,
    typer.Option(help="Sign with this private key.", envvar="TAPEOUT_PRIVATE_KEY", show_envvar=True),
]
PublicKey = Annotated[
    Path | None,
    typer.Option(help="Refuse what is not signed with its private key.", envvar="TAPEOUT_PUBLIC_KEY", show_envvar=True),
]
JudgeBy = Annotated[
    Path | None,
    typer.Option(
        help="Judge the logged evidence again by this recipe, as promote does; takes scipy.", metavar="PARAMS"
    ),
]
EngineKey = Annotated[
    Path | None,
    typer.Option(
        help="File with the key that server and engine share; TCP takes one: `openssl rand -hex 32`.",
        envvar="TAPEOUT_ENGINE_KEY",
        show_envvar=True,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for a script to read.")]


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """A command for typer: where it takes a dataclass, the command line has an option for each field.

    A field may be a dataclass, too. Options keep the order of parameters and fields.
    """

    @wraps(command)
    def run(**given: Any) -> None:
        _call(command, given)

    run.__dict__["__signature__"] = Signature(list(_options(command)))
    return run


def _options(taker: Callable[..., Any]) -> Iterator[Parameter]:
    for parameter in signature(taker, eval_str=True).parameters.values():
        if is_dataclass(parameter.annotation):
            yield from _options(cast(type, parameter.annotation))
        else:
            yield parameter.replace(kind=Parameter.KEYWORD_ONLY)


def _call(taker: Callable[..., Any], given: Mapping[str, Any]) -> Any:
    """Call a command, or make a dataclass, from options by name."""
    arguments = dict[str, Any]()
    for name, parameter in signature(taker, eval_str=True).parameters.items():
        kind = parameter.annotation
        arguments[name] = _call(cast(type, kind), given) if is_dataclass(kind) else given[name]
    return taker(**arguments)


def not_empty(texts: list[str] | None) -> list[str] | None:
    """Of an option: what a variable of a shell that is not set leaves is not meant, and nobody could send it."""
    for text in texts or ():
        if not text or text != text.strip():
            raise typer.BadParameter(f"{text!r} is empty, or has white space around it")
    return texts


def show(record: Any, shown: RenderableType, as_json: bool) -> None:
    """Print a result: for a script, or for a reader."""
    if as_json:
        print(json.dumps(record, indent=1, default=str, allow_nan=False))
    elif isinstance(shown, str):
        print(shown)
    else:
        from pipeline.cli.tables import console

        console().print(shown)
