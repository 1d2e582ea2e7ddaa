"""Commands that explain what was built, planned or measured, and what this machine can do."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from pipeline.cli.capacity_options import ReplicaOptions, TrafficOptions
from pipeline.cli.shared import Artifacts, Json, Params, show, with_options
from tapeout.errors import ArtifactError, ExitCode

commands = typer.Typer()
on_panel = partial(commands.command, rich_help_panel="Explain")


@on_panel()
def report(artifacts: Artifacts = Path("artifacts")) -> None:
    """Print the path of the HTML report: one self-contained file.

    Example: `xdg-open $(tapeout report)`
    """
    page = artifacts / "report" / "report.html"
    if not page.is_file():
        raise ArtifactError(f"no {page}", expected="the report of a finished run", remedy="run `make repro`")
    print(page.resolve())


@on_panel()
def inspect(
    path: Annotated[Path, typer.Argument(help="An artifact's folder, or its record.json.")],
    as_json: Json = False,
) -> None:
    """Explain any artifact: what it is, its parents, its versions, and whether its files are intact.

    Example: `tapeout inspect artifacts/candidate`
    """
    from pipeline.cli.tables import explanation
    from tapeout.lineage import explain

    found = explain(path)
    show(asdict(found), explanation(found), as_json)
    if found.problems:
        raise typer.Exit(ExitCode.BROKEN)


@on_panel()
@with_options
def capacity(
    *,
    traffic: TrafficOptions,
    replica: ReplicaOptions,
    slo: Annotated[Path | None, typer.Option(help="YAML file with a section `slo` (docs/capacity.md).")] = None,
    ttft: Annotated[float | None, typer.Option(min=0.001, help="Most seconds to the first token, P99.")] = None,
    itl: Annotated[float | None, typer.Option(min=0.0001, help="Most seconds between tokens, P99.")] = None,
    most: Annotated[int, typer.Option(min=1, help="Most replicas that are tried.")] = 64,
    as_json: Json = False,
) -> None:
    """How many replicas a traffic needs to meet its objectives, and what a million tokens then cost; by simulation.

    Exits with 1 if not even the most replicas are enough, and with 3 if the traffic is too short to say.

    Example: `tapeout capacity --rate 1 --ttft 1 --itl 0.05 --price-per-hour 0.10`
    """
    from pipeline.cli import capacity as command

    record, table, code = command.run(traffic, replica, command.objectives(slo, ttft, itl), most)
    show(record, table, as_json)
    raise typer.Exit(code)


@on_panel()
def plan(artifacts: Artifacts = Path("artifacts"), params: Params = Path("params.yaml"), as_json: Json = False) -> None:
    """Print the precision plan: unit, scheme, time, bytes, KL, and the reason. `dvc repro plan` makes it.

    Example: `tapeout plan`
    """
    from pipeline.cli import plan as command
    from pipeline.recipe import load_recipe

    show(*command.run(artifacts, load_recipe(params)), as_json)


@on_panel()
def costs(
    tokens: Annotated[
        str, typer.Option(help="Tokens of a step: sequences that decode together, or tokens of a prompt.")
    ] = ("1,4,8,16,32,128,512"),
    artifacts: Artifacts = Path("artifacts"),
    params: Params = Path("params.yaml"),
    as_json: Json = False,
) -> None:
    """Time every scheme that a plan may choose, on this machine and the shapes of this model; results are kept.

    Example: `tapeout costs --tokens 1,32`
    """
    from pipeline.cli import costs as command
    from pipeline.recipe import load_recipe

    show(*command.run(artifacts, load_recipe(params), command.parse_tokens(tokens)), as_json)


@on_panel()
def doctor(params: Params = Path("params.yaml"), as_json: Json = False) -> None:
    """Say what this machine can build and run, what is missing, and how to get it. Exits 2 if something is.

    Where there is no recipe, as on a machine that only serves, it does not look at what building takes.

    Example: `tapeout doctor`
    """
    from pipeline.cli.doctor import diagnose
    from pipeline.cli.tables import diagnosis
    from pipeline.recipe import load_recipe

    here = params.exists() or params != Path("params.yaml")  # one that was named must be there
    found = diagnose(load_recipe(params) if here else None, Path())
    show({"healthy": found.healthy} | asdict(found), diagnosis(found), as_json)
    raise typer.Exit(ExitCode.PASS if found.healthy else ExitCode.BROKEN)
