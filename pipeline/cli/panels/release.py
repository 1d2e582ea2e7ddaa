"""``tapeout fleet release`` and ``rollback``: commands that change the bundle of all engines of a fleet."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipeline.cli.shared import Json, show

commands = typer.Typer()
File = Annotated[Path, typer.Argument(help="The file of the fleet, as `tapeout gateway` or `tapeout fleet up` has it.")]
GatewayUrls = Annotated[
    list[str], typer.Option("--gateway", help="Address of a gateway over these engines; name all of them.")
]
LeastReady = Annotated[
    int | None, typer.Option(min=0, help="Engines that stay ready at any time; by default all but one.")
]
ApiKey = Annotated[
    str, typer.Option(help="That the gateways take, where they want one.", envvar="TAPEOUT_API_KEY", show_envvar=True)
]
Drain = Annotated[
    float, typer.Option(min=0, help="Seconds that an engine has to end its requests; then they go on elsewhere.")
]


@commands.command()
def release(
    file: File,
    source: Annotated[
        str,
        typer.Argument(help="The bundle as each engine opens it: a folder there, or models:/NAME/VERSION or @ALIAS."),
    ],
    gateway: GatewayUrls,
    share: Annotated[
        float, typer.Option(min=0, max=1, help="Of the conversations, that the first engine gets.")
    ] = 0.05,
    least_ready: LeastReady = None,
    canary_seconds: Annotated[
        float, typer.Option(min=0, help="After so long an undecided canary ends the command with 3.")
    ] = 3600.0,
    drain_seconds: Drain = 30.0,
    min_calls: Annotated[int, typer.Option(min=1, help="Of each bundle, before anything passes.")] = 100,
    max_failed: Annotated[float, typer.Option(help="Share of the candidate's calls that may fail.")] = 0.02,
    max_slow: Annotated[
        float, typer.Option(help="Share of its calls that may be slower than 95 % of the stable bundle's.")
    ] = 0.2,
    shadow_log: Annotated[
        Path | None, typer.Option(help="Folder of a shadow test of both bundles, which must pass as well.")
    ] = None,
    follow_seconds: Annotated[
        float,
        typer.Option(
            min=0, help="Seconds between two looks at the alias; what it moves to is released, too. 0: release once."
        ),
    ] = 0.0,
    api_key: ApiKey = "",
    as_json: Json = False,
) -> None:
    """Give every engine another bundle, one at a time, if a canary shows it to be sound: 0 PASS, 1 FAIL, 3 undecided.

    After a FAIL the canary's engine has its old bundle again. Run it again to go on. No request fails.
    `tapeout promote` alone changes no engine: `--follow-seconds` releases what it makes champion.

    Example: `tapeout fleet release fleet.yaml models:/smollm2/7 --gateway http://localhost:8000`
    """
    from evals.kinds.online.canary import CanaryBounds
    from pipeline.cli import release as command

    bounds = CanaryBounds(max_failed=max_failed, max_slow=max_slow, min_calls=min_calls)
    options = command.ReleaseOptions(
        share=share,
        least_ready=least_ready,
        canary_seconds=canary_seconds,
        drain_seconds=drain_seconds,
        shadow=shadow_log,
        api_key=api_key,
        bounds=bounds,
    )
    if follow_seconds:
        command.follow(file, source, gateway, options, follow_seconds)
    verdict, code = command.run(file, source, gateway, options)
    show(verdict._asdict(), f"{verdict.outcome.value}: {verdict.reason}", as_json)
    raise typer.Exit(code)


@commands.command()
def rollback(
    file: File,
    gateway: GatewayUrls,
    to: Annotated[str, typer.Option(help="The bundle; by default each engine opens what it had before.")] = "",
    least_ready: LeastReady = None,
    drain_seconds: Drain = 10.0,
    api_key: ApiKey = "",
) -> None:
    """Give every engine the stable bundle again, or after a release the one before. New conversations get it at once.

    Example: `tapeout fleet rollback fleet.yaml --gateway http://localhost:8000`
    """
    from pipeline.cli import release as command

    options = command.ReleaseOptions(least_ready=least_ready, drain_seconds=drain_seconds, api_key=api_key)
    command.run_rollback(file, to, gateway, options)
