"""Model versions as the registry keeps them: aliases, tags, files of a run, and clear errors for missing ones."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from pipeline.registry.tracking import public_uri, tracking_uri
from tapeout.artifact import canonical_json
from tapeout.errors import RegistryError

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion, RegisteredModel

    from evals.verdict import Verdict

CHALLENGER, CHAMPION, ROLLBACK = "challenger", "champion", "rollback"
NO_CHAMPION = "none"
EVIDENCE, VERDICT = "evidence", "verdict"  # folders of a version's run
SIGNATURE, MODEL_SIGNATURE = "verdict.sigstore.json", "model.sig"  # in the folder of the evidence
LEVEL_TAG = "tapeout.level."  # and the level: the digest of its evidence
T = TypeVar("T")


class UnknownVersionError(RegistryError):
    """The registry has no such model, version or alias."""


def source_of(model_id: str) -> str:
    """Of a version: the logged model that holds its bundle."""
    return f"models:/{model_id}"


def model_id_of(source: str | None) -> str:
    """The logged model behind a version's source; empty for any other source.

    >>> model_id_of("models:/m-7f"), model_id_of("models:/name/1"), model_id_of("runs:/a/b")
    ('m-7f', '', '')
    """
    found = re.fullmatch(r"models:/([\w-]+)", source or "")
    return found[1] if found else ""


def bundle_name(digest: str) -> str:
    """Of the logged model that holds the bundle."""
    return f"sha256-{digest}"


def evidence_digest(verdict: Verdict) -> str:
    """One digest over the digests of every report the verdict was reached on."""
    return digest_of(verdict.evidence)


def aliases(client: MlflowClient, name: str) -> dict[str, int]:
    return {str(alias): int(number) for alias, number in get_model(client, name).aliases.items()}


def existing(call: Callable[..., T], *arguments: str) -> T | None:
    """What a call of MLflow's client gives; None where the registry has no such thing."""
    from mlflow.exceptions import MlflowException

    try:
        return call(*arguments)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return None


def get_model(client: MlflowClient, name: str) -> RegisteredModel:
    model = existing(client.get_registered_model, name)
    if model is None:
        raise UnknownVersionError(
            f"no model {name!r} in the registry at {public_uri(tracking_uri())}",
            expected="the `register.model_name` of params.yaml",
            remedy="run `dvc repro register`, or correct the name or MLFLOW_TRACKING_URI",
        )
    return model


def get_version(client: MlflowClient, name: str, number: int) -> ModelVersion:
    version = existing(client.get_model_version, name, str(number))
    if version is None:
        known = sorted(int(v.version) for v in client.search_model_versions(f"name='{name}'"))
        if not known:
            get_model(client, name)  # whose error says so where the model is not there either
        raise UnknownVersionError(
            f"{name} has no version {number}",
            expected=f"one of {', '.join(map(str, known))}"
            if known
            else "a version that was registered; there is none",
            remedy="" if known else "run `dvc repro register`",
        )
    return version


def dangling(name: str, alias: str, error: UnknownVersionError) -> RegistryError:
    """For an alias whose version was deleted. Neither a promotion nor a rollback can move away from it."""
    return RegistryError(
        f"the alias {alias} of {name} is left over from a version that was deleted: {error.found}",
        expected=error.expected,
        remedy="delete the alias in MLflow's page of the model, or by "
        f"MlflowClient().delete_registered_model_alias({name!r}, {alias!r}); then register and promote a version",
    )


def tag_of(tags: Mapping[str, str], name: str, number: int) -> str:
    value = tags.get(f"tapeout.{name}")
    if value is None:
        raise RegistryError(
            f"version {number} has no tag tapeout.{name}",
            expected="a version that `tapeout` registered",
            remedy="register the bundle with `dvc repro register`",
        )
    return value


def digest_of(value: Any) -> str:
    return hashlib.sha256(canonical_json(value)).hexdigest()
