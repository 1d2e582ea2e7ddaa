"""Register a judged bundle in MLflow, and find the one in service.

A model version holds no weights: its source is a small manifest with the bundle's digest and location. Its tags say
what was judged, on which evidence and against which champion. The verdict itself is in the version's run, so promotion
needs only the bundle from the machine that registered it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evals.verdict import Verdict
from pipeline.registry.release import Release
from pipeline.registry.tracking import connect, public_uri, sqlite_path, tracking_uri
from pipeline.registry.versions import (
    CHALLENGER,
    CHAMPION,
    NO_CHAMPION,
    ROLLBACK,
    aliases,
    digest_of,
    evidence_digest,
    model_exists,
    tag_of,
)
from pipeline.report.data import flatten
from tapeout.artifact import Artifact, create, load
from tapeout.errors import RegistryError
from tapeout.recipe import Recipe

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run
    from mlflow.entities.model_registry import ModelVersion

KEY = "tapeout.release"  # one digest of all that is registered, so that nothing is registered twice


@dataclass(frozen=True)
class RegisteredBundle:
    """What the shadow stage and serving need to open a registered engine."""

    model_name: str
    version: int
    digest: str
    location: Path  # as seen by the machine that registered it


def register(
    recipe: Recipe, verdict: Artifact[Verdict], bundle: Artifact[Any], report: Path, folder: Path
) -> Artifact[Release]:
    """Record a verdict of any outcome as a run and a model version, and point ``challenger`` at that version.

    ``report`` is the folder ``report.write`` left: ``report.html``, ``metrics.json`` and ``plots/``. A FAIL or
    INCONCLUSIVE verdict is registered too, so that a refusal keeps its evidence; ``promotion.promote`` refuses it.
    Every step looks for its own result first: a second call with the same digests changes nothing; a call after a crash
    does the missing steps. :class:`RegistryError` when the verdict judged another bundle.
    """
    if verdict.record.candidate != bundle.digest:
        raise RegistryError(
            f"the verdict judged bundle {verdict.record.candidate[:12]}, not {bundle.digest[:12]}",
            expected="the verdict on the bundle that is registered",
            remedy="run `dvc repro gate`, then register again",
        )
    name = recipe.register_.model_name
    tags = _tags(recipe, verdict, bundle)
    with connect(write=True) as client:
        run = _run(client, recipe, name, tags, verdict, bundle, report)
        version = _version(client, name, tags, run.info.run_id, bundle.digest)
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
        recipe=tags["tapeout.recipe"],
    )
    with create(folder, Release) as draft:
        draft.finish(record, parents={"bundle": bundle, "verdict": verdict})
    return load(folder, Release)


def champion(model_name: str) -> RegisteredBundle | None:
    """The engine in service, or None when nothing was ever promoted under this name."""
    return _holder(model_name, CHAMPION)


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
        if not model_exists(client, model_name):
            return None
        number = aliases(client, model_name).get(alias)
        if number is None:
            return None
        tags = client.get_model_version(model_name, str(number)).tags
        return RegisteredBundle(
            model_name, number, tag_of(tags, "candidate", number), Path(tag_of(tags, "location", number))
        )


def _tags(recipe: Recipe, verdict: Artifact[Verdict], bundle: Artifact[Any]) -> dict[str, str]:
    tags = {
        "tapeout.outcome": verdict.record.outcome.value,
        "tapeout.candidate": bundle.digest,
        "tapeout.evidence": evidence_digest(verdict.record),
        "tapeout.verdict": verdict.digest,
        "tapeout.compared_with": verdict.record.champion or NO_CHAMPION,
        "tapeout.champion_is_baseline": str(verdict.record.champion_is_baseline).lower(),
        "tapeout.recipe": digest_of(recipe.model_dump(mode="json", by_alias=True)),
        "tapeout.target": verdict.record.target,
    }
    key = digest_of([recipe.register_.model_name, tags])
    return {KEY: key, "tapeout.location": str(bundle.folder.resolve()), **tags}


def _run(
    client: MlflowClient,
    recipe: Recipe,
    name: str,
    tags: Mapping[str, str],
    verdict: Artifact[Verdict],
    bundle: Artifact[Any],
    report: Path,
) -> Run:
    """The run with this release's key: found finished, found half-written and completed, or made."""
    from mlflow.entities import Metric, Param

    metrics = _report_metrics(report)
    experiment = client.get_experiment_by_name(recipe.register_.experiment)
    experiment_id = experiment.experiment_id if experiment else client.create_experiment(recipe.register_.experiment)
    found = client.search_runs([experiment_id], f"tags.`{KEY}` = '{tags[KEY]}'", max_results=1)
    if found and found[0].info.status == "FINISHED":
        return found[0]
    run_name = f"{name} {bundle.digest[:12]} {verdict.record.outcome.value}"
    run = found[0] if found else client.create_run(experiment_id, tags=dict(tags), run_name=run_name)
    run_id, started = run.info.run_id, run.info.start_time
    params = [Param(key, value) for key, value in flatten(recipe.model_dump(mode="json", by_alias=True)).items()]
    for start in range(0, len(params), 100):  # the server's limit for one call
        client.log_batch(run_id, params=params[start : start + 100])
    # The run's own start as the time of every metric: a repeated upload after a crash is the same point again.
    points = [Metric(key, value, started, 0) for key, value in sorted(metrics.items())]
    for start in range(0, len(points), 1000):
        client.log_batch(run_id, metrics=points[start : start + 1000])
    client.log_artifacts(run_id, str(verdict.folder), "verdict")
    client.log_artifacts(run_id, str(report))
    client.log_dict(run_id, _manifest(bundle), f"{_source(bundle.digest)}/manifest.json")
    client.set_terminated(run_id)
    return client.get_run(run_id)


def _report_metrics(report: Path) -> dict[str, float]:
    missing = [name for name in ("report.html", "metrics.json") if not (report / name).is_file()]
    if missing:
        raise RegistryError(
            f"{report} lacks {' and '.join(missing)}",
            expected="the folder the report was written to",
            remedy="run `dvc repro report`",
        )
    return json.loads((report / "metrics.json").read_text())


def _source(digest: str) -> str:
    return f"bundle/sha256-{digest}"


def _manifest(bundle: Artifact[Any]) -> dict[str, Any]:
    return {
        "noun": bundle.record.noun,
        "digest": bundle.digest,
        "location": str(bundle.folder.resolve()),
        "files": {name: {"sha256": f.sha256, "size_bytes": f.size_bytes} for name, f in bundle.files.items()},
        "parents": {role: asdict(parent) for role, parent in bundle.parents.items()},
        "record": bundle.record.model_dump(mode="json"),
    }


def _version(client: MlflowClient, name: str, tags: Mapping[str, str], run_id: str, digest: str) -> ModelVersion:
    if not model_exists(client, name):
        client.create_registered_model(name)
    same = [v for v in client.search_model_versions(f"tags.`{KEY}` = '{tags[KEY]}'") if v.name == name]
    if same:
        return min(same, key=lambda version: int(version.version))
    # An MLflow server accepts only sources inside the run that they belong to, so the manifest is there.
    source = f"runs:/{run_id}/{_source(digest)}"
    description = f"{tags['tapeout.outcome']}: engine bundle {digest[:12]}; why is in report.html of its run"
    return client.create_model_version(name, source, run_id=run_id, tags=dict(tags), description=description)
