"""A target is one folder: found by its name, lowered by its passes, opened by its own engine."""

from __future__ import annotations

import sys
from collections.abc import Generator
from pathlib import Path

import pytest

import engines.targets
from engines.compile import build
from engines.load import known_targets, load, target_module
from pipeline.errors import BuildError, FingerprintError
from quantization.compressed_tensors import open_checkpoint
from tests.families import export_family

TARGET = """
LIBRARIES = ("numpy",)
FEATURES = ["chip-1"]


def __getattr__(name):
    if name != "PASSES":
        raise AttributeError(name)
    from engines.passes import grouped_query_attention, linear_kernels, linears, logit_rows, rotary_tables

    return (rotary_tables, linears, grouped_query_attention, logit_rows, linear_kernels)


def features():
    return tuple(FEATURES)


def open_engine(bundle, *, threads, slots):
    from engines.targets.ort_cpu.engine import OrtCpuEngine

    return OrtCpuEngine(bundle, threads=threads, slots=slots)
"""


@pytest.fixture
def custom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[str]:
    """A folder ``my_chip`` on the path of ``engines.targets``, as if it lay beside the others."""
    folder = tmp_path / "targets" / "my_chip"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(TARGET)
    monkeypatch.setattr(engines.targets, "__path__", [*engines.targets.__path__, str(folder.parent)])
    yield "my-chip"
    sys.modules.pop("engines.targets.my_chip", None)


def test_one_folder_is_a_target(custom: str, tmp_path: Path) -> None:
    graph = export_family("llama", tmp_path)
    bundle = build(
        graph,
        open_checkpoint(graph.folder),
        tmp_path / "bundle",
        target=custom,
        precision="float32",
        slots=2,
        kv_scales={},
        parents={"PortableGraph": graph.digest},
    )
    assert bundle.record.passes[0].name == "rotary_tables"
    assert set(bundle.record.fingerprint.libraries) == {"numpy"}
    assert load(tmp_path / "bundle").prefill(0, [3, 4, 5]).shape == (1, graph.record.vocab_size)
    target_module(custom).FEATURES[:] = ["chip-2"]  # type: ignore[attr-defined]
    with pytest.raises(FingerprintError, match="lacks chip-1"):
        load(tmp_path / "bundle")


def test_the_targets_are_the_folders() -> None:
    assert known_targets() == ("ort-cpu", "tensorrt", "tensorrt-rtx")


def test_an_unknown_target_is_told_the_known_ones() -> None:
    with pytest.raises(BuildError) as refused:
        target_module("abacus")
    assert refused.value.expected == "one of ort-cpu, tensorrt, tensorrt-rtx"


def test_a_recipe_cannot_ask_for_hardware_it_does_not_name(tmp_path: Path) -> None:
    graph = export_family("llama", tmp_path)
    with pytest.raises(BuildError, match="compiles for named hardware"):
        build(
            graph,
            open_checkpoint(graph.folder),
            tmp_path / "bundle",
            target="tensorrt-rtx",
            precision="float32",
            slots=2,
            kv_scales={},
            parents={},
        )
