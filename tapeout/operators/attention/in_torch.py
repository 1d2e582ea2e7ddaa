"""Stock transformers models with something done to the keys and values that attention reads, no code per architecture.

B  batch      H  heads of queries, or of keys and values      S  new tokens      T  tokens attended to      D  channels
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tapeout.mapped_model import decoder_layers
from tapeout.operators.attention.interface import attention_replaced

# (layer, key, value) -> (key, value), each [B, H, S, D], after the rotary embedding
KVFunction = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]


@contextmanager
def kv_function(model: Any, function: KVFunction) -> Generator[None]:
    """Run ``model`` with every layer's keys and values passed through ``function``.

    A layer has the number of the decoder layer that runs. Attention that several layers share knows none of its own.
    """
    from transformers.masking_utils import sdpa_mask

    running = [-1]
    handles = [
        layer.register_forward_pre_hook(lambda *_, number=number: running.__setitem__(0, number))
        for number, layer in enumerate(decoder_layers(model))
    ]
    try:
        with attention_replaced(model, partial(_changed, lambda k, v: function(running[0], k, v)), sdpa_mask):
            yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def after_tokens(model: Any, cached: Callable[[str], Tensor]) -> Generator[None]:
    """Run a layer of ``model`` as if tokens came before: ``cached`` gives their ``key`` and ``value [B, H, S, D]``."""
    from transformers.masking_utils import sdpa_mask

    def attention(
        _module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        key, value = (torch.cat([cached(part), new], 2) for part, new in (("key", key), ("value", value)))
        return attend(query, key, value, attention_mask, scaling, softcap, s_aux), None

    with attention_replaced(model, attention, sdpa_mask):
        yield


def _changed(
    function: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    key, value = function(key, value)
    if softcap or s_aux is not None:
        return attend(query, key, value, attention_mask, options.get("scaling"), softcap, s_aux), None
    return sdpa_attention_forward(module, query, key, value, attention_mask, **options)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """``[B, S, H, D]``. Scores are bounded by ``softcap · tanh(s / softcap)``, which torch's own does not offer.

    ``sinks [H]``: of each softmax one more score, without a value.

    ``mask``: of transformers' SDPA, boolean or added to scores; None: plainly causal, the last token sees all.
    """
    repeat = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    scores = query @ key.transpose(2, 3) * (query.shape[3] ** -0.5 if scaling is None else scaling)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is None:
        mask = torch.ones(scores.shape[2:], dtype=torch.bool).tril(scores.shape[3] - scores.shape[2])
    scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        of_sinks = sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
        return (torch.cat([scores, of_sinks], -1).softmax(-1)[..., :-1] @ value).transpose(1, 2).contiguous()
    return (scores.softmax(-1) @ value).transpose(1, 2).contiguous()
