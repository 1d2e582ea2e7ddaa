"""Compare an exported graph with transformers, in the ways an engine uses it and at positions up to the last.

Three comparisons, each with sequences that share a batch and are fed in pieces:

- a prefill and decode steps from the first position on, with left padding, against transformers' own attention;
- tokens at positions spread from the first to the last, in two pieces, against one call of transformers;
- pieces that start late, over a random state of that length, against transformers with its own masks and positions.

Random values are scaled by what each operator keeps: keys and values with their number, so that one key more or less in
a window changes the logits by far more than rounding does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.export.check.calls import PIECE, decoded, first_call, late, late_starts, spread
from pipeline.export.check.runs import KeptProgress, run_graph, run_transformers
from pipeline.export.check.state import Floats, RandomState, kept_tensors
from tapeout.layer_stream import LayerStream
from tapeout.operators import operator_nodes
from tapeout.portable_model import load_graph
from tapeout.segments import SEGMENT_BYTES, SegmentedGraph
from tapeout.state import Paged, token_bytes

CACHE_BYTES = 1 << 30  # of one sequence's random cache; of larger models, positions beyond are only spread over
CACHES_AT_ONCE = 1 << 29  # bytes of the caches of a segment's layers, which has fewer layers where they are long


@dataclass(frozen=True)
class Difference:
    """The largest difference of logits, relative to the largest absolute reference logit of its token."""

    error: float
    where: str


def largest_difference(model: Any, path: Path, work: Path, *, positions: int, seed: int = 0) -> Difference:
    """The largest difference of the graph at ``path`` from transformers, at positions up to ``positions - 1``.

    transformers runs the configuration beside the graph with the weights of ``model``. ``work``: a folder, where a
    check of the same may have been interrupted.
    """
    generator = np.random.default_rng(seed)
    nodes = operator_nodes(load_graph(path).graph)
    kept, states = kept_tensors(nodes), [state for node in nodes if (state := node.state("float32"))]
    weights = model.state_dict(keep_vars=True)
    probe = first_call(model, kept, generator)
    probe.cache = seen = dict[str, Floats]()
    per_token = max(1, token_bytes(states))
    before = RandomState(kept, min(positions, CACHE_BYTES // per_token) - PIECE - 1, seed, seen)
    steps = [probe, *decoded(model, kept, positions, generator), *spread(model, kept, positions, generator)]
    windows = {state.window for state in states if isinstance(state, Paged)}
    for start in late_starts(model, windows, before.longest):
        steps += late(model, before, start, generator)
    held = 4 * per_token * (before.longest + PIECE + 1)  # two sequences, before and after a call
    share = min(1.0, CACHES_AT_ONCE / held) * 4 * sum(weight.numel() for weight in model.parameters())
    run_graph(SegmentedGraph(path, segment_bytes=min(SEGMENT_BYTES, int(share))), steps, KeptProgress(work / "graph"))
    compared = [(step.logits, each) for step in steps for each in step.compared]
    run_transformers(
        LayerStream(path.parent, weights=weights),
        list(dict.fromkeys(each.sequence for _, each in compared)),
        before,
        KeptProgress(work / "transformers"),
    )
    errors = [
        Difference(_relative_error(logits[each.entry, each.columns], each.sequence.logits[each.rows]), each.where)
        for logits, each in compared
    ]
    return max(errors, key=lambda difference: difference.error)


def _relative_error(actual: NDArray[Any], expected: NDArray[Any]) -> float:
    if not (np.isfinite(actual).all() and np.isfinite(expected).all()):
        return math.inf
    scale = np.abs(expected).max(axis=-1, keepdims=True)
    return float((np.abs(actual - expected) / np.maximum(scale, 1e-6)).max())
