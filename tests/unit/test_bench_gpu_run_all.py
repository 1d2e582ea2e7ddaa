"""The run for a machine with a GPU, rehearsed from end to end, and that its checks find what they are for."""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.gpu import goals, llama, prepare, run_all
from benchmarks.gpu.driver import Launch
from benchmarks.gpu.parts import engine as engine_part
from benchmarks.gpu.parts import linears as linears_part
from benchmarks.gpu.parts import sanitizer as sanitizer_part
from benchmarks.gpu.place import LeftOutError, Place, milliseconds, place_here
from engines.compile import build
from engines.kernels.cuda import HOST_FILE, compiler
from engines.kernels.cuda.parameters import BlockLinear, Weight
from engines.kernels.cuda.plan import PLAN_FILE, LaunchPlan
from engines.load import find_target
from engines.protocol import Entry, Result
from engines.targets.cuda.engine import CudaEngine
from quantization.compressed_tensors import open_checkpoint
from tapeout.errors import ArtifactError, FingerprintError
from tapeout.quantized import round_to_nearest
from tapeout.schemes import Scheme
from tests.cuda_bundles import MAX_TOKENS, small_graph
from tests.lowering import FixedWeights

ROOT = Path(__file__).parents[2]

# What a machine has that builds nothing: PyTorch with its needs, numpy, and what the prepared folder brings along.
THERE = (
    *("numpy", "torch", "torchgen", "functorch", "sympy", "mpmath", "networkx", "jinja2", "markupsafe", "fsspec"),
    *("filelock", "typing_extensions", "setuptools", "pkg_resources", "_distutils_hack"),
    *("pydantic", "pydantic_core", "annotated_types", "typing_inspection", "psutil"),
    *("pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "pygments"),
)
BARE = f"""
import importlib.abc, importlib.metadata, sys
INSTALLED = {{*importlib.metadata.packages_distributions()}} - {{*{THERE!r}}}
class NotThere(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top in INSTALLED and not top.startswith("__editable__") and top not in ("tapeout", "engines", "benchmarks"):
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, NotThere())
"""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a rehearsal needs of a prepared folder."""
    folder = tmp_path_factory.mktemp("gpu") / "kernels"
    prepare.prepare(folder, levels=(), python=None)
    return folder


@pytest.fixture
def place(kernels: Path, tmp_path: Path) -> Place:
    return place_here(kernels, tmp_path / "scratch", rehearsal=True)


def run_here(kernels: Path, out: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.gpu.run_all", str(kernels), "--out", str(out), *words]
    return subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
    )


def test_a_rehearsal_runs_every_part_on_a_machine_that_builds_nothing(kernels: Path, tmp_path: Path) -> None:
    """And goes on where it stopped: what is done is not run again."""
    bare, out = tmp_path / "bare", tmp_path / "out"
    bare.mkdir()
    (bare / "sitecustomize.py").write_text(BARE)
    tool = tmp_path / "bin" / "compute-sanitizer"  # runs what it is given
    tool.parent.mkdir()
    tool.write_text('#!/bin/sh\nshift 4\nexec "$@"\n')
    tool.chmod(0o755)
    path = f"{tool.parent}{os.pathsep}{os.environ['PATH']}"
    done = run_here(kernels, out, "--rehearsal", PYTHONPATH=str(bare), PATH=path)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((out / "results.json").read_text())
    status = {name: part["status"] for name, part in results["parts"].items()}
    left_out = dict.fromkeys(("profile", "ort_cuda"), run_all.LEFT_OUT)
    assert status == {part.name: run_all.DONE for part in run_all.PARTS} | left_out
    found = {name: part["found"] for name, part in results["parts"].items()}
    checks = [line["holds"] for lines in found.values() for line in lines if "holds" in line]
    assert len(checks) > 20 and all(checks)
    assert {line["name"] for line in found["steps"]} >= {"decode", "prefill"}
    assert {line["peer"] for line in found["linears"] if "peer" in line} == {
        *("torch bf16", "_weight_int4pack_mm", "_scaled_mm", "triton"),
    }
    assert [line for line in found["steps"] if line.get("peer") and "ms" in line], "the model in PyTorch runs"
    page = (out / "gpu.md").read_text()
    assert "A rehearsal" in page and goals.table({}) in page  # its times are no figures of a GPU
    before = {path.name: path.stat().st_mtime_ns for path in out.glob("*.jsonl")}
    again = run_here(kernels, out, "--rehearsal", "--again", "machine")
    assert again.returncode == 0, again.stdout + again.stderr
    after = {path.name: path.stat().st_mtime_ns for path in out.glob("*.jsonl")}
    assert [name for name in before if before[name] != after[name]] == ["machine.jsonl"]


def options(kernels: Path, out: Path, *words: str) -> argparse.Namespace:
    return run_all.arguments([str(kernels), "--out", str(out), "--rehearsal", *words])


def test_a_part_that_outlasts_its_limit_is_stopped_and_the_next_run_does_it(
    kernels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_all, "PARTS", (run_all.Part("steps", 0),))  # type: ignore[arg-type]
    assert run_all.run(options(kernels, tmp_path)) == 3
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["parts"]["steps"]["status"] == run_all.CUT
    monkeypatch.setattr(run_all, "PARTS", (run_all.Part("profile", 60),))
    assert run_all.run(options(kernels, tmp_path, "--seconds", "0")) == 3
    assert json.loads((tmp_path / "results.json").read_text())["parts"]["profile"]["status"] == run_all.NO_TIME
    assert "| profile | no time left |" in (tmp_path / "gpu.md").read_text()
    assert run_all.run(options(kernels, tmp_path)) == 0
    assert json.loads((tmp_path / "results.json").read_text())["parts"]["profile"]["status"] == run_all.LEFT_OUT


def test_lines_of_a_part_that_was_stopped_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_text('{"name": "decode", "ms": 1.5}\n{"name": "dec')
    assert run_all.read_lines(path) == [{"name": "decode", "ms": 1.5}]
    assert run_all.read_lines(tmp_path / "none") == []


def test_results_of_other_kernels_are_not_mixed(kernels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_all, "PARTS", ())
    (tmp_path / "results.json").write_text('{"place": {"gpu": "another"}, "parts": {}}')
    with pytest.raises(ArtifactError, match="another") as caught:
        run_all.run(options(kernels, tmp_path))
    assert caught.value.remedy == "give another --out"


def test_a_machine_without_gpu_or_kernels_is_one_clear_error(kernels: Path, tmp_path: Path) -> None:
    done = run_here(kernels, tmp_path / "out")
    assert done.returncode == 2 and "libcuda.so.1" in done.stderr and "Traceback" not in done.stderr
    with pytest.raises(ArtifactError, match="no kernels in") as caught:
        place_here(tmp_path, tmp_path, rehearsal=True)
    assert "benchmarks.gpu.prepare" in (caught.value.remedy or "")
    with pytest.raises(FingerprintError):
        place_here(kernels, tmp_path, rehearsal=False)


STATUSES = ((run_all.WRONG, 1), (run_all.BROKEN, 2), (run_all.CUT, 3), (run_all.NO_TIME, 3), (run_all.DONE, 0))


@pytest.mark.parametrize(("status", "code"), STATUSES)
def test_the_exit_code_and_the_page_say_what_went_wrong(status: str, code: int) -> None:
    check = {"name": "logits of level host", "holds": status != run_all.WRONG}
    parts: dict[str, Any] = {part.name: {"status": run_all.DONE, "seconds": 1, "found": []} for part in run_all.PARTS}
    parts["engine"] = {"status": status, "seconds": 2, "found": [check]}
    results = {"place": {"gpu": "H100", "level": "sm90", "rehearsal": False}, "parts": parts}
    assert run_all.exit_code(results) == code
    page = run_all.page(results)
    assert f"| engine | {status} |" in page
    assert ("Checks that have not held" in page) == (status == run_all.WRONG)


def test_goals_are_filled_by_what_was_measured() -> None:
    decode = {"name": "decode", "context": 1024}
    found = {
        "machine": [
            {"name": "gpu", "found": "NVIDIA H100 80GB HBM3"},
            {"name": "copy", "bytes_per_s": 3e12},
            {"name": "bf16 matmul", "flop_per_s": 8e14},
        ],
        "engine": [{"name": "the same bits alone and in a batch", "holds": True, "batch": 1}],
        "linears": [
            {"name": "linear", "ours": "w4", "linear": "qkv", "M": 1, "ms": 0.010},
            {"name": "linear", "peer": goals.INT4, "linear": "qkv", "M": 1, "ms": 0.011},
            {"name": "linear", "ours": "w4", "linear": "o", "M": 16, "ms": 0.010},
            {"name": "linear", "peer": goals.INT4, "linear": "o", "M": 16, "ms": 0.009},
        ],
        "attention": [{"name": "attention", "ours": "int8", "bytes_per_s": rate} for rate in (1e12, 2.1e12)],
        "steps": [
            decode | {"ours": "w4", "graph": True, "batch": 8, "ms": 2.0, "host_ms": 0.2, "read_bytes": 4.5e9},
            decode | {"ours": "w4", "graph": False, "batch": 8, "ms": 9.0, "host_ms": 0.9, "read_bytes": 4.5e9},
            decode | {"ours": "w4", "graph": True, "batch": 1, "ms": 1.5, "host_ms": 0.1, "read_bytes": 3e9},
            decode | {"peer": goals.PEERS_GRAPH, "batch": 1, "ms": 6.0},
            {"name": "prefill", "tokens": 2048, "ms": 100.0, "flop": 2.8e13},
        ],
    }  # fmt: skip
    rows = dict(line.strip("| ").rsplit(" | ", 1) for line in goals.table(found).splitlines()[2:])
    measured = {what.split(" | ")[0]: value for what, value in rows.items()}
    assert measured["4-bit decode, batch 8: share of the roofline"] == "0.75"
    assert measured["4-bit decode, batch 32: share of the roofline"] == goals.NOT_RUN
    assert measured["step against torch bf16 in a CUDA graph, batch 1"] == "4.00x"
    assert measured["step against vLLM's published bf16 step on an H100, batch 8"] == "3.66x"
    assert measured["4-bit linear of up to 16 tokens against torch's `_weight_int4pack_mm`"] == "0.90x"
    assert measured["attention in decode, 8-bit KV: share of a copy's bandwidth"] == "0.70"
    assert measured["prefill of 2,048 tokens: share of the bf16 matmul rate"] == "0.35"
    assert measured["host time of a decode step outside the driver"] == "0.20 ms"
    assert measured["decode alone and in a batch"] == "bitwise"
    other = found | {"machine": [{"name": "gpu", "found": "NVIDIA H200"}]}
    assert "3.66x" not in goals.table(other)  # the published times are of an H100
    found["engine"].append({"name": "the same bits alone and in a batch", "holds": False, "batch": 3})
    assert "| bitwise | differs |" in goals.table(found)


def test_the_page_of_the_documentation_has_all_goals() -> None:
    page = (ROOT / "docs/benchmarks/gpu.md").read_text()
    for goal in goals.GOALS:
        assert f"| {goal.what} | {goal.first} | {goal.final} |" in page


def structure(plan: LaunchPlan) -> list[Any]:
    """Operations without names: values are called by the place of what wrote them first."""
    writer: dict[str, tuple[int, str]] = {}
    found = list[Any]()
    for number, one in enumerate(plan.operations):
        for field in one.writes:
            if field in one.pointers:
                writer.setdefault(one.pointers[field], (number, field))
        shapes = {field: plan.values[name].row_bytes for field, name in one.pointers.items() if name in plan.values}
        pointers = {field: writer.get(name, "a tensor") for field, name in one.pointers.items()}
        found.append((one.kind, pointers, shapes, one.numbers, sorted(one.writes), one.wanted))
    return found


def test_a_written_plan_is_the_one_that_a_build_makes(tmp_path: Path) -> None:
    graph = small_graph()
    checkpoint = open_checkpoint(graph.folder)
    eight, four = (Scheme(bits=bits, group_size=32, symmetric=True) for bits in (8, 4))
    tensors: dict[str, Any] = {name: checkpoint.linear(name) for name in checkpoint.names()}
    for group in graph.record.groups:
        scheme = eight if group.name.endswith("lm_head") else four
        tensors |= {name: round_to_nearest(checkpoint.weight(name), scheme) for name in group.members}
    scale = np.full((1, 64), 0.02, np.float32)
    scales = {f"layers.{layer}.{part}_scale": scale for layer in range(2) for part in "kv"}
    built = build(graph, FixedWeights(tensors), tmp_path / "bundle", target=find_target("cuda:host"), precision="w4",
                  slots=1, kv_scales=scales, parents={})  # fmt: skip
    made = LaunchPlan.model_validate_json((built.folder / PLAN_FILE).read_bytes())
    vocabulary = made.vocabulary
    shape = llama.Shape("same", 2, 64, 2, 1, 64, 96, vocabulary, MAX_TOKENS, group=32)
    plan, epsilon = llama.plan_of(shape), made.operations[1].numbers["epsilon"]
    for one in plan.operations:
        if one.kind == "norm":
            one.numbers["epsilon"] = epsilon
    assert structure(plan) == structure(made)
    sizes = {name: size for name, _, size in llama.tensors_of(shape)}
    assert sizes["layers.0.qkv.codes"] == made.tensors["layers.0.qkv.codes"].nbytes
    assert sizes["layers.1.down.scales"] == made.tensors["layers.1.down.scales"].nbytes
    assert sizes["cosines"] == made.tensors["rotary.cos.0"].nbytes
    assert {name for one in plan.operations for name in one.pointers.values()} - plan.values.keys() <= {
        *sizes, "attention.sums", "attention.rows", "attention.ended", "linear.sums", "linear.ended",
        *(f"past_key_values.{layer}.{part}" for layer in range(2) for part in ("key", "value")),
    }  # fmt: skip


def test_bytes_of_the_large_shape_are_those_of_the_roofline() -> None:
    """4.25 GB of weights and 65,536 bytes of an 8-bit cache a token, as the goals count them."""
    assert llama.EIGHT_BILLION.weight_bytes == pytest.approx(4.25e9, rel=0.02)
    assert llama.EIGHT_BILLION.cache_bytes(1) == 65536


class Checks:
    """A record that keeps what did not hold."""

    def __init__(self) -> None:
        self.failed = set[str]()
        self.held = 0

    def __call__(self, name: str, **found: Any) -> None:
        if found.get("holds") is False:
            self.failed.add(name)
        self.held += found.get("holds", False)


def test_planted_neighbours_that_change_logits_are_found(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    known, record = CudaEngine.step, Checks()

    def leaking(self: CudaEngine, batch: Sequence[Entry]) -> list[Result]:
        results = known(self, batch)
        for result in results:
            if result.logits is not None and len(batch) == 3:
                result.logits[0, 5] += np.float32(1e-3)
        return results

    monkeypatch.setattr(CudaEngine, "step", leaking)
    engine_part.run(place, record)
    assert record.failed >= {"the same bits alone and in a batch"} and record.held


def test_planted_scales_of_other_channels_are_found(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    known, record = linears_part.by_row_pair, Checks()
    monkeypatch.setattr(linears_part, "by_row_pair", lambda values: np.roll(known(values), 1, axis=-1).copy())
    linears_part.run(place, record)
    assert record.failed == {"linear against float64"}


def test_linears_are_checked_in_all_of_their_kernels(kernels: Path) -> None:
    """Also on a GPU of 188 multiprocessors. That of 32 tokens and many outputs is in the tests of kernels."""
    library, found = ctypes.CDLL(str(kernels / Path(HOST_FILE).name)), set[str]()
    for tokens in linears_part.TOKENS:
        launch, weight = Launch(), Weight(None, None, None, linears_part.CHECKED, 4096, 4, 6, 1)
        parameters = BlockLinear(weight, None, None, None, None, None, None, tokens)
        library.tapeout_cuda_block_linear(ctypes.byref(parameters), ctypes.c_uint32(188 * 3 // 4), ctypes.byref(launch))
        found.add(launch.kernel.decode())
    kinds = (("few", 1), ("few", 2), ("split", 4), ("split", 8), ("whole", 8))
    assert found == {f"linear_{kind}_F16_4_plain_{groups}" for kind, groups in kinds}


class Streams:
    """PyTorch's, of which no work ends before somebody waits for it."""

    def __init__(self) -> None:
        self.waiting, self.stream, self.calls = True, "default", 0

    def enter(self, stream: str) -> AbstractContextManager[None]:
        @contextmanager
        def entered() -> Iterator[None]:
            before, self.stream = self.stream, stream
            yield
            self.stream = before

        return entered()

    def wait(self) -> None:
        self.waiting = False

    def call(self) -> None:
        assert self.stream == "default" or not self.waiting, "reads what another stream has not made yet"
        self.calls += 1


@pytest.mark.parametrize("graph", [True, False])
def test_what_is_timed_has_been_made_before(
    kernels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, graph: bool
) -> None:
    """Streams of PyTorch do not wait for the default one, where tensors are filled: block tables among them."""
    streams = Streams()
    event = SimpleNamespace(record=lambda: None, synchronize=lambda: None, elapsed_time=lambda end: 6.0)
    for name, made in {
        "synchronize": streams.wait,
        "Stream": lambda: "side",
        "stream": streams.enter,
        "CUDAGraph": lambda: SimpleNamespace(replay=streams.call),
        "graph": lambda captured, stream: streams.enter(stream),
        "Event": lambda enable_timing: event,
        "_sleep": lambda cycles: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, made)
    assert milliseconds(Place(kernels, tmp_path, "sm90"), [streams.call] * 3, rounds=1, graph=graph) == 2.0
    assert streams.calls > 9


def test_a_sanitizer_that_reaches_no_gpu_is_left_out(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a container that keeps debuggers off, say: no kernel is accused."""
    tool, record = tmp_path / "compute-sanitizer", Checks()
    tool.write_text('#!/bin/sh\necho "========= Error: Device not supported. Please refer to"\nexit 9\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(LeftOutError, match="compute-sanitizer: Device not supported"):
        sanitizer_part.run(place, record)
    assert not record.failed
    tool.write_text("#!/bin/sh\necho 3 passed\nexit 9\n")
    sanitizer_part.run(place, record)
    assert record.failed == set(sanitizer_part.TOOLS)


def test_a_prepared_folder_has_the_library_of_fibers(kernels: Path) -> None:
    assert [path.name for path in kernels.iterdir()] == [Path(HOST_FILE).name]
    assert (kernels / Path(HOST_FILE).name).read_bytes() == compiler.host_library().read_bytes()
