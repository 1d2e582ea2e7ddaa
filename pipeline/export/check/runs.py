"""Both sides of a check, each in parts.

Every call of the graph goes through a segment before the next one, and every sequence through a layer of transformers
before the next one: either side reads its weights once and holds a part of them. What a segment or a layer left is kept
in a file, so that an interrupted check goes on there.
"""

from __future__ import annotations

import pickle
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch

from pipeline.export.check.calls import CheckedSequence, CheckStep
from pipeline.export.check.state import Floats, RandomState
from pipeline.export.trace import takes
from tapeout.layer_stream import LayerState, LayerStream
from tapeout.operators import PAST, computed_by_token, state_resumed
from tapeout.progress import ProgressBar
from tapeout.segments import Arrays, SegmentedGraph
from tapeout.work_folder import is_kept, keep


class KeptProgress:
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


def run_graph(graph: SegmentedGraph, steps: Sequence[CheckStep], progress: KeptProgress) -> None:
    left: tuple[list[Arrays] | None, list[tuple[Floats, dict[str, Floats] | None]]] = progress.left or (None, [])
    kept, results = left
    for step, (logits, cache) in zip(steps, results, strict=False):
        step.logits = logits
        if step.cache is not None:
            step.cache.update(cache or {})

    def finished(done: int, kept: list[Arrays]) -> None:
        progress.keep(done, (kept, [(step.logits, step.cache) for step in steps]))

    graph.run(steps, done=progress.done, kept=kept, finished=finished)


def run_transformers(
    stream: LayerStream, sequences: Sequence[CheckedSequence], before: RandomState, progress: KeptProgress
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
def _inputs(model: Any, sequence: CheckedSequence, before: RandomState, layer: int) -> Generator[dict[str, Any]]:
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
