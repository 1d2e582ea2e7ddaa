"""``tapeout drift``: live traffic against the calibration samples, and what to calibrate on instead."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from engines.kernels.serving import Clipping
from evals.kinds.drift import DriftReport
from evals.kinds.drift.measure import ClipCounter, drift
from pipeline.recipe import Recipe, load_recipe
from pipeline.sources.corpus import calibration_and_heldout
from pipeline.sources.source import Source
from pipeline.sources.traffic import NAME, exchanges
from pipeline.yaml_edit import edited
from quantization.calibration import SAMPLES_FILE, Calibration, CalibrationSample, sample_hash
from tapeout import artifact
from tapeout.artifact import Artifact
from tapeout.errors import EvidenceError, FingerprintError, RecipeError

COLUMN = "text"  # of the data set that a traffic log becomes


def run(traffic: Path, artifacts: Path, params: Path, out: Path) -> Artifact[DriftReport]:
    recipe = load_recipe(params)
    calibration = artifact.load(artifacts / "calibration", Calibration)
    samples = _samples(recipe, artifacts, calibration)
    tokenizer = _tokenizer(artifacts)
    live = [tokens for one in exchanges(traffic) if (tokens := tokenizer.encode(one["text"]).ids)]
    counter = clip_counter(artifacts / "candidate", recipe.build.threads)
    return drift(recipe.drift, live, samples, out, calibration=calibration, seed=recipe.seed, clip_counts=counter)


def clip_counter(folder: Path, threads: int) -> ClipCounter | None:
    """Of the engine in ``folder``; None where there is none that runs here and counts what it clips."""
    if not (folder / artifact.RECORD).is_file():
        return None
    from engines.bundle import EngineBundle
    from engines.load import at_level, find_target, load
    from engines.sequences import Sequences

    bundle = artifact.load(folder, EngineBundle)
    try:
        engine = Sequences(load(folder, threads=threads, slots=1))
    except FingerprintError as error:
        print(f"clipped values are not counted: {error.found}", file=sys.stderr)
        return None
    kernels = find_target(bundle.record.target).serving_kernels
    read = kernels.clippings(kernels.library(at_level(bundle)))

    def count(tokens: Sequence[int]) -> Clipping:
        before = read()
        engine.prefill(0, tokens[: engine.max_tokens])
        return read().since(before)

    return count if any(counts.stored for counts in count([0])) else None


def table(found: DriftReport) -> Table:
    shown = Table("distance", "value", "at most", "p", title=found.advice, title_justify="left")
    for one in found.distances:
        shown.add_row(one.title, f"{one.value:.4g}", f"{one.bound:g}", f"{one.p_value:.3g}")
    return shown


def recalibrated(params: Path, traffic: Path) -> str:
    """The recipe with live traffic as the calibration source; all other text stays as it is."""
    changes = {
        "data": {"traffic": f"file:{traffic.resolve()}", "traffic_sha256": None},
        "calibrate": {"dataset": NAME, "column": COLUMN},
    }
    return edited(params.read_bytes().decode(), changes)


def write_recipe(params: Path, traffic: Path) -> None:
    """:class:`RecipeError` if the result were no recipe; then the file stays."""
    unfinished = params.with_name(f".{params.name}.partial")
    try:
        unfinished.write_bytes(recalibrated(params, traffic).encode())
        load_recipe(unfinished)
        unfinished.replace(params)
    except OSError as error:
        raise RecipeError(f"{params} cannot be written: {error.strerror}") from error
    finally:
        unfinished.unlink(missing_ok=True)


def _samples(recipe: Recipe, artifacts: Path, calibration: Artifact[Calibration]) -> list[list[int]]:
    """The samples again from their text; the calibration keeps hashes alone."""
    source, wanted = artifact.load(artifacts / "source", Source), recipe.calibrate
    tokenizer = _tokenizer(artifacts)
    texts, _ = calibration_and_heldout(source, wanted, 0, recipe.seed, tokenizer)
    samples = [tokenizer.encode(text).ids[: wanted.tokens] for text in texts]
    lines = (calibration.folder / SAMPLES_FILE).read_text().splitlines()
    recorded = [CalibrationSample.model_validate_json(line).sample_hash for line in lines]
    if [sample_hash(tokens) for tokens in samples] != recorded:
        raise EvidenceError(
            f"{artifacts / 'calibration'} was made of other samples than the recipe's",
            expected="the recipe that the engine was calibrated by",
            remedy="run `dvc repro calibrate`, or pass --params",
        )
    return samples


def _tokenizer(artifacts: Path) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(artifacts / "graph" / "tokenizer.json"))
