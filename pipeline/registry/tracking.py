"""One quiet connection to MLflow: its address, its errors, and its lock for writers."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from pipeline.sources.download import innermost
from tapeout.errors import RegistryError, one_line

if TYPE_CHECKING:
    import requests
    from mlflow import MlflowClient

DEFAULT_URI = "sqlite:///mlflow.db"
LOCK_SECONDS = 60.0
CONNECT_TIMEOUT_S = 10
UNFINISHED = "_alembic_tmp_"  # begins the name of a table that is there only while others change

# By default MLflow retries an absent server for minutes, sends telemetry, and prints links between our lines.
_QUIET = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "120",  # a server answers an upload once the file is in its store
}


def tracking_uri() -> str:
    return os.environ.get("MLFLOW_TRACKING_URI") or DEFAULT_URI


def public_uri(uri: str) -> str:
    """The address without a user name or password, fit for messages and records.

    >>> public_uri("https://me:secret@host:5000/x"), public_uri("sqlite:///mlflow.db")
    ('https://host:5000/x', 'sqlite:///mlflow.db')
    """
    parts = urlsplit(uri)
    return uri.replace(f"{parts.netloc.rpartition('@')[0]}@", "", 1) if "@" in parts.netloc else uri


def http_session(*, credentials: bool = True) -> requests.Session:
    """With the credentials and certificates that MLflow's own client reads from the environment.

    ``credentials`` False: only with the authority that it trusts, for another host than the registry's.
    Each request must pass ``verify=session.verify``: otherwise requests prefers REQUESTS_CA_BUNDLE to it.
    """
    import requests

    session, environment = requests.Session(), os.environ
    if environment.get("MLFLOW_TRACKING_INSECURE_TLS", "").lower() in ("1", "true"):
        session.verify = False
    elif certificates := environment.get("MLFLOW_TRACKING_SERVER_CERT_PATH"):
        session.verify = certificates
    if not credentials:
        return session
    if user := environment.get("MLFLOW_TRACKING_USERNAME"):
        session.auth = (user, environment.get("MLFLOW_TRACKING_PASSWORD", ""))
    elif token := environment.get("MLFLOW_TRACKING_TOKEN"):
        session.headers["Authorization"] = f"Bearer {token}"
    session.cert = environment.get("MLFLOW_TRACKING_CLIENT_CERT_PATH")
    return session


def probe(uri: str, timeout: float) -> requests.Response:
    """Ask a server whether it is there; OSError if nobody answers."""
    with http_session() as session:
        return session.get(f"{uri.rstrip('/')}/health", timeout=timeout, verify=session.verify)


def unreachable(uri: str, error: OSError) -> RegistryError:
    """What to do where no request to a server is answered. ``error``: of requests, or about a file of certificates."""
    import requests

    shown, cause = public_uri(uri), one_line(innermost(error), 200)
    if isinstance(error, requests.exceptions.SSLError) or not isinstance(error, requests.RequestException):
        return RegistryError(
            f"no secure connection to {shown}: {cause}",
            expected="a certificate by an authority that this machine trusts",
            remedy="put the path of the authority's certificate (PEM) into MLFLOW_TRACKING_SERVER_CERT_PATH or "
            "REQUESTS_CA_BUNDLE, or correct MLFLOW_TRACKING_URI; then run this again",
        )
    return RegistryError(
        f"no MLflow server answers at {shown} ({type(error).__name__})",
        expected="a server that can be reached from this machine",
        remedy="start it, correct MLFLOW_TRACKING_URI, or unset that to use a local mlflow.db; then run this again",
    )


def quiet_mlflow() -> None:
    """To be called before MLflow is imported."""
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)


def store_errors() -> tuple[type[Exception], ...]:
    """What MLflow lets pass of a store's client: that it is not installed, and what that of S3 raises."""
    if sys.modules.get("boto3") is None:
        return (ModuleNotFoundError,)
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError

    return ModuleNotFoundError, Boto3Error, BotoCoreError, ClientError


def store_remedy(error: Exception, otherwise: str) -> str:
    """What to do about an error of a store."""
    if isinstance(error, ModuleNotFoundError):
        return f"install the client of that store, the package {error.name!r} (for S3: pip install 'tapeout[s3]')"
    return otherwise


@contextmanager
def connect(*, write: bool) -> Generator[MlflowClient]:
    """A client for ``MLFLOW_TRACKING_URI``; what MLflow or the network raise inside becomes :class:`RegistryError`.

    ``write`` takes the registry's lock where there is one: a SQLite file is shared by processes of one machine, so a
    lock file beside it serializes them. A server has none; see ``promotion.promote`` for what that means.
    """
    uri = tracking_uri()
    quiet_mlflow()
    import requests
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    for name in ("mlflow", "alembic", "urllib3"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        if uri.startswith(("http://", "https://")):
            # Any answer will do: MLflow takes minutes to report that there is none.
            try:
                probe(uri, CONNECT_TIMEOUT_S)
            except OSError as error:
                raise unreachable(uri, error) from error
        with _locked(database) if write and (database := sqlite_path(uri)) else nullcontext():
            yield _client(uri)
    except requests.RequestException as error:
        raise unreachable(uri, error) from error
    except store_errors() as error:
        raise RegistryError(
            f"the store of the registry's files refused: {one_line(error)}",
            expected="a store that is up, and credentials for it in the environment",
            remedy=store_remedy(error, "correct that and run this again; every step continues where it stopped"),
        ) from error
    except (MlflowException, SQLAlchemyError) as error:
        reason = str(error).strip().splitlines()[0].replace(uri, public_uri(uri))
        if "database is locked" in str(error):
            raise RegistryError(
                f"another process holds the registry's database {public_uri(uri)}: {reason}",
                expected="a database that is free within the time that MLflow waits",
                remedy="stop what writes to it, such as `mlflow ui` or another run, and run this again; where several "
                "machines share the registry, start a server (`mlflow server`) and set MLFLOW_TRACKING_URI",
            ) from error
        if UNFINISHED in str(error):
            raise RegistryError(
                f"the registry's database {public_uri(uri)} is half made: what made or updated it was interrupted: "
                f"{reason}",
                expected="a database that MLflow has finished",
                remedy="delete it if it is a new one; else bring its backup back, and run `mlflow db upgrade`",
            ) from error
        raise RegistryError(
            f"the registry at {public_uri(uri)} refused: {reason}",
            remedy="correct that and run this again; every step continues where it stopped",
        ) from error


def _client(uri: str) -> MlflowClient:
    from mlflow import MlflowClient, set_tracking_uri

    try:
        set_tracking_uri(uri)  # MLflow's store of versions looks up logged models by a client of its own
        return MlflowClient(tracking_uri=uri)
    except ImportError as error:
        raise RegistryError(
            f"the registry at {public_uri(uri)} needs the package {error.name!r}",
            expected="the driver of its database",
            remedy=f"install {error.name} beside mlflow, or use a server: MLFLOW_TRACKING_URI=http://...",
        ) from error


def sqlite_path(uri: str) -> Path | None:
    """The file behind a SQLite address, or None for any other registry.

    >>> str(sqlite_path("sqlite:///mlflow.db")), str(sqlite_path("sqlite:////var/ml.db")), sqlite_path("http://x")
    ('mlflow.db', '/var/ml.db', None)
    """
    head, _, path = uri.partition(":///")
    return Path(path) if head.startswith("sqlite") and path else None


@contextmanager
def _locked(database: Path) -> Generator[None]:
    """Held by one process at a time, and freed when that process ends, however it ends."""
    from filelock import FileLock, Timeout

    path = database.with_name(f"{database.name}.lock")
    try:
        path.touch()  # FileLock would create a folder that is missing
    except OSError as error:
        raise RegistryError(
            f"cannot write {path}: {error.strerror}",
            expected="a writable folder for the registry's database",
            remedy="create the folder or correct MLFLOW_TRACKING_URI",
        ) from error
    try:
        with FileLock(path, timeout=LOCK_SECONDS):
            yield
    except Timeout as error:
        raise RegistryError(
            f"another process has held {path} for {LOCK_SECONDS:.0f} seconds",
            expected="one register, promote or rollback at a time",
            remedy="wait for it to finish, or stop it; the lock ends with its process",
        ) from error
