"""What is logged with a registered version, and what that proves.

Aliases, tags and files of a registry can be edited by whoever can write to it. So nothing is decided by a tag: the
logged evidence is judged again, and every tag must say what that gives. The logged folder has the layout of
``artifacts/``, with records where weights would be.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from evals.check import Outcome
from evals.evidence import LINEAGE, measured, require_reproducible
from evals.policy import policy_of
from evals.verdict import Verdict
from pipeline.recipe import Recipe
from pipeline.registry.signatures import require_verdict_signature
from pipeline.registry.tracking import tracking_uri
from pipeline.registry.versions import (
    EVIDENCE,
    NO_CHAMPION,
    SIGNATURE,
    VERDICT,
    bundle_name,
    digest_of,
    evidence_digest,
    existing,
    get_version,
    model_id_of,
    tag_of,
)
from quantization.calibration import SAMPLES_FILE
from tapeout.artifact import RECORD, Artifact, load, load_header, verify
from tapeout.errors import RegistryError, TapeoutError, one_line

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run
    from mlflow.entities.model_registry import ModelVersion

KEY = "tapeout.release"  # one digest of all that is registered, so that nothing is registered twice
CANDIDATE = "tapeout.candidate"  # the digest of the bundle
RECIPE = "recipe.json"  # in the folder of the evidence


@dataclass(frozen=True)
class JudgedVersion:
    """A version whose logged evidence gives the verdict that is logged with it. ``location``: where its bundle lies."""

    number: int
    verdict: Verdict
    digest: str  # of the verdict
    location: Path
    signature: str  # empty: not signed

    @property
    def compared_with(self) -> str:
        """Digest of the champion that it was compared with, or ``none``: then it was the float engine."""
        return NO_CHAMPION if self.verdict.champion_is_baseline else self.verdict.champion or NO_CHAMPION


def collect(artifacts: Path, recipe: Recipe, folder: Path) -> None:
    """Copy to ``folder`` what judging again takes: the reports, the records of what they are about, and the recipe."""
    for name in LINEAGE:
        (folder / name).mkdir(parents=True)
        shutil.copyfile(artifacts / name / RECORD, folder / name / RECORD)
    shutil.copyfile(artifacts / "calibration" / SAMPLES_FILE, folder / "calibration" / SAMPLES_FILE)
    for name in measured():
        shutil.copytree(artifacts / name, folder / name)
    (folder / RECIPE).write_text(json.dumps(dumped(recipe), indent=1) + "\n")


def fetch_logged(fetch: Callable[[str, Path], object], folder: Path) -> None:
    """The same, and the verdict, from a run to ``folder``. ``fetch(name, path)`` gets one file of the run."""

    def get(name: str) -> Path:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        fetch(name, path)
        return path

    for name in (*LINEAGE, *measured()):
        get(f"{EVIDENCE}/{name}/{RECORD}")
    get(f"{VERDICT}/{RECORD}")
    for whole in (VERDICT, *(f"{EVIDENCE}/{name}" for name in measured())):
        for name in load_header(folder / whole).files:
            get(f"{whole}/{name}")
    get(f"{EVIDENCE}/calibration/{SAMPLES_FILE}")
    get(f"{EVIDENCE}/{RECIPE}")


def dumped(recipe: Recipe) -> dict[str, Any]:
    return recipe.model_dump(mode="json", by_alias=True)


def tags_of(name: str, recipe: Recipe, verdict: Verdict, digest: str) -> dict[str, str]:
    """What the tags of a version say, as its logged files give it; ``tapeout.location`` is not among them."""
    tags = {
        "tapeout.outcome": verdict.outcome.value,
        CANDIDATE: verdict.candidate,
        "tapeout.evidence": evidence_digest(verdict),
        "tapeout.verdict": digest,
        "tapeout.policy": verdict.policy.digest,
        "tapeout.compared_with": verdict.champion or NO_CHAMPION,
        "tapeout.champion_is_baseline": str(verdict.champion_is_baseline).lower(),
        "tapeout.recipe": digest_of(dumped(recipe)),
        "tapeout.target": verdict.target,
    }
    return {KEY: digest_of([name, tags]), **tags}


def examine(client: MlflowClient, name: str, number: int) -> JudgedVersion:
    """Judge a version's logged evidence again. :class:`RegistryError` unless verdict, run and tags agree with it."""
    from mlflow.exceptions import MlflowException

    version = get_version(client, name, number)
    run = _require_run(client, version)
    with tempfile.TemporaryDirectory() as scratch:
        try:
            download_logged(run, scratch)
        except (MlflowException, OSError) as error:
            raise _not_intact(number, one_line(error)) from error
        found = judge_again(Path(scratch), name, number, version.tags)
    if not _is_source_of(client, version, found.verdict.candidate):
        raise _edited(f"version {number} has the source {version.source}", "the bundle that its verdict judged")
    return found


def download_logged(run: Run, into: str) -> None:
    """The folders ``EVIDENCE`` and ``VERDICT`` of a run, and no more.

    By the run's id, MLflow would look for models of these names, too, and put their files over the run's.
    """
    from mlflow.artifacts import download_artifacts

    for folder in (EVIDENCE, VERDICT):
        download_artifacts(artifact_uri=f"{run.info.artifact_uri}/{folder}", dst_path=into, tracking_uri=tracking_uri())


def judge_again(logged: Path, name: str, number: int, tags: Mapping[str, str]) -> JudgedVersion:
    """What the evidence logged with a version gives. :class:`RegistryError` unless verdict and tags say the same.

    ``logged``: a copy of the run's folders ``EVIDENCE`` and ``VERDICT``.
    """
    try:
        verdict, recipe = read_logged(logged)
    except (TapeoutError, OSError) as error:
        raise _not_intact(number, error.found if isinstance(error, TapeoutError) else str(error)) from error
    if recipe.register_.model_name != name:
        raise _edited(f"version {number} of {name} was judged for {recipe.register_.model_name}", name)
    for tag, value in tags_of(name, recipe, verdict.record, verdict.digest).items():
        if (found := tag_of(tags, tag.removeprefix("tapeout."), number)) != value:
            raise _edited(f"tag {tag} of version {number} is {found[:12]}", f"{value[:12]}, as its verdict says")
    location = Path(tag_of(tags, "location", number))
    signature = logged / EVIDENCE / SIGNATURE
    signed = signature.read_text() if signature.is_file() else ""
    return JudgedVersion(number, verdict.record, verdict.digest, location, signed)


def read_logged(logged: Path) -> tuple[Artifact[Verdict], Recipe]:
    """The verdict and the recipe logged in a run; the verdict is what the logged evidence gives."""
    verdict = load(logged / VERDICT, Verdict)
    verdict.verify()
    recipe = _recipe(logged / EVIDENCE / RECIPE)
    require_reproducible(verdict, logged / EVIDENCE, recipe)
    return verdict, recipe


def require_pass(judged: JudgedVersion) -> None:
    record = judged.verdict
    if record.outcome is not Outcome.PASS:
        reasons = [f"{c.outcome.value} {c.title}: {c.reason}" for c in record.checks if c.outcome is not Outcome.PASS]
        raise RegistryError(
            f"version {judged.number} was judged {record.outcome.value}: "
            + "; ".join(reasons or ["no check was made"]),
            expected="a PASS verdict",
            remedy="change the recipe or gather the missing evidence, then run `dvc repro`",
        )


def require_policy(judged: JudgedVersion, recipe: Recipe) -> None:
    """The bounds and the amount of evidence must be those of the recipe in force."""
    if differences := judged.verdict.policy.differences(policy_of(recipe)):
        raise RegistryError(
            f"version {judged.number} was judged by another policy than the one in force: " + "; ".join(differences),
            expected=f"policy {policy_of(recipe).digest[:12]} of the recipe in force",
            remedy="run `dvc repro` to judge by this recipe, or name the recipe that it was judged by",
        )


def require_bundle(folder: Path, digest: str, number: int) -> None:
    """Hash the whole bundle again: it must be the judged one, and hold nothing else."""
    remedy = "run `dvc repro build-candidate register`, or say where the bundle lies on this machine (--bundle)"
    wanted = f"bundle {digest[:12]}, as registered with version {number}"
    if not (folder / RECORD).is_file():
        raise RegistryError(
            f"the bundle of version {number} is missing: no {RECORD} in {folder}", expected=wanted, remedy=remedy
        )
    try:
        here = verify(folder).digest
        problem = "" if here == digest else f"{RECORD} says {here[:12]}"
    except TapeoutError as error:
        problem = error.found
    if problem:
        raise RegistryError(
            f"the bundle in {folder} is not the one that was judged: {problem}", expected=wanted, remedy=remedy
        )


def require_signed(judged: JudgedVersion, name: str, bundle: Path, key: Path) -> None:
    """:class:`SignatureError` unless the version's verdict is signed with ``key``, about the bundle in this folder."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / SIGNATURE
        if judged.signature:
            path.write_text(judged.signature)
        record = judged.verdict.model_dump(mode="json")
        require_verdict_signature(path, key, name, record, judged.digest, bundle)


def _require_run(client: MlflowClient, version: ModelVersion) -> Run:
    from mlflow.exceptions import MlflowException

    number, tags = int(version.version), version.tags
    try:
        run = client.get_run(version.run_id or "")
    except MlflowException as error:
        raise _edited(f"version {number} belongs to no run that is there", "the run that registered it") from error
    if run.info.lifecycle_stage != "active" or run.info.status != "FINISHED":
        state = "deleted" if run.info.lifecycle_stage != "active" else run.info.status
        raise _edited(f"the run of version {number} is {state}", "a finished run")
    if run.data.tags.get(KEY) != tags.get(KEY):
        raise _edited(f"version {number} names a run that registered something else", "the run that registered it")
    return run


def _is_source_of(client: MlflowClient, version: ModelVersion, digest: str) -> bool:
    """Whether a version points to the bundle of this digest."""
    model_id = model_id_of(version.source)
    model = existing(client.get_logged_model, model_id) if model_id else None
    return model is not None and model.name == bundle_name(digest)


def _recipe(path: Path) -> Recipe:
    try:
        return Recipe.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise RegistryError(f"{RECIPE} is not a recipe of this version: {error.error_count()} problems") from error


def _not_intact(number: int, found: str) -> RegistryError:
    return RegistryError(
        f"the verdict logged with version {number} is not intact: {found}",
        expected="the evidence as it was registered, and the verdict that it gives",
        remedy="run `dvc repro register` again and promote that version",
    )


def _edited(found: str, expected: str) -> RegistryError:
    return RegistryError(found, expected=expected, remedy="the registry was edited by hand: register the bundle again")
