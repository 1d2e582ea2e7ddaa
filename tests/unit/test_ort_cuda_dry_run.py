"""The real CUDA provider of onnxruntime-gpu over a stand-in for CUDA: placement, kernels, capture and replay.

Skipped where the package is not in the cache: `make fetch-onnxruntime-gpu` puts it there (256 MB).
"""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from engines.targets.ort_cuda.hardware import VERSION
from engines.targets.ort_cuda.steps import buckets
from tapeout.schemes import Scheme
from tests.exported import family_graph
from tests.ort_cuda.bundles import cuda_bundle, rounded
from tests.ort_cuda.dry_run import BATCHES
from tests.ort_cuda.standin import run_dry, unpacked_wheel

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the stand-in is a library of Linux on x86-64")

PHASES = ("prefill=2x5@0", "decode=3x1@5", "again=3x1@6", "alone=1x1@7", "wide=33x1@5", "mixed=2x3@8")
FAMILIES = ("llama-odd-sizes", "llama-biases", "qwen3", "gemma2", "mistral-short-window")
FOUR, EIGHT = (Scheme(bits=bits, group_size=32, symmetric=True) for bits in (4, 8))
# Whatever a step does beside its kernels: one copy each way, and one wait for the stream.
STEP = {"copy up": 1, "copy down": 1, "call cudaStreamSynchronize": 1}
SHAPE_OPERATORS = {"Concat", "Shape", "Gather", "Unsqueeze", "Squeeze"}


@pytest.fixture(scope="module")
def dry(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A dry run of a family, in float or with codes of 4 and 8 bits and an int8 cache."""
    unpacked_wheel()

    @cache
    def get(family: str, quantized: bool) -> Any:
        folder = tmp_path_factory.mktemp("dry") / "bundle"
        weights, _ = rounded(family, qkv=FOUR, o=EIGHT, gate_up=FOUR)
        cuda_bundle(family, folder, weights if quantized else None, int8_cache=quantized)
        return json.loads(run_dry("tests.ort_cuda.dry_run", str(folder), *PHASES))

    return get


def kernels(phase: dict[str, int], kind: str = "kernel") -> dict[str, int]:
    return {name.partition(" ")[2]: count for name, count in phase.items() if name.partition(" ")[0] == kind}


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_node_is_placed_on_the_gpu(dry: Any, family: str, quantized: bool) -> None:
    found = dry(family, quantized)
    assert found["version"] == VERSION
    assert set(found["placed"]) == {"CUDAExecutionProvider"}
    assert found["placed"]["CUDAExecutionProvider"].count("PagedAttention") == family_graph(family).record.layers


def test_what_is_left_on_the_cpu_computes_shapes(dry: Any) -> None:
    placed = dry("phi", False)["placed"]
    assert set(placed["CPUExecutionProvider"]) <= SHAPE_OPERATORS


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_decode_step_is_a_copy_up_a_replay_and_a_copy_down(dry: Any, family: str, quantized: bool) -> None:
    phases = dry(family, quantized)["phases"]
    steps = [phases[name] for name in ("decode", "again", "alone")]
    replayed = {step.pop("call replayed kernel") for step in steps}
    assert len(replayed) == 1 and 0 < replayed.pop() < 30 * family_graph(family).record.layers
    assert all(step == STEP | {"call cudaGraphLaunch": 1} for step in steps)


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_bucket_is_captured_once_when_the_engine_is_opened(dry: Any, family: str, quantized: bool) -> None:
    phases = dry(family, quantized)["phases"]
    count = len(buckets(family_graph(family).record.max_positions, BATCHES))
    assert phases["open"]["call cudaStreamBeginCapture"] == count
    assert not any("call cudaStreamBeginCapture" in phase for name, phase in phases.items() if name != "open")
    captured = kernels(phases["open"], "captured")
    assert sum(captured.values()) == phases["open"]["call replayed kernel"]
    attention = [name for name in captured if "PagedDecodeSplitKV" in name]
    assert sum(captured[name] for name in attention) == count * family_graph(family).record.layers


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_is_allocated_copied_or_awaited_while_capturing(dry: Any, family: str, quantized: bool) -> None:
    phases = dry(family, quantized)["phases"]
    assert not [name for phase in phases.values() for name in phase if name.startswith("violation")]
    assert not [name for name in phases["open"] if name.startswith("captured-")]


@pytest.mark.parametrize("family", FAMILIES[1:])  # the first has no widths that the fused kernel takes
def test_weights_in_codes_are_never_decoded(dry: Any, family: str) -> None:
    phases = dry(family, True)["phases"]
    for name, phase in phases.items():
        found = kernels(phase) | kernels(phase, "captured")
        assert not [kernel for kernel in found if "equantize" in kernel], name
    captured, layers = kernels(phases["open"], "captured"), family_graph(family).record.layers
    count = len(buckets(family_graph(family).record.max_positions, BATCHES))
    assert sum(times for name, times in captured.items() if "FpAIntB" in name) == 3 * layers * count
    assert captured.get("cublasGemmEx", 0) == (layers + 1) * count  # down and lm_head, which are in float16


@pytest.mark.parametrize("quantized", [False, True])
def test_other_steps_run_without_a_graph(dry: Any, quantized: bool) -> None:
    phases = dry("llama-odd-sizes", quantized)["phases"]
    for name in ("prefill", "wide", "mixed"):
        assert "call cudaGraphLaunch" not in phases[name] and kernels(phases[name])
        assert {kind: count for kind, count in phases[name].items() if not kind.startswith("kernel")} == STEP
    assert any("PagedDecodeSplitKV" in kernel for kernel in kernels(phases["wide"]))
    assert not any("PagedDecodeSplitKV" in kernel for kernel in kernels(phases["prefill"]))


def test_kernels_that_do_nothing_give_no_tokens(dry: Any) -> None:
    """The stand-in's memory is NaN: the engine says so instead of answering."""
    errors = dry("llama-odd-sizes", False)["errors"]
    assert {name: len(found) for name, found in errors.items()} == {
        "prefill": 2,
        "decode": 3,
        "again": 3,
        "alone": 1,
        "wide": 33,
        "mixed": 2,
    }
    assert all("not finite" in error for found in errors.values() for error in found)


def test_a_graph_with_a_node_of_the_cpu_is_refused(tmp_path: Path) -> None:
    unpacked_wheel()
    planted = run_dry("tests.ort_cuda.planted", str(tmp_path))
    assert planted.startswith("refused: ")


def test_the_stand_in_finds_what_a_capture_must_not_do() -> None:
    unpacked_wheel()
    assert json.loads(run_dry("tests.ort_cuda.planted", "capture")) == {
        "violation cudaDeviceSynchronize": 1,
        "violation cudaMalloc": 1,
        "violation cudaMemcpy": 1,
    }
