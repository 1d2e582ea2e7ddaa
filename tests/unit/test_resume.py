"""A killed stage goes on at its last finished layer or segment, and ends with what it would have made without the kill.

The stage runs in a process of its own, which sends itself SIGKILL in the middle: nothing of it can clean up.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pipeline.export.export import export
from quantization.calibrate import calibrate
from quantization.calibration import Calibration, layer_file
from quantization.checkpoint import QuantizedModel
from quantization.plan import PrecisionPlan
from quantization.quantize import quantize
from quantization.statistics import Statistics, read_statistics
from tapeout.artifact import Artifact
from tapeout.layer_stream import LayerStream
from tapeout.portable_graph import LinearGroup, PortableGraph
from tapeout.recipe import BaseRecipe, Calibrate, DataSource, ModelSource, Plan, Quantize, Rule
from tapeout.segments import SegmentedGraph
from tests.checkpoints import checkpoint
from tests.exported import traced_once
from tests.graphs import llama_graph
from tests.killed import killed_after
from tests.plans import written_plan

ROOT = Path(__file__).parents[2]
SAMPLES = Calibrate(samples=8, tokens=48)
SEARCH = Quantize()
KILLED = """
import sys
from pathlib import Path
from quantization import calibrate, quantize
from quantization.calibration import Calibration
from quantization.compressed_tensors import ResumableWriter
from quantization.plan import PrecisionPlan
from tapeout.artifact import load
from tapeout.layer_stream import LayerStream
from tapeout.portable_graph import PortableGraph
from tapeout.recipe import Calibrate, Quantize
from tests.killed import killed_after
from tests.tiny import tiny_texts

stage, folder, count = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
if stage == "export-graph":
    from tests.unit.test_resume import export_in_segments
    from tapeout.segments import SegmentedGraph
    SegmentedGraph._run = killed_after(count, SegmentedGraph._run)
    export_in_segments(folder / "checkpoint", folder / "exported")
graph = load(folder / "graph", PortableGraph)
if stage == "calibrate":
    LayerStream.run = killed_after(count, LayerStream.run)
    calibrate.calibrate(Calibrate(samples=8, tokens=48), graph, tiny_texts(8, 1), folder / "calibration")
else:
    ResumableWriter.end_part = killed_after(count, ResumableWriter.end_part)
    known = load(folder / "known" / "calibration", Calibration), load(folder / "plan", PrecisionPlan)
    quantize.quantize(Quantize(), graph, *known, folder / "quantized")
"""
CHECKS = {"export-graph": (SegmentedGraph, "_run"), "export-transformers": (LayerStream, "run")}
Texts = Callable[[int, int], list[str]]


@pytest.fixture(scope="module")
def folder(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("resume")


@pytest.fixture(scope="module")
def graph(tiny_checkpoint: Path, folder: Path) -> Artifact[PortableGraph]:
    return llama_graph(tiny_checkpoint, folder / "graph")


@pytest.fixture(scope="module")
def calibration(graph: Artifact[PortableGraph], tiny_texts: Texts, folder: Path) -> Artifact[Calibration]:
    return calibrate(SAMPLES, graph, tiny_texts(8, 1), folder / "known" / "calibration")


@pytest.fixture(scope="module")
def plan(graph: Artifact[PortableGraph], folder: Path) -> Artifact[PrecisionPlan]:
    rules = Plan(schemes=(Rule(match="*", bits=8, group_size=32, symmetric=True),))
    recipe = BaseRecipe(model=ModelSource(source="file:m"), data=DataSource(source="file:d"), plan=rules)
    return written_plan(recipe, graph, folder / "plan")


@pytest.fixture(scope="module")
def quantized(
    graph: Artifact[PortableGraph], calibration: Artifact[Calibration], plan: Artifact[PrecisionPlan], folder: Path
) -> Artifact[QuantizedModel]:
    return quantize(SEARCH, graph, calibration, plan, folder / "known" / "quantized")


def kill(stage: str, folder: Path, after: int) -> Path:
    """The hidden folder that the killed stage leaves; its artifact is not there.

    It fits what another process makes, whatever that knows and whatever the order of its sets.
    """
    command = [sys.executable, "-c", KILLED, stage, str(folder), str(after)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    name = {"calibrate": "calibration", "quantize": "quantized"}.get(stage, "exported")
    assert not (folder / name).exists()
    return folder / f".{name}.work"


def kill_fork(stage: str, folder: Path, after: int) -> Path:
    """The same of an export, killed in a copy of this process, which has the trace and needs no seconds to start."""
    if (child := os.fork()) == 0:
        owner, name = CHECKS[stage]
        setattr(owner, name, killed_after(after, getattr(owner, name)))
        try:
            export_in_segments(folder / "checkpoint", folder / "exported")
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert not (folder / "exported").exists()
    return folder / ".exported.work"


def damage(path: Path) -> None:
    """One bit of the last byte: the file keeps its length, its header and its name."""
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def export_in_segments(source: Path, folder: Path) -> Artifact[PortableGraph]:
    """As export does it, a weight at a time. What a killed process left fits only if it traced the same graph."""
    with pytest.MonkeyPatch.context() as patch:
        traced_once(patch)
        patch.setattr("pipeline.export.check.difference.SEGMENT_BYTES", 1)
        return export(source, "", folder, max_positions=64, tolerance=1e-3, seed=0, parents={})


@contextmanager
def counted_calls() -> Generator[Counter[str]]:
    """By stage of the check: how often it computes a segment or a layer for one call."""
    calls = Counter[str]()

    def counted(stage: str, function: Any) -> Any:
        def run(*args: Any, **options: Any) -> Any:
            calls[stage] += 1
            return function(*args, **options)

        return run

    with pytest.MonkeyPatch.context() as patch:
        for stage, (owner, name) in CHECKS.items():
            patch.setattr(owner, name, counted(stage, getattr(owner, name)))
        yield calls


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, Counter[str]]:
    """A checkpoint, and what its export ends with when nothing kills it: its digest, and the calls it took."""
    folder = tmp_path_factory.mktemp("whole")
    source = checkpoint(folder / "checkpoint")
    with counted_calls() as calls:
        return source, export_in_segments(source, folder / "graph").digest, calls


@pytest.fixture(scope="module", params=CHECKS)
def killed(
    request: pytest.FixtureRequest, whole: tuple[Path, str, Counter[str]], tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    """A stage of the check, and the hidden folder that its kill left."""
    source, _, calls = whole
    kill_export = kill if request.param == "export-graph" else kill_fork
    left = kill_export(request.param, source.parent, after=2 * calls[request.param] // 3)
    return request.param, left.rename(tmp_path_factory.mktemp(request.param) / left.name)


@pytest.mark.parametrize("damaged", [False, True])
def test_the_check_of_an_export_goes_on_after_a_kill(
    damaged: bool, killed: tuple[str, Path], whole: tuple[Path, str, Counter[str]], tmp_path: Path
) -> None:
    stage, left = killed
    source, digest, calls = whole
    work = shutil.copytree(left, tmp_path / left.name)
    if damaged:
        damage(work / stage.removeprefix("export-"))
    with counted_calls() as again:
        assert export_in_segments(source, tmp_path / "exported").digest == digest
    assert not work.exists()
    total = calls[stage]
    assert again[stage] == total if damaged else total // 3 <= again[stage] < 9 * total // 10


@pytest.fixture(scope="module")
def killed_calibrate(graph: Artifact[PortableGraph], folder: Path) -> Path:
    left = kill("calibrate", folder, after=1 + 2 * 8 + 3)  # the stream's own call, two layers, and into the third
    return left.rename(folder / "killed calibrate")


@pytest.fixture(scope="module")
def killed_quantize(calibration: Artifact[Calibration], plan: Artifact[PrecisionPlan], folder: Path) -> Path:
    left = kill("quantize", folder, after=2)  # two layers are written, and the third is searched
    return left.rename(folder / "killed quantize")


@pytest.mark.parametrize("damaged", ["", layer_file(0), "hidden-002", "hidden-002.carried", "cut"])
def test_calibrate_goes_on_after_a_kill(
    damaged: str,
    graph: Artifact[PortableGraph],
    calibration: Artifact[Calibration],
    killed_calibrate: Path,
    tiny_texts: Texts,
    folder: Path,
) -> None:
    work = shutil.copytree(killed_calibrate, folder / ".calibration.work")
    if damaged == "cut":
        (work / "hidden-002").write_bytes((work / "hidden-002").read_bytes()[:-4000])
    elif damaged:
        damage(work / damaged)
    before = (work / layer_file(1)).stat().st_ino
    again = calibrate(SAMPLES, graph, tiny_texts(8, 1), folder / "calibration")
    assert again.digest == calibration.digest
    assert ((again.folder / layer_file(1)).stat().st_ino == before) == (not damaged)
    shutil.rmtree(again.folder)


@pytest.mark.parametrize("damaged", ["", "part-00000", "cut"])
def test_quantize_goes_on_after_a_kill(
    damaged: str,
    graph: Artifact[PortableGraph],
    calibration: Artifact[Calibration],
    plan: Artifact[PrecisionPlan],
    quantized: Artifact[QuantizedModel],
    killed_quantize: Path,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    work = shutil.copytree(killed_quantize, folder / ".quantized.work")
    assert (work / "part-00000").is_file()
    if damaged == "cut":
        (work / "part-00000").write_bytes((work / "part-00000").read_bytes()[:-4000])
    elif damaged:
        damage(work / damaged)
    written = (work / "part-00001").stat().st_ino
    made: list[str] = []

    def watched(calibration: Artifact[Calibration], group: LinearGroup) -> Statistics:
        made.append(group.name)
        return read_statistics(calibration, group)

    monkeypatch.setattr("quantization.quantized_layers.read_statistics", watched)
    again = quantize(SEARCH, graph, calibration, plan, folder / "quantized")
    assert again.digest == quantized.digest
    assert any(name.startswith("layers.0.") for name in made) == bool(damaged)
    assert not any(name.startswith("layers.1.") for name in made)
    assert written in {path.stat().st_ino for path in again.folder.iterdir()}  # a part is a shard: nothing is copied
    assert len({path.stat().st_mode for path in again.folder.iterdir()}) == 1  # readable for all that read the record
    shutil.rmtree(again.folder)
