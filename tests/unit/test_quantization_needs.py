"""Estimates of what calibrate and quantize take, and a stage that is refused before it starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantization.calibrate import calibrate
from quantization.needs import calibration_needs, quantization_needs, search_bytes
from quantization.units import fitted_schemes
from tapeout.errors import ResourceError
from tapeout.recipe import Calibrate
from tapeout.schemes import Scheme
from tests.graphs import llama_graph
from tests.tiny import tiny_texts

EIGHT_BITS = Scheme(bits=8, group_size=64, symmetric=True)


def test_estimates_follow_the_shapes(tiny_checkpoint: Path, tmp_path: Path) -> None:
    graph = llama_graph(tiny_checkpoint, tmp_path / "graph").record
    stored, _ = fitted_schemes(graph, {group.name: EIGHT_BITS for group in graph.groups}, EIGHT_BITS)
    weights = sum(group.in_features * sum(group.out_features) for group in graph.groups)
    disk = quantization_needs(graph, stored).disk_bytes
    assert weights <= disk <= 1.1 * weights
    few, many = (calibration_needs(graph, tokens) for tokens in (1000, 2000))
    assert many.disk_bytes - few.disk_bytes == 8 * 1000 * graph.hidden_size
    assert many.memory_bytes == few.memory_bytes  # hidden states lie in files
    down = next(group for group in graph.groups if group.name.endswith("down"))
    assert search_bytes(down) > 28 * down.in_features**2


def test_too_little_disk_is_refused_before_anything_is_written(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = llama_graph(tiny_checkpoint, tmp_path / "graph")
    monkeypatch.setattr("tapeout.resources.free_disk", lambda _: 1000)
    with pytest.raises(ResourceError, match=r"0\.0 GB of disk free"):
        calibrate(Calibrate(samples=4, tokens=32), graph, tiny_texts(4, 1), tmp_path / "calibration")
    assert [path.name for path in tmp_path.iterdir()] == ["graph"]
