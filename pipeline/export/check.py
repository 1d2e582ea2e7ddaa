"""Compare an exported graph with transformers, in the ways an engine uses it and at positions up to the last.

Three comparisons, each with sequences that share a batch and are fed in pieces:

- a prefill and decode steps from the first position on, with left padding, against transformers' own attention;
- tokens at positions spread from the first to the last, in two pieces, against one call of transformers;
- pieces that start late, over a random state of that length, against transformers with its own masks and positions.

The last two cost few tokens: a position is an input, and a cache need not be computed to be long. Random values are
scaled by what each operator keeps: keys and values with their number, so that one key more or less in a window changes
the logits by far more than rounding does.

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

from pipeline.export.trace import takes
from tapeout.layer_stream import LayerState, LayerStream
from tapeout.operators import PAST, PRESENT, OperatorNode, computed_by_token, operator_nodes, state_resumed
from tapeout.portable_model import load_graph
from tapeout.progress import ProgressBar
from tapeout.segments import SEGMENT_BYTES, Arrays, SegmentCall, SegmentedGraph
from tapeout.state import Paged, StateTensor, token_bytes
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
    """What transformers computes in one call. ``cached``: tokens before it, whose state is random.

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
            self.cache[f"{PAST}.{name.removeprefix(f'{PRESENT}.')}"] = array

    def grown(self) -> Callable[[str], Floats]:
        """``past`` of the one call after this one."""
        cache = self.cache = {}
        return cache.pop


@dataclass(frozen=True)
class _KeptTensor:
    """A tensor of a graph's state, and the node that keeps it. ``grows``: it has a value for each token."""

    node: OperatorNode
    tensor: StateTensor
    grows: bool

    @property
    def name(self) -> str:
        return f"{PAST}.{self.node.layer}.{self.tensor.name}"

    def shape(self, tokens: int) -> tuple[int, ...]:
        """As the graph has it, without the batch: positions come before the last dimension."""
        *outer, last = self.tensor.shape
        return (*outer, tokens, last) if self.grows else (*outer, last)


def _kept_tensors(nodes: Sequence[OperatorNode]) -> dict[str, _KeptTensor]:
    """By the graph's name."""
    found = [
        _KeptTensor(node, tensor, isinstance(state, Paged))
        for node in nodes
        if (state := node.state("float32"))
        for tensor in state.tensors
    ]
    return {each.name: each for each in found}


class _RandomState:
    """What tokens before may have left: random values, as large as their operators say.

    What the model's own are shows ``probe``, a call of the graph that comes before all that read this state.
    """

    def __init__(self, kept: Mapping[str, _KeptTensor], longest: int, seed: int, probe: _CheckStep) -> None:
        self.kept, self.longest, self.seed = kept, longest, seed
        probe.cache = self._seen = dict[str, Floats]()
        self._noise = lru_cache(2)(self._draw)  # keys and values of one layer

    def one(self, name: str, length: int) -> Floats:
        """Of one sequence, by the graph's name, after ``length`` tokens: as the graph has it, with a batch of 1."""
        each, noise = self.kept[name], self._noise(name)
        if each.grows:
            noise = noise[..., :length, :]
        scale = each.node.operator.scale(each.node.node, each.tensor.name, self._seen[name], length)
        return noise * np.float32(scale)

    def padded(self, name: str, lengths: Sequence[int]) -> Floats:
        """Of a batch, with padding on the left."""
        entries = [self.one(name, length) for length in lengths]
        if self.kept[name].grows:
            sides = [(0, 0)] * (entries[0].ndim - 2)
            entries = [np.pad(entry, [*sides, (max(lengths) - entry.shape[-2], 0), (0, 0)]) for entry in entries]
        return np.concatenate(entries)

    def _draw(self, name: str) -> Floats:
        each, number = self.kept[name], list(self.kept).index(name)
        generator = np.random.default_rng((self.seed, number))
        return generator.standard_normal((1, *each.shape(self.longest)), np.float32)


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
    nodes = operator_nodes(load_graph(path).graph)
    kept, states = _kept_tensors(nodes), [state for node in nodes if (state := node.state("float32"))]
    weights = model.state_dict()
    probe = _probe(model, kept, generator)
    per_token = max(1, token_bytes(states))
    before = _RandomState(kept, min(positions, CACHE_BYTES // per_token) - PIECE - 1, seed, probe)
    steps = [probe, *_decoded(model, kept, positions, generator), *_spread(model, kept, positions, generator)]
    windows = {state.window for state in states if isinstance(state, Paged)}
    for start in _late_starts(model, windows, before.longest):
        steps += _late(model, before, start, generator)
    held = 4 * per_token * (before.longest + PIECE + 1)  # two sequences, before and after a call
    share = min(1.0, CACHES_AT_ONCE / held) * 4 * sum(weight.numel() for weight in model.parameters())
    _run_graph(SegmentedGraph(path, segment_bytes=min(SEGMENT_BYTES, int(share))), steps, _Progress(work / "graph"))
    compared = [(step.logits, each) for step in steps for each in step.compared]
    _run_transformers(
        LayerStream(path.parent, weights=weights),
        list(dict.fromkeys(each.sequence for _, each in compared)),
        before,
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


def _probe(model: Any, kept: Mapping[str, _KeptTensor], generator: np.random.Generator) -> _CheckStep:
    ids = np.array([_tokens(model, LENGTHS[0], generator)], np.int64)
    return _CheckStep(ids, np.ones_like(ids), np.arange(LENGTHS[0])[None], _empty(kept, 1))


def _decoded(
    model: Any, kept: Mapping[str, _KeptTensor], positions: int, generator: np.random.Generator
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
    steps = [_CheckStep(ids, mask, np.maximum(np.cumsum(mask, axis=1) - 1, 0), _empty(kept, entries), compared)]
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
    model: Any, kept: Mapping[str, _KeptTensor], positions: int, generator: np.random.Generator
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
        past = steps[-1].grown() if steps else _empty(kept, 2)
        mask = np.ones((2, piece[-1] + 1), np.int64)
        steps.append(_CheckStep(tokens[:, piece], mask, places[:, piece], past, compared))
    return steps


def _late_starts(model: Any, windows: set[int], longest: int) -> list[int]:
    """The longest state, half of it, and lengths at which the model may change what it computes."""
    starts = {longest, longest // 2} | {start - PIECE // 2 for start in _thresholds(model, windows)}
    return sorted(start for start in starts if 0 < start <= longest)


def _thresholds(model: Any, windows: set[int]) -> set[int]:
    """Windows, and lengths that the model's configuration names."""
    found = {*windows}
    stack: list[Mapping[str, Any]] = [model.config.get_text_config().to_dict()]
    while stack:
        for name, value in stack.pop().items():
            if isinstance(value, Mapping):
                stack.append(value)
            elif type(value) is int and any(word in name for word in THRESHOLDS):
                found.add(value)
    return found


def _late(model: Any, before: _RandomState, start: int, generator: np.random.Generator) -> list[_CheckStep]:
    """A piece and a decode step after ``start`` tokens, beside a sequence of few ones."""
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
                      f"position {sequence.cached + n}, over a random state")
            for entry, sequence in enumerate(sequences)
            for column, n in enumerate(piece)
        ]  # fmt: skip
        past = steps[-1].grown() if steps else lambda name: before.padded(name, starts)
        steps.append(_CheckStep(ids, mask, places, past, compared))
    return steps


def _tokens(model: Any, count: int, generator: np.random.Generator) -> list[int]:
    return generator.integers(1, model.config.get_text_config().vocab_size, size=count).tolist()


def _empty(kept: Mapping[str, _KeptTensor], entries: int) -> Callable[[str], Floats]:
    """``past`` of a first call."""
    return lambda name: np.zeros((entries, *kept[name].shape(0)), np.float32)


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
    stream: LayerStream, sequences: Sequence[_CheckedSequence], before: _RandomState, progress: _Progress
) -> None:
    """Compute the logits of each sequence in one call of the unchanged model, layer by layer."""
    states: list[LayerState] = progress.left or [LayerState() for _ in sequences]
    left = range(progress.done, len(stream))
    for layer in ProgressBar(left, title="transformers", unit="layer", total=len(stream), done=progress.done):
        with stream.loaded(layer):
            for number, sequence in enumerate(sequences):
                with _inputs(stream.model, sequence, before, layer) as inputs:
                    states[number] = stream.run(layer, states[number], **inputs)
        progress.keep(layer + 1, states)
    for sequence, state in zip(sequences, states, strict=True):
        with _inputs(stream.model, sequence, before, len(stream)) as inputs:
            sequence.logits = stream.finish(state, **inputs).logits[0].numpy()


@contextmanager
def _inputs(model: Any, sequence: _CheckedSequence, before: _RandomState, layer: int) -> Generator[dict[str, Any]]:
    """What the model is called with. After other tokens, masks and positions are what transformers makes for these.

    transformers' caches hold what a family stores (compressed latents, shared layers); the state of the graph is what
    its operators get, so it is put in there.
    """
    start, count = sequence.cached, len(sequence.tokens)
    inputs: dict[str, Any] = {"input_ids": torch.tensor([sequence.tokens])}
    if not start:
        if sequence.positions is not None:
            # With a mask, transformers does not take a gap between positions for the start of another sequence.
            inputs["position_ids"] = torch.tensor(sequence.positions)[None]
            inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        with computed_by_token(model):
            yield _taken(model, inputs)
        return

    inputs["position_ids"] = torch.arange(start, start + count)[None]
    inputs["past_key_values"] = _length_only(start)
    with state_resumed(model, lambda name: torch.from_numpy(before.one(f"{PAST}.{layer}.{name}", start))):
        yield _taken(model, inputs)


def _taken(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Without what the model has no argument for: one without attention needs neither positions nor a length."""
    return {name: value for name, value in inputs.items() if takes(model, name)}


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

        def is_recording_past(self, layer_idx: int) -> bool:
            return True  # so that one token goes the way of several

        def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
            return None

        def update_conv_state(
            self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any
        ) -> torch.Tensor:
            return conv_states

        def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
            return None

        def update_recurrent_state(
            self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any
        ) -> torch.Tensor:
            return recurrent_states

    return LengthOnly(layers=[])


def _relative_error(actual: NDArray[Any], expected: NDArray[Any]) -> float:
    if not (np.isfinite(actual).all() and np.isfinite(expected).all()):
        return math.inf
    scale = np.abs(expected).max(axis=-1, keepdims=True)
    return float((np.abs(actual - expected) / np.maximum(scale, 1e-6)).max())
