"""What every test may use: a trained tiny llama and passages it has not seen. No test reaches the network."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # workers of xdist share the cores

from tests import tiny


@pytest.fixture(scope="session")
def tiny_checkpoint() -> Path:
    """Folder of a Hugging Face float32 checkpoint (llama, 4 layers) trained once per machine; do not write to it."""
    return tiny.tiny_checkpoint()


@pytest.fixture(scope="session")
def tiny_texts() -> Callable[[int, int], list[str]]:
    """``tiny_texts(count, seed)``: passages of about 280 tokens the tiny llama was not trained on."""
    return tiny.tiny_texts
