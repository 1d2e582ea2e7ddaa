"""See or replace what a stock transformers model puts into its KV cache, with no code per architecture.

transformers looks its attention up by name in ``AttentionInterface``; one registered name hands keys and values,
after the rotary embedding, to a function of ours and goes on with scaled-dot-product attention.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tapeout.errors import QuantizationError

NAME = "tapeout_kv"

# (layer, key, value) -> (key, value), each [B, kv_heads, S, D]
KVFunction = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]

_active: list[KVFunction] = []


@contextmanager
def kv_function(model: Any, function: KVFunction) -> Generator[None]:
    """Run ``model`` with every layer's keys and values passed through ``function``."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    previous = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    _active.append(function)
    try:
        yield
    finally:
        _active.pop()
        model.set_attn_implementation(previous)


def _attention(
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
            f"{type(module).__name__} has {'no layer_idx' if layer is None else 'attention sinks'}",
            expected="plain or grouped-query attention in numbered layers",
            remedy="choose a dense decoder",
        )
    key, value = _active[-1](layer, key, value)
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
