"""Rotary scaling that transformers chooses by the length of a call becomes one that holds for every sequence.

``longrope`` has two sets of factors. transformers takes the long ones where the largest position of a call reaches
``original_max_position_embeddings``, so what a token gets depends on how its prompt was cut and on the other sequences
of the batch. An engine must not: keys in the cache keep the rotation they were written with. As in vLLM
(``Phi3LongRoPEScaledRotaryEmbedding``), the longest sequence that is served decides, once for all sequences:

    export.max_positions <= original_max_position_embeddings    short factors: what transformers computes, always
    export.max_positions >  original_max_position_embeddings    long factors: what transformers computes for a sequence
                                                                that is longer than the original length, in one call

``dynamic`` scaling changes nothing up to ``max_position_embeddings``, which no engine exceeds.
"""

from __future__ import annotations

from typing import Any, Literal

from tapeout.errors import ExportError

RotaryFactors = Literal["fixed", "short", "long"]


def fix_rotary(model: Any, positions: int) -> RotaryFactors:
    """Give ``model`` and its configuration one set of rotary factors, for sequences of up to ``positions`` tokens.

    The configuration then holds the chosen factors only, so that the exported checkpoint means the same model to
    whoever loads it. Returns which were chosen; ``fixed``: the scaling never depended on the sequence.
    """
    chosen: set[RotaryFactors] = set()
    for module in model.modules():
        types: Any = getattr(module, "rope_type", None)
        if types is None or not hasattr(module, "config"):
            continue
        for layer_type, rope_type in types.items() if isinstance(types, dict) else [(None, types)]:
            if rope_type == "longrope":
                chosen.add(_choose_factors(module, layer_type, positions))
            elif "dynamic" in rope_type:
                _refuse_growth(module, positions)
            else:
                continue
            if layer_type is None:  # transformers changes no frequencies of type default
                module.rope_type = "default"
            else:
                types[layer_type] = "default"
    return "long" if "long" in chosen else "short" if chosen else "fixed"


def _choose_factors(module: Any, layer_type: str | None, positions: int) -> RotaryFactors:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = module.config.rope_parameters
    parameters = parameters if layer_type is None else parameters[layer_type]
    original = int(parameters["original_max_position_embeddings"])
    chosen: RotaryFactors = "long" if positions > original else "short"
    factors = list(parameters[f"{chosen}_factor"])
    parameters["short_factor"], parameters["long_factor"] = factors, factors
    prefix = "" if layer_type is None else f"{layer_type}_"
    frequencies, _ = ROPE_INIT_FUNCTIONS["longrope"](module.config, None, layer_type=layer_type)
    for name in ("inv_freq", "original_inv_freq"):
        getattr(module, f"{prefix}{name}").copy_(frequencies)
    return chosen


def _refuse_growth(module: Any, positions: int) -> None:
    if positions > module.original_max_seq_len:
        raise ExportError(
            f"rotary embeddings of type dynamic and export.max_positions of {positions}",
            expected=f"at most {module.original_max_seq_len} positions: beyond, the rotation depends on the sequence",
            remedy=f"set export.max_positions to {module.original_max_seq_len} or less",
        )
