"""Register a judged bundle in MLflow, and find the one in service.

A version's source is the bundle itself (pipeline/registry/upload.py). The version's run holds the verdict and all that
it was reached on but the weights, so a promotion can judge again (pipeline/registry/judged.py). Tags are for people and
for searching.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evals.evidence import require_reproducible
from evals.statement import statement
from evals.verdict import Verdict
from pipeline.recipe import Recipe
from pipeline.registry.judged import (
    CANDIDATE,
    KEY,
    collect,
    download_logged,
    dumped,
    examine,
    read_logged,
    require_pass,
    tags_of,
)
from pipeline.registry.release import Release
from pipeline.registry.signatures import private_key
from pipeline.registry.tracking import connect, public_uri, sqlite_path, tracking_uri
from pipeline.registry.upload import upload
from pipeline.registry.versions import (
    CHALLENGER,
    CHAMPION,
    EVIDENCE,
    MODEL_SIGNATURE,
    ROLLBACK,
    SIGNATURE,
    VERDICT,
    UnknownVersionError,
    aliases,
    dangling,
    existing,
    source_of,
)
from pipeline.report.data import flatten
from tapeout.artifact import Artifact, create, load
from tapeout.errors import RegistryError, TapeoutError
from tapeout.signing import model_signature_path, model_statement, sign, signature_path, write_signature

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run
    from mlflow.entities.model_registry import ModelVersion


@dataclass(frozen=True)
class RegisteredBundle:
    """What the shadow stage and serving need to open a registered engine."""

    model_name: str
    version: int
    digest: str
    location: Path  # as seen by the machine that registered it


def register(
    recipe: Recipe,
    verdict: Artifact[Verdict],
    bundle: Artifact[Any],
    artifacts: Path,
    *,
    key: Path | None = None,
    repair: bool = False,
) -> Artifact[Release]:
    """Record a verdict of any outcome as a run and a model version, and point ``challenger`` at that version.

    ``artifacts``: what the verdict was reached on, the report, and where the Release is written. A FAIL or INCONCLUSIVE
    verdict is registered too, so that a refusal keeps its evidence; ``promotion.promote`` refuses it. Every step looks
    for its own result first: a second call with the same digests changes nothing; a call after a crash does the missing
    steps. The bundle is uploaded, unless the registry has it; with ``repair``, what it has is read back. With a private
    ``key`` (by default that of ``TAPEOUT_PRIVATE_KEY``, or of the recipe) verdict and bundle are signed: the signatures
    are logged, and written beside the bundle.
    :class:`RegistryError` when the verdict judged another bundle or the store does not take this one,
    :class:`EvidenceError` when the evidence does not give this verdict.
    """
    if verdict.record.candidate != bundle.digest:
        raise RegistryError(
            f"the verdict judged bundle {verdict.record.candidate[:12]}, not {bundle.digest[:12]}",
            expected="the verdict on the bundle that is registered",
            remedy="run `dvc repro gate`, then register again",
        )
    require_reproducible(verdict, artifacts, recipe)
    name = recipe.register_.model_name
    signatures = _signed(recipe, verdict, bundle, artifacts, key or private_key(recipe))
    tags = {**tags_of(name, recipe, verdict.record, verdict.digest), "tapeout.location": str(bundle.folder.resolve())}
    with connect(write=True) as client:
        run = _run(client, recipe, tags, verdict, bundle, artifacts)
        for file, text in signatures.items():
            client.log_text(run.info.run_id, text, f"{EVIDENCE}/{file}")
        model_id = upload(client, run.info.experiment_id, bundle, repair=repair)
        version = _version(client, name, tags, run.info.run_id, model_id)
        if aliases(client, name).get(CHALLENGER) != int(version.version):
            client.set_registered_model_alias(name, CHALLENGER, str(version.version))
    record = Release(
        registry=public_uri(tracking_uri()),
        model_name=name,
        version=int(version.version),
        run_id=run.info.run_id,
        outcome=verdict.record.outcome,
        candidate=bundle.digest,
        compared_with=verdict.record.champion,
        champion_is_baseline=verdict.record.champion_is_baseline,
        evidence=tags["tapeout.evidence"],
        policy=tags["tapeout.policy"],
        recipe=tags["tapeout.recipe"],
    )
    with create(artifacts / "release", Release) as draft:
        draft.finish(record, parents={"bundle": bundle, "verdict": verdict})
    return load(artifacts / "release", Release)


def _signed(
    recipe: Recipe, verdict: Artifact[Verdict], bundle: Artifact[Any], artifacts: Path, key: Path | None
) -> dict[str, str]:
    """Signed verdict and signed bundle by file name, written beside the artifact and the kept bundle, too."""
    if key is None:
        return {}
    judged = sign(statement(recipe.register_.model_name, verdict, bundle), key)
    files = sign(model_statement(bundle), key)
    for folder in (artifacts / "candidate", bundle.folder):
        write_signature(signature_path(folder), judged)
        write_signature(model_signature_path(folder), files)
    return {SIGNATURE: judged, MODEL_SIGNATURE: files}


def champion(model_name: str) -> RegisteredBundle | None:
    """The engine in service, or None when nothing was ever promoted under this name."""
    return _holder(model_name, CHAMPION)


def challenger(model_name: str) -> RegisteredBundle | None:
    """The engine that was registered last, if its evidence gives a PASS, or None when there is none."""
    return _holder(model_name, CHALLENGER)


def incumbent(model_name: str, candidate: str) -> RegisteredBundle | None:
    """The engine a candidate is to be compared with: the champion, or, once the candidate is that, its predecessor.

    So promoting a candidate does not change what it was compared with, and nothing has to be judged again.
    """
    found = champion(model_name)
    if found is not None and found.digest == candidate:
        found = _holder(model_name, ROLLBACK)
    return None if found is not None and found.digest == candidate else found


def _holder(model_name: str, alias: str) -> RegisteredBundle | None:
    database = sqlite_path(tracking_uri())
    if database is not None and not database.exists():
        return None  # connecting would create it
    with connect(write=False) as client:
        if existing(client.get_registered_model, model_name) is None:
            return None
        number = aliases(client, model_name).get(alias)
        if number is None:
            return None
        try:
            found = examine(client, model_name, number)
            require_pass(found)
        except UnknownVersionError as error:
            raise dangling(model_name, alias, error) from error
        except RegistryError as error:
            raise RegistryError(
                f"the {alias} of {model_name} cannot be relied on: {error.found}",
                expected="a version whose logged evidence gives a PASS",
                remedy=f"`tapeout rollback`, delete the alias {alias} in the registry, or change register.model_name",
            ) from error
        return RegisteredBundle(model_name, number, found.verdict.candidate, found.location)


def _run(
    client: MlflowClient,
    recipe: Recipe,
    tags: Mapping[str, str],
    verdict: Artifact[Verdict],
    bundle: Artifact[Any],
    artifacts: Path,
) -> Run:
    """The run with this release's key: found whole, found half-written or damaged and completed, or made."""
    from mlflow.entities import Metric, Param

    report = artifacts / "report"
    metrics = _report_metrics(report)
    experiment = client.get_experiment_by_name(recipe.register_.experiment)
    experiment_id = experiment.experiment_id if experiment else client.create_experiment(recipe.register_.experiment)
    found = client.search_runs([experiment_id], f"tags.`{KEY}` = '{tags[KEY]}'", max_results=1)
    if found and found[0].info.status == "FINISHED" and _is_logged(client, found[0].info.run_id, verdict):
        return found[0]
    run_name = f"{recipe.register_.model_name} {bundle.digest[:12]} {verdict.record.outcome.value}"
    run = found[0] if found else client.create_run(experiment_id, tags=dict(tags), run_name=run_name)
    run_id, started = run.info.run_id, run.info.start_time
    params = [Param(key, value) for key, value in flatten(dumped(recipe)).items()]
    for start in range(0, len(params), 100):  # the server's limit for one call
        client.log_batch(run_id, params=params[start : start + 100])
    # The run's own start as the time of every metric: a repeated upload after a crash is the same point again.
    points = [Metric(key, value, started, 0) for key, value in sorted(metrics.items())]
    for start in range(0, len(points), 1000):
        client.log_batch(run_id, metrics=points[start : start + 1000])
    client.log_artifacts(run_id, str(verdict.folder), VERDICT)
    with tempfile.TemporaryDirectory() as scratch:
        collect(artifacts, recipe, Path(scratch))
        client.log_artifacts(run_id, scratch, EVIDENCE)
    client.log_artifacts(run_id, str(report))
    client.set_terminated(run_id)
    return client.get_run(run_id)


def _is_logged(client: MlflowClient, run_id: str, verdict: Artifact[Verdict]) -> bool:
    """Whether this verdict and its evidence lie in the run unchanged."""
    from mlflow.exceptions import MlflowException

    with tempfile.TemporaryDirectory() as scratch:
        try:
            download_logged(client.get_run(run_id), scratch)
            return read_logged(Path(scratch))[0].digest == verdict.digest
        except (MlflowException, TapeoutError, OSError):
            return False


def _report_metrics(report: Path) -> dict[str, float]:
    missing = [name for name in ("report.html", "metrics.json") if not (report / name).is_file()]
    if missing:
        raise RegistryError(
            f"{report} lacks {' and '.join(missing)}",
            expected="the folder the report was written to",
            remedy="run `dvc repro report`",
        )
    return json.loads((report / "metrics.json").read_text())


def _version(client: MlflowClient, name: str, tags: Mapping[str, str], run_id: str, model_id: str) -> ModelVersion:
    if existing(client.get_registered_model, name) is None:
        client.create_registered_model(name)
    same = [v for v in client.search_model_versions(f"tags.`{KEY}` = '{tags[KEY]}'") if v.name == name]
    source = source_of(model_id)
    if own := [version for version in same if (version.run_id, version.source) == (run_id, source)]:
        version = min(own, key=lambda version: int(version.version))
        for tag, value in tags.items():
            if version.tags.get(tag) != value:
                client.set_model_version_tag(name, version.version, tag, value)
        return version
    description = f"{tags['tapeout.outcome']}: engine bundle {tags[CANDIDATE][:12]}; why is in report.html of its run"
    return client.create_model_version(
        name, source, run_id=run_id, tags=dict(tags), description=description, model_id=model_id
    )
