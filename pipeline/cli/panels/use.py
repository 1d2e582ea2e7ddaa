"""Commands that run an engine, or bring it to the machine that runs it."""

from __future__ import annotations

import sys
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Annotated, Literal

import typer

from pipeline.cli.panels import fleet
from pipeline.cli.serve_options import ApprovalOptions, EngineOptions, HttpOptions, ServeOptions
from pipeline.cli.shared import EngineKey, Json, JudgeBy, PublicKey, show, with_options

commands = typer.Typer()
on_panel = partial(commands.command, rich_help_panel="Use an engine")
commands.add_typer(fleet.commands, name="fleet", rich_help_panel="Use an engine")
# Of `tapeout serve`: what is said to the engine's own command where the engine runs elsewhere.
OF_THE_ENGINE = (
    *(
        "source",
        *signature(EngineOptions).parameters,
        "follow_seconds",
        *signature(ApprovalOptions).parameters,
        "shadow",
    ),
)


@on_panel()
def generate(
    prompt: Annotated[str, typer.Argument(help="What to answer; - reads it from standard input.")],
    bundle: Annotated[Path, typer.Option(help="The engine bundle to open.")] = Path("artifacts/candidate"),
    max_new_tokens: Annotated[int, typer.Option(help="Stop after this many tokens.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token; higher varies more.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Draw from the K likeliest tokens; 0 draws from all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Draw from the fewest tokens that hold this share.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Drop tokens below this share of the likeliest one's.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1 makes tokens that were used less likely.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="The same seed draws the same text; without, it varies.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be given more than once.")] = None,
    system: Annotated[str | None, typer.Option(help="A system message before the prompt.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt as plain text, without chat format.")] = False,
) -> None:
    """Stream text from a built engine: the very bundle that was judged.

    Example: `tapeout generate "Why is the sky blue?" --max-new-tokens 80`
    """
    from pipeline.cli.generate import run
    from runtime.wire.messages import SamplingSettings

    run(
        bundle,
        sys.stdin.read() if prompt == "-" else prompt,
        system=system,
        raw=raw,
        max_new_tokens=max_new_tokens,
        stop=tuple(stop or ()),
        sampling=SamplingSettings(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            seed=seed,
        ),
    )


@on_panel()
@with_options
def serve(context: typer.Context, options: ServeOptions) -> None:
    """Serve an engine over the OpenAI API (docs/serving.md). A bundle without a PASS for this hardware is refused.

    Example: `tapeout serve artifacts/candidate --port 8000`
    """
    from pipeline.cli import serve as command

    if options.engine is not None:
        command.require_elsewhere([name for name in OF_THE_ENGINE if _is_given(context, name)])
    command.run(options)


@on_panel()
@with_options
def engine(
    *,
    source: Annotated[
        str,
        typer.Argument(help="A bundle's folder, models:/NAME@ALIAS or models:/NAME/VERSION, which is not followed."),
    ],
    listen: Annotated[str, typer.Option(help="Where servers connect: tcp:HOST:PORT or unix:PATH.", metavar="ADDRESS")],
    key_file: EngineKey = None,
    register: Annotated[
        str | None,
        typer.Option(help="SQLAlchemy URL of the database with the table of engines, which gateways read."),
    ] = None,
    advertise: Annotated[
        str | None,
        typer.Option(help="With --register: where gateways reach it, if not where it listens.", metavar="ADDRESS"),
    ] = None,
    pool: Annotated[
        Literal["mixed", "prefill", "decode"],
        typer.Option(
            help="What gateways of several engines give it: all of a request, prompts up to the first token, or what "
            "follows."
        ),
    ] = "mixed",
    opening: EngineOptions,
    approval: ApprovalOptions,
) -> None:
    """Run an engine by itself, for `tapeout serve --engine ADDRESS` (docs/serving.md). It needs a PASS as there.

    Example: `tapeout engine artifacts/candidate --listen tcp:0.0.0.0:7000 --key-file engine.key`
    """
    from pipeline.cli import engine as command

    command.run(source, listen, key_file, opening, approval, register, advertise, pool)


@on_panel()
@with_options
def gateway(
    *,
    engines: Annotated[
        Path, typer.Argument(help="YAML file with the engines, or where they are found, and their key; docs/fleet.md.")
    ],
    wait_seconds: Annotated[
        float, typer.Option(min=0, help="A request that no engine takes for so long is ended with 503.")
    ] = 30.0,
    http: HttpOptions,
) -> None:
    """Answer over the OpenAI API with many engines of one bundle, that may die and come back (docs/fleet.md).

    Example: `tapeout gateway fleet.yaml --port 8000`
    """
    from pipeline.cli import gateway as command

    command.run(engines, wait_seconds, http)


def _is_given(context: typer.Context, name: str) -> bool:
    """On the command line itself."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


@on_panel()
def pull(
    model: Annotated[str, typer.Argument(help="models:/NAME@champion, another alias, or models:/NAME/VERSION.")],
    to: Annotated[
        Path | None, typer.Option(help="The store: the bundle lies in TO/DIGEST. By default TAPEOUT_STORE, or bundles.")
    ] = None,
    public_key: PublicKey = None,
    judge_by: JudgeBy = None,
    require_signature: Annotated[
        bool, typer.Option("--require-signature", help="Refuse to go on without a public key.")
    ] = False,
    unsafe: Annotated[bool, typer.Option("--unsafe", help="Also a version that has no PASS.")] = False,
    as_json: Json = False,
) -> None:
    """Bring a registered bundle to this machine, check every byte of it, and print its folder (docs/deploy.md).

    It takes the server of MLFLOW_TRACKING_URI, and no MLflow. What was interrupted continues at the byte.

    Example: `tapeout pull models:/smollm2@champion`
    """
    from pipeline.registry.access import VersionReference
    from pipeline.registry.bundle_store import store_folder
    from pipeline.registry.pull import Requirements
    from pipeline.registry.pull import pull as fetch

    if require_signature:
        from pipeline.registry.signatures import require_key

        require_key(public_key)
    found = fetch(VersionReference.parse(model), to or store_folder(), Requirements(public_key, judge_by, unsafe))
    show(found._asdict(), str(found.folder.resolve()), as_json)


@on_panel()
def keys(
    action: Annotated[str, typer.Argument(help="new: make a key.", metavar="new")],
    name: Annotated[str, typer.Argument(help="Whose key it is; usage is counted under this name.")],
    tenant: Annotated[str, typer.Option(help="Keys of one tenant share KV blocks; by default the name.")] = "",
    requests_per_minute: Annotated[int | None, typer.Option(help="Without: no limit.")] = None,
    tokens_per_minute: Annotated[int | None, typer.Option(help="Of prompts and answers; without: no limit.")] = None,
    token_budget: Annotated[int | None, typer.Option(help="In total; without: no limit.")] = None,
    as_json: Json = False,
) -> None:
    """Make an API key: prints it once, and the entry with its hash for the server's file of keys.

    Example: `tapeout keys new search-team --requests-per-minute 600`
    """
    from pipeline.cli import keys as command

    limits = {
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "token_budget": token_budget,
    }
    show(*command.run(action, name, tenant, limits), as_json)


@on_panel()
def usage(
    database: Annotated[str, typer.Option(help="SQLAlchemy URL of the usage records.")] = "sqlite:///usage.db",
    since: Annotated[str, typer.Option("--from", help="First day (UTC), such as 2026-11-01; by default all.")] = "",
    until: Annotated[str, typer.Option("--to", help="Day after the last one (UTC).")] = "",
    out: Annotated[Path | None, typer.Option(help="Also write the sums to this Parquet file.")] = None,
    as_json: Json = False,
) -> None:
    """Sum the usage records by day, key, tenant and model: requests, and prompt, cached and completion tokens.

    Example: `tapeout usage --from 2026-11-01 --to 2026-12-01 --out usage.parquet`
    """
    from pipeline.cli import usage as command

    show(*command.run(database, since, until, out), as_json)
