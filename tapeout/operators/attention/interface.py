"""Replace the attention of a stock transformers model for a while, with no code per architecture."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

_numbers = itertools.count()


@contextmanager
def attention_replaced(model: Any, attention: Callable[..., Any], mask: Callable[..., Any]) -> Generator[None]:
    """Run ``model`` with ``attention`` in place of its own, and ``mask`` to make what attention gets as mask.

    Both follow transformers' ``AttentionInterface`` and ``AttentionMaskInterface``, which look them up by name. Each
    use registers a name of its own, so that models in one process never call each other's functions.
    """
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    interfaces: dict[Any, Callable[..., Any]] = {AttentionInterface: attention, AttentionMaskInterface: mask}
    name, previous = f"tapeout_{next(_numbers)}", model.config._attn_implementation
    for interface, function in interfaces.items():
        interface.register(name, function)
    try:
        model.set_attn_implementation(name)
        yield
    finally:
        model.set_attn_implementation(previous)
        for interface in interfaces:
            del interface._global_mapping[name]
