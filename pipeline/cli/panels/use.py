"""Commands that run an engine, or bring it to the machine that runs it."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from pipeline.cli.shared import EngineKey, Json, JudgeBy, Params, PublicKey, show

commands = typer.Typer()
on_panel = partial(commands.command, rich_help_panel="Use an engine")
Threads = Annotated[int, typer.Option(help="Of the engine; 0 means every physical core.")]
Slots = Annotated[int | None, typer.Option(help="KV memory for so many sequences of full length; by default as built.")]
KVBytes = Annotated[str | None, typer.Option(help="Instead of --slots: most memory of the KV cache: 2GiB.")]
MaxWaiting = Annotated[int, typer.Option(help="Requests that may wait; more are refused with 429.")]
MaxRunning = Annotated[
    int | None, typer.Option(min=1, help="Requests that run at once; by default 64, or as many as were measured.")
]
DraftTokens = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="Most tokens that prompt lookup guesses for a request in a step; 0 switches it off. By default 8, or "
        "as many as were measured.",
    ),
]
Unsafe = Annotated[bool, typer.Option("--unsafe", help="Serve a bundle that has no PASS verdict.")]
# Of `tapeout serve`: what is said to the engine's own command where the engine runs elsewhere.
OF_THE_ENGINE = (
    *("source", "threads", "slots", "kv_bytes", "max_waiting", "max_running", "draft_tokens", "follow_seconds"),
    *("unsafe", "public_key", "judge_by", "shadow"),
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
def serve(
    context: typer.Context,
    source: Annotated[
        str | None,
        typer.Argument(
            help="A bundle's folder, models:/NAME@ALIAS, which is followed, or models:/NAME/VERSION; by default the "
            "champion of the recipe's model."
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 is every one of this machine.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.")] = 8000,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(help="What requests call the model; may be given more than once. Responses have the first."),
    ] = None,
    threads: Threads = 0,
    slots: Slots = None,
    kv_bytes: KVBytes = None,
    max_waiting: MaxWaiting = 1024,
    max_running: MaxRunning = None,
    draft_tokens: DraftTokens = None,
    queue_seconds: Annotated[
        float | None, typer.Option(help="A request that waits longer is ended with 408; without, it waits.")
    ] = None,
    request_seconds: Annotated[
        float | None, typer.Option(help="A request that takes longer, queue included, is ended with 408.")
    ] = None,
    drain_seconds: Annotated[float, typer.Option(help="Time that running requests have after SIGTERM.")] = 30.0,
    follow_seconds: Annotated[
        float, typer.Option(help="How often to look for a new champion, which is swapped in; 0 never looks.")
    ] = 5.0,
    unsafe: Unsafe = False,
    public_key: PublicKey = None,
    judge_by: JudgeBy = None,
    api_key: Annotated[
        list[str] | None, typer.Option(help="Clients must send it; may be given more than once. Or TAPEOUT_API_KEYS.")
    ] = None,
    keys_file: Annotated[
        Path | None, typer.Option(help="YAML file of keys and their limits: `tapeout keys new`.")
    ] = None,
    usage_database: Annotated[
        str | None, typer.Option(help="SQLAlchemy URL for usage records, such as sqlite:///usage.db; without, none.")
    ] = None,
    usage_journal: Annotated[
        Path, typer.Option(help="Folder of the journal that makes usage records exact; one for each server.")
    ] = Path("usage.journal"),
    traffic_log: Annotated[
        Path | None, typer.Option(help="Folder for a redacted sample of prompts and responses; without, none.")
    ] = None,
    traffic_share: Annotated[float, typer.Option(help="Share of the requests in the traffic log, 0 to 1.")] = 0.01,
    traffic_redactor: Annotated[
        list[str] | None, typer.Option(help="package.module:function that also redacts; may be given more than once.")
    ] = None,
    traces: Annotated[
        bool, typer.Option("--traces", help="Send OpenTelemetry spans by OTLP (OTEL_EXPORTER_OTLP_ENDPOINT).")
    ] = False,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(
            help="Web pages of this origin may call the server; may be given more than once, * is every page."
        ),
    ] = None,
    shadow: Annotated[
        str | None,
        typer.Option(help="A bundle's folder, or models:/NAME@challenger: mirror calls to it (docs/online.md)."),
    ] = None,
    share: Annotated[
        float | None, typer.Option(help="Share of the calls that are mirrored; by default the recipe's online.share.")
    ] = None,
    shadow_log: Annotated[Path, typer.Option(help="Folder of the observations; one for each pair of engines.")] = Path(
        "shadow"
    ),
    shadow_threads: Annotated[int, typer.Option(help="Of the challenger.")] = 1,
    engine: Annotated[
        str | None,
        typer.Option(
            help="Serve an engine that runs elsewhere: tcp:HOST:PORT or unix:PATH of `tapeout engine`.",
            metavar="ADDRESS",
        ),
    ] = None,
    engine_key: EngineKey = None,
    params: Params = Path("params.yaml"),
) -> None:
    """Serve an engine over the OpenAI API (docs/serving.md). A bundle without a PASS for this hardware is refused.

    Example: `tapeout serve artifacts/candidate --port 8000`
    """
    from pipeline.cli import serve as command
    from pipeline.registry.pull import Requirements

    mirrored = None
    if engine is not None:
        command.require_elsewhere([name for name in OF_THE_ENGINE if _is_given(context, name)])
    elif source is None or shadow is not None:
        from pipeline.recipe import load_recipe

        recipe = load_recipe(params)
        source = source or f"models:/{recipe.register_.model_name}@champion"
        if shadow is not None:
            from pipeline.cli.shadow import ShadowOptions

            mirrored = ShadowOptions(shadow, recipe.online, share, shadow_log, shadow_threads)
    command.run(
        command.Options(
            source=source or "",
            host=host,
            port=port,
            names=tuple(served_model_name or ()),
            threads=threads,
            slots=slots,
            kv_bytes=None if kv_bytes is None else command.parse_bytes(kv_bytes),
            max_waiting=max_waiting,
            max_running=max_running,
            draft_tokens=draft_tokens,
            queue_seconds=queue_seconds,
            request_seconds=request_seconds,
            drain_seconds=drain_seconds,
            follow_seconds=follow_seconds,
            required=Requirements(unsafe=True) if unsafe else Requirements(public_key, judge_by),
            api_keys=tuple(api_key or ()),
            keys_file=keys_file,
            usage_database=usage_database,
            usage_journal=usage_journal,
            traffic_log=traffic_log,
            traffic_share=traffic_share,
            traffic_redactors=tuple(traffic_redactor or ()),
            traces=traces,
            cors_origins=tuple(cors_origin or ()),
            shadow=mirrored,
            engine=engine,
            engine_key=engine_key,
        )
    )


@on_panel()
def engine(
    source: Annotated[
        str,
        typer.Argument(help="A bundle's folder, models:/NAME@ALIAS or models:/NAME/VERSION, which is not followed."),
    ],
    listen: Annotated[str, typer.Option(help="Where servers connect: tcp:HOST:PORT or unix:PATH.", metavar="ADDRESS")],
    key_file: EngineKey = None,
    threads: Threads = 0,
    slots: Slots = None,
    kv_bytes: KVBytes = None,
    max_waiting: MaxWaiting = 1024,
    max_running: MaxRunning = None,
    draft_tokens: DraftTokens = None,
    unsafe: Unsafe = False,
    public_key: PublicKey = None,
    judge_by: JudgeBy = None,
) -> None:
    """Run an engine by itself, for `tapeout serve --engine ADDRESS` (docs/serving.md). It needs a PASS as there.

    Example: `tapeout engine artifacts/candidate --listen tcp:0.0.0.0:7000 --key-file engine.key`
    """
    from pipeline.cli import engine as command
    from pipeline.cli.serve import parse_bytes
    from pipeline.registry.pull import Requirements
    from runtime.wire.start import EngineSettings

    memory = None if kv_bytes is None else parse_bytes(kv_bytes)
    command.run(
        source,
        listen,
        key_file,
        EngineSettings(threads, slots, memory, public_key and str(public_key)),
        {"max_running": max_running, "max_draft_tokens": draft_tokens},
        max_waiting,
        Requirements(unsafe=True) if unsafe else Requirements(public_key, judge_by),
    )


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
