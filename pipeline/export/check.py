"""Compare an exported graph with transformers, in the ways an engine uses it and at positions up to the last.

Three comparisons, each with sequences that share a batch and are fed in pieces:

- a prefill and decode steps from the first position on, with left padding, against transformers' own attention;
- tokens at positions spread from the first to the last, in two pieces, against one call of transformers;
- pieces that start late, over a random cache of that length, against transformers with its own masks and positions.

The last two cost few tokens: a position is an input, and a cache need not be computed to be long. Random values are
scaled with their number, so that one key more or less in a window changes the logits by far more than rounding does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tapeout.attention_interface import attention_replaced
from tapeout.graph_analysis import is_attention, size
from tapeout.segments import SegmentedGraph

LENGTHS, STEPS = (9, 14, 21), 4  # tokens of the first prompts, and decode steps after them
SPREAD_WORK = 1e11  # floating-point operations of a sequence at spread positions: about a second on two cores
SPREAD_TOKENS = (32, 160)  # at least and at most
PIECE = 5  # tokens fed at a late start, and one decode step after them
# Parts of names in a configuration that tell of lengths; the values are positions to look at.
THRESHOLDS = ("position", "window", "chunk", "floor", "length", "context", "block")
CACHE_BYTES = 1 << 30  # of one sequence's random cache; of larger models, positions beyond are only spread over

Tokens = NDArray[np.int64]
Cache = dict[str, NDArray[np.float32]]


@dataclass(frozen=True)
class Difference:
    """The largest difference of logits, relative to the largest absolute reference logit of its token."""

    error: float
    where: str


@dataclass(frozen=True)
class _Layer:
    """One attention of the graph."""

    kv_heads: int
    head_size: int
    scale: float
    softcap: float
    window: int


class _Graph:
    """The exported graph on ONNX Runtime, in segments where it is large."""

    def __init__(self, path: Path) -> None:
        self.graph = SegmentedGraph(path)
        self.layers = [
            _Layer(
                size(node.inputs[4], 1),
                size(node.inputs[4], 3),
                node.attributes["scale"].as_float(),
                node.attributes["softcap"].as_float(),
                node.attributes["window"].as_int(),
            )
            for node in self.graph.nodes
            if is_attention(node)
        ]

    def run(self, ids: Tokens, mask: Tokens, positions: Tokens, past: Cache) -> tuple[NDArray[np.float32], Cache]:
        """Logits ``[B, S, V]`` and the grown cache."""
        feeds = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, **past}
        arrays = self.graph.run(feeds)
        logits = arrays.pop("logits")
        return logits, {f"past_key_values.{name.removeprefix('present.')}": array for name, array in arrays.items()}

    def empty(self, entries: int) -> Cache:
        return {
            f"past_key_values.{n}.{part}": np.zeros((entries, layer.kv_heads, 0, layer.head_size), np.float32)
            for n, layer in enumerate(self.layers)
            for part in ("key", "value")
        }


def largest_difference(model: Any, path: Path, *, positions: int, seed: int = 0) -> Difference:
    """The largest difference of the graph at ``path`` from transformers, at positions up to ``positions - 1``."""
    graph, generator = _Graph(path), np.random.default_rng(seed)
    found = [
        _decoded(model, graph, positions, generator),
        _spread(model, graph, positions, generator),
        *_late(model, graph, positions, generator),
    ]
    return max(found, key=lambda difference: difference.error)


def _decoded(model: Any, graph: _Graph, positions: int, generator: np.random.Generator) -> Difference:
    """Three prompts with left padding, a prefill and decode steps over the cache."""
    steps = min(STEPS, positions - 1)
    lengths = [min(length, positions - steps) for length in LENGTHS]
    prompts = [_tokens(model, length + steps, generator) for length in lengths]
    expected = [_reference(model, tokens) for tokens in prompts]
    width, entries = max(lengths), len(prompts)
    ids, mask = np.ones((entries, width), np.int64), np.zeros((entries, width), np.int64)
    for entry, (tokens, length) in enumerate(zip(prompts, lengths, strict=True)):
        ids[entry, width - length :] = tokens[:length]
        mask[entry, width - length :] = 1
    places, past = np.maximum(np.cumsum(mask, axis=1) - 1, 0), graph.empty(entries)
    errors: dict[str, float] = {}
    for step in range(steps + 1):
        logits, past = graph.run(ids, mask, places, past)
        for entry, length in enumerate(lengths):
            wanted = expected[entry][0 if step == 0 else length + step - 1 : length + step]
            where = f"a prefill of {length} tokens" if step == 0 else f"decode step {step} after {length} tokens"
            errors[where] = _relative_error(logits[entry, logits.shape[1] - len(wanted) :], wanted)
        if step < steps:
            ids = np.array([[p[length + step]] for p, length in zip(prompts, lengths, strict=True)], np.int64)
            mask = np.concatenate([mask, np.ones((entries, 1), np.int64)], axis=1)
            places = np.array([[length + step] for length in lengths], np.int64)
    return _largest(errors)


def _spread(model: Any, graph: _Graph, positions: int, generator: np.random.Generator) -> Difference:
    """Tokens at positions spread over all that are served, in two pieces beside a sequence of early positions."""
    weights = sum(parameter.numel() for parameter in model.parameters())
    count = min(max(int(SPREAD_WORK / (2 * weights)), SPREAD_TOKENS[0]), SPREAD_TOKENS[1], positions)
    places = np.unique(np.linspace(0, positions - 1, count).round().astype(np.int64))
    early = np.arange(len(places))
    tokens = np.array([_tokens(model, len(places), generator) for _ in range(2)], np.int64)
    expected = [_reference(model, tokens[0], places), _reference(model, tokens[1], early)]
    errors: dict[str, float] = {}
    past, both = graph.empty(2), np.stack([places, early])
    for piece in np.array_split(np.arange(len(places)), 2):
        if not len(piece):
            continue
        mask = np.ones((2, piece[-1] + 1), np.int64)
        logits, past = graph.run(tokens[:, piece], mask, both[:, piece], past)
        for entry, name in enumerate(("spread", "early")):
            for column, place in enumerate(piece):
                where = f"position {both[entry, place]} among {name} ones, in two pieces"
                errors[where] = _relative_error(logits[entry, column], expected[entry][place])
    return _largest(errors)


def _late(model: Any, graph: _Graph, positions: int, generator: np.random.Generator) -> list[Difference]:
    """Pieces at late starts, each in one batch with a sequence that has hardly begun."""
    per_token = sum(8 * layer.kv_heads * layer.head_size for layer in graph.layers)
    longest = min(positions, CACHE_BYTES // per_token) - PIECE - 1
    starts = {longest, longest // 2, *(start - PIECE // 2 for start in _thresholds(model, graph))}
    chosen = sorted(start for start in starts if 0 < start <= longest)
    if not chosen:
        return []
    scales = _cache_scales(model, graph, generator)
    noise = {
        name: generator.standard_normal((1, layer.kv_heads, longest, layer.head_size), np.float32)
        for n, layer in enumerate(graph.layers)
        for name in (f"past_key_values.{n}.key", f"past_key_values.{n}.value")
    }
    return [_piece_at(model, graph, start, noise, scales, generator) for start in chosen]


def _thresholds(model: Any, graph: _Graph) -> set[int]:
    """Positions at which the model may change what it computes: windows, and lengths that its configuration names."""
    found = {layer.window for layer in graph.layers}
    stack: list[Mapping[str, Any]] = [model.config.get_text_config().to_dict()]
    while stack:
        for name, value in stack.pop().items():
            if isinstance(value, Mapping):
                stack.append(value)
            elif type(value) is int and any(word in name for word in THRESHOLDS):
                found.add(value)
    return found


def _cache_scales(model: Any, graph: _Graph, generator: np.random.Generator) -> dict[str, float]:
    """What random keys and values are multiplied by: scores of about one, and values as large as the model's own.

    Where scores have a soft cap, the largest ones come near it.
    """
    ids = np.array([_tokens(model, LENGTHS[0], generator)], np.int64)
    _, cache = graph.run(ids, np.ones_like(ids), np.arange(LENGTHS[0])[None], graph.empty(1))
    scales: dict[str, float] = {}
    for n, layer in enumerate(graph.layers):
        keys, values = cache[f"past_key_values.{n}.key"], cache[f"past_key_values.{n}.value"]
        norm = float(np.sqrt((keys**2).sum(-1).mean()))
        scales[f"past_key_values.{n}.key"] = max(1.0, layer.softcap / 8) / max(layer.scale * norm, 1e-6)
        scales[f"past_key_values.{n}.value"] = float(np.sqrt((values**2).mean()))
    return scales


def _piece_at(
    model: Any, graph: _Graph, start: int, noise: Cache, scales: Mapping[str, float], generator: np.random.Generator
) -> Difference:
    """A piece and a decode step after ``start`` cached tokens, beside a sequence of ``early`` ones."""
    early = min(3, start)
    caches: list[Cache] = []
    for length in (start, early):
        caches.append({name: array[:, :, :length] * np.float32(scales[name]) for name, array in noise.items()})
        for n, layer in enumerate(graph.layers):
            visible = min(length, layer.window or length)
            caches[-1][f"past_key_values.{n}.value"] *= np.float32(math.sqrt(visible / 2))
    tokens = [_tokens(model, PIECE + 1, generator) for _ in caches]
    expected = [_reference_after(model, t, cache, graph) for t, cache in zip(tokens, caches, strict=True)]
    mask = np.ones((2, start), np.int64)
    mask[1, : start - early] = 0
    padding = ((0, 0), (0, 0), (start - early, 0), (0, 0))
    past = {name: np.concatenate([array, np.pad(caches[1][name], padding)]) for name, array in caches[0].items()}
    del caches
    errors: dict[str, float] = {}
    for piece in (range(PIECE), range(PIECE, PIECE + 1)):
        mask = np.concatenate([mask, np.ones((2, len(piece)), np.int64)], axis=1)
        ids = np.array([[row[n] for n in piece] for row in tokens], np.int64)
        places = np.array([[first + n for n in piece] for first in (start, early)], np.int64)
        logits, past = graph.run(ids, mask, places, past)
        for entry, first in enumerate((start, early)):
            for column, n in enumerate(piece):
                errors[f"position {first + n}, over a cache"] = _relative_error(
                    logits[entry, column], expected[entry][n]
                )
    return _largest(errors)


def _tokens(model: Any, count: int, generator: np.random.Generator) -> list[int]:
    return generator.integers(1, model.config.get_text_config().vocab_size, size=count).tolist()


def _reference(model: Any, tokens: Sequence[int], places: Tokens | None = None) -> NDArray[np.float32]:
    """Logits of one call of the unchanged model; ``places``: positions other than ``0, 1, ...``."""
    ids = torch.tensor(np.asarray(tokens, np.int64))[None]
    # With a mask given, transformers does not take a gap between positions for the start of another sequence.
    given = (
        {} if places is None else {"position_ids": torch.tensor(places)[None], "attention_mask": torch.ones_like(ids)}
    )
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False, **given).logits[0].numpy()


def _reference_after(model: Any, tokens: Sequence[int], cache: Cache, graph: _Graph) -> NDArray[np.float32]:
    """Logits of ``tokens`` after a cache, with the masks and positions that transformers makes for its length.

    transformers' caches hold what a family stores (compressed latents, shared layers); the keys and values of the graph
    are those that its attention gets, so they are put in there.
    """
    from transformers.masking_utils import sdpa_mask

    start = cache["past_key_values.0.key"].shape[2]
    layers = iter(range(len(graph.layers)))

    def attention(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        scaling: float | None = None,
        softcap: float | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        layer = next(layers)
        key = torch.cat([torch.from_numpy(cache[f"past_key_values.{layer}.key"]), key], 2)
        value = torch.cat([torch.from_numpy(cache[f"past_key_values.{layer}.value"]), value], 2)
        repeat = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
        scores = query @ key.transpose(2, 3) * (query.shape[3] ** -0.5 if scaling is None else scaling)
        scores = softcap * torch.tanh(scores / softcap) if softcap else scores
        if mask is None:  # transformers leaves a plain causal mask out
            mask = torch.ones(scores.shape[2:], dtype=torch.bool).tril(start)
        return (scores.masked_fill(~mask, -torch.inf).softmax(-1) @ value).transpose(1, 2), None

    places = torch.arange(start, start + len(tokens))[None]
    with torch.no_grad(), attention_replaced(model, attention, sdpa_mask):
        return (
            model(
                input_ids=torch.tensor([tokens]),
                position_ids=places,
                past_key_values=_length_only(start),
                use_cache=False,
            )
            .logits[0]
            .numpy()
        )


def _length_only(length: int) -> Any:
    """A cache of transformers that says it holds ``length`` tokens, and holds none."""
    from transformers import Cache as TransformersCache

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


def _largest(errors: Mapping[str, float]) -> Difference:
    where = max(errors, key=lambda name: errors[name])
    return Difference(errors[where], where)
