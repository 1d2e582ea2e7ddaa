"""Puts a bundle into the registry, once per digest, so that ``models:/NAME@champion`` is the engine itself.

A bundle is one of MLflow's logged models, named by its digest; every version of that bundle points to it, whatever its
evidence. The record comes last, and only then is the logged model ``READY``. An upload that was interrupted goes on
with the first file that is not there, whole: files are read back and hashed.
"""

from __future__ import annotations

import tempfile
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from pipeline.registry.access import Registry, open_registry
from pipeline.registry.tracking import store_errors, store_remedy
from pipeline.registry.versions import bundle_name
from pipeline.sources.download import progress_bar
from tapeout.artifact import RECORD, Artifact
from tapeout.errors import RegistryError, one_line
from tapeout.file_hashes import sha256_file

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import LoggedModel

KIND = "tapeout-bundle"


def upload(client: MlflowClient, experiment_id: str, bundle: Artifact[Any], *, repair: bool = False) -> str:
    """The id of the logged model that holds this bundle, whole. :class:`RegistryError` if the store does not take it.

    Safe to stop anywhere: the next call continues. ``repair``: also read back what was uploaded completely, and upload
    again what was changed since.
    """
    from mlflow.entities import LoggedModelStatus

    model = _logged_model(client, experiment_id, bundle.digest)
    complete = model.status is LoggedModelStatus.READY and not repair
    there = _sizes(client, model.model_id)
    wanted = {name: (entry.sha256, entry.size_bytes) for name, entry in sorted(bundle.files.items())}
    record = bundle.folder / RECORD
    wanted[RECORD] = sha256_file(record), record.stat().st_size
    done, total = 0, sum(size for _, size in wanted.values())
    with open_registry() as registry, progress_bar(f"bundle {bundle.digest[:12]}") as shown:
        for name, (sha256, size) in wanted.items():
            same_size = there.get(name) == size
            if not same_size or not (complete or _hash_there(registry, model.artifact_location, name) == sha256):
                _put(client, model.model_id, bundle.folder, name)
            done += size
            shown(done, total)
    if model.status is not LoggedModelStatus.READY:
        client.finalize_logged_model(model.model_id, LoggedModelStatus.READY)
    return model.model_id


def _logged_model(client: MlflowClient, experiment_id: str, digest: str) -> LoggedModel:
    """The oldest one of this digest, or a new one."""
    name = bundle_name(digest)
    found = list(client.search_logged_models([experiment_id], f"name = '{name}'"))
    if found:
        return min(found, key=lambda model: (model.creation_timestamp, model.model_id))
    return client.create_logged_model(experiment_id, name, model_type=KIND)


def _sizes(client: MlflowClient, model_id: str, folder: str | None = None) -> dict[str, int]:
    """Every file that the logged model has, with its size in bytes."""
    found: dict[str, int] = {}
    for entry in client.list_logged_model_artifacts(model_id, folder):
        found |= _sizes(client, model_id, entry.path) if entry.is_dir else {entry.path: entry.file_size or 0}
    return found


def _hash_there(registry: Registry, root: str, name: str) -> str:
    with tempfile.TemporaryDirectory() as scratch:
        return registry.fetch(root, name, Path(scratch) / PurePosixPath(name).name)


def _put(client: MlflowClient, model_id: str, folder: Path, name: str) -> None:
    from mlflow.exceptions import MlflowException
    from requests import RequestException

    place = str(PurePosixPath(name).parent)
    try:
        client.log_model_artifact(model_id, str(folder / name), None if place == "." else place)
    except (MlflowException, RequestException, OSError, *store_errors()) as error:
        raise RegistryError(
            f"the registry's store did not take {name}: {one_line(error, 300)}",
            expected=f"room for {(folder / name).stat().st_size / 1e6:.1f} MB, and a server that stays up",
            remedy=store_remedy(error, "free space in its artifact store or start it")
            + "; then run `tapeout register` again: files that have arrived are not sent again",
        ) from error
