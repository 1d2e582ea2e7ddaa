"""A build holds one weight at a time, however many there are, and a large engine leaves them in their file."""

from __future__ import annotations

import re
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from engines.bundle import EngineBundle
from engines.compile import FLOAT_COPIES
from engines.load import load
from quantization.compressed_tensors import open_checkpoint
from tapeout.artifact import Artifact
from tapeout.portable_graph import PortableGraph
from tests.exported import build_float, family_graph

LAYERS, HIDDEN, INTERMEDIATE = 8, 512, 1536
SIZES = {"hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "num_hidden_layers": LAYERS}


@pytest.fixture(scope="module")
def graph() -> Artifact[PortableGraph]:
    return family_graph("llama", "bfloat16", **SIZES)


@pytest.fixture(scope="module")
def bundle(graph: Artifact[PortableGraph], tmp_path_factory: pytest.TempPathFactory) -> Artifact[EngineBundle]:
    return build_float(graph, tmp_path_factory.mktemp("bundle") / "bundle", slots=1)


def test_a_float_build_takes_a_few_times_its_largest_weight(graph: Artifact[PortableGraph], tmp_path: Path) -> None:
    weights = open_checkpoint(graph.folder)
    total = 4 * sum(weights.tensor(name).size for name in weights.names())
    largest = 4 * 2 * HIDDEN * INTERMEDIATE  # gate and up, merged
    assert total > 12 * largest
    tracemalloc.start()  # counts numpy's arrays
    try:
        bundle = build_float(graph, tmp_path / "bundle", slots=1)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert bundle.record.weight_bytes > 12 * largest
    assert peak < (FLOAT_COPIES + 1) * largest  # and the graph


def allocated() -> int:
    """Bytes of this process that no file backs."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) << 10


@pytest.mark.parametrize("large", [False, True])
def test_an_engine_that_is_large_for_the_machine_leaves_its_weights_in_the_file(
    large: bool, bundle: Artifact[EngineBundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    if large:
        monkeypatch.setattr("engines.sessions.available_memory", lambda: bundle.record.weight_bytes)
    before = allocated()
    engine: Any = load(bundle.folder, threads=1, slots=1)
    taken = allocated() - before
    assert engine is not None
    assert (taken < 0.5 * bundle.record.weight_bytes) == large
