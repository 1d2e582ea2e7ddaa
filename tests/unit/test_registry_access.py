"""Where the credentials of a registry are sent: to the registry, and to no other server that a run names."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from pipeline.registry.access import ARTIFACTS, open_registry
from tests.file_server import Site, serve

FILES = {"/files/record.json": b"{}", f"/{ARTIFACTS}/files/record.json": b"{}"}


@contextmanager
def two_servers() -> Generator[tuple[Site, Site]]:
    """The registry, and another."""
    with serve(Site(dict(FILES))) as registry, serve(Site(dict(FILES))) as other:
        yield registry, other


@pytest.fixture(params=["token", "password"])
def credentials(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "token":
        monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "secret")
    else:
        monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "me")
        monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "secret")


@pytest.mark.usefixtures("credentials")
@pytest.mark.parametrize("root", ["{registry}/files", "mlflow-artifacts://{host}/files", "mlflow-artifacts:/files"])
def test_the_registry_gets_its_credentials(root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with two_servers() as (registry, _):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", registry.url)
        with open_registry() as opened:
            opened.fetch(
                root.format(registry=registry.url, host=urlsplit(registry.url).netloc), "record.json", tmp_path / "x"
            )
    (sent,) = registry.authorizations
    assert sent and sent.startswith(("Bearer ", "Basic "))


@pytest.mark.usefixtures("credentials")
@pytest.mark.parametrize(
    "root",
    [
        "{other}/files",
        "mlflow-artifacts://{host}/files",
        "{other}\\@{registry_host}/../files",  # requests reads the host before the backslash, urlsplit the one behind
    ],
)
def test_another_server_gets_none(root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with two_servers() as (registry, other):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", registry.url)
        hosts = {"host": urlsplit(other.url).netloc, "registry_host": urlsplit(registry.url).netloc}
        with open_registry() as opened:
            opened.fetch(root.format(other=other.url, **hosts), "record.json", tmp_path / "x")
    assert other.authorizations == [None] and not registry.requests
