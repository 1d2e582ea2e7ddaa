"""Commands that judge an engine, register it and make it champion."""

from __future__ import annotations

import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.cli.shared import Artifacts, Json, Params, PrivateKey, PublicKey, Threads, show
from tapeout.errors import ExitCode

if TYPE_CHECKING:
    from pipeline.registry.promotion import Move

commands = typer.Typer()
on_panel = partial(commands.command, rich_help_panel="Judge and release")


@on_panel()
def gate(
    artifacts: Artifacts = Path("artifacts"),
    params: Params = Path("params.yaml"),
    key: PrivateKey = None,
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


@on_panel()
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


@on_panel()
def register(
    key: PrivateKey = None,
    params: Params = Path("params.yaml"),
    as_json: Json = False,
) -> None:
    """Put the judged bundle into the registry, with its evidence, as challenger. What is there whole is not sent again.

    The stage `register` of `dvc repro` does the same with the key of the recipe, and does not read back what is there.

    Example: `tapeout register --key tapeout.key`
    """
    from pipeline.recipe import load_recipe
    from pipeline.registry.signatures import private_key
    from pipeline.stages.wiring import register_candidate

    recipe = load_recipe(params)
    signed_with = key or private_key(recipe)
    found = register_candidate(recipe, key=signed_with, repair=True).record
    done = f"version {found.version} of {found.model_name} was judged {found.outcome.value}: {found.registry}\n"
    signed = f"verdict and bundle are signed with {signed_with}" if signed_with else "not signed: no --key was given"
    show(
        found.model_dump(mode="json") | {"signed_with": str(signed_with) if signed_with else None},
        done + signed,
        as_json,
    )


@on_panel()
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


@on_panel("shadow-verdict")
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
    from evals.kinds.online.measure import conclude

    found = conclude(shadow_log, out)
    record = found.record
    share = (
        "" if record.disagreement is None else f", disagreement {record.disagreement:.4f} (at most {record.upper:.4f})"
    )
    shown = f"{record.outcome.value}: {record.reason}; {record.conversations:,} conversations{share}"
    dumped = record.model_dump(mode="json")
    show({"digest": found.digest, "exit_code": int(record.exit_code)} | dumped, f"{shown}\n{out}", as_json)
    raise typer.Exit(record.exit_code)


@on_panel()
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
    show(shown | record.model_dump(mode="json"), command.table(record), as_json)
    if write and record.recalibrate:
        command.write_recipe(params, traffic_log)
        print(f"{params} now calibrates on {traffic_log}; run `dvc repro`", file=sys.stderr)
    if not record.enough:
        raise typer.Exit(ExitCode.INCONCLUSIVE)


@on_panel()
def promote(
    version: Annotated[int | None, typer.Option(help="Version to promote; by default the challenger.")] = None,
    expect_champion: Annotated[
        str | None, typer.Option(help="Refuse unless this digest (or `none`) is the champion now.")
    ] = None,
    bundle: Annotated[
        Path | None, typer.Option(help="Its folder; by default where it was registered, or it is pulled.")
    ] = None,
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
    show(asdict(done), _moved(done), as_json)


@on_panel()
def verify(
    source: Annotated[
        str, typer.Argument(help="A judged bundle's folder, models:/NAME@ALIAS or models:/NAME/VERSION.")
    ] = "artifacts/candidate",
    level: Annotated[
        str,
        typer.Option(help="A level of native kernels that the bundle carries; by default the best of this machine."),
    ] = "",
    threads: Threads = 0,
    key: PrivateKey = None,
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
    show(shown | found.record.model_dump(mode="json"), level_verdict(found), as_json)
    raise typer.Exit(found.record.exit_code)


@on_panel()
def rollback(params: Params = Path("params.yaml"), as_json: Json = False) -> None:
    """Make the former champion champion again. A second rollback undoes the first.

    Example: `tapeout rollback`
    """
    from pipeline.recipe import load_recipe
    from pipeline.registry.promotion import rollback as move

    done = move(load_recipe(params))
    show(asdict(done), _moved(done), as_json)


def _moved(done: Move) -> str:
    """A server follows the alias; the engines of a fleet have their bundles from the fleet's own release."""
    if not done.changed:
        return done.message
    command = f"tapeout fleet release FILE models:/{done.model_name}/{done.champion} --gateway URL"
    return (
        f"{done.message}\n`tapeout serve` follows; a fleet does with `{command}`, unless one runs with --follow-seconds"
    )
