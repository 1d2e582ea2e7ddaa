"""``tapeout fleet``: commands about many engines and gateways together."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from pipeline.cli.panels import release
from pipeline.cli.shared import Json, show
from tapeout.errors import RequestError

commands = typer.Typer(no_args_is_help=True)
commands.add_typer(release.commands)
File = Annotated[Path, typer.Argument(help="The file of the fleet, with a section `up` (docs/fleet.md).")]


@commands.callback()
def fleet() -> None:
    """Many engines and gateways on one machine or a cluster: Ray starts, restarts and scales them (docs/fleet.md).

    `fleet.yaml` says what there is to start:

    &nbsp;&nbsp;key: engine.key &nbsp;&nbsp;&nbsp;&nbsp; `openssl rand -hex 32 > engine.key`

    &nbsp;&nbsp;up: {bundle: artifacts/candidate, ray: local}

    &nbsp;&nbsp;scaling: {least: 2, most: 4}

    `tapeout fleet up fleet.yaml` then answers at http://127.0.0.1:8000/v1. Ray carries no requests and no tokens. It
    takes `pip install "tapeout[fleet]"`. Without Ray, `tapeout fleet run fleet.yaml` does the same on one machine, or
    run `tapeout engine` and `tapeout gateway` by any other means. `tapeout fleet release` needs no Ray.

    Example: `tapeout fleet up fleet.yaml`
    """


@commands.command()
def up(file: File, as_json: Json = False) -> None:
    """Start a fleet, and return once its engines and gateways are open.

    With `ray: local` it starts a Ray of its own on this machine; with `ray: HOST:PORT` it joins that cluster.

    Example: `tapeout fleet up fleet.yaml`
    """
    from pipeline.cli.fleet import bring_up, show_progress

    show_progress()
    _show(bring_up(file), as_json)


@commands.command()
def run(file: File) -> None:
    """Run a fleet on this machine without Ray, until SIGTERM or Ctrl-C: for a systemd unit, or to try one.

    It starts what dies again, and scales as the engines' reports say; `ray` in the file does not count.

    Example: `tapeout fleet run fleet.yaml`
    """
    from pipeline.cli.fleet import run_here

    run_here(file)


@commands.command()
def status(file: File, as_json: Json = False) -> None:
    """Say which engines and gateways there are, how many engines are wanted, and what is wrong.

    Example: `tapeout fleet status fleet.yaml --json`
    """
    from pipeline.cli.fleet import RayFleet

    _show(RayFleet(file).status(), as_json)


@commands.command()
def scale(
    file: File,
    engines: Annotated[str, typer.Argument(help="A number, which then stays; or auto: as the engines' reports say.")],
    pool: Annotated[
        str | None, typer.Option(help="prefill or decode: whose engines are meant, where the file has `pools`.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Have so many engines. Returns at once; one that goes first ends its requests.

    Example: `tapeout fleet scale fleet.yaml 3`
    """
    from pipeline.cli.fleet import RayFleet

    if engines != "auto" and not (engines.isascii() and engines.isdigit()):
        raise RequestError(f"{engines!r} engines", expected="a number, or auto")
    _show(RayFleet(file).scale(None if engines == "auto" else int(engines), pool), as_json)


@commands.command()
def drain(
    file: File,
    address: Annotated[str, typer.Argument(help="Of the engine, as `tapeout fleet status` shows it.")],
    as_json: Json = False,
) -> None:
    """Renew one engine: it gets no more requests, ends those that it has, and starts anew. Returns at once.

    Example: `tapeout fleet drain fleet.yaml tcp:10.0.0.11:40123`
    """
    from pipeline.cli.fleet import RayFleet

    _show(RayFleet(file).drain(address), as_json)


@commands.command()
def down(file: File, as_json: Json = False) -> None:
    """End a fleet: its requests have their time to end. A Ray of its own ends with it; a cluster goes on.

    It also removes what is left where Ray has died.

    Example: `tapeout fleet down fleet.yaml`
    """
    from pipeline.cli.fleet import RayFleet, show_progress

    show_progress()
    found = RayFleet(file).down()
    show(found, f"{found['name']} is down", as_json)


def _show(status: dict[str, Any], as_json: bool) -> None:
    if as_json:
        show(status, "", as_json)
    else:
        from pipeline.cli.fleet import shown

        show(status, shown(status), as_json)
