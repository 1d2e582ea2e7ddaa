"""``tapeout gate``: prints the verdict, and writes it in the formats that CI systems read."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from engines.bundle import EngineBundle
from evals.ci.comment import PLOTS
from evals.ci.document import document
from evals.ci.github import annotation_lines, broken, no_commands
from evals.ci.result import ChampionReference, gate_result
from evals.ci.write import COMMENT, GITHUB, chosen, write
from evals.statement import statement
from pipeline.cli.tables import console, verdict
from pipeline.cli.verdict import load_verdict
from pipeline.recipe import load_recipe
from tapeout.artifact import load_record
from tapeout.errors import ExitCode, TapeoutError


def run(
    artifacts: Path,
    params: Path,
    *,
    key: Path | None,
    formats: Sequence[str],
    out: Path,
    plots_url: str,
    as_json: bool,
) -> ExitCode:
    """Returns the exit code of the verdict, once all that was asked for has been written."""
    stream = sys.stderr if as_json else sys.stdout  # of annotations
    formats = chosen(formats, os.environ)
    try:
        found = load_verdict(artifacts, params, key=key)
        name = load_recipe(params).register_.model_name
        champion = champion_of(name) if COMMENT in formats else None
        stated = statement(name, found, load_record(artifacts / "candidate", EngineBundle))
        drawn = [name for name in PLOTS if (artifacts / "report" / "plots" / f"{name}.svg").is_file()]
        plots = tuple(f"{plots_url.rstrip('/')}/{name}.svg" for name in drawn if plots_url)
        result = gate_result(name, found, stated, params, champion=champion, plots=plots)
        write(result, formats, out, os.environ)
    except TapeoutError as error:
        if GITHUB in formats:
            print(broken(error), file=stream)
        raise
    with no_commands(stream) if GITHUB in formats else nullcontext():
        if as_json:
            print(json.dumps(document(name, None, found.record, found.digest), indent=1, allow_nan=False))
        else:
            console().print(verdict(found.record))
    if GITHUB in formats:
        print(*annotation_lines(result), sep="\n", file=stream)
    return found.record.exit_code


def champion_of(name: str) -> ChampionReference | None:
    from pipeline.registry.verdicts import champion_verdict

    judged = champion_verdict(name)
    return None if judged is None else ChampionReference(f"the champion, version {judged.number}", judged.verdict)
