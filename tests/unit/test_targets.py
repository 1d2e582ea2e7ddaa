"""A target is one module: found by its name, lowered by its passes, opened by its own engine."""

from __future__ import annotations

import re
import sys
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import engines.targets
from engines.bundle import EngineBundle
from engines.compile import build
from engines.kernels.sampling import Drawn, SamplingRow
from engines.kernels.serving import Clipping, Clippings, ValueCounts
from engines.load import at_level, find_target, graph_target, hardware_target, known_targets, load, open_probe
from engines.passes.graph import linears, rotary_tables
from engines.passes.tensorrt import fixed_kv_cache
from engines.sequences import Sequences
from engines.target import Passes, Target
from quantization.compressed_tensors import open_checkpoint
from runtime.engine.draw_check import SEEDS, draw_counts
from runtime.engine.opening import open_bundle
from runtime.engine.sampling import BatchSampler
from runtime.wire.messages import GenerateRequest, SamplingSettings
from runtime.wire.start import EngineSettings
from tapeout.artifact import Artifact
from tapeout.errors import BuildError, FingerprintError
from tests.exported import family_graph
from tests.families import LAYERS
from tests.lowered import lowered

DOCUMENTED = re.findall(r"```python\n(.*?)```", (Path(__file__).parents[2] / "docs/targets.md").read_text(), re.DOTALL)
ENGINE = "from tests.standard_engine import StandardEngine as MyEngine\n"
FEATURES = """

MyChip.chip = "chip-1"
MyChip.features = lambda self: (self.chip,)
"""


@pytest.fixture
def custom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[str]:
    """The module ``my_chip`` of docs/targets.md on the path of ``engines.targets``, as if it lay beside the others."""
    folder = tmp_path / "targets" / "my_chip"
    folder.mkdir(parents=True)
    (written,) = DOCUMENTED
    (folder / "__init__.py").write_text(written.replace("my-runtime", "numpy") + FEATURES)
    (folder / "engine.py").write_text(ENGINE)
    monkeypatch.setattr(engines.targets, "__path__", [*engines.targets.__path__, str(folder.parent)])
    yield "my-chip"
    for name in ("engines.targets.my_chip", "engines.targets.my_chip.engine"):
        sys.modules.pop(name, None)


def test_one_module_is_a_target(custom: str, tmp_path: Path) -> None:
    graph = family_graph("llama")
    bundle = build(
        graph,
        open_checkpoint(graph.folder),
        tmp_path / "bundle",
        target=graph_target(custom),
        precision="float32",
        slots=2,
        kv_scales={},
        parents={"graph": graph},
    )
    assert bundle.record.passes[0].name == "rotary_tables"
    assert set(bundle.record.hardware[0].libraries) == {"numpy"}
    assert Sequences(load(tmp_path / "bundle")).prefill(0, [3, 4, 5]).shape == (1, graph.record.vocab_size)
    with pytest.raises(BuildError, match="my-chip has no parity probe"):
        open_probe(bundle, tmp_path)
    find_target(custom).chip = "chip-2"  # type: ignore[attr-defined]
    with pytest.raises(FingerprintError, match="lacks chip-1"):
        load(tmp_path / "bundle")


def test_a_target_whose_passes_make_no_such_cache_is_refused(
    custom: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = family_graph("llama")
    monkeypatch.setattr(find_target(custom), "passes", lambda: Passes((rotary_tables, linears, fixed_kv_cache)))
    shape = (graph.record.kv_heads, graph.record.head_size)
    with pytest.raises(BuildError, match=rf"past_key_values\.0\.key is FLOAT after the passes of {custom}") as refused:
        build(
            graph,
            open_checkpoint(graph.folder),
            tmp_path / "bundle",
            target=graph_target(custom),
            precision="float32",
            slots=2,
            kv_scales={f"layers.{n}.{part}_scale": np.ones(shape, np.float32) for n in range(LAYERS) for part in "kv"},
            kv_dtype="int4",
            parents={},
        )
    assert refused.value.expected == "UINT8, for state in int4"
    assert not (tmp_path / "bundle").exists()


class ServingOnChip:
    """Kernels of a target that is no CPU, by the library of its bundles."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    def library(self, bundle: Artifact[EngineBundle]) -> Path:
        return bundle.folder / "chip.bin"

    def sampler(self, library: Path | None, vocab_size: int, threads: int) -> ChipSampler:
        self.asked.append((library, vocab_size))
        return ChipSampler()

    def clippings(self, library: Path | None) -> Clippings:
        self.asked.append((library,))
        return lambda: COUNTED


class ChipSampler:
    def draw(self, rows: Sequence[SamplingRow]) -> list[Drawn]:
        return [Drawn(7) for _ in rows]


COUNTED = Clipping(ValueCounts(90, 2), ValueCounts(7, 1))


def test_a_target_brings_the_kernels_that_serve(custom: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Served, and compared with numpy for the gate, are the draws of the target's own kernel."""
    graph = family_graph("llama")
    bundle = build(
        graph,
        open_checkpoint(graph.folder),
        tmp_path / "bundle",
        target=graph_target(custom),
        precision="float32",
        slots=2,
        kv_scales={},
        parents={"graph": graph},
    )
    kernels, library = ServingOnChip(), bundle.folder / "chip.bin"
    monkeypatch.setattr(type(find_target(custom)), "serving_kernels", kernels)
    opened = open_bundle(bundle.folder, EngineSettings())
    vocab_size = opened.info.vocab_size
    assert kernels.asked == [(library, vocab_size), (library,)]
    assert opened.clippings() == COUNTED
    logits = np.zeros((1, vocab_size), np.float32)
    request = GenerateRequest("a", [3], 1, SamplingSettings(temperature=1))
    sampler = BatchSampler(vocab_size, kernel=opened.kernel)
    sampler.add(request)
    assert sampler.choose(["a"], logits)[0].token == 7
    assert draw_counts(at_level(bundle), logits)["greedy"] == (len(SEEDS), len(SEEDS))  # numpy chooses token 0
    opened.engine.close()


def test_the_targets_are_the_modules() -> None:
    names = {path.stem.replace("_", "-") for path in Path(engines.targets.__path__[0]).glob("[!_]*")}
    assert set(known_targets()) == names >= {"ort-cpu", "tensorrt", "tensorrt-rtx"}
    for name in known_targets():
        assert find_target(name).name == name


def test_an_unknown_target_is_refused_with_the_known_ones() -> None:
    with pytest.raises(BuildError, match="no target 'abacus'") as refused:
        find_target("abacus")
    assert refused.value.expected == f"one of {', '.join(known_targets())}"


def test_a_recipe_names_no_hardware_and_a_compiler_needs_some() -> None:
    with pytest.raises(BuildError, match="tensorrt-rtx compiles for named hardware") as refused:
        graph_target("tensorrt-rtx")
    assert "ort-cpu" in refused.value.expected
    with pytest.raises(BuildError, match="ort-cpu has no compile step") as refused:
        hardware_target("ort-cpu")
    assert refused.value.expected.endswith("tensorrt, tensorrt-rtx")


@pytest.mark.parametrize(("family", "operator"), [("qwen3_moe", "Experts"), ("lfm2", "CausalConv")])
def test_a_target_refuses_operators_that_it_does_not_compute(family: str, operator: str, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=f"the model has {operator}, which tensorrt does not compute"):
        lowered(family_graph(family), tmp_path / "lowered", "fp16")
    assert not (tmp_path / "lowered").exists()


@pytest.mark.parametrize("name", known_targets())
def test_what_a_target_declares_it_implements(name: str) -> None:
    target = find_target(name)
    declared = {"probe": target.capabilities.parity_probe, "timer": target.capabilities.timed}
    assert {method: getattr(type(target), method) is not getattr(Target, method) for method in declared} == declared
    passes = target.passes()
    assert set(passes.attention) | set(passes.linears) <= set(passes.every)
    assert target.capabilities.timed <= bool(passes.attention and passes.linears)
