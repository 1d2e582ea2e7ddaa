"""Run a dense decoder of transformers one layer at a time, with no more than one layer's weights in memory.

The model is built without weights: every parameter is a single NaN, expanded to its shape, so that one which is read
before it is loaded shows in the result. What lies outside the layers is small and loaded at once, except matrices of
embeddings and linears (the token embedding, lm_head): these stay in the file, in its dtype, and are read in slices.

To compute layer N of a sample, the whole model is called with the sample's usual inputs. Layers before N pass on the
hidden states that were kept; layer N computes; then the call ends. So each layer gets the masks, position embeddings
and other arguments that the model itself makes for it, with no code per architecture.

B, S  batch and tokens of a sample     C  hidden size     V  vocabulary size
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from tapeout.errors import ModelError
from tapeout.tensor_files import stored_tensors

OUTPUTS_AT_ONCE = 16384  # of a matrix that stays in the file, converted to float32 together
CarriedStates = dict[str, dict[Any, Any]]  # what a layer leaves in its mutable arguments for later layers, by argument


class Weights(Protocol):
    """Parameters by name, in any float dtype."""

    def __contains__(self, name: object) -> bool: ...

    def __getitem__(self, name: str) -> Tensor: ...


class WeightFiles:
    """The tensors of a checkpoint folder. Each is a view of the mapped file: a page is in memory once it is read."""

    def __init__(self, folder: Path) -> None:
        self._stored = stored_tensors(folder)

    def __contains__(self, name: object) -> bool:
        return name in self._stored

    def __getitem__(self, name: str) -> Tensor:
        return self._stored[name].read()


@dataclass(frozen=True)
class LayerState:
    """What a sample is between two layers. ``hidden`` ``[B, S, C]``: None before the first layer.

    ``carried``: what layers hand on besides, such as keys and values that later layers share; mostly empty.
    """

    hidden: Tensor | None = None
    carried: CarriedStates = field(default_factory=CarriedStates)


@dataclass
class _Call:
    """One call of the model: it ends when ``layer`` has made ``after`` of ``before``."""

    layer: int  # the number of layers: the call goes on to the end
    before: LayerState
    reached: int = 0
    after: LayerState | None = None


class _Reached(Exception):  # noqa: N818 - not an error: the rest of the forward pass is not needed
    """The layer of this call has been computed."""


@dataclass(frozen=True)
class _Slot:
    """Where a parameter belongs, and its name in the checkpoint."""

    module: nn.Module
    attribute: str
    stored: str

    @property
    def value(self) -> Tensor:
        return getattr(self.module, self.attribute)

    def fill(self, tensor: Tensor) -> None:
        setattr(self.module, self.attribute, nn.Parameter(tensor, requires_grad=False))


class LayerStream:
    """``model`` takes hooks and another attention like any model of transformers; its layers compute when loaded.

    ``weights``: those of the folder unless given. :class:`ModelError` for a model without one list of decoder layers,
    and for parameters that the checkpoint lacks or has in another shape.
    """

    def __init__(self, folder: Path, *, weights: Weights | None = None) -> None:
        from accelerate import init_empty_weights
        from transformers import AutoConfig, AutoModelForCausalLM

        self._weights = WeightFiles(folder) if weights is None else weights
        with init_empty_weights(include_buffers=False):
            config = AutoConfig.from_pretrained(folder)
            self.model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        self.model.tie_weights()
        self.layers = _decoder_layers(self.model)
        inside = [set(layer.modules()) for layer in self.layers]
        slots = _slots(self.model, self._weights)
        _load_buffers(self.model, self._weights)
        self._of_layer = [[slot for slot in slots if slot.module in modules] for modules in inside]
        outside = [slot for slot in slots if not any(slot.module in modules for modules in inside)]
        self._unload(slots)
        self._in_files = {id(slot.value): slot.stored for slot in outside if _is_matrix(slot)}
        self._load([slot for slot in outside if not _is_matrix(slot)])
        self._call: _Call | None = None
        self._returned = 0  # values in the tuple that a layer returns; 0: it returns hidden states alone
        for number, layer in enumerate(self.layers):
            layer.forward = self._replaced(number, layer.forward)
        self.run(0, LayerState(), input_ids=torch.zeros(1, 1, dtype=torch.long))  # shows what a layer returns

    def __len__(self) -> int:
        return len(self.layers)

    @contextmanager
    def loaded(self, number: int) -> Generator[None]:
        """Keep the layer's weights in memory, in float32, while the context lasts."""
        self._load(self._of_layer[number])
        try:
            yield
        finally:
            self._unload(self._of_layer[number])

    def run(self, number: int, state: LayerState, **inputs: Any) -> LayerState:
        """The state after layer ``number``, which is loaded; ``state`` is that before it.

        ``inputs``: of the model, such as ``input_ids``; the same for every layer of a sample.
        """
        call = _Call(number, state)
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
        with self._calling(_Call(len(self), state)):
            return self.model(**inputs, use_cache=False)

    def logits(self, **inputs: Any) -> Tensor:
        """Through all layers: ``[B, S, V]``."""
        state = LayerState()
        for number in range(len(self)):
            with self.loaded(number):
                state = self.run(number, state, **inputs)
        return self.finish(state, **inputs).logits

    @contextmanager
    def _calling(self, call: _Call) -> Generator[None]:
        self._call = call
        try:
            with torch.inference_mode(), _ReadInSlices(self._in_files, self._weights):
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

    def _load(self, slots: Iterable[_Slot]) -> None:
        for slot in slots:
            stored = self._weights[slot.stored]
            if stored.shape != slot.value.shape:
                raise ModelError(
                    f"{slot.stored} is {list(stored.shape)} in the checkpoint",
                    expected=f"{list(slot.value.shape)}, as its configuration says",
                    remedy="restore the configuration that the weights were saved with",
                )
            slot.fill(stored.to(torch.float32, copy=True))  # in memory of its own, which can be released

    @staticmethod
    def _unload(slots: Iterable[_Slot]) -> None:
        for slot in slots:
            slot.fill(torch.full([1] * slot.value.dim(), torch.nan).expand(slot.value.shape))


class _ReadInSlices(TorchFunctionMode):
    """Embeddings and linears whose weight stays in the file: the rows that are looked up, or some outputs at a time."""

    def __init__(self, names: dict[int, str], weights: Weights) -> None:
        super().__init__()
        self._names, self._weights = names, weights

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (functional.embedding, functional.linear) and (name := self._names.get(id(args[1]))):
            weight = self._weights[name]
            if func is functional.embedding:
                return weight[args[0]].float()
            bias = args[2] if len(args) > 2 else (kwargs or {}).get("bias")
            parts = [functional.linear(args[0], part.float()) for part in weight.split(OUTPUTS_AT_ONCE)]
            return torch.cat(parts, -1) if bias is None else torch.cat(parts, -1) + bias
        return func(*args, **(kwargs or {}))


def _decoder_layers(model: Any) -> list[Any]:
    """The list of layers that holds most of the model's parameters."""
    count = model.config.get_text_config().num_hidden_layers
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    if not lists:
        raise ModelError(
            f"{type(model).__name__} has no list of {count} layers",
            expected="a decoder whose layers are one list of modules",
            remedy="choose a dense decoder",
        )
    return list(max(lists, key=lambda found: sum(parameter.numel() for parameter in found.parameters())))


def _slots(model: Any, weights: Weights) -> list[_Slot]:
    """Of every parameter. Tied ones are stored under one name."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    stored = {key: next((name for name in alike if name in weights), "") for key, alike in names.items()}
    if missing := [names[key][0] for key, name in stored.items() if not name]:
        raise ModelError(
            f"the checkpoint lacks {len(missing)} parameters of {type(model).__name__}, such as {missing[0]}",
            expected="every parameter of the model",
            remedy="complete the checkpoint, or export the model again",
        )
    return [
        _Slot(module, name, stored[id(parameter)])
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
    ]


def _load_buffers(model: Any, weights: Weights) -> None:
    for name, buffer in model.named_buffers():
        if name in weights:
            buffer.data = weights[name].to(torch.float32 if buffer.is_floating_point() else buffer.dtype, copy=True)


def _is_matrix(slot: _Slot) -> bool:
    return slot.attribute == "weight" and isinstance(slot.module, nn.Embedding | nn.Linear)


def _mappings(options: dict[str, Any]) -> list[tuple[str, MutableMapping[Any, Any]]]:
    return [(name, value) for name, value in options.items() if isinstance(value, MutableMapping)]
