"""Engines for GPUs that are not here: two layers of several families, compiled by the real compiler."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engines.bundle import EngineBundle, LoweredGraph
from engines.load import hardware_target, load
from engines.target import Compilation
from engines.targets.tensorrt import compiler
from tapeout import artifact
from tapeout.artifact import Artifact
from tapeout.errors import BuildError, FingerprintError
from tests.exported import family_graph
from tests.lowered import lowered as lowered_graph

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx_bindings") is None,
    reason='TensorRT-RTX is not installed: pip install -e ".[tensorrt-rtx]"',
)

FAMILIES = ("llama", "qwen3", "gemma2")
CAPABILITIES = ("sm86", "sm89", "sm120")
# What the compiler says its GPUs cannot do (TensorRT-RTX 1.7.1): FP8 begins with sm89.
REFUSED = {("fp8", "sm86"), ("auto", "sm86")}
Made = Callable[[str, str], Artifact[LoweredGraph]]


@pytest.fixture(scope="module")
def lowered(tmp_path_factory: pytest.TempPathFactory) -> Made:
    made: dict[tuple[str, str], Artifact[LoweredGraph]] = {}

    def get(family: str, precision: str) -> Artifact[LoweredGraph]:
        if (family, precision) not in made:
            folder = tmp_path_factory.mktemp(f"{family}-{precision}")
            made[family, precision] = lowered_graph(family_graph(family), folder / "lowered", precision)
        return made[family, precision]

    return get


def compiled(source: Artifact[LoweredGraph], folder: Path, capability: str, **changes: Any) -> Artifact[EngineBundle]:
    return hardware_target("tensorrt-rtx").compile(source, folder, Compilation(capability, (1,), **changes))


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("precision", ["int4", "fp8", "auto"])
@pytest.mark.parametrize("family", FAMILIES)
def test_two_layers_build(lowered: Made, tmp_path: Path, family: str, precision: str, capability: str) -> None:
    source = lowered(family, precision)
    if (precision, capability) in REFUSED:
        with pytest.raises(BuildError) as refused:
            compiled(source, tmp_path / "bundle", capability)
        assert capability in refused.value.found and "fp8" in refused.value.found
        assert "--precision int4" in refused.value.remedy
        return
    bundle = compiled(source, tmp_path / "bundle", capability)
    found = bundle.record.compiled
    assert found is not None
    assert (found.capability, found.executed_on) == (capability, None)
    assert found.engine_bytes == (bundle.folder / "engine.plan").stat().st_size
    nodes = source.record.operator_counts
    for layer, node in (
        ("KV_CACHE_UPDATE", "TensorScatter"),
        ("ATTENTION_INPUT", "Attention"),
        ("ROTARY_EMBEDDING", "RotaryEmbedding"),
        ("DEQUANTIZE", "DequantizeLinear"),
    ):
        assert found.network.get(layer, 0) == nodes.get(node, 0), layer
    assert [(p.batch, p.min_tokens, p.max_tokens) for p in found.profiles] == [(1, 1, 64), (1, 1, 1)]
    assert bundle.record.hardware[0].features == (capability,)


@pytest.mark.parametrize("layer", ["QUANTIZE", "DEQUANTIZE"])
def test_a_parser_that_drops_a_quantized_linear_is_found(
    lowered: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layer: str
) -> None:
    build: Any = vars(compiler)["_Build"]
    counts = build.operator_counts

    def one_less(self: Any) -> dict[str, int]:
        found = counts(self)
        return found | {layer: found[layer] - 1}

    monkeypatch.setattr(build, "operator_counts", one_less)
    with pytest.raises(BuildError, match=f"the parser made [0-9]+ {layer} layers of [0-9]+"):
        compiled(lowered("llama", "auto"), tmp_path / "bundle", "sm89")
    assert not (tmp_path / "bundle").exists()


def test_fp8_is_refused_where_the_gpu_has_none_with_the_compilers_reason(lowered: Made, tmp_path: Path) -> None:
    with pytest.raises(BuildError) as refused:
        compiled(lowered("llama", "fp8"), tmp_path / "bundle", "sm80")
    assert "cannot compile fp8 for sm80" in refused.value.found
    assert "fp8_e4m3" in refused.value.found, "the compiler's own words"
    assert "int4 or fp16" in refused.value.remedy
    assert not (tmp_path / "bundle").exists()
    # The next build hears its own compiler, not the one that was refused.
    after = compiled(lowered("llama", "fp8"), tmp_path / "bundle", "sm89").record.compiled
    assert after is not None and all("Int64 binding" in warning for warning in after.warnings)


def test_unknown_hardware_is_refused_with_the_list_before_anything_is_done() -> None:
    target = hardware_target("tensorrt-rtx")
    with pytest.raises(BuildError) as refused:
        target.require("sm90")
    assert "sm89, sm120" in refused.value.expected
    target.require("sm120")


def test_a_bundle_does_not_open_where_its_gpu_is_not(lowered: Made, tmp_path: Path) -> None:
    compiled(lowered("llama", "int4"), tmp_path / "bundle", "sm121")
    with pytest.raises(FingerprintError) as refused:
        load(tmp_path / "bundle")
    assert "lacks sm121" in refused.value.found


def test_progress_is_told_and_ctrl_c_leaves_nothing(lowered: Made, tmp_path: Path) -> None:
    phases: dict[str, tuple[int, int]] = {}

    def keep(phase: str, done: int, total: int) -> None:
        phases[phase] = (done, total)

    compiled(lowered("llama", "int4"), tmp_path / "whole", "sm89", progress=keep)
    assert len(phases) > 1 and all(done == total for done, total in phases.values())

    def interrupt(phase: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compiled(lowered("llama", "int4"), tmp_path / "cut", "sm89", progress=interrupt)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["whole"]


def test_the_same_build_twice_has_the_same_record(lowered: Made, tmp_path: Path) -> None:
    """The plan's bytes are the compiler's affair; what we say about it is ours."""
    first, second = (compiled(lowered("llama", "fp8"), tmp_path / name, "sm89") for name in ("a", "b"))
    assert first.record.model_copy(update={"compiled": None}) == second.record.model_copy(update={"compiled": None})
    assert first.parents == second.parents
    assert artifact.load(tmp_path / "a", EngineBundle).record == first.record
