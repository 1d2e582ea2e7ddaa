"""A target is one folder: found by its name, lowered by its passes, opened by its own engine."""

from __future__ import annotations

import re
import sys
from collections.abc import Generator
from pathlib import Path

import numpy as np
import pytest

import engines.targets
from engines.compile import build
from engines.load import known_targets, load, target_module
from engines.passes import fixed_kv_cache, linears, rotary_tables
from quantization.compressed_tensors import open_checkpoint
from tapeout.errors import BuildError, FingerprintError
from tests.families import LAYERS, export_family

DOCUMENTED = re.findall(r"```python\n(.*?)```", (Path(__file__).parents[2] / "docs/targets.md").read_text(), re.DOTALL)
ENGINE = "from engines.targets.ort_cpu.engine import OrtCpuEngine as MyEngine\n"
FEATURES = """

FEATURES = ["chip-1"]


def features():
    return tuple(FEATURES)
"""


@pytest.fixture
def custom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[str]:
    """The folder ``my_chip`` of docs/targets.md on the path of ``engines.targets``, as if it lay beside the others."""
    folder = tmp_path / "targets" / "my_chip"
    folder.mkdir(parents=True)
    (written,) = DOCUMENTED
    (folder / "__init__.py").write_text(written.replace("my-runtime", "numpy") + FEATURES)
    (folder / "engine.py").write_text(ENGINE)
    monkeypatch.setattr(engines.targets, "__path__", [*engines.targets.__path__, str(folder.parent)])
    yield "my-chip"
    for name in ("engines.targets.my_chip", "engines.targets.my_chip.engine"):
        sys.modules.pop(name, None)


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
        parents={"graph": graph},
    )
    assert bundle.record.passes[0].name == "rotary_tables"
    assert set(bundle.record.fingerprint.libraries) == {"numpy"}
    assert load(tmp_path / "bundle").prefill(0, [3, 4, 5]).shape == (1, graph.record.vocab_size)
    target_module(custom).FEATURES[:] = ["chip-2"]  # type: ignore[attr-defined]
    with pytest.raises(FingerprintError, match="lacks chip-1"):
        load(tmp_path / "bundle")


def test_a_target_whose_passes_make_no_such_cache_is_refused(
    custom: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = export_family("llama", tmp_path)
    monkeypatch.setattr(target_module(custom), "PASSES", (rotary_tables, linears, fixed_kv_cache), raising=False)
    shape = (graph.record.kv_heads, graph.record.head_size)
    with pytest.raises(BuildError, match=rf"past_key_values\.0\.key is FLOAT after the passes of {custom}") as refused:
        build(
            graph,
            open_checkpoint(graph.folder),
            tmp_path / "bundle",
            target=custom,
            precision="float32",
            slots=2,
            kv_scales={f"layers.{n}.{part}_scale": np.ones(shape, np.float32) for n in range(LAYERS) for part in "kv"},
            kv_bits=4,
            parents={},
        )
    assert refused.value.expected == "UINT8, for a KV cache in int4"
    assert not (tmp_path / "bundle").exists()


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
