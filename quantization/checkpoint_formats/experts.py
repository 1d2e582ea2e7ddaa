"""Experts as checkpoints of the hub have them: a weight for each, under the names that transformers stacks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tapeout.errors import QuantizationError


@dataclass(frozen=True)
class ExpertPart:
    """A linear that is some of the output channels of one expert in the parameter ``stacked``."""

    stacked: str
    expert: int
    rows: slice


def names_of(model_type: str, stacked: str) -> tuple[str, ...]:
    """Names of the parts of a stacked parameter, in the order of their output channels, with ``*`` for the expert.

    :class:`QuantizationError` for a model whose checkpoints have experts in another form.

    >>> names_of("mixtral", "model.layers.0.mlp.experts.gate_up_proj")
    ('model.layers.0.mlp.experts.*.w1.weight', 'model.layers.0.mlp.experts.*.w3.weight')
    """
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    mapping: Any = get_checkpoint_conversion_mapping(model_type) or []
    for one in mapping:
        (target,) = one.target_patterns if len(one.target_patterns) == 1 else ("",)
        merged = [type(step).__name__ for step in getattr(one, "operations", None) or ()]
        if target and stacked.endswith(target) and merged in (["MergeModulelist"], ["MergeModulelist", "Concatenate"]):
            return tuple(stacked.removesuffix(target) + source for source in one.source_patterns)
    raise QuantizationError(
        f"{stacked} holds quantized experts, and checkpoints of {model_type} do not have a weight for each",
        expected="a model whose checkpoints have a weight for each expert, such as Qwen3-MoE, OLMoE or Mixtral",
        remedy="let a rule of plan.schemes leave its experts in float, or use the engine that is built here",
    )
