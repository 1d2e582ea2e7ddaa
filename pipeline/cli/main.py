"""The ``tapeout`` command. It reads options and delegates; heavy modules are imported when a command needs them.

Exit codes: 0 pass, 1 gate failed, 2 something broke, 3 inconclusive, 130 interrupted.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.core

from tapeout.errors import ArtifactError, ExitCode, TapeoutError

if TYPE_CHECKING:
    from rich.console import RenderableType

INTERRUPTED = 130


class Commands(typer.core.TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        """Run the command. If the reader of its output closed the pipe (``tapeout inspect … | head``), exit with 2.

        By default the framework would exit with 1, which here means that the gate failed.
        """
        try:
            try:
                return super().invoke(ctx)
            finally:
                sys.stdout.flush()
        except BrokenPipeError:
            # Buffered output cannot be written any more, and must not fail again when the interpreter exits.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(ExitCode.BROKEN) from None


app = typer.Typer(
    name="tapeout",
    cls=Commands,
    help="From a trained checkpoint to a compiled, quantized, proven inference engine.\n\n"
    "`make repro` builds and judges an engine; these commands use and explain what it built. "
    "Exit codes: 0 pass, 1 gate failed, 2 something broke, 3 inconclusive.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Artifacts = Annotated[Path, typer.Option(help="Folder the pipeline writes its artifacts to.")]
Params = Annotated[Path, typer.Option(help="The recipe (docs/recipes.md explains every parameter).")]
PublicKey = Annotated[
    Path | None,
    typer.Option(help="Refuse what is not signed with its private key.", envvar="TAPEOUT_PUBLIC_KEY", show_envvar=True),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for a script to read.")]


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the full traceback of an error.")] = False,
) -> None:
    pass  # main() reads --debug, because it also applies to errors before this function


@app.command(rich_help_panel="Use an engine")
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
    from runtime.messages import SamplingSettings

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


@app.command(rich_help_panel="Use an engine")
def serve(
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
    threads: Annotated[int, typer.Option(help="Of the engine; 0 means every physical core.")] = 0,
    slots: Annotated[
        int | None, typer.Option(help="KV memory for so many sequences of full length; by default as built.")
    ] = None,
    kv_bytes: Annotated[str | None, typer.Option(help="Instead of --slots: most memory of the KV cache: 2GiB.")] = None,
    max_waiting: Annotated[int, typer.Option(help="Requests that may wait; more are refused with 429.")] = 1024,
    draft_tokens: Annotated[
        int, typer.Option(help="Most tokens that prompt lookup guesses for a request in a step; 0 switches it off.")
    ] = 8,
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
    unsafe: Annotated[bool, typer.Option("--unsafe", help="Serve a bundle that has no PASS verdict.")] = False,
    public_key: PublicKey = None,
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
    params: Params = Path("params.yaml"),
) -> None:
    """Serve an engine over the OpenAI API (docs/serving.md). A bundle without a PASS for this hardware is refused.

    Example: `tapeout serve artifacts/candidate --port 8000`
    """
    from pipeline.cli import serve as command

    mirrored = None
    if source is None or shadow is not None:
        from pipeline.recipe import load_recipe

        recipe = load_recipe(params)
        source = source or f"models:/{recipe.register_.model_name}@champion"
        if shadow is not None:
            from pipeline.cli.shadow import ShadowOptions

            mirrored = ShadowOptions(shadow, recipe.online, share, shadow_log, shadow_threads)
    command.run(
        command.Options(
            source=source,
            host=host,
            port=port,
            names=tuple(served_model_name or ()),
            threads=threads,
            slots=slots,
            kv_bytes=None if kv_bytes is None else command.parse_bytes(kv_bytes),
            max_waiting=max_waiting,
            draft_tokens=draft_tokens,
            queue_seconds=queue_seconds,
            request_seconds=request_seconds,
            drain_seconds=drain_seconds,
            follow_seconds=follow_seconds,
            unsafe=unsafe,
            public_key=public_key,
            api_keys=tuple(api_key or ()),
            keys_file=keys_file,
            usage_database=usage_database,
            usage_journal=usage_journal,
            traffic_log=traffic_log,
            traffic_share=traffic_share,
            traffic_redactors=tuple(traffic_redactor or ()),
            traces=traces,
            shadow=mirrored,
        )
    )


@app.command(rich_help_panel="Use an engine")
def pull(
    model: Annotated[str, typer.Argument(help="models:/NAME@champion, another alias, or models:/NAME/VERSION.")],
    to: Annotated[
        Path | None, typer.Option(help="The store: the bundle lies in TO/DIGEST. By default TAPEOUT_STORE, or bundles.")
    ] = None,
    public_key: PublicKey = None,
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
    from pipeline.registry.access import Reference
    from pipeline.registry.bundle_store import store_folder
    from pipeline.registry.pull import pull as fetch
    from pipeline.registry.pull import require_key

    if require_signature:
        require_key(public_key)
    found = fetch(Reference.parse(model), to or store_folder(), public_key=public_key, unsafe=unsafe)
    _show(found._asdict(), str(found.folder.resolve()), as_json)


@app.command(rich_help_panel="Use an engine")
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
    _show(*command.run(action, name, tenant, limits), as_json)


@app.command(rich_help_panel="Use an engine")
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

    _show(*command.run(database, since, until, out), as_json)


@app.command(rich_help_panel="Judge and release")
def gate(
    artifacts: Artifacts = Path("artifacts"),
    params: Params = Path("params.yaml"),
    key: Annotated[
        Path | None,
        typer.Option(help="Sign the verdict with this private key.", envvar="TAPEOUT_PRIVATE_KEY", show_envvar=True),
    ] = None,
    formats: Annotated[
        list[str] | None,
        typer.Option("--format", help="What CI reads, such as junit; by default as the CI system needs (docs/ci.md)."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the files of these formats.")] = Path("artifacts/ci"),
    plots_url: Annotated[
        str, typer.Option(help="Where the report's plots were published; the format comment shows them.")
    ] = "",
    as_json: Json = False,
) -> None:
    """Judge again, print the verdict and enforce it by exit code: 0 PASS, 1 FAIL, 3 INCONCLUSIVE, 2 no valid verdict.

    Every file is hashed again. With a public key, a verdict that is not signed is refused.

    Example, as the last step of a CI job: `tapeout gate`
    """
    from pipeline.cli import gate as command

    code = command.run(artifacts, params, key=key, formats=formats or (), out=out, plots_url=plots_url, as_json=as_json)
    raise typer.Exit(code)


@app.command(rich_help_panel="Judge and release")
def keygen(
    out: Annotated[Path, typer.Option(help="The keys are written to OUT.key and OUT.pub.")] = Path("tapeout"),
) -> None:
    """Make a pair of keys. Verdicts and bundles are signed with the private one and verified with the public one.

    Example: `tapeout keygen && tapeout register --key tapeout.key`
    """
    from tapeout.signing import generate_keys

    private, public = out.with_name(f"{out.name}.key"), out.with_name(f"{out.name}.pub")
    generate_keys(private, public)
    print(f"{private}: keep it secret; sign with --key {private}, or register.private_key in the recipe")
    print(f"{public}: give it to whoever verifies; --public-key {public}, or register.public_key in the recipe")


@app.command(rich_help_panel="Judge and release")
def register(
    key: Annotated[
        Path | None,
        typer.Option(help="Sign verdict and bundle with this.", envvar="TAPEOUT_PRIVATE_KEY", show_envvar=True),
    ] = None,
    params: Params = Path("params.yaml"),
    as_json: Json = False,
) -> None:
    """Put the judged bundle into the registry, with its evidence, as challenger. What is there whole is not sent again.

    The stage `register` of `dvc repro` does the same with the key of the recipe, and does not read back what is there.

    Example: `tapeout register --key tapeout.key`
    """
    from pipeline.recipe import load_recipe
    from pipeline.stages.wiring import register_candidate

    found = register_candidate(load_recipe(params), key=key, repair=True).record
    done = f"version {found.version} of {found.model_name} was judged {found.outcome.value}: {found.registry}"
    _show(found.model_dump(mode="json"), done, as_json)


@app.command(rich_help_panel="Judge and release")
def summary(artifacts: Artifacts = Path("artifacts"), params: Params = Path("params.yaml")) -> None:
    """Print the verdict, where the report lies and what to try next. Always exits 0 if there is a verdict.

    Example: `make repro` ends with `tapeout summary`
    """
    from pipeline.cli.tables import console, verdict
    from pipeline.cli.verdict import load_verdict

    found = load_verdict(artifacts, params)
    out = console()
    out.print(verdict(found.record))
    page = artifacts / "report" / "report.html"
    where = page.resolve().as_uri() if page.is_file() else f"none at {page}: run `dvc repro`"
    out.print(f"\nreport  {where}", markup=False, soft_wrap=True)
    out.print("\nNext:", *next_commands(found.record.exit_code), sep="\n  ", markup=False, soft_wrap=True)


def next_commands(code: ExitCode) -> list[str]:
    """Useful commands after this verdict."""
    tries = ['tapeout generate "Why is the sky blue?"   stream text from the engine that was judged']
    if code is ExitCode.PASS:
        tries.append("tapeout promote                           make it the champion in the registry")
    else:
        tries.append("tapeout inspect artifacts/verdict         every check with its numbers and its reason")
    tries.append("tapeout gate                              the verdict as an exit code, for CI")
    tries.append("mlflow ui --backend-store-uri sqlite:///mlflow.db   browse runs and versions")
    return tries


@app.command("shadow-verdict", rich_help_panel="Judge and release")
def shadow_verdict(
    shadow_log: Annotated[Path, typer.Argument(help="Folder that `tapeout serve --shadow` writes to.")] = Path(
        "shadow"
    ),
    out: Annotated[Path, typer.Option(help="Folder of the verdict, which `tapeout promote --online` takes.")] = Path(
        "artifacts/online"
    ),
    as_json: Json = False,
) -> None:
    """Judge a challenger by live traffic: 0 PASS, 1 FAIL, 3 INCONCLUSIVE. One may look as often as one likes.

    Example: `tapeout shadow-verdict shadow && tapeout promote --online artifacts/online`
    """
    from evals.online import conclude

    found = conclude(shadow_log, out)
    record = found.record
    share = (
        "" if record.disagreement is None else f", disagreement {record.disagreement:.4f} (at most {record.upper:.4f})"
    )
    shown = f"{record.outcome.value}: {record.reason}; {record.conversations:,} conversations{share}"
    dumped = record.model_dump(mode="json")
    _show({"digest": found.digest, "exit_code": int(record.exit_code)} | dumped, f"{shown}\n{out}", as_json)
    raise typer.Exit(record.exit_code)


@app.command(rich_help_panel="Judge and release")
def drift(
    traffic_log: Annotated[Path, typer.Argument(help="Folder of `tapeout serve --traffic-log`.")] = Path("traffic"),
    write: Annotated[
        bool, typer.Option("--write", help="If it drifted, make the log the calibration source of the recipe.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder of the result, which the next report shows.")] = Path(
        "artifacts/drift"
    ),
    artifacts: Artifacts = Path("artifacts"),
    params: Params = Path("params.yaml"),
    as_json: Json = False,
) -> None:
    """Compare live traffic with the calibration samples, and say whether to calibrate again. Exits 3 if it cannot tell.

    Example: `tapeout drift traffic --write && dvc repro`
    """
    from pipeline.cli import drift as command

    found = command.run(traffic_log, artifacts, params, out)
    record = found.record
    shown = {"digest": found.digest, "recalibrate": record.recalibrate, "advice": record.advice}
    _show(shown | record.model_dump(mode="json"), command.table(record), as_json)
    if write and record.recalibrate:
        command.write_recipe(params, traffic_log)
        print(f"{params} now calibrates on {traffic_log}; run `dvc repro`", file=sys.stderr)
    if not record.enough:
        raise typer.Exit(ExitCode.INCONCLUSIVE)


@app.command(rich_help_panel="Judge and release")
def promote(
    version: Annotated[int | None, typer.Option(help="Version to promote; by default the challenger.")] = None,
    expect_champion: Annotated[
        str | None, typer.Option(help="Refuse unless this digest (or `none`) is the champion now.")
    ] = None,
    bundle: Annotated[Path | None, typer.Option(help="Where the bundle lies, if not where it was registered.")] = None,
    online: Annotated[
        Path | None, typer.Option(help="A PASS of `tapeout shadow-verdict`, which the recipe can require.")
    ] = None,
    params: Params = Path("params.yaml"),
    as_json: Json = False,
) -> None:
    """Make a version champion: only with a PASS by the recipe's bounds, and only if its champion is unchanged.

    Its logged evidence is judged again, and its bundle is hashed again. The former champion becomes `rollback`.

    Example: `tapeout promote`
    """
    from pipeline.recipe import load_recipe
    from pipeline.registry.promotion import promote as move

    done = move(load_recipe(params), version=version, expect_champion=expect_champion, bundle=bundle, online=online)
    _show(asdict(done), done.message, as_json)


@app.command(rich_help_panel="Judge and release")
def verify(
    source: Annotated[
        str, typer.Argument(help="A judged bundle's folder, models:/NAME@ALIAS or models:/NAME/VERSION.")
    ] = "artifacts/candidate",
    level: Annotated[
        str,
        typer.Option(help="A level of native kernels that the bundle carries; by default the best of this machine."),
    ] = "",
    threads: Annotated[int, typer.Option(help="Of the engine; 0 means every physical core.")] = 0,
    key: Annotated[
        Path | None,
        typer.Option(help="Sign the evidence with this private key.", envvar="TAPEOUT_PRIVATE_KEY", show_envvar=True),
    ] = None,
    public_key: PublicKey = None,
    as_json: Json = False,
) -> None:
    """Take the short evidence of a level that was not judged, and attach it: 0 PASS, 1 FAIL (docs/deploy.md).

    The engine at this level is compared with the logits of the judged one, and with itself in every way it is served.
    It takes minutes and no torch. `tapeout serve` then serves at this level.

    Example: `tapeout verify models:/smollm2@champion`
    """
    from pipeline.cli.tables import level_verdict
    from pipeline.cli.verify import run

    found = run(source, level, threads, key, public_key)
    shown = {"digest": found.digest, "folder": str(found.folder), "outcome": found.record.outcome}
    _show(shown | found.record.model_dump(mode="json"), level_verdict(found), as_json)
    raise typer.Exit(found.record.exit_code)


@app.command(rich_help_panel="Judge and release")
def rollback(params: Params = Path("params.yaml"), as_json: Json = False) -> None:
    """Make the former champion champion again. A second rollback undoes the first.

    Example: `tapeout rollback`
    """
    from pipeline.recipe import load_recipe
    from pipeline.registry.promotion import rollback as move

    done = move(load_recipe(params))
    _show(asdict(done), done.message, as_json)


@app.command(rich_help_panel="Explain")
def report(artifacts: Artifacts = Path("artifacts")) -> None:
    """Print the path of the HTML report: one self-contained file.

    Example: `xdg-open $(tapeout report)`
    """
    page = artifacts / "report" / "report.html"
    if not page.is_file():
        raise ArtifactError(f"no {page}", expected="the report of a finished run", remedy="run `make repro`")
    print(page.resolve())


@app.command(rich_help_panel="Explain")
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
    _show(asdict(found), explanation(found), as_json)
    if found.problems:
        raise typer.Exit(ExitCode.BROKEN)


@app.command(rich_help_panel="Explain")
def plan(artifacts: Artifacts = Path("artifacts"), params: Params = Path("params.yaml"), as_json: Json = False) -> None:
    """Print the precision plan: unit, scheme, time, bytes, KL, and the reason. `dvc repro plan` makes it.

    Example: `tapeout plan`
    """
    from pipeline.cli import plan as command
    from pipeline.recipe import load_recipe

    _show(*command.run(artifacts, load_recipe(params)), as_json)


@app.command(rich_help_panel="Explain")
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

    say = partial(print, file=sys.stderr)
    _show(*command.run(artifacts, load_recipe(params), command.parse_tokens(tokens), say), as_json)


@app.command(rich_help_panel="Explain")
def doctor(params: Params = Path("params.yaml"), as_json: Json = False) -> None:
    """Say what this machine can build and run, what is missing, and how to get it. Exits 2 if something is.

    Example: `tapeout doctor`
    """
    from pipeline.cli.doctor import diagnose
    from pipeline.cli.tables import diagnosis
    from pipeline.recipe import load_recipe

    found = diagnose(load_recipe(params), Path())
    _show({"healthy": found.healthy} | asdict(found), diagnosis(found), as_json)
    raise typer.Exit(ExitCode.PASS if found.healthy else ExitCode.BROKEN)


@app.command(rich_help_panel="Build")
def build(
    target: Annotated[
        str,
        typer.Option(
            help="A target, and the GPUs to compile for, or levels of a CPU: `tensorrt-rtx:sm89,sm120`, "
            "`ort-cpu:x86-64-avx2`."
        ),
    ],
    precision: Annotated[str, typer.Option(help="fp16, bf16, int4 (block weights) or fp8 (calibrated).")] = "fp16",
    explain: Annotated[bool, typer.Option("--explain", help="Only print the lowering, pass by pass.")] = False,
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="A quantized checkpoint to take weights from; by default made of the float one's."),
    ] = None,
    batches: Annotated[str, typer.Option(help="Decode batch buckets; by default 1 and build.slots.")] = "",
    documents: Annotated[int, typer.Option(help="Held-out documents of portable evidence; 0 takes none.")] = 8,
    artifacts: Artifacts = Path("artifacts"),
    params: Params = Path("params.yaml"),
) -> None:
    """Build for hardware that this machine may lack, one bundle each under artifacts/targets; or explain a lowering.

    At a level of a CPU the bundle is the recipe's candidate, with the kernels of that level only.

    Example: `tapeout build --target tensorrt-rtx:sm89,sm120 --precision fp8`
    """
    from engines.load import find_target
    from pipeline.cli import build as command
    from pipeline.cli.tables import console
    from pipeline.recipe import load_recipe
    from pipeline.stages import hardware

    name, capabilities = command.parse_target(target)
    recipe = load_recipe(params)
    request = hardware.Request(
        artifacts=artifacts,
        recipe=recipe,
        precision=precision,
        checkpoint=checkpoint,
        batches=command.parse_batches(batches, recipe.build.slots),
        documents=documents,
    )
    if explain:
        console().print(command.pass_table(hardware.explain(request, find_target(name))))
    else:
        command.build(request, name, capabilities, console())


@app.command("export-checkpoint", rich_help_panel="Build")
def export_checkpoint(
    format_name: Annotated[
        str,
        typer.Option(
            "--format",
            help="autoawq (vLLM), compressed-tensors (transformers) or gguf (llama.cpp).",
            metavar="FORMAT",
        ),
    ],
    to: Annotated[Path, typer.Option(help="The folder to write; it must not exist yet.")],
    artifact: Annotated[Path, typer.Argument(help="The quantized model: the artifact of the stage quantize.")] = Path(
        "artifacts/quantized"
    ),
    wider: Annotated[
        bool, typer.Option("--wider", help="Store what the format cannot hold in more bits, instead of refusing it.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Write the quantized model as a checkpoint that vLLM, transformers or llama.cpp loads (docs/formats.md).

    No weight is rounded again. What the format cannot hold is refused, or with --wider stored in more bits: 6-bit
    weights as 8-bit ones, for example.

    Example: `tapeout export-checkpoint --format gguf --to model-gguf --wider`
    """
    from pipeline.cli import checkpoint as command

    _show(*command.run(artifact, format_name, to, wider), as_json)


@app.command(rich_help_panel="Build")
def stage(
    name: Annotated[str, typer.Argument(help="A stage of dvc.yaml, such as export or quantize.")],
    params: Params = Path("params.yaml"),
) -> None:
    """Run one stage on the artifacts that exist. `dvc repro` runs only the stages that need it.

    Example: `tapeout stage export`
    """
    from pipeline.stages import wiring

    wiring.run(name, params)


@app.command(rich_help_panel="Build")
def recipe(
    name: Annotated[
        str | None, typer.Argument(help="A recipe that ships with Tapeout; without it, they are listed.")
    ] = None,
    write: Annotated[bool, typer.Option("--write", help="Change the parameter file instead of printing it.")] = False,
    params: Params = Path("params.yaml"),
) -> None:
    """Lay a shipped recipe over your parameters: print the result, or write it. `git diff` shows what changed.

    Example: `tapeout recipe w4-rtn --write && make repro`
    """

    from pipeline.recipes import shipped

    if name is None:
        for known, sentence in shipped.names().items():
            typer.echo(f"{known:10} {sentence}")
        return
    text = shipped.overlay(name, params)
    if write:
        params.write_text(text)
        typer.echo(f"{params} now holds {name}; run `make repro`")
    else:
        typer.echo(text, nl=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; an expected error is one message, never a traceback."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    code: Any = ExitCode.PASS
    try:
        app(words, prog_name="tapeout")
    except KeyboardInterrupt:
        code = INTERRUPTED
    except SystemExit as finished:
        code = finished.code
    except Exception as error:
        if "--debug" in words:
            traceback.print_exc()
        print(message(error), file=sys.stderr)
        code = ExitCode.BROKEN
    if code == INTERRUPTED:
        print("\ninterrupted; nothing half-written was left behind", file=sys.stderr)
    return int(code or ExitCode.PASS)


def message(error: Exception) -> str:
    """What the user reads instead of a traceback."""
    if isinstance(error, TapeoutError):
        return f"error: {error}"
    return (
        f"error: {type(error).__name__}: {error}\n  this is a fault in tapeout, not in what you asked for\n"
        "  remedy:   `tapeout --debug …` shows where; please report it"
    )


def _show(record: Any, shown: RenderableType, as_json: bool) -> None:
    """Print a result: for a script, or for a reader."""
    if as_json:
        print(json.dumps(record, indent=1, default=str, allow_nan=False))
    else:
        from pipeline.cli.tables import console

        plain = isinstance(shown, str)
        console().print(shown, markup=not plain, soft_wrap=plain)
