"""Parameters that transformers puts together from several tensors of a checkpoint, such as the experts of a layer.

Most mixtures are published with a linear per expert. transformers stacks these, all layers in memory; here one
parameter at a time is put together, by transformers' own rules and in the type that the tensors are stored in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from functools import partial
from typing import Any

import torch

from tapeout.errors import ExportError, one_line

Read = Callable[[], torch.Tensor]


def is_composed(model: Any, names: Iterable[str]) -> bool:
    """Whether transformers computes parameters of ``model`` from the tensors of these names."""
    return bool(_grouped(model, names)[1])


def composed(model: Any, stored: Mapping[str, Read]) -> dict[str, Read]:
    """By name, what reads each parameter of ``model``.

    A tensor that transformers does not know keeps its name, so that loading refuses it.
    """
    groups, made = _grouped(model, stored)
    return {
        target: partial(_composed, model, target, made[target], {name: stored[name] for name in names})
        if target in made
        else stored[names[0]]
        for target, names in groups.items()
    }


def _grouped(model: Any, names: Iterable[str]) -> tuple[dict[str, list[str]], dict[str, tuple[Any, dict[str, str]]]]:
    """Stored tensors by parameter, and the rule of each that is computed, with the pattern that each tensor matched.

    As ``convert_and_load_state_dict_in_model`` of transformers sorts them. A rule that makes several parameters of one
    tensor is left to transformers: its tensors keep their names.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern: dict[str, Any] = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    known = model.state_dict()
    groups: dict[str, list[str]] = {}
    made: dict[str, tuple[Any, dict[str, str]]] = {}
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, known)
        rule = by_pattern.get(pattern or "")
        if target not in known or (rule is not None and len(rule.target_patterns) > 1):
            target, rule = name, None
        if rule is not None:
            made.setdefault(target, (rule, {}))[1][name] = pattern or ""
        elif target in groups:
            target = name  # a second tensor for one parameter
        groups.setdefault(target, []).append(name)
    return groups, made


def _composed(model: Any, name: str, rule: tuple[Any, dict[str, str]], stored: Mapping[str, Read]) -> torch.Tensor:
    converter, patterns = deepcopy(rule[0]), rule[1]
    for each, read in stored.items():
        converter.add_tensor(name, each, patterns[each], read)
    try:
        (value,) = converter.convert(name, model=model, config=model.config).values()
    except MemoryError:
        raise
    except Exception as error:  # a library's own words about tensors that do not fit together
        raise ExportError(
            f"transformers cannot put {name} together from {len(stored)} tensors: {one_line(error)}",
            expected="as many tensors of each kind, of one shape",
            remedy="complete the checkpoint from its source",
        ) from error
    return value[0] if isinstance(value, list) else value
