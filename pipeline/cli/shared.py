"""What commands share: options, and how a result is printed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import RenderableType

Artifacts = Annotated[Path, typer.Option(help="Folder the pipeline writes its artifacts to.")]
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


def show(record: Any, shown: RenderableType, as_json: bool) -> None:
    """Print a result: for a script, or for a reader."""
    if as_json:
        print(json.dumps(record, indent=1, default=str, allow_nan=False))
    elif isinstance(shown, str):
        print(shown)
    else:
        from pipeline.cli.tables import console

        console().print(shown)
