"""``tapeout fleet``: commands about many engines and gateways together."""

from __future__ import annotations

import typer

from pipeline.cli.panels import release

commands = typer.Typer(no_args_is_help=True)
commands.add_typer(release.commands)


@commands.callback()
def fleet() -> None:
    """Many engines and gateways on one machine or several (docs/fleet.md).

    Example: `tapeout fleet release fleet.yaml models:/smollm2/7 --gateway http://localhost:8000`
    """
