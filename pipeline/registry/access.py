"""Reads a registry and the files of its versions: over plain HTTP where a server offers that, else through MLflow.

A machine that serves has neither MLflow nor the credentials of a store: a tracking server answers by REST
(https://mlflow.org/docs/latest/api_reference/rest-api.html), and passes artifacts through, with byte ranges. MLflow is
imported only for a registry in a database, and for artifacts that the server does not pass through (``s3://…``).
"""

from __future__ import annotations

import re
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import quote, urlsplit

from pipeline.registry.tracking import (
    connect,
    http_session,
    public_uri,
    quiet_mlflow,
    store_errors,
    store_remedy,
    tracking_uri,
    unreachable,
)
from pipeline.registry.versions import UnknownVersionError, aliases, dangling, get_version, model_id_of
from pipeline.sources.download import TIMEOUT_S, download_url
from tapeout.errors import RegistryError, SourceError, one_line
from tapeout.file_hashes import sha256_file

if TYPE_CHECKING:
    import requests
    from mlflow import MlflowClient

API = "api/2.0/mlflow"
ARTIFACTS = "api/2.0/mlflow-artifacts/artifacts"  # of the server that passes them through


@dataclass(frozen=True)
class VersionReference:
    """``models:/NAME@ALIAS`` or ``models:/NAME/VERSION``: exactly one of ``alias`` and ``number``."""

    name: str
    alias: str | None = None
    number: int | None = None

    @staticmethod
    def parse(text: str) -> VersionReference:
        """
        >>> VersionReference.parse("models:/smollm2@champion"), str(VersionReference.parse("models:/smollm2/3"))
        (VersionReference(name='smollm2', alias='champion', number=None), 'models:/smollm2/3')
        """
        found = re.fullmatch(r"models:/(?P<name>[^/@]+)(?:@(?P<alias>[^/@]+)|/(?P<number>[1-9]\d*))", text)
        if not found:
            raise RegistryError(f"{text} names no model", expected="models:/NAME@champion, or models:/NAME/VERSION")
        return VersionReference(found["name"], found["alias"], int(found["number"]) if found["number"] else None)

    def __str__(self) -> str:
        return f"models:/{self.name}@{self.alias}" if self.alias else f"models:/{self.name}/{self.number}"


@dataclass(frozen=True)
class Version:
    """A model version as the registry has it. ``run_root``, ``bundle_root``: where its files lie."""

    name: str
    number: int
    tags: dict[str, str]
    run_root: str
    bundle_root: str

    @property
    def reference(self) -> VersionReference:
        return VersionReference(self.name, number=self.number)


class Registry(Protocol):
    def version(self, reference: VersionReference) -> Version: ...

    def fetch(self, root: str, name: str, target: Path) -> str:
        """One file below ``root`` to ``target``, and its sha256.

        What arrived of it before is continued where the server can.
        """
        ...


@contextmanager
def open_registry() -> Generator[Registry]:
    """The registry of ``MLFLOW_TRACKING_URI``; :class:`RegistryError` for all that it or the network refuses."""
    uri = tracking_uri()
    if uri.startswith(("http://", "https://")):
        with http_session() as session:
            yield RestRegistry(uri, session)
    else:
        with connect(write=False) as client:
            yield ClientRegistry(client)


def version_of(source: str) -> Version:
    """That ``models:/NAME@ALIAS`` is of now, or that of ``models:/NAME/VERSION``."""
    with open_registry() as registry:
        return registry.version(VersionReference.parse(source))


class RestRegistry:
    """A tracking server."""

    def __init__(self, uri: str, session: requests.Session) -> None:
        self._uri, self._session = uri.rstrip("/"), session

    def alias(self, name: str, alias: str) -> Any:
        try:
            return self._get("registered-models/alias", name=name, alias=alias)["model_version"]
        except UnknownVersionError as error:
            model = self._get("registered-models/get", name=name)["registered_model"]
            if alias in [entry["alias"] for entry in model.get("aliases", [])]:
                raise dangling(name, alias, error) from error
            raise

    def version(self, reference: VersionReference) -> Version:
        if reference.alias:
            found = self.alias(reference.name, reference.alias)
        else:
            found = self._get("model-versions/get", name=reference.name, version=reference.number)["model_version"]
        run = self._get("runs/get", run_id=found.get("run_id", ""))["run"]
        number, model = int(found["version"]), model_id_of(found.get("source"))
        if not model:
            raise RegistryError(
                f"version {number} of {reference.name} has no bundle in the registry",
                expected="a version that this version of Tapeout registered",
                remedy="register it again: `tapeout register`",
            )
        bundle = self._get(f"logged-models/{quote(model, safe='')}")["model"]
        tags = {tag["key"]: tag.get("value", "") for tag in found.get("tags", [])}
        roots = run["info"]["artifact_uri"], bundle["info"]["artifact_uri"]
        return Version(reference.name, number, tags, *roots)

    def fetch(self, root: str, name: str, target: Path) -> str:
        parts = urlsplit(root)
        if parts.scheme == "mlflow-artifacts":  # with a host, if it is another than that of the registry
            server = f"{urlsplit(self._uri).scheme}://{parts.netloc}" if parts.netloc else self._uri
            root = f"{server}/{ARTIFACTS}/{quote(parts.path.strip('/'))}"
        elif parts.scheme not in ("http", "https"):
            return _fetch_through_mlflow(root, name, target)
        url = f"{root}/{quote(name)}"
        try:
            if _same_server(url, self._uri):
                return download_url(url, target, session=self._session)
            # Whoever can set where a run's files lie must not get our credentials sent there.
            with http_session(credentials=False) as session:
                return download_url(url, target, session=session)
        except SourceError as error:
            raise RegistryError(
                f"the registry does not give {name}: {error.found}",
                expected="the files of the version, as they were registered",
                remedy="start the server or its store, correct MLFLOW_TRACKING_URI or the credentials, or register the "
                "bundle again; then run this again: it continues with the bytes that have arrived",
            ) from error

    def _get(self, path: str, **query: Any) -> Any:
        import requests

        shown = public_uri(self._uri)
        try:
            url, verify = f"{self._uri}/{API}/{path}", self._session.verify
            answer = self._session.get(url, params=query, timeout=TIMEOUT_S, verify=verify)
            body: Any = answer.json()
        except requests.JSONDecodeError as error:
            raise RegistryError(
                f"{shown} is not an MLflow server, or wants other credentials",
                expected="an MLflow tracking server",
                remedy="correct MLFLOW_TRACKING_URI, MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD",
            ) from error
        except OSError as error:  # requests' own errors are among them
            raise unreachable(self._uri, error) from error
        if answer.status_code == 200:
            return body
        unknown = body.get("error_code") == "RESOURCE_DOES_NOT_EXIST"
        raise (UnknownVersionError if unknown else RegistryError)(
            f"the registry at {shown} refused: {one_line(ValueError(body.get('message') or answer.reason))}",
            remedy="check the name, or promote a version: `tapeout promote`",
        )


class ClientRegistry:
    """A database, through MLflow. The evidence of a version is there, too, so it is judged again."""

    def __init__(self, client: MlflowClient) -> None:
        self._client = client

    def version(self, reference: VersionReference) -> Version:
        from pipeline.registry.judged import examine

        name, number = reference.name, reference.number
        if reference.alias:
            number = aliases(self._client, name).get(reference.alias)
        if number is None:
            raise RegistryError(
                f"{name} has no version with the alias {reference.alias} at {public_uri(tracking_uri())}",
                expected="a version that was promoted",
                remedy="run `tapeout promote`, or name a version: models:/NAME/VERSION",
            )
        try:
            examine(self._client, name, number)
        except UnknownVersionError as error:
            raise (dangling(name, reference.alias, error) if reference.alias else error) from error
        found = get_version(self._client, name, number)
        bundle = self._client.get_logged_model(model_id_of(found.source))
        run = self._client.get_run(found.run_id or "")
        return Version(name, number, dict(found.tags), run.info.artifact_uri or "", bundle.artifact_location)

    def fetch(self, root: str, name: str, target: Path) -> str:
        return _fetch_through_mlflow(root, name, target)


def _same_server(url: str, other: str) -> bool:
    """Whether scheme, host and port are the same, as requests reads them.

    >>> _same_server("https://me@host/x", "https://HOST:443"), _same_server("http://host:1/x", "http://host:2")
    (True, False)
    >>> _same_server("http://other\\\\@host/x", "http://host")  # urlsplit takes "host" for the host, requests "other"
    False
    """
    from urllib3.exceptions import LocationParseError

    try:
        return _origin(url) == _origin(other)
    except LocationParseError:  # requests refuses it, too
        return False


def _origin(url: str) -> tuple[str | None, str | None, int | None]:
    from urllib3.util import parse_url

    parts = parse_url(url)
    return parts.scheme, parts.host, parts.port or {"http": 80, "https": 443}.get(parts.scheme or "")


def _fetch_through_mlflow(root: str, name: str, target: Path) -> str:
    quiet_mlflow()
    try:
        from mlflow.artifacts import download_artifacts
        from mlflow.exceptions import MlflowException
    except ImportError as error:
        raise RegistryError(
            f"the files lie at {public_uri(root)}, which takes the package {error.name!r}",
            expected="a server that passes artifacts through: `mlflow server --serve-artifacts`",
            remedy="install MLflow and the client of that store (for S3: pip install 'tapeout[s3]'), or let the server "
            "pass artifacts through",
        ) from error
    try:
        found = download_artifacts(artifact_uri=f"{root}/{name}", dst_path=str(target.parent))
        Path(found).replace(target)
        return sha256_file(target)
    except (MlflowException, OSError, *store_errors()) as error:
        raise RegistryError(
            f"the registry does not give {name}: {one_line(error)}",
            expected="the files of the version, as they were registered",
            remedy=store_remedy(error, "start its store, or register the bundle again") + "; then run this again",
        ) from error


def changed(version: Version, found: str) -> RegistryError:
    """The error for a version whose files or tags are not those that were registered."""
    return RegistryError(
        f"version {version.number} of {version.name} was changed since it was registered: {found}",
        expected="what was judged and registered",
        remedy="register it again (`tapeout register` repairs its files), or promote another version; find out who can "
        "write to the registry's store",
    )
