"""Run a dense decoder of transformers one layer at a time, with no more than one layer's weights in memory.

Weights stay in their files, and those of a layer are converted once for all samples (tapeout/mapped_weights.py).

To compute layer N of a sample, the whole model is called with the sample's usual inputs. Layers before N pass on the
hidden states that were kept; layer N computes; then the call ends. So each layer gets the masks, position embeddings
and other arguments that the model itself makes for it, with no code per architecture.

B, S  batch and tokens of a sample     C  hidden size     V  vocabulary size
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tapeout.errors import ModelError
from tapeout.mapped_model import decoder_layers, open_model
from tapeout.mapped_weights import widened

CarriedStates = dict[str, dict[Any, Any]]  # what a layer leaves in its mutable arguments for later layers, by argument


@dataclass(frozen=True)
class LayerState:
    """What a sample is between two layers. ``hidden`` ``[B, S, C]``: None before the first layer.

    ``carried``: what layers hand on besides, such as keys and values that later layers share; mostly empty.
    """

    hidden: Tensor | None = None
    carried: CarriedStates = field(default_factory=CarriedStates)


@dataclass
class _LayerCall:
    """One call of the model: it ends when ``layer`` has made ``after`` of ``before``."""

    layer: int  # the number of layers: the call goes on to the end
    before: LayerState
    reached: int = 0
    after: LayerState | None = None


class _Reached(Exception):  # noqa: N818 - not an error: the rest of the forward pass is not needed
    """The layer of this call has been computed."""


class LayerStream:
    """``model`` takes hooks and another attention like any model of transformers; its layers compute when loaded.

    ``weights``: those of the folder unless given. :class:`ModelError` for a model without one list of decoder layers,
    and for parameters that the checkpoint lacks or has in another shape.
    """

    def __init__(self, folder: Path, *, weights: Mapping[str, Tensor] | None = None) -> None:
        self.model: Any = open_model(folder, weights)
        self.layers = decoder_layers(self.model)
        self._call: _LayerCall | None = None
        self._returned = 0  # values in the tuple that a layer returns; 0: it returns hidden states alone
        for number, layer in enumerate(self.layers):
            layer.forward = self._replaced(number, layer.forward)
        self.run(0, LayerState(), input_ids=torch.zeros(1, 1, dtype=torch.long))  # shows what a layer returns

    def __len__(self) -> int:
        return len(self.layers)

    def loaded(self, number: int) -> AbstractContextManager[None]:
        """Keep the layer's weights in memory, in float32, while the context lasts; else each call converts them."""
        return widened(self.layers[number].parameters())

    def run(self, number: int, state: LayerState, **inputs: Any) -> LayerState:
        """The state after layer ``number``, which is loaded; ``state`` is that before it.

        ``inputs``: of the model, such as ``input_ids``; the same for every layer of a sample.
        """
        call = _LayerCall(number, state)
        with self._calling(call):
            try:
                self.model(**inputs, use_cache=False)
            except _Reached:
                assert call.after is not None
                return call.after
        raise ModelError(
            f"{type(self.model).__name__} ran without calling layer {number}",
            expected="each of its layers once, in order",
            remedy="choose a dense decoder",
        )

    def finish(self, state: LayerState, **inputs: Any) -> Any:
        """The model's own output, ``logits [B, S, V]`` among it; ``state`` is that after the last layer."""
        with self._calling(_LayerCall(len(self), state)):
            return self.model(**inputs, use_cache=False)

    def logits(self, **inputs: Any) -> Tensor:
        """Through all layers: ``[B, S, V]``."""
        state = LayerState()
        for number in range(len(self)):
            with self.loaded(number):
                state = self.run(number, state, **inputs)
        return self.finish(state, **inputs).logits

    @contextmanager
    def _calling(self, call: _LayerCall) -> Generator[None]:
        self._call = call
        try:
            with torch.inference_mode():
                yield
        finally:
            self._call = None

    def _replaced(self, number: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A layer's ``forward``, whose first argument is the hidden states."""

        def replaced(hidden_states: Tensor, *args: Any, **options: Any) -> Any:
            call = self._call
            if call is None or call.reached != number:
                raise ModelError(
                    f"layer {number} of {type(self.model).__name__} was called out of order",
                    expected="each layer once, in order",
                    remedy="choose a dense decoder without shared layers",
                )
            call.reached += 1
            hidden = hidden_states if call.before.hidden is None else call.before.hidden
            if number < call.layer:
                return (hidden, *[None] * (self._returned - 1)) if self._returned else hidden
            for name, mapping in _mappings(options):
                mapping.update(call.before.carried.get(name, {}))
            result = forward(hidden.clone(), *args, **options)  # some layers write to their input
            self._returned = len(result) if isinstance(result, tuple) else 0
            carried = {name: dict(mapping) for name, mapping in _mappings(options) if mapping}
            call.after = LayerState(result[0] if isinstance(result, tuple) else result, carried)
            raise _Reached

        return replaced


def _mappings(options: dict[str, Any]) -> list[tuple[str, MutableMapping[Any, Any]]]:
    return [(name, value) for name, value in options.items() if isinstance(value, MutableMapping)]
