"""What every test may use: a trained tiny llama and passages it has not seen. No test reaches the network."""

from __future__ import annotations

import gc
import logging
import os
import platform
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # workers of xdist share the cores

from engines.kernels import cpu as native
from engines.kernels.cpu import LEVELS, Level
from tests import tiny
from tests.native import without_native_operators

if "PYTEST_XDIST_WORKER" in os.environ:  # the process that only hands out tests collects none
    gc.disable()  # until all is imported: imports make many objects and no garbage

# Timing is never asserted: on a loaded machine a first example can take longer than any deadline.
settings.register_profile("tapeout", deadline=None)
settings.load_profile("tapeout")


def pytest_collection_finish() -> None:
    """Modules and tests stay to the end: the collector passes over them, and looks at the rest less often."""
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)
    gc.enable()
    # pytest adds a handler to loggers that do not propagate, and torch writes down every step of a trace where this one
    # has a handler.
    logging.getLogger("torch.__trace").propagate = True


# Half a minute of processor time or more each, where nothing is kept from an earlier run.
LONG = frozenset(
    f"test_{name}.py"
    for name in (
        *("endurance", "passes_one_by_one", "pipeline", "recurrent_pipeline", "registry_to_server", "verdict_routes"),
        *("families", "sanitizers", "export", "registry", "resume", "stored_types", "trace", "cuda", "cuda_cubins"),
        *("bench_gpu_run_all", "gguf_mixtures"),
    )
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take long come first: a worker that begins one of them last keeps all others waiting."""
    items.sort(key=lambda item: item.path.name not in LONG)


@pytest.fixture(scope="session")
def tiny_checkpoint() -> Path:
    """Folder of a Hugging Face float32 checkpoint (llama, 4 layers) trained once per machine; do not write to it."""
    return tiny.tiny_checkpoint()


@pytest.fixture(scope="session")
def tiny_texts() -> Callable[[int, int], list[str]]:
    """``tiny_texts(count, seed)``: passages of about 280 tokens the tiny llama was not trained on."""
    return tiny.tiny_texts


@pytest.fixture
def stock_operators(monkeypatch: pytest.MonkeyPatch) -> str:
    """Linears and embeddings are lowered to ONNX Runtime's own operators. Why is what reports say then."""
    return without_native_operators(monkeypatch)


@pytest.fixture
def native_operators() -> None:
    """Passes write operators of our own; the test is skipped where those cannot run."""
    reason = native.unsupported()
    if reason:
        pytest.skip(reason)


OWN_LEVELS = [level for level in LEVELS if level.machine == platform.machine()]  # tests/levels runs the others


@pytest.fixture(scope="module", params=OWN_LEVELS, ids=lambda level: level.name)
def level(request: pytest.FixtureRequest) -> Iterator[Level]:
    """A test runs for every level of native kernels that this processor has, as if it had no better one."""
    if refusal := request.param.refusal():
        pytest.skip(refusal)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "cpu_features", lambda: request.param.needed)
        yield request.param


@pytest.fixture(params=["native", "stock"])
def operators_of(request: pytest.FixtureRequest) -> str:
    """A test runs in both worlds: its linears and embeddings are operators of our own, then ONNX Runtime's."""
    request.getfixturevalue(f"{request.param}_operators")
    return request.param
