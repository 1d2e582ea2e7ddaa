"""Compare an exported graph with transformers, in the ways an engine uses it and at positions up to the last.

Three comparisons, each with sequences that share a batch and are fed in pieces:

- a prefill and decode steps from the first position on, with left padding, against transformers' own attention;
- tokens at positions spread from the first to the last, in two pieces, against one call of transformers;
- pieces that start late, over a random cache of that length, against transformers with its own masks and positions.

The last two cost few tokens: a position is an input, and a cache need not be computed to be long. Random values are
scaled with their number, so that one key more or less in a window changes the logits by far more than rounding does.

All tokens are chosen first. Then every call of the graph goes through a segment before the next one, and every sequence
through a layer of transformers before the next one: either side reads its weights once and holds a part of them. What
a segment or a layer left is kept in a file, so that an interrupted check goes on there.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from tapeout.layer_stream import LayerState, LayerStream
from tapeout.operators.attention import AttentionNode
from tapeout.operators.attention.in_torch import after_tokens
from tapeout.portable_model import load_graph
from tapeout.progress import ProgressBar
from tapeout.segments import SEGMENT_BYTES, Arrays, SegmentCall, SegmentedGraph
from tapeout.work_folder import is_kept, keep

LENGTHS, STEPS = (9, 14, 21), 4  # tokens of the first prompts, and decode steps after them
SPREAD_WORK = 1e11  # floating-point operations of a sequence at spread positions: about a second on two cores
SPREAD_TOKENS = (32, 160)  # at least and at most
PIECE = 5  # tokens fed at a late start, and one decode step after them
# Parts of names in a configuration that tell of lengths; the values are positions to look at.
THRESHOLDS = ("position", "window", "chunk", "floor", "length", "context", "block")
CACHE_BYTES = 1 << 30  # of one sequence's random cache; of larger models, positions beyond are only spread over

CACHES_AT_ONCE = 1 << 29  # bytes of the caches of a segment's layers, which has fewer layers where they are long

Tokens = NDArray[np.int64]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Difference:
    """The largest difference of logits, relative to the largest absolute reference logit of its token."""

    error: float
    where: str


@dataclass(eq=False)
class _CheckedSequence:
    """What transformers computes in one call. ``cached``: tokens before it, whose keys and values are random.

    ``positions``: others than the usual ones. ``logits [S, V]``: once they are computed.
    """

    tokens: list[int]
    positions: Tokens | None = None
    cached: int = 0
    logits: Floats = field(default_factory=lambda: np.empty((0, 0), np.float32))


@dataclass(frozen=True)
class _Compared:
    """Logits ``[entry, columns]`` of a call of the graph, against those of a sequence at ``rows``."""

    entry: int
    columns: slice
    sequence: _CheckedSequence
    rows: slice
    where: str


class _CheckStep(SegmentCall):
    """A call of the graph. ``past``: gives its cache, by the graph's name of it."""

    def __init__(
        self,
        ids: Tokens,
        mask: Tokens,
        positions: Tokens,
        past: Callable[[str], Floats],
        compared: Sequence[_Compared] = (),
    ) -> None:
        self.inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
        self.past, self.compared = past, compared
        self.logits: Floats = np.empty((0, 0, 0), np.float32)
        self.cache: dict[str, Floats] | None = None  # kept where another call asks for it

    def feed(self, name: str) -> NDArray[Any]:
        return self.inputs[name] if name in self.inputs else self.past(name)

    def take(self, name: str, array: NDArray[Any]) -> None:
        if name == "logits":
            self.logits = array
        elif self.cache is not None:
            self.cache[f"past_key_values.{name.removeprefix('present.')}"] = array

    def grown(self) -> Callable[[str], Floats]:
        """``past`` of the one call after this one."""
        cache = self.cache = {}
        return cache.pop


class _RandomCache:
    """Random keys and values: scores of about one, and values as large as the model's own.

    Where scores have a soft cap, the largest ones come near it. What the model's own are shows ``probe``, a call of the
    graph that comes before all that read this cache.
    """

    def __init__(self, layers: Sequence[AttentionNode], longest: int, seed: int, probe: _CheckStep) -> None:
        self.layers, self.longest, self.seed = layers, longest, seed
        probe.cache = self._seen = dict[str, Floats]()
        self._noise = lru_cache(2)(self._draw)  # keys and values of one layer

    def one(self, layer: int, part: str, length: int) -> Floats:
        """``[1, kv_heads, length, head_size]``; ``part``: key or value."""
        return self._noise(layer, part)[:, :, :length] * np.float32(self._scale(layer, part, length))

    def padded(self, name: str, lengths: Sequence[int]) -> Floats:
        """Of a batch, by the graph's name, with padding on the left."""
        _, number, part = name.split(".")
        entries = [self.one(int(number), part, length) for length in lengths]
        widths = [((0, 0), (0, 0), (max(lengths) - length, 0), (0, 0)) for length in lengths]
        return np.concatenate([np.pad(entry, width) for entry, width in zip(entries, widths, strict=True)])

    def _draw(self, layer: int, part: str) -> Floats:
        generator = np.random.default_rng((self.seed, layer, part == "key"))
        shape = (1, self.layers[layer].kv_heads, self.longest, self.layers[layer].head_size)
        return generator.standard_normal(shape, np.float32)

    def _scale(self, number: int, part: str, length: int) -> float:
        layer, seen = self.layers[number], self._seen[f"past_key_values.{number}.{part}"]
        if part == "key":
            norm = float(np.sqrt((seen**2).sum(-1).mean()))
            return max(1.0, layer.softcap / 8) / max(layer.scale * norm, 1e-6)
        visible = min(length, layer.window or length)
        return float(np.sqrt((seen**2).mean())) * math.sqrt(visible / 2)


class _Progress:
    """How many segments or layers are done, and what they left, in a file that outlives an interruption."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.done, self.left = 0, cast(Any, None)
        if is_kept(path):
            with path.open("rb") as file:
                self.done, self.left = pickle.load(file)

    def keep(self, done: int, left: Any) -> None:
        partial = self._path.with_suffix(".partial")
        with partial.open("wb") as file:
            pickle.dump((done, left), file, protocol=5)  # arrays are written as they lie in memory
        keep(partial, self._path)


def largest_difference(model: Any, path: Path, work: Path, *, positions: int, seed: int = 0) -> Difference:
    """The largest difference of the graph at ``path`` from transformers, at positions up to ``positions - 1``.

    transformers runs the configuration beside the graph with the weights of ``model``. ``work``: a folder, where a
    check of the same may have been interrupted.
    """
    generator = np.random.default_rng(seed)
    layers = AttentionNode.all(load_graph(path).graph)
    weights = model.state_dict()
    probe = _probe(model, layers, generator)
    per_token = sum(8 * layer.kv_heads * layer.head_size for layer in layers)
    cache = _RandomCache(layers, min(positions, CACHE_BYTES // per_token) - PIECE - 1, seed, probe)
    steps = [probe, *_decoded(model, layers, positions, generator), *_spread(model, layers, positions, generator)]
    for start in _late_starts(model, cache):
        steps += _late(model, cache, start, generator)
    held = 4 * per_token * (cache.longest + PIECE + 1)  # two sequences, before and after a call
    share = min(1.0, CACHES_AT_ONCE / held) * 4 * sum(weight.numel() for weight in model.parameters())
    _run_graph(SegmentedGraph(path, segment_bytes=min(SEGMENT_BYTES, int(share))), steps, _Progress(work / "graph"))
    compared = [(step.logits, each) for step in steps for each in step.compared]
    _run_transformers(
        LayerStream(path.parent, weights=weights),
        list(dict.fromkeys(each.sequence for _, each in compared)),
        cache,
        _Progress(work / "transformers"),
    )
    errors = [
        Difference(
            _relative_error(logits[each.entry, each.columns], each.sequence.logits[each.rows]),
            each.where,
        )
        for logits, each in compared
    ]
    return max(errors, key=lambda difference: difference.error)


def _probe(model: Any, layers: Sequence[AttentionNode], generator: np.random.Generator) -> _CheckStep:
    ids = np.array([_tokens(model, LENGTHS[0], generator)], np.int64)
    return _CheckStep(ids, np.ones_like(ids), np.arange(LENGTHS[0])[None], _empty(layers, 1))


def _decoded(
    model: Any, layers: Sequence[AttentionNode], positions: int, generator: np.random.Generator
) -> list[_CheckStep]:
    """Three prompts with left padding, a prefill and decode steps over the cache."""
    count = min(STEPS, positions - 1)
    lengths = [min(length, positions - count) for length in LENGTHS]
    sequences = [_CheckedSequence(_tokens(model, length + count, generator)) for length in lengths]
    width, entries = max(lengths), len(lengths)
    ids, mask = np.ones((entries, width), np.int64), np.zeros((entries, width), np.int64)
    for entry, (sequence, length) in enumerate(zip(sequences, lengths, strict=True)):
        ids[entry, width - length :] = sequence.tokens[:length]
        mask[entry, width - length :] = 1
    compared = [
        _Compared(entry, slice(width - length, width), sequence, slice(length), f"a prefill of {length} tokens")
        for entry, (sequence, length) in enumerate(zip(sequences, lengths, strict=True))
    ]
    steps = [_CheckStep(ids, mask, np.maximum(np.cumsum(mask, axis=1) - 1, 0), _empty(layers, entries), compared)]
    for step in range(count):
        places = [length + step for length in lengths]
        ids = np.array([[sequence.tokens[at]] for sequence, at in zip(sequences, places, strict=True)], np.int64)
        mask = np.concatenate([mask, np.ones((entries, 1), np.int64)], axis=1)
        compared = [
            _Compared(entry, slice(1), sequence, slice(at, at + 1), f"decode step {step + 1} after {at - step} tokens")
            for entry, (sequence, at) in enumerate(zip(sequences, places, strict=True))
        ]
        steps.append(_CheckStep(ids, mask, np.array(places, np.int64)[:, None], steps[-1].grown(), compared))
    return steps


def _spread(
    model: Any, layers: Sequence[AttentionNode], positions: int, generator: np.random.Generator
) -> list[_CheckStep]:
    """Tokens at positions spread over all that are served, in two pieces beside a sequence of early positions."""
    weights = sum(parameter.numel() for parameter in model.parameters())
    count = min(max(int(SPREAD_WORK / (2 * weights)), SPREAD_TOKENS[0]), SPREAD_TOKENS[1], positions)
    spread = np.unique(np.linspace(0, positions - 1, count).round().astype(np.int64))
    early = np.arange(len(spread))
    sequences = [_CheckedSequence(_tokens(model, len(spread), generator), places) for places in (spread, early)]
    tokens, places = np.array([sequence.tokens for sequence in sequences], np.int64), np.stack([spread, early])
    steps: list[_CheckStep] = []
    for piece in np.array_split(early, 2):
        if not len(piece):
            continue
        compared = [
            _Compared(entry, slice(column, column + 1), sequences[entry], slice(place, place + 1),
                      f"position {places[entry, place]} among {name} ones, in two pieces")
            for entry, name in enumerate(("spread", "early"))
            for column, place in enumerate(piece.tolist())
        ]  # fmt: skip
        past = steps[-1].grown() if steps else _empty(layers, 2)
        mask = np.ones((2, piece[-1] + 1), np.int64)
        steps.append(_CheckStep(tokens[:, piece], mask, places[:, piece], past, compared))
    return steps


def _late_starts(model: Any, cache: _RandomCache) -> list[int]:
    """The longest cache, half of it, and lengths at which the model may change what it computes."""
    starts = {cache.longest, cache.longest // 2}
    starts |= {start - PIECE // 2 for start in _thresholds(model, cache.layers)}
    return sorted(start for start in starts if 0 < start <= cache.longest)


def _thresholds(model: Any, layers: Sequence[AttentionNode]) -> set[int]:
    """Windows, and lengths that the model's configuration names."""
    found = {layer.window for layer in layers}
    stack: list[Mapping[str, Any]] = [model.config.get_text_config().to_dict()]
    while stack:
        for name, value in stack.pop().items():
            if isinstance(value, Mapping):
                stack.append(value)
            elif type(value) is int and any(word in name for word in THRESHOLDS):
                found.add(value)
    return found


def _late(model: Any, cache: _RandomCache, start: int, generator: np.random.Generator) -> list[_CheckStep]:
    """A piece and a decode step after ``start`` cached tokens, beside a sequence of few ones."""
    starts = (start, min(3, start))
    sequences = [_CheckedSequence(_tokens(model, PIECE + 1, generator), cached=cached) for cached in starts]
    mask = np.ones((2, start), np.int64)
    mask[1, : start - starts[1]] = 0
    steps: list[_CheckStep] = []
    for piece in (range(PIECE), range(PIECE, PIECE + 1)):
        mask = np.concatenate([mask, np.ones((2, len(piece)), np.int64)], axis=1)
        ids = np.array([[sequence.tokens[n] for n in piece] for sequence in sequences], np.int64)
        places = np.array([[first + n for n in piece] for first in starts], np.int64)
        compared = [
            _Compared(entry, slice(column, column + 1), sequence, slice(n, n + 1),
                      f"position {sequence.cached + n}, over a cache")
            for entry, sequence in enumerate(sequences)
            for column, n in enumerate(piece)
        ]  # fmt: skip
        past = steps[-1].grown() if steps else lambda name: cache.padded(name, starts)
        steps.append(_CheckStep(ids, mask, places, past, compared))
    return steps


def _tokens(model: Any, count: int, generator: np.random.Generator) -> list[int]:
    return generator.integers(1, model.config.get_text_config().vocab_size, size=count).tolist()


def _empty(layers: Sequence[AttentionNode], entries: int) -> Callable[[str], Floats]:
    """``past`` of a first call."""

    def past(name: str) -> Floats:
        layer = layers[int(name.split(".")[1])]
        return np.zeros((entries, layer.kv_heads, 0, layer.head_size), np.float32)

    return past


def _run_graph(graph: SegmentedGraph, steps: Sequence[_CheckStep], progress: _Progress) -> None:
    left: tuple[list[Arrays] | None, list[tuple[Floats, dict[str, Floats] | None]]] = progress.left or (None, [])
    kept, results = left
    for step, (logits, cache) in zip(steps, results, strict=False):
        step.logits = logits
        if step.cache is not None:
            step.cache.update(cache or {})

    def finished(done: int, kept: list[Arrays]) -> None:
        progress.keep(done, (kept, [(step.logits, step.cache) for step in steps]))

    graph.run(steps, done=progress.done, kept=kept, finished=finished)


def _run_transformers(
    stream: LayerStream, sequences: Sequence[_CheckedSequence], cache: _RandomCache, progress: _Progress
) -> None:
    """Compute the logits of each sequence in one call of the unchanged model, layer by layer."""
    states: list[LayerState] = progress.left or [LayerState() for _ in sequences]
    left = range(progress.done, len(stream))
    for layer in ProgressBar(left, title="transformers", unit="layer", total=len(stream), done=progress.done):
        with stream.loaded(layer):
            for number, sequence in enumerate(sequences):
                with _inputs(stream.model, sequence, cache, layer) as inputs:
                    states[number] = stream.run(layer, states[number], **inputs)
        progress.keep(layer + 1, states)
    for sequence, state in zip(sequences, states, strict=True):
        with _inputs(stream.model, sequence, cache, len(stream)) as inputs:
            sequence.logits = stream.finish(state, **inputs).logits[0].numpy()


@contextmanager
def _inputs(model: Any, sequence: _CheckedSequence, cache: _RandomCache, layer: int) -> Generator[dict[str, Any]]:
    """What the model is called with. After a cache, masks and positions are what transformers makes for its length.

    transformers' caches hold what a family stores (compressed latents, shared layers); the keys and values of the graph
    are those that its attention gets, so they are put in there.
    """
    start, count = sequence.cached, len(sequence.tokens)
    inputs: dict[str, Any] = {"input_ids": torch.tensor([sequence.tokens])}
    if not start:
        if sequence.positions is not None:
            # With a mask, transformers does not take a gap between positions for the start of another sequence.
            inputs["position_ids"] = torch.tensor(sequence.positions)[None]
            inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        yield inputs
        return

    inputs["position_ids"] = torch.arange(start, start + count)[None]
    inputs["past_key_values"] = _length_only(start)
    with after_tokens(model, lambda part: torch.from_numpy(cache.one(layer, part, start))):
        yield inputs


def _length_only(length: int) -> Any:
    """A cache of transformers that says it holds ``length`` tokens, and holds none."""
    from transformers.cache_utils import Cache as TransformersCache

    class LengthOnly(TransformersCache):
        def update(self, key_states: Any, value_states: Any, layer_idx: int, *_: Any, **__: Any) -> tuple[Any, Any]:
            return key_states, value_states

        def get_seq_length(self, layer_idx: int = 0) -> int:
            return length

        def get_query_offset(self, layer_idx: int = 0) -> int:
            return length

        def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
            return length + query_length, 0

    return LengthOnly(layers=[])


def _relative_error(actual: NDArray[Any], expected: NDArray[Any]) -> float:
    if not (np.isfinite(actual).all() and np.isfinite(expected).all()):
        return math.inf
    scale = np.abs(expected).max(axis=-1, keepdims=True)
    return float((np.abs(actual - expected) / np.maximum(scale, 1e-6)).max())
