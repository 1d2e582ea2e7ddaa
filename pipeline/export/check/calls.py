"""What a check has an exported graph and transformers compute.

All tokens are chosen first. A position is an input, and a cache need not be computed to be long, so most calls cost few
tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.export.check.state import Floats, KeptTensor, RandomState
from tapeout.operators import PAST, PRESENT
from tapeout.segments import SegmentCall

LENGTHS, STEPS = (9, 14, 21), 4  # tokens of the first prompts, and decode steps after them
SPREAD_WORK = 1e11  # floating-point operations of a sequence at spread positions: about a second on two cores
SPREAD_TOKENS = (32, 160)  # at least and at most
PIECE = 5  # tokens fed at a late start, and one decode step after them
# Parts of names in a configuration that tell of lengths; the values are positions to look at.
THRESHOLDS = ("position", "window", "chunk", "floor", "length", "context", "block")

Tokens = NDArray[np.int64]


@dataclass(eq=False)
class CheckedSequence:
    """What transformers computes in one call. ``cached``: tokens before it, whose state is random.

    ``positions``: others than the usual ones. ``logits [S, V]``: once they are computed.
    """

    tokens: list[int]
    positions: Tokens | None = None
    cached: int = 0
    logits: Floats = field(default_factory=lambda: np.empty((0, 0), np.float32))


@dataclass(frozen=True)
class Compared:
    """Logits ``[entry, columns]`` of a call of the graph, against those of a sequence at ``rows``."""

    entry: int
    columns: slice
    sequence: CheckedSequence
    rows: slice
    where: str


class CheckStep(SegmentCall):
    """A call of the graph. ``past``: gives its cache, by the graph's name of it."""

    def __init__(
        self,
        ids: Tokens,
        mask: Tokens,
        positions: Tokens,
        past: Callable[[str], Floats],
        compared: Sequence[Compared] = (),
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


def first_call(model: Any, kept: Mapping[str, KeptTensor], generator: np.random.Generator) -> CheckStep:
    ids = np.array([_tokens(model, LENGTHS[0], generator)], np.int64)
    return CheckStep(ids, np.ones_like(ids), np.arange(LENGTHS[0])[None], _empty(kept, 1))


def decoded(
    model: Any, kept: Mapping[str, KeptTensor], positions: int, generator: np.random.Generator
) -> list[CheckStep]:
    """Three prompts with left padding, a prefill and decode steps over the cache."""
    count = min(STEPS, positions - 1)
    lengths = [min(length, positions - count) for length in LENGTHS]
    sequences = [CheckedSequence(_tokens(model, length + count, generator)) for length in lengths]
    width, entries = max(lengths), len(lengths)
    ids, mask = np.ones((entries, width), np.int64), np.zeros((entries, width), np.int64)
    for entry, (sequence, length) in enumerate(zip(sequences, lengths, strict=True)):
        ids[entry, width - length :] = sequence.tokens[:length]
        mask[entry, width - length :] = 1
    compared = [
        Compared(entry, slice(width - length, width), sequence, slice(length), f"a prefill of {length} tokens")
        for entry, (sequence, length) in enumerate(zip(sequences, lengths, strict=True))
    ]
    steps = [CheckStep(ids, mask, np.maximum(np.cumsum(mask, axis=1) - 1, 0), _empty(kept, entries), compared)]
    for step in range(count):
        places = [length + step for length in lengths]
        ids = np.array([[sequence.tokens[at]] for sequence, at in zip(sequences, places, strict=True)], np.int64)
        mask = np.concatenate([mask, np.ones((entries, 1), np.int64)], axis=1)
        compared = [
            Compared(entry, slice(1), sequence, slice(at, at + 1), f"decode step {step + 1} after {at - step} tokens")
            for entry, (sequence, at) in enumerate(zip(sequences, places, strict=True))
        ]
        steps.append(CheckStep(ids, mask, np.array(places, np.int64)[:, None], steps[-1].grown(), compared))
    return steps


def spread(
    model: Any, kept: Mapping[str, KeptTensor], positions: int, generator: np.random.Generator
) -> list[CheckStep]:
    """Tokens at positions spread over all that are served, in two pieces beside a sequence of early positions."""
    weights = sum(parameter.numel() for parameter in model.parameters())
    count = min(max(int(SPREAD_WORK / (2 * weights)), SPREAD_TOKENS[0]), SPREAD_TOKENS[1], positions)
    spread = np.unique(np.linspace(0, positions - 1, count).round().astype(np.int64))
    early = np.arange(len(spread))
    sequences = [CheckedSequence(_tokens(model, len(spread), generator), places) for places in (spread, early)]
    tokens, places = np.array([sequence.tokens for sequence in sequences], np.int64), np.stack([spread, early])
    steps: list[CheckStep] = []
    for piece in np.array_split(early, 2):
        if not len(piece):
            continue
        compared = [
            Compared(entry, slice(column, column + 1), sequences[entry], slice(place, place + 1),
                      f"position {places[entry, place]} among {name} ones, in two pieces")
            for entry, name in enumerate(("spread", "early"))
            for column, place in enumerate(piece.tolist())
        ]  # fmt: skip
        past = steps[-1].grown() if steps else _empty(kept, 2)
        mask = np.ones((2, piece[-1] + 1), np.int64)
        steps.append(CheckStep(tokens[:, piece], mask, places[:, piece], past, compared))
    return steps


def late_starts(model: Any, windows: set[int], longest: int) -> list[int]:
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


def late(model: Any, before: RandomState, start: int, generator: np.random.Generator) -> list[CheckStep]:
    """A piece and a decode step after ``start`` tokens, beside a sequence of few ones."""
    starts = (start, min(3, start))
    sequences = [CheckedSequence(_tokens(model, PIECE + 1, generator), cached=cached) for cached in starts]
    mask = np.ones((2, start), np.int64)
    mask[1, : start - starts[1]] = 0
    steps: list[CheckStep] = []
    for piece in (range(PIECE), range(PIECE, PIECE + 1)):
        mask = np.concatenate([mask, np.ones((2, len(piece)), np.int64)], axis=1)
        ids = np.array([[sequence.tokens[n] for n in piece] for sequence in sequences], np.int64)
        places = np.array([[first + n for n in piece] for first in starts], np.int64)
        compared = [
            Compared(entry, slice(column, column + 1), sequence, slice(n, n + 1),
                      f"position {sequence.cached + n}, over a random state")
            for entry, sequence in enumerate(sequences)
            for column, n in enumerate(piece)
        ]  # fmt: skip
        past = steps[-1].grown() if steps else lambda name: before.padded(name, starts)
        steps.append(CheckStep(ids, mask, places, past, compared))
    return steps


def _tokens(model: Any, count: int, generator: np.random.Generator) -> list[int]:
    return generator.integers(1, model.config.get_text_config().vocab_size, size=count).tolist()


def _empty(kept: Mapping[str, KeptTensor], entries: int) -> Callable[[str], Floats]:
    """``past`` of a first call."""
    return lambda name: np.zeros((entries, *kept[name].shape(0)), np.float32)
