"""Let a stock transformers model emit ``tapeout::Attention``, with no code per architecture.

Nothing that changes attention is dropped. Options of the attention interface are an allow-list, and a model with
another one (a position bias) is refused. Windows are read from the mask that transformers makes, which is what its own
attention applies, and a mask that is not causal with at most a window is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from tapeout.errors import ExportError
from tapeout.operators import attention
from tapeout.operators.attention.interface import attention_replaced
from tapeout.operators.operator import TracedState, Tracer

# Options of transformers' attention interface that do not change what attention computes outside training.
HARMLESS = frozenset(
    {
        "cache_position",
        "dropout",  # modules pass 0 in eval mode
        "logits_to_keep",
        "output_attentions",
        "output_hidden_states",
        "position_ids",  # rotary embeddings are applied before the interface is called
        "return_dict",
        "sliding_window",  # of flash attention; the mask says the same
        "use_cache",
    }
)
MASK_QUERIES = 9  # query positions at which a mask is read, from the first to the last


def attention_traced(model: Any, tracer: Tracer) -> AbstractContextManager[None]:
    """See :meth:`tapeout.operators.operator.Operator.traced`."""
    traced = _TracedAttention(tracer)
    return attention_replaced(model, traced.attention, traced.make_mask)


class _TracedAttention:
    """The attention and mask functions that the model calls while it is traced."""

    def __init__(self, tracer: Tracer) -> None:
        self.tracer = tracer
        self.windows: dict[int, int] = {}  # of each call; 0: none
        self.masks: list[tuple[torch.Tensor, int]] = []  # made in the first run, with their windows

    def make_mask(
        self, batch_size: int, q_length: int, kv_length: int, *, mask_function: Callable[..., Any], **_: Any
    ) -> torch.Tensor | None:
        """transformers' mask interface. In the first run each mask stands for its window; later ones need no mask."""
        if self.tracer.emits:
            return None
        made = torch.ones(batch_size, 1, q_length, kv_length, dtype=torch.bool)
        self.masks.append((made, _window(mask_function, self.tracer.positions)))
        return made

    def attention(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        softcap: float | None = None,
        is_causal: bool | None = None,
        s_aux: torch.Tensor | None = None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        """transformers' attention interface: ``query [B, heads, S, D]`` in, ``[B, S, heads, E]`` of values out."""
        call, head_size = self.tracer.calls, query.shape[3]
        name = f"attention {call} ({type(module).__name__})"
        _refuse_unknown(name, options)
        if s_aux is not None and softcap:
            raise ExportError(
                f"{name} has sinks and a soft cap",
                expected="attention with one of them at most",
                remedy="choose another decoder",
            )
        if not self.tracer.emits:
            causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
            self.windows[call] = self._window_of(attention_mask, name, causal)
        attributes = {
            "scale": float(scaling if scaling is not None else head_size**-0.5),
            "softcap": float(softcap or 0.0),
            "window": self.windows[call],
        }
        if self.tracer.unique("key") != "key":
            raise ExportError(
                f"a layer calls the attention interface twice ({type(module).__name__})",
                expected="one attention in a layer",
                remedy="choose another decoder; differential attention is not supported",
            )
        parts = {"key": key, "value": value}
        kept = [TracedState(part, (int(x.shape[1]), 0, int(x.shape[3])), grows=2) for part, x in parts.items()]
        inputs = [query, key, value, *([self.tracer.mask] if self.tracer.emits else [])]
        operator = attention.OPERATOR if s_aux is None else attention.WITH_SINKS
        inputs += [] if s_aux is None else [s_aux]
        output = self.tracer.node(operator, inputs, attributes, kept, query.shape[2], value.shape[3])
        return output.transpose(1, 2).contiguous(), None  # as transformers' own functions give it

    def _window_of(self, mask: torch.Tensor | None, name: str, causal: bool) -> int:
        """The window of the mask that an attention gets. Without a mask, transformers' attention is plainly causal."""
        known = next((window for made, window in self.masks if mask is not None and _is_whole(mask, made)), None)
        if known is not None:
            return known
        if mask is None and causal:
            return 0
        raise ExportError(
            f"{name} {'is not causal' if mask is None else 'gets a mask that transformers did not make'}",
            expected="causal attention, with a sliding window or without",
            remedy="choose a causal decoder; bidirectional attention, attention to tokens that an indexer chose and "
            "position biases (ALiBi) are not supported",
        )


def _is_whole(mask: torch.Tensor, made: torch.Tensor) -> bool:
    """Whether a mask is one that was made, or a slice of all of it."""
    return mask.data_ptr() == made.data_ptr() and mask.shape == made.shape and mask.dtype == made.dtype


def _refuse_unknown(name: str, options: dict[str, Any]) -> None:
    unknown = sorted(key for key, given in options.items() if given is not None and given is not False)
    unknown = [key for key in unknown if key not in HARMLESS]
    if unknown or options.get("dropout"):
        raise ExportError(
            f"{name} passes {', '.join(unknown or ['dropout'])} to transformers' attention interface",
            expected="attention with a scale, a soft cap, sinks and a sliding window, and nothing else",
            remedy="choose another decoder; position biases are not supported",
        )


def _window(allowed: Callable[..., Any], positions: int) -> int:
    """The sliding window of a mask function of transformers, 0 if it lets a query see all positions before it.

    A query sees itself and ``window - 1`` positions before it. The function is read at queries from the first to the
    last position, over all keys.
    """
    keys = torch.arange(positions)
    # of one entry and one head; keys after the query are read, too
    queries = sorted({round(i * (positions - 1) / (MASK_QUERIES - 1)) for i in range(MASK_QUERIES)} | {1 % positions})
    zero = torch.tensor(0)
    try:
        seen = [
            torch.as_tensor(allowed(zero, zero, torch.tensor(query), keys)).broadcast_to(keys.shape)
            for query in queries
        ]
    except (IndexError, RuntimeError) as error:
        raise _unsupported_mask("depends on more than positions") from error
    window = int(seen[-1].sum())
    windowed = [(keys <= query) & (keys > query - window) for query in queries]
    if not all(torch.equal(mask, expected) for mask, expected in zip(seen, windowed, strict=True)):
        raise _unsupported_mask("is not a causal band")
    return 0 if window == positions else window


def _unsupported_mask(reason: str) -> ExportError:
    return ExportError(
        f"the attention mask {reason}",
        expected="causal attention, with a sliding window or without",
        remedy="choose a causal decoder; chunked, bidirectional and prefix attention are not supported",
    )
