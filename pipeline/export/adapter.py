"""A LoRA adapter (``tapeout/adapters.py``), merged into the float weights: ``W + scale * B @ A``.

Shapes: N output channels, K input channels, R rank; ``lora_A`` [R, K], ``lora_B`` [N, R].
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from pipeline.export.weights import write_weights
from tapeout.adapters import REMEDY, Adapter, read_adapter, require_shape
from tapeout.errors import ExportError
from tapeout.mapped_weights import is_finite
from tapeout.tensor_files import StoredTensor, few, stored_tensors


def merge_adapter(model: Any, folder: Path, scratch: Path | None = None) -> None:
    """Change the weights of ``model`` in place; :class:`ExportError` before the first change.

    ``scratch``: where the changed weights are written in float32, one at a time, and mapped from; default: files
    without a name in the system's temporary folder.
    """
    adapter = read_adapter(folder)
    tied = {name for pair in model.all_tied_weights_keys.items() for name in pair}
    head = model.get_output_embeddings()
    modules = {name: _is_linear(module) and module is not head for name, module in model.named_modules()}
    adapter.require_targets(modules, type(model).__name__)
    adapter.require_saved([name for name, _ in model.named_parameters(remove_duplicate=False)], type(model).__name__)
    changes: dict[str, Callable[[], torch.Tensor]] = {}
    for module in adapter.pairs:
        parameter = _parameter(model, f"{module}.weight", tied)
        changes[f"{module}.weight"] = partial(_merged, parameter, adapter.scale, _factors(model, module, adapter))
    for name, tensor in adapter.saved.items():
        require_shape(tensor, tuple(_parameter(model, name, tied).shape))
        changes[name] = partial(_replaced, tensor)
    with ExitStack() as stack:
        scratch = scratch or Path(stack.enter_context(TemporaryDirectory()))
        scratch.mkdir(parents=True, exist_ok=True)
        write_weights(scratch, changes)
        merged = {name: tensor.read() for name, tensor in stored_tensors(scratch).items()}
    if broken := [name for name, value in merged.items() if not is_finite(value)]:
        raise ExportError(f"the adapter makes NaN or infinite weights of {few(broken)}", remedy="choose another one")
    with torch.no_grad():
        for name, value in merged.items():
            model.get_parameter(name).data = value  # float32, whatever the type of the stored one


def _merged(parameter: torch.Tensor, scale: float, factors: Callable[[], torch.Tensor]) -> torch.Tensor:
    return parameter + scale * factors()


def _replaced(tensor: StoredTensor) -> torch.Tensor:
    return tensor.read().float()


def _is_linear(module: Any) -> bool:
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, torch.nn.Linear | Conv1D)


def _factors(model: Any, module: str, adapter: Adapter) -> Callable[[], torch.Tensor]:
    """What computes ``B @ A`` in the layout of the module's weight."""
    from transformers.pytorch_utils import Conv1D

    weight = model.get_submodule(module).weight
    transposed = isinstance(model.get_submodule(module), Conv1D)
    outputs, inputs = reversed(weight.shape) if transposed else weight.shape
    if not _is_linear(model.get_submodule(module)):
        raise ExportError(f"the adapter changes {module}, which is no linear", remedy=REMEDY)
    adapter.require_shapes(module, outputs, inputs)
    down, up = adapter.pairs[module]

    def product() -> torch.Tensor:
        delta = up.read().float() @ down.read().float()
        return delta.T if transposed else delta

    return product


def _parameter(model: Any, name: str, tied: set[str]) -> torch.Tensor:
    try:
        parameter: torch.Tensor = model.get_parameter(name)
    except AttributeError as error:
        raise ExportError(
            f"the adapter changes {name}, which {type(model).__name__} does not have",
            expected="an adapter for this model",
            remedy="name the model that it was trained on in model.source",
        ) from error
    if name in tied:
        raise ExportError(
            f"the adapter changes {name}, which lm_head and the embedding share",
            expected="an adapter of untied weights",
            remedy=REMEDY,
        )
    return parameter.detach()
