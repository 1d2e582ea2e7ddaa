"""Registries of MLflow without content. Making their tables takes seconds, copying them does not."""

from __future__ import annotations

import shutil
from importlib import metadata
from pathlib import Path

import pytest

from pipeline.registry import tracking
from tests.kept import kept

DATABASE = "mlflow.db"


def empty_registry(folder: Path) -> str:
    """The address of a new one in ``folder``."""
    shutil.copy(kept("registry", metadata.version("mlflow"), _make) / DATABASE, folder)
    return _address(folder)


def restored(pristine: Path, folder: Path, elsewhere: Path) -> str:
    """The address of a registry whose ``folder`` is again as its copy ``pristine``; records name that folder.

    Its database comes to lie in ``elsewhere``, new for each test: connections to one of before are kept open.
    """
    shutil.rmtree(folder)
    shutil.copytree(pristine, folder)
    shutil.move(folder / DATABASE, elsewhere / DATABASE)
    return _address(elsewhere)


def _make(folder: Path) -> None:
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("MLFLOW_TRACKING_URI", _address(folder))
        with tracking.connect(write=True) as client:
            client.search_experiments()


def _address(folder: Path) -> str:
    return f"sqlite:///{folder}/{DATABASE}"
