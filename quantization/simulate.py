"""The float model with chosen linears computed as their schemes say: what a scheme costs in quality, measured.

Weights are decoded and put into the stock modules, inputs are rounded in front of them, keys and values on their way
into attention. What lies before the first changed layer is not computed again: its result is kept from the float run.

S  positions that are compared      V  vocabulary size      K  input channels
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quantization.attention_hook import KVFunction, kv_function
from quantization.input_scale import InputScale
from quantization.needs import simulation_needs
from quantization.reference import InputGrid, input_hook
from quantization.rounding import FloatArray, QuantizedLinear
from quantization.units import EMBEDDING, HEAD
from tapeout.artifact import Artifact
from tapeout.errors import QuantizationError
from tapeout.portable_graph import LinearGroup, PortableGraph
from tapeout.resources import require

POSITIONS = (
    64  # of a sample whose distributions are compared, evenly spaced: the head is a fifth of a small model's work
)


@dataclass(frozen=True)
class Simulated:
    """The linears of one group as a scheme has them."""

    weights: tuple[FloatArray, ...]  # of the members, decoded, [N, K]
    round_inputs: Callable[[Tensor], Tensor] | None


def simulated(linears: Sequence[QuantizedLinear], scale: InputScale) -> Simulated:
    """Linears that were quantized under an input scale, in front of inputs that were not divided by it."""
    factor = torch.from_numpy(scale.values)
    rounding = InputGrid.of(linears[0])
    return Simulated(
        tuple(linear.dequantize() / scale.values for linear in linears),
        rounding if scale.is_identity else lambda inputs: rounding(inputs / factor) * factor,
    )


class Simulation:
    """Holds the float model and what it says of ``samples`` of token ids."""

    def __init__(
        self,
        graph: Artifact[PortableGraph],
        samples: Sequence[Sequence[int]],
        starts: Collection[int],
        *,
        plans: bool = False,
    ) -> None:
        """``starts``: layers that a changed part may begin with. ``plans``: all units are changed at once.

        :class:`ResourceError` where memory does not suffice.
        """
        from transformers import AutoModelForCausalLM

        positions = sum(min(len(sample), POSITIONS) for sample in samples)
        require("a simulation of the model", simulation_needs(graph.record, positions, plans=plans), graph.folder)
        self._samples = [torch.tensor([list(sample)]) for sample in samples]
        self._model: Any = AutoModelForCausalLM.from_pretrained(graph.folder, dtype=torch.float32).eval()
        self._head: Any = self._model.get_output_embeddings()
        self._layers = _layers_of(self._model, graph.record)
        self._modules = {group.name: self._modules_of(group) for group in graph.record.groups}
        self._transposed = {group.name for group in graph.record.groups if group.transposed}
        self._modules[EMBEDDING] = [self._model.get_input_embeddings()]
        self._before = {start: list[Any]() for start in starts if start}  # what layer start - 1 returned, by sample
        self._float = self._float_run()
        self.positions = sum(len(exact.share) for exact in self._float)

    def kl(self, changed: Mapping[str, Simulated], *, first_layer: int = 0, kv: KVFunction | None = None) -> float:
        """Mean KL(float, changed) in nats per position; nothing before ``first_layer`` may be changed."""
        total = 0.0
        with self._exchanged(changed), torch.inference_mode():
            for number, exact in enumerate(self._float):
                with self._resumed(first_layer, number):
                    logits = self._run(number, kv)
                total += float(exact.divergence(logits).sum())
        return max(0.0, total / self.positions)

    def _float_run(self) -> list[Distributions]:
        handles = [
            self._layers[start - 1].register_forward_hook(
                lambda _module, _inputs, output, kept=kept: kept.append(output)
            )
            for start, kept in self._before.items()
        ]
        try:
            with torch.inference_mode():
                return [Distributions.of(self._run(number, None)) for number in range(len(self._samples))]
        finally:
            for handle in handles:
                handle.remove()

    def _run(self, number: int, kv: KVFunction | None) -> Tensor:
        """Logits ``[S, V]`` at the compared positions of a sample."""
        sample = self._samples[number]
        compared = torch.linspace(0, sample.shape[1] - 1, min(sample.shape[1], POSITIONS)).long()
        handle = self._head.register_forward_pre_hook(lambda _module, inputs: (inputs[0][:, compared], *inputs[1:]))
        try:
            with kv_function(self._model, kv or _as_it_is):
                return self._model(input_ids=sample, use_cache=False).logits[0]
        finally:
            handle.remove()

    @contextmanager
    def _resumed(self, first_layer: int, number: int) -> Generator[None]:
        """Layers before ``first_layer`` return what the last of them did in the float run."""
        if not first_layer:
            yield
            return
        output = self._before[first_layer][number]
        skipped = self._layers[:first_layer]
        for layer in skipped:
            layer.forward = lambda *_, **__: output
        try:
            yield
        finally:
            for layer in skipped:
                del layer.forward

    @contextmanager
    def _exchanged(self, changed: Mapping[str, Simulated]) -> Generator[None]:
        with ExitStack() as stack:
            for name, group in changed.items():
                for module, weight in zip(self._modules[name], group.weights, strict=True):
                    stack.enter_context(_weight(module, weight.T if name in self._transposed else weight))
                    if group.round_inputs is not None:
                        stack.callback(module.register_forward_pre_hook(input_hook(group.round_inputs)).remove)
            yield

    def _modules_of(self, group: LinearGroup) -> list[Any]:
        """A tied head goes by its embedding's name, so it is asked for."""
        if group.name == HEAD:
            return [self._head]
        return [self._model.get_submodule(name.removesuffix(".weight")) for name in group.members]


@dataclass(frozen=True)
class Distributions:
    """What the float model says at the compared positions of a sample."""

    share: Tensor  # p, [S, V]
    mass: Tensor  # its sum [S]: one, but for the rounding of V numbers
    negentropy: Tensor  # the sum of p log p [S]

    @classmethod
    def of(cls, logits: Tensor) -> Distributions:
        logs = logits.log_softmax(-1)
        share = logs.exp()
        return cls(share, share.sum(-1), (share * logs).sum(-1))

    def divergence(self, logits: Tensor) -> Tensor:
        """KL(p, softmax(logits)) ``[S]``, exact to about 1e-6.

        It is the difference of two sums of about the size of the logits, so what is small in them counts: a mass that
        is taken to be one, or a matmul that drops the tail of the vocabulary, makes KLs of 1e-4 from nothing.
        """
        return self.negentropy - (self.share * logits).sum(-1) + self.mass * logits.logsumexp(-1)


def _as_it_is(_layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    return key, value


@contextmanager
def _weight(module: Any, weight: FloatArray) -> Generator[None]:
    before = module.weight
    module.weight = torch.nn.Parameter(torch.from_numpy(np.ascontiguousarray(weight, np.float32)), requires_grad=False)
    try:
        yield
    finally:
        module.weight = before


def _layers_of(model: Any, graph: PortableGraph) -> Any:
    """The decoder's list of layers, by the parameters it holds."""
    first = next(group.members[0] for group in graph.groups if group.name.startswith("layers.0."))
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == graph.layers and first.startswith(f"{name}.0."):
            return module
    raise QuantizationError(
        f"{type(model).__name__} has no list of {graph.layers} layers that holds {first}",
        expected="a decoder whose layers are one list of modules",
        remedy="write the rules of plan.schemes out, which needs no sensitivities",
    )
