"""A checkpoint of ours as a model of transformers: made without weights, then filled."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tapeout.coded_parameters import StoredCodes, with_codes
from tapeout.errors import ModelError
from tapeout.mapped_weights import HALF, CodedParameter, compute_in_float32
from tapeout.tensor_files import stored_tensors


def open_model(folder: Path, weights: Mapping[str, Tensor] | None = None) -> Any:
    """What export wrote, its weights still in their files. Computes in float32 (tapeout/mapped_weights.py).

    ``weights``: those of the folder unless given. :class:`ModelError` as :func:`fill` has it.
    """
    weights = _mapped(folder) if weights is None else weights
    model = empty_model(folder)
    fill(model, weights)
    compute_in_float32(model)
    return model


def _mapped(folder: Path) -> dict[str, Tensor]:
    stored = with_codes(stored_tensors(folder))
    return {n: CodedParameter.of(t) if isinstance(t, StoredCodes) else t.read() for n, t in stored.items()}


def empty_model(folder: Path) -> Any:
    """By ``config.json``, in float32: parameters have shapes and no memory.

    Embedding and lm_head are tied where they share a weight. Layers share none (:func:`unshare_layers`).
    """
    from accelerate import init_empty_weights
    from transformers.models.auto.configuration_auto import AutoConfig
    from transformers.models.auto.modeling_auto import AutoModelForCausalLM

    config: Any = AutoConfig.from_pretrained(folder)
    vars(config).pop("quantization_config", None)  # the model is filled with floats
    with init_empty_weights(include_buffers=False):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.tie_weights()
    unshare_layers(model)
    return model


def unshare_layers(model: Any) -> None:
    """Give a decoder layer parameters of its own where it shares them with an earlier layer, as Zamba2's do.

    Each use of a shared block has other inputs. So its linears are linears of that layer, with statistics, scales and
    codes of their own. Values are not copied here. :class:`ModelError` as :func:`decoder_layers` has it.
    """
    first: dict[nn.Parameter, int] = {}
    for number, layer in enumerate(decoder_layers(model)):
        for module in layer.modules():
            for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
                if first.setdefault(parameter, number) != number:
                    setattr(module, name, nn.Parameter(parameter.detach(), requires_grad=False))


def decoder_layers(model: Any) -> list[Any]:
    """The list of layers that holds most of the model's parameters. :class:`ModelError` for a model without one."""
    count = model.config.get_text_config().num_hidden_layers
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    if not lists:
        raise ModelError(
            f"{type(model).__name__} has no list of {count} layers",
            expected="a decoder whose layers are one list of modules",
            remedy="choose a dense decoder",
        )
    return list(max(lists, key=lambda found: sum(parameter.numel() for parameter in found.parameters())))


def fill(model: Any, weights: Mapping[str, Tensor]) -> None:
    """Give every parameter and stored buffer its tensor. Tied parameters are stored under one name, and stay tied.

    :class:`ModelError` for parameters that ``weights`` lack or have in another shape, and for weights of no parameter.
    """
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    stored = {key: next((name for name in alike if name in weights), "") for key, alike in names.items()}
    if missing := [names[key][0] for key, name in stored.items() if not name]:
        raise ModelError(
            f"the checkpoint lacks {len(missing)} parameters of {type(model).__name__}, such as {missing[0]}",
            expected="every parameter of the model",
            remedy="complete the checkpoint, or run the stage that wrote it again",
        )
    buffers = dict(model.named_buffers(remove_duplicate=False))
    if unknown := weights.keys() - buffers - {name for alike in names.values() for name in alike}:
        raise ModelError(
            f"the checkpoint has {len(unknown)} tensors beyond {type(model).__name__}, such as {min(unknown)}",
            expected="tensors of this model only",
            remedy="restore the configuration that the weights were saved with",
        )
    placed = {key: _read(weights, name, key.shape) for key, name in stored.items()}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            setattr(module, name, placed[parameter])
    for name, buffer in buffers.items():
        if name in weights:
            buffer.data = weights[name].to(buffer.dtype, copy=True)


def _read(weights: Mapping[str, Tensor], name: str, shape: torch.Size) -> nn.Parameter:
    stored = weights[name]
    if stored.shape != shape:
        raise ModelError(
            f"{name} is {list(stored.shape)} in the checkpoint",
            expected=f"{list(shape)}, as its configuration says",
            remedy="restore the configuration that the weights were saved with",
        )
    if isinstance(stored, CodedParameter):
        return stored
    return nn.Parameter(stored if stored.dtype in HALF else stored.float(), requires_grad=False)
