"""Models of other shapes, quantized as the default recipe does it: the engine computes what the checkpoint says.

Two layers of random weights, each family in ``FAMILIES`` for what its shapes ask of the passes and kernels. A float
engine of every family is compared with transformers in tests/unit/test_export.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import Tensor

from engines.bundle import EngineBundle
from engines.compile import build
from engines.load import load
from engines.probe import Probe
from evals.parity import compare
from pipeline.artifact import Artifact
from pipeline.graph import PortableGraph
from pipeline.recipe import Calibrate, DataSource, KVCache, ModelSource, Quantize, Recipe, Rule
from quantization.attention_hook import kv_function
from quantization.calibrate import calibrate
from quantization.calibration import layer_file
from quantization.checkpoint import KV_SCALES, QuantizedModel
from quantization.compressed_tensors import open_checkpoint
from quantization.quantize import quantize
from quantization.reference import QuantizedReference
from tests.families import FAMILIES, LAYERS, MAX_POSITIONS, export_family

SHAPES = (
    "llama-group-of-8",  # heads of 128 channels, eight queries to each KV head, a head of its own
    "llama-odd-sizes",  # 997 tokens, 80 and 208 input channels, tied
    "llama-biases",  # on all linears
    "mistral-short-window",
    "gemma3",  # window, two rotary tables, norms of 1 + weight
    "phi",  # partial rotary, parallel blocks, biases on all linears and on the head
    "starcoder2",  # layer norms, no gate
    "cohere2",  # interleaved rotary, parallel blocks
    "glm4",  # interleaved rotary of half a head, fused gate and up
    "opt",  # learned positions
    "gpt2",  # weights stored [in, out]
)
ROWS, TOKENS = 8, 48
DOCUMENT_TOKENS, DOCUMENTS = 60, 4
# Relative to a row's largest logit, as tests/integration/test_batch_invariance.py explains: one row alone has other
# kernels than many. Over float weights, with the int8 cache, decoding showed 8e-7; where the inputs of products are
# rounded too, 1.2e-2 in one row of a hundred, and the rest as before.
REASSOCIATED, FLIPPED = 2e-5, 3e-2
DECODED = 6  # tokens after each prefill: what was rounded the other way once stays in the cache


def recipe(tokens: int = TOKENS) -> Recipe:
    """The default mix, with its int8 products and its int8 KV cache."""
    return Recipe(
        model=ModelSource(source="file:model"),
        data=DataSource(source="file:data"),
        calibrate=Calibrate(rows=ROWS, tokens=tokens),
        quantize=Quantize(
            rules=(
                Rule(match="layers.*.o", bits=4, group_size=32, symmetric=True),
                Rule(match="layers.*.gate_up", bits=8, activations="int8"),
                Rule(match="*", bits=8, group_size=64, symmetric=True),
            ),
            kv_cache=KVCache(dtype="int8"),
            scale_grid=4,
        ),
    )


def words(name: str, rows: int, tokens: int, seed: int) -> list[list[int]]:
    return np.random.default_rng(seed).integers(3, FAMILIES[name].vocab_size, (rows, tokens)).tolist()


def texts(rows: list[list[int]]) -> list[str]:
    return [" ".join(f"w{word}" for word in row) for row in rows]


@dataclass(frozen=True)
class Made:
    name: str
    graph: Artifact[PortableGraph]
    quantized: Artifact[QuantizedModel]
    bundle: Artifact[EngineBundle]


@pytest.fixture(scope="module", params=SHAPES)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    name, folder = request.param, tmp_path_factory.mktemp(request.param)
    graph = export_family(name, folder)
    calibration = calibrate(recipe(), graph, texts(words(name, ROWS, TOKENS, 1)), folder / "calibration")
    quantized = quantize(recipe(), graph, calibration, folder / "quantized")
    bundle = build(
        graph,
        open_checkpoint(quantized.folder),
        folder / "bundle",
        target="ort-cpu",
        precision="mix",
        slots=2,
        kv_scales=load_file(quantized.folder / KV_SCALES),
        parents={},
    )
    return Made(name, graph, quantized, bundle)


def test_every_linear_gets_the_kernel_its_rule_asks_for(made: Made) -> None:
    plan = made.bundle.record.plan
    groups = {group.name for group in made.graph.record.groups}
    assert {f"layers.{n}.{unit}" for n in range(LAYERS) for unit in ("qkv", "o", "gate_up", "down")} <= groups
    kernels = {unit: {kernel for name, kernel in plan.items() if f".{unit}" in name} for unit in ("o", "gate_up")}
    # Members that cannot be merged have a kernel each, named after them: then the group's name is not in the plan.
    assert all("4-bit" in kernel for kernel in kernels["o"]), kernels
    assert all("static int8 input" in kernel for kernel in kernels["gate_up"]), kernels
    assert not [f"{name}: {kernel}" for name, kernel in plan.items() if "fp32" in kernel]
    assert made.bundle.record.io.kv_dtype == "int8"


def test_the_engine_computes_what_the_quantized_checkpoint_says(made: Made) -> None:
    documents = words(made.name, DOCUMENTS, DOCUMENT_TOKENS, 2)
    head = next(group.members[0] for group in made.graph.record.groups if group.name == "lm_head")
    reference = QuantizedReference(made.quantized.folder, int8_activations=True)
    items = compare(Probe(made.bundle, threads=1), reference, documents, head=head)
    tokens = sum(item.tokens for item in items)
    assert sum(item.kl_sum for item in items) < 1e-5 * tokens  # the bounds of test_engine_parity.py
    assert sum(item.agree for item in items) > 0.995 * tokens
    assert max(item.worst_error for item in items) < 0.01  # the gate's bound


def test_one_token_at_a_time_gives_what_the_whole_does(made: Made) -> None:
    """Over sliding windows, in-place int8 caches, and the kernels of a single row."""
    (document,) = words(made.name, 1, DOCUMENT_TOKENS, 3)
    engine = load(made.bundle.folder, threads=1)
    try:
        whole = engine.prefill(0, document, rows=range(DOCUMENT_TOKENS))
        steps: list[np.ndarray] = []
        for start in range(DECODED, DOCUMENT_TOKENS, DECODED):
            engine.prefill(1, document[:start])
            steps += [engine.decode([document[n]], [n], first_slot=1)[0] for n in range(start, start + DECODED)]
    finally:
        engine.close()
    expected = whole[DECODED:]
    relative = np.abs(np.stack(steps) - expected).max(axis=1) / np.abs(expected).max(axis=1)
    assert relative.max() <= FLIPPED and np.median(relative) <= REASSOCIATED


@pytest.mark.parametrize("name", ["llama", "cohere2", "glm4", "phi"])
def test_key_thresholds_hold_at_positions_calibration_never_saw(name: str, tmp_path: Path) -> None:
    """Rotation moves length between two channels of a pair, wherever they lie in the head, never beyond its norm."""
    from transformers import AutoModelForCausalLM

    graph = export_family(name, tmp_path)
    rows = words(name, ROWS, 16, 4)
    calibration = calibrate(recipe(16), graph, texts(rows), tmp_path / "calibration")
    found = load_file(calibration.folder / layer_file(0))
    keys = later_keys(AutoModelForCausalLM.from_pretrained(graph.folder), rows)
    assert (keys <= found["layers.0.k_pair_absmax"] * 1.0001).all()
    assert (keys > found["layers.0.k_absmax"] * 1.01).any()  # the channels by themselves did grow


def later_keys(model: Any, rows: list[list[int]]) -> np.ndarray:
    """Largest magnitudes ``[H, D]`` of layer 0's keys of the same words, at every position up to the last."""
    largest: list[Tensor] = []

    def see(layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if layer == 0:
            largest.append(key.abs().amax((0, 2)))
        return key, value

    with torch.inference_mode(), kv_function(model, see):
        for row in rows:
            repeated = (row * (MAX_POSITIONS // len(row)))[:MAX_POSITIONS]
            model(input_ids=torch.tensor([repeated]), use_cache=False)
    return torch.stack(largest).amax(0).numpy()
