"""Weights of experts that are left in their file: the same answers, and how much of them is in memory."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from engines import load as loading
from engines.bundle import WEIGHTS_FILE, EngineBundle
from engines.compile import step_bytes
from engines.kernels import cpu as native
from engines.kernels.operators import EXPERTS
from engines.load import experts_mapped, load
from engines.protocol import FloatArray, MapsWeights
from engines.sequences import Sequences
from engines.targets.ort_cpu import paged_engine
from engines.weight_pages import SAMPLED, Extent, WeightPages, major_faults, shared_extents
from pipeline.cli import doctor
from runtime.engine.core import EngineCore
from runtime.engine.opening import open_bundle
from runtime.wire.limits import Limits
from runtime.wire.messages import GenerateRequest
from runtime.wire.start import EngineSettings
from tapeout.artifact import Artifact
from tapeout.errors import BuildError, RequestError
from tests.exported import build_float, family_graph
from tests.family_engines import PROMPTS, words
from tests.paging import FAMILY, coded_mixture, drop_pages, float_mixture

pytestmark = pytest.mark.skipif(native.level() is None, reason=native.unsupported())
LAYERS = 2


@pytest.fixture(scope="module", params=["codes", "floats"])
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Artifact[EngineBundle]:
    folder = tmp_path_factory.mktemp(FAMILY)
    return coded_mixture(folder) if request.param == "codes" else float_mixture(folder / "bundle")


@pytest.fixture
def mapped(bundle: Artifact[EngineBundle]) -> Iterator[Sequences]:
    engine = Sequences(load(bundle.folder, threads=2, map_experts=True))
    yield engine
    engine.close()


def answers(engine: Sequences) -> list[FloatArray]:
    """Logits of prompts and of steps over all of them."""
    rows = [words(FAMILY, 1, length + 3, length)[0] for length in PROMPTS[: engine.slots]]
    found = [engine.prefill(slot, row[:-3], positions=range(len(row) - 3)) for slot, row in enumerate(rows)]
    steps = (3, 2, 1)
    return found + [engine.decode([row[-s] for row in rows], [len(row) - s for row in rows]) for s in steps]


def resident(engine: Sequences, *, exact: bool = True) -> int:
    assert isinstance(engine.engine, MapsWeights)
    found = engine.engine.resident_bytes(exact=exact)
    assert found is not None
    return found


def test_a_step_of_more_tokens_is_expected_to_read_more_experts(
    bundle: Artifact[EngineBundle], mapped: Sequences, tmp_path: Path
) -> None:
    model, reads = ir.load(str(bundle.folder / "model.onnx")), mapped.engine.capabilities.reads
    for tokens in (1, 2, 16, 256):
        assert reads(tokens) == pytest.approx(step_bytes(model, tokens) / step_bytes(model), rel=1e-3)
    assert reads(1) == 1 and reads(256) > 3
    (experts,) = bundle.record.experts
    assert (experts.experts, experts.chosen) == (32, 2)
    assert EngineCore(mapped.engine, Limits()).scheduler.costs.worth(1) == 0.5
    dense = load(build_float(family_graph("llama"), tmp_path / "bundle", slots=1).folder, threads=1)
    assert dense.capabilities.reads(64) == 1
    dense.close()


def test_answers_have_the_same_bits(bundle: Artifact[EngineBundle], mapped: Sequences) -> None:
    copied = Sequences(load(bundle.folder, threads=2, map_experts=False))
    try:
        assert copied.engine.capabilities.mapped_bytes == 0
        for one, other in zip(answers(copied), answers(mapped), strict=True):
            assert np.array_equal(one, other) and np.isfinite(one).all()
    finally:
        copied.close()


def test_experts_alone_are_mapped(bundle: Artifact[EngineBundle], mapped: Sequences) -> None:
    """Those of a page or more, each from where it lies: in whole pages."""
    graph = onnx.load(str(bundle.folder / "model.onnx"), load_external_data=False).graph
    read = {name for node in graph.node if node.op_type in EXPERTS for name in node.input}
    sizes = [
        int(entry.value)
        for tensor in graph.initializer
        for entry in tensor.external_data
        if tensor.name in read and entry.key == "length"
    ]
    pages = [-(-size // mmap.PAGESIZE) for size in sizes if size >= mmap.PAGESIZE]
    assert len(pages) >= 2 * LAYERS  # gate with up, and down, at least
    experts = mapped.engine.capabilities.mapped_bytes
    assert experts == sum(pages) * mmap.PAGESIZE
    extents = shared_extents(bundle.folder / WEIGHTS_FILE)
    assert sum(extent.size for extent in extents) == experts
    mapped.close()
    assert not shared_extents(bundle.folder / WEIGHTS_FILE)


def test_pages_that_were_dropped_are_counted_and_read_again(bundle: Artifact[EngineBundle], mapped: Sequences) -> None:
    before, whole = answers(mapped), mapped.engine.capabilities.mapped_bytes
    drop_pages(bundle)
    left, faults = resident(mapped), major_faults()
    assert left < whole / 2
    after = answers(mapped)
    assert all(np.array_equal(one, other) for one, other in zip(before, after, strict=True))
    assert major_faults() > faults
    assert left < resident(mapped) <= whole


def test_experts_are_mapped_where_memory_has_no_room(
    bundle: Artifact[EngineBundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = bundle.record.weight_bytes
    for available, expected in ((2 * weights, False), (weights, True)):
        monkeypatch.setattr(loading, "available_memory", lambda available=available: available)
        assert experts_mapped(bundle) == expected
        assert experts_mapped(bundle, True) and not experts_mapped(bundle, False)
        engine = load(bundle.folder, threads=1)
        assert bool(engine.capabilities.mapped_bytes) == expected
        engine.close()


def test_a_server_is_told_what_is_left_in_the_file(bundle: Artifact[EngineBundle]) -> None:
    opened = open_bundle(bundle.folder, EngineSettings(threads=1, map_experts=True))
    core = EngineCore(opened.engine, Limits())
    try:
        mapped = opened.info.mapped_bytes
        assert 0 < mapped == core.stats().mapped_bytes
        drop_pages(bundle)
        core.add(GenerateRequest("a", [5, 6, 7], 2), 0)
        while core.busy:
            core.step(0)
        assert core.stats().page_faults > 0
    finally:
        core.close()


def test_doctor_says_that_memory_has_no_room(bundle: Artifact[EngineBundle], monkeypatch: pytest.MonkeyPatch) -> None:
    assert "left in their file" not in doctor.bundle(bundle.folder).found
    monkeypatch.setattr(loading, "available_memory", lambda: bundle.record.weight_bytes)
    assert "experts are left in their file" in doctor.bundle(bundle.folder).found


def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    dense = build_float(family_graph("llama"), tmp_path / "bundle", slots=1)
    assert not experts_mapped(dense)
    with pytest.raises(RequestError, match="has no experts that ort-cpu can leave in their file"):
        load(dense.folder, map_experts=True)


def test_kernels_that_copy_experts_are_refused(bundle: Artifact[EngineBundle], monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of a bundle from before."""
    monkeypatch.setattr(paged_engine, "leave_experts", lambda *_: None)
    with pytest.raises(BuildError, match="have copied all experts"):
        load(bundle.folder, threads=1, map_experts=True)


@pytest.fixture
def half_read(tmp_path: Path) -> Path:
    """A file of 8,192 pages of which the first half is in memory."""
    path, size = tmp_path / "file", 8192 * mmap.PAGESIZE
    with path.open("wb+") as file:
        file.write(bytes(size))
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), size // 2, 0, os.POSIX_FADV_DONTNEED)
    return path


def test_an_estimate_is_near_the_number_of_pages(half_read: Path) -> None:
    size, page = half_read.stat().st_size, mmap.PAGESIZE
    pages = WeightPages(half_read, (Extent(0, size // 4), Extent(size // 4, size // 2), Extent(size * 3 // 4, page)))
    exact, estimate = pages.resident(exact=True), pages.resident()
    assert exact == size // 2
    assert estimate == pytest.approx(exact, abs=pages.size / SAMPLED)
    pages.close()
    assert pages.resident() is None


def test_the_owner_alone_is_told_what_is_in_memory(half_read: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: half_read.stat().st_uid + 1)
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert WeightPages(half_read, (Extent(0, mmap.PAGESIZE),)).resident() is None
