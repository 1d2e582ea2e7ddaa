"""See or replace what a stock transformers model puts into its KV cache, with no code per architecture.

The replaced attention hands keys and values, after the rotary embedding, to a function and continues with
scaled-dot-product attention.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tapeout.attention_interface import attention_replaced
from tapeout.errors import QuantizationError

# (layer, key, value) -> (key, value), each [B, kv_heads, S, D]
KVFunction = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]


@contextmanager
def kv_function(model: Any, function: KVFunction) -> Generator[None]:
    """Run ``model`` with every layer's keys and values passed through ``function``."""
    from transformers.masking_utils import sdpa_mask

    with attention_replaced(model, partial(_attention, function), sdpa_mask):
        yield


def _attention(
    function: KVFunction,
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    softcap: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    layer = getattr(module, "layer_idx", None)
    if layer is None or options.get("s_aux") is not None:
        raise QuantizationError(
            f"{type(module).__name__} has {'no layer_idx' if layer is None else 'attention fold_targets'}",
            expected="plain or grouped-query attention in numbered layers",
            remedy="choose a dense decoder",
        )
    key, value = function(layer, key, value)
    if softcap:
        return _softcapped(query, key, value, attention_mask, options.get("scaling"), softcap), None
    return sdpa_attention_forward(module, query, key, value, attention_mask, **options)


def _softcapped(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None, softcap: float
) -> Tensor:
    """Attention whose scores are bounded by ``softcap · tanh(s / softcap)``, which torch's own does not offer."""
    repeat = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    scores = query @ key.transpose(2, 3) * (query.shape[3] ** -0.5 if scaling is None else scaling)
    scores = softcap * torch.tanh(scores / softcap)
    if mask is None:  # transformers leaves a plain causal mask out
        mask = torch.ones(scores.shape[2:], dtype=torch.bool).tril(scores.shape[3] - scores.shape[2])
    scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return (scores.softmax(-1) @ value).transpose(1, 2).contiguous()
