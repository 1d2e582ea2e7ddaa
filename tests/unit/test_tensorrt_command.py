"""`tapeout build` on a small model: what it writes for every GPU, refuses, and says; with a target of one folder."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Generator
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml
from rich.console import Console
from safetensors.numpy import save_file

import engines.targets
from engines.bundle import EngineBundle, LoweredGraph
from engines.compile import build
from engines.kernels.cpu import LEVELS
from engines.load import find_target
from evals.check import Outcome
from evals.kinds.portable import PortableReport
from evals.verdict import Verdict
from pipeline.cli import build as command
from pipeline.cli.main import main
from pipeline.stages import hardware
from quantization.calibration import Calibration, statistics_file
from quantization.checkpoint import KVScheme, QuantizedModel
from quantization.compressed_tensors import open_checkpoint
from quantization.statistics import Statistics
from tapeout import artifact
from tapeout.portable_graph import PortableGraph
from tapeout.recipe import Calibrate, Quantize
from tests.exported import family_graph
from tests.families import VOCAB_SIZE

ROOT = Path(__file__).parents[2]
MATRIX = yaml.safe_load((ROOT / "pipeline/targets/dvc.yaml").read_text())["stages"]["engines"]
# Its compiler makes a file of the lowered graph's name, and knows no chip called "b0".
TARGET = """
from engines.bundle import CompiledEngine, EngineBundle
from engines.target import HardwareTarget
from engines.targets.tensorrt import TARGET as TENSORRT
from tapeout import artifact
from tapeout.errors import BuildError


class MyChip(HardwareTarget):
    name = "my-chip"
    capabilities = TENSORRT.capabilities

    def passes(self):
        return TENSORRT.passes()

    def open(self, bundle, *, threads, slots, snapshots=None, map_experts=False):
        raise NotImplementedError

    def compile(self, lowered, folder, wanted):
        if wanted.hardware == "b0":
            raise BuildError("mychipc cannot compile for b0: no such wires", remedy="choose a1")
        wanted.progress("wiring", 1, 1)
        with artifact.create(folder, EngineBundle) as draft:
            (draft.folder / "engine.bin").write_text(lowered.digest)
            record = EngineBundle(
                **lowered.record.fields(),
                target=self.name,
                hardware=(self.fingerprint(),),
                compiled=CompiledEngine(
                    capability=wanted.hardware,
                    executed_on=None,
                    engine_bytes=64,
                    network={"WIRE": 3},
                    profiles=(),
                    warnings=(),
                    portable=wanted.evidence,
                ),
            )
            draft.finish(record, parents={"lowered": lowered})
        return artifact.load(folder, EngineBundle)


TARGET = MyChip()
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with params.yaml and what `dvc repro` leaves for a build: graph, calibration, float engine."""
    folder = tmp_path_factory.mktemp("project")
    artifacts = folder / "artifacts"
    shutil.copytree(family_graph("qwen3").folder, artifacts / "graph")
    graph = artifact.load(artifacts / "graph", PortableGraph)
    build(
        graph,
        open_checkpoint(graph.folder),
        artifacts / "baseline",
        target=find_target("ort-cpu"),
        precision="float32",
        slots=2,
        kv_scales={},
        parents={},
    )
    calibrate(graph, artifacts / "calibration")
    params = {
        "model": {"source": "file:m"},
        "data": {"source": "file:d"},
        "build": {"slots": 2},
        "benchmark": {"batches": [1, 2]},
    }
    (folder / "params.yaml").write_text(yaml.safe_dump(params))
    return folder


def calibrate(graph: artifact.Artifact[PortableGraph], folder: Path) -> None:
    """Statistics of Gaussian inputs."""
    rng = np.random.default_rng(0)
    files: dict[str, dict[str, np.ndarray]] = {}
    for group in graph.record.groups:
        x = rng.standard_normal((4 * group.in_features, group.in_features)).astype(np.float32)
        statistics = Statistics((x.T @ x)[None], (x.T @ x)[None], mean_abs=abs(x).mean(0), max_abs=abs(x).max(0))
        files.setdefault(statistics_file(group.name), {}).update(statistics.tensors(group.name))
    with artifact.create(folder, Calibration) as draft:
        for name, tensors in files.items():
            (draft.folder / name).parent.mkdir(exist_ok=True)
            save_file(tensors, draft.folder / name)
        record = Calibration(
            asked=Calibrate(),
            samples_hash="0",
            samples=1,
            holdout_samples=1,
            tokens_per_sample=1,
            tokens=1,
            layers=graph.record.layers,
            statistics=tuple(files),
            versions={},
        )
        draft.finish(record, parents={"graph": graph})


@pytest.fixture(autouse=True)
def here(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[Path]:
    """A folder of one's own to build in, with a target ``my_chip`` as if it lay beside the others."""
    (tmp_path / "artifacts").mkdir()
    for path in (project / "artifacts").iterdir():
        (tmp_path / "artifacts" / path.name).symlink_to(path)
    (tmp_path / "params.yaml").write_text((project / "params.yaml").read_text())
    folder = tmp_path / "targets"
    folder.mkdir()
    (folder / "my_chip.py").write_text(TARGET)
    monkeypatch.setattr(engines.targets, "__path__", [*engines.targets.__path__, str(folder)])
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(1)
    monkeypatch.setattr(
        hardware, "heldout_documents", lambda _: [rng.integers(3, VOCAB_SIZE, 12).tolist() for _ in range(3)]
    )
    yield tmp_path
    sys.modules.pop("engines.targets.my_chip", None)


def test_one_bundle_a_chip_with_evidence_and_no_verdict_but_inconclusive(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["build", "--target", "my-chip:a1,a2"]) == 0
    folder = here / "artifacts/targets/fp16"
    lowered = artifact.load(folder / "lowered", LoweredGraph)
    report = artifact.load(folder / "evidence", PortableReport)
    for chip in ("a1", "a2"):
        compiled = artifact.load(folder / f"my-chip-{chip}", EngineBundle).record.compiled
        assert compiled is not None and compiled.portable is not None and compiled.capability == chip
        assert compiled.portable.report == report.digest
        assert (compiled.portable.documents, compiled.portable.tokens) == (3, 33)
        assert 0 <= compiled.portable.kl < 1e-4 and compiled.portable.kl == report.record.kl
        verdict = artifact.load(folder / f"my-chip-{chip}-verdict", Verdict).record
        assert verdict.outcome is Outcome.INCONCLUSIVE
        assert any(f"not executed on {chip}" in check.reason for check in verdict.checks)
    assert report.parents["lowered"] == lowered.ref
    said = capsys.readouterr().out
    assert "portable evidence on 3 held-out documents" in said and "INCONCLUSIVE" in said


def test_a_chip_that_is_refused_does_not_keep_the_others_from_being_built(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["build", "--target", "my-chip:b0,a1", "--documents", "0"]) == 2
    captured = capsys.readouterr()
    assert "no such wires" in captured.err and "choose a1" in captured.err and "Traceback" not in captured.err
    assert "none: no evidence" in " ".join(captured.out.split())
    folder = here / "artifacts/targets/fp16"
    assert artifact.load(folder / "my-chip-a1", EngineBundle).record.compiled is not None
    assert not (folder / "my-chip-b0").exists()


@pytest.mark.usefixtures("native_operators")
def test_the_candidate_is_built_for_a_level_of_a_cpu(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["build", "--target", "my-chip:a1", "--precision", "int4", "--documents", "0"]) == 0
    least = [level for level in LEVELS if not level.refusal()][-1]
    checkpoint = here / "artifacts/targets/int4/quantized"
    assert main(["build", "--target", f"ort-cpu:{least.name}", "--checkpoint", str(checkpoint)]) == 0
    assert f"kernels for {least.name}" in capsys.readouterr().out
    built = artifact.load(here / f"artifacts/targets/ort-cpu-{least.name}", EngineBundle)
    assert [name for name in built.files if name.startswith("kernels/")] == [least.file]
    assert built.parents["quantized"] == artifact.load(checkpoint, QuantizedModel).ref


def test_the_candidate_is_built_for_a_target_that_does_not_run_here(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["build", "--target", "my-chip:a1", "--precision", "int4", "--documents", "0"]) == 0
    checkpoint = here / "artifacts/targets/int4/quantized"
    assert main(["build", "--target", "ort-cuda", "--checkpoint", str(checkpoint)]) == 0
    assert "set build.target to ort-cuda" in capsys.readouterr().out
    built = artifact.load(here / "artifacts/targets/ort-cuda", EngineBundle).record
    assert built.target == "ort-cuda" and built.operator_counts["MatMulNBits"]
    assert main(["build", "--target", "ort-cuda", "--explain"]) == 0
    assert "paged_attention" in capsys.readouterr().out


def test_int4_weights_are_quantized_on_the_calibration(here: Path) -> None:
    assert main(["build", "--target", "my-chip:a1", "--precision", "int4"]) == 0
    folder = here / "artifacts/targets/int4"
    quantized = artifact.load(folder / "quantized", QuantizedModel)
    schemes = {linear.scheme.name for linear in quantized.record.linears}
    assert schemes == {"4-bit g64", "4-bit g32", "fp32"}  # 96 inputs have no whole groups of 64
    assert quantized.record.asked == Quantize()
    bundle = artifact.load(folder / "my-chip-a1", EngineBundle).record
    assert artifact.load(folder / "lowered", LoweredGraph).parents["quantized"] == quantized.ref
    assert bundle.operator_counts["DequantizeLinear"] == sum(
        linear.scheme.bits == 4 for linear in quantized.record.linears
    )
    assert bundle.compiled is not None and bundle.compiled.portable is not None and bundle.compiled.portable.kl > 1e-6
    # Their scales are positive, so the pass has nothing to report but the head.
    declined = next(report.declined for report in bundle.passes if report.name == "int4_linears")
    assert len(declined) == 1 and "an output head" in declined[0]
    # The same codes, named, give the same graph.
    before = artifact.load(folder / "lowered", LoweredGraph).digest
    given = ["--checkpoint", str(folder / "quantized"), "--documents", "0"]
    assert main(["build", "--target", "my-chip:a1", "--precision", "int4", *given]) == 0
    assert artifact.load(folder / "lowered", LoweredGraph).digest == before


def test_a_checkpoint_with_a_4_bit_cache_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is compiled keeps keys and values in 16 bits, which is not what was asked for."""
    words = ["build", "--target", "my-chip:a1", "--precision", "int4", "--documents", "0"]
    assert main(words) == 0
    made = artifact.load(here / "artifacts/targets/int4/quantized", QuantizedModel)
    cache = KVScheme(dtype="int4", granularity="per_channel")
    with artifact.create(here / "four", QuantizedModel) as draft:
        for name in made.files:
            shutil.copy(made.folder / name, draft.folder / name)
        draft.finish(made.record.model_copy(update={"kv_cache": cache}), parents=made.parents)
    assert main([*words, "--checkpoint", str(here / "four")]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "keeps keys and values in 4 bits" in error and "plan.kv_cache.dtype int8" in error


@pytest.mark.parametrize(
    ("precision", "matched"), [("int4", "int4_linears"), ("fp8", "fp8_linears"), ("auto", "int4_linears")]
)
def test_explain_prints_every_pass_and_writes_nothing(
    here: Path, capsys: pytest.CaptureFixture[str], precision: str, matched: str
) -> None:
    assert main(["build", "--target", "my-chip", "--precision", precision, "--explain"]) == 0
    lines = capsys.readouterr().out.splitlines()
    row = next(line.split() for line in lines if line.strip().startswith(matched))
    assert row[1] == "14"  # seven linears in each of two layers
    assert not (here / "artifacts/targets").exists()


def test_the_table_of_engines_fits_a_terminal() -> None:
    """With a verdict in words. Planted: TensorRT's names of its layers, which 80 columns break in their midst."""
    network = {"ATTENTION_INPUT": 24, "KV_CACHE_UPDATE": 48, "ROTARY_EMBEDDING": 48, "CONSTANT": 812}
    compiled = SimpleNamespace(network=network, engine_bytes=1_512_300_000, warnings=["x"])
    check = SimpleNamespace(outcome=Outcome.FAIL, reason="perplexity is 1.13 times that of the reference")
    verdict = SimpleNamespace(record=SimpleNamespace(outcome=Outcome.FAIL, checks=[check]))
    bundle = SimpleNamespace(folder=Path("/here/tensorrt-rtx-sm120"), record=SimpleNamespace(compiled=compiled))
    built: Any = [SimpleNamespace(bundle=bundle, verdict=verdict, seconds=83.2)]
    console = Console(width=80, file=(printed_to := StringIO()))
    console.print(command.bundle_table(built))
    printed = printed_to.getvalue()
    assert max(map(len, printed.splitlines())) <= 80
    for text in ("tensorrt-rtx-sm120", "24 attention", "48 cache", "48 rotary", "1512", "perplexity", "reference"):
        assert text in printed


REFUSALS: dict[str, tuple[list[str], str]] = {
    "a target without a compile step": (["--target", "ort-cpu"], "no compile step"),
    "a level that there is not, explained": (["--target", "cuda:sm90,h100", "--explain"], "no level 'h100'"),
    "a level of a target without, explained": (["--target", "ort-cuda:sm90", "--explain"], "no level 'sm90'"),
    "a level that there is not": (["--target", "ort-cpu:sm89"], "no level 'sm89'"),
    "no hardware": (["--target", "my-chip"], "names no hardware"),
    "a precision where the plan decides": (["--target", "cuda", "--precision", "fp16"], "--precision fp16 for cuda"),
    "a precision that is none": (["--target", "my-chip:a1", "--precision", "int3"], "precision 'int3'"),
    "buckets that are no counts": (["--target", "my-chip:a1", "--batches", "1,x"], "--batches 1,x"),
}


@pytest.mark.parametrize(("words", "found"), REFUSALS.values(), ids=REFUSALS)
def test_what_cannot_be_built_is_refused_in_words(
    capsys: pytest.CaptureFixture[str], words: list[str], found: str
) -> None:
    assert main(["build", *words]) == 2
    error = capsys.readouterr().err
    assert found in error and "Traceback" not in error


def test_the_matrix_reads_files_that_are_there_and_runs_a_command_that_is() -> None:
    for path in MATRIX["deps"]:
        assert path.startswith("artifacts/") or (ROOT / path).exists(), path
    words = MATRIX["cmd"].replace("${item.precision}", "fp8").split()
    assert words[:2] == ["tapeout", "build"]
    name, capabilities = command.parse_target(words[words.index("--target") + 1])
    assert (name, capabilities) == ("tensorrt-rtx", ("sm89", "sm120"))
    assert MATRIX["matrix"]["precision"] == ["fp16", "int4", "fp8", "auto"]
    assert (ROOT / "pipeline/targets" / MATRIX["wdir"]).resolve() == ROOT
