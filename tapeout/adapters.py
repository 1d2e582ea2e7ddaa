"""LoRA adapters in the format of PEFT: read, and checked to be nothing else than a low-rank change of linears.

These few lines stand for a dependency on peft, which wraps every module of the model. What they do not cover is
refused: every key of ``adapter_config.json`` that is set must be known here, every tensor must be a float and used, and
every module that the configuration names must have its pair of tensors, or its whole parameters.

Shapes: N output channels, K input channels, R rank; ``lora_A`` [R, K], ``lora_B`` [N, R].
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

from tapeout.errors import ExportError
from tapeout.tensor_files import FLOATS, StoredTensor, few, read_header

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
LARGEST = 1e30  # of lora_alpha
REMEDY = "merge the adapter with peft (`merge_and_unload`), save the model, and name that folder in model.source"


class LowRank(NamedTuple):
    """The change of one linear: ``scale * up @ down``."""

    down: StoredTensor  # lora_A, [R, K]
    up: StoredTensor  # lora_B, [N, R]


@dataclass(frozen=True)
class Adapter:
    """By names of modules and parameters of the model that the adapter is for, as transformers gives them."""

    rank: int
    scale: float
    pairs: Mapping[str, LowRank]  # by module
    saved: Mapping[str, StoredTensor]  # whole parameters that replace those of the model, by parameter
    config: Mapping[str, Any]  # adapter_config.json

    def elements(self) -> list[int]:
        """Of each weight that the adapter changes."""
        return [up.shape[0] * down.shape[-1] for down, up in self.pairs.values()] + [
            math.prod(tensor.shape) for tensor in self.saved.values()
        ]

    def require_targets(self, modules: Mapping[str, bool], model: str) -> None:
        """:class:`ExportError` unless every module that the configuration names has its tensors, and no other has.

        ``modules``: all of the model; True for those that ``all-linear`` covers. ``model``: its class, for users.
        """
        expected = {name for name, linear in modules.items() if self._is_target(name, linear)}
        found = set(self.pairs)
        if expected != found:
            lacking, extra = sorted(expected - found), sorted(found - expected)
            raise ExportError(
                (
                    f"the adapter lacks tensors for {few(lacking)}"
                    if lacking
                    else f"the adapter has tensors for {few(extra)}"
                )
                + f", by its target_modules {self.config.get('target_modules')}",
                expected=f"a pair of tensors for each of the {len(expected)} target modules of {model}",
                remedy="complete the adapter, or name the model that it was trained on in model.source",
            )

    def require_saved(self, parameters: Collection[str], model: str) -> None:
        """:class:`ExportError` unless each of ``modules_to_save`` is in the model, with every one of its parameters.

        ``parameters``: names of all that the model has.
        """
        for module in self.config.get("modules_to_save") or ():
            own = [name for name in parameters if _is_of(name, module)]
            if not own:
                raise ExportError(
                    f"modules_to_save names {module}, which {model} does not have",
                    expected="modules of the model that the adapter is for",
                    remedy="name the model that the adapter was trained on in model.source",
                )
            if lacking := sorted(set(own) - self.saved.keys()):
                raise ExportError(
                    f"the adapter lacks {few(lacking)}, by its modules_to_save",
                    expected=f"each parameter of the modules that were trained as a whole ({module})",
                    remedy="complete the adapter: save it again with peft",
                )

    def require_shapes(self, module: str, outputs: int, inputs: int) -> None:
        """:class:`ExportError` unless the tensors of a module fit its weight ``[N, K]`` and the rank."""
        down, up = self.pairs[module]
        require_shape(down, (self.rank, inputs))
        require_shape(up, (outputs, self.rank))

    def _is_target(self, name: str, linear: bool) -> bool:
        def listed(patterns: Any) -> bool:
            if isinstance(patterns, str):
                return re.fullmatch(patterns, name) is not None
            return any(name == p or name.endswith(f".{p}") for p in patterns or ())

        targets = self.config.get("target_modules")
        if listed(self.config.get("exclude_modules")):
            return False
        chosen = linear if targets == "all-linear" else listed(targets)
        layers = self.config.get("layers_to_transform")
        if not chosen or layers is None:
            return chosen
        number = re.search(r"\.(\d+)\.", name)
        return number is not None and int(number[1]) in ([layers] if isinstance(layers, int) else layers)


def read_adapter(folder: Path) -> Adapter:
    """From the configuration and the header of the tensors. :class:`ExportError` for what is no plain LoRA adapter."""
    config = _read_config(folder)
    stored = {tensor.name: tensor for tensor in read_header(folder / WEIGHTS)}
    if codes := [f"{tensor.name} ({tensor.dtype})" for tensor in stored.values() if tensor.dtype not in FLOATS]:
        raise ExportError(
            f"{few(codes)} of the adapter are no floats",
            expected=f"tensors of type {', '.join(sorted(FLOATS))}",
            remedy=REMEDY,
        )
    pairs, saved = _sorted_out(stored, config)
    rank = config["r"]
    scale = config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return Adapter(rank, scale, pairs, saved, config)


def require_shape(tensor: StoredTensor, expected: tuple[int, ...]) -> None:
    """:class:`ExportError` for a tensor of an adapter that has another shape than the model's weight asks for."""
    if tensor.shape != expected:
        raise ExportError(
            f"{tensor.name} of the adapter is {list(tensor.shape)}",
            expected=f"{list(expected)}, by its rank and the shape of the model's weight",
            remedy="name the model that the adapter was trained on in model.source",
        )


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
    finite = type(alpha) in (int, float) and abs(alpha) <= LARGEST
    problems += [] if finite else [f"lora_alpha {str(alpha)[:40]}"]
    problems += [
        f"{name} {config[name]!r}"
        for name, is_right in VALUES.items()
        if config.get(name) is not None and not is_right(config[name])
    ]
    if problems:
        raise ExportError(
            f"the adapter has {', '.join(problems)}",
            expected="a LoRA adapter for a causal language model, without biases, DoRA or ranks per module",
            remedy=REMEDY,
        )
    return config


def _sorted_out(
    stored: Mapping[str, StoredTensor], config: Mapping[str, Any]
) -> tuple[dict[str, LowRank], dict[str, StoredTensor]]:
    """``lora_A`` and ``lora_B`` by module, and whole parameters that replace those of the model."""
    pairs: dict[str, LowRank] = {}
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
                pairs[match[1]] = LowRank(tensor, other)
        elif path != name and any(_is_of(path, module) for module in whole):
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


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in cast("list[Any]", value))


def _are_targets(value: Any) -> bool:
    """Names of modules, or a regular expression of them."""
    if not isinstance(value, str):
        return _are_names(value)
    try:
        re.compile(value)
    except re.error:
        return False
    return True


def _are_layers(value: Any) -> bool:
    return type(value) is int or (isinstance(value, list) and all(type(one) is int for one in cast("list[Any]", value)))


def _is_switch(value: Any) -> bool:
    return isinstance(value, bool)


def _is_of(parameter: str, module: str) -> bool:
    """Whether a parameter is one of a module's own; ``module``: the end of its name."""
    return f".{parameter}".rpartition(".")[0].endswith(f".{module}")


VALUES: Mapping[str, Callable[[Any], bool]] = {
    "exclude_modules": _are_targets,
    "fan_in_fan_out": _is_switch,
    "layers_to_transform": _are_layers,
    "modules_to_save": _are_names,
    "target_modules": _are_targets,
    "use_rslora": _is_switch,
}
