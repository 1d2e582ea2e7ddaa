"""LoRA adapters in the format of PEFT, merged into the float weights: ``W + scale * B @ A``.

The merge is these few lines instead of a dependency on peft, which wraps every module of the model. What they do not
cover is refused: every key of ``adapter_config.json`` that is set must be known here, every tensor must be used, and
every module that the configuration names must have its pair of tensors.

Shapes: N output channels, K input channels, R rank; ``lora_A`` [R, K], ``lora_B`` [N, R].
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from pipeline.export.weights import write_weights
from tapeout.errors import ExportError
from tapeout.mapped_weights import is_finite
from tapeout.tensor_files import StoredTensor, few, read_header, stored_tensors

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
# What describes the adapter or its training, and leaves the merged weights as they are.
DESCRIPTIVE = frozenset(
    [
        "auto_mapping",
        "base_model_name_or_path",
        "ensure_weight_tying",
        "eva_config",
        "inference_mode",
        "lora_dropout",
        "peft_version",
        "revision",
        "runtime_config",
        "task_type",
    ]
)
UNDERSTOOD = frozenset(
    [
        "bias",
        "exclude_modules",
        "fan_in_fan_out",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "lora_alpha",
        "modules_to_save",
        "peft_type",
        "r",
        "target_modules",
        "use_rslora",
    ]
)
INACTIVE = (("megatron_core", "megatron.core"), ("qalora_group_size", 16))  # defaults of what is switched off
# Other initializations change the base weights when an adapter is loaded.
PLAIN_STARTS = (True, False, "gaussian", "orthogonal", "eva", None)
REMEDY = "merge the adapter with peft (`merge_and_unload`), save the model, and name that folder in model.source"


def merge_adapter(model: Any, folder: Path, scratch: Path | None = None) -> None:
    """Change the weights of ``model`` in place; :class:`ExportError` before the first change.

    ``scratch``: where the changed weights are written in float32, one at a time, and mapped from; default: files
    without a name in the system's temporary folder.
    """
    config = _read_config(folder)
    stored = {tensor.name: tensor for tensor in read_header(folder / WEIGHTS)}
    tied = {name for pair in model.all_tied_weights_keys.items() for name in pair}
    scale = config["lora_alpha"] / (math.sqrt(config["r"]) if config.get("use_rslora") else config["r"])
    pairs, saved = _sorted_out(stored, config)
    _require_targets(model, set(pairs), config)
    changes: dict[str, Callable[[], torch.Tensor]] = {}
    for module, (down, up) in pairs.items():
        parameter = _parameter(model, f"{module}.weight", tied)
        changes[f"{module}.weight"] = partial(_merged, parameter, scale, _factors(model, module, down, up, config))
    for name, tensor in saved.items():
        if tensor.shape != tuple(_parameter(model, name, tied).shape):
            raise _unfit(tensor.name, tensor.shape, tuple(_parameter(model, name, tied).shape))
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


def merged_elements(folder: Path) -> list[int]:
    """Elements of each weight that the adapter changes, from the header of its file."""
    stored = {tensor.name: tensor for tensor in read_header(folder / WEIGHTS)}
    pairs, saved = _sorted_out(stored, _read_config(folder))
    return [up.shape[0] * down.shape[-1] for down, up in pairs.values()] + [
        math.prod(tensor.shape) for tensor in saved.values()
    ]


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        config: Any = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        settings = {name: value for name, value in config.items() if value not in (None, False, [], {}, "")}
    except (OSError, ValueError, AttributeError) as error:
        raise ExportError(
            f"{CONFIG} of the adapter cannot be read: {error}", expected="an adapter as peft saves it"
        ) from error
    rank, alpha = config.get("r"), config.get("lora_alpha")
    problems = [f"peft_type {config.get('peft_type')}"] if config.get("peft_type") != "LORA" else []
    problems += [f"task_type {config['task_type']}"] if settings.get("task_type", "CAUSAL_LM") != "CAUSAL_LM" else []
    problems += [f"bias {config['bias']}"] if settings.get("bias", "none") != "none" else []
    start = config.get("init_lora_weights", True)
    problems += [f"init_lora_weights {start}"] if start not in PLAIN_STARTS else []
    unknown = sorted(settings.keys() - DESCRIPTIVE - UNDERSTOOD)
    problems += [f"{name} {settings[name]}" for name in unknown if (name, settings[name]) not in INACTIVE]
    problems += [f"r {rank}"] if type(rank) is not int or rank < 1 else []
    finite = type(alpha) in (int, float) and math.isfinite(alpha)
    problems += [] if finite else [f"lora_alpha {alpha}"]
    if problems:
        raise ExportError(
            f"the adapter has {', '.join(problems)}",
            expected="a LoRA adapter for a causal language model, without biases, DoRA or ranks per module",
            remedy=REMEDY,
        )
    return config


Pairs = dict[str, tuple[StoredTensor, StoredTensor]]


def _sorted_out(stored: Mapping[str, StoredTensor], config: Mapping[str, Any]) -> tuple[Pairs, dict[str, StoredTensor]]:
    """``lora_A`` and ``lora_B`` by module, and whole parameters that replace those of the model."""
    pairs: Pairs = {}
    saved: dict[str, StoredTensor] = {}
    unused: list[str] = []
    whole = config.get("modules_to_save") or ()
    for name, tensor in stored.items():
        path = name.removeprefix(PREFIX)
        match = re.fullmatch(r"(.+)\.lora_([AB])\.weight", path)
        if match and path != name:
            other = stored.get(f"{PREFIX}{match[1]}.lora_{'B' if match[2] == 'A' else 'A'}.weight")
            if other is None:
                unused.append(name)
            elif match[2] == "A":
                pairs[match[1]] = tensor, other
        elif path != name and any(f".{path}".rpartition(".")[0].endswith(f".{module}") for module in whole):
            saved[path] = tensor
        else:
            unused.append(name)
    if unused or not pairs | saved:
        raise ExportError(
            f"{WEIGHTS} holds {few(sorted(unused)) or 'no tensor'}, which cannot be merged",
            expected=f"pairs of lora_A and lora_B under {PREFIX}…, and the modules of modules_to_save",
            remedy=REMEDY,
        )
    return pairs, saved


def _require_targets(model: Any, found: set[str], config: Mapping[str, Any]) -> None:
    """Every module that the configuration names has its tensors, and no other has."""
    expected = {name for name, module in model.named_modules() if _is_target(name, module, model, config)}
    if expected != found:
        lacking, extra = sorted(expected - found), sorted(found - expected)
        raise ExportError(
            (
                f"the adapter lacks tensors for {few(lacking)}"
                if lacking
                else f"the adapter has tensors for {few(extra)}"
            )
            + f", by its target_modules {config.get('target_modules')}",
            expected=f"a pair of tensors for each of the {len(expected)} target modules of {type(model).__name__}",
            remedy="complete the adapter, or name the model that it was trained on in model.source",
        )


def _is_target(name: str, module: Any, model: Any, config: Mapping[str, Any]) -> bool:
    from transformers.pytorch_utils import Conv1D

    def listed(patterns: Any) -> bool:
        if isinstance(patterns, str):
            return re.fullmatch(patterns, name) is not None
        return any(name == p or name.endswith(f".{p}") for p in patterns or ())

    targets = config.get("target_modules")
    if listed(config.get("exclude_modules")):
        return False
    if targets == "all-linear":
        linear = isinstance(module, torch.nn.Linear | Conv1D)
        chosen = linear and module is not model.get_output_embeddings()
    else:
        chosen = listed(targets)
    layers = config.get("layers_to_transform")
    if not chosen or layers is None:
        return chosen
    number = re.search(r"\.(\d+)\.", name)
    return number is not None and int(number[1]) in ([layers] if isinstance(layers, int) else layers)


def _factors(
    model: Any, module: str, down: StoredTensor, up: StoredTensor, config: Mapping[str, Any]
) -> Callable[[], torch.Tensor]:
    """What computes ``B @ A`` in the layout of the module's weight."""
    from transformers.pytorch_utils import Conv1D

    weight, rank = model.get_submodule(module).weight, config["r"]
    transposed = isinstance(model.get_submodule(module), Conv1D)
    outputs, inputs = reversed(weight.shape) if transposed else weight.shape
    if not isinstance(model.get_submodule(module), torch.nn.Linear | Conv1D):
        raise ExportError(f"the adapter changes {module}, which is no linear", remedy=REMEDY)
    for tensor, shape in ((down, (rank, inputs)), (up, (outputs, rank))):
        if tensor.shape != shape:
            raise _unfit(tensor.name, tensor.shape, shape)

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


def _unfit(name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> ExportError:
    return ExportError(
        f"{name} of the adapter is {list(found)}",
        expected=f"{list(expected)}, by its rank and the shape of the model's weight",
        remedy="name the model that the adapter was trained on in model.source",
    )
