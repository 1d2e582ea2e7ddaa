"""Engines of the families in tests/families.py: quantized with all that the default recipe uses, or in float."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engines.bundle import EngineBundle
from engines.compile import build
from engines.load import find_target, load, open_probe
from engines.protocol import FloatArray
from engines.sequences import Sequences
from evals.kinds.parity.measure import compare
from quantization.calibrate import calibrate
from quantization.checkpoint import KVScales, QuantizedModel
from quantization.compressed_tensors import open_checkpoint
from quantization.quantize import quantize
from quantization.reference import QuantizedReference
from tapeout.artifact import Artifact
from tapeout.portable_graph import PortableGraph
from tapeout.recipe import BaseRecipe, Calibrate, DataSource, KVCache, ModelSource, Plan, Quantize, Rule
from tests.exported import family_graph
from tests.families import vocab_size
from tests.plans import written_plan

ROWS, TOKENS = 8, 48  # calibration samples and tokens of each
PROMPTS = (5, 13, 22, 31)  # tokens: shorter and longer than the sliding windows of the families
DECODED = 4
PIECES = (9, 2, 1, 17)  # in which the longest prompt is fed again
INT8 = KVCache(dtype="int8")


def recipe(tokens: int = TOKENS) -> BaseRecipe:
    """Every kind of product: static int8, blocks of 8, 6 and 4 bits; tables in 6 bits, int8 keys and values."""
    return BaseRecipe(
        model=ModelSource(source="file:model"),
        data=DataSource(source="file:data"),
        calibrate=Calibrate(samples=ROWS, tokens=tokens),
        plan=Plan(
            schemes=(
                Rule(match="layers.0.o", bits=4, group_size=32, symmetric=True),
                Rule(match="layers.1.qkv", bits=8, group_size=64, symmetric=True),
                Rule(match="layers.0.gate_up", bits=6, group_size=64, symmetric=True),
                Rule(match="layers.*.down", bits=8, group_size=128, symmetric=True),
                Rule(match="layers.*.experts_*", bits=8, group_size=32, symmetric=True),
                Rule(match="*", bits=8, activations="int8"),
            ),
            kv_cache=INT8,
        ),
        quantize=Quantize(scale_grid=4),
    )


def words(name: str, rows: int, tokens: int, seed: int) -> list[list[int]]:
    return np.random.default_rng(seed).integers(3, vocab_size(name), (rows, tokens)).tolist()


def texts(rows: list[list[int]]) -> list[str]:
    return [" ".join(f"w{word}" for word in row) for row in rows]


@dataclass(frozen=True)
class Made:
    name: str
    graph: Artifact[PortableGraph]
    quantized: Artifact[QuantizedModel]
    bundle: Artifact[EngineBundle]


def make(
    name: str,
    folder: Path,
    rules: Sequence[Rule] = (),
    recurrent_state: str = "float32",
    kv_cache: KVCache = INT8,
    **settings: int,
) -> Made:
    """The family quantized and built. ``rules``: of its linears, in place of every kind of product.

    ``settings``: of its configuration.
    """
    graph, given = family_graph(name, **settings), recipe()
    changes = {"recurrent_state": recurrent_state, "kv_cache": kv_cache, **({"schemes": tuple(rules)} if rules else {})}
    given = given.model_copy(update={"plan": given.plan.model_copy(update=changes)})
    calibration = calibrate(given.calibrate, graph, texts(words(name, ROWS, TOKENS, 1)), folder / "calibration")
    plan = written_plan(given, graph, folder / "plan")
    quantized = quantize(given.quantize, graph, calibration, plan, folder / "quantized")
    bundle = build(
        graph,
        open_checkpoint(quantized.folder),
        folder / "bundle",
        target=find_target("ort-cpu"),
        precision="mix",
        slots=2,
        kv_scales=KVScales.read(quantized.folder).scales,
        kv_dtype=quantized.record.kv_cache.dtype,
        recurrent_dtype=quantized.record.recurrent_state,
        parents={},
    )
    return Made(name, graph, quantized, bundle)


def reference_of(made: Made) -> QuantizedReference:
    kept = made.quantized.record.recurrent_state
    return QuantizedReference(made.quantized.folder, int8_activations=True, recurrent_state=kept)


def difference_from_checkpoint(made: Made, documents: int, tokens: int) -> str:
    """Where the engine does not compute what its checkpoint says; empty: it does. Bounds of test_engine_parity.py."""
    head = next(group.members[0] for group in made.graph.record.groups if group.name == "lm_head")
    reference = reference_of(made)
    probe = open_probe(made.bundle, made.bundle.folder.parent, threads=1)
    items = compare(probe, reference, words(made.name, documents, tokens, 2), head=head)
    count = sum(item.tokens for item in items)
    kl, agreed = sum(item.kl_sum for item in items) / count, sum(item.agree for item in items) / count
    worst = max(item.worst_error for item in items)
    wrong = [f"KL of {kl:.1e} per token"] * (not kl < 1e-5)
    wrong += [f"agreement of {agreed:.1%}"] * (not agreed > 0.995)
    wrong += [f"a linear off by {worst:.1e}"] * (not worst < 0.01)  # the gate's bound
    return ", ".join(wrong)


def transformers_logits(model: Any, tokens: Sequence[int]) -> FloatArray:
    """Of every token, in one call."""
    import torch

    with torch.no_grad():
        return model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0].numpy()


def relative_error(actual: FloatArray, expected: FloatArray) -> float:
    """Largest error of a row over the row's largest logit."""
    assert actual.shape == expected.shape and np.isfinite(actual).all()
    return float((np.abs(actual - expected) / np.abs(expected).max(axis=-1, keepdims=True)).max())


def prefill_in_pieces(engine: Sequences, slot: int, tokens: Sequence[int], pieces: Sequence[int]) -> FloatArray:
    """Logits of every token, fed in pieces of these sizes."""
    parts: list[FloatArray] = []
    start = 0
    for size in pieces:
        parts.append(engine.prefill(slot, tokens[start : start + size], start=start, positions=range(size)))
        start += size
    return np.concatenate(parts)


def largest_errors(bundle: Artifact[EngineBundle], model: Any, name: str) -> dict[str, float]:
    """Relative logit errors of an engine against ``model``, by how it is used: prefill, batched decode, in pieces."""
    rows = [words(name, 1, length + DECODED, length)[0] for length in PROMPTS]
    expected = [transformers_logits(model, row) for row in rows]
    engine, found = Sequences(load(bundle.folder, threads=1)), dict[str, float]()
    try:
        found["prefill"] = max(
            relative_error(engine.prefill(slot, row[:length], positions=range(length)), expected[slot][:length])
            for slot, (length, row) in enumerate(zip(PROMPTS, rows, strict=True))
        )
        found["decode"] = 0.0
        for step in range(DECODED):  # sequences of different lengths together
            lengths = [length + step for length in PROMPTS]
            logits = engine.decode([row[n] for row, n in zip(rows, lengths, strict=True)], lengths)
            wanted = np.stack([e[n] for e, n in zip(expected, lengths, strict=True)])
            found["decode"] = max(found["decode"], relative_error(logits, wanted))
        pieces = prefill_in_pieces(engine, 0, rows[-1], PIECES)  # over what the slot held before
        found["pieces"] = relative_error(pieces, expected[-1][: sum(PIECES)])
    finally:
        engine.close()
    return found
