"""The quantized model in torch: what an engine built from a QuantizedModel must compute, up to float rounding.

Weights are decoded from the checkpoint, keys and values pass through their static int8, int4 or FP8 grid on the way
into attention, as do the inputs of linears that have an input scale. As an option the inputs of the other quantized
linears are rounded per row and block, as ONNX Runtime's MatMulNBits does it at ``accuracy_level`` 4. An engine that
agrees with this model was lowered correctly, whatever quantization itself cost.

Linears and experts beyond ``decoded_bytes()`` are decoded at each call, so that the model need not fit the memory. The
embedding is held.
The checkpoint is decoded by this package's reader and not by transformers, which cannot load packed zero points
(compressed_tensors.py); the modules and their attention are transformers' own.

S  tokens of a document     V  vocabulary size     K  input channels     H, D  KV heads and head size
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from quantization.checkpoint import KV_SCALES, KVScales
from quantization.compressed_tensors import Checkpoint, open_checkpoint
from quantization.kv_cache import LARGEST, scale_name
from quantization.needs import decoded_bytes, reference_needs
from tapeout.errors import QuantizationError
from tapeout.mapped_model import empty_model, fill
from tapeout.mapped_weights import weight_at_call
from tapeout.number_format import Activations
from tapeout.operators import computed_by_token, state_changed, state_left
from tapeout.operators.experts import DOWN_INPUT, UP_INPUT
from tapeout.operators.experts.in_torch import calls_interface, experts_changed
from tapeout.progress import ProgressBar
from tapeout.quantized import QuantizedWeight, is_e4m3
from tapeout.resources import require

FloatArray = NDArray[np.float32]
IntArray = NDArray[np.int64]
Errors = dict[str, tuple[float, float]]  # relative, over a document and at the worst position
TINY = 1e-30


class QuantizedReference:
    """``reference(tokens)`` gives float32 logits ``[S, V]`` of one document.

    ``folder`` is what the quantize stage wrote; keys and values stay in float where it has no ``kv_scales``.
    ``int8_activations`` rounds the inputs of quantized experts, and of every quantized linear without an input scale,
    per row and per group of their weights. Linears with an input scale always round to their static grid: that is part
    of the checkpoint, not of a kernel. ``fp8_activations`` rounds the inputs of linears in FP8 to E4M3, per token; such
    inputs are never rounded to int8. ``half_cache``: a KV cache that is not quantized is in float16, as on targets of
    16-bit floats. ``recurrent_state``: bfloat16 rounds what each token leaves in a recurrence.
    """

    def __init__(
        self,
        folder: Path,
        *,
        int8_activations: bool = False,
        fp8_activations: bool = False,
        half_cache: bool = False,
        recurrent_state: str = "float32",
    ) -> None:
        self.model, linears, experts = _load(folder)
        self._experts = {at: grid for at, grid in experts.items() if int8_activations}
        stored = KVScales.read(folder)
        self.kv_scales = {name: torch.from_numpy(scale) for name, scale in stored.scales.items()}
        self.kv_dtype, self._half_cache = stored.dtype, half_cache
        self._states: dict[str, list[FloatArray]] = {}
        self._mixtures = dict(_mixtures(self.model))
        self._choices: dict[str, IntArray] = {}
        self._attention_errors: Errors = {}
        self._rounds_states, self._rounds_inputs = recurrent_state == "bfloat16", True
        for module, grid in linears:
            if grid.input_scale is not None or (fp8_activations if grid.by_token else int8_activations):
                module.register_forward_pre_hook(input_hook(partial(self._rounded_input, grid)))

    def __call__(self, tokens: Sequence[int]) -> FloatArray:
        with self._states_kept():
            return self._logits(tokens)

    def _states_kept(self) -> AbstractContextManager[None]:
        """States of recurrences as the engine keeps them. Around whatever else looks at them."""
        return computed_by_token(self.model, to_bfloat16) if self._rounds_states else nullcontext()

    def _logits(self, tokens: Sequence[int]) -> FloatArray:
        self._choices = {}
        rounded = experts_changed(self.model, self._round_inputs, self._see) if self._mixtures else nullcontext()
        with torch.inference_mode(), state_changed(self.model, self._round_state), rounded:
            logits: Tensor = self.model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits
        return logits[0].numpy()

    def state_rounding(self, tokens: Sequence[int]) -> tuple[FloatArray, FloatArray] | None:
        """Logits ``[S, V]`` with states in float32, and in bfloat16; None where the model keeps them in float32.

        Inputs of linears are not rounded in either: flips of their codes would hide what states cost.
        """
        if not self._rounds_states:
            return None
        self._rounds_inputs = False
        try:
            return self._logits(tokens), self(tokens)
        finally:
            self._rounds_inputs = True

    def embedding(self) -> FloatArray:
        """The decoded embedding of every token id, ``[V, H]``."""
        return self.model.get_input_embeddings().weight.detach().numpy()

    def teacher_forced(
        self, tokens: Sequence[int], outputs: Mapping[str, FloatArray], attention: Mapping[str, FloatArray]
    ) -> tuple[FloatArray, Errors]:
        """Logits ``[S, V]`` with every linear's output exchanged for ``outputs[parameter] [S, out]``, and the errors.

        The error of a linear is the root mean square of what it made of its input, less ``outputs``, over the root
        mean square of ``outputs``; the second error is that of the worst position. Each linear is judged on its own:
        the next one starts from the given values again. So a rounding that falls the other way after a different order
        of summation stays where it happened. Left to run freely such flips multiply: on the default model a relative
        change of 1e-6 in the embeddings alone moves the logits of the int8 model by a KL of 0.005
        (docs/negative-results.md). The experts of a layer are one linear here, by the name of their down projection:
        what they add up to for each token is exchanged, so that both sides' routers read the same.

        ``attention``, what the engine's attention gave, ``[S, in]`` by the linear that reads it, is exchanged before it
        is rounded, and has errors of its own (:meth:`attention_errors`): where attention computes in 16 bits, rounding
        to E4M3 makes a linear's error of 0.005 out of one of 0.0005, and would hide what is wrong with the linear.
        """
        names = {id(p): n for n, p in self.model.named_parameters(remove_duplicate=False)}
        errors: Errors = {}
        found: Errors = {}
        handles: list[Any] = []
        for module in self.model.modules():
            experts = calls_interface(module)
            name = names.get(id(getattr(module, "down_proj" if experts else "weight", None)), "")
            if name in outputs and (experts or isinstance(module, torch.nn.Linear | Conv1D)):
                handles.append(module.register_forward_hook(_exchange(name, outputs[name], errors)))
                if name in attention:
                    exchange = partial(_exchanged, name, attention[name], found)
                    handles.append(module.register_forward_pre_hook(input_hook(exchange), prepend=True))
        self._states = {}
        try:
            with self._states_kept(), state_left(self.model, self._keep):
                logits = self._logits(tokens)
            self._attention_errors = found
        finally:
            for handle in handles:
                handle.remove()
        missing = (outputs.keys() - errors.keys()) | (attention.keys() - found.keys())
        if missing:
            raise QuantizationError(
                f"{type(self.model).__name__} has no linear {min(missing)}",
                expected="every linear of the engine",
                remedy="build the engine from this checkpoint",
            )
        return logits, errors

    def attention_errors(self) -> Errors:
        """Of each attention that the last :meth:`teacher_forced` was given, as errors of linears there."""
        return self._attention_errors

    def states(self) -> dict[str, list[FloatArray]]:
        """Recurrent state that the tokens of the last :meth:`teacher_forced` left, by the name of its tensor, in the
        order of layers.
        """
        return self._states

    def choices(self) -> dict[str, IntArray]:
        """Experts ``[S, k]`` that the tokens of the last call chose, by the name of their layer's down projection."""
        return self._choices

    def experts(self) -> dict[str, int]:
        """How many each layer has, likewise."""
        return {name: len(module.down_proj) for module, name in self._mixtures.items()}

    def _keep(self, name: str, left: Tensor) -> None:
        self._states.setdefault(name, []).append(left[0].float().numpy().copy())

    def _rounded_input(self, grid: InputGrid, inputs: Tensor) -> Tensor:
        return grid(inputs) if self._rounds_inputs else inputs

    def _round_inputs(
        self, module: torch.nn.Module, number: int, expert: int, inputs: Tensor, _weight: Tensor
    ) -> Tensor:
        grid = self._experts.get((module, number))
        return inputs if grid is None else self._rounded_input(grid, inputs)

    def _see(self, module: torch.nn.Module, _x: Tensor, index: Tensor) -> None:
        self._choices[self._mixtures[module]] = index.numpy()

    def _round_state(self, layer: int, part: str, kept: Tensor) -> Tensor:
        if not self.kv_scales:
            return kept.half().float() if self._half_cache else kept
        try:
            scale = self.kv_scales[scale_name(layer, part)]
        except KeyError as error:
            raise QuantizationError(
                f"{KV_SCALES} has no {error.args[0]}",
                expected="scales for keys and values of every layer",
                remedy="run `dvc repro quantize`",
            ) from None
        return round_to_grid(kept, scale, self.kv_dtype)


def to_bfloat16(state: Tensor) -> Tensor:
    """The nearest one, of two as near the larger magnitude, as kernels round."""
    bits = state.contiguous().view(torch.int32)
    return ((bits + 0x8000) & -0x10000).view(torch.float32)


def round_to_grid(values: Tensor, scale: Tensor, dtype: str) -> Tensor:
    """Keys or values ``[B, H, S, D]`` to the nearest code of ``scale [H, D]``, ties to even, clamped to ``dtype``."""
    step, largest = scale[:, None, :], LARGEST[dtype]
    if dtype == "fp8":
        return _nearest_e4m3(values / step) * step
    return (values / step).round_().clamp_(-largest - 1, largest) * step


def round_activations(inputs: Tensor, block: int) -> Tensor:
    """``[..., K]`` rounded to int8 per row and block of K, symmetric, step ``max|x| / 127``.

    As ``QuantizeARow_CompInt8`` in onnxruntime/core/mlas/lib/sqnbitgemm_kernel_avx512_int8*.h: the block is multiplied
    by ``127 / max|x|`` and rounded with ties to even; a block of zeros stays zero.
    """
    blocks = inputs.unflatten(-1, (-1, block))
    largest = blocks.abs().amax(-1, keepdim=True)
    inverse = torch.where(largest > 0, 127.0 / largest, 0.0)
    return ((blocks * inverse).round_() * (largest / 127.0)).flatten(-2)


def round_static(inputs: Tensor, step: float) -> Tensor:
    """``inputs`` to the nearest int8 multiple of ``step``, ties to even, clamped: QuantizeLinear and back."""
    return (inputs / step).round_().clamp_(-128, 127) * step


def round_by_token(inputs: Tensor) -> Tensor:
    """``[..., K]`` to the nearest E4M3 times the scale of its row, under which the largest number is 448."""
    largest = inputs.abs().amax(-1, keepdim=True)
    # Two tensors: torch takes a number over a tensor for a multiple of the reciprocal, whose last bit is off in one of
    # four. Kernels divide, and many inputs in 16 bits lie just between two codes.
    inverse = torch.where(largest > 0, torch.full_like(largest, LARGEST["fp8"]) / largest, 0.0)
    return _nearest_e4m3(inputs * inverse) * (largest / LARGEST["fp8"])


def round_fp8(inputs: Tensor, scale: float) -> Tensor:
    """``inputs`` to the nearest E4M3 times ``scale``, ties to even, clamped: QuantizeLinear and back."""
    return _nearest_e4m3(inputs / scale) * scale


def _nearest_e4m3(scaled: Tensor) -> Tensor:
    return scaled.clamp(-LARGEST["fp8"], LARGEST["fp8"]).to(torch.float8_e4m3fn).to(scaled.dtype)


@dataclass(frozen=True)
class InputGrid:
    """How a kernel rounds the inputs of a linear, by what the checkpoint holds of it."""

    group_size: int
    input_scale: float | None  # None: rounded per row and group by MatMulNBits
    activations: Activations = "float"
    by_token: bool = False  # rounded to E4M3 per row, by kernels for FP8

    @classmethod
    def of(cls, linear: QuantizedWeight) -> InputGrid:
        scheme = linear.scheme
        return cls(linear.group_size, linear.input_scale, scheme.activations, by_token=is_e4m3(scheme))

    def __call__(self, inputs: Tensor) -> Tensor:
        if self.input_scale is not None:
            rounded = round_fp8 if self.activations == "fp8" else round_static
            return rounded(inputs, self.input_scale)
        if self.by_token:
            return round_by_token(inputs)
        return round_activations(inputs, self.group_size)


def _mixtures(model: Any) -> Iterator[tuple[Any, str]]:
    """Modules of experts, and the names of their down projections."""
    names = {id(p): n for n, p in model.named_parameters(remove_duplicate=False)}
    return ((module, names[id(module.down_proj)]) for module in model.modules() if calls_interface(module))


def _stored_in_out(model: Any) -> set[str]:
    """Weights of gpt2's linears and of gpt-oss's experts, which are ``[in, out]``; in codes they are ``[out, in]``."""
    linears = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, Conv1D)}
    experts = {
        f"{name}.{parameter}"
        for name, module in model.named_modules()
        if calls_interface(module) and module.is_transposed
        for parameter, _ in module.named_parameters(recurse=False)
    }
    return linears | experts


def input_hook(rounding: Callable[[Tensor], Tensor]) -> Any:
    """A forward pre-hook of a linear."""
    return lambda _module, inputs: (rounding(inputs[0]), *inputs[1:])


def _exchange(name: str, value: FloatArray, errors: Errors) -> Any:
    """A forward hook of a linear."""
    return lambda _module, _inputs, output: _exchanged(name, value, errors, output)


def _exchanged(name: str, value: FloatArray, errors: Errors, own: Tensor) -> Tensor:
    """``value [S, channels]`` in the place of ``own``, whose errors against it are kept."""
    given = torch.from_numpy(np.ascontiguousarray(value))  # read here: all values may be larger than the memory
    off, size = (own.reshape(given.shape) - given).square().sum(1), given.square().sum(1)
    whole = (off.sum() / size.sum().clamp_min(TINY)).sqrt()
    # Against no less than the median: a value near zero has no digits to be wrong in.
    worst = (off / size.clamp_min(max(float(size.median()), TINY))).max().sqrt()
    errors[name] = (float(whole), float(worst))
    return given.reshape(own.shape)


ExpertGrids = dict[tuple[torch.nn.Module, int], InputGrid]  # by module and number of a projection among its inputs


def _load(folder: Path) -> tuple[Any, list[tuple[torch.nn.Module, InputGrid]], ExpertGrids]:
    """The model with float32 weights; its quantized linears, and experts, with how their inputs are rounded."""
    model = empty_model(folder)
    require("the quantized model in torch", reference_needs(model), folder)
    checkpoint = open_checkpoint(folder)
    embedding = model.get_input_embeddings().weight
    kept = {name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter is embedding}
    linear = {f"{n}.weight" for n, module in model.named_modules() if isinstance(module, torch.nn.Linear | Conv1D)}
    transposed = _stored_in_out(model)
    weights: dict[str, Tensor] = {}
    grids: dict[str, InputGrid] = {}
    late: dict[str, Callable[[], Tensor]] = {}
    free = decoded_bytes()
    for name in ProgressBar(checkpoint.names(), title="reading the quantized model", unit="tensor"):
        stored = checkpoint.linear(name)
        shape = stored.codes.shape if isinstance(stored, QuantizedWeight) else stored.shape
        if isinstance(stored, QuantizedWeight):
            grids[name] = InputGrid.of(stored)
            shape = (*shape[:-2], shape[-1], shape[-2]) if name in transposed else shape
        size = 4 * math.prod(shape) if name in linear - kept or len(shape) == 3 else 0
        if size <= free:
            free -= size
            weights[name] = _decoded(stored, name in transposed)
        else:
            late[name] = partial(_read, checkpoint, name, name in transposed)
            weights[name] = torch.zeros(()).expand(shape)
    fill(model, weights)
    names = {id(parameter): name for name, parameter in model.named_parameters()}  # a tied one once, by its first name
    linears: list[tuple[torch.nn.Module, InputGrid]] = []
    experts: ExpertGrids = {}
    for module in model.modules():
        for part, parameter in module.named_parameters(recurse=False):
            name = names[id(parameter)]
            if name in late:
                weight_at_call(module, late[name], part)
            if name in grids and calls_interface(module):
                experts[module, DOWN_INPUT if part == "down_proj" else UP_INPUT] = grids[name]
            elif name in grids and not isinstance(module, torch.nn.Embedding):
                linears.append((module, grids[name]))
    return model, linears, experts


def _read(checkpoint: Checkpoint, name: str, transposed: bool) -> Tensor:
    return _decoded(checkpoint.linear(name), transposed)


def _decoded(stored: QuantizedWeight | FloatArray, transposed: bool) -> Tensor:
    """As the module has it; ``transposed``: it is stored ``[out, in]`` once it is quantized."""
    if not isinstance(stored, QuantizedWeight):
        return torch.from_numpy(np.array(stored, np.float32))
    weight = torch.from_numpy(stored.dequantize())
    return weight.swapaxes(-1, -2) if transposed else weight
