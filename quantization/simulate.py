"""The float model with chosen linears computed as their schemes say: what a scheme costs in quality, measured.

Stock modules take decoded weights during their calls, inputs of linears are rounded in front of them, keys and values
on their way into attention. Experts read their inputs in float. What lies before the first changed layer is not
computed again: its result is kept from the float run. The float weights stay in their files, and all samples go through
the model together, so that a weight is converted or decoded once.

S  positions that are compared, of all samples      V  vocabulary size      N, K  output and input channels
"""

from __future__ import annotations

import math
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quantization.input_scale import InputScale
from quantization.reference import InputGrid, input_hook, to_bfloat16
from quantization.units import EMBEDDING, HEAD
from tapeout.artifact import Artifact
from tapeout.errors import QuantizationError
from tapeout.mapped_model import decoder_layers, open_model
from tapeout.mapped_weights import weight_at_call
from tapeout.operators import computed_by_token, state_changed
from tapeout.operators.operator import StateChange
from tapeout.portable_graph import LinearGroup, PortableGraph
from tapeout.quantized import QuantizedWeight

POSITIONS = (
    64  # of a sample whose distributions are compared, evenly spaced: the head is a fifth of a small model's work
)


@dataclass(frozen=True)
class Simulated:
    """The weights of one group under a scheme; inputs are not divided by ``scale``, under which they were quantized."""

    linears: tuple[QuantizedWeight, ...]
    scale: InputScale

    def weight(self, number: int) -> Tensor:
        """Of a member, decoded: ``[..., N, K]``."""
        decoded = self.linears[number].dequantize()
        return torch.from_numpy(decoded if self.scale.is_identity else decoded / self.scale.values)

    def round_inputs(self, inputs: Tensor, *, int8: bool) -> Tensor:
        """``int8``: those of integer codes are rounded by token and block, unless they have a static grid."""
        rounded = InputGrid.of(self.linears[0])
        if rounded.input_scale is None and not rounded.by_token and not int8:
            return inputs
        if self.scale.is_identity:
            return rounded(inputs)
        factor = torch.from_numpy(self.scale.values)
        return rounded(inputs / factor) * factor


class Simulation:
    """The float model and what it says of ``samples`` of token ids."""

    def __init__(
        self,
        graph: Artifact[PortableGraph],
        samples: Sequence[Sequence[int]],
        starts: Collection[int],
        *,
        int8_inputs: bool = True,
    ) -> None:
        """``starts``: layers that a changed part may begin with. ``int8_inputs``: see :class:`Candidates`."""
        self._int8_inputs = int8_inputs
        longest = max(map(len, samples))
        # No token sees those behind it, so shorter samples may end in any.
        self._ids = torch.tensor([[*sample, *[0] * (longest - len(sample))] for sample in samples])
        self._compared = [torch.linspace(0, len(s) - 1, min(len(s), POSITIONS)).long() for s in samples]
        self.positions = sum(map(len, self._compared))
        self._model: Any = open_model(graph.folder)
        self._head: Any = self._model.get_output_embeddings()
        self._layers = decoder_layers(self._model)
        self._parameters = {group.name: self._parameters_of(group) for group in graph.record.groups}
        self._transposed = {group.name for group in graph.record.groups if group.transposed}
        self._experts = {group.name for group in graph.record.groups if group.experts}
        self._parameters[EMBEDDING] = [(self._model.get_input_embeddings(), "weight")]
        self._before: dict[int, Any] = {}  # by start: what the layer before it returned
        self._float = self._float_run(starts)

    def kl(self, changed: Mapping[str, Simulated], *, first_layer: int = 0, kv: StateChange | None = None) -> float:
        """Mean KL(float, changed) in nats per position; nothing before ``first_layer`` may be changed.

        :class:`QuantizationError` for one that is not finite: NaN must not pass for a KL of 0.
        """
        with self._exchanged(changed), self._resumed(first_layer), torch.inference_mode():
            logits = self._run(kv)
            divergences = [float(exact.divergence(rows).sum()) for exact, rows in zip(self._float, logits, strict=True)]
        mean = sum(divergences) / self.positions
        if not math.isfinite(mean):
            raise QuantizationError(
                f"a KL of {mean}" + (f" with {', '.join(sorted(changed)[:4])} quantized" if changed else ""),
                expected="finite logits of the quantized model",
                remedy="leave out the scheme, KV cache or recurrent state under which activations overflow",
            )
        return max(0.0, mean)

    def state_kl(self) -> float:
        """The same of states of recurrences in bfloat16 alone, as an engine rounds them: after each token."""
        with computed_by_token(self._model, to_bfloat16):
            return self.kl({})

    def _float_run(self, starts: Collection[int]) -> list[Distributions]:
        def keep(start: int, _module: Any, _inputs: Any, output: Any) -> None:
            self._before[start] = _copied(output)

        kept = [self._layers[s - 1].register_forward_hook(partial(keep, s)) for s in sorted(set(starts)) if s]
        try:
            with torch.inference_mode():
                return [Distributions.of(logits) for logits in self._run(None)]
        finally:
            for handle in kept:
                handle.remove()

    def _run(self, kv: StateChange | None) -> tuple[Tensor, ...]:
        """Logits ``[P, V]`` at the compared positions of each sample."""
        counts = [len(positions) for positions in self._compared]
        rows = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
        places = rows, torch.cat(self._compared)
        handle = self._head.register_forward_pre_hook(lambda _module, inputs: (inputs[0][places][None], *inputs[1:]))
        try:
            with state_changed(self._model, kv or _as_it_is):
                return self._model(input_ids=self._ids, use_cache=False).logits[0].split(counts)
        finally:
            handle.remove()

    @contextmanager
    def _resumed(self, first_layer: int) -> Generator[None]:
        """Layers before ``first_layer`` return what the last of them did in the float run."""
        skipped = self._layers[:first_layer]
        for layer in skipped:
            layer.forward = lambda *_, **__: _copied(self._before[first_layer])
        try:
            yield
        finally:
            for layer in skipped:
                del layer.forward

    @contextmanager
    def _exchanged(self, changed: Mapping[str, Simulated]) -> Generator[None]:
        with ExitStack() as stack:
            for name, group in changed.items():
                for number, (module, parameter) in enumerate(self._parameters[name]):
                    hooks = [*weight_at_call(module, partial(self._weight, name, group, number), parameter)]
                    if name != EMBEDDING and name not in self._experts:
                        rounded = partial(group.round_inputs, int8=self._int8_inputs)
                        hooks.append(module.register_forward_pre_hook(input_hook(rounded)))
                    for hook in hooks:
                        stack.callback(hook.remove)
            yield

    def _weight(self, name: str, group: Simulated, number: int) -> Tensor:
        weight = group.weight(number)
        return weight.swapaxes(-1, -2) if name in self._transposed else weight

    def _parameters_of(self, group: LinearGroup) -> list[tuple[Any, str]]:
        """Modules and names of their parameters. A tied head goes by its embedding's name, so it is asked for."""
        if group.name == HEAD:
            return [(self._head, "weight")]
        names = (name.rpartition(".") for name in group.members)
        return [(self._model.get_submodule(module), parameter) for module, _, parameter in names]


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


def _copied(output: Any) -> Any:
    """What a layer returned; some layers write to their input, which is the output of the one before."""
    return output.clone() if isinstance(output, Tensor) else tuple(map(_copied, output))


def _as_it_is(_layer: int, _name: str, kept: Tensor) -> Tensor:
    return kept
